"""The iteration: which tasks run, in which order, and when the objective has settled."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from toffee_dist.kernels.solvers.als import DAMPINGS, REG_FLOOR
from toffee_dist.kernels.solvers.base import Small, Tall
from toffee_dist.models.base import FitContext, FitReport
from toffee_dist.models.rescal.tasks import (
    A_FILE,
    CutTask,
    GramRecord,
    StartTask,
    SweepTask,
    UpdateTask,
    VectorsTask,
    cut,
    read_scaled,
    start_sweep,
    sweep,
    update,
    write_vectors,
)
from toffee_dist.settings import SolverSettings
from toffee_dist.storage.files import remove_tree, save_array, write_json
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.slices import load_rows
from toffee_dist.tasks import RunTasks

STATE = "state.json"


@dataclass(frozen=True, eq=False)
class RescalFit:
    """Where A is, the cores Σ_t w_t R_t (reductions, rank, rank), whether X is directed, and how it went.

    ``history`` holds the objective at the start and after every iteration. The A on storage is that of
    X/‖X‖; `read_factor` returns that of X, padded to the rank.
    """

    A: Path
    scale: float
    cores: Small
    directed: bool
    history: list[float]
    converged: bool

    @property
    def objective(self) -> float:
        """The last objective."""
        return self.history[-1]

    @property
    def iterations(self) -> int:
        """How many iterations were made."""
        return len(self.history) - 1

    def read_factor(self) -> Tall:
        """Return A (n, rank)."""
        return read_scaled(self.A, self.scale, self.cores.shape[-1])


def fit_rescal(context: FitContext) -> FitReport:
    """Fit RESCAL; the vectors are A·Σ_t R_t, in the canonical gauge or raw."""
    wanted = context.reduction_tasks()
    missing = [number for number, task in enumerate(wanted) if not task.finished()]
    if not missing:
        return wanted[0].read_report()
    began = time.perf_counter()
    work = to_path(context.folder) / f"{context.name}-work"
    options = context.options
    fitted = solve_rescal(context.tensor, work, options, options.reduce, context.run)
    seconds = time.perf_counter() - began
    report = FitReport(fitted.objective, fitted.iterations, seconds, fitted.converged)
    items = [
        VectorsTask(
            wanted[number], str(fitted.A), fitted.scale, fitted.cores[number], fitted.directed, report
        )
        for number in missing
    ]
    for _ in context.run(write_vectors, items):
        pass
    remove_tree(work)
    return report


def solve_rescal(
    tensor: str,
    work: Path,
    options: SolverSettings,
    reduce: str,
    run: RunTasks,
    start: Path | None = None,
) -> RescalFit:
    """Run ALS over all snapshots until it converges; the objective falls at every iteration.

    Parameters
    ----------
    tensor
        Folder of the staged tensor; empty snapshots cost nothing.
    work
        Folder for blocks and sweeps; a state that is there is gone on from.
    options
        Uses rank, λ, ``tol``, ``max_iter``, ``precision`` and ``seed``. λ below `REG_FLOOR` counts as that.
    reduce
        Which sums of R_t are wanted.
    run
        Where the tasks run.
    start
        File of the first A; by default the leading eigenvectors of Σ_t X_t + X_tᵀ.
    """
    work.mkdir(parents=True, exist_ok=True)
    [found] = run(cut, [CutTask(tensor, str(work), reduce, options)])
    rank, size = min(options.rank, found.n_nodes), found.size
    # As for a slice: ‖X‖ = 1, A and R scaled by c^{1/3}, λ by c^{4/3}, f by c².
    floor = REG_FLOOR[np.finfo(options.dtype).bits]
    reg_a, reg_r = (max(reg / size ** (4 / 3), floor) if size else floor for reg in _regs(options))
    sweeps = _Sweeps(
        work, found.n_blocks, options.model_copy(update={"rank": rank, "reg_a": reg_a, "reg_r": reg_r}), run
    )
    state = _State.read(work)
    if state is None:
        given = "" if start is None else str(start)
        task = StartTask(tensor, str(sweeps.folder(0)), size, sweeps.options, given)
        [record] = run(start_sweep, [task])
        sums, value = sweeps.sweep(0, record, reduce.count("+") + 1)
        # A graph without entries has nothing to fit.
        state = _State(0, sums, [value if size else 0.0], converged=size == 0)
        state.write(work)
    while len(state.history) <= options.max_iter and not state.converged:
        new = sweeps.iterate(state)
        new.write(work)
        if new.number != state.number:
            # Only now: until the new state was written, a resumed fit would have gone on from the old one.
            remove_tree(sweeps.folder(state.number))
        state = new
    scale, missing = float(np.cbrt(size)), options.rank - rank
    cores = np.pad(state.sums.reduced * scale, ((0, 0), (0, missing), (0, missing)))
    history = [value * size**2 for value in state.history]
    A = sweeps.folder(state.number) / A_FILE
    return RescalFit(A, scale, cores, found.directed, history, state.converged)


def _regs(options: SolverSettings) -> tuple[float, float]:
    return options.reg_a, options.reg_r


@dataclass(frozen=True, eq=False)
class _Sums:
    """What a sweep over all blocks gives, beside the numerators on storage."""

    normal: Small
    reduced: Small


@dataclass(frozen=True, eq=False)
class _State:
    """The last sweep that lowered the objective, and the objectives so far (of X/‖X‖)."""

    number: int
    sums: _Sums
    history: list[float]
    converged: bool

    def write(self, work: Path) -> None:
        """Leave it for a fit that goes on; the files of its sweep are whole by now."""
        arrays = _sum_paths(work, self.number)
        save_array(arrays[0], self.sums.normal)
        save_array(arrays[1], self.sums.reduced)
        data = {"number": self.number, "history": self.history, "converged": self.converged}
        write_json(work / STATE, data)

    @classmethod
    def read(cls, work: Path) -> _State | None:
        """Return what an interrupted fit left; None where that is nothing."""
        if not (work / STATE).exists():
            return None
        data = json.loads((work / STATE).read_text())
        normal, reduced = (load_rows(path) for path in _sum_paths(work, data["number"]))
        return cls(sums=_Sums(normal, reduced), **data)


@dataclass(frozen=True, eq=False)
class _Sweeps:
    """The sweeps of one fit: tasks for what is n-sized, r×r algebra here."""

    work: Path
    n_blocks: int
    options: SolverSettings
    run: RunTasks

    def folder(self, number: int) -> Path:
        """Return the folder of a sweep.

        A number is never used for another A: a late task must not write over the files of a newer sweep.
        """
        folder = _sweep_path(self.work, number)
        folder.mkdir(exist_ok=True)
        return folder

    def iterate(self, state: _State) -> _State:
        """Return the state after one more iteration."""
        inverse = self._invert(state.sums.normal)
        source, value = str(self.folder(state.number)), state.history[-1]
        # The update replaces A in both its places at once and may overshoot; a shorter step then lowers f.
        for number, share in enumerate(DAMPINGS, start=state.number + 1):
            target = self.folder(number)
            task = UpdateTask(str(self.work), source, str(target), self.n_blocks, inverse, share)
            [record] = self.run(update, [task])
            sums, found = self.sweep(number, record, len(state.sums.reduced))
            if found < value:
                converged = value - found <= self.options.tol * found
                return _State(number, sums, [*state.history, found], converged)
            remove_tree(target)
        return replace(state, converged=True)

    def sweep(self, number: int, record: GramRecord, n_reductions: int) -> tuple[_Sums, float]:
        """Find the best R_t for the A of a sweep; return the sums of all blocks, and the objective."""
        G, w = record.G, record.w
        eps = float(np.finfo(self.options.dtype).eps)
        present = w > eps * w[-1]
        w = np.where(present, w, 0.0)
        scale = np.multiply.outer(w, w) + self.options.reg_r
        usable = np.logical_and.outer(present, present)
        inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=usable)
        folder = str(self.folder(number))
        tasks = (SweepTask(str(self.work), folder, block, w, inverse) for block in range(self.n_blocks))
        # In the order of the blocks, so that the sums do not depend on who was first.
        normal, squares, reduced = np.zeros_like(G), np.zeros_like(G), np.zeros((n_reductions, *G.shape))
        for found in self.run(sweep, tasks):
            normal += found.normal
            squares += found.squares
            reduced += found.reduced
        # With R = M∘K: Σ ⟨R, M⟩ = ⟨K, Q⟩, Σ ⟨R, GRG⟩ = ⟨K² w wᵀ, Q⟩, Σ ‖R‖² = ⟨K², Q⟩, Q = Σ_t M∘M; ‖X‖ = 1.
        misfit = 1.0 - 2.0 * float((inverse * squares).sum())
        misfit += float((inverse**2 * np.multiply.outer(w, w) * squares).sum())
        penalty = self.options.reg_a * float(np.trace(G))
        penalty += self.options.reg_r * float((inverse**2 * squares).sum())
        return _Sums(normal, reduced), 0.5 * (misfit + penalty)

    def _invert(self, normal: Small) -> Small:
        N = normal.copy()
        # A ridge at the rounding error of the tall arrays: spare rank makes N singular.
        ridge = np.finfo(self.options.dtype).eps * np.trace(N) / len(N)
        N[np.diag_indices_from(N)] += self.options.reg_a + max(float(ridge), np.finfo(np.float64).tiny)
        return np.asarray(np.linalg.inv(N))


def _sweep_path(work: Path, number: int) -> Path:
    return work / f"sweep-{number:05d}"


def _sum_paths(work: Path, number: int) -> tuple[Path, Path]:
    folder = _sweep_path(work, number)
    return folder / "normal.npy", folder / "reduced.npy"
