"""The quality gate: whether a new run may take the place of the previous one, and if not, why not."""

from __future__ import annotations

from toffee_dist.settings import RefreshSettings
from toffee_dist.storage.manifest import Drift, LinksRecord, Metrics


def judge(
    now: Metrics, before: Metrics, drift: Drift | None, links: LinksRecord | None, limits: RefreshSettings
) -> list[str]:
    """Return one line for every limit that the new run breaks.

    Parameters
    ----------
    now, before
        Figures of both runs: active nodes, share of energy. Those that the previous run lacks are not judged.
    drift
        Against the previous run.
    links
        The held-out links.
    limits
        The limits.

    Examples
    --------
    >>> figures = Metrics(nodes=9, steps=1, solved=1, reused=0, seconds={}, active=9)
    >>> judge(figures.replaced(active=3), figures, None, None, RefreshSettings())
    ["active nodes 33.3% of the previous run's, at least 50.0%"]
    """
    reasons = []
    if before.active:
        coverage = (now.active or 0) / before.active
        if coverage < limits.min_coverage:
            reasons.append(
                f"active nodes {coverage:.1%} of the previous run's, at least {limits.min_coverage:.1%}"
            )
    cosine = None if drift is None else drift.cosine.get("p50")
    if cosine is not None and cosine < limits.min_cosine:
        reasons.append(f"median cosine to the previous run {cosine:.3f}, at least {limits.min_cosine:.3f}")
    if now.energy_share is not None and before.energy_share is not None:
        drop = before.energy_share - now.energy_share
        if drop > limits.max_energy_drop:
            reasons.append(f"share of energy down by {drop:.3f}, at most {limits.max_energy_drop:.3f}")
    if links is not None and links.now is not None and links.links >= limits.min_links:
        assert links.before is not None
        drop = links.before - links.now
        if drop > limits.max_auc_drop:
            reasons.append(
                f"held-out links: AUC {links.now:.3f} after {links.before:.3f}, "
                f"at most {limits.max_auc_drop:.3f} less"
            )
    return reasons
