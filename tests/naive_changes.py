"""Changes by drawing: the steps of events drawn anew, again and again, and every sum as a loop."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def distance(x: Array, steps: Array, share: Array) -> float:
    """D = Σ_t p(t)·‖Σ_{events up to t} x − P(t)·Σ x‖²."""
    found, total = 0.0, x.sum(axis=0)
    for t, p in enumerate(share):
        B = x[steps <= t].sum(axis=0) - share[: t + 1].sum() * total
        found += p * float(B @ B)
    return found


def first_new_step(x: Array, steps: Array, share: Array) -> int:
    """The step after the largest ‖B(t)‖."""
    total = x.sum(axis=0)
    sizes = [
        float(np.square(x[steps <= t].sum(axis=0) - share[: t + 1].sum() * total).sum())
        for t in range(len(share))
    ]
    return int(np.argmax(sizes)) + 1


def drawn_chance(x: Array, steps: Array, activity: Array, draws: int, seed: int) -> float:
    """How often D is as large where the events come at any time: their steps drawn from those of all events.

    `activity` are the events of the others; P is that of all, as it was seen and as it is drawn.
    """
    rng, n_steps = np.random.default_rng(seed), len(activity)
    rate = (activity + np.bincount(steps, minlength=n_steps)) / (activity.sum() + len(steps))

    def seen(steps: Array, others: Array) -> float:
        everything = others + np.bincount(steps, minlength=n_steps)
        return distance(x, steps, everything / everything.sum())

    value, count = seen(steps, activity), 0
    for _ in range(draws):
        others = rng.multinomial(int(activity.sum()), rate)
        count += seen(rng.choice(n_steps, len(steps), p=rate), others) >= value * (1 - 1e-9)
    return (1 + count) / (draws + 1)


def benjamini_hochberg(p: Array, rate: float) -> set[int]:
    """The textbook: the k smallest, k the largest with p_(k) ≤ rate·k/m."""
    order, found = np.argsort(p), 0
    for k in range(1, len(p) + 1):
        if p[order[k - 1]] <= rate * k / len(p):
            found = k
    return set(order[:found].tolist())
