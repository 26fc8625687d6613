"""Progress: a bar with rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from toffee_dist.words import hide_secrets, show_text

# Seconds between two lines of a stage where there is no terminal.
LINE_EVERY = 30.0


class Progress:
    """Says nothing: for use from Python."""

    def say(self, line: str) -> None:
        """Tell the user one thing."""

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Show a stage of `total` tasks; call what it gives after every one."""
        yield lambda: None


class LineProgress(Progress):
    """Lines on stderr: for logs."""

    def say(self, line: str) -> None:
        """Write one line."""
        print(hide_secrets(show_text(line)), file=sys.stderr, flush=True)

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Write a line at the end, and every half minute on the way."""
        began = said = time.monotonic()
        count = 0

        def done() -> None:
            nonlocal count, said
            count += 1
            now = time.monotonic()
            if now - said > LINE_EVERY:
                said = now
                rate = count / (now - began)
                left = f", {(total - count) / rate:.0f} s left" if total else ""
                of = f" of {total:,}" if total else ""
                self.say(f"{name}: {count:,}{of} tasks, {rate:.2g} per second{left}")

        yield done
        tasks = "task" if count == 1 else "tasks"
        self.say(f"{name}: {count:,} {tasks} in {time.monotonic() - began:.1f} s")


class LogProgress(LineProgress):
    """Lines to a logger: for an orchestrator."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell

    def say(self, line: str) -> None:
        """Hand one line over."""
        self.tell(hide_secrets(show_text(line)))


class BarProgress(Progress):
    """A bar on a terminal."""

    def say(self, line: str) -> None:
        """Write one line above the bar."""
        print(hide_secrets(show_text(line)), file=sys.stderr, flush=True)

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Show the bar while the stage lasts, and leave it."""
        # Saves start-up time.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            ProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bars
        from rich.progress import Task as BarTask
        from rich.text import Text

        class Rate(ProgressColumn):
            """Tasks per second."""

            def render(self, task: BarTask) -> Text:
                return Text(f"{task.speed:.2g}/s" if task.speed else "")

        columns = (
            TextColumn("{task.description:<18}"),
            BarColumn(),
            MofNCompleteColumn(),
            Rate(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Bars(*columns, console=Console(stderr=True)) as bars:
            bar = bars.add_task(name, total=total)
            yield lambda: bars.advance(bar)


def choose_progress(quiet: bool = False) -> Progress:
    """Return what suits stderr."""
    if quiet:
        return Progress()
    return BarProgress() if sys.stderr.isatty() else LineProgress()
