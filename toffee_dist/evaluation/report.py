"""What an evaluation leaves: tables for a person, Parquet and JSON with every cell, a page of plots."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from html import escape
from pathlib import Path
from typing import Any

import polars as pl

from toffee_dist.evaluation.compare import Cell
from toffee_dist.evaluation.in_time import InTimeCell
from toffee_dist.evaluation.steps import StepCell

CELLS, STEPS, IN_TIME = "cells.parquet", "steps.parquet", "in_time.parquet"
RESULT, PAGE = "result.json", "report.html"
_TYPES = {"str": pl.String, "int": pl.Int64, "float": pl.Float64}
STEP_MARKS = {
    "future": "average precision",
    "labels": "adjusted Rand index",
    "later-windows": "share of right labels",
}
MARKS = ("micro_f1", "roc_auc", "average_precision", "fresh_f1")


AnyCell = Cell | StepCell | InTimeCell


def to_frame(cells: Sequence[AnyCell], kind: type[AnyCell]) -> pl.DataFrame:
    """Return cells as a table, with its columns even where there are none."""
    schema = {field.name: _TYPES[str(field.type)] for field in fields(kind)}
    return pl.DataFrame([asdict(cell) for cell in cells], schema=schema)


def summarise(cells: pl.DataFrame) -> pl.DataFrame:
    """Return mean and standard deviation over the seeds, a row a protocol, model and features."""
    names = ["part", "protocol", "model", "settings", "features", "classifier"]
    means = [pl.col(name).mean() for name in (*MARKS, "fit_seconds", "fit_mib", "seconds")]
    deviations = [pl.col(name).std().fill_null(0.0).alias(f"{name}_sd") for name in MARKS]
    return cells.group_by(names, maintain_order=True).agg(*means, *deviations, pl.len().alias("seeds"))


def best_features(summary: pl.DataFrame, within: Sequence[str] | None = None) -> pl.DataFrame:
    """Return the row of the best features by Micro-F1 of every part, protocol, model and settings.

    Examples
    --------
    >>> rows = {"part": ["test"] * 2, "protocol": ["p"] * 2, "model": ["m"] * 2, "settings": [""] * 2}
    >>> table = pl.DataFrame({**rows, "features": ["a", "b"], "micro_f1": [0.1, 0.2]})
    >>> best_features(table)["features"].item()
    'b'
    """
    if within is not None:
        summary = summary.filter(pl.col("features").is_in([*within, "score"]))
    keys = ["part", "protocol", "model", "settings"]
    return (
        summary.sort("micro_f1", descending=True, maintain_order=True)
        .group_by(keys, maintain_order=True)
        .first()
    )


def format_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return rows as aligned columns of text."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([title, *lines])


def describe_cells(cells: pl.DataFrame) -> str:
    """Return a table a protocol: Micro-F1 of every model and features, and the other marks of the best."""
    summary = summarise(cells).filter(pl.col("part") == "test")
    tables = []
    for protocol in summary["protocol"].unique(maintain_order=True):
        own = summary.filter(pl.col("protocol") == protocol)
        specs = [spec for spec in own["features"].unique(maintain_order=True) if spec != "score"]
        rows = []
        best = {row["model"]: row for row in best_features(own).iter_rows(named=True)}
        for model in own["model"].unique(maintain_order=True):
            found = {
                row["features"]: row for row in own.filter(pl.col("model") == model).iter_rows(named=True)
            }
            top = best[model]
            marks = [f"{found[spec]['micro_f1']:.4f}" if spec in found else "-" for spec in specs]
            rest = [f"{top['micro_f1']:.4f} ± {top['micro_f1_sd']:.4f}", top["features"]]
            rest += [f"{top[name]:.4f}" for name in MARKS[1:]]
            rest += [f"{top['fit_seconds']:.2f}", f"{top['fit_mib']:.0f}"]
            rows.append([model, *marks, *rest])
        header = ["model", *specs, "best", "by", "AUC", "AP", "fresh pairs", "fit, s", "fit, MiB"]
        seeds = int(own["seeds"].max())  # type: ignore[arg-type]
        used = ", ".join(name for name in own["classifier"].unique(maintain_order=True))
        title = f"{protocol}: Micro-F1 ({used}), mean of {seeds} seeds; AUC, AP and fresh pairs of the best"
        tables.append(format_table(title, header, rows))
    return "\n\n".join(tables)


def describe_steps(cells: pl.DataFrame) -> str:
    """Return a table a question: the mean mark of every method."""
    tables = []
    titles = {
        "future": "links of a coming step: average precision",
        "labels": "labels at each step: adjusted Rand index of k-means",
        "later-windows": "labels of other nodes at later steps: share that a classifier gets right",
    }
    for question in cells["question"].unique(maintain_order=True):
        own = cells.filter(pl.col("question") == question)
        means = own.group_by("method", maintain_order=True).agg(
            pl.col("mark").mean(), pl.col("mark").std().fill_null(0.0).alias("sd"), pl.len()
        )
        rows = [[m, f"{mark:.4f}", f"{sd:.4f}", count] for m, mark, sd, count in means.iter_rows()]
        tables.append(format_table(titles[question], ["method", "mean", "s.d.", "steps"], rows))
    return "\n\n".join(tables)


IN_TIME_HEADER = ("model", "who", "95 %", "when", "95 %", "fit, s", "chosen on validation")


def _in_time_means(cells: pl.DataFrame) -> pl.DataFrame:
    means = [pl.col(name).mean() for name in ("who", "who_error", "when", "when_error", "fit_seconds")]
    return cells.group_by("model", maintain_order=True).agg(*means, pl.col("settings").first())


def _in_time_rows(cells: pl.DataFrame) -> list[list[object]]:
    """Return who and when of every model: means over the seeds, with 95 % intervals."""
    rows = []
    for row in _in_time_means(cells).iter_rows(named=True):
        marks: list[object] = []
        for question in ("who", "when"):
            auc, spread = row[question], 1.96 * row[f"{question}_error"]
            marks += [f"{auc:.4f}", f"{auc - spread:.3f} to {auc + spread:.3f}"]
        rows.append([row["model"], *marks, f"{row['fit_seconds']:.2f}", row["settings"]])
    return rows


def describe_in_time(cells: pl.DataFrame) -> str:
    """Return a table of who and when of every model."""
    if cells.is_empty():
        return ""
    title = "in-time: AUC of hidden entries against other pairs (who) and against other steps (when)"
    return format_table(title, IN_TIME_HEADER, _in_time_rows(cells))


def write_results(
    folder: Path,
    about: Mapping[str, Any],
    cells: pl.DataFrame,
    steps: pl.DataFrame,
    in_time: pl.DataFrame,
    name: str,
) -> None:
    """Write every cell as Parquet and JSON, the summary, and the plots."""
    cells.write_parquet(folder / CELLS)
    steps.write_parquet(folder / STEPS)
    if not in_time.is_empty():
        in_time.write_parquet(folder / IN_TIME)
    result = {
        **about,
        "summary": summarise(cells).to_dicts(),
        "cells": cells.to_dicts(),
        "steps": steps.to_dicts(),
        "in_time": in_time.to_dicts(),
    }
    (folder / RESULT).write_text(json.dumps(result, indent=1, default=str) + "\n")
    write_page(folder / PAGE, {name: cells}, steps, in_time)


def write_page(
    path: Path,
    graphs: Mapping[str, pl.DataFrame],
    steps: pl.DataFrame | None = None,
    in_time: pl.DataFrame | None = None,
) -> None:
    """Write the plots as one self-contained page: F1 by model and graph, F1 against time, marks by step.

    Parameters
    ----------
    graphs
        The cells of every graph, by its name.
    steps
        Marks of single steps.
    in_time
        Marks of hidden entries.
    """
    # Saves start-up time.
    from toffee_dist.report.page import Section, render

    summaries = {name: summarise(cells).filter(pl.col("part") == "test") for name, cells in graphs.items()}
    protocols = list(dict.fromkeys(p for table in summaries.values() for p in table["protocol"].to_list()))
    sections = []
    for protocol in protocols:
        own = {name: best_features(t.filter(pl.col("protocol") == protocol)) for name, t in summaries.items()}
        says = (
            "Micro-F1 is the share of pairs that are rightly called linked or not, with the best features of "
            "each model; then the same against the time that the model took to fit (the paper's Fig. 2)."
        )
        tables = "".join(
            _operator_table(name, t.filter(pl.col("protocol") == protocol)) for name, t in summaries.items()
        )
        sections.append(Section(protocol, says, tables + _bars(own) + _against_time(own)))
    if steps is not None and not steps.is_empty():
        for question in steps["question"].unique(maintain_order=True):
            label = STEP_MARKS[question]
            own_steps = steps.filter(pl.col("question") == question)
            says = f"How well each method does at every step: {label}, 1 is perfect."
            sections.append(Section(question, says, _by_step(own_steps, label)))
    if in_time is not None and not in_time.is_empty():
        says = (
            "Entries were hidden at random. Who: the chance that a hidden entry scores above another pair at "
            "the same step; when: above the same pair at another step. Half is chance, 1 is perfect."
        )
        rows = _in_time_rows(in_time)
        table = _table("hidden entries", IN_TIME_HEADER, [[str(cell) for cell in row] for row in rows])
        sections.append(Section("in-time", says, table + _who_and_when(in_time)))
    path.write_text(render("toffee evaluate", ", ".join(graphs), sections), encoding="utf-8")


def _operator_table(name: str, summary: pl.DataFrame) -> str:
    """Return Micro-F1 ± deviation of every model by its features, and what a fit took, as HTML."""
    specs = [spec for spec in summary["features"].unique(maintain_order=True) if spec != "score"]
    header = [
        "model",
        *specs,
        *(["score"] if "score" in summary["features"] else []),
        "fit, CPU s",
        "fit, MiB",
    ]
    best = {row["model"]: row["features"] for row in best_features(summary).iter_rows(named=True)}
    rows, bold = [], set()
    for number, model in enumerate(summary["model"].unique(maintain_order=True)):
        found = {r["features"]: r for r in summary.filter(pl.col("model") == model).iter_rows(named=True)}
        cells = [model]
        for spec in header[1:-2]:
            row = found.get(spec)
            cells.append("" if row is None else f"{row['micro_f1']:.4f} ± {row['micro_f1_sd']:.4f}")
        bold.add((number, header.index(best[model])))
        any_row = next(iter(found.values()))
        fitted = "score" not in found
        took = [f"{any_row['fit_seconds']:.2f}", f"{any_row['fit_mib']:.0f}"] if fitted else ["", ""]
        rows.append([*cells, *took])
    return _table(name, header, rows, bold)


def _table(
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    bold: Collection[tuple[int, int]] = frozenset(),
) -> str:
    """Return rows as HTML; the first column names them, and cells (row, column) of `bold` stand out."""
    head = "".join(f"<th>{escape(word)}</th>" for word in header)
    body = ""
    for number, (first, *cells) in enumerate(rows):
        body += f"<tr><th>{escape(first)}</th>"
        for column, cell in enumerate(cells, start=1):
            text = escape(cell)
            body += f"<td><b>{text}</b></td>" if (number, column) in bold else f"<td>{text}</td>"
        body += "</tr>"
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{body}</table>"


def _palette(names: Sequence[str]) -> dict[str, str]:
    # Saves start-up time.
    from toffee_dist.report.charts import COLOURS

    return {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(dict.fromkeys(names))}


def _bars(graphs: Mapping[str, pl.DataFrame]) -> str:
    # Saves start-up time.
    from toffee_dist.report.charts import Axis, Chart

    rows = [
        (name, row["model"], row["micro_f1"])
        for name, table in graphs.items()
        for row in table.iter_rows(named=True)
    ]
    low = max(0.0, min([0.5, *(mark - 0.05 for *_, mark in rows)]))
    names = tuple(model if len(graphs) == 1 else f"{name} {model}" for name, model, _ in rows)
    chart = Chart(
        "Micro-F1 of the best features of every model",
        Axis("", -0.6, len(rows) - 0.4, names=names),
        Axis("Micro-F1, best features", low, 1.0),
    )
    colours = _palette([model for _, model, _ in rows])
    for at, (name, model, mark) in enumerate(rows):
        chart.bar(at - 0.4, at + 0.4, low, mark, colours[model], f"{name}, {model}: {mark:.4f}")
    return chart.svg()


def _who_and_when(cells: pl.DataFrame) -> str:
    # Saves start-up time.
    from toffee_dist.report.charts import Axis, Chart, across

    rows = _in_time_means(cells).to_dicts()
    chart = Chart(
        "Who is linked, and when",
        Axis("when, AUC", *across([row["when"] for row in rows], zero=False)),
        Axis("who, AUC", *across([row["who"] for row in rows], zero=False)),
    )
    for row in rows:
        colour = _palette([one["model"] for one in rows])[row["model"]]
        chart.name(row["model"], colour)
        chart.dot(row["when"], row["who"], colour, f"{row['model']}: {row['who']:.4f}, {row['when']:.4f}")
    return chart.svg()


def _against_time(graphs: Mapping[str, pl.DataFrame]) -> str:
    # Saves start-up time.
    from toffee_dist.report.charts import Axis, Chart, across

    rows = [
        (name, row)
        for name, table in graphs.items()
        for row in table.iter_rows(named=True)
        if row["fit_seconds"] > 0
    ]
    if not rows:
        return ""
    seconds = [row["fit_seconds"] for _, row in rows]
    chart = Chart(
        "Micro-F1 against the time to fit",
        Axis("CPU seconds to fit", min(seconds) / 1.5, max(seconds) * 1.5, log=True),
        Axis("Micro-F1", *across([row["micro_f1"] for _, row in rows], zero=False)),
    )
    for model, colour in _palette([row["model"] for _, row in rows]).items():
        chart.name(model, colour)
        for name, row in rows:
            if row["model"] == model:
                title = f"{name}, {model}: {row['micro_f1']:.4f} in {row['fit_seconds']:.2f} s"
                chart.dot(row["fit_seconds"], row["micro_f1"], colour, title)
    return chart.svg()


def _by_step(cells: pl.DataFrame, label: str) -> str:
    # Saves start-up time.
    from toffee_dist.report.charts import Axis, Chart, across

    chart = Chart(
        f"{label} of every method at every step",
        Axis("step", *across(cells["step"].to_list(), zero=False, room=0.01)),
        Axis(label, *across(cells["mark"].to_list())),
    )
    for method, colour in _palette(cells["method"].to_list()).items():
        chart.name(method, colour)
        own = cells.filter(pl.col("method") == method).sort("step")
        chart.line(zip(own["step"].to_list(), own["mark"].to_list(), strict=True), colour, method)
    return chart.svg()
