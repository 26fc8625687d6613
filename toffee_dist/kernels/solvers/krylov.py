"""Krylov spaces of a slice in blocks: few passes over the matrix, orthonormal bases, Ritz values.

A basis is kept as blocks Q_i = Z_i·W_i with Z_i as a pass left it and W_i small: normalising needs no pass of
its own. Every step is two passes: one multiplies and looks at the basis, one takes the basis off.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from toffee_dist.kernels.solvers.base import Built, Handle, Slice, Small, TallSpace, Term
from toffee_dist.tensor import Floats

# Columns of a block of `EigenSpace`, as a share of the rank. Columns until 1e-4 of the energy is left, rank
# 64 (mathoverflow, a power-law graph of 200,000 nodes, communities of 100,000): blocks of 8 take 250 to
# 280, of 16 290 to 340, of 32 410 to 440, of 64 over 512; but a pass of 8 columns takes as long as one of 16.
EIGEN_SHARE, EIGEN_LEAST = 4, 8
# Most columns of a basis, as a multiple of the rank, and at the least: 5 to 6 times 64 are used, and a random
# matrix, which has no gap anywhere, takes 200 to 300 even for rank 4.
MOST_SHARE, MOST_LEAST = 12, 400
# The share of the energy that may be missing, by what the last steps have added, by the bits of a number.
ENERGY_LEFT = {32: 2e-5, 64: 1e-10}


def most_columns(rank: int) -> int:
    """Return how many columns a basis has at the most."""
    return max(MOST_SHARE * rank, MOST_LEAST)


class Basis:
    """Orthonormal blocks of columns, and what is left of new ones.

    Parameters
    ----------
    X
        Where the tall arrays are.
    """

    def __init__(self, X: TallSpace) -> None:
        self.X = X
        self.talls: list[Handle] = []
        self._smalls: list[Small] = []
        self.ends = [0]

    @property
    def columns(self) -> int:
        """How many columns there are."""
        return self.ends[-1]

    def terms(self, S: Small) -> list[Term]:
        """Return Q·S as terms; S may have fewer rows than Q has columns."""
        pieces = zip(self.talls, self._smalls, self.ends, self.ends[1:], strict=False)
        return [Term(Z, W @ S[a:b]) for Z, W, a, b in pieces if a < len(S)]

    def last(self, by: str) -> Term:
        """Return X, or its adjoint, times the newest block."""
        return Term(self.talls[-1], self._smalls[-1], by)  # type: ignore[arg-type]

    def blocks(self, columns: int) -> Iterator[tuple[slice, Handle, Small]]:
        """Yield which of the first columns, and Z, W of them."""
        for Z, W, a, b in zip(self.talls, self._smalls, self.ends, self.ends[1:], strict=False):
            if b <= columns:
                yield slice(a, b), Z, W

    def project(self, grams: list[Small], columns: int | None = None) -> Small:
        """Return QᴴY from ZᴴY of every block, or of those of the first columns."""
        smalls = [W for _, _, W in self.blocks(self.columns if columns is None else columns)]
        return np.vstack([W.conj().T @ g for W, g in zip(smalls, grams, strict=True)])

    def extend(self, Y: Built) -> tuple[Small, Small]:
        """Add what Y has beside the basis; return c, S with Y = Q·c + Q_new·S.

        Y comes with its own Gram matrix, held against the basis. Directions in which it has nothing left
        are filled with random ones, and zero rows of S, as far as there are any.
        """
        width, size = len(Y.own), float(np.sqrt(max(np.trace(Y.own).real, 0.0)))
        c = self.project(Y.grams) if self.talls else np.zeros((0, width), Y.own.dtype)
        left = self._take_off(Y, c)
        W, S = self.normalise(left.own, size)
        tall, found = left.tall, W.shape[1]
        if found < width:
            tall, fresh = self._fill(left.tall, W, width - found)
            W = np.eye(found + fresh, dtype=W.dtype)
            S = np.vstack([S, np.zeros((fresh, width), S.dtype)])
        self.talls.append(tall)
        self._smalls.append(W)
        self.ends.append(self.columns + W.shape[1])
        return c, S

    def _take_off(self, Y: Built, c: Small) -> Built:
        return self.X.build(Term(Y.tall), *self.terms(-c), own=True) if len(c) else Y

    def normalise(self, own: Small, size: float) -> tuple[Small, Small]:
        """Return W, S with Z·W orthonormal and Z = (Z·W)·S, from ZᴴZ."""
        eps = np.finfo(self.X.dtype).eps
        w, E = np.linalg.eigh(own)
        # A remainder of under a thousand roundings of Y would not be orthogonal to the basis: it is noise.
        alive = (w > 10 * eps * w[-1]) & (w > (1000 * eps * size) ** 2)
        root = np.sqrt(w[alive])
        return E[:, alive] / root, root[:, None] * E[:, alive].conj().T

    def _fill(self, Z: Handle, W: Small, columns: int) -> tuple[Handle, int]:
        """Return Z·W beside random columns orthogonal to it and to the basis, and how many those are."""
        columns = max(0, min(columns, self.X.n - self.columns - W.shape[1]))
        found = W.shape[1]
        if columns == 0:
            return self.X.build(Term(Z, W)).tall if found else Z, 0
        fresh = self.X.random(columns)
        size = float(np.sqrt(np.trace(fresh.own).real))
        for _ in range(2):
            seen = self.X.build(Term(fresh.tall), against=[*self.talls, Z])
            c = self.project(seen.grams[:-1]) if self.talls else np.zeros((0, columns))
            terms = self.terms(-c) if len(c) else []
            if found:
                terms.append(Term(Z, -W @ (W.conj().T @ seen.grams[-1])))
            fresh = self.X.build(Term(seen.tall), *terms, own=True)
        W2, _ = self.normalise(fresh.own, size)
        both = [Term(fresh.tall, np.pad(W2, ((0, 0), (found, 0))))]
        if found:
            both.append(Term(Z, np.pad(W, ((0, 0), (0, W2.shape[1])))))
        return self.X.build(*both).tall, W2.shape[1]


class EnergyLeft:
    """How much energy is still to come, by what the last steps have added: a geometric series, at the most.

    Krylov spaces converge faster and faster, so this is above what is left: 1.3 to 1.5 times, measured on
    email, mathoverflow and generated graphs.

    Parameters
    ----------
    eps
        Rounding error of the tall arrays: a step of a few of those is none.
    """

    def __init__(self, eps: float) -> None:
        self._energies: list[float] = []
        self._noise = 8 * eps

    def after(self, energy: float) -> float:
        """Return the energy that is left after a step, infinite while nothing can be said."""
        self._energies.append(energy)
        if len(self._energies) < 4:
            return np.inf
        a, b, c, d = self._energies[-4:]
        steps = np.maximum([b - a, c - b, d - c], 0.0)
        if steps[2] <= self._noise * d:
            return 0.0
        ratio = max(steps[2] / max(steps[1], 1e-300), steps[1] / max(steps[0], 1e-300))
        return float(steps[2] * ratio / (1 - ratio)) if ratio < 1 else np.inf


class EigenSpace:
    """The eigenvalues of largest magnitude of a Hermitian matrix, and their vectors, in a Krylov basis.

    Parameters
    ----------
    X
        The matrix.
    rank
        How many are wanted.
    positive
        The largest instead, of which only those above zero count.

    Attributes
    ----------
    values : largest first
    left : energy Σ λ² that may be missing in them
    steps : multiplications
    converged : whether that is as little as was asked for
    """

    def __init__(self, X: TallSpace, rank: int, *, positive: bool = False) -> None:
        block = min(X.n, max(EIGEN_LEAST, -(-rank // EIGEN_SHARE)))
        most = min(X.n, most_columns(rank))
        tol = ENERGY_LEFT[np.finfo(X.dtype).bits]
        self._basis = basis = Basis(X)
        basis.extend(X.random(block))
        T = np.zeros((0, 0), np.result_type(X.dtype, np.float64))
        watch, self.left, self.steps, self.converged = EnergyLeft(np.finfo(X.dtype).eps), np.inf, 0, False
        while True:
            self.steps += 1
            Y = X.build(basis.last("X"), against=basis.talls, own=True)
            # T = QᴴXQ: its new columns, and by symmetry its new rows.
            c = basis.project(Y.grams)
            old = len(T)
            grown = np.zeros((len(c), len(c)), T.dtype)
            grown[:old, :old] = T
            grown[:, old:], grown[old:, :old] = c, c[:old].conj().T
            T = grown
            T[old:, old:] = (T[old:, old:] + T[old:, old:].conj().T) / 2
            values, vectors = np.linalg.eigh(T)
            weights = np.maximum(values, 0.0) if positive else np.abs(values)
            order = np.argsort(-weights, kind="stable")[:rank]
            energy = float(np.square(weights[order]).sum())
            whole = len(T) >= X.n
            self.left = 0.0 if whole else watch.after(energy) if len(T) >= rank else np.inf
            self.converged = self.left <= tol * energy
            if self.converged or len(T) >= most:
                break
            before = basis.columns
            basis.extend(Y)
            X.keep_only(basis.talls)
            if basis.columns == before:
                # The space is closed under X, and no other direction is left.
                self.left, self.converged = 0.0, True
                break
        self.values: Floats = values[order].astype(np.float64)
        self._vectors = vectors[:, order]

    def vectors(self, small: Small | None = None) -> Built:
        """Return the vectors, times a small matrix, with their Gram matrix."""
        S = self._vectors if small is None else self._vectors @ small
        return self._basis.X.build(*self._basis.terms(S), own=True)


class TwoSided:
    """Block Golub-Kahan-Lanczos: orthonormal U (n×m), V with X·V[:, :m] = U B and Xᴴ·U = V L.

    Parameters
    ----------
    X
        The slice.
    block
        Columns of a block.
    """

    def __init__(self, X: Slice, block: int) -> None:
        self.X, self.U, self.V = X, Basis(X), Basis(X)
        dtype = np.result_type(X.dtype, np.float64)
        self.B, self.L = np.zeros((0, 0), dtype), np.zeros((0, 0), dtype)
        self.V.extend(self._start(min(block, X.n)))
        self.closed = False

    def _start(self, columns: int) -> Built:
        """Return XᴴX times random columns: they are near what is looked for, and cost no basis.

        Of mathoverflow with blocks of 32 columns, rank 64, the objective after 2 full steps of ALS is then
        the one that was there after 4 to 8.
        """
        first = self.X.random(columns)
        Y = self.X.build(Term(first.tall, by="X"), own=True)
        # Between the two, so that a large singular value leaves the digits of small ones.
        W, _ = self.U.normalise(Y.own, 0.0)
        # Where X has fewer directions, the others are zero, and random ones come in their place.
        W = np.pad(W, ((0, 0), (0, columns - W.shape[1])))
        return self.X.build(Term(Y.tall, W, "Xh"), own=True)

    def step(self) -> None:
        """Add a block to both; `closed` where there is none to add."""
        X, U, V = self.X, self.U, self.V
        m, had = U.columns, V.columns
        Y = X.build(V.last("X"), against=U.talls, own=True)
        self.B = _append(self.B, *U.extend(Y))
        X.keep_only([*U.talls, *V.talls])
        if U.columns == m:
            self.closed = True
            return
        Y = X.build(U.last("Xh"), against=V.talls, own=True)
        self.L = _append(self.L, *V.extend(Y))
        X.keep_only([*U.talls, *V.talls])
        self.closed = V.columns == had


def _append(M: Small, c: Small, S: Small) -> Small:
    """Return M with new columns [c; S] on its right; what is below older columns is zero."""
    rows, columns = len(c) + len(S), M.shape[1] + c.shape[1]
    grown = np.zeros((rows, columns), M.dtype)
    grown[: len(M), : M.shape[1]] = M
    grown[: len(c), M.shape[1] :] = c
    grown[len(c) :, M.shape[1] :] = S
    return grown


def leading_singular_values(X: Slice, rank: int) -> tuple[Floats, float]:
    """Return the leading singular values, largest first, and the energy Σ σ² that may be missing in them."""
    block = max(EIGEN_LEAST, -(-rank // EIGEN_SHARE))
    space, watch, left = TwoSided(X, block), EnergyLeft(np.finfo(X.dtype).eps), np.inf
    tol = ENERGY_LEFT[np.finfo(X.dtype).bits]
    while True:
        space.step()
        sigma = np.linalg.svd(space.B, compute_uv=False)[:rank]
        energy = float(np.square(sigma).sum())
        if space.closed or space.U.columns >= X.n:
            return sigma, 0.0
        left = watch.after(energy) if space.U.columns >= rank else np.inf
        if left <= tol * energy or space.U.columns >= most_columns(rank):
            return sigma, left
