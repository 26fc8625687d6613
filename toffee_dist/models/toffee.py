"""Toffee and Toffee⁻: the zero frequency of X ≈ A∗R∗Aᵀ, one slice a reduction (facts 1 and 7)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from toffee_dist.edges import Run
from toffee_dist.embedding import raw_embedding
from toffee_dist.gauge import common_basis
from toffee_dist.models.base import Block, ModelEmbedding, ModelOptions, canonical_block, reductions
from toffee_dist.solvers import SliceFactors, solve_slices
from toffee_dist.tensor import TemporalTensor


def fit_toffee(
    tensor: TemporalTensor, options: ModelOptions, run: Run, work: Path | None = None
) -> ModelEmbedding:
    """Fit Toffee: U·S^{2/3} and V·S^{2/3} of M_0 = A_0 R_0 A_0ᵀ, or the paper's raw A_0·R_0."""
    rank = options.rank
    solve = options.solve()
    if tensor.directed and options.gauge == "canonical":
        solve = replace(solve, rank=max(rank, min(rank * options.oversample, tensor.n_nodes)))
    blocks, slices = [], []
    for weights in reductions(options.reduce, tensor.n_steps):
        (factors,) = solve_slices(tensor.with_step_weights(weights), [0], solve)
        slices.append(factors)
        blocks.append(to_block(factors, options, tensor.directed))
    objective = sum(factors.report.objective for factors in slices)
    return ModelEmbedding(tuple(blocks), objective, sum(factors.report.iterations for factors in slices))


def to_block(factors: SliceFactors, options: ModelOptions, directed: bool) -> Block:
    """Turn factors of a zero slice into vectors, in the gauge asked for."""
    if options.gauge == "none":
        return Block(raw_embedding(factors), None, np.ones(options.rank))
    # At the optimum of the regularised objective, A·R is U·S^{2/3} up to a rotation and a scale.
    return canonical_block(common_basis(factors), 2 / 3, options.rank, directed)


def fit_toffee_minus(
    tensor: TemporalTensor, options: ModelOptions, run: Run, work: Path | None = None
) -> ModelEmbedding:
    """Fit the paper's Toffee⁻: no regularisation."""
    return fit_toffee(tensor, replace(options, reg_a=0.0, reg_r=0.0), run, work)
