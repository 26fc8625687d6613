"""Causal trajectories: what a refresh appends to, and the rows of new nodes in the basis of the chain.

A row of the basis of a causal chain is fixed as long as the trajectory has a link to its node: no vector of
the chain needs any other. All others, those of new nodes and of nodes that were sources only, are rows of the
run's own basis, mapped onto the chain's by least squares over the fixed ones:

    V_chain(j) = V_now(j) M,    M = argmin Σ_i ‖V_now(i) M − V_chain(i)‖² = G⁺ C,    G = Σ v_iᵀ v_i

G and C are sums over blocks of nodes, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from toffee_dist.batch.node_stats import place_of
from toffee_dist.batch.past import Past
from toffee_dist.batch.trajectory import basis_path
from toffee_dist.errors import ConfigError
from toffee_dist.refresh.window import Window, count_steps
from toffee_dist.settings import RefreshConfig
from toffee_dist.storage.compact import CompactTrajectory, find_chain
from toffee_dist.storage.earlier import EarlierRows
from toffee_dist.storage.files import save_array
from toffee_dist.storage.manifest import Manifest
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.slices import load_rows
from toffee_dist.tensor import Floats

# Beside the numbers per node: the basis of the chain, which of its rows are fixed, and M.
BASIS, FIXED, MAP = "chain_basis", "chain_fixed", "chain_map"
# Rows that are multiplied at once.
ROWS = 1 << 15
# Single precision: below this share of the largest, an eigenvalue of G is rounding.
NEGLIGIBLE = 1e-10


def find_appended(config: RefreshConfig, latest: RunFolder, before: Manifest, window: Window) -> int | None:
    """Return how many steps are appended to the trajectory of the previous run; None: there is none.

    Raises
    ------
    ConfigError
        Where its steps are not continued by those of the window.
    """
    if not config.appends or "trajectory" not in before.outputs or find_chain(latest.compact) is None:
        return None
    # Opened before anything is done: a damaged one is refused now.
    reach = Past(run=str(latest.path)).compact.n_steps
    grid, step = before.grid, config.step
    n_steps, new = count_steps(step, window.since, window), count_steps(step, grid.until, window)
    again = "or begin again with --fresh."
    if n_steps != reach:
        raise ConfigError(
            "last of a causal chain",
            got=f"{n_steps:,} steps of {step}",
            allowed=f"{reach:,} steps, as in the previous run: the kernel reaches that far",
            remedy=f"Set --last back, {again}",
        )
    if window.until < grid.until or new > n_steps:
        raise ConfigError(
            "window of a causal chain",
            got=f"{' to '.join(window.texts)}, after a run up to {grid.scale.show(grid.until)}",
            allowed="a window that ends no earlier and leaves no step out: steps are appended",
            remedy=f"Refresh with an --as-of between the two first, {again}",
        )
    if new < n_steps and window.since != grid.start(new):
        raise ConfigError(
            "steps of a causal chain",
            got=f"steps of {step} from {window.texts[0]}, which is inside a step of the previous run",
            allowed="steps that begin when those of the previous run do",
            remedy=f"Use --zone UTC or steps of whole days, {again}",
        )
    return new


def make_past(run: RunFolder, previous: RunFolder, new: int) -> Past:
    """Return what the trajectory of a run goes on from, whose basis is there."""
    past = Past(run=str(previous.path), new=new, basis=str(run.node_stat(BASIS)))
    compact = past.compact
    learnt = compact.kernel.epochs[-1]
    span = compact.kernel.span.append(new, learnt)
    space_id = previous.read_manifest().space_of("trajectory")
    return Past(span.age, span.before, learnt, past.run, new, space_id, past.basis)


@dataclass(frozen=True)
class BasisTask:
    """One block of nodes.

    Parameters
    ----------
    run, previous
        Folders of the two runs.
    bounds, index
        Where rows are cut, and which block.
    """

    run: str
    previous: str
    bounds: tuple[int, ...]
    index: int = 0

    @property
    def folder(self) -> RunFolder:
        """The new run."""
        return RunFolder.at(self.run)

    @property
    def rows(self) -> tuple[int, int]:
        """The rows [start, stop) of the block."""
        return self.bounds[self.index], self.bounds[self.index + 1]

    @property
    def earlier(self) -> EarlierRows:
        """The rows of the previous run."""
        return EarlierRows(self.folder, RunFolder.at(self.previous))

    @cached_property
    def compact(self) -> CompactTrajectory:
        """The trajectory of the previous run."""
        return Past(run=self.previous).compact

    def read(self, start: int, stop: int) -> tuple[Floats, NDArray[np.float32], NDArray[np.bool_]]:
        """Return rows of the run's own basis, those that the chain has, and which of these are fixed."""
        now = load_rows(basis_path(self.folder, "sum"), start, stop).astype(np.float64)
        chain = self.compact.basis(self.earlier.rows(start, stop))
        return now, chain, load_rows(self.folder.node_stat(FIXED), start, start + len(chain))


def find_fixed(task: BasisTask) -> None:
    """Leave which rows of the basis are fixed: those of nodes that the trajectory has a link to."""
    found, earlier = np.zeros(task.bounds[-1], dtype=bool), task.earlier
    rows = earlier.rows(0, len(found))
    found[: len(rows)] = task.compact.targets()[rows]
    save_array(task.folder.node_stat(FIXED), found, durable=False)


@dataclass(frozen=True, eq=False)
class BasisSums:
    """G and C of a block, how many nodes they are of, and how many rows are fixed."""

    G: Floats
    C: Floats
    nodes: int
    fixed: int


def add_up_block(task: BasisTask) -> BasisSums | None:
    """Return the sums of a block; None where no node of it was there before."""
    start, stop = task.rows
    stop = min(stop, task.earlier.shared)
    total: BasisSums | None = None
    for first in range(start, stop, ROWS):
        now, chain, fixed = task.read(first, min(first + ROWS, stop))
        X, Y = now[fixed], chain[fixed].astype(np.float64)
        own = BasisSums(X.T @ X, X.T @ Y, int(X.any(axis=1).sum()), len(X))
        total = own if total is None else _add(total, own)
    return total


def _add(a: BasisSums, b: BasisSums) -> BasisSums:
    return BasisSums(a.G + b.G, a.C + b.C, a.nodes + b.nodes, a.fixed + b.fixed)


def write_map(run: RunFolder, rank: int, parts: Sequence[BasisSums | None]) -> bool:
    """Leave M, r×r; return False where too few nodes are in both runs to say how their axes lie."""
    total: BasisSums | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else _add(total, part)
    if total is None or total.nodes < max(1, min(rank, total.fixed)):
        return False
    # The small matrix decides the bytes of new rows: one thread, as in the workers.
    with threadpool_limits(1, user_api="blas"):
        M = np.linalg.lstsq(total.G, total.C, rcond=NEGLIGIBLE)[0]
    save_array(run.node_stat(MAP), M, durable=False)
    return True


def write_rows(task: BasisTask) -> None:
    """Leave the rows of a block in the basis of the chain: fixed ones as they are, others mapped onto it."""
    run, (start, stop) = task.folder, task.rows
    M = load_rows(run.node_stat(MAP))
    out = np.empty((stop - start, len(M)), dtype=np.float32)
    for first in range(start, stop, ROWS):
        now, chain, fixed = task.read(first, min(first + ROWS, stop))
        own = out[first - start : first - start + len(now)]
        own[:] = now @ M
        own[: len(chain)][fixed] = chain[fixed]
    save_array(place_of(run, BASIS, task.bounds, task.index), out, durable=False)
