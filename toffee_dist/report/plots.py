"""The plots of a report, drawn with Bokeh from what was gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from bokeh.layouts import column, row
from bokeh.models import (
    AutocompleteInput,
    CategoricalColorMapper,
    ColorBar,
    ColumnDataSource,
    CustomJS,
    DatetimeTickFormatter,
    Div,
    HoverTool,
    InlineStyleSheet,
    LinearColorMapper,
    LogColorMapper,
    NumeralTickFormatter,
    Range1d,
    Select,
    Span,
)
from bokeh.palettes import Cividis256, Colorblind
from bokeh.plotting import figure
from numpy.typing import NDArray

from toffee_dist.kernels.frequencies import SIGNIFICANT
from toffee_dist.report.gather import NodeMap, Paths
from toffee_dist.report.page import asset
from toffee_dist.timegrid import TimeGrid, name_period

_INPUT_STYLE = """
:host { color: inherit; }
.bk-input { background-color: transparent; color: inherit; border: 1px solid #8888; }
.bk-menu { background-color: Canvas; color: CanvasText; }
"""


def colours() -> tuple[str, ...]:
    """Return seven colours that colour-blind people can tell apart, on light and dark paper."""
    return tuple(Colorblind[8][:7])  # The eighth is black.


def new_figure(title: str = "", *, tools: str = "save", height: int = 320, **options: Any) -> Any:
    """Return an empty plot as wide as the page, with the tools named."""
    options = {"sizing_mode": "stretch_width", "toolbar_location": "right" if tools else None} | options
    plot = figure(title=title, tools=tools, height=height, **options)
    plot.toolbar.logo = None
    return plot


def draw_nodes(nodes: NodeMap, grid: TimeGrid) -> tuple[list[Any], list[Any]]:
    """Return the map with its search and colouring, and the plots of the chosen node's trajectory."""
    place = np.full(len(nodes.ids), -1)
    if nodes.paths is not None:
        place[nodes.paths.nodes] = np.arange(len(nodes.paths.nodes))
    source = ColumnDataSource(
        {
            "id": nodes.ids,
            "x": nodes.points[:, 0].astype(np.float32),
            "y": nodes.points[:, 1].astype(np.float32),
            "community": [str(label + 1) for label in nodes.community],
            "degree": nodes.degree.astype(np.int32),
            "seen": nodes.seen,
            "path": place.astype(np.int32),
        },
        name="nodes",
    )
    ranges = {}
    for axis, values in zip("xy", nodes.points.T, strict=True):
        low, high = float(values.min()), float(values.max())
        edge = 0.05 * (high - low) or 1.0
        ranges[f"{axis}_range"] = Range1d(low - edge, high + edge)
    plot = new_figure(tools="pan,wheel_zoom,box_zoom,tap,reset,save", height=520, name="map", **ranges)
    plot.axis.visible = False
    bars = _colour_bars(nodes, grid)
    dots = plot.scatter(
        "x",
        "y",
        source=source,
        size=8,
        fill_color={"field": "community", "transform": bars["community"].color_mapper},
        line_color="#7d838c",
        line_alpha=0.5,
    )
    _highlight(dots)
    for name, bar in bars.items():
        bar.visible = name == "community"
        plot.add_layout(bar, "right")
    _hover(
        plot,
        [dots],
        {"node": "@id", "degree": "@degree{0,0}", "last seen": _seen(grid), "community": "@community"},
    )
    style = InlineStyleSheet(css=_INPUT_STYLE)
    search = AutocompleteInput(
        title="Find a node by its id",
        completions=nodes.ids,
        restrict=False,
        min_characters=1,
        max_completions=8,
        placeholder="id, then Enter",
        width=280,
        stylesheets=[style],
    )
    colouring = Select(
        title="Colour by",
        value="community",
        options=[("community", "community"), ("degree", "degree"), ("seen", "last seen")],
        width=180,
        stylesheets=[style],
    )
    note = Div(name="note", text="", render_as_text=True, stylesheets=[style], styles={"align-self": "end"})
    colouring.js_on_change("value", CustomJS(args={"dots": dots, "bars": bars}, code=asset("colour.js")))
    search.js_on_change(
        "value", CustomJS(args={"nodes": source, "map": plot, "note": note}, code=asset("search.js"))
    )
    found: dict[str, Any] = {"path": None, "paths": None, "moments": [], "plots": []}
    if nodes.paths is not None:
        # The best connected one, until another is chosen.
        first = int(np.argmax(nodes.degree[nodes.paths.nodes]))
        chosen = int(nodes.paths.nodes[first])
        found = _draw_paths(nodes.paths, first, nodes.ids[chosen], grid)
        source.selected.indices, note.text = [chosen], f"{nodes.ids[chosen]} is chosen."
    source.selected.js_on_change(
        "indices", CustomJS(args={"nodes": source, "note": note, **found}, code=asset("choose.js"))
    )
    controls = row(search, colouring, note, sizing_mode="stretch_width")
    return [column(controls, plot, sizing_mode="stretch_width")], found["plots"]


def _colour_bars(nodes: NodeMap, grid: TimeGrid) -> dict[str, Any]:
    """Return what each colouring means, by the column that it shows."""
    labels = [str(label + 1) for label in range(int(nodes.community.max()) + 1)]
    mappers = {
        "community": CategoricalColorMapper(factors=labels, palette=colours()[: len(labels)]),
        "degree": LogColorMapper(Cividis256, low=1, high=max(2, int(nodes.degree.max()))),
        "seen": LinearColorMapper(Cividis256, low=float(nodes.seen.min()), high=_above(nodes.seen)),
    }
    titles = {"community": "community", "degree": "degree", "seen": "last seen"}
    bars = {
        name: ColorBar(color_mapper=mapper, title=titles[name], width=12) for name, mapper in mappers.items()
    }
    if grid.scale.instant:
        bars["seen"].formatter = DatetimeTickFormatter()
    return bars


def _above(values: NDArray[Any]) -> float:
    """Return the end of a range of colours, which may not be empty."""
    low, high = float(values.min()), float(values.max())
    return high if high > low else low + 1.0


def _highlight(dots: Any) -> None:
    """Make the chosen dot stand out, and leave the others as they are."""
    chosen = dots.glyph.clone()
    chosen.update(size=18, line_color="#d55e00", line_width=4, line_alpha=1.0)
    dots.selection_glyph, dots.nonselection_glyph = chosen, dots.glyph


def _hover(plot: Any, renderers: Sequence[Any], shown: Mapping[str, str]) -> None:
    dates = {"@seen": "datetime", "@moment": "datetime"}
    plot.add_tools(HoverTool(renderers=list(renderers), tooltips=list(shown.items()), formatters=dates))


def _seen(grid: TimeGrid) -> str:
    return "@seen{%F %H:%M}" if grid.scale.instant else "@seen{0[.]000}"


def _draw_paths(paths: Paths, first: int, name: str, grid: TimeGrid) -> dict[str, Any]:
    """Draw one trajectory, on its plane and over time; return what choosing another one needs."""
    everything = ColumnDataSource(
        {axis: paths.points[:, :, at].astype(np.float32).ravel() for at, axis in enumerate("xy")}
    )
    path = ColumnDataSource(
        {"x": paths.points[first, :, 0], "y": paths.points[first, :, 1], "moment": paths.moments},
        name="path",
    )
    when = _seen(grid).replace("@seen", "@moment")
    plane = new_figure(name, tools="pan,wheel_zoom,reset,save", height=420)
    plane.xaxis.axis_label, plane.yaxis.axis_label = (
        f"{order} direction ({share:.0%} of all variation)"
        for order, share in zip(("first", "second"), paths.share, strict=True)
    )
    centres = paths.points.mean(axis=1)
    plane.scatter(centres[:, 0], centres[:, 1], size=4, color="#7d838c", alpha=0.35)
    plane.line("x", "y", source=path, color="#7d838c", alpha=0.5)
    mapper = LinearColorMapper(
        Cividis256, low=float(paths.moments.min()), high=_above(paths.moments), nan_color="#7d838c"
    )
    steps = plane.scatter(
        "x", "y", source=path, size=7, color={"field": "moment", "transform": mapper}, line_color=None
    )
    _hover(plane, [steps], {"when": when})
    kind = "datetime" if grid.scale.instant else "linear"
    over_time = new_figure(
        name, tools="xpan,xwheel_zoom,reset,save", height=280, x_axis_type=kind, active_scroll="xwheel_zoom"
    )
    over_time.xaxis.axis_label = f"time ({grid.scale.zone})" if grid.scale.instant else "time"
    lines = [
        over_time.line("moment", axis, source=path, color=colour, line_width=1.5, legend_label=label)
        for axis, colour, label in zip("xy", colours(), ("first direction", "second direction"), strict=False)
    ]
    over_time.legend.orientation = "horizontal"
    over_time.add_layout(over_time.legend[0], "above")
    _hover(over_time, lines[:1], {"when": when, "first": "@x{0.00}", "second": "@y{0.00}"})
    return {
        "path": path,
        "paths": everything,
        "moments": paths.moments.tolist(),
        "plots": [plane, over_time],
    }


def draw_rhythms(frequencies: pl.DataFrame, peaks: pl.DataFrame, grid: TimeGrid) -> Any:
    """Return how far every frequency stands out of noise, the peaks by name."""
    used, unused = colours()[0], "#7d838c"
    source = ColumnDataSource(
        {
            "k": frequencies["k"].to_numpy(),
            "height": frequencies["significance"].to_numpy(),
            "period": [name_period(steps, grid) for steps in frequencies["period_steps"]],
            "used": ["yes" if chosen else "no" for chosen in frequencies["chosen"]],
            "colour": [used if chosen else unused for chosen in frequencies["chosen"]],
        }
    )
    plot = new_figure(tools="xpan,xwheel_zoom,box_zoom,reset,save")
    plot.xaxis.axis_label = "how many times in the window"
    plot.yaxis.axis_label = "standard deviations above noise"
    stems = plot.segment(x0="k", y0=0, x1="k", y1="height", source=source, line_color="colour", line_width=2)
    dots = plot.scatter("k", "height", source=source, color="colour", size=5)
    plot.add_layout(Span(location=SIGNIFICANT, dimension="width", line_dash="dashed", line_color=unused))
    names = [name_period(steps, grid) for steps in peaks["period_steps"]]
    top = float(frequencies["significance"].max() or 0)  # type: ignore[arg-type]
    plot.y_range.end = 1.12 * max(top, SIGNIFICANT)
    plot.text(
        peaks["k"].to_numpy(),
        peaks["significance"].to_numpy(),
        text=names,
        x_offset=6,
        y_offset=-4,
        text_font_size="12px",
        text_color=unused,
    )
    _hover(
        plot,
        [stems, dots],
        {"": "@period", "above noise": "@height{0.0}", "in the trajectory": "@used", "k": "@k"},
    )
    return plot


def draw_fit(fit: pl.DataFrame, grid: TimeGrid) -> list[Any]:
    """Return what the fit leaves of every frequency and, where bounds are known, the gap to them."""
    good, bad = colours()[0], colours()[5]
    source = ColumnDataSource(
        {
            "k": fit["k"].to_numpy(),
            "left": fit["left"].to_numpy(),
            "gap": fit["gap"].fill_null(np.nan).to_numpy(),
            "period": [
                "the sum over time" if k == 0 else name_period(grid.n_steps / k, grid) for k in fit["k"]
            ],
            "iterations": fit["iterations"].to_numpy(),
            "solver": fit["solver"].to_list(),
            "seconds": fit["seconds"].to_numpy(),
            "state": ["converged" if done else "stopped early" for done in fit["converged"]],
            "colour": [good if done else bad for done in fit["converged"]],
        }
    )
    shown = {
        "": "@period",
        "left over": "@left{0.0%}",
        "gap": "@gap{0.00%}",
        "solver": "@solver, @iterations iterations, @seconds{0.00} s",
        "k": "@k",
    }
    plots = []
    columns = [("left", "share left over")]
    if fit["gap"].drop_nulls().len() > 1:
        columns.append(("gap", "gap to the lower bound"))
    for name, label in columns:
        plot = new_figure(tools="xpan,xwheel_zoom,reset,save", height=260)
        plot.xaxis.axis_label, plot.yaxis.axis_label = "how many times in the window", label
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[00]%")
        dots = plot.scatter("k", name, source=source, color="colour", size=7, legend_group="state")
        plot.add_layout(plot.legend[0], "above")
        plot.legend.orientation = "horizontal"
        plot.y_range.start = 0
        _hover(plot, [dots], shown)
        plots.append(plot)
    return plots


def draw_turns(turns: NDArray[np.int64]) -> Any:
    """Return the histogram of the angles between a node's vectors in two runs, as far as there are any."""
    last = max(10, int(np.flatnonzero(turns).max(initial=0)) + 1)
    edges, shown = np.arange(last + 1), turns[:last]
    plot = new_figure(height=240, x_range=(0, last))
    plot.xaxis.axis_label, plot.yaxis.axis_label = "degrees that a node turned by", "nodes"
    bars = plot.quad(
        left=edges[:-1], right=edges[1:], top=shown, bottom=0, color=colours()[0], line_color=None
    )
    plot.y_range.start = 0
    _hover(plot, [bars], {"turned": "@left° to @right°", "nodes": "@top{0,0}"})
    return plot


def draw_seconds(seconds: Mapping[str, float]) -> Any:
    """Return how long each stage took, in the order of the run."""
    stages = list(seconds)
    plot = new_figure(tools="save", height=90 + 22 * len(stages), y_range=stages[::-1])
    plot.xaxis.axis_label = "seconds"
    bars = plot.hbar(y=stages, right=list(seconds.values()), height=0.7, color=colours()[0])
    plot.x_range.start = 0
    plot.ygrid.visible = False
    _hover(plot, [bars], {"@y": "@right{0.00} s"})
    return plot
