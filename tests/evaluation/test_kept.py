"""An evaluation that was interrupted goes on, and what it keeps is what decides a cell."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.events import make_events
from toffee_dist import ConfigError
from toffee_dist.evaluation import EvaluateConfig, compare, evaluate
from toffee_dist.evaluation.classify import mark
from toffee_dist.evaluation.job import ALL_MODELS, EvaluateSettings
from toffee_dist.evaluation.kept import Kept, Progress, measured
from toffee_dist.models import fit_staged
from toffee_dist.settings import FitSettings

QUICK: dict[str, Any] = {"rank": 4, "max_iter": 3, "epochs": 2, "walks": 2, "walk_length": 8, "snapshots": 2}


class KilledError(Exception):
    """Stands for the end of the process."""


def test_cells_that_are_there_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = make_events(1)
    config = EvaluateConfig(
        models=("toffee", "ctdne", "memory"),
        features=("average", "hadamard"),
        seeds=3,
        options=FitSettings(**QUICK),
    )
    whole = evaluate(events, config)
    marked = fitted = 0

    def marking(*arguments: Any) -> Any:
        nonlocal marked
        marked += 1
        if marked % 4 == 0:
            raise KilledError
        return mark(*arguments)

    def fitting(*arguments: Any) -> Any:
        nonlocal fitted
        fitted += 1
        return fit_staged(*arguments)

    monkeypatch.setattr(compare, "mark", marking)
    monkeypatch.setattr(compare, "fit_staged", fitting)
    lives = 0
    while True:
        lives += 1
        try:
            again = evaluate(events, config, cache=tmp_path / "kept")
            break
        except KilledError:
            continue
    assert lives == 5
    # Every cell once, and one more per life that ended.
    assert marked == 3 * 5 + lives - 1
    # Vectors of an earlier life are read, not fitted: the report is asked for, no more.
    assert fitted <= 2 * lives
    for one, two in zip(whole, again, strict=True):
        assert (one.model, one.seed, one.features, one.micro_f1) == (
            two.model,
            two.seed,
            two.features,
            two.micro_f1,
        )
    marked = fitted = 0
    assert evaluate(events, config, cache=tmp_path / "kept") == again
    assert marked == fitted == 0


def test_a_fit_that_was_resumed_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of its last life alone would be a wrong figure."""
    config = EvaluateConfig(
        models=("toffee-paper",), features=("hadamard",), seeds=1, options=FitSettings(**QUICK)
    )

    def killed(*arguments: Any) -> Any:
        fit_staged(*arguments)
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(compare, "fit_staged", killed)
        with pytest.raises(KilledError):
            evaluate(make_events(1), config, cache=tmp_path / "a")
    (resumed,) = evaluate(make_events(1), config, cache=tmp_path / "a")
    (whole,) = evaluate(make_events(1), config, cache=tmp_path / "b")
    assert np.isnan(resumed.fit_seconds)
    assert np.isnan(resumed.fit_mib)
    assert whole.fit_seconds > 0
    assert resumed.micro_f1 == whole.micro_f1


@pytest.mark.parametrize("change", ["step", "seed", "rank", "row"])
def test_another_question_is_another_cell(change: str, tmp_path: Path) -> None:
    events = make_events(1)
    options = FitSettings(**QUICK)
    other, first_seed = events, 0
    if change == "step":
        other = replace(events, step="2d")
    elif change == "seed":
        first_seed = 7
    elif change == "rank":
        options = options.changed(rank=5)
    else:
        target = events.target.copy()
        target[3] = (target[3] + 1) % 40
        other = replace(events, target=target)
    base = EvaluateConfig(models=("toffee",), features=("hadamard",), seeds=1, options=FitSettings(**QUICK))
    evaluate(events, base, cache=tmp_path)
    before = len(list((tmp_path / "cells").iterdir()))
    changed = EvaluateConfig(
        models=("toffee",), features=("hadamard",), seeds=1, options=options, first_seed=first_seed
    )
    assert evaluate(other, changed, cache=tmp_path) == evaluate(other, changed, cache=tmp_path)
    assert len(list((tmp_path / "cells").iterdir())) == before + 1


def test_a_damaged_cell_is_made_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    assert kept.cell("a", lambda: {"x": 1}) == {"x": 1}
    assert kept.cell("a", lambda: {"x": 2}) == {"x": 1}
    (tmp_path / "cells" / "a.json").write_text('{"x": ')
    assert kept.cell("a", lambda: {"x": 3}) == {"x": 3}
    assert json.loads((tmp_path / "cells" / "a.json").read_text()) == {"x": 3}


def test_progress_says_how_long_it_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("toffee_dist.evaluation.kept.time.monotonic", lambda: now)
    said: list[str] = []
    progress = Progress(10, said.append)
    for _ in range(4):
        now += 6.0
        progress.step(was_there=False, what="tne")
    assert said == ["2 of 10 cells, about 48 s left (tne)", "4 of 10 cells, about 36 s left (tne)"]


def test_a_fit_is_not_taken_for_the_cost_of_every_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fits of 100 s, ten cells of a second each: after the first cell 100 s and nine more are left."""
    now = 0.0
    monkeypatch.setattr("toffee_dist.evaluation.kept.time.monotonic", lambda: now)
    said: list[str] = []
    progress = Progress(10, said.append, fits=2)
    now = 101.0
    progress.step(was_there=False, what="tne", fitting=100.0)
    for _ in range(4):
        now += 1.0
        progress.step(was_there=False, what="tne")
    now += 101.0
    progress.step(was_there=False, what="hnip", fitting=100.0)
    assert said == ["1 of 10 cells, about 2 min left (tne)", "6 of 10 cells, about 4 s left (hnip)"]


def test_fits_are_timed_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[bool, bool]] = []
    wanted: list[int] = []

    class Watched(Progress):
        def __init__(self, total: int, say: Any, fits: int = 0) -> None:
            super().__init__(total, say, fits)
            wanted.append(fits)

        def step(self, *, was_there: bool, what: str, fitting: float | None = None) -> None:
            steps.append((was_there, fitting is not None and fitting > 0))

    monkeypatch.setattr(compare, "Progress", Watched)
    options = FitSettings(**QUICK)
    for models in (("toffee", "memory"), ("toffee", "tsvd", "memory")):
        config = EvaluateConfig(models=models, features=("average", "hadamard"), seeds=1, options=options)
        evaluate(make_events(1), config, cache=tmp_path)
    new, old = (False, False), (True, False)
    assert steps == [(False, True), new, new, old, old, (False, True), new, old]
    assert wanted == [1, 1]


def test_memory_of_a_block_is_measured() -> None:
    # The heap keeps what small arrays have freed below one that is still there: who takes that takes memory.
    arrays = [np.ones(2**12) for _ in range(2000)]
    del arrays[:-1]
    with measured() as usage:
        array = np.ones(40 * 2**17)
    assert usage.seconds >= 0
    assert np.isnan(usage.mib) or 30 < usage.mib < 80
    del array


def test_all_models_in_one_word() -> None:
    settings = EvaluateSettings(inputs=("a.csv",), out="x", model="all")
    assert settings.job().config.models == ALL_MODELS
    assert {"tne", "ctdne", "htne", "hnip", "toffee-paper", "memory"} <= {*ALL_MODELS}
    assert "uase" not in ALL_MODELS
    with pytest.raises(ConfigError, match="reduce of model"):
        EvaluateSettings(inputs=("a.csv",), out="x", model="all", reduce="last:3").job()


def test_every_model_has_a_row() -> None:
    events = make_events(2)
    config = EvaluateConfig(models=ALL_MODELS, features=("hadamard",), seeds=1, options=FitSettings(**QUICK))
    cells = evaluate(events, config)
    assert [cell.model for cell in cells] == [*ALL_MODELS]
    for cell in cells:
        assert 0 <= cell.micro_f1 <= 1
    # The paper's own row counts, whatever the others do.
    (paper,) = [cell for cell in cells if cell.model == "toffee-paper"]
    assert "entry=count pair_weight=raw" in paper.settings
