"""What every benchmark does alike: one BLAS thread, best of several runs, a table and a JSON line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from threadpoolctl import threadpool_limits

T = TypeVar("T")

THREAD_LIMITS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def one_thread() -> None:
    """Limit BLAS to one thread for the rest of the process, and of the processes that it starts.

    By the environment too: a library that is loaded later (SciPy and scikit-learn have their own) reads that.
    Beside other work, threads that wait for each other by spinning made an evaluation 20 times as long.
    """
    for name in THREAD_LIMITS:
        os.environ[name] = "1"
    threadpool_limits(1)


def timed(*functions: Callable[[], T], repeats: int = 1) -> list[tuple[float, T]]:
    """Return, for each function, its least CPU seconds over `repeats` rounds and its last result.

    CPU seconds of this one-threaded process, and the functions in turns: other work on the machine then
    disturbs all of them alike, and little.
    """
    seconds = [float("inf")] * len(functions)
    for _ in range(repeats):
        results = []
        for index, function in enumerate(functions):
            began = time.process_time()
            results.append(function())
            seconds[index] = min(seconds[index], time.process_time() - began)
    return list(zip(seconds, results, strict=True))


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows as aligned columns."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    print(f"\n{title}")
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def print_json(result: object) -> None:
    """Print the last line, for machines."""
    print(json.dumps(result))
