"""The watchdog: a job that makes no progress ends, says so, and leaves what tells a person why."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.harness import clusters
from tests.harness.clusters import at_every_slice, digests, job, write_edges
from tests.harness.commands import finish, toffee
from toffee_dist.batch.pipeline import resume_run, start_run
from toffee_dist.cluster.watchdog import Watch, diagnose, within
from toffee_dist.storage.runs import find_unfinished

# One slice of one worker hangs, as a read of a storage that is gone does.
HANGS = """
if factors.k == 7:
    time.sleep(3600)
"""


@pytest.mark.job
@pytest.mark.cluster
@pytest.mark.slow
def test_a_task_that_hangs(tmp_path: Path) -> None:
    edges = write_edges(tmp_path / "edges.parquet", nodes=100, events=2000)
    out = tmp_path / "out"
    expected = digests(start_run(job(edges, tmp_path / "expected")).run.path)
    command = ["embed", str(edges), f"--out={out}", "--rank=8", "--outputs=embedding,trajectory"]
    command += ["--freqs=all", "--trajectory-by=als"]
    environment = at_every_slice(tmp_path / "hangs.py", HANGS)
    with (
        clusters.cluster(workers=2, environment=environment) as running,
        toffee(
            *command, "--freqs=all", "--trajectory-by=als", f"--mode={running.address}", "--stall=5"
        ) as run,
    ):
        code, _, err = finish(run)
    assert code == 5, err
    assert "the job makes no progress: no task that ended or began for 5 seconds" in err
    assert "toffee resume" in err

    unfinished = find_unfinished(out)
    found = unfinished.diagnostics
    assert str(found) in err
    [hung] = json.loads((found / "tasks.json").read_text())["under_way"]
    assert hung["key"].startswith("solve_batch-")
    assert "freqs=(" in hung["item"]
    assert hung["worker"].startswith("tcp://127.0.0.1:")
    assert json.loads((found / "tasks.json").read_text())["ended"]
    assert "at_every_slice" in (found / "stacks.json").read_text()
    assert len(json.loads((found / "cluster.json").read_text())["workers"]) == 2
    assert len(list(found.glob("worker-*.log"))) == 2
    assert "Start worker" in next(found.glob("worker-*.log")).read_text()
    assert "Bokeh" in (found / "report.html").read_text()

    done = resume_run(unfinished, {"mode": "threads", "workers": 1, "stall": 60.0})
    assert digests(done.run.path) == expected


def test_a_job_is_stalled_when_nothing_changes_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch, forever = Watch(10), Watch(0)
    for seconds, processing, stalled in (
        (1, {"a": ["x", "y"], "b": []}, False),
        (10, {"b": [], "a": ["y", "x"]}, False),  # not longer than that
        (11.5, {"a": ["y", "x"]}, True),  # an idle worker that leaves is no progress
        (12, {"a": ["y"]}, False),  # a task ended
        (22, {"b": ["y"]}, False),  # it went to another worker
        (32.5, {"b": ["y"]}, True),
    ):
        now = 100.0 + seconds
        assert watch.stalled(processing) is stalled, seconds
        assert not forever.stalled(processing)


def test_questions_end(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"no answer within 0.1 seconds"):
        within(0.1, lambda: time.sleep(60))
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)
    assert within(5, lambda: "answer") == "answer"
    # Where there is no place for it, nothing is left, and nothing raised.
    (tmp_path / "file").touch()
    diagnose(object(), tmp_path / "file" / "diagnostics", {})
    # A client that cannot be asked leaves that as the answer.
    diagnose(object(), tmp_path / "diagnostics", {})
    assert "not known: AttributeError" in (tmp_path / "diagnostics" / "tasks.json").read_text()
