"""A Debian system in a folder, made by debootstrap and kept for the next time, and one that is booted.

All of it needs root. What is fetched comes from Debian's mirror (debootstrap's own choice, or DEBIAN_MIRROR)
and, for Python, from where pip takes packages; the system itself fetches nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.harness import DEPLOY, ROOT

KEPT = ROOT / "build" / "debian"
PACKAGES = ("python3", "python3-venv", "systemd", "systemd-sysv", "dbus")
SECONDS = 600.0


def why_not(*programs: str) -> str:
    """Return why this machine cannot make such a system; empty where it can."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [name for name in ("debootstrap", *programs) if shutil.which(name) is None]
    return f"{', '.join(absent)}: not installed" if absent else ""


def run(*command: str | Path, **options: str | Path) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return str(done.stdout)


def suite() -> str:
    """Return the name of this machine's release, which is that of the system."""
    lines = Path("/etc/os-release").read_text().splitlines()
    return next(line.partition("=")[2].strip('"') for line in lines if line.startswith("VERSION_CODENAME="))


def make_base(packages: Sequence[str] = PACKAGES) -> Path:
    """Return an archive of a small system with these packages."""
    digest = hashlib.sha256(" ".join((suite(), *packages)).encode()).hexdigest()[:12]
    archive = KEPT / f"base-{digest}.tar"
    if archive.exists():
        return archive
    KEPT.mkdir(parents=True, exist_ok=True)
    folder = KEPT / f"{digest}.{os.getpid()}"
    mirror = [os.environ["DEBIAN_MIRROR"]] if os.environ.get("DEBIAN_MIRROR") else []
    try:
        words = ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}", suite()]
        run(*words, folder, *mirror)
        for waste in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale"):
            shutil.rmtree(folder / waste, ignore_errors=True)
        partial = archive.with_suffix(".part")
        run("tar", "--create", "--numeric-owner", f"--directory={folder}", f"--file={partial}", ".")
        partial.rename(archive)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return archive


def make_site(version: str) -> Path:
    """Return a folder with everything of deploy/requirements.lock, for one version of Python."""
    lock = DEPLOY / "requirements.lock"
    digest = hashlib.sha256(lock.read_bytes() + version.encode()).hexdigest()[:12]
    folder = KEPT / f"site-{digest}"
    if folder.exists():
        return folder
    partial = KEPT / f"site-{digest}.{os.getpid()}"
    try:
        run(
            *(sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps"),
            *("--only-binary=:all:", f"--python-version={version}", f"--target={partial}", "-r", lock),
        )
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def install(root: Path) -> None:
    """Install what the documentation says: /opt/toffee with an environment, deploy/ and jobs/, and a user."""
    run("tar", "--extract", "--numeric-owner", f"--directory={root}", f"--file={make_base()}")
    run("chroot", root, "useradd", "--system", "--user-group", "--no-create-home", "toffee")
    run("chroot", root, "/usr/bin/python3", "-m", "venv", "--without-pip", "/opt/toffee")
    [packages] = (root / "opt" / "toffee" / "lib").glob("python3.*/site-packages")
    site = make_site(packages.parent.name.removeprefix("python"))
    shutil.copytree(site, packages, dirs_exist_ok=True, symlinks=True)
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "toffee_dist", packages / "toffee_dist", ignore=unwanted)
    for name in ("deploy", "jobs"):
        shutil.copytree(ROOT / name, root / "opt" / "toffee" / name, ignore=unwanted)


@dataclass
class Machine:
    """A booted system: its folder, and its first process as we see it."""

    root: Path
    leader: int

    def command(self, *words: str) -> list[str]:
        """What runs a command there, as its root; nothing of our environment goes with it."""
        own = ["env", "--ignore-environment", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
        return ["nsenter", f"--target={self.leader}", "--all", "--", *own, *words]

    def run(self, *words: str, expected: int | None = 0) -> str:
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=120, check=False)
        assert expected in (None, done.returncode), f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Return what systemd says of a unit."""
        lines = self.run("systemctl", "show", unit, *(f"--property={name}" for name in names)).splitlines()
        return dict(line.split("=", 1) for line in lines)


@contextmanager
def boot(root: Path) -> Iterator[Machine]:
    """Boot a system with systemd as its first process, in namespaces of its own but for the network."""
    with open(root.parent / "console.log", "wb") as log:
        process = subprocess.Popen(
            ["systemd-nspawn", f"--directory={root}", "--register=no", "--keep-unit", "--boot"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        machine, until = None, time.monotonic() + 60
        asked = ("systemctl", "is-system-running")
        while machine is None or "running" not in machine.run(*asked, expected=None):
            assert process.poll() is None, (root.parent / "console.log").read_text(errors="replace")
            assert time.monotonic() < until, "the system does not boot"
            time.sleep(0.2)
            children = psutil.Process(process.pid).children()
            if children and children[0].name() == "systemd":
                machine = Machine(root, children[0].pid)
        yield machine
    finally:
        if process.poll() is None:
            # The first process of the system takes this for "power off".
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
