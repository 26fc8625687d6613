"""Fair samples and quantiles that do not depend on where rows are cut, in bounded memory.

Every row has a number that looks random; the rows with the smallest ones are the sample. Values are counted
on a fine grid. What blocks leave of either merges into that of the whole, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toffee_dist.tensor import Floats

Words = NDArray[np.uint64]


def mix(words: Words) -> Words:
    """Return well-mixed words: every bit of the input moves every bit of the output."""
    # The finaliser of splitmix64.
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(words ^ (words >> np.uint64(31)))


def draw(numbers: NDArray[np.integer], seed: int) -> Words:
    """Return a word per number that looks random, another one for each seed."""
    start = mix(np.array([seed % 2**64], dtype=np.uint64))
    return mix(mix(numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)) ^ start)


@dataclass(frozen=True, eq=False)
class Sample:
    """Rows with the smallest words, and their words; in no order that means anything.

    Attributes
    ----------
    words, rows : (m,) and (m, …)
    """

    words: Words
    rows: NDArray[np.int64]

    @classmethod
    def of(cls, words: Words, rows: NDArray[np.int64], most: int) -> Sample:
        """Return at most so many rows."""
        if len(words) > most:
            # Equal words of different rows are too rare to matter, but the rows decide then.
            order = np.lexsort((*np.atleast_2d(rows.T)[::-1], words))[:most]
            words, rows = words[order], rows[order]
        return cls(words, rows)

    @classmethod
    def merge(cls, parts: Sequence[Sample], most: int) -> Sample:
        """Return the sample of all from those of its parts."""
        words, rows = (np.concatenate([getattr(part, name) for part in parts]) for name in ("words", "rows"))
        return cls.of(words, rows, most)


@dataclass(frozen=True, eq=False)
class Tally:
    """How many values there are at each point of a grid.

    Attributes
    ----------
    points, counts : (m,), points ascend
    """

    points: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, points: NDArray[np.integer]) -> Tally:
        """Count the points that values are at."""
        return cls(*np.unique(points.astype(np.int64), return_counts=True))

    def __add__(self, other: Tally) -> Tally:
        points = np.union1d(self.points, other.points)
        counts = np.zeros(len(points), np.int64)
        for part in (self, other):
            counts[np.searchsorted(points, part.points)] += part.counts
        return Tally(points, counts)

    @property
    def total(self) -> int:
        """How many values there are."""
        return int(self.counts.sum())

    def quantile(self, share: float) -> float:
        """Return a quantile as a point of the grid, between two where it is (`numpy.quantile`)."""
        at = share * (self.total - 1)
        ranks = np.array([np.floor(at), np.ceil(at)])
        low, high = self.points[np.searchsorted(np.cumsum(self.counts), ranks, side="right")]
        return float(low + (at - np.floor(at)) * (high - low))


# Points between 0 and 1 of a cosine, and between two powers of two of a ratio: both are whole at 1.
COSINE_POINTS, RATIO_POINTS = 1 << 16, 1 << 12


def tally_cosines(cosines: Floats) -> Tally:
    """Count cosines, to 1e-5; those that are no numbers are left out."""
    return Tally.of(np.rint(cosines[np.isfinite(cosines)] * COSINE_POINTS))


def tally_ratios(ratios: Floats) -> Tally:
    """Count ratios above 0, to 1e-4 of each."""
    return Tally.of(np.rint(np.log2(ratios) * RATIO_POINTS))
