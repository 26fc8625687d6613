"""By which rhythm a node lives: the periods at which its energy stands out of its own noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from toffee_dist.results.neighbors import describe_rows, search
from toffee_dist.results.nodes import Node, find_node
from toffee_dist.results.published import PublishedRun
from toffee_dist.storage.vectors import Vectors, read_nodes
from toffee_dist.timegrid import name_period

# Chance that a node without any rhythm is said to have one, over all frequencies.
CHANCE = 0.05
# With fewer frequencies than this, a floor cannot be told from what stands out of it.
FREQS_FOR_FLOOR = 8
# Spectra of noise that p is compared with: the smallest p is one of 2,001.
DRAWS = 2000


@dataclass(frozen=True, eq=False)
class Rhythm:
    """What a node's spectrum says.

    Attributes
    ----------
    node : which node
    periods : a row per frequency that stands out, strongest first: k, period_steps, period, energy,
        times_floor, p_value (for the number of frequencies: that noise reaches it at any)
    similar : nodes with the most similar rhythm: node_id, (space,) similarity
    """

    node: Node
    periods: pl.DataFrame
    similar: pl.DataFrame


def find_rhythm(run: PublishedRun, node: object, k: int = 10, space: str | None = None) -> Rhythm:
    """Return the periods of a node, and the k nodes whose rhythm is most like its own.

    Parameters
    ----------
    run
        A run with the output ``spectrum``.
    node
        Its id.
    k
        How many similar nodes.
    space
        Where the id is, if both sides of the graph have it.
    """
    spectrum = run.vectors("spectrum")
    found = find_node(run, node, space)
    energies = read_nodes(spectrum, [found.row])[0].astype(np.float64)
    chance, floor = rhythm_chances(energies, run.n_steps)
    strong = np.flatnonzero(chance < CHANCE)
    strong = strong[np.argsort(-energies[strong], kind="stable")]
    periods = run.n_steps / np.maximum(strong, 1)
    table = pl.DataFrame(
        {
            "k": strong,
            "period_steps": periods,
            "period": [name_period(period, run.grid) for period in periods],
            "energy": energies[strong],
            "times_floor": energies[strong] / floor if floor > 0 else np.full(len(strong), np.inf),
            "p_value": chance[strong],
        },
        schema_overrides={"period": pl.String},
    )
    if not excess(energies[None]).any():
        rows, scores = np.empty(0, np.int64), np.empty(0)
    else:
        rows, scores = search(spectrum.blocks(), energies, k, "cosine", without=found.row, prepare=excess)
    return Rhythm(found, table, describe_rows(run, rows, similarity=scores))


def excess(energies: Vectors) -> Vectors:
    """Return what stands above each node's own floor, the median over k > 0, without the zero frequency."""
    others = energies[:, 1:].astype(np.float32)
    if not others.shape[1]:
        return np.zeros((len(others), 1), np.float32)
    return np.asarray(np.maximum(others - np.median(others, axis=1, keepdims=True), 0))


def rhythm_chances(energies: NDArray[np.float64], n_steps: int) -> tuple[NDArray[np.float64], float]:
    """Return, for every frequency, the chance that noise reaches its energy at any of them; and the floor.

    Of unrelated events |X_k|² is a sum of squares of sines and cosines: Gamma distributed over k > 0. Its
    mean and shape follow from the median and the MAD of the node's own energies, so that peaks do not count
    as noise. A few dozen energies tell both only roughly: p is therefore the share of spectra drawn from that
    Gamma, and judged in the same way, in which any frequency stands out as much; 1 at k = 0. (Without the
    draws, graphs without a rhythm had p < .05 three times too often: `benchmarks/calibration.py`.)
    """
    others = energies[1:]
    floor = float(np.median(others)) if len(others) else 0.0
    found = np.ones(len(energies))
    if len(others) < FREQS_FOR_FLOOR or floor <= 0:
        return found, floor
    halved = n_steps % 2 == 0
    chance, shape = _single_chances(others[None], halved)
    noise = np.random.default_rng(0).gamma(shape[0], 1 / shape[0], size=(DRAWS, len(others)))
    best = np.sort(_single_chances(noise, halved)[0].min(axis=1))
    found[1:] = (np.searchsorted(best, chance[0], side="right") + 1) / (DRAWS + 1)
    return found, floor


def _single_chances(spectra: NDArray[np.float64], halved: bool) -> tuple[NDArray[np.float64], ...]:
    """Return the tail of the Gamma of each spectrum (a row) at each frequency, and the Gamma's shapes."""
    # For the start-up time of the other questions.
    from scipy.special import gammaincc

    floor = np.median(spectra, axis=1, keepdims=True)
    deviation = 1.4826 * np.median(np.abs(spectra - floor), axis=1, keepdims=True)
    # Rounding error of a spectrum that is exactly flat is no rhythm.
    deviation = np.maximum(deviation, 1e-6 * floor)
    shape = np.broadcast_to(np.maximum((floor / deviation) ** 2, 0.5), spectra.shape).copy()
    if halved:
        shape[:, -1] /= 2  # a real slice has half the degrees of freedom
    return np.asarray(gammaincc(shape, shape * spectra / floor), dtype=np.float64), shape
