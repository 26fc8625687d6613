"""The evaluation: models × features × seeds on one graph, every cell kept."""

from __future__ import annotations

import tempfile
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np

from toffee_dist.errors import ConfigError
from toffee_dist.evaluation.classify import Classifier, Marks, check_classifier, mark
from toffee_dist.evaluation.events import Events, Past
from toffee_dist.evaluation.features import OPERATORS, Features, check_features, pair_features
from toffee_dist.evaluation.protocols import Examples, Protocol, Split, Splits, check_protocol
from toffee_dist.models import FitContext, ModelEmbedding, find_model, fit_staged
from toffee_dist.settings import Entry, FitSettings, PairWeight
from toffee_dist.storage.files import remove_tree
from toffee_dist.storage.tensors import stage_tensor
from toffee_dist.tasks import RunTasks, Say, run_here

# What --grid may search, and how a word of it is read.
GRID = {"rank": int, "reg": float, "entry": str, "pair_weight": str, "reduce": str}
SCORE = "score"


@dataclass(frozen=True)
class EvaluateConfig:
    """What to compare; checked on construction.

    Parameters
    ----------
    protocols, models, features
        Names; every combination becomes a row. Models without vectors have their score as only feature.
    classifier
        ``logistic`` (the paper's) or ``trees``.
    seeds, first_seed
        How many draws of examples, and the seed of the first.
    options
        Of the models.
    grid
        Values to choose from, by name (`GRID`), on a validation part cut from the learning time.
    """

    protocols: tuple[str, ...] = ("link-paper",)
    models: tuple[str, ...] = ("toffee", "toffee-", "tsvd", "rescal", "memory", "degree")
    features: tuple[str, ...] = (*OPERATORS, "combined")
    classifier: str = "logistic"
    seeds: int = 10
    options: FitSettings = field(default_factory=FitSettings)
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    first_seed: int = 0

    def __post_init__(self) -> None:
        for protocol in self.protocols:
            check_protocol(protocol)
        for name in self.models:
            model = find_model(name)
            if self.protocols and model.fit is None and model.score is None:
                raise ConfigError(
                    f"model {name}",
                    got=", ".join(self.protocols),
                    allowed="protocol in-time",
                    remedy="It has a vector per step, and none for the whole time.",
                )
        for features in self.features:
            check_features(features)
        check_classifier(self.classifier)
        if self.seeds < 1 or self.first_seed < 0:
            got = f"{self.seeds} from {self.first_seed}"
            raise ConfigError("seeds", got=got, allowed="at least 1, from 0 or more")
        for name, values in self.grid.items():
            for entry in values if name in ("entry", "pair_weight") else ():
                allowed = get_args(Entry) if name == "entry" else get_args(PairWeight)
                if entry not in allowed:
                    raise ConfigError(f"grid of {name}", got=repr(entry), allowed=", ".join(allowed))
            if name not in GRID:
                raise ConfigError("grid", got=name, allowed=", ".join(GRID))


@dataclass(frozen=True)
class Cell:
    """One mark of one model: a row of the result."""

    part: str
    protocol: str
    model: str
    features: str
    classifier: str
    seed: int
    micro_f1: float
    roc_auc: float
    average_precision: float
    fresh_f1: float
    fit_seconds: float
    seconds: float
    settings: str


class Fits:
    """Models fitted on one learning part, each once: an embedding does not depend on the sampling seed.

    Parameters
    ----------
    learning
        The links to learn from.
    run, work
        Where the tasks of the fits run, and a folder that all of them see; by default a temporary one.
    """

    def __init__(self, learning: Events, run: RunTasks = run_here, work: Path | None = None) -> None:
        self._learning, self._run = learning, run
        self._folder = (work or Path(tempfile.gettempdir())) / f"toffee-{uuid.uuid4().hex[:12]}"
        self._folder.mkdir(mode=0o700)
        # Gone with this object.
        weakref.finalize(self, remove_tree, self._folder)
        self._pasts: dict[tuple[str, str], Past] = {}
        self._fitted: dict[tuple[object, ...], tuple[ModelEmbedding, float]] = {}
        self.count = 0

    def past(self, entry: str, pair_weight: str) -> Past:
        """Return the tensor of the learning part with these weights."""
        key = (entry, pair_weight)
        if key not in self._pasts:
            self._pasts[key] = replace(self._learning, entry=entry, pair_weight=pair_weight).past()  # type: ignore[arg-type]
        return self._pasts[key]

    def embedding(
        self, model: str, options: FitSettings, entry: str, pair_weight: str
    ) -> tuple[ModelEmbedding, float]:
        """Return the vectors of all nodes of the graph (zero for those not met yet), and the CPU seconds."""
        key = (model, options, entry, pair_weight)
        if key not in self._fitted:
            past = self.past(entry, pair_weight)
            tensor, folder = self._stage(entry, pair_weight), self._folder / f"fit-{self.count}"
            began = time.process_time()
            context = FitContext(str(tensor), str(folder), options, self._run)
            found = context.read_embedding(fit_staged(model, context))
            seconds = time.process_time() - began
            remove_tree(folder)
            self._fitted[key] = found.spread(past.nodes, self._learning.n_nodes), seconds
            self.count += 1
        return self._fitted[key]

    def _stage(self, entry: str, pair_weight: str) -> Path:
        """Return the folder of the learning part's tensor, which the tasks read."""
        folder = self._folder / f"tensor-{entry}-{pair_weight}"
        if not folder.exists():
            stage_tensor(self.past(entry, pair_weight).tensor, folder)
        return folder

    def score(self, model: str, i: Any, j: Any, entry: str, pair_weight: str) -> Any:
        """Return the scores of a model without vectors; 0 for pairs with a node not met yet."""
        past = self.past(entry, pair_weight)
        rows = np.full(self._learning.n_nodes, -1)
        rows[past.nodes] = np.arange(len(past.nodes))
        known = (rows[i] >= 0) & (rows[j] >= 0)
        scores = np.zeros(len(i))
        scorer = find_model(model).score
        if scorer is not None:
            scores[known] = scorer(past.tensor, rows[i[known]], rows[j[known]])
        return scores


@dataclass(frozen=True)
class Settings:
    """One point of a grid."""

    options: FitSettings
    entry: str
    pair_weight: str

    def moved(self, point: Mapping[str, Any]) -> Settings:
        """Return it with the values of a grid point."""
        values = dict(point)
        reg = values.pop("reg", None)
        own = {name: values.pop(name) for name in ("entry", "pair_weight") if name in values}
        if reg is not None:
            values |= {"reg_a": reg, "reg_r": reg}
        return replace(self, options=self.options.changed(**values), **own)

    def __str__(self) -> str:
        names = ("rank", "reg_a", "reduce", "gauge", "oversample")
        parts = [f"{name.removesuffix('_a')}={getattr(self.options, name)}" for name in names]
        return " ".join([*parts, f"entry={self.entry}", f"pair_weight={self.pair_weight}"])


def evaluate(
    events: Events,
    config: EvaluateConfig,
    *,
    splits: Path | None = None,
    run: RunTasks = run_here,
    work: Path | None = None,
    say: Say = lambda line: None,
) -> list[Cell]:
    """Compare models on one graph.

    Parameters
    ----------
    events
        All links; the first 75 % are learnt from.
    config
        What to compare.
    splits
        A folder for the examples: read where they are there, else written. The same splits make two
        evaluations exactly comparable.
    run, work
        Where the tasks of the fits run, and a folder that all of them see; by default a temporary one.
    say
        Is told what is going on.

    Returns
    -------
    cells
        With a grid, those of the validation part too, marked by ``part``.
    """
    base = Settings(config.options, events.entry, events.pair_weight)
    if "sum" in config.grid.get("entry", ()) and events.entry != "sum":
        raise ConfigError(
            "grid of entry",
            got="sum, of weights that were not read",
            allowed="sum where the edges are read with it",
            remedy="Add --entry sum.",
        )
    chosen = dict.fromkeys(config.models, base)
    cells: list[Cell] = []
    if config.grid:
        names = list(config.grid)
        points = [dict(zip(names, values, strict=True)) for values in product(*config.grid.values())]
        candidates = [base.moved(point) for point in points]
        past = Split.validation(len(events))
        # The validation part knows nothing of what comes after it, not even which pairs never link.
        known = events.head(past.end)
        cells = _run_part(
            "validation", known, past, config, dict.fromkeys(config.models, candidates), None, run, work
        )
        for model in config.models:
            marks = {
                str(point): _merit([c for c in cells if (c.model, c.settings) == (model, str(point))])
                for point in candidates
            }
            chosen[model] = max(candidates, key=lambda point: marks[str(point)])
            say(f"{model}: chosen on the validation part: {chosen[model]} ({marks[str(chosen[model])]:.4f})")
    wanted = {model: [chosen[model]] for model in config.models}
    return cells + _run_part("test", events, Split.test(len(events)), config, wanted, splits, run, work)


def _merit(cells: Sequence[Cell]) -> float:
    """Return what a choice is made by: the mean Micro-F1 of the best features, over the protocols."""
    marks: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        marks.setdefault((cell.protocol, cell.features), []).append(cell.micro_f1)
    best: dict[str, float] = {}
    for (protocol, _), values in marks.items():
        best[protocol] = max(best.get(protocol, 0.0), float(np.mean(values)))
    return float(np.mean(list(best.values())))


def _run_part(
    part: str,
    events: Events,
    split: Split,
    config: EvaluateConfig,
    wanted: Mapping[str, Sequence[Settings]],
    folder: Path | None,
    run: RunTasks,
    work: Path | None,
) -> list[Cell]:
    fits = Fits(events.head(split.learn), run, work)
    splits = Splits(events, split, folder)
    cells = []
    seeds = range(config.first_seed, config.first_seed + config.seeds)
    for protocol, seed in product(map(check_protocol, config.protocols), seeds):
        examples = splits.examples(protocol, seed)
        for model in config.models:
            for settings in wanted[model]:
                cells += _mark_model(part, protocol, seed, model, settings, examples, fits, config)
    return cells


def _mark_model(
    part: str,
    protocol: Protocol,
    seed: int,
    model: str,
    settings: Settings,
    examples: Examples,
    fits: Fits,
    config: EvaluateConfig,
) -> list[Cell]:
    weights = (settings.entry, settings.pair_weight)
    cells = []
    classifier: Classifier = check_classifier(config.classifier)
    specs = config.features if find_model(model).fit else (SCORE,)
    for spec in specs:
        fit_seconds = 0.0
        if spec == SCORE:
            scores = fits.score(model, examples.source, examples.target, *weights)
            features = Features(scores[:, None], np.empty((len(scores), 0)))
            began = time.process_time()
        else:
            embedding, fit_seconds = fits.embedding(model, settings.options, *weights)
            began = time.process_time()
            features = pair_features(embedding, examples.source, examples.target, spec)
        # A control is one number: trees could only overfit it.
        marks: Marks = mark(features, examples, "logistic" if spec == SCORE else classifier, seed)
        seconds = time.process_time() - began
        used = "logistic" if spec == SCORE else classifier
        named = (part, protocol, model, spec, used, seed)
        cells.append(
            Cell(*named, **asdict(marks), fit_seconds=fit_seconds, seconds=seconds, settings=str(settings))
        )
    return cells
