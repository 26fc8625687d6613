"""What every model takes and gives.

A model that gives vectors is fitted by `fit(context)`: its tasks take paths, leave files in the folder of the
context and return small records, so that the same fit runs in this process, on a cluster, and again after a
crash, where it finds on storage what is finished. Per reduction it leaves

    source-<name>.npy, target-<name>.npy (n×r)   weights-<name>.npy (r)   <name>.json, last

which `storage.slices.ZeroSlice` reads by rows and `read_embedding` as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from toffee_dist.kernels.embedding import weigh
from toffee_dist.kernels.gauge import CommonBasis
from toffee_dist.kernels.solvers.base import Tall
from toffee_dist.settings import MODEL_OUTPUTS, Entry, FitSettings, Output, PairWeight, parse_reduce
from toffee_dist.storage.files import link_or_copy, save_array
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.slices import MODEL, array_path, is_finished, load_rows, write_sealed
from toffee_dist.storage.tensors import Sizes
from toffee_dist.tasks import RunTasks, run_here
from toffee_dist.tensor import Floats, TemporalTensor

Float32s = NDArray[np.float32]
Rows = NDArray[np.integer[Any]]


def reductions(spec: str, n_steps: int) -> list[Floats]:
    """Return the step weights of every reduction of a specification.

    Examples
    --------
    >>> reductions("sum+last:50%", 4)
    [array([1., 1., 1., 1.]), array([0., 0., 1., 1.])]
    """
    found = []
    for part in spec.split("+"):
        kind, amount, share = parse_reduce(part, shares=True)
        if share:
            amount = amount / 100 * n_steps
            # A share of a short time may be less than a step; the last step is then what is asked for.
            amount = max(1, round(amount)) if kind == "last" else amount
        found.append(np.ones(n_steps) if kind == "sum" else weigh(kind, amount, n_steps))
    return found


@dataclass(frozen=True, eq=False)
class RoleVectors:
    """Vectors of one reduction, in both roles.

    Attributes
    ----------
    source : (n_nodes, rank) float32
    target : (n_nodes, rank) float32, or None where both roles are the same
    weights : (rank,)
        The model's own score of a pair is Σ_c source[i, c]·weights[c]·target[j, c].
    """

    source: Float32s
    target: Float32s | None
    weights: Floats

    @property
    def targets(self) -> Float32s:
        """The vectors of the target role."""
        return self.source if self.target is None else self.target

    def score(self, i: Rows, j: Rows) -> Floats:
        """Return the model's own score of pairs."""
        left = self.source[i] * self.weights.astype(np.float32)
        return np.asarray(np.einsum("pr,pr->p", left, self.targets[j]), dtype=np.float64)

    def leading(self, count: int) -> RoleVectors:
        """Return the first columns only."""
        target = None if self.target is None else self.target[:, :count]
        return RoleVectors(self.source[:, :count], target, self.weights[:count])

    def spread(self, nodes: Rows, n_nodes: int) -> RoleVectors:
        """Return the vectors of a larger graph in which these nodes are rows `nodes`; others are zero."""
        out = [None if old is None else np.zeros((n_nodes, old.shape[1]), np.float32) for old in self._roles]
        for new, old in zip(out, self._roles, strict=True):
            if new is not None and old is not None:
                new[nodes] = old
        source, target = out
        return RoleVectors(self.source if source is None else source, target, self.weights)

    @property
    def _roles(self) -> tuple[Float32s, Float32s | None]:
        return self.source, self.target


@dataclass(frozen=True, eq=False)
class ModelEmbedding:
    """What an embedding model gives: the vectors of every reduction, side by side.

    Attributes
    ----------
    objective, iterations
        What the solver reached, where it has such a thing.
    """

    blocks: tuple[RoleVectors, ...]
    objective: float | None = None
    iterations: int | None = None

    @property
    def source(self) -> Float32s:
        """One vector per node, (n_nodes, reductions·rank)."""
        return np.hstack([block.source for block in self.blocks])

    @property
    def target(self) -> Float32s | None:
        """The same for nodes as targets, on directed graphs."""
        parts = [block.target for block in self.blocks if block.target is not None]
        return np.hstack(parts) if parts else None

    def score(self, i: Rows, j: Rows) -> Floats:
        """Return the model's own score of pairs, of the first reduction."""
        return self.blocks[0].score(i, j)

    def spread(self, nodes: Rows, n_nodes: int) -> ModelEmbedding:
        """Return it for a larger graph in which these nodes are rows `nodes`."""
        blocks = tuple(block.spread(nodes, n_nodes) for block in self.blocks)
        return ModelEmbedding(blocks, self.objective, self.iterations)


@dataclass(frozen=True)
class FitReport:
    """How a fit went.

    ``objective`` and ``iterations`` are None where a model has no such thing. ``seconds`` are those of the
    call that finished the fit, without what an interrupted call did before.
    """

    objective: float | None
    iterations: int | None
    seconds: float
    converged: bool


@dataclass(frozen=True)
class ReductionTask:
    """The vectors of one reduction: where they come from, and where they go.

    Parameters
    ----------
    tensor
        Folder of the staged tensor.
    folder
        Folder of the results.
    name
        Of the result.
    reduce
        One reduction over time.
    options
        How to fit.
    """

    tensor: str
    folder: str
    name: str
    reduce: str
    options: FitSettings

    def step_weights(self, n_steps: int) -> Floats:
        """Return the weights of the steps."""
        (weights,) = reductions(self.reduce, n_steps)
        return weights

    def finished(self) -> bool:
        """Whether the vectors are on storage, every file whole."""
        return is_finished(to_path(self.folder), self.name, VECTORS)

    def write(self, vectors: RoleVectors, report: FitReport) -> None:
        """Leave the vectors; the report comes last, with the seals of all files."""
        folder = to_path(self.folder)
        paths = {key: array_path(folder, key, self.name) for key in VECTORS}
        seals = {
            "source": save_array(paths["source"], vectors.source),
            "weights": save_array(paths["weights"], vectors.weights),
        }
        if vectors.target is None:
            # Readers of rows ask for a role, whether or not the two differ.
            link_or_copy(paths["source"], paths["target"])
            seals["target"] = seals["source"]
        else:
            seals["target"] = save_array(paths["target"], vectors.target)
        record = {"report": asdict(report), "roles": 1 if vectors.target is None else 2}
        write_sealed(folder, self.name, record, seals)

    def read_report(self) -> FitReport:
        """Return how the fit went that left the vectors."""
        return FitReport(**self._record()["report"])

    def read(self) -> RoleVectors:
        """Return the vectors."""
        folder = to_path(self.folder)
        source, weights = (load_rows(array_path(folder, key, self.name)) for key in ("source", "weights"))
        both = self._record()["roles"] == 2
        return RoleVectors(
            source, load_rows(array_path(folder, "target", self.name)) if both else None, weights
        )

    def _record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((to_path(self.folder) / f"{self.name}.json").read_text())
        return record


VECTORS = ("source", "target", "weights")


def one_role(vectors: Tall) -> RoleVectors:
    """Return vectors that are the same in both roles, and whose score of a pair is their product."""
    return RoleVectors(np.ascontiguousarray(vectors, np.float32), None, np.ones(vectors.shape[1]))


@dataclass(frozen=True, eq=False)
class FitContext:
    """What a fit is given.

    Parameters
    ----------
    tensor
        Folder of the staged tensor.
    folder
        Folder on storage for the work and the results, which every worker sees. It belongs to one fit: what
        is finished in it is not computed again.
    options
        How to fit.
    run
        Where the tasks run.
    name
        Of the results; those of a second and third reduction are called <name>-1 and <name>-2.
    """

    tensor: str
    folder: str
    options: FitSettings
    run: RunTasks = run_here
    name: str = MODEL

    def reduction_tasks(self) -> list[ReductionTask]:
        """Return a task per reduction, each with the options of its own reduction only."""
        return [
            ReductionTask(
                self.tensor,
                self.folder,
                f"{self.name}-{number}" if number else self.name,
                reduce,
                self.options.changed(reduce=reduce),
            )
            for number, reduce in enumerate(self.options.reduce.split("+"))
        ]

    def read_embedding(self, report: FitReport) -> ModelEmbedding:
        """Return what a finished fit left."""
        blocks = tuple(task.read() for task in self.reduction_tasks())
        return ModelEmbedding(blocks, report.objective, report.iterations)


class Cost(NamedTuple):
    """What one map of a fit takes, as the plan shows it (see `batch.plan.Stage`).

    ``task_bytes`` is what one task holds at its peak beside the process and the mapped tensor, ``seconds``
    those of all tasks on one core, ``disk`` the bytes that are on storage at once. Where all tasks run more
    than once, ``passes`` tells how often, and ``moved`` the bytes that they read and write in all of them.
    """

    name: str
    why: str
    tasks: int
    task_bytes: int
    seconds: float
    disk: int
    passes: int = 1
    moved: int = 0


class VectorsInTime(Protocol):
    """What a model in time gives: a vector per node and step, and its own score of pairs at a step."""

    def vectors(self, step: int) -> Float32s:
        """Return the vectors of all nodes at a step, (n_nodes, columns)."""
        ...

    def score(self, step: int, i: Rows, j: Rows) -> Floats:
        """Return the model's own score of pairs at a step; higher: a link is likelier."""
        ...


@dataclass(frozen=True, eq=False)
class StepVectors:
    """Vectors in time that score a pair at a step by the vectors of that step alone.

    Parameters
    ----------
    at
        Gives the vectors of a step, in both roles.
    """

    at: Callable[[int], RoleVectors]

    def vectors(self, step: int) -> Float32s:
        """Return the vectors of all nodes at a step, as sources."""
        return self.at(step).source

    def score(self, step: int, i: Rows, j: Rows) -> Floats:
        """Return the model's own score of pairs at a step."""
        return self.at(step).score(i, j)


Fit = Callable[[FitContext], FitReport]
# Graph, options (rank, seed), and the model's one knob of smoothing, or None where it has none.
FitInTime = Callable[[TemporalTensor, FitSettings, float | None], VectorsInTime]
PairScores = Callable[[TemporalTensor, Rows, Rows], Floats]
Costs = Callable[[Sizes, bool, FitSettings], Sequence[Cost]]


@dataclass(frozen=True)
class Model:
    """One model: vectors (`fit`), or only scores of pairs (`score`).

    Parameters
    ----------
    name, about
        What it is called, and one line about it.
    fit
        Leaves vectors on storage.
    score
        Scores pairs, without vectors.
    from_zero_slice
        Whether its vectors are those of the solved zero slice. The batch job then solves that slice by its
        own tasks, which also give the common basis and the residuals, and does not call `fit`.
    costs
        What a fit takes, given the sizes of the tensor, whether it is directed, and the options; needed of
        models whose `fit` the batch job calls.
    two_roles
        Whether nodes of a directed graph have other vectors as targets than as sources.
    reduces
        Whether it sums over time, so that ``reduce`` means something to it.
    weights
        The entry and the pair weight that it is evaluated with, where they are part of the model; None: those
        that are asked for.
    fit_in_time
        Fits a vector per node and step, in memory: for questions about a step (`evaluation.in_time`).
    smoothing
        Values of the one knob of `fit_in_time`, to choose from on a validation part; empty: it has none.
    powers
        Of the activity by which its scores in time may be divided (`in_time.Projected`), to choose from
        likewise; empty: its scores are what they are.
    """

    name: str
    about: str
    fit: Fit | None = None
    score: PairScores | None = None
    from_zero_slice: bool = False
    costs: Costs | None = None
    two_roles: bool = True
    reduces: bool = True
    weights: tuple[Entry, PairWeight] | None = None
    fit_in_time: FitInTime | None = None
    smoothing: tuple[float, ...] = ()
    powers: tuple[float, ...] = ()

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What the batch job can give with it; nothing of a model that only scores pairs."""
        return MODEL_OUTPUTS.get(self.name, ())


def fit_reductions(context: FitContext, function: Callable[[ReductionTask], FitReport]) -> FitReport:
    """Fit every reduction in a task of its own, unless it is there; return the sum of the reports."""
    tasks = context.reduction_tasks()
    for _ in context.run(function, [task for task in tasks if not task.finished()]):
        pass
    reports = [task.read_report() for task in tasks]
    objectives = [report.objective for report in reports if report.objective is not None]
    iterations = [report.iterations for report in reports if report.iterations is not None]
    return FitReport(
        sum(objectives) if objectives else None,
        sum(iterations) if iterations else None,
        sum(report.seconds for report in reports),
        all(report.converged for report in reports),
    )


def canonical_block(basis: CommonBasis, power: float, rank: int, directed: bool) -> RoleVectors:
    """Return U·S^power and V·S^power, of which the score U S Vᵀ follows with the weights S^{1−2·power}.

    Not `kernels.gauge.canonical_vectors`: that multiplies rows in the precision of the slice, block by block;
    here the product is taken in double and rounded once, which differs from it in the last digit.
    """
    S = basis.S[:rank]
    U, V = basis.U[:, :rank].astype(np.float64), basis.V[:, :rank].astype(np.float64)
    scale = S**power
    weights = np.divide(S, scale**2, out=np.zeros_like(S), where=S > 0)
    if directed:
        return RoleVectors((U * scale).astype(np.float32), (V * scale).astype(np.float32), weights)
    # V is U with a sign per column: that of the eigenvalue.
    signs = np.where((U * V).sum(axis=0) < 0, -1.0, 1.0)
    return RoleVectors((U * scale).astype(np.float32), None, weights * signs)
