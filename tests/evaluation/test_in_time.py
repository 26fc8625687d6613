"""Hidden entries: what is asked is what the words say, and marks are what they should be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.harness.events import make_events
from tests.harness.planted import communities
from tests.harness.strategies import random_tensor
from toffee_dist.cli import main
from toffee_dist.errors import ConfigError, InputError, TooLargeError
from toffee_dist.evaluation import in_time
from toffee_dist.evaluation.in_time import (
    Entries,
    Scorer,
    ask_in_time,
    check_models,
    choose,
    draw_questions,
    mark_auc,
    mark_model,
)
from toffee_dist.evaluation.job import ALL_IN_TIME
from toffee_dist.kernels.spectrum import slice_matrix, transform
from toffee_dist.models import MODELS, find_model, rivals
from toffee_dist.models.in_time import Projected, filter_in_time
from toffee_dist.settings import FitSettings

OPTIONS = FitSettings(rank=6)
IN_TIME = [name for name, model in MODELS.items() if model.fit_in_time]


@pytest.mark.parametrize("directed", [True, False])
def test_questions_are_what_they_say(directed: bool) -> None:
    entries = Entries.of(random_tensor(0, 30, 12, 900, directed=directed))
    asked = draw_questions(entries, 3)
    linked = set(zip(entries.i.tolist(), entries.j.tolist(), entries.step.tolist(), strict=True))
    active = {(i, t) for i, _, t in linked} | {(j, t) for _, j, t in linked}
    hidden = set(
        zip(asked.hidden.i.tolist(), asked.hidden.j.tolist(), asked.hidden.step.tolist(), strict=True)
    )
    known = set(zip(asked.known.i.tolist(), asked.known.j.tolist(), asked.known.step.tolist(), strict=True))
    assert hidden | known == linked
    assert not hidden & known
    assert 0.1 < len(hidden) / len(linked) < 0.3
    assert all(i != j for i, j, _ in hidden)
    rows = zip(
        asked.hidden.i, asked.hidden.j, asked.hidden.step, asked.who_i, asked.who_j, asked.when, strict=True
    )
    for i, j, t, a, b, s in rows:
        if a >= 0:
            assert (a, t) in active
            assert (b, t) in active
            assert (a, b, t) not in linked
            assert directed or a < b
        if s >= 0:
            assert (i, s) in active
            assert (j, s) in active
            assert (i, j, s) not in linked
    again = draw_questions(entries, 3)
    assert np.array_equal(again.who_i, asked.who_i)
    assert np.array_equal(again.when, asked.when)


def test_entries_come_apart_and_together() -> None:
    tensor = communities()
    again = Entries.of(tensor).tensor("raw")
    assert np.array_equal(again.values, tensor.values)
    assert np.array_equal(again.indices, tensor.indices)


def test_auc_and_its_error() -> None:
    rng = np.random.default_rng(0)
    found = [mark_auc(rng.normal(0.5, 1, 300), rng.normal(0, 1, 300)) for _ in range(200)]
    aucs = np.array([mark.auc for mark in found])
    # Φ(0.5/√2) = 0.638; the error is the spread over samples.
    assert aucs.mean() == pytest.approx(0.638, abs=0.005)
    assert np.mean([mark.error for mark in found]) == pytest.approx(aucs.std(), rel=0.15)
    same = np.ones(5)
    assert mark_auc(same, same).auc == 0.5


def test_too_few_entries_are_refused() -> None:
    with pytest.raises(InputError, match="too few entries"):
        draw_questions(Entries.of(random_tensor(0, 5, 3, 20)), 0)


@pytest.mark.parametrize("name", IN_TIME)
def test_every_model_gives_finite_vectors_and_scores(name: str) -> None:
    for directed in (True, False):
        tensor = random_tensor(1, 20, 7, 200, directed=directed)
        model = find_model(name)
        assert model.fit_in_time is not None
        found = model.fit_in_time(tensor, OPTIONS, 1.0 if model.smoothing else None)
        i, j = np.array([0, 3, 19]), np.array([1, 3, 0])
        for step in (0, 3, 6):
            assert found.vectors(step).shape[0] == 20
            assert np.isfinite(found.vectors(step)).all()
            assert np.isfinite(found.score(step, i, j)).all()
            if not directed and name != "snapshot":
                np.testing.assert_allclose(found.score(step, i, j), found.score(step, j, i), atol=1e-5)


def test_uase_is_the_svd_of_all_steps_at_once() -> None:
    tensor = random_tensor(2, 15, 5, 200)
    X = np.asarray(tensor.to_coo().todense())
    stacked = np.concatenate([X[:, :, t] for t in range(5)])
    U, S, Vt = np.linalg.svd(stacked, full_matrices=False)
    best = (U[:, :6] * S[:6]) @ Vt[:6]
    model = find_model("uase").fit_in_time
    assert model is not None
    found = model(tensor, OPTIONS, None)
    i, j = (grid.ravel() for grid in np.indices((15, 15)))
    for t in range(5):
        np.testing.assert_allclose(
            found.score(t, i, j).reshape(15, 15), best[15 * t : 15 * t + 15], atol=1e-5
        )


def test_ipp_smooths_then_projects() -> None:
    tensor = random_tensor(3, 12, 6, 150, directed=False)
    X = np.asarray(tensor.to_coo().todense())
    K = np.exp(-0.5 * (np.subtract.outer(np.arange(6), np.arange(6)) / 0.8) ** 2)
    smooth = np.einsum("ts,ijs->ijt", K / K.sum(axis=1, keepdims=True), X)
    gram = sum(smooth[:, :, t].T @ smooth[:, :, t] for t in range(6))
    V = np.linalg.eigh(gram)[1][:, ::-1][:, :6]
    model = find_model("ipp").fit_in_time
    assert model is not None
    found = model(tensor, OPTIONS, 0.8)
    i, j = (grid.ravel() for grid in np.indices((12, 12)))
    for t in range(6):
        fit = smooth[:, :, t] @ V @ V.T
        np.testing.assert_allclose(found.score(t, i, j).reshape(12, 12), (fit + fit.T) / 2, atol=1e-4)


def test_snapshot_and_static_are_their_svds() -> None:
    tensor = random_tensor(4, 12, 4, 200)
    X = np.asarray(tensor.to_coo().todense())
    i, j = (grid.ravel() for grid in np.indices((12, 12)))
    snapshot, static = find_model("snapshot").fit_in_time, find_model("static").fit_in_time
    assert snapshot is not None
    assert static is not None
    U, S, Vt = np.linalg.svd(X[:, :, 2])
    expected = (U[:, :6] * S[:6]) @ Vt[:6]
    np.testing.assert_allclose(snapshot(tensor, OPTIONS, None).score(2, i, j), expected.ravel(), atol=1e-4)
    whole = FitSettings(rank=12, reg_a=0.0, reg_r=0.0)
    total = slice_matrix(tensor, transform(tensor, [0])[0].real).toarray()
    np.testing.assert_allclose(static(tensor, whole, None).score(1, i, j), total.ravel(), atol=1e-3)


def test_ours_knows_who_and_when_where_both_change() -> None:
    questions = draw_questions(Entries.of(communities()), 0)
    cells = {
        name: mark_model(name, questions, "log", OPTIONS, 0) for name in ("toffee", "static", "pair-count")
    }
    ours = cells["toffee"]
    assert ours.who > cells["static"].who
    assert ours.when > 0.6
    assert cells["static"].when == pytest.approx(0.5)
    assert cells["pair-count"].when == pytest.approx(0.5)


def test_bandwidth_is_chosen_on_entries_that_the_model_may_see() -> None:
    """Hidden entries are no part of what the choice looks at."""
    questions = draw_questions(Entries.of(communities()), 0)
    smoothing, who, when = choose(find_model("ipp"), questions.known, "log", OPTIONS, 0)
    assert smoothing in find_model("ipp").smoothing
    assert {who, when} <= set(find_model("ipp").powers)
    assert choose(find_model("pair-count"), questions.known, "log", OPTIONS, 0) == (None, None, None)


def test_pair_memory_adds_a_rate_to_known_pairs_only() -> None:
    tensor = communities()
    base, pairs = (Scorer(find_model(name), tensor, OPTIONS, None) for name in ("toffee", "toffee-pairs"))
    seen = tensor.sources.astype(np.int64) * 60 + tensor.indices
    i, j = (grid.ravel() for grid in np.triu_indices(60, 1))
    known, step = np.isin(i * 60 + j, seen), np.full(len(i), 5)
    difference = pairs.score(i, j, step, 0.0) - base.score(i, j, step, 0.0)
    assert np.abs(difference[~known]).max() < 1e-9
    assert np.abs(difference[known]).min() > 0


def test_models_without_a_step_are_refused() -> None:
    with pytest.raises(ConfigError, match="in-time"):
        check_models(["rescal"])


@pytest.mark.job
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = Entries.of(communities())
    table = pl.DataFrame({"source": entries.i, "target": entries.j, "time": entries.step})
    table.write_parquet(tmp_path / "edges.parquet")
    words = ["--step", "1", "--time-unit", "number", "--undirected", "--rank", "6", "--seeds", "1"]
    words += ["--pair-weight", "log", "--protocol", "in-time", "--model", "toffee,uase,pair-count"]
    main(["evaluate", str(tmp_path / "edges.parquet"), "--out", str(tmp_path / "out"), *words])
    text = capsys.readouterr().out
    assert "who" in text
    assert "uase" in text
    found = pl.read_parquet(tmp_path / "out" / "in_time.parquet")
    assert found["model"].to_list() == ["toffee", "uase", "pair-count"]
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["in_time"][0]["when"] == found["when"][0]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Who is linked, and when" in page
    assert f"<th>pair-count</th><td>{found['who'][2]:.4f}</td>" in page


def test_every_model_in_time_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them have a row, what is there is not computed again, and one that is too large is left out."""
    events = make_events(3, n_rows=2000, step="4d")
    assert {"tne", "uase", "urlse", "ipp", "omni", "aligned", "toffee", "pair-count"} <= {*ALL_IN_TIME}
    options = FitSettings(rank=4, epochs=2, snapshots=3)
    said: list[str] = []
    made: list[str] = []
    killed = ["ipp"]

    def making(name: str, *rest: Any) -> Any:
        made.append(name)
        if name in killed:
            raise KeyboardInterrupt
        return mark_model(name, *rest)

    monkeypatch.setattr(in_time, "mark_model", making)
    monkeypatch.setattr(rivals, "OMNI_BYTES", 1000)
    with pytest.raises(KeyboardInterrupt):
        ask_in_time(events, ALL_IN_TIME, options, (0, 1), cache=tmp_path)
    before, made[:], killed[:] = list(made), [], []
    cells = ask_in_time(events, ALL_IN_TIME, options, (0, 1), said.append, cache=tmp_path)
    rest = [name for name in ALL_IN_TIME if name != "omni"]
    assert [(cell.model, cell.seed) for cell in cells] == [(name, seed) for seed in (0, 1) for name in rest]
    assert not {*before} - {"ipp"} & {*made[: made.index("ipp")]}
    assert made.count("omni") == 1
    assert [line for line in said if "omni is left out" in line and "nodes, which take" in line]
    made[:] = []
    assert ask_in_time(events, rest, options, (0, 1), cache=tmp_path) == cells
    assert not made
    # Other settings are other cells; alone, what is too large is an error.
    assert ask_in_time(events, ["tne"], options.changed(rank=5), (0,), cache=tmp_path) != cells[:1]
    assert made == ["tne"]
    with pytest.raises(TooLargeError):
        ask_in_time(events, ["omni"], options, (0,), cache=tmp_path)


def test_who_is_asked_of_steadied_vectors_and_when_is_not() -> None:
    questions = draw_questions(Entries.of(communities()), 0)
    scorer = Scorer(find_model("toffee"), questions.known.tensor("log"), OPTIONS, None)
    plain = scorer._found
    assert isinstance(plain, Projected)
    assert plain.steadiness is not None
    mean, share = plain.steadiness()

    def own(step: int) -> Any:
        return mean + share[:, None] * (plain.at(step) - mean)

    steadied = replace(plain, at=own, steadiness=None)
    marks = {}
    for name, found in (("steadied", steadied), ("plain", replace(plain, steadiness=None))):
        scorer._found = found
        marks[name] = (scorer.who(questions, 0.75), scorer.when(questions, 0.75))
    scorer._found = plain
    assert scorer.who(questions, 0.75).auc == pytest.approx(marks["steadied"][0].auc, abs=1e-6)
    assert scorer.when(questions, 0.75) == marks["plain"][1]
    assert marks["steadied"][0] != marks["plain"][0]
    # A causal trajectory has none: it would know the future.
    tensor = questions.known.tensor("log")
    V = np.linalg.qr(np.random.default_rng(0).standard_normal((tensor.n_nodes, 4)))[0].astype(np.float32)
    assert filter_in_time(tensor, V, causal=True).steadiness is None
