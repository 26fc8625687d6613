"""Steadiness against movement: labels of nodes do not move, so every smoothing flatters them; draw both.

Per setting: the "when" AUC of hidden entries (benchmarks/intime.py) and the adjusted Rand index of k-means on
the vectors of each step against the labels (school classes, workplace departments), mean over busy steps,
with its standard error. Ours: strengths of the filter; IPP: bandwidths; UASE: one point. A setting of a rival
lies above ours where no strength of ours has both marks at least as high, less one standard error.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from graphs import DATA, load_graph
from intime import STEPS
from numpy.typing import NDArray
from report import one_thread, print_json, print_table

from toffee_dist.evaluation.in_time import Entries, Scorer, draw_questions
from toffee_dist.evaluation.labels import rand_index
from toffee_dist.models import find_model
from toffee_dist.settings import FitSettings, PairWeight

FILES = {"school": "ia-primary-school-proximity.labels", "workplace": "ia-workplace-contacts.labels"}
EDGES = {"school": "ia-primary-school-proximity.edges", "workplace": "ia-workplace-contacts.edges"}
RANK = 32
STEPS_ASKED = 40
STRENGTHS = (0.5, 1.0, 1.5, 2.0, 4.0, 8.0, 32.0, 1e6)


def read_labels(name: str) -> NDArray[np.int64]:
    """Return the class of every node, in the order of the rows of `load_graph`."""
    ids = np.unique(np.loadtxt(DATA / EDGES[name], delimiter=",", usecols=(0, 1)))
    words = dict(line.split("\t")[:2] for line in (DATA / FILES[name]).read_text().splitlines() if line)
    classes = {word: number for number, word in enumerate(sorted(set(words.values())))}
    return np.array([classes.get(words.get(str(int(node)), ""), -1) for node in ids])


def measure(name: str, weight: PairWeight) -> list[dict[str, Any]]:
    graph = load_graph(name, self_loops=False)
    entries = Entries.of(graph.tensor(STEPS[name], directed=False, pair_weight="raw"))
    labels, questions = read_labels(name), draw_questions(entries, 0)
    whole, known = entries.tensor(weight), questions.known.tensor(weight)
    active = np.zeros((whole.n_steps, whole.n_nodes), dtype=bool)
    active[whole.steps, whole.sources[whole.entry_pairs]] = True
    busy = np.flatnonzero(active.sum(axis=1) >= 0.5 * active.sum(axis=1).max())
    steps = busy[np.unique(np.linspace(0, len(busy) - 1, STEPS_ASKED).round().astype(int))]
    options = FitSettings(rank=RANK)
    settings: list[tuple[str, float | None]] = [("toffee", strength) for strength in STRENGTHS]
    settings += [("ipp", bandwidth) for bandwidth in find_model("ipp").smoothing] + [("uase", None)]
    rows = []
    for model, knob in settings:
        when = Scorer(find_model(model), known, options, knob).when(questions, 0.0)
        fit = find_model(model).fit_in_time
        assert fit is not None
        found = fit(whole, options, knob)
        marks = [rand_index(found.vectors(int(t)), np.where(active[t], labels, -1), 0) for t in steps]
        error = float(np.std(marks, ddof=1) / np.sqrt(len(marks)))
        row: dict[str, Any] = {
            "model": model,
            "knob": knob,
            "when": round(when.auc, 4),
            "when_error": round(when.error, 4),
        }
        rows.append(row | {"ari": round(float(np.mean(marks)), 4), "ari_error": round(error, 4)})
        print(name, weight, rows[-1], flush=True)
    ours = [row for row in rows if row["model"] == "toffee"]
    for row in rows:
        row["above_ours"] = row["model"] != "toffee" and not any(
            own["when"] >= row["when"] - row["when_error"] and own["ari"] >= row["ari"] - row["ari_error"]
            for own in ours
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", nargs="+", default=list(FILES), choices=list(FILES))
    parser.add_argument("--weights", nargs="+", default=["log", "raw"], choices=["raw", "log", "unit"])
    arguments = parser.parse_args()
    one_thread()
    result = {}
    for name in arguments.graphs:
        for weight in arguments.weights:
            rows = measure(name, weight)
            result[f"{name}, {weight}"] = rows
            table = [
                [r["model"], r["knob"], r["when"], r["ari"], r["ari_error"], r["above_ours"]] for r in rows
            ]
            print_table(
                f"{name}, {weight} weights", ["model", "knob", "when", "ARI", "±", "above ours"], table
            )
    print_json(result)


if __name__ == "__main__":
    main()
