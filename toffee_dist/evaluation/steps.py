"""Questions about a coming step: which pairs link on a given day.

Here the frequencies other than zero must earn their keep: a sum over time knows no day.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from toffee_dist.errors import ConfigError, InputError
from toffee_dist.evaluation.events import Events, Int64s, pair_keys
from toffee_dist.kernels.embedding import entries
from toffee_dist.kernels.frequencies import choose_freqs
from toffee_dist.kernels.gauge import common_basis
from toffee_dist.kernels.solvers import solve_slices
from toffee_dist.kernels.spectrum import inverse_transform
from toffee_dist.settings import FitSettings
from toffee_dist.tasks import Say
from toffee_dist.tensor import Floats, TemporalTensor

# Up to this many pairs of nodes, all of them are asked about.
ALL_PAIRS = 4_000_000
# Half-life of the decayed methods, in periods. Not tuned: the four weeks of an earlier measurement.
HALF_LIFE = 4.0
# Shares of the harmonics that ``chosen`` chooses from.
SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class StepCell:
    """One mark of one method at one step: what is measured depends on the question."""

    question: str
    method: str
    step: int
    when: str
    mark: float


@dataclass(frozen=True)
class FutureConfig:
    """Which steps are asked about.

    Parameters
    ----------
    horizon
        The last steps of the data, which are held out and predicted.
    period
        Steps of the rhythm that is expected: 7 for days in a week.
    half_life
        Of the decayed methods, in periods.
    """

    horizon: int = 7
    period: int = 7
    half_life: float = HALF_LIFE

    def __post_init__(self) -> None:
        for name in ("horizon", "period"):
            if getattr(self, name) < 1:
                raise ConfigError(name, got=getattr(self, name), allowed="at least 1 step")
        if self.period < 2:
            raise ConfigError("period", got=self.period, allowed="at least 2 steps")
        if not 0 < self.half_life < np.inf:
            raise ConfigError("half_life", got=self.half_life, allowed="a positive number of periods")


def future_links(
    events: Events, config: FutureConfig, options: FitSettings, say: Say = lambda line: None
) -> list[StepCell]:
    """Ask which pairs link at each of the last steps, from what happened before them.

    The window that is learnt from is a whole number of periods, so that the harmonics of the period are
    frequencies of it, and step T+h has the phase of step h. An entry is 1 where a pair links at a step
    and pairs keep their raw total, whatever the settings of the embedding: a score then is a rate.

    ========================  ==========================================================================
    ``rhythm``                the model at the step's phase: the zero frequency and the period's harmonics
    ``rhythm-decayed``        the same with steps weighted by age before the transform
    ``chosen``                ``decayed`` with the share of the harmonics that served best one period earlier
    ``auto``                  the model at step (T+h) mod T with the frequencies that stand out of the noise
    ``sum``, ``decayed``      the model's zero frequency, plain and weighted by age
    ``last-step``             the pairs of the last step
    ``last-period``           the pairs of the step one period before
    ``count``, ``count-decayed``  how often a pair linked, plain and weighted by age, without a model
    ``count-phase``           how often it linked at this phase of the period, without a model
    ========================  ==========================================================================
    """
    share = _choose_share(events, config, options)
    say(f"share of the rhythm that served best one period earlier: {share:g}")
    grid = events.grid()
    cells = []
    for step, linked, scores in _ask(events, config, options, say):
        low, full = scores["decayed"], scores["rhythm-decayed"]
        scores["chosen"] = low + share * (full - low)
        cells += [
            StepCell("future", method, step, grid.show(step), average_precision(linked, score))
            for method, score in scores.items()
        ]
    return cells


def _choose_share(events: Events, config: FutureConfig, options: FitSettings) -> float:
    """Choose how much of the rhythm to trust, by predicting the last period before the steps asked about."""
    steps = events.grid().steps_of(events.time)
    cut = events.grid().n_steps - config.horizon
    known = events.head(int((steps < cut).sum()))
    earlier = replace(config, horizon=config.period)
    if not len(known) or _whole_periods(known, earlier) < 2:
        return 0.0
    marks: dict[float, list[float]] = {share: [] for share in SHARES}
    for _, linked, scores in _ask(known, earlier, options, lambda line: None, only_shares=True):
        low, full = scores["decayed"], scores["rhythm-decayed"]
        for share, found in marks.items():
            found.append(average_precision(linked, low + share * (full - low)))
    if not marks[0.0]:
        return 0.0
    return max(SHARES, key=lambda share: float(np.mean(marks[share])))


def _whole_periods(events: Events, config: FutureConfig) -> int:
    return (events.grid().n_steps - config.horizon) // config.period


def _ask(
    events: Events, config: FutureConfig, options: FitSettings, say: Say, *, only_shares: bool = False
) -> Iterator[tuple[int, Any, dict[str, Floats]]]:
    """Yield each step that has links: the step, which pairs link, and what every method says of the pairs."""
    learning, window, answers = _cut(events, config, say)
    past = learning.past(window)
    tensor, T, P = past.tensor, past.tensor.n_steps, config.period
    ages = 0.5 ** (np.arange(T)[::-1] / (config.half_life * P))
    rank = options.rank * (options.oversample if tensor.directed else 1)
    solve = options.model_copy(update={"rank": min(rank, tensor.n_nodes)})
    harmonics = [m * (T // P) for m in range(P // 2 + 1)]
    # Pairs of nodes that the past knows, as rows of its tensor; a node not met yet has no score.
    i, j, positive = _candidates(events, past.nodes, tensor, answers, options.seed)

    def entries_of(graph: TemporalTensor, freqs: Sequence[int]) -> dict[int, Any]:
        return {factors.k: entries(factors, i, j) for factors in solve_slices(graph, freqs, solve)}

    decayed = entries_of(tensor.with_step_weights(ages), harmonics)
    plain: dict[int, Any] = {}
    kept: list[int] = []
    tubes = _tubes_of(tensor, i, j)
    if not only_shares:
        (zero,) = solve_slices(tensor, [0], solve)
        kept = choose_freqs(tensor, "auto", common_basis(zero)).freqs
        say(f"frequencies that stand out of the noise: {len(kept)} of {T // 2 + 1}")
        plain = entries_of(tensor, sorted({*harmonics, *kept}))
    for h, (step, linked) in enumerate(zip(answers, positive, strict=True)):
        if not linked.any():
            continue
        scores = {
            "rhythm-decayed": _at(decayed, harmonics, T, h % T),
            "decayed": np.asarray(decayed[0].real) / T,
        }
        if not only_shares:
            phase = np.zeros(T)
            phase[h % P :: P] = 1.0
            scores = {
                "rhythm": _at(plain, harmonics, T, h % T),
                **scores,
                "auto": _at(plain, kept, T, h % T),
                "sum": np.asarray(plain[0].real),
                "last-step": _column(tubes, T - 1),
                "last-period": _column(tubes, T - P + h % P),
                "count": tubes @ np.ones(T),
                "count-decayed": tubes @ ages,
                "count-phase": tubes @ phase,
            }
        yield step, linked, scores


def _cut(events: Events, config: FutureConfig, say: Say) -> tuple[Events, Any, list[int]]:
    """Return the rows before the horizon that fill whole periods, their grid, and the steps to predict."""
    grid = events.grid()
    if grid.step == "distinct":
        raise ConfigError("--step with --future", got="distinct", allowed="steps of one length, such as 1d")
    steps = grid.steps_of(events.time)
    cut = grid.n_steps - config.horizon
    T = cut - cut % config.period
    if T < 2 * config.period:
        raise InputError(
            "too short a past to learn a rhythm from",
            got=f"{max(cut, 0)} steps before the last {config.horizon}",
            allowed=f"at least two periods of {config.period} steps",
            remedy="Use shorter steps, a shorter --period or a smaller --future.",
        )
    first = cut - T
    if first:
        say(f"the first {first} steps are left out: learnt from {T // config.period} whole periods")
    start = grid.start(first)
    window = (steps >= first) & (steps < cut)
    if not window.any():
        raise InputError(
            "no links to learn from",
            got=f"{T} empty steps",
            allowed="at least one link",
            remedy="Use a smaller --future or longer --step.",
        )
    shifted = {"width": grid.width, "origin": start} if grid.width else {"edges": grid.edges[first : cut + 1]}
    inside = replace(grid, n_steps=T, since=start, until=grid.start(cut), **shifted)
    learning = replace(
        events,
        source=events.source[window],
        target=events.target[window],
        time=events.time[window],
        weight=None,
        entry="binary",
        pair_weight="raw",
    )
    return learning, inside, list(range(cut, grid.n_steps))


def _candidates(
    events: Events, nodes: Int64s, tensor: TemporalTensor, answers: Sequence[int], seed: int
) -> tuple[Int64s, Int64s, list[Any]]:
    """Return pairs of known nodes, and which of them link at each step.

    All pairs where that is feasible; otherwise all that were seen, all answers, and as many others.
    """
    n = len(nodes)
    rows = np.full(events.n_nodes, -1)
    rows[nodes] = np.arange(n)
    steps = events.grid().steps_of(events.time)
    late = steps >= answers[0]
    source, target, step = rows[events.source[late]], rows[events.target[late]], steps[late]
    known = (source >= 0) & (target >= 0) & (source != target)
    asked = pair_keys(source[known], target[known], n, events.directed)
    step = step[known]
    if n * n <= ALL_PAIRS:
        i, j = np.divmod(np.arange(n * n), n)
        keys = np.flatnonzero(i != j if events.directed else i < j)
    else:
        rng = np.random.default_rng(seed)
        seen = pair_keys(tensor.sources.astype(np.int64), tensor.indices.astype(np.int64), n, events.directed)
        a, b = rng.integers(0, n, (2, len(seen)))
        drawn = pair_keys(a, b, n, events.directed)
        keys = np.unique(np.concatenate([seen, asked, drawn]))
        keys = keys[keys // n != keys % n]
    return keys // n, keys % n, [np.isin(keys, asked[step == s]) for s in answers]


def _tubes_of(tensor: TemporalTensor, i: Int64s, j: Int64s) -> sp.csr_matrix[Any]:
    """Return the tubes X(i, j, :) of pairs, as a sparse matrix pairs×steps; empty for pairs never seen."""
    n = tensor.n_nodes
    stored = tensor.sources.astype(np.int64) * n + tensor.indices
    wanted = i * n + j
    at = np.minimum(np.searchsorted(stored, wanted), max(len(stored) - 1, 0))
    found = np.flatnonzero(stored[at] == wanted)
    chosen = sp.csr_matrix((np.ones(len(found)), (found, at[found])), shape=(len(wanted), len(stored)))
    return sp.csr_matrix(chosen @ tensor.tubes)


def _column(tubes: sp.csr_matrix[Any], step: int) -> Floats:
    return np.asarray(tubes[:, [step]].toarray()[:, 0], dtype=np.float64)


def _at(hats: dict[int, Any], freqs: Sequence[int], n_steps: int, step: int) -> Floats:
    stacked = np.stack([hats[k] for k in freqs])
    return np.asarray(inverse_transform(stacked, list(freqs), n_steps, [step])[0], dtype=np.float64)


def average_precision(linked: Any, score: Floats) -> float:
    """Return the average precision of scores; pairs of equal score count as drawn at random."""
    # Saves start-up time.
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(linked, score))
