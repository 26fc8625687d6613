"""The same bytes after every kill: no result depends on what was there when a run was resumed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kills import run_kills
from simulate import KINDS, LIMITS_OF, SMALL, Bench
from simulate import digests as results

from tests.harness.clusters import digests, job, write_edges
from toffee_dist.batch import pipeline
from toffee_dist.batch.pipeline import resume_run, start_run
from toffee_dist.ingest.job import ingest
from toffee_dist.kernels import spectrum
from toffee_dist.limits import Limits
from toffee_dist.refresh.job import resume_refresh
from toffee_dist.storage.runs import RunFolder, find_latest, find_unfinished

pytestmark = [pytest.mark.slow, pytest.mark.job]

OUTPUTS = ("embedding", "trajectory", "factors", "spectrum")
# Two batches of frequencies, several parts of every output, several blocks and buckets.
LIMITS = Limits(max_batch=20, part_bytes=1 << 18, bucket_ids=20, bin_entries=400, block_entries=1000)
# A batch of 20 is transformed in blocks of 12 and 8: by an FFT, and directly.
BLOCK = 12


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunFolder, dict[str, str]]]:
    """A run that nobody disturbed, with all its work, while blocks of the transform are small."""
    folder = tmp_path_factory.mktemp("whole")
    edges = write_edges(folder / "edges.parquet", nodes=20, events=9000, days=60)
    config = job(edges, folder / "out", rank=4, outputs=OUTPUTS, reduce="decay:7", keep_work=True)
    with pytest.MonkeyPatch.context() as patch:
        tensor = ingest(config, folder / "staged").tensor()
        patch.setattr(spectrum, "BLOCK_BYTES", BLOCK * 16 * tensor.n_pairs)
        direct, fft = spectrum._transform_costs(tensor, 1)
        assert 8 * direct < fft < BLOCK * direct
        run = start_run(config, limits=LIMITS).run
        yield run, digests(run.path)


def units(run: RunFolder) -> list[list[Path]]:
    """Return what tasks leave: the files of each result, the one that says that it is whole first."""
    found = [[path] for path in run.result_files("*.parquet")]
    for report in sorted(set(run.slices.glob("*.json")) - {run.slices / "choice.json"}):
        found.append([report, *sorted(run.slices.glob(f"*-{report.stem}.npy"))])
    found.append([run.node_record, *sorted(run.node_record.parent.glob("*.npy"))])
    found.append([run.slices / "choice.json"])
    found.append([run.staged.record, run.staged.path])
    return found


@settings(max_examples=15, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_the_same_bytes_after_every_kill(
    whole: tuple[RunFolder, dict[str, str]], data: st.DataObject
) -> None:
    done, expected = whole
    out = done.out.parent / "again"
    shutil.rmtree(out, ignore_errors=True)
    run = RunFolder(out / "runs" / done.run_id)
    shutil.copytree(done.path, run.path)
    run.manifest.unlink()
    # A kill leaves any of them whole, in part without what says so, or not at all.
    for first, *others in data.draw(st.lists(st.sampled_from(units(run)), unique_by=str, max_size=40)):
        _remove(first)
        for path in others:
            if data.draw(st.booleans()):
                _remove(path)
    resume_run(find_unfinished(out), {}, limits=LIMITS)
    assert digests(run.path) == expected


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Killed(BaseException):
    """The client is gone."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_killed_between_manifest_and_pointer(kind: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.prepare(kind)
    out = bench.make_out(kind, "killed")
    before = find_latest(out)

    def killed(run: RunFolder) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "point_to", killed)
        with pytest.raises(Killed):
            bench.run(kind, out)
    run = find_unfinished(out)
    assert run.complete
    assert find_latest(out) == before
    if kind == "refresh":
        resume_refresh(run, {}, limits=SMALL)
    else:
        resume_run(run, {}, limits=LIMITS_OF[kind])
    assert find_latest(out) == run
    assert results(run) == bench.expected[kind]
    assert not run.work.exists()


@pytest.mark.cluster
@pytest.mark.data
@pytest.mark.timeout(600)
def test_a_real_graph_killed_at_random_moments(shared_data: Path) -> None:
    """A client on threads, a client of processes, and a worker; `benchmarks/kills.py` does it fifty times."""
    said: list[str] = []
    assert run_kills(3, seed=1, say=said.append) == {"kills": 3, "finished": 3, "same_bytes": 3}, said
