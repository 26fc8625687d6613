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

from toffee_dist import __version__
from toffee_dist.errors import ConfigError
from toffee_dist.evaluation.classify import Classifier, Marks, check_classifier, mark
from toffee_dist.evaluation.events import Events, Past
from toffee_dist.evaluation.features import OPERATORS, Features, check_features, pair_features
from toffee_dist.evaluation.kept import Kept, Progress, Usage, digest, identify, measured
from toffee_dist.evaluation.protocols import Examples, Protocol, Split, Splits, check_protocol
from toffee_dist.models import FitContext, ModelEmbedding, check_reduce, find_model, fit_staged
from toffee_dist.settings import Entry, FitSettings, PairWeight, RivalSettings
from toffee_dist.storage.files import remove_tree
from toffee_dist.storage.tensors import stage_tensor
from toffee_dist.tasks import RunTasks, Say, run_here

# What --grid may search, and how a word of it is read.
GRID = {
    "rank": int,
    "reg": float,
    "entry": str,
    "pair_weight": str,
    "reduce": str,
    "walks": int,
    "window": int,
    "shortest_walk": int,
    "walk_decay": float,
    "negatives": int,
    "epochs": int,
    "learning_rate": float,
    "history": int,
    "snapshots": int,
    "smoothness": float,
}
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
            if self.protocols and model.fit is not None:
                check_reduce(model, self.options.reduce)
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
    fit_mib: float
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
    kept
        Where fits are kept for another evaluation.
    """

    def __init__(
        self,
        learning: Events,
        run: RunTasks = run_here,
        work: Path | None = None,
        kept: Kept | None = None,
    ) -> None:
        self._learning, self._run, self._kept = learning, run, kept or Kept(None)
        self._graph = "" if kept is None else identify(learning)
        self._folder = (work or Path(tempfile.gettempdir())) / f"toffee-{uuid.uuid4().hex[:12]}"
        self._folder.mkdir(mode=0o700)
        # Gone with this object.
        weakref.finalize(self, remove_tree, self._folder)
        self._pasts: dict[tuple[str, str], Past] = {}
        self._fitted: dict[tuple[object, ...], tuple[ModelEmbedding, Usage]] = {}
        self.count = 0
        # Seconds on the clock of the fits so far.
        self.seconds = 0.0

    def past(self, entry: str, pair_weight: str) -> Past:
        """Return the tensor of the learning part with these weights."""
        key = (entry, pair_weight)
        if key not in self._pasts:
            self._pasts[key] = replace(self._learning, entry=entry, pair_weight=pair_weight).past()  # type: ignore[arg-type]
        return self._pasts[key]

    def embedding(
        self, model: str, options: FitSettings, entry: str, pair_weight: str
    ) -> tuple[ModelEmbedding, Usage]:
        """Return the vectors of all nodes of the graph (zero for those not met yet), and what they took."""
        key = (model, options, entry, pair_weight)
        if key not in self._fitted:
            began = time.monotonic()
            past = self.past(entry, pair_weight)
            tensor = self._stage(entry, pair_weight)
            name = digest(__version__, self._graph, model, options.model_dump_json(), entry, pair_weight)
            kept = self._kept.fit_folder(name)
            folder = kept or self._folder / f"fit-{self.count}"
            resumed = kept is not None and kept.exists()
            context = FitContext(str(tensor), str(folder), options, self._run)
            with measured() as usage:
                report = fit_staged(model, context)
            if resumed:
                usage = Usage(seconds=float("nan"))
            found = context.read_embedding(report)
            if kept is None:
                remove_tree(folder)
            before = self._kept.usage(name)
            if before is None:
                self._kept.write_usage(name, usage)
            self._fitted[key] = found.spread(past.nodes, self._learning.n_nodes), before or usage
            self.count += 1
            self.seconds += time.monotonic() - began
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

    def of(self, model: str) -> Settings:
        """Return it with the weights that are part of a model."""
        own = find_model(model).weights
        return self if own is None else replace(self, entry=own[0], pair_weight=own[1])

    def identity(self) -> str:
        """Return all of it as text."""
        return f"{self.options.model_dump_json()} {self.entry} {self.pair_weight}"

    def __str__(self) -> str:
        names = ["rank", "reg_a", "reduce", "gauge", "oversample"]
        # Of the options of single models, those that differ from the defaults.
        changed = [
            name
            for name, field in RivalSettings.model_fields.items()
            if getattr(self.options, name) != field.default
        ]
        names += changed
        parts = [f"{name.removesuffix('_a')}={getattr(self.options, name)}" for name in names]
        return " ".join([*parts, f"entry={self.entry}", f"pair_weight={self.pair_weight}"])


def evaluate(
    events: Events,
    config: EvaluateConfig,
    *,
    splits: Path | None = None,
    run: RunTasks = run_here,
    work: Path | None = None,
    cache: Path | None = None,
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
    cache
        A folder for fits and cells: those that are there are not made again, so that an evaluation that was
        interrupted goes on. None keeps nothing.
    say
        Is told what is going on.

    Returns
    -------
    cells
        With a grid, those of the validation part too, marked by ``part``.
    """
    base = Settings(config.options, events.entry, events.pair_weight)
    kept = Kept(cache)
    if "sum" in config.grid.get("entry", ()) and events.entry != "sum":
        raise ConfigError(
            "grid of entry",
            got="sum, of weights that were not read",
            allowed="sum where the edges are read with it",
            remedy="Add --entry sum.",
        )
    chosen = {model: base.of(model) for model in config.models}
    cells: list[Cell] = []
    if config.grid:
        names = list(config.grid)
        points = [dict(zip(names, values, strict=True)) for values in product(*config.grid.values())]
        candidates = {model: [base.of(model).moved(point) for point in points] for model in config.models}
        past = Split.validation(len(events))
        # The validation part knows nothing of what comes after it, not even which pairs never link.
        known = events.head(past.end)
        cells = _run_part("validation", known, past, config, candidates, None, run, work, kept, say)
        for model in config.models:
            marks = {
                str(point): _merit([c for c in cells if (c.model, c.settings) == (model, str(point))])
                for point in candidates[model]
            }
            chosen[model] = max(candidates[model], key=lambda point: marks[str(point)])
            say(f"{model}: chosen on the validation part: {chosen[model]} ({marks[str(chosen[model])]:.4f})")
    wanted = {model: [chosen[model]] for model in config.models}
    test = Split.test(len(events))
    return cells + _run_part("test", events, test, config, wanted, splits, run, work, kept, say)


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
    kept: Kept,
    say: Say,
) -> list[Cell]:
    fits = Fits(events.head(split.learn), run, work, kept if kept.folder else None)
    splits = Splits(events, split, folder)
    graph = digest(__version__, identify(events), split, part, config.classifier) if kept.folder else ""
    seeds = range(config.first_seed, config.first_seed + config.seeds)
    asked = [
        (protocol, seed, model, settings, spec)
        for protocol, seed in product(map(check_protocol, config.protocols), seeds)
        for model in config.models
        for settings in wanted[model]
        for spec in (config.features if find_model(model).fit else (SCORE,))
    ]
    names = [
        digest(graph, protocol, seed, model, settings.identity(), spec)
        for protocol, seed, model, settings, spec in asked
    ]
    missing = {
        (model, settings)
        for name, (*_, model, settings, spec) in zip(names, asked, strict=True)
        if spec != SCORE and not kept.has_cell(name)
    }
    progress = Progress(len(asked), say, fits=len(missing))
    cells = []
    for name, (protocol, seed, model, settings, spec) in zip(names, asked, strict=True):
        there, count, before = kept.has_cell(name), fits.count, fits.seconds

        def make(
            protocol: Protocol = protocol,
            seed: int = seed,
            model: str = model,
            settings: Settings = settings,
            spec: str = spec,
        ) -> dict[str, Any]:
            examples = splits.examples(protocol, seed)
            return asdict(_mark_model(part, protocol, seed, model, settings, spec, examples, fits, config))

        cells.append(Cell(**kept.cell(name, make)))
        fitting = fits.seconds - before if fits.count > count else None
        progress.step(was_there=there, what=f"{part}, {model}, seed {seed}", fitting=fitting)
    return cells


def _mark_model(
    part: str,
    protocol: Protocol,
    seed: int,
    model: str,
    settings: Settings,
    spec: str,
    examples: Examples,
    fits: Fits,
    config: EvaluateConfig,
) -> Cell:
    weights = (settings.entry, settings.pair_weight)
    classifier: Classifier = check_classifier(config.classifier)
    usage = Usage(mib=0.0)
    if spec == SCORE:
        scores = fits.score(model, examples.source, examples.target, *weights)
        features = Features(scores[:, None], np.empty((len(scores), 0)))
        began = time.process_time()
    else:
        embedding, usage = fits.embedding(model, settings.options, *weights)
        began = time.process_time()
        features = pair_features(embedding, examples.source, examples.target, spec)
    # A control is one number: trees could only overfit it.
    used: Classifier = "logistic" if spec == SCORE else classifier
    marks: Marks = mark(features, examples, used, seed)
    return Cell(
        *(part, protocol, model, spec, used, seed),
        **asdict(marks),
        fit_seconds=usage.seconds,
        fit_mib=usage.mib,
        seconds=time.process_time() - began,
        settings=str(settings),
    )
