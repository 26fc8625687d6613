"""What a fit of RESCAL takes, as the plan shows it."""

from __future__ import annotations

from collections.abc import Sequence

from toffee_dist.models.base import Cost
from toffee_dist.models.rescal.blocks import snapshots_per_block
from toffee_dist.models.tsvd import decomposition_cost
from toffee_dist.settings import FitSettings
from toffee_dist.storage.tensors import Sizes

# Seconds of a sweep per entry·r² and per step·r³; of cutting per entry; of an update and of the vectors per
# n·r². Fitted to email by days (r 128) and mathoverflow by weeks (r 64) and days (r 128), directed and not,
# to a factor of 2. Iterations to converge: 23 on email, 25 and 32 on smaller graphs (benchmarks/evaluate.py).
SWEEP_SECONDS, CORE_SECONDS, CUT_SECONDS, UPDATE_SECONDS, VECTORS_SECONDS = 2e-10, 5e-11, 6e-7, 3e-10, 2e-9
USUAL_ITERATIONS = 30
# How many times the mean the entries of the largest block may be: nothing is known of the snapshots before
# they are cut.
SKEW = 2


def rescal_costs(sizes: Sizes, directed: bool, options: FitSettings) -> Sequence[Cost]:
    """Return what a fit takes.

    The bytes are those of a graph in which every entry has a row of its own in its snapshot; measured peaks
    were 0.35 to 0.8 of them. The disk is that of two sweeps whose blocks touch as many nodes as they can:
    right for email, five times too much for mathoverflow by days.
    """
    n, entries, sides = sizes.n_nodes, sizes.n_entries, 2 if directed else 1
    rank, item = min(options.rank, n), options.dtype.itemsize
    steps = min(sizes.n_steps, entries)
    per_block = snapshots_per_block(n, rank, item)
    n_blocks = max(1, -(-steps // per_block))
    in_block = entries if n_blocks == 1 else min(entries, SKEW * entries // n_blocks)
    sweeps = min(options.max_iter, USUAL_ITERATIONS) + 1
    tall, small = n * rank * item, min(per_block, steps) * rank**2 * item
    start_bytes, start_seconds = decomposition_cost(sizes, rank)
    touched = min(n_blocks * n, sides * entries)
    return [
        Cost(
            "rescal cut",
            "snapshots into blocks",
            tasks=1,
            # The order in time and both ends of every entry; a block and its sides.
            task_bytes=56 * entries + (32 + 48 * sides) * in_block,
            seconds=CUT_SECONDS * entries,
            disk=sides * 24 * entries,
        ),
        Cost(
            "rescal start",
            "leading eigenvectors of the sum over time",
            tasks=1,
            task_bytes=start_bytes,
            seconds=start_seconds,
            disk=0,
        ),
        Cost(
            "rescal sweep",
            f"per iteration (about {sweeps - 1} of them), a task per block of snapshots",
            tasks=n_blocks,
            # A, the numerator, its copies; AᵀX_tA and what becomes of it; X_tA and A of the active rows.
            task_bytes=5 * tall
            + 4 * small
            + (1 + sides) * rank * item * in_block
            + sides * 48 * in_block
            + 8 * 8 * rank**2,
            seconds=sweeps * (SWEEP_SECONDS * entries * rank**2 + CORE_SECONDS * steps * rank**3),
            disk=2 * (tall + rank * item * touched),
        ),
        Cost(
            "rescal update",
            "per iteration, the next A from what the blocks left",
            tasks=1,
            task_bytes=5 * tall + 8 * 8 * rank**2,
            seconds=sweeps * UPDATE_SECONDS * n * rank**2,
            disk=0,
        ),
        Cost(
            "rescal vectors",
            "A·Σ R_t in the gauge asked for",
            tasks=1,
            task_bytes=12 * n * options.rank * item + 16 * n * options.rank,
            seconds=VECTORS_SECONDS * n * rank**2,
            disk=sides * 4 * n * options.rank,
        ),
    ]
