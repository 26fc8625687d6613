"""Causal trajectories of refreshes: what a run has published, later runs publish with the same bytes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.harness.clusters import digests
from tests.harness.refreshes import DAY, FIRST, night, write_day
from toffee_dist import Run, load_run
from toffee_dist.batch import trajectory
from toffee_dist.batch.plan import Shape
from toffee_dist.batch.stages import make_plan
from toffee_dist.errors import ConfigError, InputError
from toffee_dist.forget.job import forget
from toffee_dist.limits import LIMITS, Limits
from toffee_dist.refresh import append
from toffee_dist.refresh.chain import RefreshChain
from toffee_dist.refresh.job import refresh
from toffee_dist.settings import RefreshConfig
from toffee_dist.storage.compact import CompactTrajectory
from toffee_dist.storage.manifest import Following
from toffee_dist.storage.runs import find_unfinished

# Several blocks of the trajectory of a small run; and of its basis too.
SMALL = Limits(part_bytes=1 << 15)
BLOCKS = replace(SMALL, block_work=1700)
T = 8
Bytes = dict[tuple[str, str], bytes]


def causal(edges: Path, out: Path, **options: Any) -> RefreshConfig:
    settings: dict[str, Any] = {
        "outputs": ("embedding", "trajectory"),
        "trajectory_by": "filter",
        "causal": True,
        "last": f"{T}d",
        "rank": 6,
        "min_cosine": -1.0,
        "max_auc_drop": 1.0,
        "max_energy_drop": 1.0,
        "min_coverage": 0.0,
    }
    return night(edges, out, **(settings | options))


def day(edges: Path, number: int, **options: Any) -> None:
    """Write a day; later days have more nodes."""
    write_day(edges, number, **{"nodes": 90 + 2 * number, "events": 150, **options})


def compact_vectors(run: Run) -> Bytes:
    """The vectors of every node at every step, by id and moment, as readers make them."""
    Z = run.trajectory.numpy()
    ids = run.nodes.polars().sort("row").collect()["node_id"]
    return {
        (node, run.grid.show(t)): Z[t, row].tobytes()
        for row, node in enumerate(ids)
        for t in range(run.n_steps)
    }


def dense_vectors(run: Run) -> Bytes:
    """The same of the Parquet parts, with their noise."""
    table = run.trajectory.polars().collect()
    vectors, noise = table["embedding"].to_numpy(), table["noise"].to_numpy()
    return {
        (node, run.grid.show(step)): vectors[at].tobytes() + noise[at].tobytes()
        for at, (node, step) in enumerate(table.select("node_id", "step").iter_rows())
    }


def assert_kept(earlier: Bytes, later: Bytes) -> int:
    """Assert that what both have is the same to the byte; return how much that is."""
    shared = earlier.keys() & later.keys()
    assert [key for key in shared if earlier[key] != later[key]] == []
    return len(shared)


def publish(edges: Path, out: Path, limits: Limits = SMALL, **options: Any) -> Run:
    done = refresh(causal(edges, out, **options), limits=limits)
    assert done.state == "published"
    return load_run(out)


def rows_of(run: Run) -> dict[str, int]:
    table = run.nodes.polars().collect()
    return dict(zip(table["node_id"], table["row"], strict=True))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two refreshes: `edges` and `out`."""
    folder = tmp_path_factory.mktemp("two")
    for number in range(T + 3):
        day(folder / "edges", number)
        if number in (T - 1, T + 2):
            publish(folder / "edges", folder / "out")
    return folder


@pytest.fixture
def fork(two: Path, tmp_path: Path) -> Path:
    shutil.copytree(two, tmp_path / "fork")
    return tmp_path / "fork"


@pytest.mark.job
@pytest.mark.parametrize("undirected", [True, False])
def test_what_is_published_stays(tmp_path: Path, undirected: bool) -> None:
    """Windows that roll over twice and more, with new nodes and late edges."""
    edges, out = tmp_path / "edges", tmp_path / "out"
    for number in range(T):
        day(edges, number)
    limits = SMALL if undirected else BLOCKS
    run = publish(edges, out, limits, undirected=undirected)
    published = [(compact_vectors(run), dense_vectors(run))]
    spaces, last = {run.manifest.spaces["trajectory"]}, T
    for new in (1, 3, 5, 1, T, 2):
        for number in range(last, last + new):
            day(edges, number)
        last += new
        # Late edges of known and of new nodes, at steps that are published.
        day(edges, last - 3 - new, name=f"-late{last}", seed=last, events=20)
        run = publish(edges, out, limits, undirected=undirected)
        now = compact_vectors(run), dense_vectors(run)
        shared = [assert_kept(earlier[way], now[way]) for earlier in published for way in (0, 1)]
        if new < T:
            assert min(shared[-2:]) >= 90 * (T - new)
        published.append(now)
        spaces.add(run.manifest.spaces["trajectory"])
        # What is not there, nobody asks for: steps of one more window at the most.
        compact = CompactTrajectory(run.path / "compact")
        assert compact.before == min(last - T, T - 1)
        assert compact.kernel.age == last
    # The embedding is turned, and has seen the late edges; the trajectory is one space from first to last.
    assert (run.path / "rotation.npy").exists()
    assert len(spaces) == 1
    # Nodes that came later have vectors, in the axes of the others.
    Z = run.trajectory.numpy()
    assert Z[:, 100:].any(axis=(0, 2)).sum() > 10
    assert len(list((run.path / "compact").glob("*-value.npy"))) > 2


class StopAt:
    """A function that is killed at one of its calls."""

    def __init__(self, call: int, function: Any) -> None:
        self.left, self.function = call, function

    def __call__(self, *given: Any, **more: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return self.function(*given, **more)


@pytest.mark.job
def test_a_refresh_that_was_cut_short_appends_the_same(
    fork: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edges, out = fork / "edges", fork / "out"
    shutil.copytree(out, tmp_path / "whole")
    for number in range(T + 3, T + 5):
        day(edges, number)
    whole = publish(edges, tmp_path / "whole")
    for module, name in ((append, "write_rows"), (trajectory, "write_entries"), (trajectory, "write_kernel")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, StopAt(2 if name == "write_entries" else 1, getattr(module, name)))
            with pytest.raises(BaseException):  # noqa: B017, PT011
                publish(edges, out)
        assert find_unfinished(out).begun
    resumed = publish(edges, out)
    assert digests(resumed.path) == digests(whole.path)


@pytest.mark.job
def test_nothing_after_a_step_reaches_it(tmp_path: Path) -> None:
    """Of nodes that the chain knows, whose basis is fixed: three new days, of which two have two ways."""
    edges, found = tmp_path / "edges", []
    for number in range(T):
        day(edges, number, nodes=80, events=400)
    # One block: where a sum over nodes is cut depends on all entries, and so does its last bit.
    publish(edges, tmp_path / "0", LIMITS)
    day(edges, T, nodes=80, events=300)
    for seed in (1, 2):
        shutil.copytree(tmp_path / "0", tmp_path / f"{seed}")
        # Gains are learnt after day T, and once more after all of them.
        for number in (T + 1, T + 2):
            day(edges, number, nodes=80, events=300, seed=seed)
        found.append(publish(edges, tmp_path / f"{seed}", LIMITS))
    one, other = found
    assert one.n_nodes == other.n_nodes == 80
    Z, W = (run.trajectory.numpy() for run in found)
    assert CompactTrajectory(one.path / "compact").kernel.epochs[-2:] == (T + 1, T + 3)
    assert Z[:-2].tobytes() == W[:-2].tobytes()
    assert Z[-2].tobytes() != W[-2].tobytes()
    before, after = (run.trajectory.polars().filter(pl.col("step") < T - 2).collect() for run in found)
    # Their noise too.
    assert before.equals(after)
    # What sees all of the window is another: the embedding.
    assert not np.array_equal(one.embedding.numpy(), other.embedding.numpy())


@pytest.mark.job
def test_a_row_of_the_basis_is_fixed_while_there_is_a_link_to_its_node(tmp_path: Path) -> None:
    edges, out = tmp_path / "edges", tmp_path / "out"
    for number in range(T + 3):
        day(edges, number, nodes=80, events=400)
    # Only a source in the first window; a target from one day on.
    for at, (source, target) in ((T - 1, ("late", "n00001")), (T + 1, ("n00001", "late"))):
        table = pl.DataFrame({"source": [source], "target": [target], "time": [FIRST + at * DAY]})
        table.write_parquet(edges / f"late{at}.parquet")
    bases = []
    for until in (T, T + 1, T + 2, T + 3):
        run = publish(edges, out, as_of=str(FIRST + until * DAY))
        bases.append(CompactTrajectory(run.path / "compact").basis(np.arange(run.n_nodes)))
        rows = rows_of(run)
    late = rows.pop("late")
    others = sorted(rows.values())
    assert {basis[others].tobytes() for basis in bases} == {bases[0][others].tobytes()}
    first, second, linked, after = (basis[late].tobytes() for basis in bases)
    # What is known of it as a target counts once it is one, and stays.
    assert len({first, second, linked}) == 3
    assert linked == after


@pytest.mark.job
def test_rows_that_move_up_take_their_past_along(tmp_path: Path) -> None:
    """Expiry removes rows: vectors of all others stay, by their ids."""
    edges, out = tmp_path / "edges", tmp_path / "out"
    published: list[Bytes] = []
    last = 0
    for stop in (T, 2 * T, 3 * T - 2, 3 * T):
        for number in range(last, stop):
            # The first days have nodes of their own, whose names come first.
            day(edges, number)
            if number < 2:
                table = pl.DataFrame({"source": ["a1", "n00005"], "target": ["n00003", "a2"]})
                table = table.with_columns(time=pl.lit(FIRST + number * DAY))
                table.write_parquet(edges / f"gone{number}.parquet")
        last = stop
        run = publish(edges, out, expire=f"{2 * T}d")
        now = compact_vectors(run)
        for earlier in published:
            assert_kept(earlier, now)
        published.append(now)
    assert "a1" not in rows_of(run)
    assert run.manifest.refresh is not None
    assert run.manifest.refresh.expired >= 2


@pytest.mark.job
def test_what_cannot_be_appended_is_refused(fork: Path) -> None:
    edges, out = fork / "edges", fork / "out"
    for number in range(T + 3, 2 * T + 6):
        day(edges, number)

    def moment(number: int) -> str:
        return str(FIRST + number * DAY)

    wrong: dict[str, dict[str, Any]] = {
        "last of a causal chain": {"last": f"{T + 1}d", "as_of": moment(T + 4)},
        "leaves no step out": {"as_of": moment(2 * T + 4)},
        "ends no earlier": {"as_of": moment(T + 2)},
        "keeps the links of two windows": {"expire": f"{T + 2}d"},
    }
    for words, options in wrong.items():
        with pytest.raises(ConfigError, match=words):
            refresh(causal(edges, out, **options), limits=SMALL)
    # As the remedy says: a moment between the two first.
    publish(edges, out, as_of=moment(2 * T + 3))
    publish(edges, out)


@pytest.mark.job
def test_another_trajectory_begins_anew(fork: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a run without a trajectory, or one of a version that did not append: another space."""
    edges, out = fork / "edges", fork / "out"
    before = load_run(out)
    header = before.path / "compact" / "header.json"
    old = {
        key: value for key, value in json.loads(header.read_text()).items() if key not in ("before", "age")
    }
    day(edges, T + 3)
    first = CompactTrajectory(before.path / "compact")
    assert first.before == 3
    # A run of before: it opens as it did where it has no steps before the window.
    plain = sorted((out / "runs").iterdir())[0] / "compact"
    Z = CompactTrajectory(plain).read(0, 20, np.arange(T))
    (plain / "header.json").write_text(
        json.dumps(
            old
            | {"cuts": list(CompactTrajectory(plain).cuts)}
            | {"epochs": list(CompactTrajectory(plain).kernel.epochs)}
        )
    )
    assert CompactTrajectory(plain).kernel.age == 0
    np.testing.assert_allclose(CompactTrajectory(plain).read(0, 20, np.arange(T)), Z, atol=1e-6)
    header.write_text(json.dumps(old))
    again = publish(edges, out)
    assert again.manifest.spaces["trajectory"] != before.manifest.spaces["trajectory"]
    assert again.manifest.space_id == before.manifest.space_id
    assert again.manifest.refresh is not None
    assert again.manifest.refresh.append is None
    assert CompactTrajectory(again.path / "compact").kernel.age == T
    day(edges, T + 4)
    assert_kept(compact_vectors(again), compact_vectors(publish(edges, out)))


@pytest.mark.job
def test_a_damaged_chain_is_named(fork: Path) -> None:
    header = load_run(fork / "out").path / "compact" / "header.json"
    good = json.loads(header.read_text())
    for wrong in (
        {"before": 2**40},
        {"before": good["before"] + 1},
        {"age": 2**47},
        {"age": 1},
        {"before": -1},
        {"age": 0},
        {"epochs": [1]},
        {"epochs": [2**40, 2**41]},
        {"causal": False},
    ):
        header.write_text(json.dumps(good | wrong))
        with pytest.raises(InputError, match="damaged"):
            load_run(fork / "out").trajectory.numpy()
        day(fork / "edges", T + 3)
        with pytest.raises((InputError, ConfigError)):
            refresh(causal(fork / "edges", fork / "out"), limits=SMALL)


@pytest.mark.job
def test_a_node_can_be_forgotten(fork: Path) -> None:
    edges, out = fork / "edges", fork / "out"
    before = load_run(out)
    row = rows_of(before)["n00003"]
    forget(out, ["n00003"])
    after = load_run(out)
    compact = CompactTrajectory(after.path / "compact")
    assert compact.before == 3
    assert not compact.basis(np.array([row])).any()
    assert not compact.targets()[row]
    assert not compact.counts[row]
    assert not after.trajectory.numpy()[:, row].any()
    activity = np.load(after.path / "compact" / "activity.npy")
    assert activity[3:].tolist() == compact.activity.tolist()
    published = compact_vectors(after)
    day(edges, T + 3)
    later = publish(edges, out)
    assert assert_kept(published, compact_vectors(later)) > 0
    assert not later.trajectory.numpy()[:, row].any()


def test_the_plan_counts_two_windows() -> None:
    shape = Shape(1000, 30, 20_000, 90_000, True, 90_000, exact=True)
    settings = causal(Path("edges"), Path("out"))
    chain = RefreshChain(settings, Following(night="", window=("", ""), newest=0))
    alone, chained = (make_plan(shape, settings, more=more) for more in ((), chain.stages(shape, SMALL)))
    sizes = [next(stage.disk for stage in plan.stages if stage.name == "filter") for plan in (alone, chained)]
    assert sizes[1] - sizes[0] > 90_000 * 10
