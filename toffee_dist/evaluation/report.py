"""What an evaluation leaves: tables for a person, Parquet and JSON with every cell, a page of plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


def describe_in_time(cells: pl.DataFrame) -> str:
    """Return who and when of every model: means over the seeds, with 95 % intervals."""
    if cells.is_empty():
        return ""
    means = [pl.col(name).mean() for name in ("who", "who_error", "when", "when_error", "fit_seconds")]
    table = cells.group_by("model", maintain_order=True).agg(*means, pl.col("settings").first())
    rows = []
    for row in table.iter_rows(named=True):
        marks: list[object] = []
        for question in ("who", "when"):
            auc, spread = row[question], 1.96 * row[f"{question}_error"]
            marks += [f"{auc:.4f}", f"{auc - spread:.3f} to {auc + spread:.3f}"]
        rows.append([row["model"], *marks, f"{row['fit_seconds']:.2f}", row["settings"]])
    header = ["model", "who", "95 %", "when", "95 %", "fit, s", "chosen on validation"]
    title = "in-time: AUC of hidden entries against other pairs (who) and against other steps (when)"
    return format_table(title, header, rows)


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
    write_page(folder / PAGE, {name: cells}, steps)


def write_page(path: Path, graphs: Mapping[str, pl.DataFrame], steps: pl.DataFrame | None = None) -> None:
    """Write the plots as one self-contained page: F1 by model and graph, F1 against time, marks by step.

    Parameters
    ----------
    graphs
        The cells of every graph, by its name.
    steps
        Marks of single steps.
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
        sections.append(Section(protocol, says, html=tables, plots=(_bars(own), _against_time(own))))
    if steps is not None and not steps.is_empty():
        for question in steps["question"].unique(maintain_order=True):
            label = STEP_MARKS[question]
            own_steps = steps.filter(pl.col("question") == question)
            says = f"How well each method does at every step: {label}, 1 is perfect."
            sections.append(Section(question, says, plots=(_by_step(own_steps, label),)))
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
    rows = []
    for model in summary["model"].unique(maintain_order=True):
        found = {r["features"]: r for r in summary.filter(pl.col("model") == model).iter_rows(named=True)}
        cells = [f"<th>{escape(model)}</th>"]
        for spec in header[1:-2]:
            row = found.get(spec)
            text = "" if row is None else f"{row['micro_f1']:.4f} ± {row['micro_f1_sd']:.4f}"
            cells.append(f"<td><b>{text}</b></td>" if spec == best[model] else f"<td>{text}</td>")
        any_row = next(iter(found.values()))
        fitted = "score" not in found
        took = [f"{any_row['fit_seconds']:.2f}", f"{any_row['fit_mib']:.0f}"] if fitted else ["", ""]
        rows.append("<tr>" + "".join(cells) + "".join(f"<td>{text}</td>" for text in took) + "</tr>")
    head = "".join(f"<th>{escape(word)}</th>" for word in header)
    return f"<table><caption>{escape(name)}</caption><tr>{head}</tr>{''.join(rows)}</table>"


def _palette(count: int) -> list[str]:
    # Saves start-up time.
    from bokeh.palettes import Category20

    colours = list(Category20[20])
    return [colours[k % 20] for k in range(count)]


def _bars(graphs: Mapping[str, pl.DataFrame]) -> Any:
    # Saves start-up time.
    from bokeh.models import FactorRange
    from bokeh.transform import factor_cmap

    from toffee_dist.report.plots import new_figure

    rows = [
        (name, row["model"], row["micro_f1"])
        for name, table in graphs.items()
        for row in table.iter_rows(named=True)
    ]
    factors = [(name, model) for name, model, _ in rows]
    models = list(dict.fromkeys(model for _, model in factors))
    plot = new_figure("Micro-F1 of the best features", x_range=FactorRange(*factors), height=360)
    low = min((mark for *_, mark in rows), default=0.5)
    plot.y_range.start = max(0.0, min(0.5, low - 0.05))
    data = {"x": factors, "top": [mark for *_, mark in rows]}
    colours = factor_cmap("x", palette=_palette(len(models)), factors=models, start=1, end=2)
    plot.vbar(x="x", top="top", width=0.9, source=data, fill_color=colours, line_color=None)
    plot.xaxis.major_label_orientation = 1.2
    return plot


def _against_time(graphs: Mapping[str, pl.DataFrame]) -> Any:
    # Saves start-up time.
    from toffee_dist.report.plots import new_figure

    plot = new_figure(
        "Micro-F1 against the time to fit",
        height=360,
        x_axis_type="log",
        x_axis_label="CPU seconds to fit",
        y_axis_label="Micro-F1",
    )
    models = list(dict.fromkeys(m for table in graphs.values() for m in table["model"].to_list()))
    drawn = False
    for model, colour in zip(models, _palette(len(models)), strict=True):
        rows = [r for t in graphs.values() for r in t.iter_rows(named=True) if r["model"] == model]
        rows = [row for row in rows if row["fit_seconds"] > 0]
        if rows:
            x, y = [row["fit_seconds"] for row in rows], [row["micro_f1"] for row in rows]
            plot.scatter(x, y, size=10, color=colour, legend_label=model)
            drawn = True
    if drawn:
        plot.legend.location = "bottom_right"
    return plot


def _by_step(cells: pl.DataFrame, label: str) -> Any:
    # Saves start-up time.
    from toffee_dist.report.plots import new_figure

    plot = new_figure(height=360, x_axis_label="step", y_axis_label=label)
    methods = cells["method"].unique(maintain_order=True).to_list()
    for method, colour in zip(methods, _palette(len(methods)), strict=True):
        own = cells.filter(pl.col("method") == method)
        plot.line(
            own["step"].to_list(), own["mark"].to_list(), color=colour, line_width=2, legend_label=method
        )
    plot.legend.click_policy = "hide"
    return plot
