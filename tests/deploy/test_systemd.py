"""The service and timer of deploy/systemd/ under a running systemd: Debian, booted in a container.

`make systemd-test` installs debootstrap and systemd-nspawn and runs these; needs root.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import DEPLOY, debian, s3
from tests.harness.clusters import digests, free_port
from tests.harness.commands import wait_until
from tests.harness.debian import Machine
from tests.harness.refreshes import write_day, write_days
from toffee_dist.storage.runs import find_run, list_runs

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(900)]

SERVICE, TIMER = "toffee-refresh.service", "toffee-refresh.timer"
NIGHTLY = """inputs = ["/srv/edges"]
out = "vectors"
rank = 8
last = "28d"
as_of = "2026-02-{day:02d}"
"""
# Tries what the unit must not be able to do; prints what it could.
PROBE = r"""
import ctypes, json, os, socket, sys
libc, user = ctypes.CDLL(None, use_errno=True), os.getuid()
def attempt(name, action):
    try:
        action()
        could.append(name)
    except OSError:
        pass
def call(name, *arguments):
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno())
could, file = [], open("/var/lib/toffee/probe.json", "w")
folders = "/etc /usr /opt/toffee /etc/toffee /srv/edges /var/log /root /home"
for path in [f"{folder}/x" for folder in folders.split()]:
    attempt(f"write {path}", lambda: open(path, "w"))
for path in ("/root", "/home", "/proc/1/environ", "/etc/shadow", "/dev/mem", "/dev/kmsg", "/proc/kcore"):
    attempt(f"read {path}", lambda: os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1))
attempt("see the first process", lambda: os.stat("/proc/1"))
attempt("mount", lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, None))
attempt("another user", lambda: os.setuid(0))
attempt("a set-user-id file", lambda: (open("/tmp/s", "w"), os.chmod("/tmp/s", 0o4755)))
attempt("a raw packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
attempt("the clock", lambda: __import__("time").clock_settime(0, 0))
attempt("the name of the host", lambda: call("sethostname", b"x", 1))
attempt("a kernel setting", lambda: open("/proc/sys/vm/swappiness", "w").write("1"))
attempt("a control group", lambda: os.mkdir("/sys/fs/cgroup/systemd/x"))
attempt("real time", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
attempt("a namespace", lambda: call("unshare", 0x10000000))
json.dump({"could": could, "user": user, "mask": oct(os.umask(0))}, file)
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    if reason := debian.why_not("systemd-nspawn", "nsenter"):
        pytest.skip(f"no booted system: {reason}")
    # A gigabyte: not where temporary files are memory.
    folder = Path(tempfile.mkdtemp(prefix="machine-", dir="/var/tmp"))
    root = folder / "root"
    root.mkdir()
    try:
        debian.install(root)
        # What the unit's first lines say.
        (root / "etc" / "toffee").mkdir(mode=0o755)
        for path in (DEPLOY / "systemd").iterdir():
            shutil.copy(path, root / "etc" / "systemd" / "system")
        # What nobody refers to is forgotten by systemd as soon as it has ended, and with it how.
        keep = "[Unit]\nAfter={}\n[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n"
        (root / "etc" / "systemd" / "system" / "keep.service").write_text(keep.format(SERVICE))
        with debian.boot(root) as made:
            made.run("systemctl", "start", "keep.service")
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def out(machine: Machine) -> Iterator[Path]:
    """The folder of the vectors, and edges of thirty days; every test has its own."""
    edges, out = machine.root / "srv" / "edges", machine.root / "var" / "lib" / "toffee" / "vectors"
    write_days(edges, 0, 30)
    configure(machine, 3)
    yield out
    machine.run("systemctl", "stop", TIMER, SERVICE)
    for unit in (TIMER, SERVICE):
        machine.run("systemctl", "reset-failed", unit, expected=None)
        shutil.rmtree(machine.root / "etc" / "systemd" / "system" / f"{unit}.d", ignore_errors=True)
    for folder in (edges, out, out.with_name("threads")):
        shutil.rmtree(folder, ignore_errors=True)
    (machine.root / "etc" / "toffee" / "storage.env").unlink(missing_ok=True)
    machine.run("systemctl", "daemon-reload")


def configure(machine: Machine, day: int, more: str = "") -> None:
    (machine.root / "etc" / "toffee" / "nightly.toml").write_text(NIGHTLY.format(day=day) + more)


def change(machine: Machine, unit: str, text: str) -> None:
    """Change a line or two of a unit, as `systemctl edit` would."""
    folder = machine.root / "etc" / "systemd" / "system" / f"{unit}.d"
    folder.mkdir()
    (folder / "test.conf").write_text(text)
    machine.run("systemctl", "daemon-reload")


def finish(machine: Machine, code: int = 0, seconds: float = 120) -> dict[str, str]:
    """Wait until the service has ended; return what systemd says of it."""
    names = ("ActiveState", "Job", "ExecMainStatus", "NRestarts", "Result", "ExecMainStartTimestamp")

    def ended() -> dict[str, str] | None:
        found = machine.show(SERVICE, *names)
        over = found["ActiveState"] in ("inactive", "failed") and found.get("Job", "0") in ("", "0")
        return found if over and found["ExecMainStartTimestamp"] else None

    found: dict[str, str] = wait_until(ended, seconds)
    assert found["ExecMainStatus"] == str(code), journal(machine)
    assert found["ActiveState"] == ("failed" if code else "inactive")
    assert "Traceback" not in journal(machine)
    return found


def journal(machine: Machine) -> str:
    return machine.run("journalctl", f"--unit={SERVICE}", "--output=cat", "--no-pager")


def on_threads(machine: Machine, name: str, *options: str) -> Path:
    """Run the same refresh there without systemd; return its run."""
    where = f"/var/lib/toffee/{name}"
    words = ["/opt/toffee/bin/python", "-m", "toffee_dist.cli", "refresh"]
    words += ["--config=/etc/toffee/nightly.toml"]
    machine.run("env", "OPENBLAS_NUM_THREADS=1", *words, f"--out={where}", "--mode=threads", *options)
    return find_run(machine.root / where[1:]).path


def test_the_timer_fires(machine: Machine, out: Path) -> None:
    """A night that the machine slept through is made up for as soon as the timer starts."""
    stamp = machine.root / "var" / "lib" / "systemd" / "timers" / f"stamp-{TIMER}"
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.touch()
    past = time.time() - 3 * 86400
    os.utime(stamp, (past, past))
    # Of the unit itself only the delay, which is a matter of minutes.
    change(machine, TIMER, "[Timer]\nRandomizedDelaySec=0\n")
    machine.run("systemctl", "enable", "--now", TIMER)
    found = finish(machine)
    assert (found["Result"], found["NRestarts"]) == ("success", "0")
    assert digests(find_run(out).path) == digests(on_threads(machine, "threads"))
    timer = machine.show(TIMER, "ActiveState", "LastTriggerUSec", "NextElapseUSecRealtime")
    assert timer["ActiveState"] == "active"
    assert timer["LastTriggerUSec"] not in ("", "n/a")
    # The next one is tonight's, at half past two.
    assert "02:30:00" in timer["NextElapseUSecRealtime"]
    # Vectors are for the user and its group.
    assert find_run(out).path.stat().st_mode & 0o007 == 0


def test_a_limit_that_is_broken_is_not_tried_again(machine: Machine, out: Path) -> None:
    machine.run("systemctl", "start", SERVICE)
    finish(machine)
    published = find_run(out).run_id
    write_day(machine.root / "srv" / "edges", 30, seed=5)
    configure(machine, 4, "min_cosine = 0.99999\n")
    change(machine, SERVICE, "[Service]\nRestartSec=1\n")
    machine.run("systemctl", "start", SERVICE, expected=None)
    found = finish(machine, code=6)
    assert found["Result"] == "exit-code"
    time.sleep(3)
    again = machine.show(SERVICE, "NRestarts", "ActiveState", "ExecMainStatus")
    assert again == {"NRestarts": "0", "ActiveState": "failed", "ExecMainStatus": "6"}
    assert find_run(out).run_id == published
    assert json.loads((out / "refresh.jsonl").read_text().splitlines()[-1])["state"] == "rejected"


def test_a_process_that_is_killed_goes_on(machine: Machine, out: Path) -> None:
    change(machine, SERVICE, "[Service]\nRestartSec=1\n")
    machine.run("systemctl", "start", "--no-block", SERVICE)
    wait_until(lambda: list(out.glob("runs/*/work/job.json")), 60)
    machine.run("systemctl", "kill", "--signal=KILL", SERVICE)
    found = finish(machine)
    assert int(found["NRestarts"]) == 1
    [run] = list_runs(out)
    assert run.complete
    assert digests(run.path) == digests(on_threads(machine, "threads"))


def test_a_store_that_is_lost_is_tried_again(machine: Machine, out: Path) -> None:
    port = free_port()
    lines = [f"{name}={value}" for name, value in s3.environment(port).items()]
    secret = machine.root / "etc" / "toffee" / "storage.env"
    secret.write_text("\n".join([*lines, "AWS_MAX_ATTEMPTS=1"]))
    secret.chmod(0o600)
    configure(machine, 3)
    config = machine.root / "etc" / "toffee" / "nightly.toml"
    config.write_text(config.read_text().replace('"vectors"', f'"s3://{s3.BUCKET}/vectors"'))
    change(machine, SERVICE, "[Service]\nRestartSec=3\n")
    with s3.server() as behind:
        with s3.use(behind) as fs:
            fs.mkdir(s3.BUCKET)
        machine.run("systemctl", "start", "--no-block", SERVICE)
        wait_until(lambda: int(machine.show(SERVICE, "NRestarts")["NRestarts"]) >= 1, 120)
        with s3.proxy(behind, port), s3.use(port) as fs:
            found = finish(machine)
            assert int(found["NRestarts"]) >= 1
            fs.get(f"{s3.BUCKET}/vectors", str(out), recursive=True)
    assert s3.SECRET not in journal(machine)
    assert digests(find_run(out).path) == digests(on_threads(machine, "threads"))


def test_what_the_unit_may_not_touch(machine: Machine, out: Path) -> None:
    (machine.root / "opt" / "toffee" / "probe.py").write_text(PROBE)
    command = "/opt/toffee/bin/python /opt/toffee/probe.py"
    change(machine, SERVICE, f"[Service]\nExecStart=\nExecStart={command}\n")
    machine.run("systemctl", "start", SERVICE)
    finish(machine)
    probe = machine.root / "var" / "lib" / "toffee" / "probe.json"
    found = json.loads(probe.read_text())
    assert found["could"] == []
    assert found["user"] == probe.stat().st_uid != 0
    assert found["mask"] == "0o27"
    # The same, run by root without the unit, could do nearly all of it: the unit makes the difference.
    machine.run(*command.split())
    could = json.loads(probe.read_text())["could"]
    assert {"write /etc/x", "read /etc/shadow", "a namespace", "netlink", "a kernel setting"} & set(could)
