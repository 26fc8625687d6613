"""What workers say of themselves before the first task, and those that die just then."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster, core
from distributed.comm import CommClosedError

from toffee_dist.cluster import workers
from toffee_dist.cluster.client import cluster
from toffee_dist.cluster.workers import ask_workers, find_warnings
from toffee_dist.errors import ConfigError, UnfinishedError


class Answers:
    """A client whose workers answer so."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def run(self, *given: Any, **options: Any) -> dict[str, Any]:
        return self.answers


@pytest.mark.parametrize("answers", [{}, {"one": CommClosedError("stream is closed")}])
def test_a_worker_that_dies_is_no_mistake_of_the_user(tmp_path: Path, answers: dict[str, Any]) -> None:
    """Exit code 5, to be resumed; it was 2, and the advice to install something."""
    with pytest.raises(UnfinishedError, match="the cluster is lost") as lost:
        ask_workers(Answers(**answers), tmp_path)
    assert lost.value.exit_code == 5
    assert list(tmp_path.iterdir()) == []


def test_a_worker_without_our_code_is_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot run our tasks"):
        ask_workers(Answers(one=ModuleNotFoundError("No module named 'toffee_dist'")), tmp_path)


def callbacks(dask_worker: Any = None) -> list[str]:
    return [*dask_worker.periodic_callbacks]


@pytest.mark.cluster
@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_local_workers_have_no_profiler(mode: str) -> None:
    """It stopped a test of ours for ever, in Python 3.11.7: python/cpython#106883."""
    with dask.config.set({"distributed.worker.profile.enabled": True}), cluster(mode, 1) as client:
        [found] = client.run(callbacks).values()
        assert found
        assert "profile" not in found


@pytest.mark.cluster
def test_workers_that_a_profiler_may_stop_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for enabled in (True, False):
        with (
            dask.config.set({"distributed.worker.profile.enabled": enabled}),
            LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None) as local,
            Client(local) as client,
        ):
            # As of an old Python, and of none.
            for safely, may_hang in (((99,), enabled), ((3,), False)):
                monkeypatch.setattr(workers, "PROFILED_SAFELY", safely)
                found = ask_workers(client, tmp_path)
                assert [worker.may_hang for worker in found] == [may_hang]
                said = find_warnings(found)
                assert len(said) == may_hang
                assert all(line.startswith("Warning: 1 of 1 workers run Dask's profiler") for line in said)


@pytest.mark.cluster
@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_a_slow_disk_is_no_news(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask warns of a scratch folder that takes a second to make; nothing is kept in it."""

    @contextmanager
    def slowly(duration: str, message: str) -> Iterator[None]:
        yield
        warnings.warn(message.format(duration=2.0), stacklevel=2)

    monkeypatch.setattr(core, "warn_on_duration", slowly)
    with cluster(mode, 1) as client:
        assert client.submit(sum, [1, 2]).result() == 3
