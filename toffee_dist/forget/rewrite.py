"""One run without some of its nodes: a new version of its folder, file by file.

The rows stay, so that nobody else's row changes: a row that is erased has a name without a meaning, zeros for
vectors and counts, and nothing for moments. Files that do not name the nodes are linked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from toffee_dist.storage import parquet
from toffee_dist.storage.changes import ChangesRecord, CommunityChange
from toffee_dist.storage.compact import ARRAYS, HEADER, PATTERNS, CompactHeader, array_of
from toffee_dist.storage.files import link_or_copy, map_array, read_array, read_json, save_array, write_json
from toffee_dist.storage.manifest import Drift, Manifest, read_record, write_record
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.spaces import SPACE_COLUMN

# Columns that say what a row is of, and so stay.
PLACES = ("row", "space", "step", "k", SPACE_COLUMN)
IDS = ("id", "node_id")
# Columns of which zero would say something: of an erased row there is nothing.
NO_ZERO = ("p_value",)


@dataclass(frozen=True)
class Erasing:
    """What is erased of one run.

    Parameters
    ----------
    names
        What each id, as text, is called from now on: a word, and a number for runs whose ids are numbers.
    rows
        The rows of these nodes.
    """

    names: Mapping[str, tuple[str, int]]
    rows: NDArray[np.int64]

    def rename(self, ids: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
        """Return a column of ids with their new names, and where they were."""
        text = not pa.types.is_integer(ids.type)
        old = pa.array([name if text else int(name) for name in self._of(ids.type)], ids.type)
        new = pa.array([names[0] if text else names[1] for names in self._of(ids.type).values()], ids.type)
        at = pc.index_in(ids, value_set=old)
        found = np.asarray(pc.is_valid(at))
        if not found.any():
            return ids, found
        return pc.if_else(pa.array(found), pc.take(new, pc.fill_null(at, 0)), ids), found

    def _of(self, type: pa.DataType) -> dict[str, tuple[str, int]]:
        """Return the ids that a column of this type can hold."""
        if not pa.types.is_integer(type):
            return dict(self.names)
        low, high = (-(2**63), 2**63 - 1) if pa.types.is_signed_integer(type) else (0, 2**64 - 1)
        numbers = {name: names for name, names in self.names.items() if re.fullmatch(r"-?\d+", name)}
        return {
            name: (word, number if low < 0 else number + 2**63 + 2**62)
            for name, (word, number) in numbers.items()
            if low <= int(name) <= high and str(int(name)) == name
        }


def find_rows(run: RunFolder, names: Mapping[str, tuple[str, int]]) -> NDArray[np.int64]:
    """Return the rows that some ids have in a run."""
    erasing, rows = Erasing(names, np.empty(0, np.int64)), [np.empty(0, np.int64)]
    with parquet.reading(run.nodes), parquet.open_parquet(run.nodes) as file:
        for batch in file.iter_batches(parquet.GROUP_ROWS, columns=["node_id", "row"]):
            batch.validate(full=True)
            _, found = erasing.rename(batch.column(0))
            rows.append(batch.column(1).to_numpy()[found])
    return np.concatenate(rows)


def rewrite_table(path: Path, to: Path, erasing: Erasing, *, remove: bool = False) -> int:
    """Write a table without what it says of some nodes; return how many rows that were, 0: it is linked.

    Parameters
    ----------
    path, to
        The table, and where it goes.
    erasing
        The nodes.
    remove
        Whether their rows go too: where a node has rows for some steps only, these tell when it was active.
    """
    with parquet.reading(path), parquet.open_parquet(path) as file:
        key = next((name for name in IDS if name in file.schema_arrow.names), None)
        if key is None or not _names_any(file, key, erasing):
            link_or_copy(path, to)
            return 0
        erased = 0

        def tables() -> Iterator[pa.Table]:
            nonlocal erased
            for batch in file.iter_batches(parquet.GROUP_ROWS):
                batch.validate(full=True)
                ids, found = erasing.rename(batch.column(key))
                erased += int(found.sum())
                columns = {
                    name: ids
                    if name == key
                    else column
                    if name in PLACES
                    else erase(column, found, nothing=name in NO_ZERO)
                    for name, column in zip(batch.schema.names, batch.columns, strict=True)
                }
                table = pa.table(columns, schema=file.schema_arrow)
                yield table.filter(pa.array(~found)) if remove else table

        parquet.write_stream(to, tables())
    return erased


def _names_any(file: Any, key: str, erasing: Erasing) -> bool:
    for batch in file.iter_batches(parquet.GROUP_ROWS, columns=[key]):
        batch.validate(full=True)
        if erasing.rename(batch.column(0))[1].any():
            return True
    return False


def erase(column: pa.Array, where: NDArray[np.bool_], *, nothing: bool = False) -> pa.Array:
    """Return a column with zeros in some rows, or nothing where its type has no zero or that is asked for."""
    if not where.any():
        return column
    if pa.types.is_fixed_size_list(column.type):
        width = column.type.list_size
        numbers = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, width).copy()
        numbers[where] = 0
        return pa.FixedSizeListArray.from_arrays(pa.array(np.ravel(numbers)), type=column.type)
    if nothing:
        return pc.if_else(pa.array(where), pa.scalar(None, column.type), column)
    if pa.types.is_list(column.type):
        offsets = column.offsets.to_numpy()
        numbers = column.flatten().to_numpy(zero_copy_only=False).copy()
        numbers[np.repeat(where, np.diff(offsets))] = 0
        lists = pa.ListArray.from_arrays(pa.array(offsets - offsets[0]), pa.array(numbers))
        return lists.cast(column.type)
    plain = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    # Whoever has no vector is cold, and that is all that is said of anybody by yes or no.
    zero = True if pa.types.is_boolean(column.type) else 0 if plain else None
    return pc.if_else(pa.array(where), pa.scalar(zero, column.type), column)


def rewrite_compact(folder: Path, to: Path, rows: NDArray[np.int64]) -> int:
    """Write a compact trajectory without the entries of some rows, as sources and as targets; return them."""
    header = read_record(folder / HEADER, CompactHeader)
    gone, dropped = np.zeros(header.cuts[-1], bool), 0
    gone[rows] = True
    activity = read_array(folder / "activity.npy").copy()
    for block, (first, last) in enumerate(pairwise(header.cuts)):
        arrays = {name: map_array(array_of(folder, block, name)) for name in ARRAYS}
        counts = np.diff(arrays["starts"])
        source = np.repeat(np.arange(first, last), counts)
        keep = ~(gone[source] | gone[arrays["target"]])
        basis = np.array(arrays["basis"])
        basis[gone[first:last]] = 0
        own = np.bincount(source[keep] - first, minlength=last - first)
        starts = np.concatenate([[0], np.cumsum(own)]).astype(np.int64)
        dropped += int((~keep).sum())
        activity -= np.bincount(arrays["step"][~keep], minlength=len(activity)).astype(activity.dtype)
        written = {name: arrays[name][keep] for name in ("target", "step", "value")}
        for name, array in {"starts": starts, **written, "basis": basis}.items():
            save_array(array_of(to, block, name), array)
    save_array(to / "activity.npy", np.maximum(activity, 0))
    # Runs of earlier versions have no patterns.
    there = (name for name in PATTERNS if (folder / name).exists())
    for name in ("kernel.npy", "pairs.npy", *there, HEADER):
        link_or_copy(folder / name, to / name)
    return dropped


def rewrite_changes(path: Path, to: Path, erasing: Erasing) -> int:
    """Write an alert file without some nodes; return how often they were named."""
    record, named = read_record(path, ChangesRecord), 0

    def hidden(members: list[Any]) -> list[Any]:
        nonlocal named
        kept = [member for member in members if str(member) not in erasing.names]
        named += len(members) - len(kept)
        return kept

    def communities(tests: list[CommunityChange]) -> list[CommunityChange]:
        return [test.replaced(members=hidden(test.members)) for test in tests]

    nodes = [node for node in record.nodes if str(node.node_id) not in erasing.names]
    named += len(record.nodes) - len(nodes)
    changed = record.replaced(
        nodes=nodes,
        found=max(record.found - (len(record.nodes) - len(nodes)), len(nodes)),
        communities=communities(record.communities),
        tests=record.tests.replaced(communities=communities(record.tests.communities)),
    )
    write_record(to, changed)
    return named


def rewrite_rows(path: Path, to: Path, rows: NDArray[np.int64]) -> int:
    """Write an array of a row per node with zeros for some rows; return how many."""
    array = np.array(read_array(path))
    array[rows[rows < len(array)]] = 0
    save_array(to, array)
    return len(rows)


def rewrite_json(path: Path, to: Path, names: Mapping[str, Any]) -> int:
    """Write a JSON file without what it says of some nodes; return how many places, 0: it is linked."""
    found, erased = read_json(path), 0

    def without(value: Any) -> Any:
        nonlocal erased
        if isinstance(value, dict):
            return {key: without(item) for key, item in value.items()}
        if isinstance(value, list):
            stays = [item for item in value if not _is_of(item, names)]
            erased += len(value) - len(stays)
            return [without(item) for item in stays]
        if isinstance(value, str):
            hidden = hide_names(value, names)
            erased += hidden != value
            return hidden
        return value

    changed = without(found)
    if erased:
        write_json(to, changed)
    else:
        link_or_copy(path, to)
    return erased


def _is_of(item: Any, names: Mapping[str, Any]) -> bool:
    """Whether an item of a list is about one of the nodes."""
    return isinstance(item, dict) and any(str(item.get(key)) in names for key in IDS)


def rewrite_manifest(manifest: Manifest, erasing: Erasing, runs: Mapping[str, str]) -> Manifest:
    """Return a manifest that names none of the nodes, and runs by their new names."""
    hidden = _pattern(erasing.names)
    summary = manifest.summary.replaced(
        examples=[text for text in manifest.summary.examples if not hidden.search(text)]
    )
    refresh = manifest.refresh
    if refresh is not None:
        refresh = refresh.replaced(
            previous=runs.get(refresh.previous, refresh.previous),
            reference=runs.get(refresh.reference, refresh.reference),
            drift=[_rewrite_drift(drift, erasing, runs) for drift in refresh.drift],
            reasons=[hide_names(text, erasing.names) for text in refresh.reasons],
        )
    return manifest.replaced(run_id=runs[manifest.run_id], summary=summary, refresh=refresh)


def _rewrite_drift(drift: Drift, erasing: Erasing, runs: Mapping[str, str]) -> Drift:
    movers = [mover for mover in drift.movers if str(mover.node_id) not in erasing.names]
    return drift.replaced(earlier=runs.get(drift.earlier, drift.earlier), movers=movers)


def hide_names(text: str, names: Mapping[str, Any]) -> str:
    """Return text without ids.

    Examples
    --------
    >>> hide_names("no room for 'alice'; alices stay", {"alice": ""})
    "no room for 'a forgotten node'; alices stay"
    """
    return _pattern(names).sub("a forgotten node", text)


def _pattern(names: Mapping[str, Any]) -> re.Pattern[str]:
    words = "|".join(re.escape(form) for name in names for form in {name, repr(name)[1:-1]})
    return re.compile(rf"(?<!\w)(?:{words})(?!\w)")
