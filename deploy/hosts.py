"""A cluster of several hosts on one Linux machine, with TLS: for trying a deployment out, and for its tests.

    python deploy/hosts.py --workers 3 -- toffee embed edges/ --out vectors {cluster}
    python deploy/hosts.py --workers 3 --cut 20 -- python jobs/nightly.py jobs/nightly.toml {cluster}

Every host is a network namespace with its own address and name; a bridge in a namespace of its own joins
them, so that the machine's own network is never touched. Files are those of the machine: a disk that all
hosts share. `{cluster}` becomes the options that lead to the scheduler. `--cut 20` cuts the first worker's
host off after 20 seconds. Needs iproute2, util-linux, and root or another who may make namespaces. Run by
`make cluster-test` (tests/deploy/test_hosts.py), with an S3 service on a host of its own.

Everything ends with this process, even when it is killed: namespaces have no names and live as long as their
processes, and those die with their parent.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toffee_dist.cluster.certs import write_certificates

DEPLOY = Path(__file__).parent
# A network for documentation (RFC 5737): no real one is meant.
NETWORK = "198.51.100"
SCHEDULER_PORT = 8786
TOOLS = ("ip", "unshare", "nsenter", "setpriv", "hostname")
# Seconds for a process to start, and to end.
START, END = 60.0, 15.0


def why_not() -> str:
    """Return why this machine can make no hosts; nothing where it can."""
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"{tool} is not installed (iproute2 and util-linux have these tools)"
    allowed = subprocess.run(
        ["unshare", "--net", "--uts", "ip", "link", "add", "probe", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if allowed.returncode == 0 else f"no namespaces for us: {allowed.stderr.strip()}"


@dataclass
class Host:
    """A machine of the network: its name, its address, the process that keeps it, and what runs on it."""

    name: str
    address: str
    keeper: subprocess.Popen[bytes]
    processes: list[subprocess.Popen[Any]] = field(default_factory=list)

    @property
    def inside(self) -> list[str]:
        """What to put before a command for it to run there, and to end with us."""
        enter = ["nsenter", f"--target={self.keeper.pid}", "--net", "--uts"]
        return ["setpriv", "--pdeathsig=KILL", *enter, "--"]

    def start(
        self, *command: str, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command; it is ended with the host."""
        process = subprocess.Popen(
            [*self.inside, *command],
            env=os.environ | (environment or {}),
            start_new_session=True,
            **options,
        )
        self.processes.append(process)
        return process

    def run(self, *command: str) -> None:
        """Run a command of the set-up."""
        subprocess.run([*self.inside, *command], check=True, capture_output=True, timeout=START)

    def stop(self) -> None:
        """End what runs here, then the host."""
        running = [process for process in self.processes if process.poll() is None]
        for process in running:
            os.killpg(process.pid, 15)
        until = time.monotonic() + END
        for process in running:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait(END)
        self.keeper.kill()
        self.keeper.wait(END)


class Network:
    """Hosts, and the bridge that joins them."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self.switch = _make_host("switch", "")
        self.switch.run("ip", "link", "add", "bridge", "type", "bridge")
        self.switch.run("ip", "link", "set", "bridge", "up")

    def add(self, name: str) -> Host:
        """Make a host and plug it in."""
        host = _make_host(name, f"{NETWORK}.{len(self.hosts) + 1}")
        self.hosts[name] = host
        port, switch = _port(name), str(self.switch.keeper.pid)
        host.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
        self.switch.run("ip", "link", "set", port, "master", "bridge", "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        return host

    def cut(self, name: str) -> None:
        """Pull a host's plug at the switch: nobody is told, packets just go nowhere."""
        self.switch.run("ip", "link", "set", _port(name), "down")

    def mend(self, name: str) -> None:
        """Put the plug back."""
        self.switch.run("ip", "link", "set", _port(name), "up")

    def stop(self) -> None:
        """End every host."""
        with ExitStack() as stack:
            for host in (self.switch, *self.hosts.values()):
                stack.callback(host.stop)


def _port(name: str) -> str:
    # Names of interfaces have 15 letters at the most.
    return f"to-{name}"[:15]


def _make_host(name: str, address: str) -> Host:
    keep = [
        "setpriv",
        "--pdeathsig=KILL",
        "unshare",
        "--net",
        "--uts",
        "sh",
        "-c",
        "echo; exec sleep infinity",
    ]
    keeper = subprocess.Popen(keep, stdout=subprocess.PIPE, start_new_session=True)
    assert keeper.stdout is not None
    # Its line says that the namespaces are there.
    if not keeper.stdout.readline():
        raise OSError(f"host {name} cannot be made: {why_not()}")
    keeper.stdout.close()
    host = Host(name, address, keeper)
    host.run("hostname", name)
    host.run("ip", "link", "set", "lo", "up")
    return host


@contextmanager
def network() -> Iterator[Network]:
    """Give a network without hosts; whatever happens, nothing of it stays."""
    made = Network()
    try:
        yield made
    finally:
        made.stop()


@dataclass
class Cluster:
    """A scheduler, workers on hosts of their own, and a host for the client."""

    network: Network
    certificates: Path
    environment: dict[str, str]
    logs: Path

    @property
    def address(self) -> str:
        """Where the scheduler is."""
        return f"tls://{self.network.hosts['scheduler'].address}:{SCHEDULER_PORT}"

    @property
    def client(self) -> Host:
        """Where jobs are started."""
        return self.network.hosts["client"]

    @property
    def options(self) -> list[str]:
        """What leads `toffee` here."""
        names = {"ca": "ca.pem", "cert": "client.pem", "key": "client-key.pem"}
        files = [f"--tls-{name}={self.certificates / file}" for name, file in names.items()]
        return [f"--mode={self.address}", *files]

    def start_scheduler(self) -> subprocess.Popen[Any]:
        """Start the scheduler on its host."""
        host = self.network.hosts["scheduler"]
        address = f"--host=tls://{host.address}:{SCHEDULER_PORT}"
        return self._start(host, "scheduler", address, "--no-dashboard", "--dashboard-address=127.0.0.1:0")

    def add_worker(self, name: str) -> subprocess.Popen[Any]:
        """Start a worker on a new host."""
        host = self.network.add(name)
        options = [f"--host={host.address}", "--nthreads=1", "--preload-nanny=toffee_dist.cluster.retire"]
        return self._start(host, "worker", self.address, *options, "--no-dashboard")

    def _start(self, host: Host, program: str, *arguments: str) -> subprocess.Popen[Any]:
        files = {"ca-file": "ca.pem", "cert": f"{program}.pem", "key": f"{program}-key.pem"}
        tls = [f"--tls-{name}={self.certificates / file}" for name, file in files.items()]
        command = [sys.executable, "-m", "dask", program, *arguments, *tls]
        with open(self.logs / f"{host.name}.log", "ab") as log:
            return host.start(*command, environment=self.environment, stdout=log, stderr=log)


def read_environment() -> dict[str, str]:
    """Return the environment of every process of a cluster: deploy/worker.env, and where dask.yaml is."""
    lines = (DEPLOY / "worker.env").read_text().splitlines()
    pairs = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {**pairs, "DASK_CONFIG": str(DEPLOY / "dask.yaml")}


def start_cluster(
    network: Network, workers: int, folder: Path, environment: Mapping[str, str] | None = None
) -> Cluster:
    """Start a cluster on `workers` + 2 new hosts of a network; certificates and logs are in `folder`."""
    scheduler = network.add("scheduler")
    network.add("client")
    certificates = folder / "certificates"
    # Dask checks the authority, not the name: workers may be added.
    write_certificates(certificates, [scheduler.address], days=1)
    made = Cluster(network, certificates, {**read_environment(), **(environment or {})}, folder)
    made.start_scheduler()
    for number in range(1, workers + 1):
        made.add_worker(f"worker-{number}")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command on a cluster; return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="hosts with a worker each")
    parser.add_argument("--cut", type=float, metavar="SECONDS", help="cut worker-1 off after this")
    parser.add_argument("command", nargs="+", help="what the client runs; {cluster} becomes its options")
    given = parser.parse_args(arguments)
    if reason := why_not():
        print(f"Error: no hosts on this machine: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder, network() as net:
        made = start_cluster(net, given.workers, Path(folder))
        words = [part for word in given.command for part in (made.options if word == "{cluster}" else [word])]
        if given.cut is not None:
            timer = threading.Timer(given.cut, made.network.cut, ["worker-1"])
            timer.daemon = True
            timer.start()
        return made.client.start(*words, environment=made.environment).wait()


if __name__ == "__main__":
    sys.exit(main())
