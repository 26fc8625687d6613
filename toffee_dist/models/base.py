"""What every model takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from toffee_dist.edges import Run
from toffee_dist.embedding import step_weights
from toffee_dist.errors import ConfigError
from toffee_dist.gauge import CommonBasis
from toffee_dist.solvers.base import Precision, SolveOptions
from toffee_dist.tensor import Floats, TemporalTensor

Gauge = Literal["canonical", "none"]
Float32s = NDArray[np.float32]
Rows = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class ModelOptions:
    """How to fit a model; checked on construction.

    Parameters
    ----------
    rank
        Columns of a block of the embedding.
    reg_a, reg_r
        λ_A and λ_R; `toffee` and `rescal` use them.
    reduce
        What is summed over time: ``sum``, ``last:N`` or ``decay:H``, in steps or, with a %, as a share of the
        learning time (``decay:5%``); several joined by + give several blocks side by side.
    gauge
        ``canonical``, or ``none`` for the raw A·R of the paper (`toffee`, `toffee-`, `rescal`).
    oversample
        On directed graphs, `toffee` solves this many times the rank and keeps the leading columns of each
        role: one basis of rank r serves two roles, and holds about r/2 directions of each.
    tol, max_iter, precision, seed
        As in `SolveOptions`.
    """

    rank: int = 128
    reg_a: float = 0.01
    reg_r: float = 0.01
    reduce: str = "sum"
    gauge: Gauge = "canonical"
    oversample: int = 1
    tol: float = 1e-4
    max_iter: int = 100
    precision: Precision = "single"
    seed: int = 0

    def __post_init__(self) -> None:
        self.solve()
        if self.gauge not in get_args(Gauge):
            raise ConfigError("gauge", got=repr(self.gauge), allowed=", ".join(get_args(Gauge)))
        if not isinstance(self.oversample, int) or self.oversample < 1:
            raise ConfigError("oversample", got=self.oversample, allowed="an integer from 1")
        reductions(self.reduce, 1)

    def solve(self) -> SolveOptions:
        """Return what the solvers need of it."""
        own = {field.name for field in fields(SolveOptions)} & {field.name for field in fields(self)}
        return SolveOptions(**{name: getattr(self, name) for name in own})


def reductions(spec: str, n_steps: int) -> list[Floats]:
    """Return the step weights of every block of a reduction.

    Examples
    --------
    >>> reductions("sum+last:50%", 4)
    [array([1., 1., 1., 1.]), array([0., 0., 1., 1.])]
    """
    found = []
    for part in spec.split("+"):
        kind, _, amount = part.partition(":")
        if amount.endswith("%"):
            try:
                steps = float(amount[:-1]) / 100 * n_steps
            except ValueError:
                steps = 0.0
            # A share of a short time may be less than a step; the last step is then what is asked for.
            part = f"{kind}:{max(1, round(steps)) if kind == 'last' else steps}" if steps > 0 else spec
        weights = step_weights(part, n_steps)
        found.append(np.ones(n_steps) if weights is None else weights)
    return found


@dataclass(frozen=True, eq=False)
class Block:
    """Vectors of one reduction.

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

    def leading(self, count: int) -> Block:
        """Return the first columns only."""
        target = None if self.target is None else self.target[:, :count]
        return Block(self.source[:, :count], target, self.weights[:count])

    def spread(self, nodes: Rows, n_nodes: int) -> Block:
        """Return the vectors of a larger graph in which these nodes are rows `nodes`; others are zero."""
        out = [None if old is None else np.zeros((n_nodes, old.shape[1]), np.float32) for old in self._roles]
        for new, old in zip(out, self._roles, strict=True):
            if new is not None and old is not None:
                new[nodes] = old
        source, target = out
        return Block(self.source if source is None else source, target, self.weights)

    @property
    def _roles(self) -> tuple[Float32s, Float32s | None]:
        return self.source, self.target


@dataclass(frozen=True, eq=False)
class ModelEmbedding:
    """What an embedding model gives: a block of vectors a reduction, side by side.

    Attributes
    ----------
    objective, iterations
        What the solver reached, where it has such a thing.
    """

    blocks: tuple[Block, ...]
    objective: float | None = None
    iterations: int | None = None

    @property
    def source(self) -> Float32s:
        """One vector a node, (n_nodes, blocks·rank)."""
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


Fit = Callable[[TemporalTensor, ModelOptions, Run, Path | None], ModelEmbedding]
PairScores = Callable[[TemporalTensor, Rows, Rows], Floats]


def canonical_block(basis: CommonBasis, power: float, rank: int, directed: bool) -> Block:
    """Return U·S^power and V·S^power, of which the score U S Vᵀ follows with the weights S^{1−2·power}."""
    S = basis.S[:rank]
    U, V = basis.U[:, :rank].astype(np.float64), basis.V[:, :rank].astype(np.float64)
    scale = S**power
    weights = np.divide(S, scale**2, out=np.zeros_like(S), where=S > 0)
    if directed:
        return Block((U * scale).astype(np.float32), (V * scale).astype(np.float32), weights)
    # V is U with a sign for every column: that of the eigenvalue.
    signs = np.where((U * V).sum(axis=0) < 0, -1.0, 1.0)
    return Block((U * scale).astype(np.float32), None, weights * signs)
