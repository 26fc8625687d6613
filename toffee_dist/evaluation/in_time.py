"""Who is linked at a step, and when is a pair linked: held-out entries, for models with a vector per step.

A fifth of the (pair, step) entries is hidden at random. A model is fitted to the others and scores each
hidden entry (i, j, t) against

    who    another pair of nodes that are both active at t, and not linked then
    when   the same pair at another step at which both are active, and not linked

The mark is the AUC, .5 for chance, with the standard error of DeLong. A model's bandwidth, and for each
question how scores relate to activity (`models.in_time.Projected.power`), are chosen on a validation part: a
fifth of the entries that it may see. Who is asked of steadied vectors (`Projected.steadied`), where a model
knows its noise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.stats import rankdata

from toffee_dist import __version__
from toffee_dist.errors import ConfigError, InputError, TooLargeError
from toffee_dist.evaluation.events import Events, Int64s
from toffee_dist.evaluation.kept import Kept, Progress, digest, identify
from toffee_dist.models import MODELS, find_model
from toffee_dist.models.base import Model, Rows
from toffee_dist.models.in_time import Projected, WithPairs
from toffee_dist.settings import FitSettings, PairWeight
from toffee_dist.tasks import Say
from toffee_dist.tensor import Floats, TemporalTensor

MODELS_IN_TIME = ("toffee", "toffee-pairs", "uase", "ipp", "snapshot", "static", "pair-count")
SHARE = 0.2
# Draws of another pair before a question is left out.
DRAWS = 50
# Fewest hidden entries that say anything.
FEWEST = 20


@dataclass(frozen=True)
class Mark:
    """An AUC and its standard error."""

    auc: float
    error: float


@dataclass(frozen=True)
class InTimeCell:
    """The marks of one model on one draw of hidden entries."""

    model: str
    seed: int
    who: float
    who_error: float
    when: float
    when_error: float
    settings: str
    fit_seconds: float


@dataclass(frozen=True, eq=False)
class Entries:
    """Entries (i, j, t) of a tensor with their values; of an undirected one each pair once, i ≤ j."""

    i: Int64s
    j: Int64s
    step: Int64s
    value: Floats
    n_nodes: int
    n_steps: int
    directed: bool

    @classmethod
    def of(cls, tensor: TemporalTensor) -> Entries:
        """Take a tensor apart."""
        pair = tensor.entry_pairs
        i, j = tensor.sources[pair].astype(np.int64), tensor.indices[pair].astype(np.int64)
        once = np.ones(len(i), dtype=bool) if tensor.directed else i <= j
        step = tensor.steps[once].astype(np.int64)
        sizes = (tensor.n_nodes, tensor.n_steps, tensor.directed)
        return cls(i[once], j[once], step, np.asarray(tensor.values)[once], *sizes)

    def take(self, kept: Rows) -> Entries:
        """Return some of them."""
        return replace(self, i=self.i[kept], j=self.j[kept], step=self.step[kept], value=self.value[kept])

    def tensor(self, pair_weight: PairWeight) -> TemporalTensor:
        """Put them together, pairs weighted by what is there."""
        return TemporalTensor.from_events(
            self.i,
            self.j,
            self.step,
            self.value,
            n_nodes=self.n_nodes,
            n_steps=self.n_steps,
            directed=self.directed,
            entry="sum",
            pair_weight=pair_weight,
        )

    @property
    def keys(self) -> Int64s:
        """A number per entry, ascending as the tensor sorts them."""
        return (self.i * self.n_nodes + self.j) * self.n_steps + self.step


@dataclass(frozen=True, eq=False)
class Questions:
    """Hidden entries, and what each is set against; −1 where there is nothing to set it against."""

    known: Entries
    hidden: Entries
    who_i: Int64s
    who_j: Int64s
    when: Int64s


def draw_questions(entries: Entries, seed: int) -> Questions:
    """Hide a fifth of the entries, self-loops aside, and draw what each is set against.

    Raises
    ------
    InputError
        Where too few entries are left to ask about.
    """
    rng = np.random.default_rng(seed)
    asked = (rng.random(len(entries.i)) < SHARE) & (entries.i != entries.j)
    hidden = entries.take(asked)
    who_i, who_j = _others_at(entries, hidden, rng)
    when = _other_steps(entries, hidden, rng)
    if min((who_i >= 0).sum(), (when >= 0).sum()) < FEWEST:
        raise InputError(
            "too few entries to hide",
            got=f"{len(hidden.i)} hidden, {int((when >= 0).sum())} with another step to compare",
            allowed=f"at least {FEWEST}",
            remedy="Use more data, or longer --step.",
        )
    return Questions(entries.take(~asked), hidden, who_i, who_j, when)


def _others_at(entries: Entries, hidden: Entries, rng: np.random.Generator) -> tuple[Int64s, Int64s]:
    """Draw a pair of nodes that are active at the step of each hidden entry, and not linked then."""
    T, n, taken = entries.n_steps, entries.n_nodes, np.sort(entries.keys)
    active = np.unique(np.concatenate([entries.step * n + entries.i, entries.step * n + entries.j]))
    starts = np.searchsorted(active, np.arange(T + 1) * n)
    counts = np.diff(starts)
    who_i, who_j = np.full((2, len(hidden.i)), -1)
    left = np.arange(len(hidden.i))
    for _ in range(DRAWS):
        step = hidden.step[left]
        i, j = (active[starts[step] + rng.integers(0, counts[step])] % n for _ in range(2))
        if not entries.directed:
            i, j = np.minimum(i, j), np.maximum(i, j)
        good = (i != j) & ~_is_in((i * n + j) * T + step, taken)
        who_i[left[good]], who_j[left[good]] = i[good], j[good]
        left = left[~good]
    return who_i, who_j


def _other_steps(entries: Entries, hidden: Entries, rng: np.random.Generator) -> Int64s:
    """Draw a step at which both nodes of each hidden entry are active and not linked to each other."""
    T, n, taken = entries.n_steps, entries.n_nodes, np.sort(entries.keys)
    ones = np.ones(2 * len(entries.i), dtype=np.int8)
    nodes, steps = np.concatenate([entries.i, entries.j]), np.concatenate([entries.step, entries.step])
    active = sp.csr_matrix((ones, (nodes, steps)), shape=(n, T))
    active.data[:] = 1
    when = np.full(len(hidden.i), -1)
    for start in range(0, len(when), 4096):
        part = slice(start, start + 4096)
        both = active[hidden.i[part]].multiply(active[hidden.j[part]]).tocoo()
        row = both.row.astype(np.int64)
        pair = hidden.i[part][row] * n + hidden.j[part][row]
        free = ~_is_in(pair * T + both.col, taken)
        # One of each row's free steps: that of the smallest random number.
        row, col = row[free], both.col[free]
        order = np.lexsort((rng.random(len(row)), row))
        first, at = np.unique(row[order], return_index=True)
        when[start + first] = col[order][at]
    return when


def _is_in(keys: Int64s, taken: Int64s) -> Rows:
    at = np.minimum(np.searchsorted(taken, keys), len(taken) - 1)
    return np.asarray(taken[at] == keys)


def mark_auc(positive: Floats, negative: Floats) -> Mark:
    """Return the chance that a positive scores above a negative, ties half, and DeLong's standard error.

    Examples
    --------
    >>> mark_auc(np.array([3.0, 2.0]), np.array([1.0, 2.0])).auc
    0.875
    """
    p, q = len(positive), len(negative)
    ranks = rankdata(np.concatenate([positive, negative]))
    # How many negatives lie below each positive, and positives above each negative.
    below = (ranks[:p] - rankdata(positive)) / q
    above = 1.0 - (ranks[p:] - rankdata(negative)) / p
    variance = (below.var(ddof=1) / p if p > 1 else 0.0) + (above.var(ddof=1) / q if q > 1 else 0.0)
    return Mark(float(below.mean()), float(np.sqrt(variance)))


class Scorer:
    """A fitted model, asked step by step."""

    def __init__(self, model: Model, tensor: TemporalTensor, options: FitSettings, smoothing: float | None):
        began = time.process_time()
        self._model, self._tensor = model, tensor
        self._found = None if model.fit_in_time is None else model.fit_in_time(tensor, options, smoothing)
        self.fit_seconds = time.process_time() - began

    def score(
        self, i: Int64s, j: Int64s, step: Int64s, power: float | None = None, steadied: bool = False
    ) -> Floats:
        """Return the scores of pairs at steps."""
        scores = np.zeros(len(i))
        found = self._found
        if found is None:
            assert self._model.score is not None
            scores = self._model.score(self._tensor, i, j)
        else:
            if power is not None and isinstance(found, Projected):
                found = found.scored(power, steadied)
            elif power is not None and isinstance(found, WithPairs):
                found = found.scored(power)
            order = np.argsort(step, kind="stable")
            starts = np.searchsorted(step[order], np.arange(self._tensor.n_steps + 1))
            for t in np.flatnonzero(np.diff(starts)):
                rows = order[starts[t] : starts[t + 1]]
                scores[rows] = found.score(int(t), i[rows], j[rows])
        return scores

    def who(self, questions: Questions, power: float | None = None) -> Mark:
        """Return the mark of hidden entries against other pairs at their steps."""
        hidden, asked = questions.hidden, questions.who_i >= 0
        steps = hidden.step[asked]
        scores = self.score(hidden.i[asked], hidden.j[asked], steps, power, steadied=True)
        others = self.score(questions.who_i[asked], questions.who_j[asked], steps, power, steadied=True)
        return mark_auc(scores, others)

    def when(self, questions: Questions, power: float | None = None) -> Mark:
        """Return the mark of hidden entries against their pairs at other steps."""
        hidden, asked = questions.hidden, questions.when >= 0
        scores = self.score(hidden.i[asked], hidden.j[asked], hidden.step[asked], power)
        others = self.score(hidden.i[asked], hidden.j[asked], questions.when[asked], power)
        return mark_auc(scores, others)


def check_models(names: Sequence[str]) -> None:
    """Raise unless every model has something to say of a step."""
    for name in names:
        model = find_model(name)
        if model.fit_in_time is None and model.score is None:
            possible = [other.name for other in MODELS.values() if other.fit_in_time or other.score]
            raise ConfigError(f"model {name} in protocol in-time", got=name, allowed=", ".join(possible))


def ask_in_time(
    events: Events,
    models: Sequence[str],
    options: FitSettings,
    seeds: Sequence[int] = (0,),
    say: Say = lambda line: None,
    cache: Path | None = None,
) -> list[InTimeCell]:
    """Compare models on hidden entries of a graph; see the module.

    A model that is too large for the graph is left out, with words, where there are others.

    Parameters
    ----------
    events
        The graph; its step, entry and pair weight are used.
    models
        Those with a vector per step, or with a score of pairs.
    options
        Rank and seed.
    seeds
        Of the draws of hidden entries.
    say
        Is told what is going on.
    cache
        A folder for cells: those that are there are not made again. None keeps nothing.
    """
    kept = Kept(cache)
    entries = Entries.of(replace(events, pair_weight="raw").past().tensor)
    weights = (events.entry, events.pair_weight)
    graph = digest(__version__, identify(events), *weights, options.model_dump_json()) if cache else ""
    cells = []
    names = list(models)
    progress = Progress(len(names) * len(seeds), say)
    for seed in seeds:
        questions = draw_questions(entries, seed)
        for name in models:
            if name not in names:
                continue
            key = digest("in-time", graph, name, seed)
            there = kept.has_cell(key)

            def make(name: str = name, seed: int = seed, questions: Questions = questions) -> dict[str, Any]:
                return asdict(mark_model(name, questions, events.pair_weight, options, seed))

            try:
                cell = InTimeCell(**kept.cell(key, make))
            except TooLargeError as error:
                if len(models) == 1:
                    raise
                say(f"{name} is left out: {error}")
                names.remove(name)
                progress.total -= len(seeds)
                continue
            cells.append(cell)
            say(f"{name}: who {cell.who:.4f} when {cell.when:.4f} {cell.settings} {cell.fit_seconds:.1f} s")
            progress.step(was_there=there, what=f"in time, {name}, seed {seed}")
    return cells


def mark_model(
    name: str, questions: Questions, pair_weight: PairWeight, options: FitSettings, seed: int
) -> InTimeCell:
    """Choose the settings of a model on a validation part, fit it, and mark it."""
    model = find_model(name)
    smoothing, *powers = choose(model, questions.known, pair_weight, options, seed)
    scorer = Scorer(model, questions.known.tensor(pair_weight), options, smoothing)
    who, when = scorer.who(questions, powers[0]), scorer.when(questions, powers[1])
    words = [] if smoothing is None else [f"bandwidth {smoothing:g}"]
    words += [] if powers[0] is None else [f"powers {powers[0]:g} and {powers[1]:g}"]
    settings = ", ".join(words)
    return InTimeCell(name, seed, who.auc, who.error, when.auc, when.error, settings, scorer.fit_seconds)


def choose(
    model: Model, known: Entries, pair_weight: PairWeight, options: FitSettings, seed: int
) -> tuple[float | None, float | None, float | None]:
    """Return the smoothing, and the powers of who and when, with the best marks on hidden entries of `known`.

    One smoothing for both questions: it makes the vectors. Each question has a power: it only reads them.
    """
    smoothings: Sequence[float | None] = model.smoothing or (None,)
    powers: Sequence[float | None] = model.powers or (None,)
    if len(smoothings) * len(powers) == 1:
        return smoothings[0], powers[0], powers[0]
    questions = draw_questions(known, seed)
    tensor = questions.known.tensor(pair_weight)
    best: tuple[float | None, float | None, float | None] = (None, None, None)
    merit = -1.0
    for smoothing in smoothings:
        scorer = Scorer(model, tensor, options, smoothing)
        who = {power: scorer.who(questions, power).auc for power in powers}
        when = {power: scorer.when(questions, power).auc for power in powers}
        one, two = max(powers, key=lambda power: who[power]), max(powers, key=lambda power: when[power])
        if who[one] + when[two] > merit:
            merit, best = who[one] + when[two], (smoothing, one, two)
    return best
