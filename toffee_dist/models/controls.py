"""Controls: what counting alone tells about a pair. They give scores, no vectors."""

from __future__ import annotations

import numpy as np

from toffee_dist.models.base import Rows
from toffee_dist.tensor import Floats, TemporalTensor


def memory(tensor: TemporalTensor, i: Rows, j: Rows) -> Floats:
    """Return 1 for a pair that was seen before, else 0."""
    n = tensor.n_nodes
    seen = tensor.sources.astype(np.int64) * n + tensor.indices
    return np.isin(i.astype(np.int64) * n + j, seen).astype(np.float64)


def degree(tensor: TemporalTensor, i: Rows, j: Rows) -> Floats:
    """Return log(1 + d_i) + log(1 + d_j): distinct neighbours of i as a source and of j as a target."""
    outgoing = np.log1p(np.diff(tensor.indptr))
    incoming = np.log1p(np.bincount(tensor.indices, minlength=tensor.n_nodes))
    return np.asarray(outgoing[i] + incoming[j], dtype=np.float64)
