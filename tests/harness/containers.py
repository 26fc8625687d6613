"""Images and containers by buildah and podman; their store, networks and settings go with the test."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.harness import DEPLOY, ROOT, debian

IMAGE, BASE = "localhost/toffee:0.1.0", "localhost/toffee-base:latest"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
SECONDS = 600
# runc takes any arrangement of control groups; more files than we may open ourselves we cannot allow.
SETTINGS = """[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
log_driver = "k8s-file"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
tmp_dir = "{folder}/tmp"
[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
"""
STORAGE = '[storage]\ndriver = "{driver}"\ngraphroot = "{folder}/store"\nrunroot = "{folder}/run"\n'


def why_not() -> str:
    """Return why this machine cannot build and run images; empty where it can."""
    return debian.why_not("buildah", "podman", "runc", "podman-compose", "iptables")


@dataclass
class Engine:
    """A folder with images and containers."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        own = {"CONTAINERS_CONF": "containers.conf", "CONTAINERS_STORAGE_CONF": "storage.conf", "TMPDIR": "."}
        return os.environ | {name: str(self.folder / file) for name, file in own.items()}

    def run(self, *words: str | Path, expected: int | None = 0, where: Path | None = None) -> str:
        done = subprocess.run(
            [str(word) for word in words],
            env=self.environment,
            cwd=where,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert expected in (None, done.returncode), f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def podman(self, *words: str | Path, expected: int | None = 0) -> str:
        return self.run("podman", *words, expected=expected)


@contextmanager
def engine() -> Iterator[Engine]:
    """Give an engine without images; whatever happens, nothing of it stays."""
    # Gigabytes: not where temporary files are memory.
    folder = Path(tempfile.mkdtemp(prefix="containers-", dir="/var/tmp"))
    made = Engine(folder)
    (folder / "containers.conf").write_text(SETTINGS.format(folder=folder))
    # A container in a container may have no overlay; then every layer is a copy.
    for driver in ("overlay", "vfs"):
        (folder / "storage.conf").write_text(STORAGE.format(folder=folder, driver=driver))
        if "overlay" in made.run("buildah", "info", expected=None) or driver == "vfs":
            break
    try:
        yield made
    finally:
        made.podman("rm", "--all", "--force", "--time=5", expected=None)
        made.podman("network", "prune", "--force", expected=None)
        made.podman("system", "reset", "--force", expected=None)
        with open("/proc/mounts") as mounts:
            below = [line.split()[1] for line in mounts if line.split()[1].startswith(f"{folder}/")]
        for place in sorted(below, reverse=True):
            subprocess.run(["umount", place], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def build(made: Engine) -> None:
    """Build the base and, on it, the image."""
    made.run("buildah", "from", "--name=base", "scratch")
    made.run("buildah", "add", "--quiet", "base", debian.make_base(("python3", "python3-venv")), "/")
    made.run("buildah", "config", "--env=PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "base")
    made.run("buildah", "commit", "--quiet", "--rm", "base", BASE)
    # Where pip finds packages here is nobody else's matter: lent to the build, and not in the image.
    settings = made.folder / "pip.conf"
    settings.write_text(f"[global]\ncert = {CERTIFICATES}\n")
    lent = [f"--volume={CERTIFICATES}:{CERTIFICATES}:ro", f"--volume={settings}:/etc/pip.conf:ro"]
    made.run(
        *("buildah", "bud", "--isolation=chroot", "--network=host", "--format=docker", *lent),
        *(f"--build-arg=BASE={BASE}", f"--file={DEPLOY / 'Dockerfile'}", f"--tag={IMAGE}", ROOT),
    )
