"""Toffee and Toffee⁻: the zero frequency of X ≈ A∗R∗Aᵀ, one slice per reduction (facts 1 and 7)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from toffee_dist.kernels.embedding import raw_embedding
from toffee_dist.kernels.gauge import common_basis
from toffee_dist.kernels.solvers import SliceFactors, solve_slices
from toffee_dist.models.base import (
    FitContext,
    FitReport,
    ReductionTask,
    RoleVectors,
    canonical_block,
    fit_reductions,
)
from toffee_dist.settings import FitSettings
from toffee_dist.storage.tensors import open_tensor


def fit_toffee(context: FitContext) -> FitReport:
    """Fit Toffee: U·S^{2/3} and V·S^{2/3} of M_0 = A_0 R_0 A_0ᵀ, or the paper's raw A_0·R_0."""
    return fit_reductions(context, fit_slice)


def fit_toffee_minus(context: FitContext) -> FitReport:
    """Fit the paper's Toffee⁻: no regularisation."""
    return fit_toffee(replace(context, options=context.options.changed(reg_a=0.0, reg_r=0.0)))


def fit_slice(task: ReductionTask) -> FitReport:
    """Solve the zero slice of one reduction, and leave its vectors."""
    options, tensor = task.options, open_tensor(task.tensor)
    rank, solve = options.rank, options
    if tensor.directed and options.gauge == "canonical":
        solve = solve.changed(rank=max(rank, min(rank * options.oversample, tensor.n_nodes)))
    weighted = tensor.with_step_weights(task.step_weights(tensor.n_steps))
    (factors,) = solve_slices(weighted, [0], solve)
    found = factors.report
    report = FitReport(found.objective, found.iterations, found.seconds, found.converged)
    task.write(to_block(factors, options, tensor.directed), report)
    return report


def to_block(factors: SliceFactors, options: FitSettings, directed: bool) -> RoleVectors:
    """Turn factors of a zero slice into vectors, in the gauge asked for."""
    if options.gauge == "none":
        return RoleVectors(raw_embedding(factors), None, np.ones(options.rank))
    # At the optimum of the regularised objective, A·R is U·S^{2/3} up to a rotation and a scale.
    return canonical_block(common_basis(factors), 2 / 3, options.rank, directed)
