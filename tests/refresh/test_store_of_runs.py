"""A store of runs under every order of publishing, rejecting, going back, expiring, resuming and crashing.

A plain model says what readers must see; it is compared with the store after every step, in a local folder
and on S3 with requests that fail. Runs are made cheaply: `publish` and all after it is the code of real runs.
"""

from __future__ import annotations

import errno
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.harness import s3
from toffee_dist import load_run
from toffee_dist.batch.job import Outcome
from toffee_dist.batch.pipeline import publish
from toffee_dist.errors import InputError, QualityError, UnfinishedError
from toffee_dist.refresh import history
from toffee_dist.refresh import job as refreshing
from toffee_dist.refresh.history import describe_runs, roll_back
from toffee_dist.refresh.log import Refreshed
from toffee_dist.refresh.warm import COLD
from toffee_dist.refresh.window import Window
from toffee_dist.settings import RefreshConfig
from toffee_dist.storage import lock, parquet, runs, slices
from toffee_dist.storage.files import save_array
from toffee_dist.storage.lock import hold_lock
from toffee_dist.storage.manifest import (
    Following,
    IngestRecord,
    JobRecord,
    RefreshRecord,
    Summary,
    write_record,
)
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.runs import RunFolder, find_latest, find_unfinished, get_run, new_run, read_pointer
from toffee_dist.storage.spaces import Spaces
from toffee_dist.timegrid import TimeScale, build_grid

COUNTS = ("files", "rows", "comments", "outside", "used", "self_loops", "duplicates", "cancelled")
MORE = ("new_nodes", "pairs", "entries", "empty_steps")
TEXTS = {"first": "", "last": "", "fingerprint": "", "examples": [], "skipped": {}}
SUMMARY = Summary(**dict.fromkeys((*COUNTS, *MORE), 0), nodes=2, steps=10, density=0.0, **TEXTS)
GRID = build_grid("1d", 0, 9 * 86400, TimeScale(1, True))


class Killed(BaseException):
    """The process is gone."""


@dataclass
class Model:
    """What is in the store: the state of every run by its name, the one readers see, those withdrawn."""

    states: dict[str, str] = field(default_factory=dict)
    latest: str | None = None
    withdrawn: set[str] = field(default_factory=set)
    serials: dict[str, int] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)

    def of(self, state: str, withdrawn: bool = False) -> list[str]:
        """Return the names of runs of a state, oldest first."""
        found = sorted(name for name, own in self.states.items() if own == state)
        return [name for name in found if (name in self.withdrawn) == withdrawn]

    def publish(self, name: str) -> None:
        self.states[name], self.latest = "published", name
        self.withdrawn.discard(name)

    def target(self, to: str | None) -> str | None:
        """Return the run that a rollback publishes, or None where it is refused."""
        if to is not None:
            return to if self.states.get(to) in ("published", "rejected") else None
        earlier = [name for name in self.of("published") if self.latest and name < self.latest]
        return earlier[-1] if earlier else None

    def roll_back(self, name: str) -> None:
        later = {n for n in self.states if self.states[n] == "published" and n > name}
        self.withdrawn = (self.withdrawn | later) & set(self.states)
        self.publish(name)

    def expire(self, keep: int, resumable: set[str]) -> None:
        assert self.latest is not None
        kept = {self.latest, self.references.get(self.latest, "")} | resumable
        for names in (self.of("published"), self.of("rejected"), self.of("published", withdrawn=True)):
            kept |= set(names[-keep:])
        self.states = {name: state for name, state in self.states.items() if name in kept}


class StoreOfRuns(RuleBasedStateMachine):
    """Every rule does something to the store and, where nothing is killed, the same to the model."""

    place: Callable[[], Path]
    calm: Callable[[], Any]

    def __init__(self) -> None:
        super().__init__()
        self.out, self.model, self.serial = type(self).place(), Model(), 0
        self.out.mkdir(parents=True, exist_ok=True)

    # What is done.

    @rule(
        good=st.booleans(), chained=st.booleans(), keep=st.integers(1, 3), at=st.none() | st.integers(0, 14)
    )
    def run(self, good: bool, chained: bool, keep: int, at: int | None) -> None:
        """A new run: of `toffee embed`, or a refresh, which a limit may reject and which removes old runs."""
        good = good or not chained or self.model.latest is None
        with self.killed(at) as survived:
            if chained:
                with suppressed(QualityError):
                    refreshing._locked(self.out, keep, lambda: self._begin(good, True))
            else:
                self._begin(good, False)
        name = max(self.model.serials, default="")
        if survived:
            self.model.states[name] = "rejected"
            if good:
                self.model.publish(name)
            if chained:
                self._expire(keep)

    @rule(keep=st.integers(1, 3), at=st.none() | st.integers(0, 8))
    @precondition(lambda self: self.model.latest is not None)
    def refresh_of_nothing_new(self, keep: int, at: int | None) -> None:
        latest = get_run(self.out, self.model.latest or "")
        with self.killed(at) as survived:
            done = Refreshed(latest.run_id, "unchanged", latest.read_manifest())
            refreshing._locked(self.out, keep, lambda: done)
        if survived:
            self._expire(keep)

    @rule(to=st.none() | st.integers(0, 20), at=st.none() | st.integers(0, 4))
    def rollback(self, to: int | None, at: int | None) -> None:
        names = sorted(self.model.states)
        name = None if to is None or not names else names[to % len(names)]
        target = self.model.target(name)
        if target is None:
            with pytest.raises(InputError, match="no run to go back to"):
                roll_back(self.out, name)
            return
        with self.killed(at) as survived:
            assert roll_back(self.out, name).run_id == target
        if survived:
            self.model.roll_back(target)

    @rule(keep=st.integers(1, 3), at=st.none() | st.integers(0, 10))
    def resume(self, keep: int, at: int | None) -> None:
        expected = self._resumable()
        if not expected:
            with pytest.raises(InputError, match="nothing to resume"):
                find_unfinished(self.out)
            return
        run = find_unfinished(self.out)
        assert run.run_id == expected[-1]
        following = run.read_job().following
        with self.killed(at) as survived, pytest.MonkeyPatch.context() as patch:
            if following is None:
                self._finish(run, True)
            else:
                patch.setattr(refreshing, "resume_locked", lambda run, *_: self._finish(run, True))
                latest = find_latest(self.out)
                if following.previous != ("" if latest is None else str(latest.path)):
                    with pytest.raises(InputError, match="of an earlier refresh"):
                        refreshing.resume_refresh(run, {})
                    return
                keep = RefreshConfig.read(run.read_job().config).keep
                refreshing.resume_refresh(run, {})
        if survived:
            self.model.publish(run.run_id)
            if following is not None:
                self._expire(keep)

    @rule()
    def two_at_once(self) -> None:
        with hold_lock(self.out):
            for other in (
                lambda: roll_back(self.out),
                lambda: refreshing._locked(self.out, 1, lambda: self._begin(True, True)),
            ):
                with pytest.raises(UnfinishedError, match="under way"):
                    other()

    @rule()
    def a_lock_of_the_dead(self) -> None:
        dead = {**lock._this_process(), "pid": dead_process()}
        (self.out / lock.LOCK).write_bytes(lock._content(dead))

    # What readers must see.

    @invariant()
    def readers_see_the_model(self) -> None:
        with type(self).calm():
            model = self.model
            assert {line.run: line.state for line in describe_runs(self.out)} == model.states
            pointer = read_pointer(self.out)
            if model.latest is None:
                assert pointer is None
                return
            assert pointer is not None
            assert (pointer.run_id, set(pointer.withdrawn)) == (model.latest, model.withdrawn)
            assert model.states[model.latest] == "published"
            run = load_run(str(self.out))
            assert run.path.name == model.latest
            assert (run.embedding.numpy() == model.serials[model.latest]).all()

    # How it is done.

    def _begin(self, good: bool, chained: bool) -> Refreshed:
        run = new_run(self.out)
        self.serial += 1
        self.model.serials[run.run_id] = self.serial
        latest = find_latest(self.out) if chained else None
        following = None
        if chained:
            before = "" if latest is None else self.model.references.get(latest.run_id) or latest.run_id
            reference = str(get_run(self.out, before).path) if before else ""
            self.model.references[run.run_id] = before
            previous = "" if latest is None else str(latest.path)
            following = Following(
                night=run.run_id, window=("", ""), newest=0, previous=previous, reference=reference
            )
        config = RefreshConfig.read(
            {"inputs": ("edges",), "out": str(self.out), "last": "7d", "rank": 2, "report": False}
        )
        record = JobRecord(
            config=config.model_dump(mode="json"), identity="", fingerprint="", begun="", following=following
        )
        run.write_job(record)
        return self._finish(run, good)

    def _finish(self, run: RunFolder, good: bool) -> Refreshed:
        record = run.read_job()
        run.staged.path.mkdir(parents=True, exist_ok=True)
        write_record(run.staged.record, IngestRecord(config={}, summary=SUMMARY, grid=GRID, files=[]))
        ids = pa.array(["a", "b"])
        vectors = parquet.vectors(np.full((2, 2), self.model.serials[run.run_id], np.float32))
        parquet.write_parquet(run.part("embedding", 0), {"node_id": ids, "embedding": vectors})
        columns = {"node_id": ids, "row": np.arange(2), "degree": np.ones(2, np.int64)}
        parquet.write_parquet(run.nodes, columns)
        following, refresh = record.following, None
        if following is not None:
            names = {name: getattr(following, name).rpartition("/")[2] for name in ("previous", "reference")}
            reasons = [] if good else ["a limit"]
            refresh = RefreshRecord(**following.model_dump(exclude=set(names)), **names, reasons=reasons)
        shape = SimpleNamespace(n_nodes=2, n_steps=10, directed=False)
        job: Any = SimpleNamespace(
            run=run,
            outcome=Outcome(run, SimpleNamespace(shape=shape)),  # type: ignore[arg-type]
            client=SimpleNamespace(run=lambda *_, **__: {}),
            config=RefreshConfig.read(record.config),
            shape=shape,
            seals={},
            spaces=Spaces("0" * 32, {}),
            map=lambda stage, function, items: [function(item) for item in items],
        )
        publish(job, refresh)
        return Refreshed(run.run_id, "published", run.read_manifest())

    def _resumable(self) -> list[str]:
        """Return the runs that a resume may go on with, oldest first."""
        found = []
        for name, state in sorted(self.model.states.items()):
            ahead = name > (self.model.latest or "") and name not in self.model.withdrawn
            if get_run(self.out, name).begun and (state == "unfinished" or (state == "published" and ahead)):
                found.append(name)
        return found

    def _expire(self, keep: int) -> None:
        """Let the model forget what is old; unfinished runs stay where they are no refresh."""
        stay = set()
        for name in self.model.of("unfinished") + self.model.of("unfinished", withdrawn=True):
            run = get_run(self.out, name)
            if run.path.exists() and (not run.begun or run.read_job().following is None):
                stay.add(name)
        self.model.expire(keep, stay)

    @contextmanager
    def killed(self, at: int | None) -> Iterator[list[bool]]:
        """End the process at the n-th step between writes; then the model learns from the store."""
        left = [-1 if at is None else at]
        survived: list[bool] = []

        def boundary() -> None:
            if left[0] == 0:
                raise Killed
            left[0] -= 1

        def mortal(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **options: Any) -> Any:
                boundary()
                result = real(*given, **options)
                boundary()
                return result

            return call

        before = self.model.latest, set(self.model.states)
        try:
            with pytest.MonkeyPatch.context() as patch:
                if at is not None:
                    for owner, name in (
                        (runs, "write_record"),
                        (runs, "remove_tree"),
                    ):
                        patch.setattr(owner, name, mortal(getattr(owner, name)))
                yield survived
            survived.append(True)
        except Killed:
            self._learn(*before)
            # What a killed process leaves.
            self.a_lock_of_the_dead()

    def _learn(self, latest: str | None, names: set[str]) -> None:
        """Take what a killed process left for the truth, as far as that may be."""
        with type(self).calm():
            found = {line.run: line.state for line in describe_runs(self.out)}
            pointer = read_pointer(self.out)
        newest = max(self.model.serials, default="")
        assert set(found) - names <= {newest}
        now = None if pointer is None else pointer.run_id
        assert now == latest or now in found
        assert latest is None or latest in found
        self.model.states, self.model.latest = found, now
        self.model.withdrawn = set() if pointer is None else set(pointer.withdrawn)


@contextmanager
def suppressed(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind:
        pass


def dead_process() -> int:
    """Return the number of a process that has ended."""
    if not _dead:
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        _dead.append(process.pid)
    return _dead[0]


_dead: list[int] = []


def check(machine: type[StoreOfRuns], examples: int, steps: int) -> None:
    # The same examples every time: a red run is about the change, not about luck.
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        # The steps are printed as they are; making them fewer takes minutes.
        phases=[Phase.generate],
    )
    run_state_machine_as_test(machine, settings=options)


@contextmanager
def nothing() -> Iterator[None]:
    yield


@pytest.mark.slow
def test_a_local_folder(tmp_path: Path) -> None:
    counter = iter(range(10**9))

    class Local(StoreOfRuns):
        place = staticmethod(lambda: tmp_path / f"{next(counter)}")
        calm = staticmethod(nothing)

    check(Local, 30, 15)


@pytest.mark.slow
@pytest.mark.cluster
def test_a_bucket_whose_requests_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOFFEE_CACHE", str(tmp_path))
    rng = random.Random(0)

    def faulty(method: str, path: str) -> str | None:
        return rng.choice(["503", "drop"]) if rng.random() < 0.05 else None

    with s3.server() as port, s3.proxy(port) as proxy, s3.use(proxy.port) as fs:
        fs.mkdir(s3.BUCKET)

        @contextmanager
        def calm() -> Iterator[None]:
            proxy.fault = lambda method, path: None
            try:
                yield
            finally:
                proxy.fault = faulty

        class Bucket(StoreOfRuns):
            place = staticmethod(lambda: to_path(s3.unique("store")))

        Bucket.calm = staticmethod(calm)
        check(Bucket, 4, 10)
        assert sum(proxy.faults.values()) > 5


def store_of(folder: Path, count: int) -> tuple[StoreOfRuns, list[str]]:
    """Return a store of runs that were published one after the other, and their names."""

    class Plain(StoreOfRuns):
        place = staticmethod(lambda: folder)
        calm = staticmethod(nothing)

    store = Plain()
    for _ in range(count):
        store.run(good=True, chained=False, keep=3, at=None)
    return store, sorted(store.model.serials)


def pointed(store: StoreOfRuns) -> str:
    latest = find_latest(store.out)
    assert latest is not None
    return latest.run_id


def test_a_withdrawn_run_stays_withdrawn_when_another_is_published(tmp_path: Path) -> None:
    store, (_, second, third) = store_of(tmp_path, 3)
    roll_back(tmp_path)
    store._begin(True, False)
    pointer = read_pointer(tmp_path)
    assert pointer is not None
    assert pointer.withdrawn == (third,)
    # The one published before, not the one that was withdrawn.
    assert roll_back(tmp_path).run_id == second


def test_going_back_passes_over_withdrawn_runs(tmp_path: Path) -> None:
    _, (first, _, third) = store_of(tmp_path, 3)
    for to, found in ((first, first), (third, third), (None, first)):
        assert roll_back(tmp_path, to).run_id == found


def test_withdrawn_runs_do_not_push_out_good_ones(tmp_path: Path) -> None:
    store, (first, second, third) = store_of(tmp_path, 3)
    roll_back(tmp_path, second)
    newest = store._begin(True, False).run
    assert history.remove_old_runs(tmp_path, 2) == [first]
    assert [line.run for line in describe_runs(tmp_path)] == [second, third, newest]


def test_resume_after_a_kill_between_manifest_and_pointer(tmp_path: Path) -> None:
    store, (first,) = store_of(tmp_path, 1)
    with store.killed(4):
        store._begin(True, False)
    assert pointed(store) == first
    run = find_unfinished(tmp_path)
    assert run.complete
    store._finish(run, True)
    assert pointed(store) == run.run_id != first
    with pytest.raises(InputError, match="nothing to resume"):
        find_unfinished(tmp_path)


def test_a_run_half_removed_is_not_resumed(tmp_path: Path) -> None:
    store, (first, second) = store_of(tmp_path, 2)
    run = get_run(tmp_path, first)
    # As with --keep-work.
    run.work.mkdir()
    run.write_job(JobRecord(config={}, identity="", fingerprint="", begun=""))
    with store.killed(2):
        history.remove_old_runs(tmp_path, 1)
    assert not run.complete
    assert run.path.exists()
    with pytest.raises(InputError, match="nothing to resume"):
        find_unfinished(tmp_path)
    assert pointed(store) == second


def test_half_a_set_of_warm_slices_serves_nobody(tmp_path: Path) -> None:
    store, (first, _) = store_of(tmp_path, 2)
    run = get_run(tmp_path, first)
    run.warm.mkdir()
    (run.warm / "A-0000000.npy").write_bytes(b"")
    (run.warm / COLD).write_text("{}")
    config = RefreshConfig.read({"inputs": ("edges",), "out": str(tmp_path), "last": "10d", "rank": 2})
    window = Window(TimeScale(1, True), 0, 10 * 86400)
    assert refreshing._find_warm(config, run, GRID, window)[0] == str(run.warm)
    with store.killed(0):
        history.remove_old_runs(tmp_path, 2)
    assert run.warm.exists()
    roll_back(tmp_path, first)
    assert refreshing._find_warm(config, run, GRID, window) == ("", f"run {first} has kept no slices")


def test_a_start_that_cannot_be_read_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = slices.Starts(str(tmp_path))
    assert starts.read("0000000", 3, 2) is None
    save_array(tmp_path / "A-0000000.npy", np.ones((2, 2), np.float32))
    found = starts.read("0000000", 3, 2)
    assert found is not None
    assert found.sum() == 4

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(slices, "read_array", fail)
    # Solved from scratch, a slice has other bytes than with its start.
    with pytest.raises((OSError, UnfinishedError)):
        starts.read("0000000", 3, 2)
