"""Faults of storage, all of them: every write of a refresh fails in every way, and every power cut is tried.

    python benchmarks/faults.py [--every N] [--workers 2] [--only-storage] [--log FILE --minutes 5]

A dry run counts the changes that a refresh makes to storage. Then each of them fails: EIO, ENOSPC, a half
that was written, the end of the process; once, and from then on. After each, readers must see a whole run,
the next refresh must end well, and its bytes must be those of a refresh without faults. From the log of the
same changes come the states that a power cut could leave (disks.py); each must be read and finished likewise.

Then come jobs on a simulated client (simulate.py) and damaged files (fuzz.py). Last line JSON: writes,
injected, crash_states, seeds, mutations, lost, different, internal_errors, hangs.

All of it takes about a quarter of an hour on two cores. With a log it may be done in pieces: what the log has
is not done again, and the last line counts everything, with `pieces_left` where something is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import polars as pl
from disks import FAULTS, Fault, FaultyDisk, RememberingDisk, WatchedDisk
from fuzz import READERS, run_fuzz

from toffee_dist.batch.seal import check_run
from toffee_dist.refresh.job import refresh
from toffee_dist.results.run import load_run
from toffee_dist.settings import RefreshConfig
from toffee_dist.storage.disk import using_disk

# A refresh of the graph below takes a second; this is a hang.
HANG_SECONDS = 120
# What one piece does: about half a minute on one core.
CASES, SEEDS = 60, 50

Counts = dict[str, int]
Outcome = Callable[[], str]


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
        with os.fdopen(write, "wb") as pipe:
            pipe.write(said.encode())
        os._exit(0)
    os.close(write)
    os.set_blocking(read, False)
    heard = b""
    until = time.monotonic() + seconds
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        # A pipe holds little: a child that says more would wait for us.
        heard += _hear(read)
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            return "hang"
        time.sleep(0.01)
    heard += _hear(read)
    os.close(read)
    return heard.decode() or "ended"


def _hear(read: int) -> bytes:
    """Return what a pipe that does not wait has."""
    heard = b""
    with suppress(BlockingIOError):
        while part := os.read(read, 1 << 16):
            heard += part
    return heard


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
            return json.dumps([before, digests(whole), sorted(sys.modules)])

        said = in_child(prepare)
        if not said.startswith("["):
            raise SystemExit(f"the refresh without faults failed: {said}")
        self.before, self.after, modules = json.loads(said)
        # Loaded here once, where nothing runs yet, instead of in every child.
        for name in modules:
            with suppress(ImportError):
                importlib.import_module(name)

    @cached_property
    def writes(self) -> int:
        """How many changes the third refresh makes."""
        out = self.copy("count")

        def count() -> str:
            with using_disk(disk := WatchedDisk()):
                refresh_once(self.edges, out, 15)
            return str(disk.changes)

        return int(in_child(count))

    @cached_property
    def crash_states(self) -> list[str]:
        """A name for every state that a power cut in the third refresh could leave, which are laid out."""
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


@dataclass(frozen=True)
class Piece:
    """A part of all this, which may be done by itself."""

    name: str
    run: Callable[[], Counts]


def count_outcomes(kind: str, cases: Sequence[tuple[str, Outcome]]) -> Counts:
    """Try some faults or power cuts, and count how they ended; say which did not end well."""
    found = Counter({kind: len(cases)})
    for name, run in cases:
        said = run()
        if said == "good":
            continue
        print(f"  {name}: {said}", flush=True)
        first = said.split(maxsplit=1)[0]
        found[
            {"different": "different", "internal": "internal_errors", "hang": "hangs"}.get(first, "lost")
        ] += 1
    return dict(found)


def storage_pieces(season: Season, every: int) -> list[Piece]:
    """Return every fault of every `every`-th write, and every `every`-th power cut."""
    faults: list[tuple[str, Outcome]] = [
        (f"{fault}{' from then on' * on} at write {at}", partial(season.inject, (fault, on), at))
        for at in range(1, season.writes + 1, every)
        for fault, on in FAULTS
    ]
    cuts: list[tuple[str, Outcome]] = [
        (f"{number}: {name}", partial(season.after_power_cut, number))
        for number, name in enumerate(season.crash_states)
        if number % every == 0
    ]
    return [
        Piece(f"{kind} {start}", partial(count_outcomes, kind, cases[start : start + CASES]))
        for kind, cases in (("injected", faults), ("crash_states", cuts))
        for start in range(0, len(cases), CASES)
    ]


def simulate_seeds(first: int, count: int) -> Counts:
    """Run jobs on a simulated client, in a process of their own."""
    script = Path(__file__).with_name("simulate.py")
    command = [sys.executable, str(script), f"--seeds={count}", f"--first={first}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    *said, last = done.stdout.splitlines()
    for line in said:
        print(f"  {line}", flush=True)
    found: Counts = json.loads(last)
    return {name: found[name] for name in ("seeds", "lost", "different")}


def fuzz_reader(reader: str, mutations: int) -> Counts:
    """Damage the files of one reader."""
    found = run_fuzz(mutations, seed=0, readers=[reader])
    return {name: found[name] for name in ("mutations", "internal_errors", "hangs")}


class Log:
    """What was counted so far, a line per piece.

    Parameters
    ----------
    path
        The file; None: nothing is kept.
    asked
        What the pieces are pieces of: a log of something else is refused.
    """

    def __init__(self, path: Path | None, asked: dict[str, int]) -> None:
        self.path, self.found = path, dict[str, Counts]()
        if path is None:
            return
        if path.exists():
            first, *lines = map(json.loads, path.read_text().splitlines())
            if first != asked:
                raise SystemExit(f"{path} is the log of {first}, not of {asked}")
            self.found = {name: counts for name, counts in lines}
        else:
            path.write_text(json.dumps(asked) + "\n")

    def add(self, name: str, counts: Counts) -> None:
        """Note what a piece has found."""
        self.found[name] = counts
        print(f"{name}: {counts}", flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps([name, counts]) + "\n")


def run_pieces(pieces: Sequence[Piece], log: Log, workers: int, minutes: float) -> None:
    """Do what the log does not have, some at once; after so many minutes nothing new begins."""
    until = time.monotonic() + 60 * minutes if minutes else float("inf")

    def work(piece: Piece) -> None:
        if time.monotonic() < until:
            log.add(piece.name, piece.run())

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, [piece for piece in pieces if piece.name not in log.found]))


COUNTS = (
    "writes",
    "injected",
    "crash_states",
    "seeds",
    "mutations",
    "lost",
    "different",
    "internal_errors",
    "hangs",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="Fail every so-manieth write only.")
    parser.add_argument("--workers", type=int, default=2, help="Processes at once.")
    parser.add_argument("--only-storage", action="store_true", help="No simulated clients, no fuzzing.")
    parser.add_argument("--seeds", type=int, default=1000, help="Runs on a simulated client.")
    parser.add_argument("--mutations", type=int, default=10_000, help="Damaged files per reader.")
    parser.add_argument("--log", type=Path, help="Keep what was counted, and go on from there.")
    parser.add_argument(
        "--minutes", type=float, default=0, help="Begin nothing after this long; 0: no limit."
    )
    parser.add_argument("--pieces", nargs="+", default=[""], help="Only those whose names begin so.")
    arguments = parser.parse_args()
    seeds, mutations = (0, 0) if arguments.only_storage else (arguments.seeds, arguments.mutations)
    log = Log(arguments.log, {"every": arguments.every, "seeds": seeds, "mutations": mutations})
    with tempfile.TemporaryDirectory(prefix="toffee-") as name:
        season = Season(Path(name))
        print(f"a refresh makes {season.writes} changes to storage", flush=True)
        pieces = storage_pieces(season, arguments.every)
        pieces += [
            Piece(f"seeds {first}", partial(simulate_seeds, first, min(SEEDS, seeds - first)))
            for first in range(0, seeds, SEEDS)
        ]
        pieces += [
            Piece(f"mutations {reader}", partial(fuzz_reader, reader, mutations))
            for reader in (READERS if mutations else ())
        ]
        wanted = [piece for piece in pieces if piece.name.startswith(tuple(arguments.pieces))]
        run_pieces(wanted, log, arguments.workers, arguments.minutes)
        total = Counter({"writes": season.writes})
    for counts in log.found.values():
        total.update(counts)
    found = {name: total[name] for name in COUNTS}
    left = len(pieces) - len(log.found)
    print(json.dumps(found | ({"pieces_left": left} if left else {})))
    sys.exit(any(found[name] for name in COUNTS[-4:]) or left > 0)


if __name__ == "__main__":
    main()
