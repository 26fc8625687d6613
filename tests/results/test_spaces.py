"""Vectors of two spaces are refused at every door; what decides a space, and what does not.

`DOORS` is the table of docs/spaces.md: each door, and who tries it with vectors of another space.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tests import naive
from tests.harness import ROOT
from tests.harness.clusters import job
from tests.harness.refreshes import DAY, FIRST, night, write_day, write_days
from toffee_dist import Run, load_run
from toffee_dist.batch.pipeline import start_run
from toffee_dist.cli import cli
from toffee_dist.errors import InputError
from toffee_dist.limits import LIMITS, Limits
from toffee_dist.refresh.fold_in import FoldConfig, fold_in
from toffee_dist.refresh.job import refresh
from toffee_dist.results.classifier import load_classifier
from toffee_dist.storage import parquet
from toffee_dist.storage.manifest import write_record
from toffee_dist.storage.runs import list_runs
from toffee_dist.storage.tensors import digest_tensor, open_tensor

pytestmark = pytest.mark.job
REFUSED = "vectors of another space"
BOTH = ("embedding", "trajectory")


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_days(tmp_path_factory.mktemp("edges"), 0, 30, nodes=60, events=200)


@pytest.fixture(scope="module")
def chain(edges: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two nights, which are one space, then a chain that begins anew."""
    out = tmp_path_factory.mktemp("chain") / "out"
    mine = edges.parent / "growing"
    shutil.copytree(edges, mine)
    for day, fresh in ((30, False), (31, False), (32, True)):
        options = {"outputs": BOTH, "trajectory_by": "filter", "rank": 4, "min_cosine": -1.0}
        refresh(night(mine, out, fresh=fresh, **options))
        write_day(mine, day, nodes=60, events=200)
    return [load_run(run.path) for run in list_runs(out)]


@pytest.fixture(scope="module")
def folded(chain: list[Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vectors of a new node, in the space of the first two runs."""
    folder = tmp_path_factory.mktemp("folded")
    new = {"source": ["new"] * 3, "target": ["n00001", "n00002", "n00003"], "time": FIRST + 29 * DAY}
    pl.DataFrame(new).write_parquet(folder / "new.parquet")
    config = FoldConfig(inputs=(str(folder / "new.parquet"),), mode="threads", workers=1)
    fold_in(chain[1].path, config, folder / "folded.parquet")
    return folder / "folded.parquet"


def test_a_chain_is_one_space_and_a_new_one_another(chain: list[Run]) -> None:
    first, second, anew = chain
    assert first.space_id == second.space_id != anew.space_id
    assert first.manifest.spaces == second.manifest.spaces
    # A trajectory is in the axes of the embedding, at another scale.
    assert len({*first.manifest.spaces.values()}) == 2
    for run in chain:
        for output in run.manifest.outputs:
            [file] = run.folder.parts(output)
            assert parquet.read_space(pq.read_schema(file)) == run.manifest.space_of(output)
            assert pl.read_parquet(file)["space_id"].unique().to_list() == [run.manifest.space_of(output)]
        written = json.loads(run.folder.manifest.read_text())
        assert written["space_id"] == run.space_id
        assert json.loads((run.folder.compact / "header.json").read_text())["space_id"] in set(
            run.manifest.spaces.values()
        )


# The id of a graph and some settings, for ever: a change of it would part stored vectors from coming ones.
PINNED = "c4b6b7e53723d8b7657749a98afcbec4"


def test_what_decides_a_space(edges: Path, tmp_path: Path) -> None:
    """The same edges and options give the same id, whatever reads and cuts them; other options another."""

    def space(name: str, inputs: Path = edges, limits: Limits = LIMITS, **options: Any) -> str:
        config = job(inputs, tmp_path / name, **{"rank": 4, "outputs": ("embedding",), **options})
        start_run(config, limits=limits)
        return load_run(tmp_path / name).space_id

    plain = space("plain")
    assert plain == PINNED
    # One file instead of thirty, other names, another mode, other cuts, other outputs beside it, plain lists.
    whole = pl.concat([pl.read_parquet(file) for file in sorted(edges.glob("*.parquet"))])
    whole.sample(fraction=1.0, shuffle=True, seed=1).write_csv(tmp_path / "whole.csv")
    assert space("whole", tmp_path / "whole.csv", mode="processes", workers=2) == plain
    assert space("cut", limits=Limits(part_bytes=1 << 9, bin_entries=50, block_entries=100)) == plain
    assert space("lists", vectors="list", outputs=("embedding", "spectrum"), bound=True) == plain
    others: dict[str, dict[str, Any]] = {
        "rank": {"rank": 5},
        "weighting": {"pair_weight": "log"},
        "gauge": {"gauge": "none"},
        "seed": {"seed": 1},
        "model": {"model": "tsvd"},
        "reduce": {"reduce": "last:7"},
        "edges": {"last": "20d"},
    }
    found = {name: space(name, **options) for name, options in others.items()}
    assert len({plain, *found.values()}) == len(others) + 1


def test_the_digest_of_a_tensor_is_that_of_its_entries(edges: Path, tmp_path: Path) -> None:
    """Of all entries in their order, by an obvious twin; one number that differs is another digest."""
    found = []
    for name, limits in (("one", Limits()), ("many", Limits(bin_entries=50, block_entries=100))):
        config = job(edges, tmp_path / name, rank=4, outputs=("embedding",), keep_work=True)
        folder = start_run(config, limits=limits).run.staged.tensor
        found.append(digest_tensor(str(folder)))
        assert found[-1] == naive.digest_tensor(open_tensor(folder))
    assert found[0] == found[1]
    values = np.load(folder / "values.npy", mmap_mode="r+", allow_pickle=False)
    values[7] += 1e-9
    values.flush()
    assert digest_tensor(str(folder)) != found[0]


# Every door: how somebody goes through it with vectors of `other` where those of `run` belong.


def copied(run: Run, tmp_path: Path) -> Run:
    shutil.copytree(run.path, tmp_path / run.path.name)
    return load_run(tmp_path / run.path.name)


def ask(*words: object) -> Callable[[], None]:
    def run_command() -> None:
        done = CliRunner().invoke(cli, [str(word) for word in words])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception

    return run_command


def foreign_part(run: Run, other: Run, tmp_path: Path) -> Run:
    """Return a copy of a run in which one file is another run's, and has as many rows."""
    mine = copied(run, tmp_path)
    [file] = mine.folder.parts("embedding")
    table = pq.read_table(file)
    pq.write_table(table.replace_schema_metadata({"toffee.space_id": other.space_id}), file)
    return mine


def foreign_index(run: Run, other: Run, tmp_path: Path) -> Run:
    """Return a copy of a run with the index of another."""
    mine, theirs = copied(run, tmp_path), copied(other, tmp_path)
    theirs.build_index()
    shutil.copytree(theirs.path / "index", mine.path / "index")
    return mine


def kept_classifier(run: Run, other: Run, tmp_path: Path) -> Callable[[], Any]:
    ids = [name for name in run.nodes.polars().collect()["node_id"].to_list() if name <= "n00059"]
    run.train_classifier({name: name < "n00030" for name in ids}).save(tmp_path / "kept.json")
    return lambda: load_classifier(tmp_path / "kept.json").predict(other)


def grown(run: Run, other: Run, table: Path) -> Callable[[], Any]:
    """Return what adds a snapshot to a table of another; test_lakes.py does so to every kind of table."""
    run.export("feast", table)
    return lambda: other.export("feast", table)


Door = Callable[[Run, Run, Path, Path], Callable[[], Any]]
DOORS: dict[str, Door] = {
    "neighbors --from RUN": lambda run, other, _, __: ask(
        "neighbors", other.path, "n00001", "--from", run.path
    ),
    "neighbors --from FILE": lambda _, other, file, __: ask("neighbors", other.path, "new", "--from", file),
    "neighbors --space-id": lambda run, other, _, __: ask(
        "neighbors", other.path, "n00001", "--space-id", run.space_id
    ),
    "neighbors, a file of another run": lambda run, other, _, tmp: ask(
        "neighbors", foreign_part(run, other, tmp).path, "n00001"
    ),
    "neighbors, an index of another run": lambda run, other, _, tmp: ask(
        "neighbors", foreign_index(run, other, tmp).path, "n00001"
    ),
    "score --from RUN": lambda run, other, _, __: ask(
        "score", other.path, "n00001,n00002", "--from", run.path
    ),
    "score --from FILE": lambda _, other, file, __: ask("score", other.path, "new,n00002", "--from", file),
    "score --space-id": lambda run, other, _, __: ask(
        "score", other.path, "n00001,n00002", "--space-id", run.space_id
    ),
    "score, a file of another run": lambda run, other, _, tmp: ask(
        "score", foreign_part(run, other, tmp).path, "n00001,n00002"
    ),
    "index --space-id": lambda run, other, _, __: ask("index", other.path, "--space-id", run.space_id),
    "index, a file of another run": lambda run, other, _, tmp: ask(
        "index", foreign_part(run, other, tmp).path
    ),
    "fold-in --space-id": lambda run, other, file, tmp: ask(
        "fold-in", other.path, file.with_name("new.parquet"), "--to", tmp / "x", "--space-id", run.space_id
    ),
    "fold-in, a file of another run": lambda run, other, file, tmp: ask(
        "fold-in",
        foreign_part(run, other, tmp / "runs").path,
        file.with_name("new.parquet"),
        "--to",
        tmp / "x",
        "--mode",
        "threads",
    ),
    "a saved classifier": lambda run, other, _, tmp: kept_classifier(run, other, tmp),
    "load_run(…, space_id)": lambda run, other, _, __: lambda: load_run(other.path, run.space_id),
    "run.join": lambda run, other, _, __: lambda: other.join(run),
    "refresh --reference": lambda run, other, file, __: (
        lambda: refresh(
            night(
                file.parent,
                other.folder.out,
                reference=run.path.name,
                outputs=BOTH,
                trajectory_by="filter",
                rank=4,
                as_of="2026-02-06",
                inputs=(str(file.with_name("new.parquet")),),
            )
        )
    ),
    "export --space-id": lambda run, other, _, tmp: ask(
        "export", other.path, "--format", "numpy", "--to", tmp / "x", "--space-id", run.space_id
    ),
    "export, a table of another space": lambda run, other, _, tmp: grown(run, other, tmp / "table"),
}


@pytest.mark.parametrize("door", DOORS)
def test_another_space_is_refused(door: str, chain: list[Run], folded: Path, tmp_path: Path) -> None:
    first, second, anew = chain
    before = second.path.with_name("index").exists()
    with pytest.raises(InputError, match=REFUSED) as refused:
        DOORS[door](first, anew, folded, tmp_path)()
    # It says which two, and what to do.
    assert first.space_id in str(refused.value)
    assert anew.space_id in str(refused.value)
    assert "Vectors of two spaces cannot be compared. " in str(refused.value)
    assert not (tmp_path / "x").exists()
    assert before == second.path.with_name("index").exists()


def test_the_doors_are_those_of_the_docs() -> None:
    page = (ROOT / "docs" / "spaces.md").read_text().partition("## Every door")[2]
    rows = [line.split("|")[1].strip().strip("`") for line in page.splitlines() if line.startswith("| `")]
    assert rows == list(DOORS)


def test_within_a_space_all_is_allowed(chain: list[Run], folded: Path, tmp_path: Path) -> None:
    first, second, _ = chain
    near = second.neighbors("n00001", 5, where=str(first.path))
    query = first.embedding.numpy()[first.nodes.polars().collect()["node_id"].to_list().index("n00001")]
    E, ids = second.embedding.numpy(), second.nodes.polars().collect()["node_id"].to_list()
    cosines = [float(np.dot(x, query) / max(np.linalg.norm(x), 1e-30)) for x in E]
    order = [ids[at] for at in np.argsort(np.negative(cosines), kind="stable")[:5]]
    assert near["node_id"].to_list() == order
    # A new node, whose vector is in a file: near those that it links to, and likelier to link to them.
    assert second.neighbors("new", 3, where=str(folded)).height == 3
    scores = second.score(["new", "new"], ["n00001", "n00055"], where=str(folded))
    assert scores[0] > scores[1]
    # Scores of known nodes are the same, wherever their vectors come from.
    same = second.score(["n00001"], ["n00002"], where=str(second.path))
    np.testing.assert_allclose(same, second.score(["n00001"], ["n00002"]))
    joined = second.join(first).collect()
    assert joined.columns == ["node_id", "embedding", "embedding_before"]
    assert joined.height == first.n_nodes
    assert load_run(second.path, first.space_id).space_id == second.space_id
    kept_classifier(first, second, tmp_path)()


def test_files_that_do_not_say_or_are_damaged_are_refused(
    chain: list[Run], folded: Path, tmp_path: Path
) -> None:
    run = chain[1]
    frame = pl.read_parquet(folded)
    frame.drop("space_id").write_parquet(tmp_path / "silent.parquet")
    with pytest.raises(InputError, match="space unknown"):
        run.neighbors("new", where=str(tmp_path / "silent.parquet"))
    (tmp_path / "odd.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(InputError, match="damaged"):
        run.neighbors("new", where=str(tmp_path / "odd.parquet"))
    pl.concat([frame, frame]).write_parquet(tmp_path / "twice.parquet")
    with pytest.raises(InputError, match="there twice"):
        run.neighbors("new", where=str(tmp_path / "twice.parquet"))
    short = frame.with_columns(pl.col("embedding").arr.to_list().list.head(3))
    short.write_parquet(tmp_path / "short.parquet")
    with pytest.raises(InputError, match="4 finite numbers"):
        run.neighbors("new", where=str(tmp_path / "short.parquet"))
    with pytest.raises(InputError, match="is not there"):
        run.neighbors("nobody", where=str(folded))


def test_a_classifier_is_kept_without_code(chain: list[Run], tmp_path: Path) -> None:
    """It predicts what it was taught, in this run and the next; a damaged file is an error, nothing else."""
    first, second, _ = chain
    labels = {f"n{at:05d}": "low" if at < 30 else "high" for at in range(0, 60, 2)}
    kept = first.train_classifier(labels)
    kept.save(tmp_path / "kept.json")
    again = load_classifier(tmp_path / "kept.json")
    assert again == kept
    for run in (first, second):
        found = again.predict(run)
        assert found.columns == ["node_id", "label", "probability"]
        truth = ["low" if name < "n00030" else "high" for name in found["node_id"]]
        assert np.mean(found["label"].to_numpy() == np.array(truth)) > 0.8
        some = again.predict(run, ["n00001", "n00059"])
        assert some.equals(found.filter(pl.col("node_id").is_in(["n00001", "n00059"])))
    damaged = json.loads((tmp_path / "kept.json").read_text())
    damaged["weights"][0].append(1.0)
    damaged["offsets"] = damaged["offsets"] * 2
    (tmp_path / "kept.json").write_text(json.dumps(damaged))
    with pytest.raises(InputError, match="damaged"):
        load_classifier(tmp_path / "kept.json")
    with pytest.raises(InputError, match="two or more"):
        first.train_classifier({"n00001": 1, "n00002": 1})


def test_a_window_without_common_nodes_is_a_new_space(tmp_path: Path) -> None:
    """Nothing says how its axes lie to those of the previous run."""
    edges, out = write_days(tmp_path / "edges", 0, 7, nodes=30, events=80), tmp_path / "out"
    options = {"last": "7d", "rank": 4, "min_coverage": 0.0, "max_energy_drop": 1.0, "holdout": 0}
    refresh(night(edges, out, **options))
    first = load_run(out)
    for day in range(7, 14):
        source, target = np.random.default_rng(day).integers(30, size=(2, 80))
        frame = {"source": [f"z{i}" for i in source], "target": [f"z{i}" for i in target]}
        pl.DataFrame(frame | {"time": FIRST + day * DAY}).write_parquet(edges / f"z{day}.parquet")
    refresh(night(edges, out, min_cosine=-1.0, **options))
    second = load_run(out)
    assert second.manifest.refresh is not None
    assert second.manifest.refresh.previous == first.path.name
    assert second.space_id != first.space_id


def test_a_hostile_manifest_has_no_say_in_ids(chain: list[Run], tmp_path: Path) -> None:
    mine = copied(chain[0], tmp_path)
    write_record(mine.folder.manifest, mine.manifest.replaced(space_id="'; DROP TABLE x; --"))
    with pytest.raises(InputError, match="damaged"):
        load_run(mine.path)
