r"""A Slurm cluster on this machine, for as long as one command takes: a controller, and node daemons.

    python deploy/slurm/local.py --nodes 2 -- \
        sbatch --wait --nodes=2 --mem=2G --cpus-per-task=1 deploy/slurm/toffee.sbatch

To try a recipe before it goes to the real one. Everything is Slurm's own: munge, slurmctld, one slurmd for
each node; ports, keys and folders of their own end and go with the command. Jobs run as you: root is needed
for nothing but installing, apt-get install munge slurm-wlm (`make slurm-test` does that).
Run by `make slurm-test` (tests/deploy/test_slurm.py), with Slurm 22.05.
"""

from __future__ import annotations

import argparse
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
# Seconds for a daemon to begin, and to end.
START, END = 60.0, 20.0
CONFIG = """ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A job is started again no sooner than its credentials end.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=batch_sched_delay=1,sched_interval=5
ReturnToService=2
JobRequeue=1
KillWait=15
SlurmctldTimeout=30
SlurmdTimeout=30
InactiveLimit=0
MinJobAge=3600
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cores} RealMemory={memory}"


def why_not() -> str:
    """Return why this machine cannot have a Slurm cluster; empty where it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(absent)}: not installed (apt-get install munge slurm-wlm)" if absent else ""


def free_port() -> int:
    """Return a port that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Slurm:
    """A controller and nodes; `environment` leads Slurm's commands here."""

    folder: Path
    nodes: list[str]
    daemons: dict[str, subprocess.Popen[Any]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What a command needs to find this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        """Run one of Slurm's commands; return what it says."""
        done = subprocess.run(
            command,
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            timeout=START,
            check=False,
        )
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def start(self, name: str, *command: str) -> None:
        """Start a daemon, in a session of its own."""
        with open(self.folder / f"{name}.out", "ab") as log:
            self.daemons[name] = subprocess.Popen(
                command, env=os.environ | self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self.start(name, "slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> None:
        """Kill a node: its daemon, and everything that it started, at once and without notice."""
        daemon = self.daemons.pop(name)
        for process in [daemon.pid, *self.find_processes(name)]:
            _kill(process, signal.SIGKILL)
        daemon.wait(END)

    def find_processes(self, node: str | None = None) -> list[int]:
        """Return the processes of jobs, of one node or of all: those that Slurm started, and its own."""
        found = []
        for process in psutil.process_iter():
            try:
                words = process.environ()
                if words.get("SLURM_CONF") != self.environment["SLURM_CONF"]:
                    continue
                name = words.get("SLURMD_NODENAME")
                if name is None and process.name().startswith("slurmstepd"):
                    # Which node it is of, only its log says.
                    logs = {Path(file.path).stem for file in process.open_files()}
                    name = next((each for each in self.nodes if each in logs), None)
            except psutil.Error:
                continue
            if name is not None and node in (None, name):
                found.append(process.pid)
        return found

    def wait_for_nodes(self) -> None:
        """Return when every node is idle."""
        until = time.monotonic() + START
        while True:
            try:
                states = self.run("sinfo", "--noheader", "--Node", "--format=%T").split()
            except OSError as error:
                states = [str(error)]
            if states == ["idle"] * len(self.nodes):
                return
            if time.monotonic() > until:
                raise OSError(f"the nodes do not become idle: {states}")
            time.sleep(0.2)

    def stop(self) -> None:
        """End jobs, daemons and what they left, the controller last but for munge."""
        with suppress(OSError):
            self.run("scancel", f"--user={getpass.getuser()}")
            until = time.monotonic() + END
            while self.find_processes() and time.monotonic() < until:
                time.sleep(0.2)
        for name in [*self.nodes, "slurmctld", "munged"]:
            daemon = self.daemons.pop(name, None)
            if daemon is None:
                continue
            daemon.terminate()
            try:
                daemon.wait(END)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(END)
        for process in self.find_processes():
            _kill(process, signal.SIGKILL)


def _kill(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


@contextmanager
def cluster(nodes: int = 2, cores: int = 1, memory: int = 4096) -> Iterator[Slurm]:
    """Give a cluster whose nodes are idle; whatever happens, nothing of it stays."""
    if reason := why_not():
        raise OSError(reason)
    # Paths of sockets are short.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, ExitStack() as stack:
        folder, host = Path(name), socket.gethostname().partition(".")[0]
        # munge wants its socket where others may pass, and its key where they may not read.
        folder.chmod(0o755)
        made = Slurm(folder, [f"n{number}" for number in range(1, nodes + 1)])
        lines = [
            NODE.format(name=node, host=host, port=free_port(), cores=cores, memory=memory)
            for node in made.nodes
        ]
        for each in ("state", *made.nodes):
            (folder / each).mkdir(0o755)
        text = CONFIG.format(
            host=host, user=getpass.getuser(), folder=folder, port=free_port(), nodes="\n".join(lines)
        )
        (folder / "slurm.conf").write_text(text)
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        stack.callback(made.stop)
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid"}
        files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        options = [f"--{option}={folder / file}" for option, file in files.items()]
        # Forced: a temporary folder that others may not even pass through is no danger here.
        made.start("munged", "munged", "--foreground", "--force", *options)
        until = time.monotonic() + START
        while not (folder / "munge.socket").exists() and time.monotonic() < until:
            time.sleep(0.05)
        made.start("slurmctld", "slurmctld", "-D")
        for node in made.nodes:
            made.start_node(node)
        made.wait_for_nodes()
        yield made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command with a cluster; return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--cores", type=int, default=1, help="of each node")
    parser.add_argument("--memory", type=int, default=4096, help="of each node, in MiB")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    try:
        with cluster(given.nodes, given.cores, given.memory) as made:
            return subprocess.call(given.command, env=os.environ | made.environment)
    except OSError as error:
        print(f"Error: no Slurm on this machine: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
