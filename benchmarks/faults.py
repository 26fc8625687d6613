"""Faults of storage, all of them: every write of a refresh fails in every way, and every power cut is tried.

    python benchmarks/faults.py [--every N] [--workers 2] [--only-storage]

A dry run counts the changes that a refresh makes to storage. Then each of them fails: EIO, ENOSPC, a half
that was written, the end of the process; once, and from then on. After each, readers must see a whole run,
the next refresh must end well, and its bytes must be those of a refresh without faults. From the log of the
same changes come the states that a power cut could leave (disks.py); each must be read and finished likewise.

Then come jobs on a simulated client (simulate.py) and damaged files (fuzz.py). Last line JSON: writes,
injected, crash_states, seeds, mutations, lost, different, internal_errors, hangs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
from disks import FAULTS, Fault, FaultyDisk, RememberingDisk, WatchedDisk
from fuzz import run_fuzz
from simulate import run_seeds

from toffee_dist.batch.seal import check_run
from toffee_dist.refresh.job import refresh
from toffee_dist.results.run import load_run
from toffee_dist.settings import RefreshConfig
from toffee_dist.storage.disk import using_disk

# A refresh of the graph below takes a second; this is a hang.
HANG_SECONDS = 120


@dataclass
class Tally:
    """What came of many tries."""

    tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, name: str, outcome: str) -> None:
        """Count one."""
        self.tried += 1
        self.outcomes[outcome] += 1
        if outcome != "good" and len(self.examples) < 20:
            self.examples.append(f"{name}: {outcome}")


def write_edges(path: Path) -> None:
    rng = np.random.default_rng(0)
    day, source = rng.integers(12, size=240), rng.integers(14, size=240)
    target = (source + 1 + rng.integers(3, size=240)) % 14
    seconds = 1_767_571_200 + day * 86_400 + rng.integers(86_400, size=240)
    pl.DataFrame({"source": source, "target": target, "time": seconds}).write_parquet(path)


def refresh_once(edges: Path, out: Path, day: int) -> None:
    refresh(
        RefreshConfig.read(
            {
                "inputs": (str(edges),),
                "out": str(out),
                "rank": 2,
                "last": "7d",
                "mode": "threads",
                "workers": 1,
                "wait": 10.0,
                "report": False,
                "outputs": ("embedding", "trajectory"),
                "as_of": f"2026-01-{day}",
                "keep": 2,
                # The gate is not what is tested here.
                "min_cosine": -1.0,
                "max_auc_drop": 1.0,
                "max_energy_drop": 1.0,
            }
        )
    )


def digests(out: Path) -> dict[str, str]:
    """Return the digest of every Parquet file of the published run, read through its manifest."""
    run = load_run(out)
    check_run(run.folder)
    run.embedding.numpy()
    files = sorted(path for path in run.path.rglob("*.parquet") if "work" not in path.parts)
    return {str(p.relative_to(run.path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def in_child(work: Callable[[], str], seconds: float = HANG_SECONDS) -> str:
    """Return what a forked process says of itself; one that takes too long is a hang."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.setsid()
        try:
            said = work()
        except BaseException as error:
            said = f"error {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    until = time.monotonic() + seconds
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            return "hang"
        time.sleep(0.01)
    with os.fdopen(read, "rb") as pipe:
        return pipe.read().decode() or "ended"


def quiet() -> None:
    """Keep what libraries log about clusters that end in the middle off the screen."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


class Season:
    """A folder with two refreshes done, and the digests that a third must have."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.edges, self.base = folder, folder / "edges.parquet", folder / "base"

        def prepare() -> str:
            write_edges(self.edges)
            for day in (13, 14):
                refresh_once(self.edges, self.base, day)
            whole = folder / "whole"
            shutil.copytree(self.base, whole)
            before = digests(whole)
            refresh_once(self.edges, whole, 15)
            return json.dumps([before, digests(whole)])

        said = in_child(prepare)
        if not said.startswith("["):
            raise SystemExit(f"the refresh without faults failed: {said}")
        self.before, self.after = json.loads(said)

    def count_writes(self) -> int:
        """Return how many changes the third refresh makes."""
        out = self.copy("count")

        def count() -> str:
            with using_disk(disk := WatchedDisk()):
                refresh_once(self.edges, out, 15)
            return str(disk.changes)

        return int(in_child(count))

    def crash_states(self) -> list[str]:
        """Lay out every state that a power cut in the third refresh could leave; return a name for each."""
        out, log = self.copy("log"), self.folder / "states"

        def remember() -> str:
            with using_disk(disk := RememberingDisk(out)):
                refresh_once(self.edges, out, 15)
            for number, state in enumerate(disk.states):
                (place := log / f"{number:05d}").mkdir(parents=True)
                for path, data in state.files.items():
                    (target := place / path.relative_to(out)).parent.mkdir(parents=True, exist_ok=True)
                    # An unfinished run names the folder that it is in.
                    target.write_bytes(data.replace(str(out).encode(), str(place).encode()))
            return json.dumps([f"power cut after {state.change}, {state.kind}" for state in disk.states])

        said = in_child(remember, 10 * HANG_SECONDS)
        if not said.startswith("["):
            raise SystemExit(f"the log of writes failed: {said}")
        names: list[str] = json.loads(said)
        return names

    def copy(self, name: str) -> Path:
        """Return a copy of the folder with two refreshes."""
        shutil.copytree(self.base, self.folder / name, symlinks=True)
        return self.folder / name

    def judge(self, out: Path) -> str:
        """Say what readers see, and finish the refresh."""
        quiet()
        seen = digests(out)
        if seen not in (self.before, self.after):
            return "readers see another run"
        refresh_once(self.edges, out, 15)
        return "good" if digests(out) == self.after else "different"

    def inject(self, fault: tuple[Fault, bool], at: int) -> str:
        """Let one write of the refresh fail; return what came of it."""
        out = self.copy(f"{fault[0]}-{fault[1]}-{at}")

        def fail() -> str:
            quiet()
            with using_disk(FaultyDisk(fault[0], at, fault[1])):
                refresh_once(self.edges, out, 15)
            return "done"

        try:
            said = in_child(fail)
            if said == "hang":
                return "hang"
            if said.startswith("error") and not said.startswith(
                ("error UnfinishedError", "error ConfigError", "error OSError", "error InputError")
            ):
                return f"internal {said}"
            return in_child(lambda: self.judge(out))
        finally:
            shutil.rmtree(out, ignore_errors=True)

    def after_power_cut(self, number: int) -> str:
        """Return what came of one of the states that a power cut could leave."""
        return in_child(lambda: self.judge(self.folder / "states" / f"{number:05d}"))


def run_faults(every: int = 1, workers: int = 2) -> dict[str, int]:
    """Inject every fault into every `every`-th write, try every power cut, and return the counts."""
    with tempfile.TemporaryDirectory(prefix="toffee-") as name:
        season = Season(Path(name))
        writes = season.count_writes()
        print(f"a refresh makes {writes} changes to storage", flush=True)
        injected, cuts = Tally(), Tally()
        cases = [(fault, at) for at in range(1, writes + 1, every) for fault in FAULTS]
        with ThreadPoolExecutor(workers) as pool:
            for (fault, at), outcome in zip(cases, pool.map(lambda c: season.inject(*c), cases), strict=True):
                injected.add(f"{fault[0]}{' from then on' * fault[1]} at write {at}", outcome)
            print(f"{injected.tried} faults: {dict(injected.outcomes)}", flush=True)
            names = season.crash_states()
            chosen = range(0, len(names), every)
            for number, outcome in zip(chosen, pool.map(season.after_power_cut, chosen), strict=True):
                cuts.add(f"{number}: {names[number]}", outcome)
            print(f"{cuts.tried} power cuts: {dict(cuts.outcomes)}", flush=True)
        for line in injected.examples + cuts.examples:
            print(f"  {line}", flush=True)
    both = injected.outcomes + cuts.outcomes
    return {
        "writes": writes,
        "injected": injected.tried,
        "crash_states": cuts.tried,
        "lost": sum(n for said, n in both.items() if said.startswith(("error", "readers", "ended"))),
        "different": both["different"],
        "internal_errors": sum(n for said, n in both.items() if said.startswith("internal")),
        "hangs": both["hang"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="Fail every so-manieth write only.")
    parser.add_argument("--workers", type=int, default=2, help="Processes at once.")
    parser.add_argument("--only-storage", action="store_true", help="No simulated clients, no fuzzing.")
    parser.add_argument("--seeds", type=int, default=1000, help="Runs on a simulated client.")
    parser.add_argument("--mutations", type=int, default=10_000, help="Damaged files per reader.")
    arguments = parser.parse_args()
    found = run_faults(arguments.every, arguments.workers)
    if not arguments.only_storage:
        simulated = run_seeds(arguments.seeds, say=lambda line: print(f"  {line}", flush=True))
        fuzzed = run_fuzz(arguments.mutations, seed=0)
        found |= {"seeds": simulated["seeds"], "mutations": fuzzed["mutations"]}
        found["lost"] += simulated["lost"]
        found["different"] += simulated["different"]
        for name in ("internal_errors", "hangs"):
            found[name] += fuzzed[name]
    print(json.dumps(found))
    sys.exit(any(found[name] for name in ("lost", "different", "internal_errors", "hangs")))


if __name__ == "__main__":
    main()
