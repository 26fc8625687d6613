"""TLS: who has no certificate of the cluster's authority does not get in; who has one does the job."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cryptography import x509

from tests import clusters
from tests.clusters import digests, job, write_edges
from toffee_dist.certs import ROLES, write_certificates
from toffee_dist.errors import ConfigError, UnfinishedError
from toffee_dist.pipeline import start_run
from toffee_dist.runtime import Tls, cluster

pytestmark = pytest.mark.slow


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
