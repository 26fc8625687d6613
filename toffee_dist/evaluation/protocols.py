"""Which pairs a model is asked about: past and future, positives and negatives, all from the seed.

| protocol | positives | negatives |
|---|---|---|
| ``link-paper`` | the links of the test window, repeated ones repeated | pairs that never link |
| ``link-new`` | pairs of the test window that were never seen before, once each | pairs that never link |
| ``link-hard`` | pairs of the test window, once each | pairs seen before, but not in the test window |

There are as many negatives as positives. A random 75 % of these examples train the classifier, the other 25 %
are what is scored. The embedding is learnt from rows before the test window only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from toffee_dist.errors import ConfigError, InputError
from toffee_dist.evaluation.events import Events, Int64s, pair_keys
from toffee_dist.storage.parquet import scan_parquet

Protocol = Literal["link-paper", "link-new", "link-hard"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
SHARE = 0.75
SPLITS = "splits.json"
FORMAT = 1
# Draws of negatives before we say that there are none.
MAX_DRAWS = 100


@dataclass(frozen=True)
class Split:
    """Rows [0, learn) to learn from, [learn, end) to predict."""

    learn: int
    end: int

    @classmethod
    def test(cls, n_rows: int) -> Split:
        """Cut as the paper does: the first 75 % of the links to learn from."""
        return cls(int(SHARE * n_rows), n_rows)

    @classmethod
    def validation(cls, n_rows: int) -> Split:
        """Cut the learning part the same way: for choosing, without a look at the test part."""
        end = int(SHARE * n_rows)
        return cls(int(SHARE * end), end)


@dataclass(frozen=True, eq=False)
class Examples:
    """Distinct labelled pairs, and how often each stands in the training and in the test part.

    Weights instead of repeated rows: the same classifier and the same scores, for far less work.
    """

    source: Int64s
    target: Int64s
    linked: NDArray[np.int8]
    train: Int64s
    test: Int64s


def check_protocol(name: str) -> Protocol:
    """Return the protocol of this name."""
    for protocol in PROTOCOLS:
        if protocol == name:
            return protocol
    raise ConfigError("protocol", got=repr(name), allowed=", ".join(PROTOCOLS))


def draw_examples(events: Events, split: Split, protocol: Protocol, seed: int) -> Examples:
    """Draw the examples of one seed.

    Raises
    ------
    InputError
        Where the window has no positives, or the graph no negatives.
    """
    rng = np.random.default_rng(seed)
    seen = np.unique(events.keys(slice(0, split.learn)))
    positive = events.keys(slice(split.learn, split.end))
    window = np.unique(positive)
    if protocol == "link-paper":
        negative = _never(events, np.union1d(seen, window), len(positive), rng)
    elif protocol == "link-new":
        positive = np.setdiff1d(window, seen, assume_unique=True)
        negative = _never(events, np.union1d(seen, window), len(positive), rng)
    else:
        quiet = np.setdiff1d(seen, window, assume_unique=True)
        # As many of both as there are of the rarer kind.
        count = min(len(quiet), len(window))
        positive, negative = (rng.choice(pairs, count, replace=False) for pairs in (window, quiet))
    if min(len(positive), len(negative)) < 4:
        raise InputError(
            f"too few pairs for {protocol}",
            got=f"{len(positive)} positives and {len(negative)} negatives in the last quarter of the links",
            allowed="at least 4 of each",
            remedy="Use more data, or another protocol.",
        )
    return _fold(positive, negative, events.n_nodes, rng)


def _never(events: Events, known: Int64s, count: int, rng: np.random.Generator) -> Int64s:
    """Draw pairs that never link, with replacement, no self-loops."""
    n, first = events.n_nodes, events.n_sources
    found = np.empty(0, dtype=np.int64)
    for _ in range(MAX_DRAWS):
        if len(found) >= count:
            break
        i, j = rng.integers(0, n, (2, 2 * count))
        if first is not None:
            i, j = i % first, first + j % (n - first)
        drawn = pair_keys(i[i != j], j[i != j], n, events.directed)
        found = np.append(found, drawn[~np.isin(drawn, known)])
    return found[:count]


def _fold(positive: Int64s, negative: Int64s, n_nodes: int, rng: np.random.Generator) -> Examples:
    keys = np.concatenate([positive, negative])
    linked = np.repeat([1, 0], [len(positive), len(negative)])
    distinct, which = np.unique(keys * 2 + linked, return_inverse=True)
    order = rng.permutation(len(keys))
    cut = int(SHARE * len(keys))
    train, test = (np.bincount(which[part], minlength=len(distinct)) for part in (order[:cut], order[cut:]))
    pair = distinct // 2
    return Examples(pair // n_nodes, pair % n_nodes, (distinct % 2).astype(np.int8), train, test)


class Splits:
    """Examples by protocol and seed, drawn once: from the seed, or from a folder of an earlier evaluation.

    Parameters
    ----------
    events, split
        The graph and its cut.
    folder
        Where examples are kept; None keeps them in memory only. A folder that has splits of the same graph is
        read, and what it lacks is added.
    """

    def __init__(self, events: Events, split: Split, folder: Path | None = None) -> None:
        self.events, self.split, self.folder = events, split, folder
        self._drawn: dict[tuple[str, int], Examples] = {}
        if folder is not None:
            self._check_folder(folder)

    def examples(self, protocol: Protocol, seed: int) -> Examples:
        """Return the examples of a protocol and a seed."""
        key = (protocol, seed)
        if key not in self._drawn:
            path = None if self.folder is None else self.folder / f"{protocol}-{seed:04d}.parquet"
            if path is not None and path.exists():
                self._drawn[key] = _read_examples(path, self.events)
            else:
                self._drawn[key] = draw_examples(self.events, self.split, protocol, seed)
                if path is not None:
                    _write_examples(self._drawn[key], path, self.events.ids)
        return self._drawn[key]

    def _check_folder(self, folder: Path) -> None:
        own = {
            "format": FORMAT,
            "fingerprint": self.events.fingerprint(),
            "learn": self.split.learn,
            "end": self.split.end,
        }
        header = folder / SPLITS
        if header.exists():
            try:
                found: Any = json.loads(header.read_text())
            except ValueError:
                found = "no JSON"
            if found != own:
                raise InputError(
                    f"splits in {folder} are of another graph or cut",
                    got=found,
                    allowed=str(own),
                    remedy="Read the same edges with the same options, or choose another --splits.",
                )
            return
        folder.mkdir(parents=True, exist_ok=True)
        header.write_text(json.dumps(own) + "\n")


def _write_examples(examples: Examples, path: Path, ids: pl.Series) -> None:
    columns = {
        "source": ids.gather(examples.source),
        "target": ids.gather(examples.target),
        "linked": pl.Series(examples.linked),
        "train": pl.Series(examples.train),
        "test": pl.Series(examples.test),
    }
    temporary = path.with_suffix(".tmp")
    pl.DataFrame(columns).write_parquet(temporary)
    temporary.replace(path)


def _read_examples(path: Path, events: Events) -> Examples:
    try:
        table = scan_parquet([path]).collect()
        numbers = pl.DataFrame({"id": events.ids, "row": pl.Series(range(events.n_nodes), dtype=pl.Int64)})
        # Two spaces of nodes may use the same ids.
        middle = events.n_sources
        spaces = {"source": numbers[:middle], "target": numbers if middle is None else numbers[middle:]}
        rows = [
            table.select(pl.col(role).alias("id")).join(
                spaces[role], on="id", how="left", maintain_order="left"
            )["row"]
            for role in ("source", "target")
        ]
        if any(column.null_count() for column in rows):
            raise ValueError("a node that is not in the graph")
        counts: Sequence[Any] = [table[name].to_numpy() for name in ("linked", "train", "test")]
    except (pl.exceptions.PolarsError, pa.ArrowException, OSError, ValueError) as error:
        raise InputError(
            f"cannot read the splits of {path}",
            got=str(error).splitlines()[0],
            allowed="source, target, linked, train, test, as an evaluation writes them",
            remedy="Leave --splits out to draw new ones.",
        ) from None
    return Examples(rows[0].to_numpy(), rows[1].to_numpy(), *counts)
