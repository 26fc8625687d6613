"""The paper's systems on a larger graph: sx-mathoverflow (24,759 nodes), rank 64, steps of a week.

Protocol `link-paper`, defaults, read as undirected. A system that the plan says takes longer than `--minutes`
is not run: its row says what it would need. Every system has a process of its own; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphs import DATA
from paper import best_operator, compile_loops
from report import one_thread, print_json, print_table

from toffee_dist.evaluation import EvaluateConfig, evaluate, read_events
from toffee_dist.evaluation.features import OPERATORS
from toffee_dist.evaluation.job import ALL_MODELS
from toffee_dist.evaluation.protocols import Split
from toffee_dist.models import find_model
from toffee_dist.settings import EdgeSettings, FitSettings
from toffee_dist.storage.tensors import Sizes
from toffee_dist.units import show_bytes

RANK = 64


def mark(model: str, seeds: int, minutes: float, keep: Path) -> dict[str, Any]:
    """Return the marks of one system, or what it would need."""
    path = DATA / "sx-mathoverflow.txt.gz"
    if not path.exists():
        sys.exit(f"{path} is not there: this benchmark needs the real graphs of ../shared/data")
    events = read_events(EdgeSettings(inputs=(str(path),), undirected=True, step="1w"))
    link = events.source != events.target
    events = replace(events, source=events.source[link], target=events.target[link], time=events.time[link])
    options = FitSettings(rank=RANK)
    costs = find_model(model).costs
    if costs is not None:
        tensor = events.head(Split.test(len(events)).learn).past().tensor
        sizes = Sizes(tensor.n_nodes, tensor.n_steps, tensor.n_pairs, tensor.n_entries)
        stages = costs(sizes, False, options)
        seconds, memory = sum(stage.seconds for stage in stages), max(stage.task_bytes for stage in stages)
        if seconds > 60 * minutes:
            return {"needs": f"{seconds / 60:.0f} min and {show_bytes(memory)} per task", "plan": seconds}
    if find_model(model).fit is not None:
        compile_loops(model)
    config = EvaluateConfig(models=(model,), features=tuple(OPERATORS), seeds=seeds, options=options)
    return best_operator(evaluate(events, config, cache=keep))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--systems", nargs="+", default=list(ALL_MODELS), choices=list(ALL_MODELS))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--keep", type=Path, default=Path("build/systems"))
    parser.add_argument("--child", choices=list(ALL_MODELS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    one_thread()
    arguments.keep.mkdir(parents=True, exist_ok=True)
    if arguments.child:
        print(json.dumps(mark(arguments.child, arguments.seeds, arguments.minutes, arguments.keep)))
        return
    rows: list[list[object]] = []
    result: dict[str, Any] = {}
    for model in arguments.systems:
        began = time.monotonic()
        command = [sys.executable, __file__, "--child", model, "--keep", str(arguments.keep)]
        command += ["--seeds", str(arguments.seeds), "--minutes", str(arguments.minutes)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(done.returncode)
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"{model}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if "needs" in found:
            rows.append([model, "not run", "", f"would need {found['needs']}", ""])
            result[model] = found["needs"]
            continue
        result[model] = round(found["f1"], 4)
        mark_, took = f"{found['f1']:.4f} ± {found['sd']:.4f}", f"{found['seconds']:.1f}"
        rows.append([model, mark_, found["operator"], took, f"{found['mib']:.0f}"])
    print_table("sx-mathoverflow, rank 64", ["system", "Micro-F1", "by", "fit, CPU s", "fit, MiB"], rows)
    print_json(result)


if __name__ == "__main__":
    main()
