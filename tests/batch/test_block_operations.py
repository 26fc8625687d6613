"""Every operation on a slice in blocks of nodes, against the same in memory and against dense algebra."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests import naive
from tests.harness.strategies import random_tensor
from toffee_dist.batch.blocks import cut_matrix
from toffee_dist.batch.sharded import ShardedSlice
from toffee_dist.kernels.embedding import SUM
from toffee_dist.kernels.gauge import find_basis
from toffee_dist.kernels.solvers import als, compressed, solve_slice
from toffee_dist.kernels.solvers.base import Built, Operator, Slice, Solution, Term, gram
from toffee_dist.kernels.solvers.closed_form import bound_slice, solve_closed_form
from toffee_dist.kernels.solvers.compressed import find_core
from toffee_dist.kernels.solvers.krylov import Basis, EigenSpace, TwoSided
from toffee_dist.kernels.spectrum import is_real
from toffee_dist.settings import SolverSettings
from toffee_dist.storage.blocks import block_of
from toffee_dist.storage.files import map_array
from toffee_dist.storage.tensors import stage_tensor
from toffee_dist.tasks import run_here

Array = NDArray[Any]

NODES = 60
# One block, blocks of all sizes, and blocks of one row.
BOUNDS = [(0, 60), (0, 23, 60), (0, 1, 2, 17, 40, 59, 60)]
DOUBLE = SolverSettings(rank=4, precision="double", reg_a=0.02, reg_r=0.03, tol=1e-10, max_iter=300)
# Directed or not, and the frequency: a real slice that is Hermitian, one that is not, two complex ones.
SLICES = [(False, 0), (True, 0), (False, 2), (True, 2)]


class Cut:
    """The same slice in blocks, in memory, and dense.

    Parameters
    ----------
    folder
        Where the blocks are.
    bounds
        Where rows are cut.
    directed, k
        Which slice.
    """

    def __init__(self, folder: Path, bounds: tuple[int, ...], directed: bool, k: int) -> None:
        tensor = random_tensor(7, NODES, 6, 700, directed=directed)
        stage_tensor(tensor, folder / "tensor")
        matrix = cut_matrix(run_here, folder / "tensor", folder / "matrix", bounds, DOUBLE, k, SUM)
        self.bounds, self.k = bounds, k
        self.blocks = ShardedSlice(matrix, folder / "passes", run_here, (0, k))
        dense = naive.slices(np.asarray(tensor.to_coo().todense()))[k]
        self.size = float(np.linalg.norm(dense))
        self.dense = (dense.real if is_real(k, 6) else dense) / self.size
        self.whole = Operator(self.dense, (0, k))

    def put(self, A: Array) -> str:
        """Return an array as one of the slice's own: random numbers in their place."""
        tall: str = self.blocks.random(A.shape[1]).tall
        # The next random numbers are those that they would have been.
        self.blocks._draws -= 1
        for index, (a, b) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            path = block_of(Path(tall), index)
            header = path.read_bytes()[: path.stat().st_size - A[a:b].nbytes]
            path.write_bytes(header + np.ascontiguousarray(A[a:b]).tobytes())
        return tall

    def get(self, tall: str) -> Array:
        """Return the rows of all blocks."""
        return np.vstack([map_array(block_of(Path(tall), index)) for index in range(len(self.bounds) - 1)])

    def draw(self, columns: int, seed: int) -> Array:
        """Return random numbers of the slice's kind."""
        rng = np.random.default_rng(seed)
        A = rng.standard_normal((NODES, columns))
        return A if self.dense.dtype.kind == "f" else A + 1j * rng.standard_normal(A.shape)


@pytest.fixture(params=SLICES, ids=lambda p: f"{'' if p[0] else 'un'}directed-{p[1]}")
def kind(request: pytest.FixtureRequest) -> tuple[bool, int]:
    """Which slice."""
    found: tuple[bool, int] = request.param
    return found


@pytest.fixture(params=BOUNDS, ids=lambda b: f"{len(b) - 1}-blocks")
def cut(request: pytest.FixtureRequest, kind: tuple[bool, int], tmp_path: Path) -> Cut:
    """The slice, cut."""
    return Cut(tmp_path, request.param, *kind)


def near(found: Any, expected: Any, atol: float = 1e-10) -> None:
    np.testing.assert_allclose(found, expected, atol=atol)


def test_products_sums_and_what_they_leave(cut: Cut) -> None:
    X, adjoint = cut.dense, cut.dense.conj().T
    A, B = cut.draw(3, 1), cut.draw(2, 2)
    S = cut.draw(3, 3)[:3, :2]
    a, b = cut.put(A), cut.put(B)
    for terms, expected in (
        ([Term(a, by="X")], X @ A),
        ([Term(a, by="Xh")], adjoint @ A),
        ([Term(a, S)], A @ S),
        ([Term(b, 0.5)], 0.5 * B),
        ([Term(a, S, "X"), Term(b), Term(b, -2.0, "Xh")], X @ A @ S + B - 2 * adjoint @ B),
    ):
        found = cut.blocks.build(*terms, against=[a, b], own=True)
        near(cut.get(found.tall), expected)
        near(found.own, expected.conj().T @ expected)
        near(found.grams[0], A.conj().T @ expected)
        near(found.grams[1], B.conj().T @ expected)
        # Without keeping it, the same is left.
        again = cut.blocks.build(*terms, against=[a, b], own=True, keep=False)
        assert again.tall == ""
        near(again.own, found.own)
    near(cut.blocks.gram(a, b), A.conj().T @ B)


def test_random_numbers_do_not_know_where_rows_are_cut(cut: Cut) -> None:
    for _ in range(2):
        blocks, whole = cut.blocks.random(3), cut.whole.random(3)
        found = cut.get(blocks.tall)
        assert found.tobytes() == whole.tall.tobytes()
        near(blocks.own, found.conj().T @ found)


def test_largest_entries(tmp_path: Path) -> None:
    for bounds in BOUNDS:
        cut = Cut(tmp_path / str(len(bounds)), bounds, True, 0)
        A, S = cut.draw(3, 4), cut.draw(3, 5)[:3]
        Y = A @ S
        near(cut.blocks.largest(cut.put(A), S), Y[np.abs(Y).argmax(axis=0), [0, 1, 2]])


def orthonormal(cut: Cut, X: Slice) -> Iterator[Array]:
    """Extend a basis twice; yield its columns as an array, and check what `extend` returns."""
    basis = Basis(X)
    for seed in (1, 2, 3):
        A = cut.draw(3, seed)
        if seed == 3:
            # Two columns of it are in the basis already: random ones come in their place.
            A[:, :2] = as_array(cut, basis.X.build(*basis.terms(np.eye(6)[:, 2:4])))
        tall = cut.put(A) if X is cut.blocks else A
        Y = X.build(Term(tall), against=basis.talls, own=True)
        before = basis.columns
        c, S = basis.extend(Y)
        Q = as_array(cut, X.build(*basis.terms(np.eye(basis.columns))))
        near(Q.conj().T @ Q, np.eye(basis.columns))
        near(Q[:, :before] @ c + Q[:, before:] @ S, A)
        yield Q


def as_array(cut: Cut, built: Built) -> Array:
    return cut.get(built.tall) if isinstance(built.tall, str) else np.asarray(built.tall)


def test_orthonormal_columns(cut: Cut) -> None:
    pairs = zip(orthonormal(cut, cut.blocks), orthonormal(cut, cut.whole), strict=True)
    for found, expected in pairs:
        assert found.shape == expected.shape
        # The same space: columns beside those that A has are random in both, from the same numbers.
        near(found @ found.conj().T, expected @ expected.conj().T, 1e-8)


def test_the_core_is_that_of_its_columns(cut: Cut) -> None:
    for X in (cut.blocks, cut.whole):
        space = TwoSided(X, 3)
        for _ in range(3):
            space.step()
        U, V = (as_array(cut, X.build(*side.terms(np.eye(side.columns)))) for side in (space.U, space.V))
        known = space.B.shape[1]
        near(cut.dense @ V[:, :known], U @ space.B)
        near(cut.dense.conj().T @ U[:, : space.L.shape[1]], V @ space.L)
        core, K = find_core(space, 8)
        Q = np.hstack([U, V[:, :known]]) @ K
        near(Q.conj().T @ Q, np.eye(len(core)), 1e-8)
        near(Q.conj().T @ cut.dense @ Q, core, 1e-8)


@pytest.mark.parametrize("reg", [0.0, 0.05])
def test_full_steps_of_als(cut: Cut, reg: float) -> None:
    options, A = DOUBLE.changed(reg_a=reg, reg_r=reg), cut.draw(4, 6) / 8
    slow = naive.als(cut.dense, A, reg, reg, iterations=3)
    for iterations in (1, 3):
        asked = options.changed(max_iter=iterations)
        for X, start in ((cut.blocks, cut.put(A)), (cut.whole, A)):
            found = als.minimise(X, start, asked, momentum=False)
            near(found.objective, slow[iterations], 1e-7)
            B = as_array(cut, Built(found.A, found.G, []))
            near(found.G, B.conj().T @ B)
            near(found.R, naive.best_core(cut.dense, B, max(reg, 1e-9)), 1e-6)


def objective(cut: Cut, found: Solution) -> float:
    A = as_array(cut, Built(found.A, found.G, []))
    return naive.objective(cut.dense, A, found.R, DOUBLE.reg_a, DOUBLE.reg_r)


def test_from_the_core_to_the_whole(cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    # A slice of 60 nodes would be its own core in memory.
    monkeypatch.setattr(compressed, "WHOLE_SIZE", 0)
    monkeypatch.setattr(compressed, "WHOLE_SHARE", 0)
    found, expected = (compressed.solve_compressed(X, DOUBLE) for X in (cut.blocks, cut.whole))
    near(found.objective, objective(cut, found))
    assert found.objective == pytest.approx(expected.objective, rel=1e-7)
    dense = solve_slice(cut.dense, cut.k, DOUBLE.changed(solver="als", max_iter=3000, tol=1e-13)).report
    assert found.objective >= naive.bound(cut.dense, 4, DOUBLE.reg_a, DOUBLE.reg_r) * (1 - 1e-9)
    # Without structure there are several local optima, of about the same objective.
    assert found.objective <= dense.objective * (1 + 5e-3)


def test_bounds(cut: Cut) -> None:
    expected = naive.bound(cut.dense, 4, DOUBLE.reg_a, DOUBLE.reg_r)
    for X in (cut.blocks, cut.whole):
        assert bound_slice(X, DOUBLE) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("bounds", BOUNDS)
def test_closed_form(tmp_path: Path, bounds: tuple[int, ...]) -> None:
    cut = Cut(tmp_path, bounds, False, 0)
    expected = naive.bound(cut.dense, 4, DOUBLE.reg_a, DOUBLE.reg_r)
    exact = np.linalg.eigvalsh(cut.dense)
    leading = exact[np.argsort(-np.abs(exact), kind="stable")[:4]]
    for X in (cut.blocks, cut.whole):
        found = solve_closed_form(X, DOUBLE)
        near(found.objective, expected, 1e-8)
        near(objective(cut, found), expected, 1e-8)
        space = EigenSpace(X, 4)
        near(space.values, leading, 1e-8)
        E = as_array(cut, space.vectors())
        near(cut.dense @ E, E * leading, 1e-5)


@pytest.mark.parametrize("bounds", BOUNDS)
def test_singular_vectors_of_the_model(tmp_path: Path, bounds: tuple[int, ...]) -> None:
    cut = Cut(tmp_path, bounds, True, 0)
    A, R = cut.draw(4, 8), cut.draw(4, 9)[:4]
    M = A @ R @ A.T
    P, S, Wt = np.linalg.svd(M)
    for X, tall in ((cut.blocks, cut.put(A)), (cut.whole, A)):
        found = find_basis(X, tall, gram(A, A), R)
        Q = as_array(cut, Built(found.Q, np.empty(0), []))
        U, V = Q @ found.P, Q @ found.W
        near(found.S, S[:4], 1e-8)
        near(U * found.S @ V.T, M, 1e-8)
        near(np.abs(np.sum(U * P[:, :4], axis=0)), 1, 1e-8)
        near(np.abs(np.sum(V * Wt[:4].T, axis=0)), 1, 1e-8)
        assert (U[np.abs(U).argmax(axis=0), range(4)] > 0).all()
        near(found.C, R @ A.T @ V, 1e-8)


def test_what_is_stored(cut: Cut, tmp_path: Path) -> None:
    A, S = cut.draw(3, 1), cut.draw(3, 2)[:3]
    cut.blocks.store(cut.put(A), S, tmp_path / "Y.npy")
    near(cut.get(str(tmp_path / "Y.npy")), A @ S)


@given(
    cuts=st.lists(st.integers(1, NODES - 1), max_size=8, unique=True),
    directed=st.booleans(),
    k=st.integers(0, 3),
)
def test_wherever_rows_are_cut(cuts: list[int], directed: bool, k: int) -> None:
    with TemporaryDirectory() as folder:
        cut = Cut(Path(folder), (0, *sorted(cuts), NODES), directed, k)
        A = cut.draw(2, 1)
        a = cut.put(A)
        for by, X in (("X", cut.dense), ("Xh", cut.dense.conj().T)):
            found = cut.blocks.build(Term(a, by=by), own=True)  # type: ignore[arg-type]
            near(cut.get(found.tall), X @ A)
