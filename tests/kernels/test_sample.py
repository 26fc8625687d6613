"""Samples and quantiles of blocks are those of the whole, wherever rows are cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from toffee_dist.kernels.align import QUANTILES, cosine_quantiles, ratio_quantiles
from toffee_dist.kernels.sample import COSINE_POINTS, Sample, draw, tally_cosines, tally_ratios

CUTS = st.lists(st.integers(0, 40), max_size=4)


@given(values=st.lists(st.floats(-1, 1), min_size=1, max_size=40), cuts=CUTS)
def test_quantiles_of_blocks_are_those_of_the_whole(values: list[float], cuts: list[int]) -> None:
    cosines = np.array(values)
    bounds = sorted({0, *(min(cut, len(cosines)) for cut in cuts), len(cosines)})
    parts = [tally_cosines(cosines[a:b]) for a, b in pairwise(bounds)]
    total = parts[0]
    for part in parts[1:]:
        total += part
    assert total.total == len(cosines)
    rounded = np.rint(cosines * COSINE_POINTS) / COSINE_POINTS
    expected = np.quantile(rounded, QUANTILES)
    np.testing.assert_allclose(list(cosine_quantiles(total).values()), expected, atol=1e-12)
    np.testing.assert_allclose(expected, np.quantile(cosines, QUANTILES), atol=1e-5)


def test_ratios_are_counted_to_a_ten_thousandth() -> None:
    ratios = np.exp(np.random.default_rng(0).standard_normal(5000))
    found = list(ratio_quantiles(tally_ratios(ratios)).values())
    np.testing.assert_allclose(found, np.quantile(ratios, QUANTILES), rtol=3e-4)
    assert set(ratio_quantiles(tally_ratios(np.ones(3))).values()) == {1.0}


@given(seed=st.integers(0, 2**70), cuts=CUTS, most=st.integers(1, 50))
def test_samples_of_blocks_are_those_of_the_whole(seed: int, cuts: list[int], most: int) -> None:
    rows = np.arange(40)
    whole = Sample.of(draw(rows, seed), rows, most)
    bounds = sorted({0, *cuts, 40})
    parts = [Sample.of(draw(rows[a:b], seed), rows[a:b], most) for a, b in pairwise(bounds)]
    merged = Sample.merge(parts, most)
    assert sorted(merged.rows.tolist()) == sorted(whole.rows.tolist())
    assert len(whole.rows) == min(most, 40)


def test_samples_are_fair() -> None:
    rows = np.arange(100)
    counts = np.zeros(100)
    for seed in range(2000):
        counts[Sample.of(draw(rows, seed), rows, 10).rows] += 1
    # Chi-square with 99 degrees of freedom: mean 99, deviation 14; less, without return.
    assert 40 < ((counts - 200) ** 2 / 200).sum() < 160
    pairs = np.stack([rows, rows[::-1]], axis=1)
    assert Sample.of(draw(rows, 0), pairs, 10).rows.shape == (10, 2)
