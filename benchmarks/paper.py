"""The paper's Table 2: its eight systems on six graphs, with the paper's figures in brackets.

Protocol `link-paper`, the paper's ranks, graphs read as undirected, Micro-F1 of the best of the four
operators. Every system with its default settings, and with settings chosen on the validation part
(`--tuned`): the learning part is cut 75 : 25 once more, two seeds. Every graph and system has a process of
its own; what is done is kept in `--keep`, and the command may be interrupted and started again. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from evaluate import SOURCES, read
from picture import scatter
from report import one_thread, print_json, print_table

from toffee_dist.evaluation import EvaluateConfig, evaluate
from toffee_dist.evaluation.features import OPERATORS
from toffee_dist.evaluation.kept import digest, show_seconds
from toffee_dist.evaluation.protocols import Split
from toffee_dist.settings import FitSettings

PAPER = {
    "fb-forum": (0.8615, 0.8567, 0.8091, 0.6493, 0.8885, 0.8010, 0.9280, 0.9420),
    "email": (0.8737, 0.8320, 0.8312, 0.6615, 0.8684, 0.8812, 0.8912, 0.9010),
    "school": (0.7957, 0.7806, 0.7957, 0.6043, 0.8213, 0.8102, 0.8162, 0.8218),
    "hypertext": (0.6956, 0.5831, 0.5832, 0.6526, 0.7669, 0.7788, 0.7687, 0.9661),
    "workplace": (0.7834, 0.6653, 0.7834, 0.6082, 0.7835, 0.7146, 0.7913, 0.8366),
    "wildbird": (0.8869, 0.8901, 0.8066, 0.7018, 0.9778, 0.9202, 0.9851, 0.9936),
}
SYSTEMS = ("htne", "ctdne", "hnip", "tne", "tsvd", "rescal", "toffee-", "toffee")
ROWS = (*SYSTEMS, "toffee-paper", "memory", "degree")


@dataclass(frozen=True)
class Search:
    """What --tuned chooses from: options of the model, and how entries are read."""

    options: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    weights: tuple[tuple[str, str], ...] = (("binary", "unit"),)


WEIGHTS = (("binary", "unit"), ("binary", "log"), ("count", "log"), ("count", "raw"))
# The paper's grid of λ.
REGS = (1e-4, 1e-3, 1e-2, 1e-1)
SEARCHES = {
    "htne": Search({"history": (2, 5), "epochs": (20, 60)}),
    "ctdne": Search({"epochs": (1, 5), "shortest_walk": (2, 10), "window": (5, 10)}),
    "hnip": Search({"epochs": (50, 150), "window": (3, 10)}),
    "tne": Search({"snapshots": (1, 10), "smoothness": (0.01, 1.0)}),
    "tsvd": Search(weights=WEIGHTS),
    "rescal": Search(weights=WEIGHTS),
    "toffee-": Search(weights=WEIGHTS),
    "toffee": Search({"reg": REGS}, WEIGHTS),
    "toffee-paper": Search({"reg": REGS}, (("count", "raw"),)),
}
# The graphs with steps of 20 s have mostly empty ones; the paper counts those that are not.
DISTINCT = ("school", "hypertext", "workplace")


def mark(name: str, model: str, seeds: int, keep: Path, tuned: bool) -> dict[str, Any]:
    """Return the marks of one system on one graph."""
    rank = SOURCES[name].rank
    # All slices are solved: as many as there are steps that are not empty.
    events = read(name, "distinct" if model == "toffee-paper" and name in DISTINCT else None)
    features = tuple(OPERATORS)

    def run(
        graph: Any, options: dict[str, Any], weights: tuple[str, str] | None, count: int, kind: str
    ) -> Any:
        reg = options.pop("reg", None)
        options |= {} if reg is None else {"reg_a": reg, "reg_r": reg}
        if weights is not None:
            graph = replace(graph, entry=weights[0], pair_weight=weights[1])
        fit = FitSettings(rank=rank, **options)
        config = EvaluateConfig(models=(kind,), features=features, seeds=count, options=fit)
        return evaluate(graph, config, cache=keep, say=lambda line: print(line, file=sys.stderr))

    chosen: tuple[dict[str, Any], tuple[str, str] | None] = ({}, None)
    if tuned:
        search = SEARCHES[model]
        past = events.head(Split.test(len(events)).learn)
        # The sum over time is the zero frequency: for the choice of λ it is enough to solve that.
        kind, more = (
            ("toffee", {"gauge": "none", "solver": "als"}) if model == "toffee-paper" else (model, {})
        )
        best = -1.0
        for weights in search.weights:
            for values in product(*search.options.values()):
                point = dict(zip(search.options, values, strict=True))
                merit = best_operator(run(past, {**point, **more}, weights, 2, kind))["f1"]
                if merit > best:
                    best, chosen = merit, (point, weights)
    found = best_operator(run(events, dict(chosen[0]), chosen[1], seeds, model))
    words = [f"{key}={value}" for key, value in chosen[0].items()]
    if chosen[1] is not None and len(SEARCHES[model].weights) > 1:
        words += list(chosen[1])
    return found | {"settings": " ".join(words)}


def best_operator(cells: list[Any]) -> dict[str, Any]:
    """Return the figures of the best operator."""
    by: dict[str, list[float]] = {}
    for cell in cells:
        by.setdefault(cell.features, []).append(cell.micro_f1)
    operator = max(by, key=lambda spec: float(np.mean(by[spec])))
    marks = by[operator]
    return {
        "f1": float(np.mean(marks)),
        "sd": float(np.std(marks, ddof=1)) if len(marks) > 1 else 0.0,
        "operator": operator,
        "operators": {spec: float(np.mean(values)) for spec, values in by.items()},
        "seconds": cells[0].fit_seconds,
        "mib": cells[0].fit_mib,
    }


def in_process(name: str, model: str, arguments: argparse.Namespace, tuned: bool) -> dict[str, Any]:
    """Return the marks of one system on one graph, from a process of its own or from what is kept."""
    path = arguments.keep / f"{digest(name, model, arguments.seeds, tuned)}.json"
    if not path.exists():
        command = [
            sys.executable,
            __file__,
            "--child",
            model,
            "--graphs",
            name,
            "--keep",
            str(arguments.keep),
        ]
        command += ["--seeds", str(arguments.seeds), *(["--tuned"] if tuned else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(done.returncode)
        path.write_text(done.stdout.splitlines()[-1])
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def print_rows(title: str, found: dict[str, dict[str, Any]], rows: list[str]) -> None:
    """Print a row per system, a column per graph."""
    paper = {
        name: dict(zip(SYSTEMS, PAPER[name], strict=True)) | {"toffee-paper": PAPER[name][-1]}
        for name in found
    }
    table: list[list[object]] = []
    for model in rows:
        row: list[object] = [model]
        for name, marks in found.items():
            if model not in marks:
                row.append("-")
                continue
            theirs = paper[name].get(model)
            row.append(
                f"{marks[model]['f1']:.4f} ± {marks[model]['sd']:.4f}"
                + (f" ({theirs:.4f})" if theirs is not None else "")
            )
        table.append(row)
    print_table(title, ["system", *found], table)
    for what, digits in (("seconds", 2), ("mib", 0)):
        costs: list[list[object]] = [
            [m, *(f"{marks[m][what]:.{digits}f}" if m in marks else "-" for marks in found.values())]
            for m in rows
            if m not in ("memory", "degree")
        ]
        print_table({"seconds": "CPU s per fit", "mib": "MiB per fit"}[what], ["system", *found], costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--graphs", nargs="+", default=list(PAPER), choices=list(PAPER))
    parser.add_argument("--systems", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--tuned", action="store_true", help="also settings chosen on validation parts")
    parser.add_argument("--keep", type=Path, default=Path("build/paper"), help="folder of what is done")
    parser.add_argument("--picture", type=Path, help="write quality against time on wildbird here, as SVG")
    parser.add_argument("--child", choices=list(ROWS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    one_thread()
    arguments.keep.mkdir(parents=True, exist_ok=True)
    if arguments.child:
        print(
            json.dumps(
                mark(
                    arguments.graphs[0],
                    arguments.child,
                    arguments.seeds,
                    arguments.keep / "cells",
                    arguments.tuned,
                )
            )
        )
        return
    wanted = [
        (tuned, name, model)
        for tuned in ([False, True] if arguments.tuned else [False])
        for name in arguments.graphs
        for model in arguments.systems
        if not tuned or model in SEARCHES
    ]
    result: dict[bool, dict[str, dict[str, Any]]] = {False: {}, True: {}}
    began = time.monotonic()
    for number, (tuned, name, model) in enumerate(wanted):
        marks = in_process(name, model, arguments, tuned)
        result[tuned].setdefault(name, {})[model] = marks
        left = (time.monotonic() - began) / (number + 1) * (len(wanted) - number - 1)
        said = f"{number + 1} of {len(wanted)}: {name} {model}{' tuned' if tuned else ''} {marks['f1']:.4f}"
        print(f"{said}, about {show_seconds(left)} left", file=sys.stderr, flush=True)
    print_rows("Default settings (in brackets, what the paper says)", result[False], arguments.systems)
    if arguments.tuned:
        rows = [model for model in arguments.systems if model in SEARCHES]
        print_rows("Settings chosen on the validation part", result[True], rows)
        chosen: list[list[object]] = [
            [m, *(result[True][name][m]["settings"] or "-" for name in result[True])] for m in rows
        ]
        print_table("Chosen", ["system", *result[True]], chosen)
    if arguments.picture and "wildbird" in result[False]:
        points = {
            model: (marks["seconds"], marks["f1"])
            for model, marks in result[False]["wildbird"].items()
            if marks["seconds"] > 0
        }
        arguments.picture.write_text(
            scatter(points, "wildbird: quality against time", "CPU seconds to fit", "Micro-F1")
        )
    output: dict[str, Any] = {
        name: {model: round(marks["f1"], 4) for model, marks in found.items()}
        for name, found in result[False].items()
    }
    if arguments.tuned:
        output["tuned"] = {
            name: {model: round(marks["f1"], 4) for model, marks in found.items()}
            for name, found in result[True].items()
        }
    print_json(output)


if __name__ == "__main__":
    main()
