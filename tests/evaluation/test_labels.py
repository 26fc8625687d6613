"""Labels per window: what a classifier may see, what is asked, files, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.harness.planted import communities
from toffee_dist.cli import main
from toffee_dist.errors import InputError
from toffee_dist.evaluation.in_time import Entries
from toffee_dist.evaluation.labels import asked_labels, label_steps, later_windows, learning_nodes
from toffee_dist.settings import FitSettings

GROUPS = np.random.default_rng(0).integers(0, 3, (2, 60))
# The groups of `communities(0)` at every step.
LABELS = np.stack([GROUPS[step // 6 % 2] for step in range(24)])


class Seen:
    """Vectors that are what is given, and a record of who was looked at."""

    def __init__(self, vectors: Any) -> None:
        self.all = vectors

    def vectors(self, step: int) -> Any:
        return self.all[step]

    def score(self, step: int, i: Any, j: Any) -> Any:
        raise NotImplementedError


def test_later_windows_are_of_other_nodes_at_later_steps() -> None:
    """Vectors that tell labels give 1; learnt early on half of the nodes, whatever the rest says."""
    rng = np.random.default_rng(1)
    labels = np.broadcast_to(GROUPS[0], (24, 60)).copy()
    good = np.eye(3)[labels] + 0.01 * rng.standard_normal((24, 60, 3))
    steps = list(range(24))
    assert later_windows(Seen(good), steps, labels, 0) == dict.fromkeys(range(12, 24), 1.0)
    # A vector that only names its node knows the nodes it was trained on, and no others.
    names = np.broadcast_to(np.eye(60), (24, 60, 60))
    marks = later_windows(Seen(names), steps, labels, 0)
    assert np.mean(list(marks.values())) < 0.6
    # Nothing of the answers, nor of late vectors of learning nodes, reaches a mark but the answers asked.
    shown = learning_nodes(labels, 0)
    assert shown.sum() == 30
    spoiled = good.copy()
    spoiled[12:, shown] = rng.standard_normal((12, 30, 3)) * 100
    spoiled[:12, ~shown] = rng.standard_normal((12, 30, 3)) * 100
    assert later_windows(Seen(spoiled), steps, labels, 0) == dict.fromkeys(range(12, 24), 1.0)
    # One label alone is nothing to learn.
    assert later_windows(Seen(good), steps, np.zeros_like(labels), 0) == {}


def test_only_active_nodes_at_busy_steps_are_asked() -> None:
    tensor = communities()
    steps, asked = asked_labels(tensor, LABELS)
    X = np.asarray(tensor.to_coo().todense())
    active = (X.sum(axis=0) + X.sum(axis=1)).T > 0
    assert np.array_equal(asked >= 0, active)
    assert np.array_equal(asked[active], LABELS[active])
    counts = active.sum(axis=1)
    assert steps == [t for t in range(24) if counts[t] >= 0.5 * counts.max()]
    with pytest.raises(InputError, match="two labels"):
        asked_labels(tensor, np.zeros_like(LABELS))
    with pytest.raises(InputError, match="24 steps"):
        asked_labels(tensor, LABELS[:5])


def test_the_trajectory_knows_labels_that_change() -> None:
    cells = label_steps(
        communities(),
        LABELS,
        FitSettings(rank=6),
        methods={"ours": ("toffee", None), "static": ("static", None)},
    )
    marks = {
        (question, method): np.mean([c.mark for c in cells if (c.question, c.method) == (question, method)])
        for question in ("labels", "later-windows")
        for method in ("ours", "static")
    }
    assert marks["labels", "ours"] > marks["labels", "static"] + 0.2
    assert marks["later-windows", "ours"] > marks["later-windows", "static"] + 0.1
    assert marks["later-windows", "ours"] > 0.7


@pytest.mark.job
@pytest.mark.parametrize("header", [True, False])
def test_command(header: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The models of the protocol, on a file of tabs with or without names of its columns."""
    entries = Entries.of(communities())
    table = pl.DataFrame({"source": entries.i, "target": entries.j, "time": entries.step})
    table.write_parquet(tmp_path / "edges.parquet")
    lines = ["node\tlabel\tnote"] * header + [f"{node}\tG{GROUPS[0, node]}\tx" for node in range(60)]
    (tmp_path / "labels.tsv").write_text("\n".join(lines) + "\n")
    words = ["--step", "1", "--time-unit", "number", "--undirected", "--rank", "6", "--seeds", "1"]
    words += ["--protocol", "in-time", "--model", "toffee,toffee-pairs,ipp,pair-count"]
    words += ["--labels", str(tmp_path / "labels.tsv")]
    main(["evaluate", str(tmp_path / "edges.parquet"), "--out", str(tmp_path / "out"), *words])
    text = capsys.readouterr().out
    assert "labels at each step" in text
    assert "later steps" in text
    found = pl.read_parquet(tmp_path / "out" / "steps.parquet")
    assert found["method"].unique(maintain_order=True).to_list() == ["toffee", "ipp"]
    assert set(found["question"]) == {"labels", "later-windows"}
    marks = found.group_by("question", "method").agg(pl.col("mark").mean())
    assert marks["mark"].is_between(0.1, 1.0).all()
    assert "right labels" in (tmp_path / "out" / "report.html").read_text()
    assert json.loads((tmp_path / "out" / "result.json").read_text())["steps"]


def test_models_without_vectors_have_no_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pl.DataFrame({"source": [0, 1], "target": [1, 2], "time": [0, 1]})
    table.write_parquet(tmp_path / "edges.parquet")
    (tmp_path / "labels.csv").write_text("node,label\n0,a\n1,b\n")
    words = ["--step", "1", "--time-unit", "number", "--protocol", "in-time", "--model", "pair-count"]
    words += ["--labels", str(tmp_path / "labels.csv"), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", str(tmp_path / "edges.parquet"), *words])
    assert stopped.value.code == 2
    assert "with vectors" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
