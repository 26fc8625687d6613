"""How fast the models that learn from neighbourhoods are: the compiled loops beside plain ones, in one run.

CTDNE: walks and skip-gram against a loop in Python and NumPy as gensim's slow path has it. HTNE: one epoch
against a straightforward NumPy loop over the links. One thread; the plain loops do a share of the work, which
is scaled up; compiling is told apart. The last line is JSON.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from evaluate import SOURCES, read
from report import one_thread, print_json, print_table

from toffee_dist.evaluation.protocols import Split
from toffee_dist.kernels.hawkes import train_hawkes
from toffee_dist.kernels.skipgram import train_skipgram
from toffee_dist.kernels.walks import TimedLinks, draw_walks


def plain_walk(links: TimedLinks, rng: np.random.Generator, length: int) -> list[int]:
    """Draw one walk, link by link."""
    link = int(rng.integers(len(links.targets)))
    nodes, now = [int(links.sources[link]), int(links.targets[link])], links.steps[link]
    while len(nodes) < length:
        start, stop = links.ends[nodes[-1]], links.ends[nodes[-1] + 1]
        start += np.searchsorted(links.steps[start:stop], now, side="right")
        if start == stop:
            break
        link = int(rng.integers(start, stop))
        nodes.append(int(links.targets[link]))
        now = links.steps[link]
    return nodes


def plain_skipgram(walks: list[list[int]], n: int, rank: int, window: int, negatives: int) -> None:
    """One epoch of skip-gram, one NumPy update per pair, negatives at once."""
    rng = np.random.default_rng(0)
    inner = ((rng.random((n, rank)) - 0.5) / rank).astype(np.float32)
    outer = np.zeros((n, rank), np.float32)
    counts = np.bincount(np.concatenate(walks), minlength=n) ** 0.75
    cumulative = np.cumsum(counts / counts.sum())
    for nodes in walks:
        for i, node in enumerate(nodes):
            reach = int(rng.integers(1, window + 1))
            for j in range(max(0, i - reach), min(len(nodes), i + reach + 1)):
                if j == i:
                    continue
                drawn = np.searchsorted(cumulative, rng.random(negatives))
                targets = np.append(node, np.minimum(drawn[drawn != node], n - 1))
                u, V = inner[nodes[j]], outer[targets]
                g = (0.025 * ((np.arange(len(targets)) == 0) - 1 / (1 + np.exp(-(V @ u))))).astype(np.float32)
                outer[targets] += np.outer(g, u)
                inner[nodes[j]] += g @ V


def plain_hawkes(links: TimedLinks, rank: int, count: int, history: int, negatives: int) -> None:
    """Stochastic gradients of some links, arrays over candidates and history."""
    n = len(links.ends) - 1
    rng = np.random.default_rng(0)
    V = rng.uniform(-1 / rank, 1 / rank, (n, rank)).astype(np.float32)
    delta = np.ones(n)
    counts = np.bincount(links.targets, minlength=n) ** 0.75
    cumulative = np.cumsum(counts / counts.sum())
    times, rate = links.times, 0.01
    for link in rng.permutation(len(links.targets))[:count]:
        s = links.sources[link]
        own = slice(max(links.ends[s], link - history), link)
        near, gaps = links.targets[own], times[link] - times[own]
        drawn = np.minimum(np.searchsorted(cumulative, rng.random(negatives)), n - 1)
        asked = np.append(links.targets[link], drawn)
        S, H, X = V[s], V[near], V[asked]
        away = S - X
        score = -(away**2).sum(axis=1)
        sides = np.where(np.arange(len(asked)) == 0, 1.0, -1.0)
        if len(near):
            a = np.exp(-((S - H) ** 2).sum(axis=1))
            a /= a.sum()
            kappa = np.exp(-delta[s] * gaps)
            apart = X[:, None] - H[None]
            c = -kappa * (apart**2).sum(axis=2)
            mean = c @ a
            score = score + mean
        g = -sides / (1 + np.exp(sides * score))
        gx = 2 * g[:, None] * away
        gs = -gx.sum(axis=0)
        if len(near):
            through = 2 * g[:, None] * a * kappa
            turn = (2 * (g[:, None] * a * (c - mean[:, None])).sum(axis=0))[:, None] * (S - H)
            gx = gx - (through[:, :, None] * apart).sum(axis=1)
            gh = (through[:, :, None] * apart).sum(axis=0) + turn
            gs = gs - turn.sum(axis=0)
            delta[s] = max(0.0, delta[s] + rate * float((g[:, None] * a * c * gaps).sum()))
            np.subtract.at(V, near, (rate * gh).astype(np.float32))
        V[s] -= (rate * gs).astype(np.float32)
        np.subtract.at(V, asked, (rate * gx).astype(np.float32))


def seconds_of(function: Any) -> float:
    began = time.process_time()
    function()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", default="fb-forum", choices=list(SOURCES))
    parser.add_argument("--share", type=float, default=0.02, help="of the work that the plain loops do")
    arguments = parser.parse_args()
    one_thread()
    events = read(arguments.graph)
    tensor = events.head(Split.test(len(events)).learn).past().tensor
    rank = SOURCES[arguments.graph].rank
    links = TimedLinks.of(tensor)
    n, count = tensor.n_nodes, 10 * tensor.n_nodes

    def walk() -> Any:
        return draw_walks(links, 0, count, length=80, shortest=2, decay=0.0, seed=0)[0]

    compiling = seconds_of(walk)
    ours_walk = seconds_of(walk)
    some = max(50, int(arguments.share * count))
    rng = np.random.default_rng(0)
    plain = [plain_walk(links, rng, 80) for _ in range(some)]
    theirs_walk = seconds_of(lambda: [plain_walk(links, rng, 80) for _ in range(some)]) * count / some

    walks = walk()
    present = walks >= 0
    tokens, lengths = walks[present], present.sum(axis=1)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    def train() -> Any:
        options: Any = {"window": 10, "negatives": 5, "epochs": 1, "rate": 0.025, "seed": 0}
        return train_skipgram(tokens, ends, n, rank, **options)

    compiling += seconds_of(train)
    ours_train = seconds_of(train)
    # By nodes of walks, not by walks: some are longer.
    scale = len(tokens) / sum(map(len, plain))
    theirs_train = seconds_of(lambda: plain_skipgram(plain, n, rank, 10, 5)) * scale

    both = TimedLinks.of(tensor, both_ways=True)

    def hawkes() -> Any:
        options: Any = {"history": 5, "negatives": 10, "epochs": 1, "rate": 0.01, "decaying": True, "seed": 0}
        return train_hawkes(both, rank, **options)

    compiling += seconds_of(hawkes)
    ours_hawkes = seconds_of(hawkes)
    asked = max(200, int(arguments.share * len(both.targets)))
    theirs_hawkes = seconds_of(lambda: plain_hawkes(both, rank, asked, 5, 10)) * len(both.targets) / asked
    rows = [
        ("ctdne walks", ours_walk, theirs_walk),
        ("ctdne skip-gram, an epoch", ours_train, theirs_train),
        ("ctdne, both", ours_walk + ours_train, theirs_walk + theirs_train),
        ("htne, an epoch", ours_hawkes, theirs_hawkes),
    ]
    print_table(
        f"{arguments.graph}, rank {rank}: CPU seconds, one thread; compiling took {compiling:.1f} s once",
        ["", "compiled", "plain", "times"],
        [[name, f"{ours:.3f}", f"{theirs:.1f}", f"{theirs / ours:.0f}"] for name, ours, theirs in rows],
    )
    print_json(
        {
            "ctdne": round((theirs_walk + theirs_train) / (ours_walk + ours_train), 1),
            "htne": round(theirs_hawkes / ours_hawkes, 1),
            "compile_seconds": round(compiling, 1),
        }
    )


if __name__ == "__main__":
    main()
