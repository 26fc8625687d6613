"""TLS: who has no certificate of the cluster's authority does not get in; who has one does the job."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from cryptography import x509

from tests.harness import clusters
from tests.harness.clusters import digests, job, write_edges
from toffee_dist.batch.pipeline import start_run
from toffee_dist.cli import main
from toffee_dist.cluster.certs import MAX_DAYS, ROLES, write_certificates
from toffee_dist.cluster.client import Tls, cluster
from toffee_dist.errors import ConfigError, UnfinishedError


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "ours"
    write_certificates(folder)
    return folder


def identity(folder: Path, role: str = "client") -> dict[str, str]:
    return {
        "tls_ca": str(folder / "ca.pem"),
        "tls_cert": str(folder / f"{role}.pem"),
        "tls_key": str(folder / f"{role}-key.pem"),
    }


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.cluster
def test_the_job_runs_with_certificates_only(certificates: Path, tmp_path: Path) -> None:
    edges = write_edges(tmp_path / "edges.parquet", events=2000)
    theirs = tmp_path / "theirs"
    write_certificates(theirs)
    with clusters.cluster(workers=1, certificates=certificates) as running:
        done = start_run(job(edges, tmp_path / "out", mode=running.address, **identity(certificates)))
        expected = start_run(job(edges, tmp_path / "threads"))
        assert digests(done.run.path) == digests(expected.run.path)

        # Without certificates, over TLS and over plain TCP.
        with pytest.raises(ConfigError, match="--tls-ca, --tls-cert and --tls-key"):
            start_run(job(edges, tmp_path / "none", mode=running.address))
        plain = running.address.replace("tls://", "tcp://")
        with pytest.raises(UnfinishedError, match="cannot connect"):
            start_run(job(edges, tmp_path / "plain", mode=plain, wait=3.0))
        # With certificates of another authority.
        with pytest.raises(UnfinishedError, match="cannot connect"):
            start_run(job(edges, tmp_path / "theirs-out", mode=running.address, wait=3.0, **identity(theirs)))

        # A plain worker, and one of another authority: neither is ever seen by the scheduler.
        before = running.workers[0]
        running.add_worker("--no-nanny", address=plain, security=())
        running.add_worker("--no-nanny", security=clusters.security_options(theirs, "worker"))
        files = identity(certificates)
        with cluster(
            running.address, tls=Tls(files["tls_ca"], files["tls_cert"], files["tls_key"])
        ) as client:
            until = time.monotonic() + 8
            while time.monotonic() < until:
                assert len(client.scheduler_info()["workers"]) == 1
                time.sleep(0.5)
        assert before.poll() is None


def test_keys_are_for_their_owner(certificates: Path, tmp_path: Path) -> None:
    for role in (*ROLES, "ca"):
        assert (certificates / f"{role}-key.pem").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="which has some"):
        write_certificates(certificates)


def test_openssl_accepts_every_certificate(certificates: Path) -> None:
    for role in ROLES:
        for purpose in ("sslserver", "sslclient"):
            command = [
                "openssl",
                "verify",
                "-x509_strict",
                "-purpose",
                purpose,
                "-CAfile",
                "ca.pem",
                f"{role}.pem",
            ]
            done = subprocess.run(
                command, cwd=certificates, capture_output=True, text=True, timeout=30, check=False
            )
            assert done.stdout == f"{role}.pem: OK\n", done.stderr
    authority = load(certificates / "ca.pem")
    own = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
    for role in ROLES:
        found = load(certificates / f"{role}.pem").extensions
        signer = found.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
        assert signer == own
        assert found.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest != own


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


@pytest.mark.cluster
@pytest.mark.parametrize("there", [False, True], ids=["new folder", "folder that is there"])
def test_there_is_never_half_a_set(tmp_path: Path, there: bool) -> None:
    # A limit on the size of files stands for a full disk: the second file is one byte too long.
    out = tmp_path / "certs"
    if there:
        out.mkdir()
        (out / "mine").touch()
    program = """
import resource, signal, sys
from pathlib import Path
from toffee_dist.cluster import certs
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
left = int(sys.argv[2])
write = certs._write_key
def fill(path, key):
    global left
    left -= 1
    if left < 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
    return write(path, key)
certs._write_key = fill
certs.write_certificates(Path(sys.argv[1]))
"""
    for whole in range(4):
        command = [sys.executable, "-c", program, str(out), str(whole)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert "File too large" in done.stderr, done.stderr
        assert [path.name for path in tmp_path.rglob("*")] == (["certs", "mine"] if there else [])
    # Nothing stands in the way of the next try.
    assert len(write_certificates(out)) == 8


def test_a_move_that_fails_takes_the_others_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, out = Path.rename, tmp_path / "certs"

    def fail(path: Path, to: Path) -> Path:
        if path.name == "worker.pem":
            raise PermissionError(1, "not permitted")
        return rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(PermissionError):
            write_certificates(out)
    assert not out.exists()
    # Keys of somebody else are not overwritten either.
    out.mkdir()
    (out / "worker-key.pem").write_text("theirs")
    with pytest.raises(ConfigError, match="which has some"):
        write_certificates(out)
    assert [path.name for path in out.iterdir()] == ["worker-key.pem"]


def test_days_of_a_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_certificates(tmp_path / "long", days=MAX_DAYS)
    for days in (0, MAX_DAYS + 1, 3_700_000):
        with pytest.raises(ConfigError, match="days of a certificate"):
            write_certificates(tmp_path / "bad", days=days)
    with pytest.raises(SystemExit) as end:
        main(["certs", str(tmp_path / "bad"), "--days", "3700000"])
    assert end.value.code == 2
    assert "1<=x<=36500" in capsys.readouterr().err
    assert not (tmp_path / "bad").exists()


def test_hosts_of_a_certificate(tmp_path: Path) -> None:
    names = ["10.0.0.5", "fd00::5", "scheduler.example", "*.workers.example", "toffee-scheduler"]
    write_certificates(tmp_path / "good", names)
    certificate = x509.load_pem_x509_certificate((tmp_path / "good" / "scheduler.pem").read_bytes())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in found] == names
    for bad in ("", "two words", "bücher.example", "tls://host:8786", "-host"):
        with pytest.raises(ConfigError, match="host of a certificate"):
            write_certificates(tmp_path / "bad", [bad])
    # Nothing was begun.
    assert not (tmp_path / "bad").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="folder for certificates"):
        write_certificates(tmp_path / "file")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls_cert: got .*nowhere.pem, which cannot be read"):
        Tls.choose(__file__, str(tmp_path / "nowhere.pem"), None)
