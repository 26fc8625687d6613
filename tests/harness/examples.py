"""What the examples of the help and of the documentation speak of, and a shell for their lines."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from toffee_dist.batch import write_outputs
from toffee_dist.cli import main
from toffee_dist.errors import UnfinishedError

PEOPLE = ["alice", "bob", "carol", *(f"person-{i:02d}" for i in range(37))]
EMBED = "toffee embed mail.csv --out vectors --rank 4 --outputs embedding,trajectory"
FIRST = 1_704_067_200  # 2024-01-01, a Monday


def write_edges(path: Path, days: range, people: list[str] = PEOPLE, seed: int = 0) -> None:
    rng = np.random.default_rng([seed, days.start])
    size = 30 * len(days)
    source = rng.integers(len(people), size=size)
    target = np.where(rng.random(size) < 0.7, source // 10 * 10, 0) + rng.integers(10, size=size)
    pl.DataFrame(
        {
            "source": [people[i] for i in source],
            "target": [people[i % len(people)] for i in target],
            "time": FIRST + 86400 * rng.choice(days, size) + rng.integers(86400, size=size),
        }
    ).write_parquet(path)


def call(line: str) -> None:
    """Run a line of an example as a shell would, but for globs, which toffee reads itself."""
    words = shlex.split(line, comments=True)
    assert words[0] == "toffee"
    main(words[1:])


def leave_a_run_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(task: Any) -> int:
        raise UnfinishedError("a test", got="nothing", allowed="nothing")

    with monkeypatch.context() as patch:
        patch.setattr(write_outputs, "write_part", fail)
        with pytest.raises(SystemExit) as stop:
            call(f"{EMBED} --mode threads")
    assert stop.value.code == 5
