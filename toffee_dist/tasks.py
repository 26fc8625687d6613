"""How a stage runs its tasks: what is common to one process, threads, and a cluster."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

RunTasks = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
"""Applies a function to items, in parallel or not, and yields the results in the order of the items."""

Say = Callable[[str], None]
"""Is told something for the user to read, one line at a time."""


def run_here(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Run one item after the other, in this process: for tests and small work."""
    return map(function, items)


def give_back() -> None:
    """Return to the system what a task has freed: what one stage leaves must not add to the next one's peak.

    Between tasks, not within: it takes 1 to 4 ms, where the nanny's trimming on every free makes solving
    1.6 times as slow.
    """
    # Saves start-up time.
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
    # glibc's; other systems do as they do.
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
