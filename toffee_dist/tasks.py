"""How a stage runs its tasks: what is common to one process, threads, and a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
