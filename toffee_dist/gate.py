"""The quality gate: whether tonight's run may take the place of the last one, and if not, why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from toffee_dist.config import RefreshSettings


@dataclass(frozen=True)
class Following:
    """What a refresh is of, and what it follows.

    Parameters
    ----------
    night
        A digest of what was asked for, the window and the input: the same night gives the same run.
    window
        First moment in, and first moment out, as the configuration writes them.
    newest
        Tick of the newest edge of the whole input.
    previous, reference
        Folders of the run before and of the one that chain drift is measured against; empty at the start
        of a chain.
    holdout
        Steps at the end that the run before has not seen, as many as are to be tested.
    warm
        Folder of the slices that solves start from; empty: they start afresh.
    cold
        Why they start afresh.
    expire
        Tick: nodes last seen before it are forgotten; None: nobody is.
    """

    night: str
    window: tuple[str, str]
    newest: int
    previous: str = ""
    reference: str = ""
    holdout: int = 0
    warm: str = ""
    cold: str = ""
    expire: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain types."""
        return asdict(self)


@dataclass
class Night:
    """What was found about a refresh, for its manifest."""

    following: Following
    alignment: dict[str, Any] | None = None
    holdout: int = 0
    links: dict[str, Any] | None = None
    saved: dict[str, Any] | None = None
    expired: int = 0
    drift: list[dict[str, Any]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain types; runs by their names, which stay when a folder is moved."""
        data = asdict(self)
        following: dict[str, Any] = data.pop("following")
        following["warm"] = bool(following["warm"])
        for name in ("previous", "reference"):
            following[name] = following[name].rpartition("/")[2]
        return following | data


def judge(
    night: Night, now: Mapping[str, Any], before: Mapping[str, Any], limits: RefreshSettings
) -> list[str]:
    """Return one line for every limit that tonight's run breaks.

    Parameters
    ----------
    night
        With drift against the run before (first) and the held-out links.
    now, before
        Figures of both runs: active nodes, share of energy. Those that the run before lacks are not judged.
    limits
        The limits.

    Examples
    --------
    >>> night = Night(Following("", ("", ""), 0), drift=[{"cosine": {"p50": 0.2}}])
    >>> judge(night, {"active": 10}, {"active": 10}, RefreshSettings())
    ['median cosine to the last run 0.200, at least 0.700']
    """
    reasons = []
    if before.get("active"):
        coverage = now["active"] / before["active"]
        if coverage < limits.min_coverage:
            reasons.append(
                f"active nodes {coverage:.1%} of the last run's, at least {limits.min_coverage:.1%}"
            )
    cosine = night.drift[0]["cosine"].get("p50") if night.drift else None
    if cosine is not None and cosine < limits.min_cosine:
        reasons.append(f"median cosine to the last run {cosine:.3f}, at least {limits.min_cosine:.3f}")
    if "energy_share" in now and "energy_share" in before:
        drop = before["energy_share"] - now["energy_share"]
        if drop > limits.max_energy_drop:
            reasons.append(f"share of energy down by {drop:.3f}, at most {limits.max_energy_drop:.3f}")
    links = night.links
    if links and links["now"] is not None and links["links"] >= limits.min_links:
        drop = links["before"] - links["now"]
        if drop > limits.max_auc_drop:
            reasons.append(
                f"held-out links: AUC {links['now']:.3f} after {links['before']:.3f}, "
                f"at most {limits.max_auc_drop:.3f} less"
            )
    return reasons
