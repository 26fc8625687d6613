"""`load_run`: everything a run holds, read lazily, in the form that suits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from toffee_dist import writer
from toffee_dist.errors import InputError
from toffee_dist.store import FORMAT, RunFolder, fetched, find_run, place, read_json
from toffee_dist.timegrid import TimeGrid

if TYPE_CHECKING:
    import pyarrow.dataset as ds

    from toffee_dist.ask import NodeTrajectory, Rhythm
    from toffee_dist.ask.neighbors import Metric, Role


@dataclass(frozen=True)
class Table:
    """A table of a run on storage; nothing is read until it is asked for.

    Parameters
    ----------
    path
        A Parquet file, or a folder of parts.
    shape
        Of `numpy` and `dask`: rows, then the length of a vector; a middle number is what every node has
        (steps, frequencies).
    """

    path: Path
    shape: tuple[int, ...] = ()

    def _repr_html_(self) -> str:
        """Say in a notebook what is there, without reading it."""
        facts = {"file" if self.path.suffix else "folder": self.path, "shape": self.shape or "a table"}
        return html_facts(f"Table {self.path.stem}", facts)

    @property
    def files(self) -> list[Path]:
        """The files, in the order of rows."""
        return sorted(self.path.glob("part-*.parquet")) if self.path.is_dir() else [self.path]

    def arrow(self) -> pa.Table:
        """Return all of it as an Arrow table."""
        return self.dataset().to_table()

    def dataset(self) -> ds.Dataset:
        """Return an Arrow dataset, for filters and batches."""
        return writer.open_dataset(self.files)

    def polars(self) -> pl.LazyFrame:
        """Return a lazy polars frame."""
        return writer.scan_parquet(self.files)

    def pandas(self) -> Any:
        """Return a pandas frame (pandas must be installed)."""
        return self.arrow().to_pandas()

    def numpy(self) -> NDArray[Any]:
        """Return the vectors, in the order of rows: (nodes, rank), or (steps, nodes, rank) over time."""
        out = np.empty(self.shape, dtype=self._vectors(self.files[0], rows=0).dtype)
        at = 0
        for file in self.files:
            part = self._vectors(file)
            out[at : at + len(part)] = part
            at += len(part)
        return out.transpose(1, 0, 2) if len(self.shape) == 3 else out

    def dask(self) -> Any:
        """Return the vectors as a dask array with a chunk a part; the shape is that of `numpy`."""
        import dask.array as da
        from dask import delayed

        chunks = []
        dtype = self._vectors(self.files[0], rows=0).dtype
        per_node = self.shape[1] if len(self.shape) == 3 else 1
        for file in self.files:
            rows = writer.open_dataset([file]).count_rows() // per_node
            read = delayed(self._vectors, pure=True)(file)
            chunks.append(da.from_delayed(read, (rows, *self.shape[1:]), dtype))
        array = da.concatenate(chunks, axis=0)
        return array.transpose(1, 0, 2) if len(self.shape) == 3 else array

    def _vectors(self, file: Path, rows: int | None = None) -> NDArray[Any]:
        if rows == 0:
            schema = writer.open_dataset([file]).schema
            lists = [field.type for field in schema if pa.types.is_fixed_size_list(field.type)]
            real_type = lists[0].value_type.to_pandas_dtype()
            return np.empty(0, np.result_type(real_type, np.complex64) if len(lists) > 1 else real_type)
        with fetched(file) as local:
            parquet = pq.ParquetFile(local, memory_map=True)
            names = [f.name for f in parquet.schema_arrow if pa.types.is_fixed_size_list(f.type)]
            table = parquet.read(columns=names)
        real, *imag = [table[name].combine_chunks().flatten().to_numpy() for name in names]
        values = real if not imag else real + imag[0] * np.complex64(1j)
        return np.asarray(values.reshape(-1, *self.shape[1:]))


class Run:
    """A published run.

    Attributes
    ----------
    path : folder of the run
    manifest : what was asked for, read and found
    """

    def __init__(self, folder: RunFolder) -> None:
        self.path = folder.path
        if not folder.published:
            raise InputError(
                "this run is not finished",
                got=str(folder.path),
                allowed="a run with a manifest.json",
                remedy="Finish it with toffee resume.",
            )
        self.manifest: dict[str, Any] = read_json(folder.manifest)
        if self.manifest.get("format") != FORMAT:
            raise InputError(
                "format of the run",
                got=self.manifest.get("format"),
                allowed=f"{FORMAT}",
                remedy="Read it with the version of toffee_dist that wrote it.",
            )

    def __repr__(self) -> str:
        outputs = ", ".join(self.manifest["outputs"])
        return f"Run({self.manifest['run_id']}: {self.n_nodes:,} nodes, {self.n_steps:,} steps; {outputs})"

    def _repr_html_(self) -> str:
        """Say in a notebook what the run holds."""
        summary, config = self.manifest["summary"], self.manifest["config"]
        facts = {
            "nodes": f"{self.n_nodes:,}",
            "steps": f"{self.n_steps:,}, {summary.get('first')} to {summary.get('last')}",
            "rank": self.rank,
            "model": f"{config.get('model')}, {'directed' if self.manifest['directed'] else 'undirected'}",
            "outputs": ", ".join(self.manifest["outputs"]),
            "folder": self.path,
        }
        return html_facts(f"Run {self.manifest['run_id']}", facts)

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return int(self.manifest["summary"]["nodes"])

    @property
    def n_steps(self) -> int:
        """Number of steps."""
        return int(self.manifest["summary"]["steps"])

    @property
    def rank(self) -> int:
        """Length of a vector."""
        return int(self.manifest["config"]["rank"])

    @cached_property
    def grid(self) -> TimeGrid:
        """The steps as times."""
        return TimeGrid.from_json(self.manifest["grid"])

    @property
    def nodes(self) -> Table:
        """A row a node: node_id, row, degree, first and last seen."""
        return Table(self.path / "nodes.parquet")

    @property
    def steps(self) -> Table:
        """A row a step: when it starts."""
        return Table(self.path / "steps.parquet")

    @property
    def fit(self) -> Table:
        """A row a solved slice: energy, objective, bound, gap, iterations, solver, converged."""
        return Table(self.path / "fit.parquet")

    @property
    def frequencies(self) -> Table:
        """A row a frequency: period, energy, significance, chosen; of runs with a trajectory."""
        self._check("trajectory")
        return Table(self.path / "frequencies.parquet")

    @property
    def embedding(self) -> Table:
        """One vector a node."""
        return self._table("embedding", self.n_nodes, self.rank)

    @property
    def embedding_target(self) -> Table:
        """One vector a node in its role as a target; of directed graphs."""
        return self._table("embedding_target", self.n_nodes, self.rank)

    @property
    def trajectory(self) -> Table:
        """One vector a node and step; `numpy` gives (steps, nodes, rank)."""
        return self._table("trajectory", self.n_nodes, self.n_steps, self.rank)

    @property
    def spectrum(self) -> Table:
        """Energy a node and frequency."""
        return self._table("spectrum", self.n_nodes, self.n_steps // 2 + 1)

    def factors(self, name: str) -> Table:
        """Return ``A_time``, ``R_time``, ``A_freq`` or ``R_freq``."""
        n_freqs, r = self.n_steps // 2 + 1, self.rank
        shapes = {
            "A_time": (self.n_nodes, self.n_steps, r),
            "A_freq": (self.n_nodes, n_freqs, r),
            "R_time": (self.n_steps, r * r),
            "R_freq": (n_freqs, r * r),
        }
        if name not in shapes:
            raise InputError(
                "factors", got=repr(name), allowed=", ".join(shapes), remedy="Choose one of them."
            )
        self._check("factors/A_time")
        path = self.path / "factors" / (name if name.startswith("A") else f"{name}.parquet")
        return Table(path, shapes[name])

    def neighbors(
        self,
        node: object,
        k: int = 10,
        *,
        at: int | str | None = None,
        metric: Metric = "cosine",
        role: Role | None = None,
        space: str | None = None,
    ) -> pl.DataFrame:
        """Return the k nearest nodes of a node, over all time or at a step or moment; see `ask.neighbors`."""
        from toffee_dist import ask

        return ask.neighbors(self, node, k, at=at, metric=metric, role=role, space=space)

    def trajectory_of(self, node: object, space: str | None = None) -> NodeTrajectory:
        """Return one node over time: its vectors, their lengths, plots of them."""
        from toffee_dist import ask

        return ask.read_trajectory(self, node, space)

    def rhythm_of(self, node: object, k: int = 10, space: str | None = None) -> Rhythm:
        """Return the periods a node lives by, and the k nodes most like it."""
        from toffee_dist import ask

        return ask.find_rhythm(self, node, k, space)

    def score(
        self, sources: Sequence[object], targets: Sequence[object], at: int | str | None = None
    ) -> NDArray[np.float64]:
        """Return the model's own score of pairs, summed over time or at a step or moment."""
        from toffee_dist import ask

        return ask.score_pairs(self, sources, targets, at)

    def build_index(self) -> list[Path]:
        """Write the vectors once more for quick queries; see `ask.vectors`."""
        from toffee_dist import ask

        return ask.build_index(self)

    def export(
        self, form: str, to: Path | str, *, at: int | str | None = None, role: str = "source"
    ) -> list[Path]:
        """Hand the vectors on to another program; see `export.export_run`."""
        from toffee_dist.export import export_run

        return export_run(self, form, Path(to), at=at, role=role)

    def _table(self, output: str, *shape: int) -> Table:
        self._check(output)
        return Table(self.path / output, shape)

    def _check(self, output: str) -> None:
        if output not in self.manifest["outputs"]:
            raise InputError(
                f"this run has no {output}",
                got=", ".join(self.manifest["outputs"]),
                allowed="what was asked for",
                remedy=f"Ask for it with --outputs {output.partition('/')[0].removesuffix('_target')}.",
            )


def html_facts(title: str, facts: Mapping[str, object]) -> str:
    """Return a small table for a notebook; whatever a user wrote is escaped.

    Examples
    --------
    >>> html_facts("a<b", {"rank": 8})
    '<table><caption>a&lt;b</caption><tr><th>rank</th><td>8</td></tr></table>'
    """
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in facts.items())
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"


def load_run(path: Path | str) -> Run:
    """Open a run: that which OUT's latest.json points to, or the one in the folder given.

    Examples
    --------
    >>> run = load_run("out")  # doctest: +SKIP
    >>> run.embedding.numpy().shape  # doctest: +SKIP
    (1899, 128)
    """
    return Run(find_run(place(path)))
