"""The same seed, the same bytes: published files of every model, wherever its tasks ran."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import clusters
from tests.harness.clusters import digests, job, write_edges
from toffee_dist.batch.pipeline import start_run
from toffee_dist.limits import Limits
from toffee_dist.models import MODELS
from toffee_dist.settings import MODEL_OUTPUTS

pytestmark = [pytest.mark.job, pytest.mark.cluster]

# Several files of vectors, and several tasks where a model has them: walks in blocks, slices, snapshots.
SMALL = Limits(max_batch=4, part_bytes=1 << 14)
QUICK: dict[str, Any] = {"walks": 20, "walk_length": 12, "window": 3, "epochs": 2, "snapshots": 3}
# Its blocks have as many snapshots as fit r×r matrices into some bytes.
MORE: dict[str, dict[str, Any]] = {"rescal": {"rank": 128, "max_iter": 2}}


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edges")
    return write_edges(folder / "edges.parquet", nodes=140, events=3000, days=300)


@pytest.fixture(scope="module")
def running() -> Iterator[str]:
    with clusters.cluster(workers=2) as found:
        yield found.address


def published(model: str, edges: Path, out: Path, mode: str, workers: int) -> dict[str, str]:
    """Return a digest of every file of vectors that a run publishes."""
    options = {"model": model, "outputs": ("embedding",), **QUICK, **MORE.get(model, {})}
    found = digests(start_run(job(edges, out, mode=mode, workers=workers, **options), limits=SMALL).run.path)
    assert len([name for name in found if name.startswith("embedding")]) > 1
    return found


@pytest.mark.parametrize("model", list(MODEL_OUTPUTS))
def test_threads_processes_and_a_cluster_publish_the_same_bytes(
    model: str, edges: Path, running: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = published(model, edges, tmp_path / "alone", "threads", 1)
    # Where walks are cut must not matter either.
    monkeypatch.setattr("toffee_dist.models.ctdne.WALKS_PER_TASK", 300)
    assert published(model, edges, tmp_path / "threads", "threads", 3) == alone
    assert published(model, edges, tmp_path / "processes", "processes", 2) == alone
    assert published(model, edges, tmp_path / "cluster", running, 2) == alone


def test_every_model_is_asked() -> None:
    assert list(MODEL_OUTPUTS) == [name for name, model in MODELS.items() if model.fit]
