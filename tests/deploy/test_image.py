"""The image, built and run, and the services of Compose in containers: buildah, podman and podman-compose.

`make image-test` installs these from Debian's packages and runs this file; needs root.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness import DEPLOY, containers
from tests.harness.clusters import digests, slow_slices, write_edges
from tests.harness.commands import wait_until
from tests.harness.containers import BASE, IMAGE, Engine
from toffee_dist.storage.runs import find_run

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(1200)]

# As Compose and Kubernetes run it. Podman's timers of health checks need systemd: they are run by hand.
STRICT = ("--rm", "--no-healthcheck", "--read-only", "--cap-drop=all", "--security-opt=no-new-privileges")
OPTIONS = ("--rank=8", "--freqs=all", "--trajectory-by=als", "--outputs=embedding,trajectory")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    if reason := containers.why_not():
        pytest.skip(f"no containers: {reason}")
    with containers.engine() as made:
        started = time.monotonic()
        containers.build(made)
        print(f"built in {time.monotonic() - started:.0f} s")
        yield made
    assert not made.folder.exists()


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edges")
    write_edges(folder / "edges.parquet", nodes=80, events=1500)
    for path in (folder, folder.parent, folder.parent.parent):
        path.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def threads(engine: Engine, edges: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the run on threads, in the image: its libraries are the lock's, not ours."""
    out = tmp_path_factory.mktemp("threads")
    out.chmod(0o777)
    words = ("toffee", "embed", "/data/edges", "--out=/out/vectors", "--mode=threads", *OPTIONS)
    volumes = (f"--volume={edges}:/data/edges:ro", f"--volume={out}:/out")
    engine.podman("run", *STRICT, "--network=none", "--tmpfs=/tmp", *volumes, IMAGE, *words)
    return digests(find_run(out / "vectors").path)


def test_the_image(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    [image] = json.loads(engine.podman("image", "inspect", IMAGE))
    [base] = json.loads(engine.podman("image", "inspect", BASE))
    with capsys.disabled():
        sizes = {"image_bytes": image["Size"], "base_bytes": base["Size"]}
        print("\n" + json.dumps(sizes))
    assert image["Config"]["User"] == "10001:10001"
    assert (image.get("Healthcheck") or image["HealthCheck"])["Test"] == [
        "CMD",
        "python",
        "/opt/toffee/health.py",
    ]
    # Nothing of the machine that built it: no address, no certificate, no key.
    assert "pip.conf" not in json.dumps(image)
    run = ("run", *STRICT, "--network=none", "--tmpfs=/tmp", IMAGE)
    assert engine.podman(*run, "sh", "-c", "cat /etc/pip.conf 2>/dev/null; find /certs -type f") == ""
    probe = "id -u; for f in / /opt/toffee /data /tmp; do touch $f/x 2>/dev/null && echo $f; done; true"
    assert engine.podman(*run, "sh", "-c", probe).split() == ["10001", "/tmp"]
    demo = engine.podman(*run, "toffee", "demo", "--out=/tmp/demo")
    assert "report.html" in demo
    # A job has nothing that could be asked, and says so.
    engine.podman("run", *STRICT, "--network=none", IMAGE, "python", "/opt/toffee/health.py")


def test_what_is_in_it(engine: Engine, tmp_path: Path) -> None:
    """The list that the build made: valid, complete, and the versions of the lock."""
    text = engine.podman("run", *STRICT, "--network=none", IMAGE, "cat", "/opt/toffee/sbom.json")
    found = json.loads(text)
    validator = pytest.importorskip("cyclonedx.validation.json")
    schema = pytest.importorskip("cyclonedx.schema")
    assert validator.JsonStrictValidator(schema.SchemaVersion.V1_5).validate_str(text) is None
    python = {
        one["purl"].removeprefix("pkg:pypi/").split("@")[0]: one["version"]
        for one in found["components"]
        if one["purl"].startswith("pkg:pypi/")
    }
    lock = dict(re.findall(r"^([\w.-]+)==(\S+)", (DEPLOY / "requirements.lock").read_text(), re.MULTILINE))
    assert {name.replace("_", "-"): version for name, version in lock.items()}.items() <= python.items()
    debian = [one for one in found["components"] if one["purl"].startswith("pkg:deb/")]
    assert {"libc6", "python3.11-minimal"} <= {one["name"] for one in debian} or len(debian) > 50
    assert found["metadata"]["component"]["name"] == "toffee_dist"


def make_compose(folder: Path, edges: Path, slow: Path) -> None:
    """Write deploy/compose.yaml for podman-compose 1.0: what it does not know is left out, and named here."""
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    # It puts a service without a network on the network of the others, and fails.
    del services["certs"]["network_mode"]
    for name, service in services.items():
        service.pop("build", None)
        if name in ("certs", "scheduler", "worker", "job"):
            service["image"] = IMAGE
    # MinIO's image is in a registry: another S3 server takes its name, from the packages of our tests.
    site = sysconfig.get_paths()["purelib"]
    keys = {"AWS_ACCESS_KEY_ID": "${STORE_USER}", "AWS_SECRET_ACCESS_KEY": "${STORE_PASSWORD}"}
    store = {
        "image": BASE,
        "environment": {**keys, "PYTHONPATH": "/site", "AWS_DEFAULT_REGION": "us-east-1"},
        "volumes": [f"{site}:/site:ro"],
        "networks": ["cluster"],
    }
    server = ["python3", "-m", "moto.server", "-H", "0.0.0.0", "-p", "9000"]
    bucket = (
        "import boto3, time\nfor _ in range(60):\n  try:\n    boto3.client('s3', endpoint_url="
        "'http://minio:9000').create_bucket(Bucket='toffee'); break\n  except Exception: time.sleep(1)"
    )
    services["minio"] = {**store, "command": server}
    services["bucket"] = {**store, "command": ["python3", "-c", bucket]}
    services["worker"]["volumes"].append(f"{slow}:/slow:ro")
    services["worker"]["environment"]["DASK_DISTRIBUTED__WORKER__PRELOAD"] = '["/slow/slow.py"]'
    (folder / "compose.yaml").write_text(yaml.safe_dump(compose))
    example = (DEPLOY / "compose.env.example").read_text()
    (folder / ".env").write_text(example.replace("EDGES=./edges", f"EDGES={edges}"))


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the store borrows packages of 3.11")
def test_compose(engine: Engine, edges: Path, threads: dict[str, str], tmp_path: Path) -> None:
    """Scheduler, two workers, a store, TLS; a worker's container is killed while it solves."""
    folder, slow = tmp_path / "toffee", tmp_path / "slow"
    for made in (folder, slow):
        made.mkdir()
    slow_slices(slow / "slow.py", 0.3)
    for path in (slow, tmp_path, tmp_path.parent, slow / "slow.py"):
        path.chmod(0o755)
    make_compose(folder, edges, slow)

    def compose(*words: str) -> str:
        return engine.run("podman-compose", *words, where=folder)

    def exec_python(container: str, code: str, expected: int | None = 0) -> str:
        return engine.podman("exec", container, "python3", "-c", code, expected=expected)

    compose("up", "--detach", "certs")
    engine.podman("wait", "toffee_certs_1")
    compose("up", "--detach", "minio", "bucket", "scheduler", "worker")
    try:
        engine.podman("wait", "toffee_bucket_1")
        # The image's own check, with the scheduler's certificate.
        health = ("exec", "toffee_scheduler_1", "python", "/opt/toffee/health.py")
        wait_until(lambda: "Scheduler" in engine.podman(*health, expected=None), 60)
        engine.podman("healthcheck", "run", "toffee_scheduler_1")
        engine.podman("exec", "toffee_worker_1", "python", "/opt/toffee/health.py")
        command = ["podman-compose", "run", "--rm", "job"]
        service = yaml.safe_load((folder / "compose.yaml").read_text())["services"]["job"]["command"]
        with open(tmp_path / "job.log", "wb") as log:
            job = subprocess.Popen(
                [*command, *service, *OPTIONS, "--workers=2"],
                env=engine.environment,
                cwd=folder,
                stdout=log,
                stderr=log,
            )
        try:
            count = (
                "import boto3; found = boto3.client('s3', endpoint_url='http://minio:9000').list_objects_v2("
                "Bucket='toffee').get('Contents', []); print(sum('/slices/0' in f['Key'] for f in found))"
            )
            wait_until(lambda: int(exec_python("toffee_minio_1", count, None) or 0) >= 3, 120)
            engine.podman("kill", "--signal=KILL", "toffee_worker_1")
            assert job.wait(240) == 0, (tmp_path / "job.log").read_text()[-3000:]
        finally:
            job.kill()
            job.wait(10)
        copy = (
            "import boto3, pathlib; s3 = boto3.client('s3', endpoint_url='http://minio:9000')\n"
            "for page in s3.get_paginator('list_objects_v2').paginate(Bucket='toffee'):\n"
            "  for found in page['Contents']:\n"
            "    path = pathlib.Path('/tmp') / found['Key']; path.parent.mkdir(parents=True, exist_ok=True)\n"
            "    s3.download_file('toffee', found['Key'], str(path))"
        )
        exec_python("toffee_minio_1", copy)
        engine.podman("cp", "toffee_minio_1:/tmp/vectors", tmp_path / "vectors")
        assert digests(find_run(tmp_path / "vectors").path) == threads
    finally:
        compose("down", "--timeout=5")
        shutil.rmtree(folder, ignore_errors=True)
