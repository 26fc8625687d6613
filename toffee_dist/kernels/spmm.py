"""Sparse rows times a tall array that comes in tiles: Y += X[:, first:last]·Q[first:last], tile after tile.

A loop over the rows, compiled by numba. Every sum is taken in the order of the columns, whatever the tiles
and however many threads run at once, so its bits are those of SciPy's product with the whole Q.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist.tensor import Ints


def multiply_tiles(
    indptr: Ints,
    indices: Ints,
    values: NDArray[Any],
    tiles: Iterable[tuple[int, int, NDArray[Any]]],
    columns: int,
) -> NDArray[Any]:
    """Return X·Q for rows of X in CSR form, with sorted columns.

    Parameters
    ----------
    indptr, indices, values
        The rows.
    tiles
        (first, last, rows [first, last) of Q), in order; together all that the rows refer to.
    columns
        Of Q.
    """
    out = np.zeros((len(indptr) - 1, columns), dtype=values.dtype)
    at = np.array(indptr[:-1], dtype=np.int64)
    ends = np.array(indptr[1:], dtype=np.int64)
    multiply = _compiled()
    for first, last, tile in tiles:
        multiply(at, ends, np.asarray(indices), np.asarray(values), np.asarray(tile), first, last, out)
    return out


@cache
def _compiled() -> Callable[..., None]:
    # Saves start-up time: only large graphs are multiplied in tiles.
    import numba

    # Half a second per process: what numba would keep on disk are pickles, which we do not read.
    compiled: Callable[..., None] = numba.njit(nogil=True)(_multiply_tile)
    return compiled


def _multiply_tile(
    at: Any, ends: Any, indices: Any, values: Any, tile: Any, first: int, last: int, out: Any
) -> None:
    """Add one tile; `at` is where each row goes on."""
    columns = tile.shape[1]
    for i in range(len(at)):
        p = at[i]
        while p < ends[i]:
            j = indices[p]
            if j >= last:
                break
            x = values[p]
            for c in range(columns):
                out[i, c] += x * tile[j - first, c]
            p += 1
        at[i] = p
