"""A folder of runs that others may write to: names that lead elsewhere, links, and what is not ours."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.harness import clusters, commands, s3
from tests.harness.clusters import free_port, job, write_edges
from tests.harness.refreshes import night, write_day, write_days
from toffee_dist import load_run
from toffee_dist.batch.pipeline import start_run
from toffee_dist.cli import cli
from toffee_dist.errors import ConfigError, InputError, UnfinishedError
from toffee_dist.refresh.history import describe_runs, remove_old_runs, roll_back
from toffee_dist.refresh.job import refresh
from toffee_dist.storage.files import check_writable, remove_tree
from toffee_dist.storage.lock import hold_lock
from toffee_dist.storage.runs import RunFolder, find_unfinished, get_run, list_runs, new_run

BAD_NAMES = ["../../elsewhere", "..", ".", "", "/etc", "a/b", "a\n", "a..b", "\x1b[2J", "run\0"]
LOOSE = {"last": "7d", "rank": 4, "min_cosine": -1.0, "max_auc_drop": 1.0, "max_energy_drop": 1.0}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two nights, and the edges of both."""
    folder = tmp_path_factory.mktemp("published")
    edges = write_days(folder / "edges", 0, 9, nodes=60, events=200)
    refresh(night(edges, folder / "out", **LOOSE))
    write_day(edges, 9, nodes=60, events=200)
    refresh(night(edges, folder / "out", **LOOSE))
    return folder


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "copy", copy_function=shutil.copy2))


def point(out: Path, name: str) -> None:
    pointer = json.loads((out / "latest.json").read_text())
    (out / "latest.json").write_text(json.dumps(pointer | {"run_id": name, "path": f"runs/{name}"}))


@pytest.mark.job
def test_pointers_name_runs_and_nothing_else(folder: Path) -> None:
    out = folder / "out"
    # What the name would lead to is there, and whole.
    shutil.copytree(list_runs(out)[0].path, folder / "elsewhere")
    for name in ("../../elsewhere", str(folder / "elsewhere"), *BAD_NAMES[1:]):
        point(out, name)
        for call in (lambda: load_run(out), lambda: describe_runs(out), lambda: roll_back(out)):
            with pytest.raises(InputError, match=r"latest\.json is damaged"):
                call()
    # Where it says that the run is, for other programs, is not where we look.
    point(out, list_runs(out)[1].run_id)
    pointer = json.loads((out / "latest.json").read_text())
    (out / "latest.json").write_text(json.dumps(pointer | {"path": "../elsewhere"}))
    assert load_run(out).path == list_runs(out)[1].path


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_are_no_paths(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="name of a run"):
        get_run(tmp_path, name)
    with pytest.raises(ConfigError, match="reference"):
        night(tmp_path, tmp_path, reference=name)
    (tmp_path / "runs").mkdir(exist_ok=True)
    with pytest.raises(InputError, match="no run to go back to"):
        roll_back(tmp_path, name)


def test_names_of_new_runs_are_plain(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert get_run(tmp_path, run.run_id) == run
    assert list_runs(tmp_path) == [run]
    assert night(tmp_path, tmp_path, reference=run.run_id).reference == run.run_id


@pytest.mark.job
def test_retention_follows_no_links(folder: Path) -> None:
    """A linked run, links inside a run, and a linked folder of runs: what they lead to stays as it is."""
    out, victim = folder / "out", folder / "victim"
    oldest, newest = list_runs(out)
    linked = oldest.run_id.replace(oldest.run_id[:4], "2001")
    shutil.copytree(oldest.path, victim / linked)
    before = snapshot(victim)
    os.symlink(victim / linked, out / "runs" / linked)
    # A rejected run of long ago that is removed, with a link to a folder in it.
    gone = get_run(out, oldest.run_id.replace(oldest.run_id[:4], "2002"))
    shutil.copytree(oldest.path, gone.path)
    rejected = gone.read_manifest().replaced(state="rejected")
    gone.write_manifest(rejected)
    os.symlink(victim / linked, gone.path / "link")
    shutil.rmtree(gone.warm, ignore_errors=True)
    os.symlink(victim / linked, gone.warm)
    newer = get_run(out, oldest.run_id.replace(oldest.run_id[:4], "2003"))
    shutil.copytree(oldest.path, newer.path)
    newer.write_manifest(rejected)
    shutil.rmtree(newer.warm, ignore_errors=True)
    os.symlink(victim / linked, newer.warm)

    removed = remove_old_runs(out, keep=1)
    assert snapshot(victim) == before
    assert gone.run_id in removed
    assert linked not in removed
    assert linked not in [line.run for line in describe_runs(out)]
    assert not gone.path.exists()
    assert (out / "runs" / linked).is_symlink()
    # A link in a run that stays is removed itself.
    assert newer.path.is_dir()
    assert not os.path.lexists(newer.warm)
    assert newest.complete

    # The whole folder of runs is a link: nothing is removed behind it, and nothing new goes there.
    (out / "runs").rename(victim / "runs")
    os.symlink(victim / "runs", out / "runs")
    before = snapshot(victim)
    assert remove_old_runs(out, keep=1) == []
    assert snapshot(victim) == before
    with pytest.raises(ConfigError, match="which is a link"):
        new_run(out)


def snapshot(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_size for path in sorted(folder.rglob("*"))}


def test_work_behind_a_link_stays(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (victim / "ingest").mkdir(parents=True)
    (victim / "ingest" / "file").touch()
    run = new_run(tmp_path / "out")
    # A run that is a link itself.
    (victim / "work").mkdir()
    other = RunFolder(tmp_path / "out" / "runs" / "link")
    os.symlink(victim, other.path)
    other.remove_work()
    assert (victim / "work").is_dir()
    # A folder behind a link is left alone, the link itself is removed.
    remove_tree(run.work)
    os.symlink(victim, run.work)
    run.remove(run.staged.path)
    assert (victim / "ingest" / "file").exists()
    run.remove_work()
    assert not os.path.lexists(run.work)
    assert (victim / "ingest" / "file").exists()


@pytest.mark.job
def test_stray_folders_are_left_alone(folder: Path) -> None:
    out = folder / "out"
    strays = ["lost+found", "backup", ".snapshot", "zzz", "99999999T999999.999999-aaaa", "2020"]
    for name in strays:
        (out / "runs" / name).mkdir()
    assert remove_old_runs(out, keep=1) == []
    # A run whose job.json is damaged.
    damaged = get_run(out, "20200101T000000.000000-abcd")
    damaged.work.mkdir(parents=True)
    damaged.job.write_text("{")
    write_day(folder / "edges", 10, nodes=60, events=200)
    assert refresh(night(folder / "edges", out, keep=1, **LOOSE)).state == "published"
    for name in (*strays, damaged.run_id):
        assert (out / "runs" / name).is_dir()
    with pytest.raises(InputError, match="nothing to resume"):
        find_unfinished(out / "runs" / "backup")
    names = [line.run for line in describe_runs(out)]
    assert not {*strays} & {*names} - {"99999999T999999.999999-aaaa"}


# The lock.


@pytest.mark.job
@pytest.mark.cluster
def test_embed_and_resume_wait_for_nobody(tmp_path: Path) -> None:
    edges, out = write_edges(tmp_path / "edges.parquet", nodes=60, events=500), tmp_path / "out"
    with pytest.raises(UnfinishedError):
        start_run(job(edges, out, mode=f"tcp://127.0.0.1:{free_port()}", wait=0.5))
    who = re.escape(f"process {os.getpid()} on {os.uname().nodename} since")
    before = snapshot(out / "runs")
    with hold_lock(out):
        for arguments in (["embed", str(edges), f"--out={out}", "--rank=4"], ["resume", str(out)]):
            with commands.toffee(*arguments, "--mode=threads") as refused:
                code, _, err = commands.finish(refused)
            assert code == 5, err
            assert re.search(rf"another embed, refresh, resume or rollback .*{who}", err)
        assert snapshot(out / "runs") == before
    assert not (out / "refresh.lock").exists()


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.cluster
def test_of_two_resumes_one_is_refused(tmp_path: Path) -> None:
    edges, out = write_edges(tmp_path / "edges.parquet", nodes=60, events=500), tmp_path / "out"
    with pytest.raises(UnfinishedError):
        start_run(job(edges, out, mode=f"tcp://127.0.0.1:{free_port()}", wait=0.5))
    run = find_unfinished(out)
    slow = clusters.slow_slices(tmp_path / "slow.py", 0.3)
    resume = ["resume", str(out), "--mode=processes", "--workers=1", "--wait=60"]
    with commands.toffee(*resume, environment=slow) as first:
        commands.wait_until(lambda: commands.finished_slices(out))
        with commands.toffee(*resume) as second:
            code, _, err = commands.finish(second)
        assert code == 5, err
        assert f"process {first.pid} on" in err
        code, _, err = commands.finish(first)
    assert code == 0, err
    assert load_run(out).path == run.path
    assert not (out / "refresh.lock").exists()


@pytest.mark.job
def test_a_run_that_was_finished_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edges, out = write_edges(tmp_path / "edges.parquet", nodes=60, events=500), tmp_path / "out"
    run = start_run(job(edges, out, keep_work=True)).run
    # Found unfinished, and then finished by the one who held the lock.
    monkeypatch.setattr("toffee_dist.storage.runs.find_unfinished", lambda path: run)
    with pytest.raises(InputError, match="is complete"):
        CliRunner().invoke(cli, ["resume", str(out), "--mode=threads"], catch_exceptions=False)


# Storage that is down at the start.


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOSPC, errno.EHOSTDOWN])
def test_storage_that_fails_may_work_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As a mounted folder whose server is gone."""

    def fail(path: Path, *rest: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(UnfinishedError, match=os.strerror(number)):
        check_writable(tmp_path)


def test_a_place_that_is_none_stays_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.symlink("loop", tmp_path / "loop")
    for place in (tmp_path / "file", tmp_path / "file" / "out", tmp_path / ("x" * 300), tmp_path / "loop"):
        with pytest.raises(ConfigError, match="output folder"):
            check_writable(place)
    # Where even root may make nothing.
    with pytest.raises(ConfigError, match="output folder"):
        check_writable(Path("/proc/toffee"))


@pytest.mark.job
@pytest.mark.cluster
def test_a_store_that_is_down_is_worth_another_try(tmp_path: Path) -> None:
    edges = write_edges(tmp_path / "edges.parquet", nodes=60, events=500)
    down = s3.environment(free_port()) | {"AWS_MAX_ATTEMPTS": "1"}
    out = "s3://graphs/out"
    for arguments in (
        ["embed", str(edges), f"--out={out}", "--rank=4"],
        ["refresh", str(edges), f"--out={out}", "--rank=4"],
        ["resume", out],
    ):
        with commands.toffee(*arguments, "--mode=threads", environment=down) as refused:
            code, _, err = commands.finish(refused)
        assert code == 5, (arguments, err)
