"""Sums of tall arrays times small ones: as NumPy has them, and no array that came in is written to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toffee_dist.kernels.solvers.base import add_up

KINDS = ["f4", "f8", "c8", "c16"]


@given(
    seed=st.integers(0, 1000),
    kind=st.sampled_from(KINDS),
    rows=st.integers(0, 40),
    columns=st.integers(1, 5),
    terms=st.lists(
        st.tuples(st.sampled_from(["none", "number", "matrix"]), st.sampled_from("CF"), st.integers(1, 5)),
        min_size=1,
        max_size=5,
    ),
)
def test_sums_are_those_of_numpy(
    seed: int, kind: str, rows: int, columns: int, terms: list[tuple[str, str, int]]
) -> None:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Any:
        sample = rng.standard_normal(shape)
        return (sample + 1j * rng.standard_normal(shape) if kind[0] == "c" else sample).astype(kind)

    double = np.result_type(kind, np.float64)
    parts: list[tuple[Any, Any]] = []
    expected = np.zeros((rows, columns), np.complex128)
    for what, order, width in terms:
        A: Any = draw(rows, width if what == "matrix" else columns)
        A = np.asfortranarray(A) if order == "F" else A
        # What comes from storage is a map, which cannot be written to.
        A.flags.writeable = False
        S: Any = {"none": None, "number": 0.5, "matrix": draw(width, columns).astype(double)}[what]
        parts.append((A, S))
        expected += A if S is None else A @ S if what == "matrix" else A * S
    found = add_up(iter(parts))
    assert found.dtype == kind
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 if kind in ("f4", "c8") else 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_in_stays_as_it_is(kind: str) -> None:
    A, B = np.ones((20, 3), kind), np.ones((20, 3), kind)
    S = np.full((3, 3), 2.0)
    for parts in ([(A, None), (B, S)], [(A, S), (B, S)], [(A, None), (B, None)], [(A, 3.0), (B, S)]):
        add_up(parts)  # type: ignore[arg-type]
        assert (A == 1).all()
        assert (B == 1).all()
