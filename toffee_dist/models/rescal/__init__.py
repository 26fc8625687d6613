"""RESCAL: X(t) ≈ A R_t Aᵀ, one real A for all snapshots, by alternating least squares.

    f = ½ Σ_t ‖X_t − A R_t Aᵀ‖² + λ_A/2 ‖A‖² + λ_R/2 Σ_t ‖R_t‖²
    R_t ← argmin given A
    A ← Σ_t (X_t A R_tᵀ + X_tᵀ A R_t) · (Σ_t R_t G R_tᵀ + R_tᵀ G R_t + λ_A I)⁻¹,   G = AᵀA

Three things make it fast. Turning A by the eigenvectors of G changes nothing (not even the penalty) and makes
G = diag(w): then R_t = (AᵀX_tA)_ij / (w_i w_j + λ_R), entry by entry. A snapshot touches few nodes, so every
product runs over its active rows only; those of a block of snapshots are stacked, and X_t A of the whole
block is one sparse product. And R_t is made, used and forgotten inside the sweep of its block.

What is n-sized goes through storage, r×r sums through the records of the tasks:

    cut      one task: the snapshots → block-*.npz, rows-*.npy (the nodes that a block touches)
    start    one task: the first A
    sweep    a map over the blocks: numerator-*.npy, what a block adds to Σ_t X_t A R_tᵀ + X_tᵀ A R_t
    update   one task: numerators in the order of the blocks → the next A, turned
    vectors  a map over the reductions: A and Σ_t w_t R_t → the vectors

A sweep with its A is a folder. `state.json` names the last one that lowered the objective: a fit that was
interrupted goes on from there.

| module | question |
|---|---|
| blocks.py | which snapshots lie together, and how a block of them is kept |
| tasks.py | what a task does with what is n-sized |
| fit.py | which tasks run, in which order, and when to stop |
| costs.py | what a fit takes |
"""

from __future__ import annotations

from toffee_dist.models.rescal.costs import rescal_costs
from toffee_dist.models.rescal.fit import RescalFit, fit_rescal, solve_rescal

__all__ = ["RescalFit", "fit_rescal", "rescal_costs", "solve_rescal"]
