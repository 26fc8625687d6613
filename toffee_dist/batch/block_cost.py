"""What slices in blocks of nodes take, for the plan: passes, bytes through storage, memory, seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toffee_dist.batch.blocks import ROW_PAIRS, count_blocks, work_of_a_block
from toffee_dist.kernels.solvers.closed_form import DENSE_EIGEN_SHARE, DENSE_SIZE
from toffee_dist.kernels.solvers.compressed import BASIS_SHARE, block_columns
from toffee_dist.kernels.solvers.krylov import EIGEN_LEAST, EIGEN_SHARE
from toffee_dist.limits import Limits
from toffee_dist.storage.tensors import Sizes

# Columns of a Krylov space of an undirected sum, as a multiple of the rank, and iterations of ALS of a
# directed one, as they were on mathoverflow, email and generated graphs of 0.1 to 1 million nodes.
EIGEN_COLUMNS, ALS_STEPS = 5.8, 4
# CPU seconds on one core per pair of a multiplication, per row and product of two columns (Gram matrices and
# sums of tall arrays), and per row and column that goes through storage; fitted to generated graphs, rank 64,
# directed (benchmarks/large.py --only sizes): of ten million nodes the whole job took 425 CPU seconds.
SECONDS_PAIR, SECONDS_SQUARE, SECONDS_COLUMN = 1e-8, 3e-11, 0.75e-8
# Seconds of a pass that do not grow, and of each of its tasks.
SECONDS_PASS, SECONDS_TASK = 0.01, 0.008


@dataclass(frozen=True)
class BlockCost:
    """What a slice in blocks takes.

    Parameters
    ----------
    blocks, passes
        Tasks of a pass, and passes.
    task_bytes
        What the largest task holds.
    seconds
        On one core.
    moved
        Bytes that all passes together read from and write to storage.
    disk
        Bytes that are there at the most.
    """

    blocks: int
    passes: int
    task_bytes: int
    seconds: float
    moved: int
    disk: int


def block_bytes(n_nodes: int, n_pairs: int, rank: int, item: int, limits: Limits) -> int:
    """Return what a task of a block holds: many rows with few pairs, or few with many."""
    # Four tall arrays of a row: a product, the product turned, their sum, and the tile that is mapped; of a
    # pair while the slice is cut and turned, its arrays, their order and copies.
    work = work_of_a_block(n_nodes, n_pairs, limits)
    return max(work // ROW_PAIRS * 4 * rank * item, 64 * work)


def solve_in_blocks(sizes: Sizes, directed: bool, rank: int, item: int, limits: Limits) -> BlockCost:
    """Return what solving one slice in blocks takes.

    A pass of b columns reads the matrix, all blocks of a tall array for every block, and writes one; an
    orthonormalisation reads the whole basis of its own rows, twice.
    """
    n, pairs = sizes.n_nodes, sizes.n_pairs
    blocks = count_blocks(n, pairs, limits)
    if directed:
        width = block_columns(rank)
        side = BASIS_SHARE * rank
        steps = math.ceil(side / width)
        passes = 6 * steps + 3 * ALS_STEPS + 8
        # The start; V, U, the core; X·A and the adjoint of every step.
        columns = [width] * (2 + 3 * steps) + [rank] * (2 * ALS_STEPS + 1)
        squares = 4 * side**2 + 8 * (ALS_STEPS + 2) * rank**2
        basis, written = 2 * side, 4 * side + (3 * ALS_STEPS + 8) * rank
    else:
        width = max(EIGEN_LEAST, -(-rank // EIGEN_SHARE))
        side = math.ceil(EIGEN_COLUMNS * rank)
        steps = math.ceil(side / width)
        passes = 2 * steps + 6
        columns = [width] * steps
        squares = side**2 + 6 * rank**2
        basis, written = side, 2 * side + 6 * rank
    values = (12 + item) * pairs
    # Every block reads the tall array that it is multiplied by as far as its columns reach: all of it.
    tiles = sum(columns) * item * n * blocks
    own = item * n * basis**2 // width
    moved = len(columns) * values + tiles + own + 2 * item * n * written
    seconds = (
        len(columns) * pairs * SECONDS_PAIR
        + 2 * n * squares * SECONDS_SQUARE
        + n * written * SECONDS_COLUMN
        + passes * (SECONDS_PASS + blocks * SECONDS_TASK)
    )
    sides = 3 if directed else 1
    disk = sides * (16 + item) * pairs + item * n * (basis + 4 * rank)
    return BlockCost(blocks, passes, block_bytes(n, pairs, rank, item, limits), seconds, moved, disk)


def find_energy_axes(sizes: Sizes, rank: int, item: int, limits: Limits) -> BlockCost:
    """Return what the axes of all energy take, in one task or in blocks (see `batch.energy`).

    A product is one with F and one with L; what is between them has a row per node, and per source and step
    with two targets or more: of those there are half as many as entries at the most.
    """
    n, entries = sizes.n_nodes, sizes.n_entries
    blocks = count_blocks(n, sizes.n_pairs, limits)
    width = max(EIGEN_LEAST, -(-rank // EIGEN_SHARE))
    side = min(math.ceil(EIGEN_COLUMNS * rank), n)
    steps = math.ceil(side / width)
    between = n + entries // 2
    seconds = steps * (2 * entries + n) * SECONDS_PAIR + 2 * n * (side**2 + 6 * rank**2) * SECONDS_SQUARE
    if blocks == 1:
        # Unfolding takes 49 bytes per entry, and B stays; a Krylov basis and what is made of it, or a matrix.
        dense = 48 * n * n if n <= DENSE_SIZE or rank > DENSE_EIGEN_SHARE * n else 0
        bytes_ = (64 + item) * entries + item * (n * (side + 4 * rank) + 2 * between * width) + dense
        return BlockCost(1, 1, bytes_, seconds, 0, item * n * rank)
    passes = 3 * steps + 6
    # Blocks have about the same work in pairs, and at most twice their share of the entries. Cutting takes
    # 71 bytes per entry of its block, turning 53; a product what is between, its tile and their sum.
    own = min(entries, 2 * entries // blocks)
    rows = work_of_a_block(n, sizes.n_pairs, limits) // ROW_PAIRS
    task = max(
        block_bytes(n, sizes.n_pairs, rank, item, limits),
        (72 + item) * own,
        3 * (own // 2 + rows) * width * item,
    )
    written = 2 * side + 6 * rank
    values = steps * (8 + item) * (2 * entries + n)
    tiles = side * item * blocks * (n + between)
    moved = values + tiles + 2 * side * item * between + item * n * (side**2 // width + 2 * written)
    seconds += (n * written + between * side) * SECONDS_COLUMN
    seconds += passes * (SECONDS_PASS + blocks * SECONDS_TASK)
    disk = 3 * (8 + item) * (entries + n) + item * (n * (side + 4 * rank) + 2 * between * width)
    return BlockCost(blocks, passes, task, seconds, moved, disk)
