"""Hand the vectors of a run on to other programs, block after block; a file appears whole or not at all.

========== ================================================== ================================================
format     what is written                                    read by
========== ================================================== ================================================
word2vec   one text file: ``n r``, then an id and its numbers gensim, TensorBoard, …
numpy      a folder: vectors.npy, ids.npy (spaces.npy)        ``numpy.load``
faiss      the same with vectors of length 1                  ``IndexFlatIP``: inner product is the cosine
duckdb     a script of views on the Parquet files             ``duckdb -init FILE``
pgvector   a script with a table and COPY                     ``psql -f FILE``
parquet, delta, lance, feast: tables that grow by a snapshot per run, see `lakes`
========== ================================================== ================================================

Every one says which space its vectors are in: in a column, a record beside the file, or a check of the
database.
"""

from __future__ import annotations

import glob
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import polars as pl
from numpy.typing import NDArray

from toffee_dist.errors import ConfigError, InputError
from toffee_dist.results.lakes import GROWING, LAKES
from toffee_dist.results.nodes import choose_output, find_nodes
from toffee_dist.results.published import PublishedRun
from toffee_dist.results.snapshots import take_snapshot
from toffee_dist.settings import VectorLists
from toffee_dist.storage.exports import note_export
from toffee_dist.storage.files import ArrayWriter, replacing, write_json
from toffee_dist.storage.spaces import SPACE_COLUMN
from toffee_dist.storage.vectors import VectorBlock, Vectors, VectorTable, map_blocks, read_nodes
from toffee_dist.words import show_line

Format = Literal["word2vec", "numpy", "faiss", "duckdb", "pgvector", "parquet", "delta", "lance", "feast"]
_COPY_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\b": "\\b", "\f": "\\f", "\v": "\\v"}


@dataclass(frozen=True)
class Selection:
    """Which vectors of a run: those of an output, and of a trajectory those of a step."""

    run: PublishedRun
    table: VectorTable
    step: int | None

    @property
    def id_columns(self) -> list[str]:
        """The columns that name a node."""
        schema = self.run.nodes.schema()
        return [name for name in ("node_id", "space") if name in schema]

    def blocks(self) -> Iterator[tuple[pl.DataFrame, Vectors]]:
        """Yield ids and vectors of the nodes, in the order of rows."""
        nodes = self.run.nodes.polars().select(self.id_columns)

        def read(block: VectorBlock) -> tuple[pl.DataFrame, Vectors]:
            ids = self.run.nodes.collect(nodes.slice(block.first, block.stop - block.first))
            return ids, np.ascontiguousarray(block.read(), dtype=np.float32)

        yield from map_blocks(
            read, (block for block in self.table.blocks(self.step) if block.stop > block.first)
        )


def export_run(
    run: PublishedRun,
    form: str,
    to: Path,
    *,
    at: int | str | None = None,
    role: str = "source",
    steps: bool = False,
    vectors: VectorLists | None = None,
) -> list[Path]:
    """Write the vectors of a run in another program's format; return the files.

    Parameters
    ----------
    run
        A published run.
    form
        ``word2vec``, ``numpy``, ``faiss``, ``duckdb``, ``pgvector``, ``parquet``, ``delta``, ``lance`` or
        ``feast``.
    to
        A file, or for ``numpy``, ``faiss``, ``delta``, ``lance`` and ``feast`` a folder. What is there
        already is not overwritten; tables of the last three grow by the snapshot of this run.
    at
        A step or a moment: the vectors of the trajectory then.
    role
        ``source`` or ``target``, of directed graphs.
    steps
        Of the last four: a row per node and step.
    vectors
        Of the last four: lists of ``fixed`` size, or plain ones (``list``). Default: as the format has it,
        plain for ``delta`` and ``feast``.
    """
    if form not in get_args(Format):
        raise ConfigError(
            "format", got=repr(form), allowed=", ".join(get_args(Format)), remedy="Choose one of them."
        )
    if to.exists() and form not in GROWING:
        raise ConfigError(
            "export",
            got=f"{to}, which exists",
            allowed="a new name",
            remedy="Choose another --to, or remove it.",
        )
    if not to.absolute().parent.is_dir():
        raise ConfigError(
            "export",
            got=f"{to}: no such folder",
            allowed="a name in a folder that exists",
            remedy=f"Make it first: mkdir -p {to.parent}",
        )
    if form not in LAKES and (steps or vectors is not None):
        raise ConfigError(
            "--steps" if steps else "--vectors",
            got=f"format {form}",
            allowed=f"of the formats {', '.join(LAKES)}",
            remedy="Leave it out, or choose one of these formats.",
        )
    note_export(run.folder, form, to)
    if form in LAKES:
        lists: VectorLists = vectors or ("list" if form in ("delta", "feast") else "fixed")
        return LAKES[form](take_snapshot(run, at, role, steps=steps, lists=lists), to)
    if form == "duckdb":
        return _write_duckdb(run, to)
    output, step = choose_output(run, at, role)
    # An output that the run lacks is refused before anything is written.
    return _WRITERS[form](Selection(run, run.vectors(output), step), to)


def _refuse_nul(form: str, *columns: pl.Series) -> None:
    """Raise where an id has a NUL, which many programs take for its end: two nodes would become one."""
    for column in columns:
        odd = (
            column.filter(column.str.contains("\0", literal=True))
            if column.dtype == pl.String
            else column[:0]
        )
        if len(odd):
            raise InputError(
                f"an id that {form} cannot hold",
                got=repr(odd[0]),
                allowed="ids without the character NUL",
                remedy="Use --format duckdb, or rename the node in the input.",
            )


def _write_word2vec(chosen: Selection, to: Path) -> list[Path]:
    rank = chosen.run.rank
    with replacing(to) as temporary, temporary.open("wb") as file:
        file.write(f"{chosen.run.n_nodes} {rank}\n".encode())
        for ids, vectors in chosen.blocks():
            # Two spaces of nodes have names of their own: source/7, target/7.
            names = ids.select(pl.concat_str(pl.col(reversed(ids.columns)), separator="/"))[
                "space" if ids.width > 1 else "node_id"
            ]
            _refuse_nul("word2vec text", names)
            odd = names.filter(names.str.contains(r"\s") | (names == ""))
            if len(odd):
                raise InputError(
                    "an id that word2vec text cannot hold",
                    got=repr(odd[0]),
                    allowed="ids without spaces or line breaks",
                    remedy="Use --format numpy or pgvector.",
                )
            frame = pl.DataFrame(vectors, schema=[f"v{c}" for c in range(rank)])
            frame = frame.insert_column(0, names.alias("name"))
            frame.write_csv(file, separator=" ", include_header=False, quote_style="never")
    # The format has no place for it.
    beside = to.with_name(f"{to.name}.json")
    write_json(beside, _describe(chosen))
    return [to, beside]


def _describe(chosen: Selection) -> dict[str, Any]:
    """Return what a matrix of vectors is of, for the record beside it."""
    of = {"run_id": chosen.run.manifest.run_id, "output": chosen.table.output, "step": chosen.step}
    return {"space_id": chosen.table.space_id, **of, "rank": chosen.run.rank, "nodes": chosen.run.n_nodes}


def _write_numpy(
    chosen: Selection, to: Path, scale: Callable[[Vectors], Vectors] = lambda v: v
) -> list[Path]:
    run = chosen.run
    temporary = to.with_name(f".{to.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir()
    try:
        with ArrayWriter(temporary / "vectors.npy", "<f4", (run.n_nodes, run.rank)) as writer:
            for _, vectors in chosen.blocks():
                writer.append(scale(vectors))
        for name in chosen.id_columns:
            column = run.nodes.polars().select(name)
            dtype = _array_type(run, column, name)
            path = temporary / f"{'ids' if name == 'node_id' else 'spaces'}.npy"
            with ArrayWriter(path, dtype, (run.n_nodes,)) as writer:
                for start in range(0, run.n_nodes, 1 << 18):
                    part = run.nodes.collect(column.slice(start, 1 << 18))[name]
                    # Text of fixed width is filled up with NULs.
                    _refuse_nul("a NumPy array", part)
                    writer.append(np.asarray(part.to_list(), dtype=dtype))
        write_json(temporary / "space.json", _describe(chosen))
        temporary.rename(to)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(to.iterdir())


def _array_type(run: PublishedRun, column: pl.LazyFrame, name: str) -> np.dtype[Any]:
    """Return the type of ids as NumPy holds them: integers, or text as wide as the longest."""
    dtype = run.nodes.schema()[name]
    if dtype != pl.String:
        return np.dtype("<i8") if dtype.is_signed_integer() else np.dtype("<u8")
    longest = run.nodes.collect(column.select(pl.col(name).str.len_chars().max())).item()
    return np.dtype(f"<U{max(longest or 1, 1)}")


def _unit_length(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0))


def _write_faiss(chosen: Selection, to: Path) -> list[Path]:
    return _write_numpy(chosen, to, _unit_length)


def _write_duckdb(run: PublishedRun, to: Path) -> list[Path]:
    """Write views: nothing is copied, DuckDB reads the Parquet files of the run."""
    tables = {"nodes": run.nodes, "steps": run.steps, "fit": run.fit}
    tables |= {name: run.table(name) for name in run.manifest.outputs if "/" not in name}
    # A comment ends with its line, whatever comes after is SQL.
    lines = [f"-- {show_line(run.manifest.run_id)}, space {run.space_id}: views on its Parquet files."]
    for name, table in tables.items():
        files = ", ".join(_literal(glob.escape(str(file))) for file in table.files)
        columns = "*"
        if table.vectors is not None and SPACE_COLUMN not in table.schema():
            # Of a run that was made before spaces had ids.
            columns = f"*, {_literal(table.vectors.space_id)} AS {SPACE_COLUMN}"
        view = f"CREATE OR REPLACE VIEW {_name(name)} AS SELECT {columns}"
        lines.append(f"{view} FROM read_parquet([{files}]);")
    with replacing(to) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [to]


def _literal(text: str) -> str:
    """Return text as SQL has it, with control characters as escapes: no line begins within."""
    if text == show_line(text):
        return "'" + text.replace("'", "''") + "'"
    plain = (
        chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in text.encode()
    )
    return f"e'{''.join(plain)}'"


def _name(text: str) -> str:
    """Return a name as SQL has it."""
    return '"' + text.replace('"', '""') + '"'


def _write_pgvector(chosen: Selection, to: Path) -> list[Path]:
    """Write a script that makes a table and fills it by COPY, in COPY's text format."""
    run = chosen.run
    dtype = run.nodes.polars().collect_schema()["node_id"]
    kind = "text" if dtype == pl.String else "bigint" if dtype.is_signed_integer() else "numeric(20)"
    names = chosen.id_columns
    columns = [f"node_id {kind} NOT NULL", *(["space text NOT NULL"] if "space" in names else [])]
    table, space = "toffee_" + re.sub(r"\W", "_", chosen.table.output), chosen.table.space_id
    # Where a statement fails, psql goes on with the next line, and what was data becomes commands: it must
    # stop at the first failure. In a transaction, nothing stays of a script that did not reach its end.
    head = [
        "\\set ON_ERROR_STOP on",
        # In some encodings a letter's second byte is a backslash.
        "SET client_encoding = 'UTF8';",
        "BEGIN;",
        "CREATE EXTENSION IF NOT EXISTS vector;",
        f"CREATE TABLE {table} (",
        "    " + ", ".join([*columns, f"embedding vector({run.rank}) NOT NULL"]) + ",",
        # Rows of another space are refused by the database itself.
        f"    space_id text NOT NULL DEFAULT '{space}' CHECK (space_id = '{space}'),",
        f"    PRIMARY KEY ({', '.join(names)})",
        ");",
        f"COPY {table} ({', '.join(names)}, embedding) FROM stdin;",
    ]
    with replacing(to) as temporary, temporary.open("wb") as file:
        file.write(("\n".join(head) + "\n").encode())
        for ids, vectors in chosen.blocks():
            _refuse_nul("PostgreSQL", *ids)
            numbers = pl.DataFrame(vectors, schema=[f"v{c}" for c in range(run.rank)])
            joined = numbers.select(
                pl.concat_str(pl.lit("["), pl.concat_str(pl.all(), separator=","), pl.lit("]")).alias("v")
            )
            texts = pl.col(pl.String).str.replace_many(list(_COPY_ESCAPES), list(_COPY_ESCAPES.values()))
            lines = ids.with_columns(texts) if pl.String in ids.dtypes else ids
            lines = lines.with_columns(joined["v"])
            lines.write_csv(file, separator="\t", include_header=False, quote_style="never")
        file.write(b"\\.\nCOMMIT;\n")
    return [to]


_WRITERS: dict[str, Callable[[Selection, Path], list[Path]]] = {
    "word2vec": _write_word2vec,
    "numpy": _write_numpy,
    "faiss": _write_faiss,
    "pgvector": _write_pgvector,
}


def temporal_arrays(
    run: PublishedRun, sources: Sequence[object], targets: Sequence[object], ticks: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    """Return events as PyTorch Geometric's `TemporalData` takes them, with vectors as messages.

    The message of an event is the vector of its source, then that of its target: one vector per node
    (directed graphs: in its role). Memory is that of the events.

    Parameters
    ----------
    run
        A published run with an embedding.
    sources, targets
        Ids of the nodes of each event.
    ticks
        Its time.

    Returns
    -------
    ``src``, ``dst``, ``t``: (events,) int64; ``msg``: (events, 2·rank) float32

    Examples
    --------
    >>> arrays = temporal_arrays(run, source, target, time)  # doctest: +SKIP
    >>> TemporalData(**{k: torch.from_numpy(a) for k, a in arrays.items()})  # doctest: +SKIP
    """
    spaces = ("source", "target") if run.manifest.config.bipartite else (None, None)
    src, dst = (
        np.array([node.row for node in find_nodes(run, list(names), space)], dtype=np.int64)
        for names, space in zip((sources, targets), spaces, strict=True)
    )
    if not len(src) == len(dst) == len(ticks):
        raise InputError(
            "events",
            got=f"{len(src)} sources, {len(dst)} targets, {len(ticks)} times",
            allowed="equal lengths",
            remedy="Give one source, one target and one time per event.",
        )
    other = "embedding_target" if run.manifest.directed else "embedding"
    messages = np.hstack([read_nodes(run.vectors("embedding"), src), read_nodes(run.vectors(other), dst)])
    return {"src": src, "dst": dst, "t": np.asarray(ticks, np.int64), "msg": messages.astype(np.float32)}
