"""What a live page asks of a run: plain types in and out; every text from outside is checked here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from toffee_dist.errors import ConfigError, ToffeeError
from toffee_dist.report.gather import Facts, gather
from toffee_dist.report.scene import extent, label_step, pack_paths
from toffee_dist.report.write import make_page
from toffee_dist.results.nodes import Node, find_node, find_step
from toffee_dist.results.run import Run
from toffee_dist.storage.vectors import read_node_rows, read_nodes
from toffee_dist.words import show_line

# Neighbours, links and rhythms of an answer; ids that a search finds; letters that it may have.
ROWS, HITS, LETTERS = 8, 8, 500


@dataclass(frozen=True, eq=False)
class Answers:
    """A run that a page asks: each question is a name and a few words of text."""

    run: Run

    @cached_property
    def facts(self) -> Facts:
        """What the page shows, which also says how other nodes are drawn."""
        return gather(self.run.folder, self.run.manifest)

    def page(self) -> str:
        """Return the page."""
        return make_page(self.facts, live=True)

    def answer(self, question: str, words: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
        """Return the status and the answer to a question."""
        questions: dict[str, Callable[[Mapping[str, str]], dict[str, Any]]] = {
            "find": self._find,
            "node": self._node,
            "neighbors": self._neighbors,
            "explain": self._explain,
            "compare": self._compare,
        }
        if question not in questions:
            return 404, {"error": "No such question."}
        try:
            found = questions[question](words)
        except ToffeeError as error:
            return (400 if isinstance(error, ConfigError) else 404), {"error": str(error)}
        return 200, _finite(found)

    def _find(self, words: Mapping[str, str]) -> dict[str, Any]:
        """Return ids that begin with a text, then ids that have it inside."""
        text = _word(words, "text").lower()
        column = pl.col("node_id").cast(pl.String)
        lower = column.str.to_lowercase()
        table = self.run.nodes
        hits: list[str] = []
        for test in (lower.str.starts_with(text), lower.str.contains(text, literal=True)):
            if len(hits) < HITS:
                found = table.collect(table.polars().filter(test).select(column).head(2 * HITS))
                hits += [name for name in found["node_id"] if name not in hits]
        return {"names": hits[:HITS]}

    def _node(self, words: Mapping[str, str]) -> dict[str, Any]:
        """Return a node's facts, and its path in the plane of the page."""
        node = self._lookup(words, "node")
        table = self.run.nodes
        columns = ["degree", "last_step"]
        [row] = table.collect(table.polars().filter(pl.col("row") == node.row).select(columns)).to_dicts()
        last = row["last_step"]
        found: dict[str, Any] = {
            "name": _name(node.node_id, node.space),
            "degree": row["degree"],
            "last": -1 if last is None else last,
            "seen": "" if last is None else label_step(self.run.grid, last),
        }
        nodes = self.facts.nodes
        paths = None if nodes is None else nodes.paths
        if paths is not None:
            Z = read_node_rows(self.run.vectors("trajectory"), [node.row], paths.first)
            if Z.any():
                found["path"] = pack_paths(paths.stage.draw(Z), extent(paths.drawn.points))
        return found

    def _neighbors(self, words: Mapping[str, str]) -> dict[str, Any]:
        node = self._lookup(words, "node")
        found = self.run.neighbors(node.node_id, ROWS, at=self._step(words), space=node.space)
        return {"neighbors": _named(found)}

    def _explain(self, words: Mapping[str, str]) -> dict[str, Any]:
        node = self._lookup(words, "node")
        found = self.run.explain(node.node_id, at=self._step(words), k=ROWS, space=node.space)
        return {
            "about": found.about,
            "links": _named(found.links.table),
            "rhythms": [] if found.rhythms is None else found.rhythms.table.head(4).to_dicts(),
            "rest_share": found.rest_share,
        }

    def _compare(self, words: Mapping[str, str]) -> dict[str, Any]:
        """Return the cosine of two nodes' vectors, and the model's score of a link where it has one."""
        one, two = self._lookup(words, "one"), self._lookup(words, "two")
        step = self._step(words)
        table = self.run.vectors("embedding" if step is None else "trajectory")
        a, b = read_nodes(table, [one.row, two.row], step).astype(np.float64)
        length = float(np.linalg.norm(a) * np.linalg.norm(b))
        try:
            [score] = self.run.score([one.node_id], [two.node_id], step)
        except ToffeeError:
            score = math.nan  # Not every run has one; of two sides of a graph, not every pair.
        return {"cosine": float(a @ b) / length if length > 0 else None, "score": float(score)}

    def _lookup(self, words: Mapping[str, str], name: str) -> Node:
        """Return the node of an id, or of a name as the page shows it."""
        text = _word(words, name)
        if not self.run.manifest.config.bipartite:
            return find_node(self.run, text)
        space, _, rest = text.partition(" ")
        if space in ("source", "target") and rest:
            return find_node(self.run, rest, space)
        return find_node(self.run, text)

    def _step(self, words: Mapping[str, str]) -> int | None:
        return find_step(self.run.grid, _word(words, "at")) if words.get("at") else None


def _word(words: Mapping[str, str], name: str) -> str:
    text = words.get(name, "")
    if not text or len(text) > LETTERS:
        raise ConfigError(
            name,
            got=f"{len(text):,} letters",
            allowed=f"1 to {LETTERS}",
            remedy="Ask with a shorter text." if text else "Say which.",
        )
    return text


def _name(node_id: object, space: str | None) -> str:
    return show_line(str(node_id) if space is None else f"{space} {node_id}")


def _named(frame: pl.DataFrame) -> list[dict[str, Any]]:
    """Return rows whose ids are names as the page shows them."""
    rows = frame.to_dicts()
    return [row | {"name": _name(row.pop("node_id"), row.pop("space", None))} for row in rows]


def _finite(found: dict[str, Any]) -> dict[str, Any]:
    """Return plain types without what JSON does not have: NaN becomes nothing."""
    read: dict[str, Any] = json.loads(json.dumps(found, default=str), parse_constant=lambda _: None)
    return read
