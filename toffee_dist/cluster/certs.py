"""Certificates for a cluster: its own authority, and an identity each for scheduler, workers and client."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from toffee_dist.errors import ConfigError

ROLES = ("scheduler", "worker", "client")
# A hundred years; the calendar of certificates ends in 9999.
MAX_DAYS = 36_500
# The first part may be a star, which stands for one part.
_NAME = re.compile(
    r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*"
)


def write_certificates(
    out: Path, hosts: Sequence[str] = ("127.0.0.1", "localhost"), days: int = 365
) -> list[Path]:
    """Make a new authority, and a certificate and key for every role: the whole set, or on failure nothing.

    Parameters
    ----------
    out
        A folder without certificates. It gets ``ca.pem``, ``ca-key.pem``, ``<role>.pem`` and
        ``<role>-key.pem``; keys can be read by their owner only.
    hosts
        Names and addresses that the certificates are for.
    days
        How long they are valid, at most `MAX_DAYS`.
    """
    if not 1 <= days <= MAX_DAYS:
        raise ConfigError("days of a certificate", got=days, allowed=f"1 to {MAX_DAYS:,}")
    if any((out / f"{name}.pem").exists() for who in ("ca", *ROLES) for name in (who, f"{who}-key")):
        raise ConfigError(
            "folder for certificates",
            got=f"{out}, which has some",
            allowed="a new folder",
            remedy="To replace them, make a second set and change over (docs/operations.md).",
        )
    names = [_host(host) for host in hosts]
    made = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True, mode=0o700)
        # On the same file system, also where the folder itself is a mount.
        stage = Path(tempfile.mkdtemp(prefix=".certs-", dir=out))
    except OSError as error:
        raise ConfigError(
            "folder for certificates", got=f"{out}: {error.strerror}", allowed="a place to write"
        ) from None
    moved: list[Path] = []
    try:
        written = _write_set(stage, names, days)
        # The certificate of the authority last: it says that the others are there.
        for path in reversed(written):
            moved.append(out / path.name)
            path.rename(out / path.name)
        stage.rmdir()
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True)
        shutil.rmtree(stage, ignore_errors=True)
        if made:
            out.rmdir()
        raise
    return [out / path.name for path in written]


def _write_set(out: Path, names: Sequence[x509.GeneralName], days: int) -> list[Path]:
    """Write all files into an empty folder; return them, that of the authority first."""
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = _name("toffee cluster authority")
    ca = (
        _builder(ca_name, ca_name, ca_key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(ca=True), critical=True)
        .add_extension(_authority(ca_key), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    written = [_write_certificate(out / "ca.pem", ca), _write_key(out / "ca-key.pem", ca_key)]
    for role in ROLES:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(_name(f"toffee {role}"), ca_name, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(ca=False), critical=True)
            # Workers listen to each other and call the scheduler: everybody is both.
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(_authority(ca_key), critical=False)
            .sign(ca_key, hashes.SHA256())
        )
        written += [
            _write_certificate(out / f"{role}.pem", certificate),
            _write_key(out / f"{role}-key.pem", key),
        ]
    return written


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Clocks of machines differ a little.
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    """Say with which key a certificate is signed; strict verifiers want it of every one."""
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not _NAME.fullmatch(host):
        raise ConfigError(
            "host of a certificate",
            got=repr(host),
            allowed="an address, or a name of letters, digits, hyphens and dots",
            remedy="Names with other letters have an ASCII form, such as xn--bcher-kva.example.",
        )
    return x509.DNSName(host)


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


def _write_certificate(path: Path, certificate: x509.Certificate) -> Path:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> Path:
    # Made with its mode: there is no moment at which others could read it.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "wb") as stream:
        stream.write(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
    return path
