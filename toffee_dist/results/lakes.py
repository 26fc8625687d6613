"""Snapshots of runs in tables of others: Parquet, Delta Lake, Lance, and a repository of Feast.

========== ========================================================== ========================================
format     what is written                                            read by
========== ========================================================== ========================================
parquet    one file                                                   everybody
delta      a Delta table; every run adds its snapshot in one commit   Spark, Databricks, DuckDB, polars, …
lance      a Lance dataset, likewise                                  LanceDB, pylance
feast      a repository: feature_store.yaml, toffee_features.py, a    ``feast apply``
           file per run
========== ========================================================== ========================================

A table holds vectors of one space. What is there already is not added again.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from toffee_dist.errors import ConfigError, InputError, UnfinishedError
from toffee_dist.results.snapshots import Snapshot, require_moments
from toffee_dist.storage.files import read_json, replacing, write_json
from toffee_dist.storage.parquet import write_stream
from toffee_dist.storage.spaces import check_space

Lake = Literal["parquet", "delta", "lance", "feast"]
# Formats whose tables grow by a snapshot per run: what is there may be theirs.
GROWING = ("delta", "lance", "feast")
# Where a dataset of Lance says what it is.
LABEL = "toffee.table"
REMEDY = "Choose a new --to for this space, and have its readers read that."


def need(package: str, extra: str) -> Any:
    """Return a package that is not always installed, or say how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(
            f"--format {extra}",
            got=f"the package {package} is not installed",
            allowed="an installation with it",
            remedy=f"pip install 'toffee_dist[{extra}]'",
        ) from None


def _label(snapshot: Snapshot) -> str:
    """Return what a table says of itself."""
    return f"toffee_dist: {snapshot.kind}, space {snapshot.space_id}"


def _check(snapshot: Snapshot, to: Path, label: object) -> None:
    """Raise where a table is of another space, of other rows, or not one of ours."""
    found = re.fullmatch(r"toffee_dist: ([a-z_-]+), space ([0-9a-f]{32})", str(label))
    if found is None:
        raise _no_table(to, "a table that toffee_dist did not make")
    if found[1] != snapshot.kind:
        raise _no_table(to, f"a table of {found[1]}, to which {snapshot.kind} cannot be added")
    whose = f"run {snapshot.run.manifest.run_id}"
    check_space(snapshot.space_id, found[2], str(to), whose, REMEDY)


def _no_table(to: Path, got: str) -> ConfigError:
    return ConfigError(
        "export",
        got=f"{to}: {got}",
        allowed="a new name, or a table that toffee export made",
        remedy="Choose another --to, or remove it.",
    )


def _failed(to: Path, error: Exception) -> UnfinishedError:
    return UnfinishedError(
        f"{to} was not written",
        got=(str(error).strip() or type(error).__name__).splitlines()[0][:300],
        remedy=f"Nothing was added. Remove {to} if it is new, and export again.",
    )


def write_parquet(snapshot: Snapshot, to: Path) -> list[Path]:
    """Write one file."""
    write_stream(to, snapshot.tables())
    return [to]


def write_delta(snapshot: Snapshot, to: Path) -> list[Path]:
    """Add a snapshot to a Delta table, which is made where there is none; one commit, all or nothing."""
    delta = need("deltalake", "delta")
    if to.exists():
        try:
            table = delta.DeltaTable(str(to))
            label = table.metadata().description
            done = table.transaction_version(snapshot.key)
        except delta.exceptions.DeltaError as error:
            raise _no_table(to, str(error).splitlines()[0]) from None
        _check(snapshot, to, label)
        if done is not None:
            return [to]
    # Delta's own word for "once": a second commit of this name is refused, whoever makes it.
    once = delta.CommitProperties(
        app_transactions=[delta.Transaction(app_id=snapshot.key, version=1)],
        custom_metadata={"run_id": snapshot.run.manifest.run_id, "space_id": snapshot.space_id},
    )
    try:
        delta.write_deltalake(
            str(to),
            snapshot.reader(),
            mode="append",
            description=None if to.exists() else _label(snapshot),
            commit_properties=once,
        )
    except (delta.exceptions.DeltaError, OSError, ValueError) as error:
        raise _failed(to, error) from None
    return [to]


def write_lance(snapshot: Snapshot, to: Path) -> list[Path]:
    """Add a snapshot to a Lance dataset, which is made where there is none; one version, all or nothing."""
    lance = need("lance", "lance")
    there = to.exists()
    if there:
        try:
            found = lance.dataset(str(to))
            label = (found.schema.metadata or {}).get(LABEL.encode(), b"").decode("utf-8", "replace")
            where = f"run_id = '{snapshot.run.manifest.run_id}'"
            if snapshot.step is not None:
                where += f" AND step = {snapshot.step}"
            rows = found.count_rows(filter=where)
        except (ValueError, OSError) as error:
            raise _no_table(to, str(error).splitlines()[0]) from None
        _check(snapshot, to, label)
        if rows:
            return [to]
    try:
        lance.write_dataset(
            snapshot.reader({LABEL: _label(snapshot)}), str(to), mode="append" if there else "create"
        )
    except (ValueError, OSError) as error:
        raise _failed(to, error) from None
    return [to]


SPACE_FILE, FEATURES, STORE = "space.json", "toffee_features.py", "feature_store.yaml"


def write_feast(snapshot: Snapshot, to: Path) -> list[Path]:
    """Write a repository that ``feast apply`` takes, or add a file of this run to one that is there."""
    require_moments(snapshot, "Feast")
    name = f"toffee_{snapshot.kind.replace('-', '_')}"
    data = to / "data" / "vectors"
    if to.exists():
        if not (to / SPACE_FILE).is_file():
            raise _no_table(to, f"no {SPACE_FILE}")
        try:
            found = read_json(to / SPACE_FILE)
            label = found.get("table") if isinstance(found, dict) else None
        except InputError as error:
            raise _no_table(to, str(error)) from None
        _check(snapshot, to, label)
    data.mkdir(parents=True, exist_ok=True)
    # Written first: a repository that was cut short is finished by the next export.
    write_json(to / SPACE_FILE, {"table": _label(snapshot), "space_id": snapshot.space_id})
    step = "" if snapshot.step is None else f"-{snapshot.step}"
    part = data / f"{snapshot.run.manifest.run_id}{step}.parquet"
    if not part.exists():
        write_stream(part, snapshot.tables())
    for file, text in (
        (FEATURES, _features(snapshot, name)),
        (STORE, _FEAST_STORE.format(project=name)),
    ):
        if not (to / file).exists():
            with replacing(to / file) as temporary:
                temporary.write_text(text, encoding="utf-8")
    return [to / STORE, to / FEATURES, part]


_FEAST_STORE = """\
# Written by toffee export --format feast; yours from now on.
project: {project}
registry: data/registry.db
provider: local
online_store:
  type: sqlite
  path: data/online.db
offline_store:
  type: file
entity_key_serialization_version: 3
"""

_FEAST_FEATURES = '''\
"""One vector per node from toffee_dist, all of space {space_id}; written by toffee export --format feast."""

from datetime import timedelta

from feast import Entity, FeatureView, Field, FileSource, ValueType
from feast.types import Array, Float32, Int64, String

SPACE_ID = {space_literal}

# Feast finds what has a name of its own.
{entities}
source = FileSource(
    name="{name}_files",
    # A file per run: a later export adds one.
    path="data/vectors",
    timestamp_field="event_timestamp",
    created_timestamp_column="created",
)

view = FeatureView(
    name="{name}",
    entities=[{keys}],
    # A node keeps its last vector, however old.
    ttl=timedelta(0),
    schema=[
{fields}    ],
    source=source,
    tags={{"space_id": SPACE_ID}},
)
'''


def _features(snapshot: Snapshot, name: str) -> str:
    """Return the definitions; nothing in them is a word of the input."""
    kinds = {field.name: field.type for field in snapshot.schema}
    entities, fields = "", ""
    keys = [key for key in ("node_id", "space") if key in kinds]
    for key in keys:
        whole = pa.types.is_integer(kinds[key])
        kind = "INT64" if whole else "STRING"
        entities += f'{key} = Entity(name="{key}", join_keys=["{key}"], value_type=ValueType.{kind})\n'
        fields += f'        Field(name="{key}", dtype={"Int64" if whole else "String"}),\n'
    columns = {"embedding": "Array(Float32)", "run_id": "String", "space_id": "String"}
    if "step" in kinds:
        columns["step"] = "Int64"
    fields += "".join(f'        Field(name="{key}", dtype={dtype}),\n' for key, dtype in columns.items())
    return _FEAST_FEATURES.format(
        name=name,
        space_id=snapshot.space_id,
        space_literal=json.dumps(snapshot.space_id),
        entities=entities,
        keys=", ".join(keys),
        fields=fields,
    )


LAKES: dict[str, Callable[[Snapshot, Path], list[Path]]] = {
    "parquet": write_parquet,
    "delta": write_delta,
    "lance": write_lance,
    "feast": write_feast,
}
