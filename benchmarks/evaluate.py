"""The paper's Table 2 on the six graphs that exist here, side by side with the paper's own numbers.

Protocol `link-paper` (toffee_dist/evaluation/protocols.py), ranks of the paper, graphs read as undirected
like the peers' figures. `--best` adds the best configuration found on validation parts, `--cache` the gain of
fitting an embedding once for all seeds. Every graph has a process of its own, for its memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl
from graphs import DATA
from report import one_thread, print_json, print_table

from toffee_dist.evaluation import Cell, EvaluateConfig, Events, evaluate, read_events
from toffee_dist.evaluation.features import OPERATORS
from toffee_dist.evaluation.protocols import Split
from toffee_dist.evaluation.report import best_features, summarise, write_page
from toffee_dist.settings import EdgeSettings, FitSettings


@dataclass(frozen=True)
class Source:
    """A file, the paper's rank, and how it is read."""

    file: str
    rank: int
    step: str
    paper: dict[str, float]
    ceiling: float
    options: dict[str, Any] = field(default_factory=dict)


def _paper(tsvd: float, rescal: float, minus: float, toffee: float) -> dict[str, float]:
    return {"toffee": toffee, "toffee-": minus, "tsvd": tsvd, "rescal": rescal}


# The paper's Table 2 (Micro-F1 of the best operator), and what boosting on hand-made features reaches.
SOURCES = {
    "fb-forum": Source("fb-forum.edges", 128, "1d", _paper(0.8885, 0.8010, 0.9280, 0.9420), 0.944),
    "email": Source(
        *("email-Eu-core-temporal.txt.gz", 128, "1d", _paper(0.8684, 0.8812, 0.8912, 0.9010), 0.968),
        options={"time_unit": "s"},
    ),
    "school": Source(
        "ia-primary-school-proximity.edges", 128, "20", _paper(0.8213, 0.8102, 0.8162, 0.8218), 0.978
    ),
    "hypertext": Source(
        "ia-contacts_hypertext2009.edges", 64, "20", _paper(0.7669, 0.7788, 0.7687, 0.9661), 0.970
    ),
    "workplace": Source(
        "ia-workplace-contacts.edges", 64, "20", _paper(0.7835, 0.7146, 0.7913, 0.8366), 0.987
    ),
    "wildbird": Source(
        "aves-wildbird-network.edges", 128, "1", _paper(0.9778, 0.9202, 0.9851, 0.9936), 0.944
    ),
}
MODELS = ("toffee", "toffee-", "tsvd", "rescal", "memory", "degree")
# What --best chooses from, on the validation part.
RECENT = "sum+decay:20%+decay:5%+decay:1%"
CANDIDATES = [
    ("logistic", "combined", "sum"),
    ("logistic", "combined+scores", "sum"),
    ("logistic", "hadamard+scores", RECENT),
    ("trees", "scores", "sum"),
    ("trees", "scores", RECENT),
]


def read(name: str, step: str | None = None) -> Events:
    source = SOURCES[name]
    if not (DATA / source.file).exists():
        sys.exit(f"{DATA / source.file} is not there: this benchmark needs the real graphs of ../shared/data")
    config = EdgeSettings(
        inputs=(str(DATA / source.file),), undirected=True, step=step or source.step, **source.options
    )
    return read_events(config)


def table(name: str, seeds: int) -> list[Cell]:
    config = EvaluateConfig(models=MODELS, seeds=seeds, options=FitSettings(rank=SOURCES[name].rank))
    return evaluate(read(name), config)


def best(name: str, seeds: int) -> list[Cell]:
    """Choose on the validation part (2 seeds), then mark the test part with what was chosen."""
    events, rank = read(name), SOURCES[name].rank
    # Cut once more by the evaluation: the whole choice is made on rows before the test part.
    past = events.head(Split.test(len(events)).learn)

    def run(graph: Events, classifier: str, features: str, reduce: str, seeds: int) -> list[Cell]:
        options = FitSettings(rank=rank, reduce=reduce)
        config = EvaluateConfig(("link-paper",), ("toffee",), (features,), classifier, seeds, options)
        return evaluate(graph, config)

    validation = {candidate: run(past, *candidate, 2) for candidate in CANDIDATES}
    marks = {key: sum(cell.micro_f1 for cell in cells) / len(cells) for key, cells in validation.items()}
    chosen = max(marks, key=lambda key: marks[key])
    found = [replace(cell, part="validation") for cells in validation.values() for cell in cells]
    return found + run(events, *chosen, seeds)


def rescal(name: str, seeds: int) -> list[Cell]:
    """RESCAL with the weights that suit it, chosen on the validation part: ours are chosen for the sum."""
    grid = {"entry": ("binary", "count"), "pair_weight": ("unit", "log", "raw")}
    options = FitSettings(rank=SOURCES[name].rank)
    config = EvaluateConfig(
        models=("rescal",), features=tuple(OPERATORS), seeds=seeds, options=options, grid=grid
    )
    return evaluate(read(name), config)


def cache(name: str, seeds: int) -> dict[str, float]:
    """Time one evaluation of many seeds, and as many evaluations of one seed, in one run."""
    options = FitSettings(rank=SOURCES[name].rank)
    common: dict[str, Any] = {"models": ("toffee", "rescal"), "features": ("hadamard",), "options": options}
    began = time.process_time()
    once = evaluate(read(name), EvaluateConfig(seeds=seeds, **common))
    middle = time.process_time()
    naive = []
    for seed in range(seeds):
        naive += evaluate(read(name), EvaluateConfig(seeds=1, first_seed=seed, **common))
    end = time.process_time()
    key = [(cell.model, cell.seed, cell.micro_f1) for cell in once]
    if sorted(key) != sorted((cell.model, cell.seed, cell.micro_f1) for cell in naive):
        sys.exit("the two ways disagree")
    ours, theirs = middle - began, end - middle
    return {"seconds": round(ours, 1), "naive_seconds": round(theirs, 1), "ratio": round(theirs / ours, 2)}


def child(name: str, task: str, seeds: int) -> None:
    began = time.perf_counter()
    result: Any = {"table": table, "best": best, "cache": cache, "rescal": rescal}[task](name, seeds)
    rows = result if task == "cache" else [asdict(cell) for cell in result]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"rows": rows, "wall": time.perf_counter() - began, "memory": memory}))


def in_process(name: str, task: str, seeds: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", task, "--graphs", name, "--seeds", str(seeds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_graph(name: str, found: dict[str, Any], cells: pl.DataFrame) -> dict[str, Any]:
    """Print the table of one graph; return the best operator's F1 of every model."""
    summary = summarise(cells)
    four = {row["model"]: row for row in best_features(summary, list(OPERATORS)).iter_rows(named=True)}
    combined = {row["model"]: row for row in best_features(summary, ["combined"]).iter_rows(named=True)}
    rows: list[list[object]] = []
    for model in MODELS:
        row, paper = four[model], SOURCES[name].paper.get(model)
        both = combined[model]
        rows.append(
            [
                model,
                f"{row['micro_f1']:.4f} ± {row['micro_f1_sd']:.4f}",
                row["features"],
                f"{row['roc_auc']:.4f}",
                f"{row['average_precision']:.4f}",
                "-" if both["features"] == "score" else f"{both['micro_f1']:.4f}",
                "-" if paper is None else f"{paper:.4f}",
                f"{row['fit_seconds']:.2f}",
            ]
        )
    header = ["model", "Micro-F1", "operator", "AUC", "AP", "combined", "the paper says", "fit, CPU s"]
    cost = f"{found['wall']:.0f} s and {found['memory']:.0f} MiB in all"
    print_table(f"{name}, rank {SOURCES[name].rank}: protocol link-paper; {cost}", header, rows)
    return {model: round(float(four[model]["micro_f1"]), 4) for model in MODELS}


def _reduce(row: dict[str, Any]) -> str:
    return str(row["settings"].split("reduce=")[1].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--graphs", nargs="+", default=list(SOURCES), choices=list(SOURCES))
    parser.add_argument(
        "--best", action="store_true", help="also the best configuration chosen on validation parts"
    )
    parser.add_argument("--cache", action="store_true", help="also what caching the embedding of email saves")
    parser.add_argument("--rescal", action="store_true", help="also RESCAL with weights chosen for it")
    parser.add_argument("--only", action="store_true", help="leave the table out")
    parser.add_argument("--page", type=Path, help="write the plots here")
    parser.add_argument("--child", choices=["table", "best", "cache", "rescal"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    one_thread()
    if arguments.child:
        child(arguments.graphs[0], arguments.child, arguments.seeds)
        return
    result: dict[str, Any] = {}
    pages = {}
    for name in arguments.graphs if not arguments.only else ():
        found = in_process(name, "table", arguments.seeds)
        pages[name] = pl.DataFrame(found["rows"])
        result[name] = print_graph(name, found, pages[name])
    if arguments.page:
        write_page(arguments.page, pages)
    if arguments.best:
        rows: list[list[object]] = []
        tried: list[list[object]] = []
        for name in arguments.graphs:
            found = in_process(name, "best", arguments.seeds)
            table = summarise(pl.DataFrame(found["rows"]))
            (row,) = table.filter(pl.col("part") == "test").to_dicts()
            tried += [
                [
                    name,
                    t["classifier"],
                    t["features"],
                    _reduce(t),
                    f"{t['micro_f1']:.4f}",
                    f"{t['fresh_f1']:.4f}",
                ]
                for t in table.filter(pl.col("part") == "validation").to_dicts()
            ]
            ceiling = SOURCES[name].ceiling
            used = [row["features"], row["classifier"], _reduce(row)]
            marks = [
                f"{row['micro_f1']:.4f} ± {row['micro_f1_sd']:.4f}",
                ceiling,
                f"{row['micro_f1'] - ceiling:+.4f}",
            ]
            rows.append([name, *marks, f"{row['fresh_f1']:.4f}", *used, f"{found['wall']:.0f}"])
            result.setdefault(name, {})["best"] = round(row["micro_f1"], 4)
        header = [
            "graph",
            "Micro-F1",
            "ceiling",
            "difference",
            "fresh pairs",
            "features",
            "classifier",
            "reduce",
            "s",
        ]
        headings = ["graph", "classifier", "features", "reduce", "Micro-F1", "fresh pairs"]
        print_table("Validation parts", headings, tried)
        print_table("The best configuration, chosen on the validation part", header, rows)
    if arguments.rescal:
        rivals: list[list[object]] = []
        for name in arguments.graphs:
            summary = summarise(pl.DataFrame(in_process(name, "rescal", arguments.seeds)["rows"]))
            (top,) = best_features(summary.filter(pl.col("part") == "test")).to_dicts()
            weights = " ".join(top["settings"].split()[-2:])
            rivals.append(
                [name, f"{top['micro_f1']:.4f} ± {top['micro_f1_sd']:.4f}", top["features"], weights]
            )
            result.setdefault(name, {})["rescal_chosen"] = round(top["micro_f1"], 4)
        header = ["graph", "Micro-F1", "operator", "chosen"]
        print_table("RESCAL with entry and pair_weight chosen on the validation part", header, rivals)
    if arguments.cache:
        result["cache"] = in_process("email", "cache", arguments.seeds)["rows"]
        print(f"\nemail, rank 128, {arguments.seeds} seeds: one embedding for all seeds {result['cache']}")
    print_json(result)


if __name__ == "__main__":
    main()
