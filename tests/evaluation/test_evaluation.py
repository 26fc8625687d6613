"""The evaluation is honest: what is asked, what may be known, and what the marks mean."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import planted_graph

from tests.harness.events import make_events
from toffee_dist import ConfigError, InputError
from toffee_dist.evaluation import EvaluateConfig, Events, evaluate, read_events
from toffee_dist.evaluation.classify import mark, marks_of, standardise
from toffee_dist.evaluation.compare import Fits
from toffee_dist.evaluation.features import OPERATORS, Features, check_features, pair_features
from toffee_dist.evaluation.labels import label_steps, read_labels
from toffee_dist.evaluation.protocols import PROTOCOLS, Examples, Split, Splits, draw_examples
from toffee_dist.evaluation.report import best_features, summarise, to_frame, write_page
from toffee_dist.evaluation.steps import FutureConfig, StepCell, future_links
from toffee_dist.models import MODELS, fit_staged
from toffee_dist.settings import EdgeSettings, FitSettings
from toffee_dist.timegrid import TimeScale


@given(st.integers(0, 50), st.sampled_from(PROTOCOLS), st.booleans())
def test_examples_are_what_the_protocol_says(seed: int, protocol: Any, directed: bool) -> None:
    events = make_events(seed % 5, directed=directed)
    split = Split.test(len(events))
    examples = draw_examples(events, split, protocol, seed)

    def pairs(rows: slice) -> set[tuple[int, int]]:
        found = set(zip(events.source[rows].tolist(), events.target[rows].tolist(), strict=True))
        return found if directed else {(min(pair), max(pair)) for pair in found}

    past, window = pairs(slice(0, split.learn)), pairs(slice(split.learn, None))
    asked = list(zip(examples.source.tolist(), examples.target.tolist(), strict=True))
    positive = {pair for pair, linked in zip(asked, examples.linked, strict=True) if linked}
    negative = set(asked) - positive
    count = examples.train + examples.test
    assert count[examples.linked == 1].sum() == count[examples.linked == 0].sum()
    assert examples.train.sum() == int(0.75 * count.sum())
    if protocol == "link-paper":
        assert positive == window
        assert count[examples.linked == 1].sum() == len(events) - split.learn
        assert not negative & (past | window)
    elif protocol == "link-new":
        assert positive == window - past
        assert not negative & (past | window)
    else:
        assert positive <= window
        assert negative <= past - window
    if protocol != "link-paper":
        assert count[examples.linked == 1].max() == 1
    if protocol != "link-hard":
        assert all(i != j for i, j in negative)


def test_bipartite_negatives_stay_between_the_spaces() -> None:
    rng = np.random.default_rng(0)
    events = make_events(0, directed=True, n_sources=15)
    events = replace(events, source=events.source % 15, target=15 + events.target % 25)
    examples = draw_examples(events, Split.test(len(events)), "link-paper", int(rng.integers(9)))
    assert (examples.source < 15).all()
    assert (examples.target >= 15).all()


def test_splits_of_two_spaces_that_share_ids(tmp_path: Path) -> None:
    events = make_events(0, directed=True, n_sources=15)
    ids = pl.Series([str(k) for k in [*range(15), *range(25)]])
    events = replace(events, ids=ids, source=events.source % 15, target=15 + events.target % 25)
    split = Split.test(len(events))
    drawn = Splits(events, split, tmp_path).examples("link-paper", 0)
    again = Splits(events, split, tmp_path).examples("link-paper", 0)
    for name, value in asdict(drawn).items():
        assert np.array_equal(value, getattr(again, name))


@pytest.mark.parametrize("model", [name for name, model in MODELS.items() if model.fit])
def test_nothing_of_the_test_part_reaches_the_embedding(model: str) -> None:
    events = make_events(1)
    learn = Split.test(len(events)).learn
    rng = np.random.default_rng(0)
    order = np.concatenate([np.arange(learn), learn + rng.permutation(len(events) - learn)])
    permuted = replace(events, source=events.source[order], target=np.roll(events.target, 0)[order])
    late = np.arange(len(events)) >= learn
    replaced = replace(
        events,
        source=np.where(late, rng.integers(0, 40, len(events)), events.source),
        target=np.where(late, rng.integers(0, 40, len(events)), events.target),
        time=np.where(late, events.time + 9 * 86_400, events.time),
    )

    options = FitSettings(rank=4, epochs=2)

    def vectors(graph: Events, rows: int) -> bytes:
        found, _ = Fits(graph.head(rows)).embedding(model, options, "binary", "unit")
        return found.source.tobytes()

    honest = vectors(events, learn)
    assert vectors(permuted, learn) == honest
    assert vectors(replaced, learn) == honest
    # The check has teeth: one row too many, and all rows, are caught.
    assert vectors(replaced, learn + 1) != vectors(events, learn + 1)
    assert vectors(replaced, len(events)) != vectors(events, len(events))


def test_evaluation_fits_on_the_learning_part_only(monkeypatch: pytest.MonkeyPatch) -> None:
    events = make_events(1)
    seen: list[int] = []

    def watched(self: Fits, learning: Events, *rest: Any) -> None:
        seen.append(len(learning))
        original(self, learning, *rest)

    original = Fits.__init__
    monkeypatch.setattr(Fits, "__init__", watched)
    config = EvaluateConfig(models=("toffee",), seeds=1, options=FitSettings(rank=4), grid={"rank": [2, 4]})
    cells = evaluate(events, config)
    assert seen == [int(0.75 * 450), 450]
    assert {cell.part for cell in cells} == {"validation", "test"}
    # The test part is marked with the settings that won on the validation part.
    validation = [cell for cell in cells if cell.part == "validation"]
    means = {
        settings: max(
            np.mean([cell.micro_f1 for cell in validation if (cell.settings, cell.features) == (settings, f)])
            for f in config.features
        )
        for settings in {cell.settings for cell in validation}
    }
    (used,) = {cell.settings for cell in cells if cell.part == "test"}
    assert means[used] == max(means.values())


def test_the_choice_does_not_depend_on_the_test_part() -> None:
    events = make_events(1)
    learn = Split.test(len(events)).learn
    rng = np.random.default_rng(5)
    late = np.arange(len(events)) >= learn
    other = replace(events, target=np.where(late, rng.integers(0, 40, len(events)), events.target))
    config = EvaluateConfig(models=("toffee",), seeds=1, options=FitSettings(rank=4), grid={"rank": [2, 4]})

    def validation(graph: Events) -> list[tuple[str, float]]:
        cells = evaluate(graph, config)
        return [(cell.settings, cell.micro_f1) for cell in cells if cell.part == "validation"]

    assert validation(events) == validation(other)


def test_the_classifier_does_not_see_the_test_examples() -> None:
    events = make_events(1)
    examples = draw_examples(events, Split.test(len(events)), "link-paper", 0)
    features = Features(
        np.random.default_rng(0).random((len(examples.linked), 3)), np.zeros((len(examples.linked), 0))
    )
    only_test = examples.train == 0
    moved = Features(np.where(only_test[:, None], 1e6, features.operators), features.scores)
    columns, others = standardise(features, examples.train), standardise(moved, examples.train)
    assert np.array_equal(columns[~only_test], others[~only_test])
    # Labels of test examples change marks, never predictions: flipped labels give the opposite mark.
    flipped = replace(examples, linked=np.where(only_test, 1 - examples.linked, examples.linked))
    fresh = mark(features, examples).fresh_f1
    assert mark(features, flipped).fresh_f1 == pytest.approx(1 - fresh)


def test_an_embedding_is_fitted_once_for_all_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str, *rest: Any) -> Any:
        calls.append(name)
        return fit_staged(name, *rest)

    monkeypatch.setattr("toffee_dist.evaluation.compare.fit_staged", counted)
    config = EvaluateConfig(
        PROTOCOLS, models=("toffee", "tsvd", "memory"), seeds=3, options=FitSettings(rank=4)
    )
    cells = evaluate(make_events(1), config)
    assert sorted(calls) == ["toffee", "tsvd"]
    assert len(cells) == 3 * 3 * (2 * 5 + 1)


@pytest.mark.parametrize("directed", [True, False])
def test_splits_are_saved_and_used_again(directed: bool, tmp_path: Path) -> None:
    events = make_events(2, directed=directed)
    split = Split.test(len(events))
    folder = tmp_path / "splits"
    drawn = Splits(events, split, folder).examples("link-paper", 3)
    again = Splits(events, split, folder).examples("link-paper", 3)
    for name, value in asdict(drawn).items():
        assert np.array_equal(value, getattr(again, name))
    # What is in the file counts, not the seed.
    table = pl.read_parquet(folder / "link-paper-0003.parquet")
    assert table["source"].dtype == pl.String
    table.with_columns(test=pl.col("test") + 1).write_parquet(folder / "link-paper-0003.parquet")
    assert np.array_equal(Splits(events, split, folder).examples("link-paper", 3).test, drawn.test + 1)
    with pytest.raises(InputError, match="another graph"):
        Splits(make_events(3), split, folder)
    with pytest.raises(InputError, match="another graph"):
        Splits(events, Split(split.learn - 1, split.end), folder)
    table.with_columns(source=pl.lit("nobody")).write_parquet(folder / "link-paper-0003.parquet")
    with pytest.raises(InputError, match="not in the graph"):
        Splits(events, split, folder).examples("link-paper", 3)


def test_the_same_splits_give_the_same_marks(tmp_path: Path) -> None:
    config = EvaluateConfig(
        ("link-paper", "link-new"), models=("toffee", "memory"), seeds=2, options=FitSettings(rank=4)
    )
    first = evaluate(make_events(1), config, splits=tmp_path / "s")
    second = evaluate(make_events(1), config, splits=tmp_path / "s")
    timeless = [replace(cell, seconds=0.0, fit_seconds=0.0, fit_mib=0.0) for cell in first]
    assert timeless == [replace(cell, seconds=0.0, fit_seconds=0.0, fit_mib=0.0) for cell in second]


def test_folded_examples_count_like_repeated_ones() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import average_precision_score, f1_score, roc_auc_score
    from sklearn.preprocessing import StandardScaler

    events = make_events(4)
    examples = draw_examples(events, Split.test(len(events)), "link-paper", 1)
    vectors = Fits(events.head(450)).embedding("toffee", FitSettings(rank=4), "binary", "unit")[0]
    features = pair_features(vectors, examples.source, examples.target, "combined")
    found = mark(features, examples)
    train, test = (np.repeat(np.arange(len(w)), w) for w in (examples.train, examples.test))
    scaler = StandardScaler().fit(features.operators[train])
    model = LogisticRegression(solver="newton-cholesky", max_iter=300)
    model.fit(scaler.transform(features.operators[train]), examples.linked[train])
    chance = model.predict_proba(scaler.transform(features.operators[test]))[:, 1]
    labels = examples.linked[test]
    assert found.micro_f1 == pytest.approx(f1_score(labels, chance > 0.5, average="micro"))
    assert found.roc_auc == pytest.approx(roc_auc_score(labels, chance), abs=1e-4)
    assert found.average_precision == pytest.approx(average_precision_score(labels, chance), abs=1e-4)


def test_marks_of_known_answers() -> None:
    ones = np.ones(4, dtype=np.int64)
    examples = Examples(
        ones, ones, np.array([1, 1, 0, 0], np.int8), np.array([1, 0, 0, 1]), np.array([1, 1, 1, 2])
    )
    good = marks_of(np.array([0.9, 0.8, 0.2, 0.1]), examples)
    assert asdict(good) == {"micro_f1": 1.0, "roc_auc": 1.0, "average_precision": 1.0, "fresh_f1": 1.0}
    half = marks_of(np.array([0.9, 0.3, 0.2, 0.6]), examples)
    assert half.micro_f1 == pytest.approx(2 / 5)
    assert half.fresh_f1 == 0.5


def test_operators_and_scores_of_two_vectors() -> None:
    events = make_events(1)
    vectors = Fits(events.head(450)).embedding("toffee", FitSettings(rank=6), "binary", "unit")[0]
    i, j = np.array([0, 5]), np.array([1, 17])
    a, b = vectors.source[i], vectors.source[j]
    combined = pair_features(vectors, i, j, "combined").operators
    assert np.array_equal(combined, np.hstack([operator(a, b) for operator in OPERATORS.values()]))
    both = pair_features(vectors, i, j, "hadamard+scores")
    assert np.array_equal(both.operators, a * b)
    # Of all six columns, and of the leading four; canonical columns are nested.
    assert both.scores.shape == (2, 14)
    small = Fits(events.head(450)).embedding("toffee", FitSettings(rank=4), "binary", "unit")[0]
    np.testing.assert_allclose(both.scores[:, 7:], pair_features(small, i, j, "scores").scores, atol=1e-4)
    np.testing.assert_allclose(both.scores[:, 1], (a * b).sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(both.scores[:, 0], vectors.score(i, j))
    with pytest.raises(ConfigError, match="combined, scores"):
        check_features("cosine")


def test_communities_are_found_and_chance_is_chance() -> None:
    config = EvaluateConfig(seeds=3, options=FitSettings(rank=8))
    summary = summarise(to_frame(evaluate(make_events(1, n_rows=2000), config), _cell()))
    best = {row["model"]: row["micro_f1"] for row in best_features(summary).iter_rows(named=True)}
    assert best["toffee"] > best["degree"] + 0.1
    rng = np.random.default_rng(0)
    noise = make_events(1, n_rows=3000, n_nodes=200)
    noise = replace(noise, source=rng.integers(0, 200, 3000), target=rng.integers(0, 200, 3000))
    config = EvaluateConfig(
        ("link-new",), ("toffee", "memory"), ("hadamard",), seeds=3, options=FitSettings(rank=8)
    )
    for cell in evaluate(noise, config):
        assert abs(cell.micro_f1 - 0.5) < 0.12


def _cell() -> Any:
    from toffee_dist.evaluation import Cell

    return Cell


def test_trees_take_scores() -> None:
    config = EvaluateConfig(
        ("link-paper",),
        ("toffee",),
        ("scores", "combined+scores"),
        "trees",
        1,
        FitSettings(rank=4, reduce="sum+decay:20%"),
    )
    cells = evaluate(make_events(1, n_rows=2000), config)
    assert all(cell.micro_f1 > 0.7 for cell in cells)
    assert {cell.classifier for cell in cells} == {"trees"}


def planted_events(degree: float, seed: int, pattern: Any = "weekly") -> tuple[Events, Any]:
    graph = planted_graph(pattern, degree, seed, pair_weight="raw")
    i, j, t = graph.tensor.to_coo().coords
    order = np.argsort(t, kind="stable")
    once = order[i[order] < j[order]]
    ids = pl.Series(range(graph.tensor.n_nodes))
    time = t[once] * 86_400 + 4 * 86_400
    scale = TimeScale(1, True)
    return Events(ids, i[once], j[once], time, None, scale, "1d", directed=False), graph.labels


@pytest.mark.slow
def test_links_of_a_weekend_need_the_week() -> None:
    events, _ = planted_events(5.0, 0)
    cells = future_links(events, FutureConfig(horizon=7, period=7), FitSettings(rank=16))
    assert {cell.step for cell in cells} == set(range(63, 70))
    frame = to_frame(cells, StepCell)
    weekend = frame.filter(pl.col("step") >= 68)
    marks = dict(weekend.group_by("method").agg(pl.col("mark").mean()).iter_rows())
    for other in ("sum", "decayed", "last-step", "last-period", "count", "count-decayed"):
        assert marks["rhythm"] > 1.3 * marks[other], other
        assert marks["chosen"] > 1.3 * marks[other], other


@pytest.mark.slow
def test_a_graph_without_a_rhythm_is_not_given_one() -> None:
    events, _ = planted_events(1.3, 0, "none")
    said: list[str] = []
    future_links(events, FutureConfig(horizon=2, period=7), FitSettings(rank=16), said.append)
    assert "share of the rhythm that served best one period earlier: 0" in said


def test_the_future_is_not_seen() -> None:
    events, _ = planted_events(1.3, 0)
    steps = events.grid().steps_of(events.time)
    keep = steps < 63
    answers = replace(events, source=np.where(keep, events.source, (events.source + 1) % 400))
    config, options = FutureConfig(7, 7), FitSettings(rank=4)

    def window(graph: Events) -> bytes:
        from toffee_dist.evaluation.steps import _cut

        learning, grid, _ = _cut(graph, config, lambda line: None)
        past = learning.past(grid)
        assert past.tensor.n_steps == 63
        return past.tensor.steps.tobytes() + past.tensor.indices.tobytes()

    assert window(events) == window(answers)
    with pytest.raises(InputError, match="two periods"):
        future_links(events, FutureConfig(60, 7), options)
    with pytest.raises(ConfigError, match="distinct"):
        future_links(replace(events, step="distinct"), config, options)


def test_labels_of_each_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toffee_dist.evaluation.labels.LABEL_STEPS", 20)
    events, labels = planted_events(2.6, 0)
    days, nodes = np.divmod(np.arange(labels.size), labels.shape[1])
    names = np.array(["red", "blue", "green", "grey"])[labels.ravel()]
    table = pl.DataFrame({"node": nodes, "label": names, "step": days})
    table.write_parquet(tmp_path / "labels.parquet")
    read = read_labels(tmp_path / "labels.parquet", events)
    past = events.past()
    assert read.shape == (past.tensor.n_steps, past.tensor.n_nodes)
    cells = label_steps(past.tensor, read, FitSettings(rank=16), past.grid.show)
    marks = dict(to_frame(cells, StepCell).group_by("method").agg(pl.col("mark").mean()).iter_rows())
    assert marks["trajectory"] > 0.95
    for other in ("static", "snapshot-svd", "unfolded-svd"):
        assert marks["trajectory"] > marks[other] + 0.2
    table.filter(pl.col("step") == 0).drop("step").write_csv(tmp_path / "fixed.csv")
    fixed = read_labels(tmp_path / "fixed.csv", events)
    assert (fixed == fixed[0]).all()
    (tmp_path / "bad.csv").write_text("who,label\n1,2\n")
    for name, message in (("bad.csv", "node, label"), ("none.csv", "cannot read")):
        with pytest.raises(InputError, match=message):
            read_labels(tmp_path / name, events)
    pl.DataFrame({"node": [-1], "label": [1]}).write_csv(tmp_path / "alien.csv")
    with pytest.raises(InputError, match="no node of the graph"):
        read_labels(tmp_path / "alien.csv", events)


def test_events_are_read_like_the_ingest_reads_them(tmp_path: Path) -> None:
    from toffee_dist.ingest.job import ingest

    rng = np.random.default_rng(0)
    table = pl.DataFrame(
        {
            "source": rng.integers(5, 50, 300),
            "target": rng.integers(5, 50, 300),
            "time": rng.integers(0, 10**6, 300),
        }
    )
    table[:100].write_csv(tmp_path / "a.csv")
    table[100:].write_csv(tmp_path / "b.csv")
    config = EdgeSettings(inputs=(str(tmp_path),), step="1d", time_unit="s", since="86400", undirected=True)
    staged = ingest(config, tmp_path / "out").tensor()
    (tmp_path / "out" / "ingest.json").unlink()
    inputs = (str(tmp_path / "a.csv"), str(tmp_path / "b.csv"))
    past = read_events(config.changed(inputs=inputs)).past()
    for name in ("indptr", "indices", "tube_ptr", "steps", "values"):
        assert np.array_equal(getattr(past.tensor, name), getattr(staged, name))
    with pytest.raises(InputError, match="no edges"):
        read_events(config.changed(inputs=inputs, since="2000-01-01"))
    # The window is read by the rules of the ingest.
    with pytest.raises(ConfigError, match="since before until"):
        read_events(config.changed(inputs=inputs, until="86400"))
    two = read_events(config.changed(inputs=inputs, bipartite=True, undirected=False))
    assert two.n_sources == table["source"].n_unique()
    assert (two.target >= two.n_sources).all()


def test_too_little_data_is_an_input_error() -> None:
    with pytest.raises(InputError, match="too few pairs"):
        evaluate(make_events(0, n_rows=8), EvaluateConfig(("link-hard",), ("memory",), seeds=1))
    complete = make_events(0, n_nodes=10, n_rows=4000, directed=True)
    with pytest.raises(InputError, match="too few pairs"):
        evaluate(complete, EvaluateConfig(("link-paper",), ("memory",), seeds=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protocols": ("link-easy",)}, "link-paper, link-new, link-hard"),
        ({"models": ("gcn",)}, "toffee, toffee-"),
        ({"features": ("product",)}, "average, hadamard"),
        ({"classifier": "svm"}, "logistic, trees"),
        ({"seeds": 0}, "at least 1"),
        ({"grid": {"colour": [1]}}, "rank, reg, entry, pair_weight, reduce"),
    ],
)
def test_config_errors_say_what_is_allowed(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvaluateConfig(**changes)


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    config = EvaluateConfig(models=("toffee", "memory"), seeds=2, options=FitSettings(rank=4))
    cells = to_frame(evaluate(make_events(1), config), _cell())
    write_page(tmp_path / "page.html", {"one": cells, "two": cells})
    page = (tmp_path / "page.html").read_text()
    assert "Micro-F1 against the time to fit" in page
    assert "<script src=" not in page
    assert "<link" not in page
