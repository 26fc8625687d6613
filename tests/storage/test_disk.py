"""What is written survives: synced before it is named, sealed by a checksum, finished after every fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import FAULTS, FaultyDisk, RememberingDisk, WatchedDisk

from tests.harness import ROOT
from tests.harness.clusters import digests, job, write_edges
from toffee_dist import InputError, load_run
from toffee_dist.batch.pipeline import resume_run, start_run
from toffee_dist.batch.seal import check_run
from toffee_dist.cli import main
from toffee_dist.errors import UnfinishedError
from toffee_dist.storage.disk import Disk, using_disk
from toffee_dist.storage.files import append_line, read_array, save_array, write_json
from toffee_dist.storage.runs import find_unfinished
from toffee_dist.storage.slices import is_finished, write_sealed
from toffee_dist.storage.tensors import check_tensor, open_tensor, stage_tensor
from toffee_dist.tensor import TemporalTensor


class OrderedDisk(WatchedDisk):
    """Notes every change."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, Any]] = []

    def before(self, change: str, *arguments: Any) -> None:
        self.log.append((change, arguments[-1] if change == "replace" else arguments[0]))


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_edges(tmp_path_factory.mktemp("edges") / "edges.parquet", nodes=60, events=900, days=12)


def test_a_file_is_synced_before_its_name_and_its_folder_after(tmp_path: Path) -> None:
    with using_disk(disk := OrderedDisk()):
        write_json(tmp_path / "a.json", {})
        save_array(tmp_path / "b.npy", np.ones(3))
        append_line(tmp_path / "log", "one")
    assert [change for change, _ in disk.log] == [*["sync", "replace", "sync_folder"] * 2, "append"]
    with using_disk(disk := OrderedDisk()):
        save_array(tmp_path / "c.npy", np.ones(3), durable=False)
    assert [change for change, _ in disk.log] == ["replace"]


def test_a_sync_reaches_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else about syncs is tested by what the disk is asked to do; here, that it does it."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    file = tmp_path / "file"
    Disk().create(file, b"one")
    assert synced == []
    Disk().sync(file)
    Disk().sync_folder(tmp_path)
    Disk().append(file, b"two")
    assert synced == [str(file), str(tmp_path), str(file)]
    assert file.read_bytes() == b"onetwo"


@pytest.mark.job
def test_everything_published_is_synced_then_the_manifest_then_the_pointer(
    edges: Path, tmp_path: Path
) -> None:
    with using_disk(disk := OrderedDisk()):
        run = start_run(job(edges, tmp_path / "out", outputs=("embedding", "trajectory", "factors"))).run
    log = disk.log
    named = [path for change, path in log if change == "replace"]
    assert named[-2:] == [run.manifest, tmp_path / "out" / "latest.json"]
    published = {path for path in run.path.rglob("*") if path.is_file()}
    for path in published:
        at = max(number for number, found in enumerate(log) if found == ("replace", path))
        assert log[at - 1][0] == "sync", path
        assert ("sync_folder", path.parent) in log[at:]
    # The folders that are new are named durably too, before the manifest is.
    before = log[: log.index(("replace", run.manifest))]
    for folder in {path.parent for path in published} | {run.path.parent, tmp_path / "out"}:
        assert ("sync_folder", folder) in before
    manifest = run.read_manifest()
    assert set(manifest.files) == {p.relative_to(run.path).as_posix() for p in published - {run.manifest}}
    assert check_run(run) == len(manifest.files)


@pytest.mark.job
def test_seals_are_of_what_is_on_the_disk(
    edges: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a cache that is right about a disk that is not, nobody would know until the next start."""
    synced: set[str] = set()
    dropped: list[tuple[str, bool]] = []
    fsync, fadvise = os.fsync, os.posix_fadvise

    def sync(handle: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def advise(handle: int, start: int, length: int, advice: int) -> None:
        assert (start, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        path = os.readlink(f"/proc/self/fd/{handle}")
        dropped.append((path, path in synced))
        fadvise(handle, start, length, advice)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    run = start_run(job(edges, tmp_path / "out", outputs=("embedding", "trajectory"))).run
    monkeypatch.undo()
    published = {str(run.path / name) for name in run.read_manifest().files}
    # A page that is not on the disk yet is not dropped.
    assert {path for path, was_synced in dropped if was_synced} >= published


def test_a_slice_is_finished_when_its_checksum_says_so(tmp_path: Path) -> None:
    seals = {"A": save_array(tmp_path / "A-x.npy", np.arange(12.0))}
    write_sealed(tmp_path, "x", {"report": {}}, seals)
    assert is_finished(tmp_path, "x", "A")
    assert not is_finished(tmp_path, "x", "AR")
    data = bytearray((tmp_path / "A-x.npy").read_bytes())
    # Of the same size, as a power cut leaves what was not synced.
    data[-8:] = bytes(8)
    (tmp_path / "A-x.npy").write_bytes(data)
    assert not is_finished(tmp_path, "x", "A")
    assert read_array(tmp_path / "A-x.npy").shape == (12,)


@pytest.mark.job
def test_a_slice_of_zeros_is_solved_again(edges: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"outputs": ("embedding", "trajectory"), "freqs": "all"}
    whole = digests(start_run(job(edges, tmp_path / "whole", **options)).run.path)

    class Stopped(WatchedDisk):
        def before(self, change: str, *arguments: Any) -> None:
            if change == "replace" and "trajectory" in arguments[1].parts:
                raise OSError(28, "no space", str(arguments[1]))

    with using_disk(Stopped()), pytest.raises(UnfinishedError):
        start_run(job(edges, tmp_path / "out", **options))
    run = find_unfinished(tmp_path / "out")
    for number in (0, 3):
        path = run.slices / f"A-{number:07d}.npy"
        path.write_bytes(path.read_bytes()[:128] + bytes(path.stat().st_size - 128))
    done = resume_run(run, {"mode": "threads", "workers": 1})
    assert done.solved == 2
    assert digests(done.run.path) == whole


@pytest.mark.job
def test_verify_names_what_was_changed(
    edges: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start_run(job(edges, tmp_path, outputs=("embedding",))).run
    main(["inspect", str(tmp_path), "--verify"])
    assert "all as they were published" in capsys.readouterr().out
    part = run.part("embedding", 0)
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with pytest.raises(SystemExit) as stop:
        main(["inspect", str(tmp_path), "--verify"])
    assert stop.value.code == 3
    assert "embedding/part-00000.parquet" in capsys.readouterr().err
    # A run of a version without checksums is read, but not verified.
    run.write_manifest(run.read_manifest().replaced(files={}))
    assert load_run(tmp_path).n_nodes == 60
    with pytest.raises(InputError, match="cannot be verified"):
        check_run(run)


def test_disks_fail_as_they_are_told(tmp_path: Path) -> None:
    for fault, on in FAULTS:
        if fault == "exit":
            continue
        with using_disk(FaultyDisk(fault, 2, on)):
            append_line(tmp_path / f"{fault}{on}", "one")
            with pytest.raises(OSError, match=r"Input/output error|No space"):
                append_line(tmp_path / f"{fault}{on}", "three")
            if on:
                with pytest.raises(OSError, match=r"Input/output error|No space"):
                    append_line(tmp_path / f"{fault}{on}", "five")
        assert (tmp_path / f"{fault}{on}").read_text() == "one\n" + (
            ("thrfi" if on else "thr") if fault == "torn" else ""
        )


def test_a_power_cut_leaves_what_was_not_synced_behind(tmp_path: Path) -> None:
    disk = RememberingDisk(tmp_path)
    with using_disk(disk):
        save_array(tmp_path / "sure.npy", np.ones(2))
        save_array(tmp_path / "lost.npy", np.ones(2), durable=False)
    left = {state.kind: state.files for state in disk.states[-3:]}
    sure, lost = tmp_path / "sure.npy", tmp_path / "lost.npy"
    assert left["everything"][lost] == lost.read_bytes()
    assert left["zeroed"][lost] == bytes(lost.stat().st_size)
    assert lost not in left["promised"]
    assert all(files[sure] == sure.read_bytes() for files in left.values())
    # A disk that forgets to sync is found out.
    lying = RememberingDisk(tmp_path)

    class Lying(Disk):
        def sync(self, path: Path) -> None:
            """Do nothing."""

        def replace(self, temporary: Path, path: Path) -> None:
            lying.replace(temporary, path)

        def sync_folder(self, path: Path) -> None:
            lying.sync_folder(path)

    with using_disk(Lying()):
        save_array(tmp_path / "unsure.npy", np.ones(2))
    assert lying.states[-1].files[tmp_path / "unsure.npy"] == b""


@pytest.mark.slow
@pytest.mark.job
def test_faults_and_power_cuts_lose_nothing() -> None:
    """A sample of what the command does: all writes, all faults, all power cuts."""
    # A process of its own: it forks, which threads of this one would not survive.
    command = [sys.executable, str(ROOT / "benchmarks" / "faults.py"), "--only-storage", "--every", "35"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["writes"] > 100
    assert found["injected"] >= 28
    assert found["crash_states"] > 3
    assert [found[name] for name in ("lost", "different", "internal_errors", "hangs")] == [0] * 4, done.stdout


@pytest.mark.parametrize(
    ("name", "value"), [("indices", 7), ("indices", -1), ("steps", 9), ("indptr", 5), ("tube_ptr", -3)]
)
def test_a_staged_tensor_that_leads_elsewhere(tmp_path: Path, name: str, value: int) -> None:
    stage_tensor(TemporalTensor.from_events([0, 1, 2], [1, 2, 0], [0, 1, 2]), tmp_path)
    check_tensor(tmp_path)
    array = np.load(tmp_path / f"{name}.npy")
    array[1] = value
    np.save(tmp_path / f"{name}.npy", array)
    with pytest.raises(InputError, match=name):
        check_tensor(tmp_path)
    np.save(tmp_path / f"{name}.npy", array[:-1])
    with pytest.raises(InputError, match="no staged tensor"):
        open_tensor(tmp_path)
