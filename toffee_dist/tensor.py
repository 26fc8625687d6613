"""The temporal adjacency tensor: one sparsity pattern for all time, and the events on it.

X (n×n×T) is stored as the union of the (source, target) pairs that ever occur, once, and a tube of
(step, value) events for each pair. Every frequency slice has that same pattern, so a slice costs one
value array. All arrays are plain NumPy arrays or memory maps of them; nothing that reads can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Self, get_args

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from toffee_dist.errors import ConfigError, InputError
from toffee_dist.settings import Entry, PairWeight

# Brings a compiler, which takes a quarter of a second that commands and workers need not wait for.
if TYPE_CHECKING:
    import sparse

# Single precision spans 1e±38; a total of many events, raised or summed, must stay inside it.
SMALLEST_WEIGHT, LARGEST_WEIGHT = 1e-30, 1e30

Floats = NDArray[np.float64]
Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False, repr=False)
class TemporalTensor:
    """A sparse n×n×T tensor of edges in time.

    Build one with `from_events`, `from_coo`, `from_dask` or `from_snapshots`.

    Parameters
    ----------
    n_nodes, n_steps
        n and T.
    directed
        False promises X(:,:,t) = X(:,:,t)ᵀ; both (i, j) and (j, i) are then stored.
    indptr, indices : (n+1,), (n_pairs,)
        The union pattern in CSR form: row = source, column = target, sorted.
    tube_ptr, steps, values : (n_pairs+1,), (n_entries,), (n_entries,)
        The tubes in CSR form: row = pair in the order of the pattern, column = step, sorted.

    Examples
    --------
    >>> X = TemporalTensor.from_events([0, 1, 0], [1, 2, 1], [0, 0, 3], n_nodes=3, n_steps=4)
    >>> X
    TemporalTensor(n_nodes=3, n_steps=4, directed, n_pairs=2, n_entries=3)
    """

    n_nodes: int
    n_steps: int
    directed: bool
    indptr: Ints
    indices: Ints
    tube_ptr: Ints
    steps: Ints
    values: Floats

    @property
    def n_pairs(self) -> int:
        """Number of distinct (source, target) pairs over all time."""
        return len(self.indices)

    @property
    def n_entries(self) -> int:
        """Number of non-zero entries (i, j, t)."""
        return len(self.steps)

    @property
    def tubes(self) -> sp.csr_matrix[np.float64]:
        """The pairs×steps matrix whose rows are the tubes X(i,j,:); shares memory."""
        return sp.csr_matrix(
            (self.values, self.steps, self.tube_ptr), shape=(self.n_pairs, self.n_steps), copy=False
        )

    @property
    def sources(self) -> Ints:
        """The source row of every pair."""
        return np.repeat(np.arange(self.n_nodes, dtype=self.indices.dtype), np.diff(self.indptr))

    @property
    def entry_pairs(self) -> Ints:
        """The pair of every entry, in the order of the pattern."""
        return np.repeat(np.arange(self.n_pairs), np.diff(self.tube_ptr))

    def take_rows(self, start: int, stop: int) -> TemporalTensor:
        """Return the tensor of the sources [start, stop) alone, as rows 0 …; its arrays stay maps."""
        pairs = slice(int(self.indptr[start]), int(self.indptr[stop]))
        entries = slice(int(self.tube_ptr[pairs.start]), int(self.tube_ptr[pairs.stop]))
        return TemporalTensor(
            n_nodes=stop - start,
            n_steps=self.n_steps,
            directed=True,
            indptr=np.asarray(self.indptr[start : stop + 1]) - self.indptr[start],
            indices=self.indices[pairs],
            tube_ptr=np.asarray(self.tube_ptr[pairs.start : pairs.stop + 1]) - self.tube_ptr[pairs.start],
            steps=self.steps[entries],
            values=self.values[entries],
        )

    def pairs_since(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return source and target of the pairs with an entry at this step or later."""
        # Steps of a pair are in order: the last one tells.
        late = np.flatnonzero(np.asarray(self.steps[np.asarray(self.tube_ptr[1:]) - 1]) >= step)
        source = np.searchsorted(self.indptr, late, side="right") - 1
        return source.astype(np.int64), np.asarray(self.indices[late], dtype=np.int64)

    def node_activity(
        self, pairs_at_once: int = 1 << 22
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
        """Return each node's degree, first and last step (-1 where it has none), as source or as target.

        The degree counts pairs: of an undirected graph its neighbours, of a directed one both directions.
        """
        n = self.n_nodes
        degree = np.zeros(n, dtype=np.int64)
        first = np.full(n, self.n_steps, dtype=np.int32)
        last = np.full(n, -1, dtype=np.int32)
        for start in range(0, self.n_pairs, pairs_at_once):
            pairs = slice(start, min(start + pairs_at_once, self.n_pairs))
            i = np.searchsorted(self.indptr, np.arange(pairs.start, pairs.stop), side="right") - 1
            j = np.asarray(self.indices[pairs])
            begins = self.steps[self.tube_ptr[pairs]].astype(np.int32)
            ends = self.steps[self.tube_ptr[pairs.start + 1 : pairs.stop + 1] - 1].astype(np.int32)
            degree += np.bincount(i, minlength=n)
            sides = (i, j) if self.directed else (i,)
            if self.directed:
                degree += np.bincount(j, minlength=n)
            for side in sides:
                np.minimum.at(first, side, begins)
                np.maximum.at(last, side, ends)
        first[last < 0] = -1
        return degree, first, last

    def __repr__(self) -> str:
        kind = "directed" if self.directed else "undirected"
        return (
            f"TemporalTensor(n_nodes={self.n_nodes}, n_steps={self.n_steps}, {kind}, "
            f"n_pairs={self.n_pairs}, n_entries={self.n_entries})"
        )

    @classmethod
    def from_events(
        cls,
        source: ArrayLike,
        target: ArrayLike,
        step: ArrayLike,
        weight: ArrayLike | None = None,
        *,
        n_nodes: int | None = None,
        n_steps: int | None = None,
        directed: bool = True,
        entry: Entry = "binary",
        pair_weight: PairWeight = "unit",
    ) -> Self:
        """Build the tensor from one row per event.

        Parameters
        ----------
        source, target : (m,) integers in [0, n_nodes)
            Self-loops are kept. Undirected: (i, j) and (j, i) are the same edge.
        step : (m,) integers in [0, n_steps)
            Steps without events are empty snapshots.
        weight : (m,) finite, optional
            Used by ``entry="sum"`` only; 1 where absent.
        n_nodes, n_steps
            The sizes; where absent, the largest index + 1.
        directed
            Whether (i, j) differs from (j, i).
        entry
            What X(i,j,t) is when rows repeat: ``binary`` (1, the paper's adjacency), ``count`` (how many
            rows) or ``sum`` (of their weights; a sum of exactly zero is no entry).
        pair_weight
            Scales each pair's whole tube: its total ``Σ_t |X(i,j,t)|`` = s becomes s (``raw``), log1p(s)
            (``log``) or 1 (``unit``). The shape in time stays; heavy pairs are tamed.

        Raises
        ------
        InputError
            For NaN, infinite, negative, too large or non-integer input, naming the first such row.
        """
        _check_choice("entry", entry, get_args(Entry))
        _check_choice("pair_weight", pair_weight, get_args(PairWeight))
        i, n_i = _check_index("source", source, n_nodes, "n_nodes")
        j, n_j = _check_index("target", target, n_nodes, "n_nodes")
        t, n_steps = _check_index("step", step, n_steps, "n_steps")
        n_nodes = max(n_i, n_j)
        value = np.ones(len(i)) if weight is None else _check_weight(weight)
        for name, array in (("target", j), ("step", t), ("weight", value)):
            if len(array) != len(i):
                raise InputError(
                    f"{name} and source must have one element per row",
                    got=f"{len(array)} against {len(i)}",
                    allowed="equal lengths",
                    remedy="Give every event a source, a target and a step.",
                )
        if not directed:
            i, j = np.minimum(i, j), np.maximum(i, j)
        # Equal keys become neighbours; ordering them by value makes the sum independent of row order.
        order = np.lexsort((value, t, i * n_nodes + j))
        i, j, t, value = i[order], j[order], t[order], value[order]
        first = np.flatnonzero(_changes(i, j, t))
        if entry == "binary":
            value = np.ones(len(first))
        elif len(first):
            value = np.add.reduceat(value if entry == "sum" else np.ones(len(i)), first)
        present = value != 0
        i, j, t, value = i[first][present], j[first][present], t[first][present], value[present]
        if not directed:
            off = i != j
            i, j = np.concatenate([i, j[off]]), np.concatenate([j, i[off]])
            t, value = np.concatenate([t, t[off]]), np.concatenate([value, value[off]])
        tensor = cls._from_entries(i, j, t, value, n_nodes, n_steps, directed)
        return tensor.with_pair_weight(pair_weight)

    @classmethod
    def from_coo(cls, coo: sparse.COO, *, directed: bool | None = None) -> Self:
        """Build from a `sparse.COO` n×n×T; its values are the entries.

        ``directed=None`` looks: a symmetric tensor is undirected.
        """
        shape = _check_shape(coo.shape)
        i, j, t = (np.asarray(c, dtype=np.int64) for c in coo.coords)
        return cls._from_any_entries(i, j, t, coo.data, shape, directed)

    @classmethod
    def from_dask(cls, array: Any, *, directed: bool | None = None) -> Self:
        """Build from a dask array n×n×T whose chunks are `sparse.COO`, one chunk in memory at a time."""
        # Saves start-up time.
        from sparse import COO

        shape = _check_shape(array.shape)
        offsets = [np.concatenate([[0], np.cumsum(sizes)]) for sizes in array.chunks]
        coords, data = [np.empty((3, 0), dtype=np.int64)], [np.empty(0)]
        for block in product(*(range(count) for count in array.numblocks)):
            chunk = COO(array.blocks[block].compute(scheduler="synchronous"))
            start = np.array([offsets[axis][b] for axis, b in enumerate(block)])
            coords.append(chunk.coords.astype(np.int64) + start[:, None])
            data.append(chunk.data)
        i, j, t = np.concatenate(coords, axis=1)
        return cls._from_any_entries(i, j, t, np.concatenate(data), shape, directed)

    @classmethod
    def from_snapshots(cls, snapshots: Sequence[Any], *, directed: bool | None = None) -> Self:
        """Build from a list of T `scipy.sparse` n×n snapshots."""
        if not snapshots:
            raise InputError(
                "snapshots",
                got="an empty list",
                allowed="at least one n×n matrix",
                remedy="Pass one matrix per step.",
            )
        shapes = {matrix.shape for matrix in snapshots}
        if len(shapes) > 1:
            raise InputError(
                "snapshots of different shapes",
                got=sorted(shapes),
                allowed="one n×n",
                remedy="Give every matrix all nodes; rows without edges stay empty.",
            )
        parts = [sp.coo_array(matrix) for matrix in snapshots]
        shape = _check_shape((*shapes.pop(), len(parts)))
        i = np.concatenate([part.row for part in parts]).astype(np.int64)
        j = np.concatenate([part.col for part in parts]).astype(np.int64)
        t = np.repeat(np.arange(len(parts)), [part.nnz for part in parts])
        data = np.concatenate([part.data for part in parts])
        return cls._from_any_entries(i, j, t, data, shape, directed)

    def to_coo(self) -> sparse.COO:
        """Return the tensor as a `sparse.COO` n×n×T."""
        # Saves start-up time.
        from sparse import COO

        pair = self.entry_pairs
        coords = np.stack([self.sources[pair], self.indices[pair], self.steps])
        shape = (self.n_nodes, self.n_nodes, self.n_steps)
        return COO(coords, np.array(self.values), shape=shape)

    def with_pair_weight(self, pair_weight: PairWeight) -> Self:
        """Scale every tube so that its total s = ``Σ_t |X(i,j,t)|`` becomes s, log1p(s) or 1."""
        _check_choice("pair_weight", pair_weight, get_args(PairWeight))
        if pair_weight == "raw" or self.n_entries == 0:
            return self
        total = np.add.reduceat(np.abs(self.values), self.tube_ptr[:-1])
        wanted = np.log1p(total) if pair_weight == "log" else np.ones_like(total)
        counts = np.diff(self.tube_ptr)
        return replace(self, values=self.values / np.repeat(total, counts) * np.repeat(wanted, counts))

    def with_step_weights(self, weights: ArrayLike) -> Self:
        """Multiply snapshot t by weights[t] (fact 7: weights in time go in before the transform)."""
        w = np.asarray(weights, dtype=np.float64)
        return replace(self, values=self.values * w[self.steps])

    @classmethod
    def _from_any_entries(
        cls,
        i: Ints,
        j: Ints,
        t: Ints,
        data: ArrayLike,
        shape: tuple[int, int],
        directed: bool | None,
    ) -> Self:
        """Build from entries of unknown symmetry; repeated coordinates are summed."""
        n_nodes, n_steps = shape
        tensor = cls.from_events(
            i, j, t, data, n_nodes=n_nodes, n_steps=n_steps, entry="sum", pair_weight="raw"
        )
        symmetric = directed is not True and tensor._is_symmetric()
        if directed is False and not symmetric:
            raise InputError(
                "directed=False for a tensor that is not symmetric",
                got="X(:,:,t) differs from its transpose",
                allowed="X(i,j,t) = X(j,i,t)",
                remedy="Pass directed=True, or add the transposed entries.",
            )
        return replace(tensor, directed=not symmetric)

    @classmethod
    def _from_entries(
        cls,
        i: Ints,
        j: Ints,
        t: Ints,
        value: Floats,
        n_nodes: int,
        n_steps: int,
        directed: bool,
    ) -> Self:
        """Build from distinct entries in any order."""
        order = np.lexsort((t, i * n_nodes + j))
        i, j, t = i[order], j[order], t[order]
        first = np.flatnonzero(_changes(i, j))
        pattern = index_dtype(n_nodes, len(first))
        tube = index_dtype(n_steps, len(t))
        return cls(
            n_nodes=n_nodes,
            n_steps=n_steps,
            directed=directed,
            indptr=np.searchsorted(i[first], np.arange(n_nodes + 1)).astype(pattern),
            indices=j[first].astype(pattern),
            tube_ptr=np.append(first, len(t)).astype(tube),
            steps=t.astype(tube),
            values=value[order],
        )

    def _is_symmetric(self) -> bool:
        """Whether X(i,j,t) = X(j,i,t) exactly."""
        pair = self.entry_pairs
        i, j = self.sources[pair], self.indices[pair]
        mirrored = np.lexsort((self.steps, i, j))
        return (
            np.array_equal(i, j[mirrored])
            and np.array_equal(j, i[mirrored])
            and np.array_equal(self.steps, self.steps[mirrored])
            and np.array_equal(self.values, self.values[mirrored])
        )


def as_tensor(data: Any) -> TemporalTensor:
    """Turn whatever holds an n×n×T tensor into a `TemporalTensor`.

    Parameters
    ----------
    data
        A `TemporalTensor`, a `sparse.COO`, a dask array of `sparse.COO` chunks, or a list of T
        `scipy.sparse` matrices.
    """
    # Saves start-up time.
    from sparse import COO

    if isinstance(data, TemporalTensor):
        return data
    if isinstance(data, COO):
        return TemporalTensor.from_coo(data)
    if hasattr(data, "numblocks") and hasattr(data, "chunks"):
        return TemporalTensor.from_dask(data)
    if isinstance(data, list | tuple) and all(sp.issparse(matrix) for matrix in data):
        return TemporalTensor.from_snapshots(data)
    raise InputError(
        "cannot read a tensor",
        got=type(data).__name__,
        allowed="TemporalTensor, sparse.COO, a dask array of sparse.COO, a list of scipy.sparse",
        remedy="Build one with TemporalTensor.from_events(source, target, step).",
    )


def _changes(*columns: Ints) -> NDArray[np.bool_]:
    """Mark the rows of sorted columns that differ from the row before."""
    changed = np.zeros(len(columns[0]), dtype=bool)
    changed[:1] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return changed


def index_dtype(*sizes: int) -> type[np.signedinteger[Any]]:
    """Return the narrower integer type that holds every index below these sizes."""
    return np.int32 if max(sizes) <= np.iinfo(np.int32).max else np.int64


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(name, got=repr(value), allowed=", ".join(allowed))


def _check_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 3 or shape[0] != shape[1]:
        raise InputError(
            "tensor shape", got=shape, allowed="(n, n, T)", remedy="Order the axes as source, target, step."
        )
    return int(shape[0]), int(shape[2])


def _check_index(
    name: str, data: ArrayLike, size: int | None, size_name: str
) -> tuple[NDArray[np.int64], int]:
    """Return the indices as int64 and the size of their space, or say which row is wrong."""
    array = np.asarray(data)
    if array.ndim != 1:
        raise InputError(f"{name} shape", got=array.shape, allowed="one dimension", remedy="Flatten it.")
    if array.dtype.kind not in "iu" and array.size:
        bad = ""
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            row = int(np.flatnonzero(~np.isfinite(array))[0])
            bad = f" with {array[row]} in row {row}"
        raise InputError(
            f"{name} must hold integers",
            got=f"{array.dtype}{bad}",
            allowed="integers from 0",
            remedy="Map node ids to rows and times to steps first.",
        )
    largest = int(array.max(initial=-1))
    bound = largest + 1 if size is None else size
    if bound < 1:
        raise InputError(
            f"{size_name} is unknown",
            got=f"{size} and no events",
            allowed="at least 1",
            remedy="Say n_nodes and n_steps, or pass events.",
        )
    wrong = (array < 0) | (array >= bound)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise InputError(
            f"{name} in row {row} is out of range",
            got=array[row],
            allowed=f"0 to {bound - 1} ({size_name} = {bound})",
            remedy="Number nodes and steps from 0, or raise the size.",
        )
    return array.astype(np.int64), bound


def _check_weight(data: ArrayLike) -> Floats:
    """Return the weights as float64, or say which row is wrong."""
    array = np.asarray(data)
    if array.dtype.kind not in "iufb" or array.ndim != 1:
        raise InputError(
            "weight",
            got=f"{array.dtype} of shape {array.shape}",
            allowed="a vector of real numbers",
            remedy="Pass one number per event.",
        )
    array = array.astype(np.float64)
    size = np.abs(array)
    usable = (size == 0) | ((size >= SMALLEST_WEIGHT) & (size <= LARGEST_WEIGHT))
    if not usable.all():
        row = int(np.flatnonzero(~usable)[0])
        raise InputError(
            f"weight in row {row}",
            got=array[row],
            allowed=f"0, or a magnitude from {SMALLEST_WEIGHT:g} to {LARGEST_WEIGHT:g}",
            remedy="Drop such rows or rescale the weights.",
        )
    return array
