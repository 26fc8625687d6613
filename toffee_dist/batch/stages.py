"""The stages of a job: from the outputs back to frequencies, tasks, bytes and seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from toffee_dist.batch.block_cost import BlockCost, block_bytes, solve_in_blocks
from toffee_dist.batch.blocks import ROW_PAIRS, count_blocks, work_of_a_block
from toffee_dist.batch.plan import Plan, Shape, Stage
from toffee_dist.batch.trajectory import ENTRY_BYTES
from toffee_dist.batch.trajectory_cost import describe_ways, filter_costs, watch_costs
from toffee_dist.batch.write_outputs import OutputFolder
from toffee_dist.kernels.spectrum import BLOCK_BYTES, count_freqs
from toffee_dist.limits import LIMITS, Limits
from toffee_dist.models import find_model
from toffee_dist.settings import FitSettings, ModelSettings, parse_freqs
from toffee_dist.storage.tensors import Sizes
from toffee_dist.units import MIB

# What a task of the ingest holds beside the process, by its own bounds: 465 MiB with the process at 3 and at
# 10 million nodes.
INGEST_BYTES = 200 * MIB
# Seconds of a compressed slice ≈ a·n·r² + b·pairs·r + c·r³ + d (single precision, complex), fitted to
# mathoverflow by weeks (r 64), email by days (r 128) and workplace by hours (r 64), to a factor of 3.
SECONDS_TALL, SECONDS_PAIR, SECONDS_SMALL, SECONDS_SLICE = 7.5e-9, 2e-8, 4.5e-7, 0.03
# Seconds of ingest per row (benchmarks/ingest.py), and bytes per second to and from storage.
SECONDS_ROW, BYTES_PER_SECOND = 5e-7, 2e8
# Seconds per node of the tables, of a registry of whole numbers: 0.7 µs at 1 and at 3 million nodes.
SECONDS_NODE = 7e-7
# Rows of vectors that comparing runs holds: two row groups, their copies in double, two samples.
COMPARED_ROWS = 200_000


def make_plan(
    shape: Shape,
    settings: ModelSettings,
    chosen: int | None = None,
    limits: Limits = LIMITS,
    more: Sequence[Stage] = (),
) -> Plan:
    """Work backwards from the outputs to the slices they need (fact 1), and to what that takes.

    Parameters
    ----------
    shape
        Sizes of the tensor.
    settings
        What is asked for.
    chosen
        How many frequencies the trajectory uses, where that is known; ``auto`` may use them all.
    limits
        The sizes of tasks.
    more
        Stages that the job has beside those of its outputs.
    """
    all_freqs = count_freqs(shape.n_steps)
    _, count = parse_freqs(settings.freqs)
    in_trajectory = min(count, all_freqs) if count else all_freqs
    if chosen is not None:
        in_trajectory = chosen
    # Another model solves no frequency: it has stages of its own.
    n_freqs = 1 if find_model(settings.model).from_zero_slice else 0
    moves = "trajectory" in settings.outputs
    if moves and not settings.filtered:
        n_freqs = in_trajectory
    if "factors" in settings.outputs:
        n_freqs = all_freqs
    stages = [
        Stage(
            "ingest",
            "edges into one staged tensor",
            tasks=1 + shape.rows // 2**21,
            task_bytes=INGEST_BYTES,
            seconds=shape.rows * SECONDS_ROW,
            disk=shape.mapped_bytes + 16 * shape.n_nodes,
        ),
        *_fit_stages(shape, settings, n_freqs, all_freqs, limits),
        _node_stage(shape, settings, limits),
        *more,
        _table_stage(shape, settings, all_freqs, limits),
    ]
    notes: tuple[str, ...] = ()
    sizes = Sizes(shape.n_nodes, shape.n_steps, shape.n_pairs, shape.n_entries)
    refreshed = any(stage.name == "compare" for stage in more)
    stages += [Stage(*cost) for cost in watch_costs(sizes, settings, limits, refreshed)]
    if moves and settings.filtered:
        costs = filter_costs(sizes, settings, limits, refreshed)
        stages += [Stage(*cost) for cost in costs]
        als = (in_trajectory - 1) * slice_seconds(shape, settings.rank)
        dense = shape.dense(settings)
        notes = (describe_ways(sizes, settings, costs, als, dense, shape.dense_bytes(settings), refreshed),)
    for output in wanted_parts(settings, shape.directed):
        used = all_freqs if output.startswith("factors") else in_trajectory
        if output == "trajectory" and settings.filtered:
            used = 0
            if not shape.dense(settings).steps:
                continue
        stages.append(_part_stage(shape, settings, output, used, limits))
    blocks = count_blocks(shape.n_nodes, shape.n_pairs, limits)
    # A task of one vector per node touches the rows of its block; others may touch all.
    some = set(settings.outputs) == {"embedding"} and find_model(settings.model).from_zero_slice
    mapped = shape.mapped_bytes
    if some and blocks > 1:
        mapped = 2 * mapped // blocks
    return Plan(shape, settings.rank, settings.outputs, n_freqs, tuple(stages), mapped, notes)


def wanted_parts(settings: ModelSettings, directed: bool) -> list[OutputFolder]:
    """Return the folders of Parquet parts that the outputs are made of."""
    parts: list[OutputFolder] = []
    if "embedding" in settings.outputs:
        parts.append("embedding")
        if directed and settings.gauge == "canonical":
            parts.append("embedding_target")
    if "trajectory" in settings.outputs:
        parts.append("trajectory")
    if "factors" in settings.outputs:
        parts += ["factors/A_time", "factors/A_freq"]
    if "spectrum" in settings.outputs:
        parts.append("spectrum")
    return parts


def slice_seconds(shape: Shape, rank: int) -> float:
    """Return the estimated seconds of one slice on one core."""
    return SECONDS_SLICE + _growing_seconds(shape, rank)


def _growing_seconds(shape: Shape, rank: int) -> float:
    """Return the seconds of a slice that grow with it."""
    rank = min(rank, shape.n_nodes)
    return (
        SECONDS_TALL * shape.n_nodes * rank**2 + SECONDS_PAIR * shape.n_pairs * rank + SECONDS_SMALL * rank**3
    )


def batch_freqs(
    freqs: list[int], shape: Shape, rank: int, limits: Limits = LIMITS
) -> Iterator[tuple[int, ...]]:
    """Cut frequencies into tasks of about `limits.task_seconds`."""
    # Of what grows alone: small slices fill a batch up to its largest size anyway.
    size = max(1, min(limits.max_batch, int(limits.task_seconds / _growing_seconds(shape, rank))))
    for start in range(0, len(freqs), size):
        yield tuple(freqs[start : start + size])


def part_rows(
    shape: Shape, settings: ModelSettings, output: OutputFolder, n_freqs: int, limits: Limits = LIMITS
) -> int:
    """Return the nodes of one part: as many as `limits.part_bytes` hold."""
    return max(1, min(shape.n_nodes, limits.part_bytes // _row_bytes(shape, settings, output, n_freqs)))


def iter_parts(n_nodes: int, rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and stop of every part."""
    for index, start in enumerate(range(0, n_nodes, rows)):
        yield index, start, min(start + rows, n_nodes)


def _item(settings: ModelSettings) -> int:
    return 4 if settings.precision == "single" else 8


def _square_bytes(settings: ModelSettings) -> int:
    """Return what r×r numbers in double take: with a rank above the number of nodes, more than n×r."""
    return 8 * settings.rank**2


def _row_bytes(shape: Shape, settings: ModelSettings, output: OutputFolder, n_freqs: int) -> int:
    """Return what one node takes in a task that writes parts, its copies on the way included."""
    item, rank, T = _item(settings), settings.rank, shape.n_steps
    if output in ("embedding", "embedding_target"):
        return rank * (2 * item + 4) + 64
    if output == "spectrum":
        return 2 * 8 * count_freqs(T) + 64
    if output == "factors/A_freq":
        return n_freqs * (rank * 2 * item * 4 + 64)
    if output == "trajectory" and settings.filtered:
        # Vectors, a turned copy, and the page that Parquet is writing; the node's entries.
        each, steps = 1 + shape.n_entries // max(shape.n_nodes, 1), len(shape.dense(settings).steps)
        return rank * (12 * max(1, steps) + ENTRY_BYTES * each) + 48 * T
    # The slices' rows; their inverse transform (which fills in the other frequencies where many are
    # used); its turn; the page that Parquet is writing.
    filled = count_freqs(T) if n_freqs > 4 * math.log2(max(T, 2)) else 0
    return rank * (2 * item * (n_freqs + filled) + (2 * item + 4) * T) + 48 * T


def _fit_stages(
    shape: Shape, settings: ModelSettings, n_freqs: int, all_freqs: int, limits: Limits
) -> list[Stage]:
    """Return the stages that leave the vectors: those of the solver, or those of another model."""
    model = find_model(settings.model)
    if model.from_zero_slice or model.costs is None:
        return _solve_stages(shape, settings, n_freqs, all_freqs, limits)
    if "embedding" not in settings.outputs:
        return []
    sizes = Sizes(shape.n_nodes, shape.n_steps, shape.n_pairs, shape.n_entries)
    return [Stage(*cost) for cost in model.costs(sizes, shape.directed, settings.only(FitSettings))]


def _solve_stages(
    shape: Shape, settings: ModelSettings, n_freqs: int, all_freqs: int, limits: Limits
) -> list[Stage]:
    n, rank, item = shape.n_nodes, min(settings.rank, shape.n_nodes), _item(settings)
    seconds = slice_seconds(shape, rank)
    stages: list[Stage] = []
    alone = 1 if settings.reduce == "sum" or "embedding" not in settings.outputs else 2
    if set(settings.outputs) == {"spectrum"}:
        return []
    tall, square = n * settings.rank * item, _square_bytes(settings)
    weighted = 8 * shape.n_entries if alone == 2 else 0
    if count_blocks(n, shape.n_pairs, limits) > 1:
        cost = _block_cost(shape, settings, shape.directed, limits)
        stages.append(
            Stage(
                "solve zero",
                "the sum over time, in blocks of nodes: every pass is a map over the blocks",
                tasks=cost.blocks,
                task_bytes=cost.task_bytes,
                seconds=alone * cost.seconds,
                disk=alone * cost.disk,
                passes=alone * cost.passes,
                moved=alone * cost.moved,
            )
        )
    else:
        stages.append(
            Stage(
                "solve zero",
                "the sum over time is one frequency; its singular vectors are the common basis",
                tasks=alone,
                task_bytes=solve_bytes(shape, settings, real=True, batch=1) + weighted,
                seconds=alone * seconds,
                disk=alone * (3 * tall + 2 * square),
            )
        )
        # R, AᴴV and their product.
        stages.append(Stage("basis", "singular vectors", alone, 7 * tall + 3 * square, alone * tall / 1e8, 0))
    if "trajectory" in settings.outputs:
        rows, pairs = _block_shape(shape, limits)
        # U or V of a tile; leading directions of both, of the block and of the tile, also in double; C(t).
        stages.append(
            Stage(
                "choose",
                f"which frequencies the trajectory needs ({settings.freqs})",
                tasks=count_blocks(n, shape.n_pairs, limits),
                task_bytes=_largest(shape, limits, rows * (settings.rank * item + 1024), 48 * pairs)
                + 6000 * shape.n_steps
                + 4 * BLOCK_BYTES,
                seconds=2e-8 * shape.n_pairs * shape.n_steps,
                disk=0,
            )
        )
    most = "all" if n_freqs == all_freqs else f"{n_freqs:,} of {all_freqs:,}"
    if n_freqs > 1 and slices_in_blocks(shape, settings, limits):
        cost = _block_cost(shape, settings, True, limits)
        # Complex numbers are two.
        stages.append(
            Stage(
                "solve",
                f"the other frequencies ({most}), one after the other, in blocks of nodes",
                tasks=cost.blocks,
                task_bytes=2 * cost.task_bytes,
                seconds=(n_freqs - 1) * 2 * cost.seconds,
                disk=2 * cost.disk + (n_freqs - 1) * (2 * tall + 4 * square),
                passes=(n_freqs - 1) * cost.passes,
                moved=(n_freqs - 1) * 2 * cost.moved,
            )
        )
    elif n_freqs > 1:
        batches = list(batch_freqs(list(range(1, n_freqs)), shape, rank, limits))
        stages.append(
            Stage(
                "solve",
                f"the other frequencies ({most}), independent of each other",
                tasks=len(batches),
                task_bytes=solve_bytes(shape, settings, real=False, batch=len(batches[0])),
                seconds=(n_freqs - 1) * seconds,
                disk=(n_freqs - 1) * (2 * tall + 4 * square),
            )
        )
    return stages


def slices_in_blocks(shape: Shape, settings: ModelSettings, limits: Limits) -> bool:
    """Whether slices of other frequencies than 0 are cut into blocks: where one is too large for a task."""
    if count_blocks(shape.n_nodes, shape.n_pairs, limits) == 1:
        return False
    return solve_bytes(shape, settings, real=False, batch=1) > limits.slice_bytes


def _block_cost(shape: Shape, settings: ModelSettings, directed: bool, limits: Limits) -> BlockCost:
    sizes = Sizes(shape.n_nodes, shape.n_steps, shape.n_pairs, shape.n_entries)
    return solve_in_blocks(sizes, directed, min(settings.rank, shape.n_nodes), _item(settings), limits)


def _node_stage(shape: Shape, settings: ModelSettings, limits: Limits) -> Stage:
    n, pairs, item = shape.n_nodes, shape.n_pairs, _item(settings)
    tall = n * settings.rank
    blocks = count_blocks(n, pairs, limits)
    # U, V and a copy; two products in double. The slice, its squares and its transpose.
    whole = (3 * item + 16) * tall + 64 * pairs + 64 * n
    return Stage(
        "nodes",
        "degree, last step and residual of every node",
        tasks=blocks,
        task_bytes=whole if blocks == 1 else block_bytes(n, pairs, settings.rank, item, limits),
        seconds=SECONDS_PAIR * pairs * (settings.rank if blocks == 1 else 4) + 1e-8 * tall,
        disk=48 * n,
    )


def _table_stage(shape: Shape, settings: ModelSettings, n_freqs: int, limits: Limits) -> Stage:
    """Return the stage of the small tables, with the cores R of all frequencies where they are asked for."""
    # All of R in double, its two halves, and in time; the pages that Parquet is writing.
    cores = (4 * n_freqs + 4 * shape.n_steps) * _square_bytes(settings)
    asked = "factors" in settings.outputs
    return Stage(
        "tables",
        "steps, fit and nodes; the cores R of factors",
        tasks=1,
        task_bytes=(cores if asked else 0) + 64 * min(shape.n_nodes, limits.table_rows),
        seconds=SECONDS_NODE * shape.n_nodes + (4 * cores / BYTES_PER_SECOND if asked else 0.0),
        disk=((2 * n_freqs + shape.n_steps) * _square_bytes(settings) if asked else 0) + 64 * shape.n_nodes,
    )


def compare_stage(shape: Shape, settings: ModelSettings, limits: Limits = LIMITS) -> Stage:
    """Return the stage in which a refresh is set beside earlier runs."""
    n, item = shape.n_nodes, _item(settings)
    tall = n * settings.rank
    rows, pairs = _block_shape(shape, limits)
    # Rows of vectors pass through in row groups; those of the samples are held.
    held = min(n, COMPARED_ROWS) * settings.rank * item
    return Stage(
        "compare",
        "axes of the previous run, held-out links, drift",
        tasks=count_blocks(n, shape.n_pairs, limits),
        # Which rows are still there; cosines, norms, degrees and their order. The rotation: a sum of
        # products, its singular vectors and their work; measured 8 such arrays.
        task_bytes=9 * n
        + _largest(shape, limits, 160 * rows, 40 * pairs)
        + held
        + 10 * _square_bytes(settings),
        seconds=4 * item * tall / BYTES_PER_SECOND,
        disk=64 * n,
    )


def _largest(shape: Shape, limits: Limits, of_rows: int, of_pairs: int) -> int:
    """Return what a block holds: one of many has many rows with few pairs, or few rows with many."""
    alone = count_blocks(shape.n_nodes, shape.n_pairs, limits) == 1
    return of_rows + of_pairs if alone else max(of_rows, of_pairs)


def _block_shape(shape: Shape, limits: Limits) -> tuple[int, int]:
    """Return the most rows and the most pairs that a block of nodes has."""
    if count_blocks(shape.n_nodes, shape.n_pairs, limits) == 1:
        return shape.n_nodes, shape.n_pairs
    work = work_of_a_block(shape.n_nodes, shape.n_pairs, limits)
    return min(shape.n_nodes, work // ROW_PAIRS), min(shape.n_pairs, work)


def solve_bytes(shape: Shape, settings: ModelSettings, *, real: bool, batch: int) -> int:
    """Return what a task holds that solves `batch` slices, one after the other."""
    n, rank, pairs = shape.n_nodes, min(settings.rank, shape.n_nodes), shape.n_pairs
    item = _item(settings) * (1 if real else 2)
    # Values of the batch, at most a block of them; on the way, as many again and their two real halves.
    held = max(16 * pairs, min(16 * pairs * batch, BLOCK_BYTES))
    transform = 3 * held + 16 * shape.n_steps * batch
    # X/‖X‖ in double, in the solver's precision, and its adjoint.
    matrix = (16 + 2 * item) * pairs
    # A Krylov basis of 4r columns and its work, or nine arrays of r columns in ALS: measured 6.5 to 9 n·r,
    # and as much as one more that was freed and is kept.
    tall = 10 * n * rank * item
    if n <= max(128, 4 * rank):
        tall += 6 * 16 * n * n
    small = 12 * 16 * (4 * rank) ** 2
    # R as it is kept, with zeros up to the rank that was asked for; AᴴV and their product.
    kept = (1 if real else 6) * _square_bytes(settings)
    return max(transform, held + matrix + tall + small) + kept


def _part_stage(
    shape: Shape, settings: ModelSettings, output: OutputFolder, n_freqs: int, limits: Limits
) -> Stage:
    rows = part_rows(shape, settings, output, n_freqs, limits)
    row_bytes = _row_bytes(shape, settings, output, n_freqs)
    disk = shape.n_nodes * _disk_bytes(shape, settings, output, n_freqs)
    if output == "trajectory" and settings.filtered:
        disk = shape.dense_bytes(settings)
    return Stage(
        output,
        "Parquet, one part per block of nodes",
        tasks=math.ceil(shape.n_nodes / rows),
        # One core of a slice at a time, rotated.
        task_bytes=rows * row_bytes + (0 if output == "spectrum" else 5 * _square_bytes(settings)),
        seconds=3 * disk / BYTES_PER_SECOND,
        disk=disk,
    )


def _disk_bytes(shape: Shape, settings: ModelSettings, output: OutputFolder, n_freqs: int) -> int:
    if output == "spectrum":
        return 8 * count_freqs(shape.n_steps) + 16
    if output == "factors/A_freq":
        return 2 * _item(settings) * settings.rank * n_freqs + 16
    if output in ("trajectory", "factors/A_time"):
        return 4 * settings.rank * shape.n_steps + 16
    return 4 * settings.rank + 16
