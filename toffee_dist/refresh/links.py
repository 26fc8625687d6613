"""Held-out links: what the vectors of the previous run, and new ones without the last steps, know of them.

Two maps over blocks of nodes: one finds a fair sample of the links, the other the vectors of its nodes. What
is scored is small, whatever the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toffee_dist.batch.write_outputs import OutputFolder, role_of
from toffee_dist.kernels.align import rank_auc
from toffee_dist.kernels.sample import Sample, draw
from toffee_dist.refresh.align import KNOWN
from toffee_dist.storage.earlier import EarlierRows
from toffee_dist.storage.files import read_array, save_array
from toffee_dist.storage.manifest import LinksRecord
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.slices import HELD, ZeroSlice, open_array
from toffee_dist.storage.tensors import open_rows

# Links that are scored at the most.
LINKS = 20_000


@dataclass(frozen=True)
class LinksTask:
    """One block of nodes.

    Parameters
    ----------
    run, previous
        The new run, with the slice that has not seen the held-out steps, and the previous one.
    first_step, holdout
        The first of the held-out steps, and how many they are.
    outputs, zero
        Which roles have vectors, and where those of the new run are.
    bounds, index
        Where rows are cut, and which block.
    seed
        Of the sample and of the pairs without a link.
    """

    run: str
    previous: str
    first_step: int
    holdout: int
    outputs: tuple[OutputFolder, ...]
    zero: ZeroSlice
    bounds: tuple[int, ...]
    seed: int
    index: int = 0

    @property
    def folder(self) -> RunFolder:
        """The new run."""
        return RunFolder.at(self.run)

    @property
    def path(self) -> Path:
        """Where source, target and another target of every sampled link are, a row each."""
        return self.folder.node_stat("links")

    @property
    def vectors(self) -> Path:
        """Where the vectors of the block's nodes among them are."""
        return self.folder.node_stat(f"links-{self.index:05d}")

    def held_out(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return source and target of the pairs of the block that have an entry in the held-out steps."""
        start, stop = self.bounds[self.index], self.bounds[self.index + 1]
        source, target = open_rows(self.folder.staged.tensor, start, stop).pairs_since(self.first_step)
        return source + start, target


def find_links(task: LinksTask) -> Sample:
    """Return a sample of the held-out links of a block between nodes that both runs could know."""
    # An unknown node is no fault of either.
    known = open_array(task.folder.node_stat(KNOWN))
    source, target = task.held_out()
    there = source != target
    for nodes in (source, target):
        own, at = np.unique(nodes, return_inverse=True)
        there &= np.asarray(known[own])[at]
    links = np.stack([source[there], target[there]], axis=1)
    return Sample.of(draw(links[:, 0] * task.bounds[-1] + links[:, 1], task.seed), links, LINKS)


def write_links(task: LinksTask, parts: Sequence[Sample]) -> None:
    """Leave the sample of all blocks, each source also with the target of another link."""
    links = Sample.merge(parts, LINKS).rows
    links = links[np.lexsort((links[:, 1], links[:, 0]))]
    other = np.random.default_rng([task.seed, task.first_step]).permutation(links[:, 1])
    save_array(task.path, np.column_stack([links, other]))


def look_up(task: LinksTask) -> NDArray[np.bool_]:
    """Leave the vectors of the sampled nodes of a block, before and now, in the first and the last role.

    Returns which of its sources have no held-out link to the other target.
    """
    run, links, n = task.folder, read_array(task.path), task.bounds[-1]
    start, stop = task.bounds[task.index], task.bounds[task.index + 1]
    nodes = _nodes(links)
    nodes = nodes[(nodes >= start) & (nodes < stop)]
    # One role or two: the last one is the targets'.
    outputs = (task.outputs[0], task.outputs[-1])
    if len(nodes):
        earlier = EarlierRows(run, RunFolder.at(task.previous))
        before = [earlier.take(output, nodes) for output in outputs]
        now = [task.zero.take_vectors(run.slices, role_of(output), nodes) for output in outputs]
        save_array(task.vectors, np.stack([*before, *now], axis=1), durable=False)
    own = links[(links[:, 0] >= start) & (links[:, 0] < stop)]
    if not len(own):
        return np.zeros(0, dtype=bool)
    source, target = task.held_out()
    linked = np.isin(own[:, 0] * n + own[:, 2], source * n + target)
    return np.asarray((own[:, 0] != own[:, 2]) & ~linked)


def _nodes(links: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.unique(links[:, :2])


def score_links(task: LinksTask, parts: Sequence[NDArray[np.bool_]]) -> LinksRecord:
    """Return the AUC of both, and how many links they were asked for.

    Scores are products of vectors. The pairs without a link have the same sources and the same targets in
    another order: knowing who is busy does not help.
    """
    links, apart = read_array(task.path), np.concatenate(parts)
    found: dict[str, float | None] = {"before": None, "now": None}
    if apart.any():
        nodes = _nodes(links)
        i, j, o = np.searchsorted(nodes, links).T
        holding = np.unique(np.searchsorted(task.bounds, nodes, side="right") - 1)
        blocks = (read_array(replace(task, index=int(index)).vectors) for index in holding)
        vectors = np.concatenate(list(blocks))
        for at, name in enumerate(found):
            E, F = vectors[:, 2 * at], vectors[:, 2 * at + 1]
            yes = np.einsum("ir,ir->i", E[i], F[j], dtype=np.float64)
            no = np.einsum("ir,ir->i", E[i[apart]], F[o[apart]], dtype=np.float64)
            found[name] = rank_auc(yes, no)
    return LinksRecord(links=len(links), steps=task.holdout, **found)


def held_out(zero: ZeroSlice) -> ZeroSlice:
    """Return where the vectors are that have not seen the held-out steps, in the form of those that have."""
    return ZeroSlice(HELD, zero.form)
