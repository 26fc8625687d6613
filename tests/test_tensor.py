"""TemporalTensor against a dense tensor built one event at a time."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
import sparse
from hypothesis import given
from hypothesis import strategies as st

from tests import naive
from tests.harness.strategies import Events, events, random_tensor
from toffee_dist import ConfigError, InputError, TemporalTensor
from toffee_dist.tensor import as_tensor


@given(events(), st.sampled_from(["binary", "count", "sum"]), st.sampled_from(["raw", "log", "unit"]))
def test_matches_dense(rows: Events, entry: Any, pair_weight: Any) -> None:
    tensor = rows.tensor(entry=entry, pair_weight=pair_weight)
    dense = naive.tensor(
        rows.source,
        rows.target,
        rows.step,
        rows.weight,
        rows.n_nodes,
        rows.n_steps,
        rows.directed,
        entry,
        pair_weight,
    )
    np.testing.assert_allclose(tensor.to_coo().todense(), dense, rtol=1e-12)
    assert tensor.n_pairs == np.count_nonzero(np.abs(dense).sum(axis=2))
    assert tensor.n_entries == np.count_nonzero(dense)


@given(events(), st.randoms())
def test_row_order_does_not_matter(rows: Events, random: Any) -> None:
    order = list(range(len(rows.source)))
    random.shuffle(order)
    shuffled = Events(
        rows.source[order],
        rows.target[order],
        rows.step[order],
        rows.weight[order],
        rows.n_nodes,
        rows.n_steps,
        rows.directed,
    )
    a, b = rows.tensor(entry="sum"), shuffled.tensor(entry="sum")
    assert a.values.tobytes() == b.values.tobytes()
    np.testing.assert_array_equal(a.indices, b.indices)
    np.testing.assert_array_equal(a.steps, b.steps)


@given(events())
def test_every_way_in_gives_the_same_tensor(rows: Events) -> None:
    tensor = rows.tensor(entry="sum")
    coo = tensor.to_coo()
    snapshots = [sp.csr_matrix(coo[:, :, t].todense()) for t in range(rows.n_steps)]
    chunked = da.from_array(coo, chunks=(2, 3, 2))
    for same in (as_tensor(coo), as_tensor(chunked), as_tensor(snapshots), as_tensor(tensor)):
        assert same.n_pairs == tensor.n_pairs
        assert same.values.tobytes() == tensor.values.tobytes()
        np.testing.assert_array_equal(same.steps, tensor.steps)
        np.testing.assert_array_equal(same.indptr, tensor.indptr)
        np.testing.assert_array_equal(same.indices, tensor.indices)
    if not rows.directed:
        assert not as_tensor(coo).directed


def test_symmetry_is_detected_and_checked() -> None:
    coo = sparse.COO(np.array([[0, 1], [1, 0], [0, 0]]), np.array([1.0, 2.0]), shape=(2, 2, 1))
    assert TemporalTensor.from_coo(coo).directed
    with pytest.raises(InputError, match="not symmetric"):
        TemporalTensor.from_coo(coo, directed=False)
    symmetric = sparse.COO(coo.coords, np.array([2.0, 2.0]), shape=(2, 2, 1))
    assert not TemporalTensor.from_coo(symmetric).directed
    assert TemporalTensor.from_coo(symmetric, directed=True).directed


def test_memory_maps_are_as_good_as_arrays(tmp_path: Any) -> None:
    tensor = random_tensor(0, 20, 6, 100)
    arrays = {}
    for name in ("indptr", "indices", "tube_ptr", "steps", "values"):
        np.save(tmp_path / f"{name}.npy", getattr(tensor, name))
        arrays[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    mapped = TemporalTensor(tensor.n_nodes, tensor.n_steps, tensor.directed, **arrays)
    np.testing.assert_array_equal(mapped.to_coo().todense(), tensor.to_coo().todense())


def test_sizes_are_inferred_where_absent() -> None:
    tensor = TemporalTensor.from_events([0, 4], [2, 1], [0, 3])
    assert (tensor.n_nodes, tensor.n_steps) == (5, 4)


def test_weights_that_cancel_are_no_entry() -> None:
    tensor = TemporalTensor.from_events([0, 0], [1, 1], [0, 0], [1.5, -1.5], n_nodes=2, entry="sum")
    assert tensor.n_pairs == tensor.n_entries == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, -1], [0, 0], [0, 0]), "source in row 1 .*-1.*0 to"),
        (([0, 5], [0, 0], [0, 0]), "source in row 1 .*5.*n_nodes = 3"),
        (([0], [0], [7]), "step in row 0 .*7.*n_steps = 4"),
        (([0.0, np.nan], [0, 0], [0, 0]), "integers.*nan in row 1"),
        ((["a"], [0], [0]), "integers.*<U1"),
        (([0], [0, 1], [0]), "one element per row.*2 against 1"),
        (([[0]], [0], [0]), "one dimension"),
        (([0, 1], [0, 1], [0, 1], [1.0, np.nan]), "weight in row 1.*nan"),
        (([0, 1], [0, 1], [0, 1], [np.inf, 1.0]), "weight in row 0.*inf"),
        (([0], [0], [0], [1e40]), "weight in row 0.*1e\\+40.*rescale"),
        (([0], [0], [0], [1j]), "real numbers"),
    ],
)
def test_bad_input_is_named(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TemporalTensor.from_events(*arguments, n_nodes=3, n_steps=4)


def test_bad_options_and_shapes() -> None:
    with pytest.raises(ConfigError, match=r"entry.*binary, count, sum"):
        TemporalTensor.from_events([0], [0], [0], entry="mean")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="raw, log, unit"):
        TemporalTensor.from_events([0], [0], [0], pair_weight="sqrt")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="n_nodes is unknown"):
        TemporalTensor.from_events([], [], [])
    with pytest.raises(InputError, match=r"\(n, n, T\)"):
        TemporalTensor.from_coo(sparse.zeros((2, 3, 4)))
    with pytest.raises(InputError, match="different shapes"):
        TemporalTensor.from_snapshots([sp.csr_matrix((2, 2)), sp.csr_matrix((3, 3))])
    with pytest.raises(InputError, match="empty list"):
        TemporalTensor.from_snapshots([])
    with pytest.raises(InputError, match=r"cannot read a tensor.*str"):
        as_tensor("edges.csv")
