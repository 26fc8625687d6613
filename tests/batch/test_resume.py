"""A folder of runs is data: whoever may write to it does not say where a job runs, or what it reads."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.harness import clusters, commands
from tests.harness.clusters import digests, free_port, job, write_edges
from tests.harness.refreshes import night, write_days
from toffee_dist.batch import pipeline
from toffee_dist.batch.pipeline import resume_run, start_run
from toffee_dist.cli import cli
from toffee_dist.errors import InputError, UnfinishedError
from toffee_dist.ingest import files as ingest_files
from toffee_dist.progress import Progress
from toffee_dist.refresh.job import refresh
from toffee_dist.settings import RuntimeSettings
from toffee_dist.storage.runs import RunFolder, find_latest, find_unfinished

pytestmark = pytest.mark.job


@contextmanager
def false_scheduler() -> Iterator[tuple[int, list[Any]]]:
    """Listen as a scheduler would; give the port and whoever has called."""
    callers: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            while True:
                try:
                    call, who = listening.accept()
                except OSError:
                    return
                callers.append(who)
                call.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listening.getsockname()[1], callers
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def begin(edges: Path, out: Path, **options: Any) -> RunFolder:
    """Leave a run that has begun, and nothing more."""
    with pytest.raises(UnfinishedError):
        start_run(job(edges, out, mode=f"tcp://127.0.0.1:{free_port()}", wait=0.5, **options))
    return find_unfinished(out)


def edit(run: RunFolder, **changes: Any) -> None:
    """Change job.json as somebody would who may write to OUT."""
    record = json.loads(run.job.read_text())
    record["config"] |= changes
    run.job.write_text(json.dumps(record))


@pytest.mark.parametrize("protocol", ["tcp", "tls"])
def test_a_job_does_not_run_where_its_folder_says(tmp_path: Path, protocol: str) -> None:
    edges = write_edges(tmp_path / "edges.parquet", nodes=60, events=500)
    run = begin(edges, tmp_path / "out", rank=4)
    own = {f"tls_{name}": str(tmp_path / "theirs.pem") for name in ("ca", "cert", "key")}
    with false_scheduler() as (port, callers):
        edit(run, mode=f"{protocol}://127.0.0.1:{port}", wait=2.0, workers=1, **own)
        done = CliRunner().invoke(cli, ["resume", str(tmp_path / "out"), "--json"], catch_exceptions=False)
    assert callers == []
    assert done.exit_code == 0
    assert json.loads(done.stdout.splitlines()[-1])["run"] == str(run.path)


def test_nor_does_one_that_is_resumed_from_python(tmp_path: Path) -> None:
    """Where nothing is said of it, it is `auto`, as for the command."""
    edges = write_edges(tmp_path / "edges.parquet", nodes=60, events=500)
    run = begin(edges, tmp_path / "out", rank=4)
    with false_scheduler() as (port, callers):
        edit(run, mode=f"tcp://127.0.0.1:{port}", wait=2.0)
        assert resume_run(run, {"workers": 1}).run == run
    assert callers == []


def test_a_refresh_does_not_run_where_its_folder_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edges, out = write_days(tmp_path / "edges", 0, 9, nodes=60, events=200), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "settle", _fail)
        with pytest.raises(UnfinishedError):
            refresh(night(edges, out, last="7d", rank=4))
    run = find_unfinished(out)
    with false_scheduler() as (port, callers):
        edit(run, mode=f"tcp://127.0.0.1:{port}", wait=2.0)
        done = CliRunner().invoke(cli, ["resume", str(out), "--json"], catch_exceptions=False)
    assert callers == []
    assert json.loads(done.stdout.splitlines()[-1])["run"] == run.run_id


def _fail(*given: Any) -> None:
    raise UnfinishedError("stopped", got="by the test")


def test_where_it_runs_is_not_written_down(tmp_path: Path) -> None:
    edges = write_edges(tmp_path / "edges.parquet", nodes=60, events=500)
    run = begin(edges, tmp_path / "out", rank=4, tls_key="/keys/client-key.pem", memory="1GiB")
    kept = json.loads(run.job.read_text())["config"]
    assert not kept.keys() & RuntimeSettings.model_fields.keys()
    assert (kept["rank"], kept["inputs"]) == (4, [str(edges)])
    resume_run(run, {"mode": "threads", "workers": 1})
    assert not run.read_manifest().config.to_json().keys() & RuntimeSettings.model_fields.keys()


@pytest.mark.slow
@pytest.mark.cluster
def test_where_it_runs_may_come_from_the_file_of_the_start(tmp_path: Path) -> None:
    edges = write_edges(tmp_path / "edges.parquet", nodes=60, events=500)
    run = begin(edges, tmp_path / "out", rank=4)
    with clusters.cluster(workers=1) as running:
        file = tmp_path / "job.toml"
        file.write_text(f'rank = 4\nmode = "{running.address}"\nout = "{tmp_path / "out"}"\n')
        with commands.toffee("resume", str(tmp_path / "out"), f"--config={file}", "--stall=60") as resumed:
            code, _, err = commands.finish(resumed)
    assert code == 0, err
    expected = start_run(job(edges, tmp_path / "expected", rank=4)).run
    assert digests(run.path) == digests(expected.path)


class Said(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_inputs_are_shown_and_match_before_anything_of_them_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without an extension, the first bytes of a file say what it is.
    edges = write_edges(tmp_path / "edges.parquet", nodes=60, events=500).rename(tmp_path / "edges")
    run = begin(edges, tmp_path / "out", rank=4)
    secret = tmp_path / "secret\x1b]0;title\x07"
    secret.write_text("a b 1\n")
    edit(run, inputs=[str(edges), str(secret)])
    read: list[str] = []
    sniff = ingest_files._sniff

    def sniffing(path: str, *rest: Any) -> Any:
        read.append(path)
        return sniff(path, *rest)

    monkeypatch.setattr(ingest_files, "_sniff", sniffing)
    said = Said()
    with pytest.raises(InputError, match="the input changed"):
        resume_run(run, {"mode": "threads"}, said)
    assert read == []
    assert said.lines == [f"input: {edges}", f"input: {tmp_path}/secret\\x1b]0;title\\x07"]
    # A pipe would not be opened either: that would wait for ever.
    os.mkfifo(tmp_path / "pipe")
    edit(run, inputs=[str(tmp_path / "pipe")])
    with pytest.raises(InputError, match="the input changed"):
        resume_run(run, {"mode": "threads"})
    edit(run, inputs=[str(edges)])
    resume_run(run, {"mode": "threads", "workers": 1}, said)
    assert str(edges) in read
    # Edges that were staged are not read again, and so not shown.
    assert said.lines.count(f"input: {edges}") == 2


def test_a_refresh_follows_runs_beside_it_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edges, out = write_days(tmp_path / "edges", 0, 9, nodes=60, events=200), tmp_path / "out"
    options = {"last": "7d", "rank": 4, "min_cosine": -1.0, "max_auc_drop": 1.0, "max_energy_drop": 1.0}
    refresh(night(edges, out, **options))
    write_days(edges, 9, 10, nodes=60, events=200)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "settle", _fail)
        with pytest.raises(UnfinishedError):
            refresh(night(edges, out, **options))
    run = find_unfinished(out)
    good = run.job.read_text()
    latest = find_latest(out)
    assert latest is not None
    other = tmp_path / "elsewhere" / "runs" / latest.run_id
    for name, path in (("reference", other), ("reference", latest.path / ".."), ("warm", other / "warm")):
        record = json.loads(good)
        record["following"][name] = str(path)
        run.job.write_text(json.dumps(record))
        with pytest.raises(InputError, match=r"cannot be resumed|name of a run"):
            CliRunner().invoke(cli, ["resume", str(out)], catch_exceptions=False)
        with pytest.raises(InputError, match=r"cannot be resumed|name of a run"):
            refresh(night(edges, out, **options))
    run.job.write_text(good)
    assert refresh(night(edges, out, **options)).run == run.run_id
