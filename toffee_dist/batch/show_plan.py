"""The plan in words, and as plain types."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from toffee_dist.batch.plan import Plan
from toffee_dist.kernels.spectrum import count_freqs
from toffee_dist.units import show_bytes


def plan_json(plan: Plan, workers: int, bandwidth: float) -> dict[str, Any]:
    """Return the plan as plain types, with the figures that size a cluster."""
    return {
        **asdict(plan),
        "stages": [
            {**asdict(stage), "seconds_with_workers": stage.seconds_with(workers, bandwidth)}
            for stage in plan.stages
        ],
        "task_bytes": plan.task_bytes,
        "mapped_bytes": plan.mapped_bytes,
        "worker_bytes": {threads: plan.worker_bytes(threads) for threads in (1, 2, 4)},
        "disk_bytes": plan.disk,
        "seconds": plan.seconds,
        "workers": workers,
        "seconds_with_workers": plan.seconds_with(workers, bandwidth),
    }


def describe_plan(plan: Plan, workers: int, bandwidth: float) -> str:
    """Return the plan as lines for a person."""
    shape = plan.shape
    about = "" if shape.exact else "about "
    solved = f", of which at most {plan.n_freqs:,} will be solved" if plan.n_freqs else ""
    lines = [
        f"nodes      {about}{shape.n_nodes:,}",
        f"steps      {shape.n_steps:,}, so {count_freqs(shape.n_steps):,} frequencies{solved}",
        f"pairs      {about}{shape.n_pairs:,}, with at most {shape.n_entries:,} entries, "
        f"from {shape.rows:,} rows",
        f"outputs    {', '.join(plan.outputs)}, rank {plan.rank}",
        "",
        f"{'stage':<16} {'tasks':>7} {'passes':>6} {'memory/task':>14} {'seconds':>9} {'disk':>10}  why",
    ]
    for stage in plan.stages:
        lines.append(
            f"{stage.name:<16} {stage.tasks:>7,} {stage.passes:>6,} {show_bytes(stage.task_bytes):>14} "
            f"{stage.seconds:>9,.1f} {show_bytes(stage.disk):>10}  {stage.why}"
        )
    for stage in plan.stages:
        if stage.moved:
            each = show_bytes(stage.moved // stage.passes)
            lines += ["", f"{stage.name}: {show_bytes(stage.moved)} through storage, {each} per pass"]
    if plan.notes:
        lines += ["", *plan.notes]
    need = ", ".join(f"{show_bytes(plan.worker_bytes(threads))} with {threads}" for threads in (1, 2, 4))
    lines += [
        "",
        f"per worker {need} threads, {show_bytes(plan.mapped_bytes)} of it the mapped tensor",
        f"in all     {show_bytes(plan.disk)} of storage, about {plan.seconds:,.0f} seconds on one core",
        f"workers    about {plan.seconds_with(workers, bandwidth):,.0f} seconds with {workers:,} of one "
        f"thread, each with {show_bytes(bandwidth)}/s to and from storage",
    ]
    return "\n".join(lines)
