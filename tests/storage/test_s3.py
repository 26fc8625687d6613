"""Runs on an object store: a real S3 API over HTTP, a proxy before it that misbehaves, and the lock."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import clusters, s3
from tests.harness.commands import wait_until
from tests.harness.refreshes import night, write_day, write_days
from toffee_dist import Toffee, load_run
from toffee_dist.batch.inspect_run import inspect_run
from toffee_dist.batch.pipeline import resume_run, start_run
from toffee_dist.cli import main
from toffee_dist.cluster.client import cluster
from toffee_dist.errors import ConfigError, InputError, UnfinishedError
from toffee_dist.evaluation.job import EvaluateSettings, run_job
from toffee_dist.ingest.files import find_files, list_fragments
from toffee_dist.ingest.job import ingest
from toffee_dist.limits import Limits
from toffee_dist.refresh.fold_in import FoldConfig, fold_in
from toffee_dist.refresh.history import describe_runs, roll_back
from toffee_dist.refresh.job import refresh
from toffee_dist.settings import EdgeSettings, JobConfig, RuntimeSettings
from toffee_dist.storage import local_cache as caches
from toffee_dist.storage import lock as lock_module
from toffee_dist.storage import paths
from toffee_dist.storage.files import read_array, save_array
from toffee_dist.storage.lock import LEASE_SECONDS, _read_lock, hold_lock
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.runs import find_unfinished, list_runs
from toffee_dist.storage.tensors import make_arrays, open_tensor, stage_tensor
from toffee_dist.tensor import TemporalTensor

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=s3.SERVERS)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3.Proxy]:
    """One server and one proxy for all tests; each has its own folders."""
    with (
        pytest.MonkeyPatch.context() as patch,
        s3.server(request.param) as port,
        s3.proxy(port) as proxy,
        s3.use(proxy.port) as fs,
    ):
        patch.setenv("TOFFEE_CACHE", str(tmp_path_factory.mktemp("cache")))
        fs.mkdir(s3.BUCKET)
        yield proxy


@pytest.fixture(autouse=True)
def behaving(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "store" in request.fixturenames:
        request.getfixturevalue("store").fault = lambda method, path: None


# Many blocks, buckets, batches and parts of a small graph.
SMALL = Limits(max_batch=8, part_bytes=1 << 19, bucket_ids=200, bin_entries=1000, block_entries=3000)


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clusters.write_edges(tmp_path_factory.mktemp("edges") / "edges.parquet", days=20)


@pytest.fixture(scope="module")
def there(store: s3.Proxy, edges: Path) -> str:
    """The same edges on the store."""
    url = f"s3://{s3.BUCKET}/input/edges.parquet"
    to_path(url).write_bytes(edges.read_bytes())
    return url


@pytest.fixture(scope="module")
def undisturbed(edges: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return clusters.digests(start_run(job(edges, tmp_path_factory.mktemp("local"))).run.path)


def job(inputs: Path | str, out: Path | str, **options: Any) -> JobConfig:
    """Describe a run of few slices: every one is a dozen requests."""
    return clusters.job(inputs, out, **{"freqs": "lowest:4", **options})  # type: ignore[arg-type]


def digests(run: Path) -> dict[str, str]:
    files = [path for path in run.rglob("*.parquet") if "work" not in path.relative_to(run).parts]
    return {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def objects(url: str) -> list[str]:
    return list(paths.RemotePath(url).sizes())


def toffee(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "toffee_dist.cli", *arguments],
        env=os.environ | clusters.ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(
    "options", [{}, {"undirected": True, "outputs": ("embedding", "factors", "spectrum"), "report": True}]
)
def test_the_bytes_of_a_local_folder(
    store: s3.Proxy, edges: Path, there: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    local = start_run(job(edges, tmp_path / "out", **options), limits=SMALL).run.path
    out = s3.unique("same")
    run = start_run(job(there, out, workers=2, **options), limits=SMALL).run
    assert digests(run.path) == clusters.digests(local)
    assert (run.path / "report.html").exists() == options.get("report", False)
    # Nothing is left of the work, and readers find the run.
    assert not [name for name in objects(out) if "/work/" in name]
    found, same = load_run(out), load_run(tmp_path / "out")
    np.testing.assert_array_equal(found.embedding.numpy(), same.embedding.numpy())
    np.testing.assert_array_equal(found.embedding.dask().compute(scheduler="threads"), same.embedding.numpy())
    assert found.nodes.polars().collect().equals(same.nodes.polars().collect())
    assert found.nodes.arrow().equals(same.nodes.arrow())
    assert inspect_run(to_path(out))["files"] == inspect_run(tmp_path / "out")["files"]


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.cluster
def test_slices_in_blocks_and_requests_that_fail(
    store: s3.Proxy, there: str, edges: Path, tmp_path: Path
) -> None:
    limits = replace(SMALL, block_work=5500)
    options = {"outputs": ("embedding",), "max_iter": 1, "rank": 4}
    local = start_run(job(edges, tmp_path / "local", **options), limits=limits)
    seen: list[str] = []

    def fault(method: str, path: str) -> str | None:
        """Tell some requests for a block of a pass to come again."""
        seen.extend([path] if "/passes-" in path else [])
        return "503" if "/passes-" in path and len(seen) % 50 == 0 else None

    with s3.use(store.port):
        store.fault = fault
        done = start_run(job(there, s3.unique("blocks"), **options), limits=limits)
        store.fault = lambda method, path: None
        found = digests(done.run.path)
    assert done.passes == local.passes
    assert len(seen) > 100
    assert found == clusters.digests(local.run.path)


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.cluster
def test_the_command_line(store: s3.Proxy, there: str, edges: Path, tmp_path: Path) -> None:
    out = s3.unique("cli")
    options = ["--rank=8", "--mode=processes", "--workers=2", "--json"]
    done = toffee(
        *("embed", there, f"--out={out}", "--outputs=embedding,trajectory"),
        *("--freqs=lowest:4", "--trajectory-by=als", *options),
    )
    assert done.returncode == 0, done.stderr
    local = start_run(job(edges, tmp_path / "out")).run.path
    assert digests(to_path(json.loads(done.stdout)["run"])) == clusters.digests(local)
    [row] = json.loads(toffee("runs", out, "--json").stdout)
    assert row["latest"]


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.cluster
def test_questions_and_exports(
    store: s3.Proxy, there: str, edges: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = s3.unique("ask")
    for inputs, where in ((there, out), (str(edges), str(tmp_path / "out"))):
        start_run(job(inputs, where, outputs=("embedding", "trajectory", "spectrum")))

    def ask(run: str, command: str, *words: str) -> Any:
        main([command, run, *words, "--json"])
        return json.loads(capsys.readouterr().out)

    questions = [
        ("neighbors", "n00017", "-k", "3"),
        ("neighbors", "n00017", "--at", "5"),
        ("trajectory", "n00017"),
        ("similar-periods", "n00017"),
        ("score", "n00017,n00042"),
    ]
    for question in questions:
        assert ask(out, *question) == ask(str(tmp_path / "out"), *question)
    assert len(ask(out, "index")["files"]) == 3
    assert ask(out, *questions[0]) == ask(str(tmp_path / "out"), *questions[0])
    for form in ("word2vec", "numpy", "pgvector"):
        for name, run in (("there", out), ("here", str(tmp_path / "out"))):
            ask(run, "export", "--format", form, "--to", str(tmp_path / f"{form}-{name}"))
    for form in ("word2vec", "pgvector"):
        assert (tmp_path / f"{form}-there").read_bytes() == (tmp_path / f"{form}-here").read_bytes()
    for name in ("vectors.npy", "ids.npy"):
        there_, here = (tmp_path / f"numpy-{where}" / name for where in ("there", "here"))
        assert there_.read_bytes() == here.read_bytes()


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.cluster
def test_nights(store: s3.Proxy, tmp_path: Path) -> None:
    local, out, inputs = tmp_path / "out", s3.unique("nights"), s3.unique("days")
    edges = write_days(tmp_path / "edges", 0, 29)
    for day in (29, 30):
        write_day(edges, day)
        for path in edges.iterdir():
            to_path(f"{inputs}/{path.name}").write_bytes(path.read_bytes())
        assert refresh(night(edges, local)).state == "published"
        done = refresh(night(inputs, out))  # type: ignore[arg-type]
        assert done.state == "published"
        assert digests(load_run(out).path) == clusters.digests(load_run(local).path)
    assert done.record.saved is not None
    assert done.record.saved.slices == 1
    assert refresh(night(inputs, out)).state == "unchanged"  # type: ignore[arg-type]
    lines = to_path(f"{out}/refresh.jsonl").read_text().splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["published", "published", "unchanged"]
    assert "toffee_refresh_success 1.0" in to_path(f"{out}/refresh.prom").read_text()
    first, second = describe_runs(to_path(out))
    assert second.latest

    new = tmp_path / "new.parquet"
    last = pl.read_parquet(edges / "day-030.parquet")
    last.with_columns(source=pl.lit("newcomer")).head(20).write_parquet(new)
    where = FoldConfig.read({"inputs": (str(new),), "mode": "threads", "workers": 1})
    for folder in (str(local), out):
        fold_in(to_path(folder), where, to_path(f"{folder}-new.parquet"))
    assert to_path(f"{out}-new.parquet").read_bytes() == (tmp_path / "out-new.parquet").read_bytes()

    assert roll_back(to_path(out)).run_id == first.run
    assert load_run(out).path.name == first.run
    # No lock, no scratch, and no secret in anything that was written.
    names = objects(out)
    assert not [name for name in names if "lock" in name or ".fold-" in name or name.startswith(".toffee")]
    for name in names:
        assert s3.SECRET.encode() not in (to_path(out) / name).read_bytes()


def some(every: dict[int, str]) -> s3.Fault:
    """Misbehave at every so-manieth request."""
    lock, count = threading.Lock(), 0

    def fault(method: str, path: str) -> str | None:
        nonlocal count
        with lock:
            count += 1
            return next((kind for step, kind in every.items() if count % step == 0), None)

    return fault


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.cluster
def test_throttled_dropped_and_stalled(
    store: s3.Proxy, there: str, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "READ_TIMEOUT", 2.0)
    with s3.use(store.port):
        store.faults.clear()
        store.fault = some({97: "stall", 23: "drop", 5: "503"})
        run = start_run(job(there, s3.unique("faults"))).run
        store.fault = lambda method, path: None
        assert digests(run.path) == undisturbed
    assert store.faults["503"] > 20
    assert store.faults["drop"] > 5
    assert store.faults["stall"] > 1


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("where", ["/work/ingest/work/", "/work/slices/A-0000003", "/trajectory/"])
def test_a_store_that_fails_for_good_and_a_resume(
    store: s3.Proxy, there: str, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    out = s3.unique("down")
    with s3.use(store.port):
        store.fault = lambda method, path: "503" if method == "PUT" and where in path else None
        with pytest.raises(UnfinishedError, match=r"storage failed.*slow down") as caught:
            start_run(job(there, out))
        assert caught.value.exit_code == 5
        assert s3.SECRET not in str(caught.value)
        with pytest.raises(InputError, match="no run"):
            load_run(out)
        state = inspect_run(to_path(out))
        assert (state["state"], state["staged"]) == ("unfinished", "ingest" not in where)
        store.fault = lambda method, path: None
        done = resume_run(find_unfinished(to_path(out)), RuntimeSettings(mode="threads").model_dump())
    assert digests(done.run.path) == undisturbed
    assert done.reused > 0 or "ingest" in where


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.cluster
def test_a_bucket_one_may_not_write(store: s3.Proxy, there: str) -> None:
    fs = paths.open_filesystem("s3")
    fs.mkdir("guarded")
    deny = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:PutObject",
        "Resource": "arn:aws:s3:::guarded/*",
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [deny]})
    fs.call_s3("put_bucket_policy", Bucket="guarded", Policy=policy)
    done = toffee("embed", there, "--out=s3://guarded/out")
    assert done.returncode == 2, done.stderr
    assert "output folder: got s3://guarded/" in done.stderr
    assert "Traceback" not in done.stderr
    assert s3.SECRET not in done.stderr
    with pytest.raises(ConfigError, match=r"output folder.*guarded"):
        refresh(night(there, "s3://guarded/out"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"output folder.*guarded"):
        ingest(EdgeSettings(inputs=(there,)), "s3://guarded/out")
    assert not objects("s3://guarded")


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.cluster
def test_no_such_bucket_no_credentials_no_s3fs(
    store: s3.Proxy, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"output folder.*no such bucket"):
        start_run(job(there, "s3://nowhere/out"))
    with pytest.raises(InputError, match=r"no file to read|cannot list"):
        find_files(["s3://nowhere/edges"])
    with pytest.raises(InputError, match="no run"):
        load_run("s3://nowhere/out")
    with pytest.raises(ConfigError, match="a URL with a user or password") as caught:
        to_path("ftp://me:hidden@host/out")
    assert "hidden" not in str(caught.value)
    with s3.use(store.port):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
        with pytest.raises(ConfigError, match=r"output folder.*credentials"):
            start_run(job(str(Path(__file__)), s3.unique("anonymous")))
    with s3.use(store.port):
        paths.open_filesystem.cache_clear()
        monkeypatch.setitem(sys.modules, "s3fs", None)
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3")
        with pytest.raises(ConfigError, match=r"s3://.*pip install 'toffee_dist\[s3\]'"):
            start_run(job(there, s3.unique("without")))


@pytest.mark.slow
@pytest.mark.cluster
def test_an_ingest(store: s3.Proxy, there: str, edges: Path, tmp_path: Path) -> None:
    staged = s3.unique("staged")
    found, same = (
        ingest(EdgeSettings(inputs=(there,)), staged, limits=SMALL),
        ingest(EdgeSettings(inputs=(str(edges),)), tmp_path / "staged", limits=SMALL),
    )
    for name in ("indptr", "indices", "tube_ptr", "steps", "values"):
        np.testing.assert_array_equal(getattr(found.tensor(), name), getattr(same.tensor(), name))
    assert found.summary.empty_steps == same.summary.empty_steps
    assert {name.partition("/")[0] for name in objects(staged)} == {"ingest.json", "nodes", "tensor"}
    # Never into what is there; and what is refused leaves nothing.
    with pytest.raises(ConfigError, match="not empty"):
        ingest(EdgeSettings(inputs=(there,)), staged)
    inputs, out = s3.unique("bad"), s3.unique("refused")
    to_path(f"{inputs}/a.csv").write_text("1,2,3\n1,,x\n")
    with pytest.raises(InputError, match="rows are invalid"):
        ingest(EdgeSettings(inputs=(inputs,), step="1"), out)
    assert not objects(out)


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_inputs_are_read_by_ranges(store: s3.Proxy, tmp_path: Path, kind: str) -> None:
    rng, rows = np.random.default_rng(0), 60_000 if kind == "parquet" else 300_000
    columns = {name: rng.integers(300, size=rows) for name in ("source", "target")}
    frame = pl.DataFrame({**columns, "time": np.arange(rows)})
    local, there = tmp_path / f"edges.{kind}", to_path(f"{s3.unique('ranges')}/edges.{kind}")
    if kind == "parquet":
        # Nobody asks for this one, and it is most of the file.
        unused = pl.Series([bytes(row) for row in rng.integers(256, size=(rows, 200), dtype=np.uint8)])
        frame.with_columns(note=unused).write_parquet(local, row_group_size=5000)
        metadata = pq.read_metadata(local)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        needed = sum(group.column(at).total_compressed_size for group in groups for at in range(3))
        limits = Limits(table_bytes=local.stat().st_size // 4 + 1)
    else:
        frame.write_csv(local)
        needed = local.stat().st_size
        limits = Limits(text_bytes=needed // 4 + 1, head_bytes=4096, text_block_bytes=500_000)
    there.write_bytes(local.read_bytes())
    pieces = list_fragments(find_files([str(there)])[0], limits)
    store.sent.clear()
    found = ingest(EdgeSettings(inputs=(str(there),), step="100"), tmp_path / "there", limits=limits)
    assert [piece.stop for piece in pieces][:-1] == [piece.start for piece in pieces][1:]
    assert len(pieces) == 4
    sent = store.sent[str(there).removeprefix("s3:/")]
    # Beside it a footer, or a head and a tail, for each of the tasks and for two looks before.
    assert needed < sent < needed + 6 * 2 * paths.HEAD_BYTES
    assert kind == "csv" or sent < local.stat().st_size / 10
    same = ingest(EdgeSettings(inputs=(str(local),), step="100"), tmp_path / "here", limits=limits)
    for name in ("indptr", "indices", "tube_ptr", "steps", "values"):
        np.testing.assert_array_equal(getattr(found.tensor(), name), getattr(same.tensor(), name))


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_store_that_fails_while_an_input_is_read(
    store: s3.Proxy, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(paths, "WHOLE_BYTES", 0)
    there = to_path(f"{s3.unique('lost')}/edges.{kind}")
    frame = pl.DataFrame({name: np.arange(40_000) for name in ("source", "target", "time")})
    data = io.BytesIO()
    _ = frame.write_parquet(data) if kind == "parquet" else frame.write_csv(data)
    seen: list[str] = []

    def fault(method: str, path: str) -> str | None:
        """Give the first two ranges, and no more."""
        seen.extend([path] if method == "GET" and path.endswith(kind) else [])
        return "503" if method == "GET" and len(seen) > 2 else None

    with s3.use(store.port) as fs:
        monkeypatch.setattr(fs, "retries", 1)
        there.write_bytes(data.getvalue())
        store.fault = fault
        settings = EdgeSettings(inputs=(str(there),), step="100")
        with pytest.raises(UnfinishedError, match=r"storage failed.*slow down"):
            ingest(settings, tmp_path / "out", limits=Limits(head_bytes=4096))
    assert len(seen) > 2
    assert not (tmp_path / "out").exists()


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.cluster
def test_an_estimator_and_other_models(store: s3.Proxy, there: str, edges: Path, tmp_path: Path) -> None:
    with cluster("threads", 1) as client:
        model = Toffee(rank=4).fit(there, client=client, storage=f"s3://{s3.BUCKET}/bench")
        same = Toffee(rank=4).fit(str(edges))
        np.testing.assert_array_equal(model.embedding_, same.embedding_)
        del model
    assert not objects(f"s3://{s3.BUCKET}/bench")
    for name in ("rescal", "tsvd"):
        options: dict[str, Any] = {"model": name, "outputs": ("embedding",), "max_iter": 3}
        run = start_run(job(there, s3.unique(name), **options)).run
        assert digests(run.path) == clusters.digests(
            start_run(job(edges, tmp_path / name, **options)).run.path
        )


@pytest.mark.slow
@pytest.mark.cluster
def test_large_arrays_go_in_parts(store: s3.Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    # The least that S3 takes as a part.
    monkeypatch.setattr(paths, "RANGE_BYTES", 5 << 20)
    array = np.random.default_rng(0).random((120_000, 13))
    with s3.use(store.port):
        path = to_path(s3.unique("large")) / "A.npy"
        store.seen.clear()
        store.fault = some({4: "503"})
        save_array(path, array)
        assert store.seen["POST"] >= 2
        np.testing.assert_array_equal(read_array(path), array)
        np.testing.assert_array_equal(read_array(path, 70_000, 70_003), array[70_000:70_003])


@pytest.mark.slow
@pytest.mark.cluster
def test_more_objects_than_a_page(store: s3.Proxy) -> None:
    """A listing of S3 has 1000 names at the most; the rest is asked for."""
    folder = s3.unique("pages")
    names = [f"part-{number:05d}" for number in range(1003)]
    there = paths.RemotePath(folder)
    there.fs.pipe({f"{there.key}/{name}": b"x" for name in names})
    assert [path.name for path in there.iterdir()] == names
    assert there.sizes() == dict.fromkeys(names, 1)
    there.remove_tree()
    assert not there.sizes()
    assert not there.exists()


@pytest.mark.cluster
def test_a_write_that_must_be_the_first(store: s3.Proxy) -> None:
    path = paths.RemotePath(s3.unique("first")) / "lock"
    gate, created = threading.Barrier(8), []

    def create(word: bytes) -> None:
        gate.wait(30)
        try:
            path.create(word)
        except FileExistsError:
            return
        created.append(word)

    threads = [threading.Thread(target=create, args=(f"{number}".encode(),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [path.read_bytes()] == created
    with pytest.raises(FileExistsError):
        path.create(b"late")


@pytest.mark.slow
@pytest.mark.cluster
def test_seen_at_once_by_everybody(store: s3.Proxy) -> None:
    path = to_path(s3.unique("listing")) / "a"
    assert not path.exists()
    assert not path.parent.is_dir()
    other = "import sys; from toffee_dist.storage.paths import to_path; to_path(sys.argv[1]).write_text('x')"
    subprocess.run([sys.executable, "-c", other, str(path)], check=True, timeout=60)
    assert path.exists()
    assert path.parent.is_dir()
    assert [found.name for found in path.parent.iterdir()] == ["a"]
    assert path.stat().st_size == 1
    assert abs(path.stat().st_mtime - time.time()) < 100


# The rest needs no server.


@given(
    shape=st.tuples(st.integers(0, 40), st.integers(1, 5)),
    dtype=st.sampled_from([np.float32, np.complex64, np.int64, np.bool_]),
    rows=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    head=st.integers(128, 300),
    piece=st.integers(1, 100),
)
def test_ranges_of_rows(
    shape: tuple[int, int], dtype: Any, rows: tuple[int, int], head: int, piece: int
) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    start, stop = sorted(min(row, len(array)) for row in rows)
    path = to_path("memory://ranges/array.npy")
    save_array(path, array)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "HEAD_BYTES", head)
        patch.setattr(paths, "RANGE_BYTES", piece)
        found = read_array(path, start, stop)
        np.testing.assert_array_equal(found, array[start:stop])
        assert found.dtype == array.dtype
        if len(array):
            path.write_bytes(path.read_bytes()[:-1])
            with pytest.raises(ValueError, match="1 bytes are missing"):
                read_array(path)


def tensor(seed: int, n: int = 30) -> TemporalTensor:
    rng = np.random.default_rng(seed)
    i, j, t = rng.integers(n, size=200), rng.integers(n, size=200), rng.integers(9, size=200)
    return TemporalTensor.from_events(i, j, t, n_nodes=n, n_steps=9)


def test_local_copies_are_few_and_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOFFEE_CACHE", str(tmp_path))
    made: list[Path] = []

    def counted(folder: Path, sizes: Any, make: Callable[..., None] = make_arrays) -> None:
        made.append(folder)
        time.sleep(0.2)
        make(folder, sizes)

    monkeypatch.setattr("toffee_dist.storage.tensors.make_arrays", counted)
    opened = []
    for seed in range(caches.KEEP + 3):
        folder = f"memory://copies/{seed}"
        stage_tensor(tensor(seed), to_path(folder))
        together: list[TemporalTensor] = []
        threads = [
            threading.Thread(target=lambda f=folder, t=together: t.append(open_tensor(f))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(made) == seed + 1
        assert len(together) == 4
        opened.append(together[0])
        assert len([path for path in tmp_path.iterdir() if path.is_dir()]) <= caches.KEEP
    # Those whose files are gone can still be read.
    for seed, found in enumerate(opened):
        for name in ("indptr", "indices", "tube_ptr", "steps", "values"):
            np.testing.assert_array_equal(getattr(found, name), getattr(tensor(seed), name))
    # Another tensor under the same name is another copy; a copy that was cut short is made again.
    stage_tensor(tensor(99), to_path("memory://copies/0"))
    np.testing.assert_array_equal(open_tensor("memory://copies/0").values, tensor(99).values)
    assert {path.suffix for path in tmp_path.iterdir()} <= {"", ".lock"}


@pytest.mark.slow
def test_of_many_that_find_a_stale_lock_one_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contend_for(tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.cluster
def test_of_many_that_find_a_stale_lock_on_a_store_one_takes_it(
    store: s3.Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    contend_for(to_path(s3.unique("lock")), monkeypatch)


def contend_for(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let six find the same stale lock at the same moment."""
    with hold_lock(out):
        lock = json.loads((out / "refresh.lock").read_text())
    stale = json.dumps(lock | {"host": "elsewhere"})
    (out / "refresh.lock").write_text(stale)
    real, real_age = _read_lock, lock_module._age

    def age(path: Path, holder: dict[str, Any]) -> float:
        # Nobody can write into the past of a store; that one lock is old.
        return 700.0 if holder["token"] == lock["token"] else real_age(path, holder)

    monkeypatch.setattr(lock_module, "_age", age)

    def slowly(path: Path) -> dict[str, Any] | None:
        # All have seen the same before one of them acts on it.
        found = real(path)
        time.sleep(0.2)
        return found

    monkeypatch.setattr(lock_module, "_read_lock", slowly)
    inside, most, held = 0, 0, 0
    guard, gate = threading.Lock(), threading.Barrier(6)

    def contend() -> None:
        nonlocal inside, most, held
        gate.wait(60)
        try:
            with hold_lock(out):
                with guard:
                    inside, held = inside + 1, held + 1
                    most = max(most, inside)
                time.sleep(1.5)
                with guard:
                    inside -= 1
        except UnfinishedError:
            pass

    threads = [threading.Thread(target=contend) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert most == 1
    assert held >= 1
    assert not [path.name for path in out.iterdir() if "lock" in path.name]


def test_a_lease_that_is_renewed_and_one_that_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "RENEW_SECONDS", 0.05)
    path = tmp_path / "refresh.lock"
    with hold_lock(tmp_path):
        first = json.loads(path.read_text())
        wait_until(lambda: json.loads(path.read_text())["seen"] > first["seen"])
        second = json.loads(path.read_text())
        assert second["token"] == first["token"]
    assert not path.exists()
    elsewhere = first | {"host": "elsewhere"}
    write_aged(path, elsewhere, LEASE_SECONDS / 2)
    with pytest.raises(UnfinishedError, match="on elsewhere"), hold_lock(tmp_path):
        pass
    write_aged(path, elsewhere, LEASE_SECONDS + 1)
    with hold_lock(tmp_path):
        # Whoever lost the lock does not take it back, and does not remove what is another's now.
        path.write_text(json.dumps(elsewhere | {"seen": time.time()}))
        time.sleep(0.5)
    assert json.loads(path.read_text())["host"] == "elsewhere"


def write_aged(path: Path, lock: dict[str, Any], seconds: float, skew: float = 0.0) -> None:
    """Write a lock that was renewed so long ago, by a host whose clock is off."""
    written = time.time() - seconds
    path.write_text(json.dumps(lock | {"seen": written + skew}))
    os.utime(path, (written, written))


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
def test_clocks_of_hosts_may_be_an_hour_apart(tmp_path: Path, skew: float) -> None:
    path = tmp_path / "refresh.lock"
    with hold_lock(tmp_path):
        elsewhere = json.loads(path.read_text()) | {"host": "elsewhere"}
    write_aged(path, elsewhere, 60.0, skew)
    with pytest.raises(UnfinishedError, match="on elsewhere"), hold_lock(tmp_path):
        pass
    write_aged(path, elsewhere, LEASE_SECONDS + 1, skew)
    with hold_lock(tmp_path):
        assert json.loads(path.read_text())["host"] != "elsewhere"
    assert not list(tmp_path.iterdir())


@pytest.mark.cluster
@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
def test_clocks_of_hosts_and_store_may_be_an_hour_apart(
    store: s3.Proxy, skew: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = to_path(s3.unique("clocks"))
    with hold_lock(out):
        elsewhere = json.loads((out / "refresh.lock").read_text()) | {"host": "elsewhere"}
    (out / "refresh.lock").write_text(json.dumps(elsewhere | {"seen": time.time() + skew}))
    with pytest.raises(UnfinishedError, match="on elsewhere"), hold_lock(out):
        pass
    # The store's clock has whole seconds.
    monkeypatch.setattr(lock_module, "LEASE_SECONDS", 0.5)
    time.sleep(2.1)
    with hold_lock(out):
        assert json.loads((out / "refresh.lock").read_text())["host"] != "elsewhere"


@pytest.mark.job
def test_an_evaluation(tmp_path: Path) -> None:
    edges = clusters.write_edges(tmp_path / "edges.parquet", nodes=40, events=900)
    asked = {
        "inputs": (str(edges),),
        "rank": 4,
        "protocol": ("link-paper",),
        "model": ("toffee",),
        "seeds": 1,
    }
    found = run_job(EvaluateSettings.read(asked | {"out": "memory://quality"}).job())
    names = objects("memory://quality")
    assert {"cells.parquet", "steps.parquet", "result.json", "report.html"} <= set(names)
    assert json.loads(to_path("memory://quality/result.json").read_text())["links"] == found.about["links"]
    with pytest.raises(ConfigError, match="which exists"):
        run_job(EvaluateSettings.read(asked | {"out": "memory://quality"}).job())


def test_runs_of_a_store_are_listed_in_order() -> None:
    names = [f"2026010{day}T020000.000000-{word}" for day, word in ((1, "ffff"), (2, "0000"), (3, "aaaa"))]
    for name in (names[1], names[0], names[2], "other"):
        to_path(f"memory://runs/runs/{name}/work/job.json").write_text("{}")
    assert [run.run_id for run in list_runs(to_path("memory://runs"))] == names
    assert [path.name for path in to_path("memory://runs").iterdir()] == ["runs"]
