"""Who must not come back: ids that were erased from a folder of runs, as keyed hashes, and what was done.

    OUT/forgotten.json           a random key, and the hash of every id that was erased
    OUT/forgotten/<name>.json    a receipt per erasure; one that is not done yet is finished first

The key lies beside the hashes: whoever may read OUT can try an id, as with any list that must recognise ids.
What they cannot do is read the ids off it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import Field

from toffee_dist.errors import UnfinishedError
from toffee_dist.storage.manifest import FORMAT, FileRecord, Record, read_record, write_record

LIST, RECEIPTS = "forgotten.json", "forgotten"


class Forgotten(Record):
    """forgotten.json: the key, and the hashes of the ids."""

    format: int = FORMAT
    key: str
    digests: tuple[str, ...] = ()

    def digest(self, node_id: object) -> str:
        """Return the hash of an id; a number and its text have the same."""
        return hmac.new(bytes.fromhex(self.key), str(node_id).encode(), hashlib.sha256).hexdigest()

    def added(self, ids: Iterable[object]) -> Self:
        """Return the list with more ids."""
        return self.replaced(digests=tuple(sorted({*self.digests, *map(self.digest, ids)})))

    def find(self, ids: pl.Series) -> NDArray[np.bool_]:
        """Return which ids of a column are on the list."""
        known = set(self.digests)
        distinct = ids.unique()
        hits = [item for item in distinct.to_list() if self.digest(item) in known]
        return ids.is_in(pl.Series(hits, dtype=ids.dtype).implode()).to_numpy()


class ErasedFile(Record):
    """A file of a run before and after, and how many of its rows or entries were erased."""

    name: str
    rows: int
    before: FileRecord
    after: FileRecord


class ErasedRun(Record):
    """A run under its old name and its new one; files that are as they were are not listed."""

    old: str
    new: str
    nodes: int = 0
    files: list[ErasedFile] = Field(default_factory=list)


class Receipt(Record):
    """What an erasure did: what was where, checksums before and after; never an id.

    Attributes
    ----------
    digests
        The hashes of the ids.
    names
        What the ids are called now, in the order of the digests: words without a meaning.
    removed
        Folders that may have named them and were removed, below OUT.
    exports
        Copies that were made of runs with these nodes, which nobody here can change.
    """

    format: int = FORMAT
    state: Literal["writing", "switched", "done"] = "writing"
    begun: str
    finished: str = ""
    digests: tuple[str, ...]
    names: tuple[str, ...]
    runs: list[ErasedRun]
    removed: list[str] = Field(default_factory=list)
    exports: list[dict[str, Any]] = Field(default_factory=list)


def read_forgotten(out: Path) -> Forgotten | None:
    """Return who must not come back; None where nobody was erased."""
    path = out / LIST
    return read_record(path, Forgotten) if path.exists() else None


def forget_ids(out: Path, ids: Iterable[object]) -> Forgotten:
    """Add ids to the list of a folder; return it."""
    known = read_forgotten(out) or Forgotten(key=secrets.token_hex(32))
    changed = known.added(ids)
    if changed != known:
        write_record(out / LIST, changed)
    return changed


def find_unfinished_erasure(out: Path) -> Path | None:
    """Return the receipt of an erasure that was cut short."""
    for path in sorted((out / RECEIPTS).glob("*.json")):
        if read_record(path, Receipt).state != "done":
            return path
    return None


def check_no_erasure(out: Path) -> None:
    """Raise where an erasure was cut short: what follows a run must not bring an id back.

    Raises
    ------
    UnfinishedError
        Which says how to finish it.
    """
    path = find_unfinished_erasure(out)
    if path is not None:
        raise UnfinishedError(
            "an erasure of this folder was cut short",
            got=path.name,
            remedy="Finish it first: toffee forget OUT with the same ids.",
        )
