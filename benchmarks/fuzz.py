"""Fuzzing: mutated bytes into every reader; outcomes by the exit code that the command would give.

Valid seeds (made once by small jobs) are mutated by seeded bit flips, truncations, splices, numbers where
lengths may be and, for JSON and TOML, changes of structure. Batches of mutations run in forked children with
bounded time and memory, so that a hang, a crash of a library or a bomb is the outcome of one mutation. The
last line is JSON; `internal_errors` (exit code 1, or a child that died) and `hangs` must be 0.

    python benchmarks/fuzz.py --mutations 10000 --seed 1

Ten thousand mutations of each reader take about five minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from toffee_dist.batch.pipeline import start_run
from toffee_dist.errors import ToffeeError
from toffee_dist.ingest.job import ingest
from toffee_dist.ingest.prepare import estimate
from toffee_dist.report.gather import gather
from toffee_dist.results.nodes import find_node
from toffee_dist.results.run import load_run
from toffee_dist.settings import EdgeSettings, JobConfig, RefreshConfig
from toffee_dist.storage.blocks import block_of, write_bounds
from toffee_dist.storage.files import save_array
from toffee_dist.storage.manifest import IngestRecord, JobRecord, read_record
from toffee_dist.storage.registry import count_known, read_ids, read_registry, registry_files
from toffee_dist.storage.runs import find_latest
from toffee_dist.storage.slices import load_rows
from toffee_dist.storage.tensors import check_tensor, open_tensor

# Seconds and bytes (of address space, beyond what the parent has) that one mutation may take.
SECONDS, BYTES = 20, 2 << 30
# Mutations of one child: a fork takes a few milliseconds.
BATCH = 250
HANG, DIED = -1, -2
NAMES = {HANG: "hang", DIED: "died"}

READERS = (
    "text",
    "parquet",
    "arrow",
    "manifest",
    "pointer",
    "job",
    "ingest",
    "npy",
    "toml",
    "registry",
    "nodes",
    "vectors",
    "tables",
    "trajectory",
    "compact",
    "compact-header",
    "tensor",
    "blocks",
)

Mutate = Callable[[random.Random, bytes], bytes]


@dataclass(frozen=True)
class Target:
    """One reader.

    Parameters
    ----------
    name
        Of the reader.
    seeds
        Valid files.
    read
        Reads the file of a path, as the commands do; what it raises is the outcome.
    suffix
        Of the file.
    mutate
        What is done to the bytes.
    """

    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[Path], object]
    suffix: str
    mutate: Mutate


# Mutations.

LENGTHS = (0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Change some bits, cut, splice, repeat, or write a number where a length may be."""
    changed = bytearray(data)
    for _ in range(1 + int(rng.expovariate(0.7))):
        size = len(changed)
        if not size:
            break
        kind, at = rng.randrange(7), rng.randrange(size)
        # Footers and headers say what the rest is: half of all changes are near the ends.
        if rng.random() < 0.5:
            at = min(int(rng.expovariate(1 / 40)), size - 1)
            at = size - 1 - at if rng.random() < 0.7 else at
        if kind <= 1:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            changed[at] = rng.randrange(256)
        elif kind == 3:
            del changed[at : at + 1 + int(rng.expovariate(0.1))]
        elif kind == 4:
            length = 1 + int(rng.expovariate(0.05))
            start = rng.randrange(size)
            changed[at:at] = changed[start : start + length] * rng.choice((1, 1, 2, 50))
        elif kind == 5:
            width = rng.choice((1, 2, 4, 8))
            number = rng.choice(LENGTHS) & (2 ** (8 * width) - 1)
            changed[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))
        else:
            del changed[at:]
    return bytes(changed)


WORDS = (
    b"\n", b"\r", b"\t", b",", b'"', b'""', b"#", b"%", b"\0", b"\xff", b"\xef\xbb\xbf", b"9" * 30, b"-1",
    b"1e999", b"nan", b"9999-12-31", b"0001-01-01", b"+262143-01-01", b"2024-02-30", b" " * 50, b"\n" * 50,
    b"x" * 5000,
)  # fmt: skip


def mutate_text(rng: random.Random, data: bytes) -> bytes:
    """Put words that mean something to a reader of text anywhere, or change bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data)
    changed = bytearray(data)
    for _ in range(1 + int(rng.expovariate(0.7))):
        at = rng.randrange(len(changed) + 1)
        changed[at : at + rng.choice((0, 0, 1, 8))] = rng.choice(WORDS)
    return bytes(changed)


ODD_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**63, -(2**63), 10**40, 1e308, -0.5, "", "x", "../..", "/dev/zero", "\0",
    "9" * 400, [], {}, [[]], [None], {"": 0}, [1, "a", None], float("nan"), float("inf"),
)  # fmt: skip


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    """Give some value another type or size, remove or add names, nest deeply; or change bytes."""
    draw = rng.random()
    if draw < 0.15:
        return mutate_bytes(rng, data)
    if draw < 0.18:
        depth = rng.choice((10, 1000, 100_000))
        return b'{"a":' * depth if rng.random() < 0.5 else b"[" * depth + b"]" * depth
    tree = json.loads(data)
    for _ in range(1 + int(rng.expovariate(1.0))):
        _change_value(rng, tree)
    return json.dumps(tree).encode()


def _change_value(rng: random.Random, tree: Any) -> None:
    """Walk down at random, and change what is there."""
    while isinstance(tree, dict | list) and tree:
        key: Any = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        deeper = isinstance(tree[key], dict | list) and tree[key] and rng.random() < 0.8
        if deeper:
            tree = tree[key]
            continue
        kind = rng.randrange(5)
        if kind == 0:
            del tree[key]
        elif kind == 1 and isinstance(tree, list):
            tree *= rng.choice((2, 100))
        elif kind == 2 and isinstance(tree[key], int | float) and not isinstance(tree[key], bool):
            tree[key] = rng.choice((tree[key] + 1, -tree[key], tree[key] * 10**6, float(tree[key])))
        elif kind == 3 and isinstance(tree, dict):
            tree[str(rng.choice(("", "x", "path", "format", "é")))] = deepcopy(rng.choice(ODD_VALUES))
        else:
            tree[key] = deepcopy(rng.choice(ODD_VALUES))
        return


TOML_WORDS = (
    b"= ", b"[", b"]", b"[[a]]", b'"', b"'''", b"true", b"1e400", b"-1", b"9" * 30, b"9" * 5000, b"nan",
    b"inf",
    b"'x'", b"[1, 2]", b"{a = 1}", b"\n", b"rank", b"1979-05-27", b"a.b.c = ", b"[" * 5000, b"a.b" * 3000,
)  # fmt: skip


def mutate_toml(rng: random.Random, data: bytes) -> bytes:
    """Put words of the language anywhere, exchange values, or change bytes."""
    if rng.random() < 0.2:
        return mutate_bytes(rng, data)
    lines = data.split(b"\n")
    for _ in range(1 + int(rng.expovariate(1.0))):
        at = rng.randrange(len(lines))
        name, _, _ = lines[at].partition(b"=")
        lines[at] = (
            name + b"= " + rng.choice(TOML_WORDS)
            if rng.random() < 0.7
            else rng.choice(TOML_WORDS) + lines[at]
        )
    return b"\n".join(lines)


HEADERS = (
    "{'descr': '%s', 'fortran_order': %s, 'shape': %s, }",
    "{'descr': '%s', 'fortran_order': %s, 'shape': %s}",
    "('%s', %s, %s)",
)
SHAPES = (
    "(3,)",
    "()",
    "(-1, 4)",
    "(2**60,)",
    "(1152921504606846976, 4)",
    "(3.0,)",
    "(10, 4)",
    "((((1))))",
    "None",
    "x",
)
TYPES = ("<f4", "|O", "<f8", "|b1", "|V9999999", "<U99999999", "<m8", "f4, f4", "", "<c16", "|S0")


def mutate_npy(rng: random.Random, data: bytes) -> bytes:
    """Write another header over the same numbers, or change bytes."""
    if rng.random() < 0.4:
        return mutate_bytes(rng, data)
    choice = rng.choice
    header = choice(HEADERS) % (choice(TYPES), choice(("True", "False", "1")), choice(SHAPES))
    if rng.random() < 0.1:
        header = "(" * choice((50, 3000)) + header
    text = header.encode() + b" " * choice((0, 10, 40)) + b"\n"
    version, form = choice(((1, "<H"), (1, "<H"), (2, "<I"), (3, "<I"), (9, "<H")))
    length = choice((len(text), len(text), len(text), 0, 65535))
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack(form, length) + text + data[128:]


# Outcomes.


def exit_code(read: Callable[[Path], object], path: Path) -> tuple[int, str]:
    """Return what the command line would end with, and what it would say of a bug."""
    try:
        read(path)
    except ToffeeError as error:
        return error.exit_code, ""
    except OSError as error:
        # As `toffee` does: storage that fails is resumable. A file that is there is read or refused.
        return 5, f"{type(error).__name__}: {error}"
    except MemoryError:
        return 1, "MemoryError"
    except BaseException as error:
        return 1, f"{type(error).__name__}: {str(error)[:200]}"
    return 0, ""


def _run_batch(target: Target, numbers: Sequence[int], seed: int, folder: Path, pipe: int) -> None:
    """Run in a child: write 8 bytes per mutation, its number and its outcome; bugs go to a file."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + BYTES, taken + BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Panics of Rust libraries write to stderr.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    for number in numbers:
        place, data = mutation(target, seed, number)
        path = folder / f"mutated-{place}{target.suffix}"
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        os.write(pipe, struct.pack("<ii", number, 99))
        signal.alarm(SECONDS)
        code, words = exit_code(target.read, path)
        signal.alarm(0)
        if number < 0 and code:
            code, words = 1, f"the seed itself ended with {code}"
        if code == 1:
            with open(folder / "bugs", "a") as file:
                file.write(json.dumps([target.name, number, words]) + "\n")
        os.write(pipe, struct.pack("<ii", number, code))


def mutation(target: Target, seed: int, number: int) -> tuple[int, bytes]:
    """Return one mutation, which depends on these three alone, and which seed it was."""
    if number < 0:
        return 0, target.seeds[0]
    rng = random.Random(f"{seed} {target.name} {number}")
    place = rng.randrange(len(target.seeds))
    return place, target.mutate(rng, target.seeds[place])


def seed_of(path: Path) -> int:
    """Return which seed a mutated file was."""
    return int(path.stem.rpartition("-")[2])


def fuzz_target(target: Target, mutations: int, seed: int) -> tuple[Counter[int], list[list[Any]]]:
    """Read so many mutations; return how often each exit code was, and what went wrong.

    Mutation -1 is the first seed itself, which must be read: else nothing is tested.
    """
    codes: Counter[int] = Counter()
    wrong: list[list[Any]] = []
    left = list(range(-1, mutations))
    with tempfile.TemporaryDirectory(prefix="toffee-fuzz-") as name:
        folder = Path(name)
        while left:
            batch = left[:BATCH]
            done, status = _fork(target, batch, seed, folder)
            ended = [number for number, code in done if code != 99]
            codes.update(code for _, code in done if code != 99)
            left = left[len(ended) :]
            if len(ended) < len(batch):
                # The child died in the next one: of its alarm, or of a crash.
                code = HANG if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else DIED
                codes[code] += 1
                wrong.append([target.name, batch[len(ended)], "hang" if code == HANG else f"died: {status}"])
                left = left[1:]
        if (folder / "bugs").exists():
            wrong += [json.loads(line) for line in (folder / "bugs").read_text().splitlines()]
    return codes, wrong


def _fork(target: Target, batch: Sequence[int], seed: int, folder: Path) -> tuple[list[tuple[int, int]], int]:
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # The child execs nothing and uses none of the parent's threads.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        os.close(reader)
        code = 1
        try:
            _run_batch(target, batch, seed, folder, writer)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    found = b""
    # A reader that blocks all signals is ended from outside.
    until = time.monotonic() + SECONDS * len(batch)
    while time.monotonic() < until:
        if select.select([reader], [], [], 3 * SECONDS)[0]:
            piece = os.read(reader, 1 << 16)
            if not piece:
                break
            found += piece
        else:
            os.kill(child, signal.SIGALRM)
            time.sleep(1)
            os.kill(child, signal.SIGKILL)
            break
    os.close(reader)
    _, status = os.waitpid(child, 0)
    return list(struct.iter_unpack("<ii", found[: len(found) // 8 * 8])), status


# Seeds and readers.


def make_seeds(folder: Path) -> None:
    """Write valid files of every kind: edges in each format, and a published run."""
    rng = np.random.default_rng(0)
    moments = 1_700_000_000 + 43200 * np.arange(40)
    source, target = rng.integers(0, 7, (2, 40))
    strings = pl.DataFrame(
        {
            "source": [f"n{node}" for node in source],
            "target": [f"n{node}" for node in target],
            "time": pl.Series(moments * 10**6).cast(pl.Datetime("us")),
            "weight": np.linspace(0, 1, 40),
        }
    )
    numbers = strings.with_columns(
        source=pl.Series(source), target=pl.Series(target), time=pl.Series(moments)
    )
    dates = numbers.with_columns(time=strings["time"].cast(pl.Date))
    codecs: list[Any] = ["zstd", "uncompressed", "lz4"]
    for number, frame in enumerate((strings, numbers, dates)):
        frame.write_parquet(folder / f"edges{number}.parquet", compression=codecs[number])
        frame.write_ipc(folder / f"edges{number}.arrow", compression=codecs[number])
        frame.write_csv(folder / f"edges{number}.csv", separator=",\t;"[number])
    (folder / "edges3.csv").write_text("# a comment\n\na b 2024-01-01\nb c 2024-01-02\n c\td  2024-01-03\n")
    (folder / "edges4.csv").write_text('"a,1","b ""x""",2024-01-01\nc,d,2024-01-02T10:00:00Z\n')
    config = JobConfig(
        inputs=(str(folder / "edges0.parquet"),),
        out=str(folder / "out"),
        rank=4,
        mode="threads",
        workers=1,
        outputs=("embedding", "trajectory"),
        dense="all",
        keep_work=True,
        report=False,
    )
    load_run(start_run(config).run.path).build_index()
    # A tall array in blocks, as the solves of large graphs leave them.
    blocks = folder / "blocks"
    blocks.mkdir()
    write_bounds(blocks, [0, 4, 7])
    for index, rows in enumerate((4, 3)):
        save_array(block_of(blocks / "A.npy", index), np.ones((rows, 4), np.float32))


def load_targets(folder: Path) -> list[Target]:
    """Return every reader, with the seeds that `make_seeds` left."""
    run = next((folder / "out" / "runs").iterdir())
    work = run / "work"

    def read(*paths: Path) -> tuple[bytes, ...]:
        return tuple(path.read_bytes() for path in paths)

    def edges(kind: str) -> tuple[bytes, ...]:
        return read(*sorted(folder.glob(f"edges*.{kind}")))

    parts = sorted((run / "registry").glob("*.parquet"))
    arrays = (run / "index" / "embedding.npy", run / "fold.npy")
    return [
        Target("text", edges("csv"), read_edges, ".csv", mutate_text),
        Target("parquet", edges("parquet"), read_edges, ".parquet", mutate_bytes),
        Target("arrow", edges("arrow"), read_edges, ".arrow", mutate_bytes),
        Target("manifest", read(run / "manifest.json"), partial(read_manifest, run), ".json", mutate_json),
        Target("pointer", read(folder / "out" / "latest.json"), read_pointer, ".json", mutate_json),
        Target("job", read(work / "job.json"), read_job, ".json", mutate_json),
        Target("ingest", read(work / "ingest" / "ingest.json"), read_ingest, ".json", mutate_json),
        Target("npy", read(*arrays), partial(read_npy, run), ".npy", mutate_npy),
        Target("toml", (TOML,), read_toml, ".toml", mutate_toml),
        Target("registry", read(*parts), read_nodes, ".parquet", mutate_bytes),
        Target("nodes", read(run / "nodes.parquet"), partial(read_table, run), ".parquet", mutate_bytes),
        Target(
            "vectors",
            read(run / "embedding" / "part-00000.parquet"),
            partial(read_vectors, run),
            ".parquet",
            mutate_bytes,
        ),
        Target(
            "tables",
            read(*(run / f"{name}.parquet" for name in TABLES)),
            partial(read_tables, run),
            ".parquet",
            mutate_bytes,
        ),
        Target(
            "trajectory",
            read(run / "trajectory" / "part-00000.parquet"),
            partial(read_trajectory, run, "trajectory/part-00000.parquet"),
            ".parquet",
            mutate_bytes,
        ),
        Target(
            "compact",
            read(*sorted((run / "compact").glob("*.npy"))),
            partial(read_compact, run),
            ".npy",
            mutate_npy,
        ),
        Target(
            "compact-header",
            read(run / "compact" / "header.json"),
            partial(read_trajectory, run, "compact/header.json"),
            ".json",
            mutate_json,
        ),
        Target(
            "tensor",
            read(*sorted((work / "ingest" / "tensor").glob("*"))),
            partial(read_tensor, work / "ingest" / "tensor"),
            ".npy",
            mutate_npy,
        ),
        Target(
            "blocks",
            read(*sorted((folder / "blocks").glob("*"))),
            partial(read_blocks, folder / "blocks"),
            ".npy",
            mutate_npy,
        ),
    ]


TOML = b"""inputs = ["a", "b"]
out = "x"
rank = 64
reg_a = 0.1
reg_r = 0.1
step = "1d"
last = "90d"
zone = "UTC"
outputs = ["embedding"]
wait = 5.5
warm = true
mode = "threads"
workers = 2
separator = ","
"""


def seldom(path: Path) -> bool:
    """Tell whether this mutation gets the slower questions too: about one in ten."""
    return path.stat().st_size % 10 == 0


def read_edges(path: Path) -> None:
    """Read edges as `toffee plan` does, and some as `toffee ingest` does; the tasks run here."""
    settings = EdgeSettings(inputs=(str(path),), entry="sum")
    if not seldom(path):
        estimate(settings)
        return
    with tempfile.TemporaryDirectory(dir=path.parent) as out:
        ingest(settings, Path(out) / "out")


def read_manifest(run: Path, path: Path) -> None:
    """Ask a run with this manifest."""
    found = load_run(exchange(run, path, "manifest.json"))
    _ = [found.grid.show(step) for step in (0, max(found.n_steps - 1, 0))]
    found.embedding.numpy()
    if seldom(path):
        found.neighbors("n1", 2, at=0)
        found.score(["n1"], ["n2"], at=0)


def read_pointer(path: Path) -> None:
    """Look for the published run of a folder with this pointer."""
    place = path.parent / "latest.json"
    place.unlink(missing_ok=True)
    os.link(path, place)
    latest = find_latest(path.parent)
    assert latest is not None
    _ = latest.complete


def read_job(path: Path) -> None:
    """Read what a run was asked for, as `toffee resume` does."""
    record = read_record(path, JobRecord)
    JobConfig.read({name: value for name, value in record.config.items() if name in JobConfig.model_fields})


def read_ingest(path: Path) -> None:
    """Read the record of an ingest."""
    grid = read_record(path, IngestRecord).grid
    _ = [grid.show(step) for step in (0, max(grid.n_steps - 1, 0))]


def read_npy(run: Path, path: Path) -> None:
    """Ask a run with this array as its index, its weights, its rotation or its kept rows."""
    places = ("index/embedding.npy", "fold.npy", "rotation.npy", f"kept-{run.name}.npy")
    copy = exchange(run, path, places[path.stat().st_size % len(places)])
    found = load_run(copy)
    _ = [block.read() for block in found.vectors("embedding").blocks()]
    found.folder.read_fold_weights(found.rank)
    found.folder.read_rotation(found.rank)
    found.folder.read_kept(run.name)
    if seldom(path):
        found.neighbors("n1", 2)
        found.score(["n1"], ["n2"])


def read_table(run: Path, path: Path) -> None:
    """Ask a run with this table of nodes."""
    found = load_run(exchange(run, path, "nodes.parquet"))
    find_node(found, "n1")
    if seldom(path):
        found.neighbors("n1", 2)
        found.export("word2vec", path.parent / f"words-{time.monotonic_ns()}.txt")


def read_vectors(run: Path, path: Path) -> None:
    """Ask a run with this part of its embedding, and no index."""
    found = load_run(exchange(run, path, "embedding/part-00000.parquet", without="index"))
    found.embedding.numpy()
    if seldom(path):
        found.neighbors("n1", 2)


TABLES = ("steps", "fit", "frequencies")


def read_tables(run: Path, path: Path) -> None:
    """Ask a run with this small table, as questions and the report do."""
    name = TABLES[seed_of(path)]
    found = load_run(exchange(run, path, f"{name}.parquet"))
    getattr(found, name).schema()
    gather(found.folder, found.manifest)
    found.score(["n1"], ["n2"], at=0)


def read_trajectory(run: Path, name: str, path: Path) -> None:
    """Ask a run with this file about movements; its Parquet parts are read where there is nothing else."""
    without = "work" if name.startswith("compact") else "compact"
    found = load_run(exchange(run, path, name, without))
    found.trajectory.numpy()
    found.trajectory_of("n1")
    if seldom(path):
        found.neighbors("n1", 2, at=0)
        found.score(["n1"], ["n2"], at=0)


def read_compact(run: Path, path: Path) -> None:
    """Ask a run with this array of its compact trajectory."""
    names = sorted(file.name for file in (run / "compact").glob("*.npy"))
    read_trajectory(run, f"compact/{names[seed_of(path)]}", path)


def read_tensor(tensor: Path, path: Path) -> None:
    """Open a staged tensor with this file as one of its arrays, or as its header, and multiply."""
    copy = exchange_in(tensor, path)
    check_tensor(copy)
    opened = open_tensor(copy)
    opened.tubes @ np.ones((opened.n_steps, 2))
    opened.take_rows(0, opened.n_nodes // 2)


def read_blocks(folder: Path, path: Path) -> None:
    """Read an array in blocks with this file as one of them, or as their bounds."""
    copy = exchange_in(folder, path)
    load_rows(copy / "A.npy", 2, 6)


def exchange_in(folder: Path, changed: Path) -> Path:
    """Return a copy of a folder of files, one per process, in which the file that was the seed is another."""
    copy = changed.parent / f"copy-{os.getpid()}"
    copy.mkdir(exist_ok=True)
    for place, file in enumerate(sorted(folder.iterdir())):
        (copy / file.name).unlink(missing_ok=True)
        os.link(changed if place == seed_of(changed) else file, copy / file.name)
    return copy


def read_nodes(path: Path) -> None:
    """Read this part of a registry, as an ingest that extends it does."""
    place = path.parent / "registry"
    place.mkdir(exist_ok=True)
    part = place / "part-0-00000.parquet"
    part.unlink(missing_ok=True)
    os.link(path, part)
    files = registry_files(place)
    count = count_known(files)
    read_registry(files, 0, "n1", "n5")
    read_ids(place, 0, min(count, 7))


def read_toml(path: Path) -> None:
    """Read a configuration."""
    RefreshConfig.read({}, str(path))


def exchange(run: Path, changed: Path, name: str, without: str = "work") -> Path:
    """Return a copy of a run, one per process, in which one file is another."""
    copy = changed.parent / f"clone-{os.getpid()}" / "runs" / run.name
    if not copy.exists():
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("work", without))
    place, last = copy / name, copy / "exchanged"
    if last.exists() and (before := last.read_text()) != name:
        (copy / before).unlink(missing_ok=True)
        if (run / before).exists():
            shutil.copyfile(run / before, copy / before)
    last.write_text(name)
    place.unlink(missing_ok=True)
    os.link(changed, place)
    return copy


def fuzz(folder: Path, mutations: int, seed: int, readers: Sequence[str] = ()) -> dict[str, Any]:
    """Fuzz every reader; return the counts. Nothing here may start threads: children are forked."""
    begun, wrong = time.monotonic(), []
    by_reader: dict[str, dict[str, int]] = {}
    targets = [target for target in load_targets(folder) if not readers or target.name in readers]
    for target in targets:
        since = time.monotonic()
        codes, found = fuzz_target(target, mutations, seed)
        by_reader[target.name] = {NAMES.get(code, str(code)): codes[code] for code in sorted(codes)}
        wrong += found
        print(
            f"{target.name:<10} {time.monotonic() - since:6.1f} s  {by_reader[target.name]}", file=sys.stderr
        )
    for name, number, words in wrong[:50]:
        print(f"WRONG {name} mutation {number} of seed {seed}: {words}", file=sys.stderr)
    total: Counter[str] = Counter()
    for counts in by_reader.values():
        total.update(counts)
    hangs = total.get("hang", 0)
    return {
        "mutations": sum(total.values()),
        "by_reader": by_reader,
        "internal_errors": total.get("1", 0) + total.get("died", 0),
        "hangs": hangs,
        "exit_codes": dict(sorted(total.items())),
        "seed": seed,
        "seconds": round(time.monotonic() - begun, 1),
    }


def run_fuzz(mutations: int, seed: int, readers: Sequence[str] = ()) -> dict[str, Any]:
    """Fuzz every reader in a process of its own, so that the caller may have threads; return the counts.

    Parameters
    ----------
    mutations
        Of each reader.
    seed
        Decides all of them.
    readers
        Which; all where none is named. How each fared goes to stderr.
    """
    environment = os.environ | {
        "POLARS_MAX_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory(prefix="toffee-fuzz-") as folder:
        for part in ("seeds", "mutations"):
            command = [sys.executable, __file__, "--part", part, "--folder", folder]
            command += ["--mutations", str(mutations), "--seed", str(seed), *readers]
            found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("readers", nargs="*", help="default: all")
    parser.add_argument("--mutations", type=int, default=10_000, help="of each reader")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", choices=("seeds", "mutations"), help="used by the command itself")
    parser.add_argument("--folder", type=Path, help="used by the command itself")
    options = parser.parse_args()
    if options.part == "seeds":
        make_seeds(options.folder)
    elif options.part == "mutations":
        print(json.dumps(fuzz(options.folder, options.mutations, options.seed, options.readers)))
    else:
        result = run_fuzz(options.mutations, options.seed, options.readers)
        print(json.dumps(result))
        sys.exit(1 if result["internal_errors"] or result["hangs"] else 0)


if __name__ == "__main__":
    main()
