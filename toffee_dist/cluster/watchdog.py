"""The watchdog: whether a job still gets on, and what is known of the cluster when it does not.

A task that hangs raises nothing. Here is what tells it from a slow one, time, and what a person needs to
find the cause, in files.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from toffee_dist.words import hide_addresses, hide_in, hide_secrets

# Seconds for each question to a cluster that may itself be what hangs.
ANSWER = 15.0
# Lines of each log, finished tasks, characters of a task's own description.
LINES, TASKS, WORDS = 500, 200, 500


class Watch:
    """Tells how long nothing has happened: no task ended, none began, none went to another worker.

    Parameters
    ----------
    stall
        Seconds of that which are too many; 0 is never.
    """

    def __init__(self, stall: float) -> None:
        self.stall = stall
        self.since = time.monotonic()
        self.seen: frozenset[tuple[str, str]] = frozenset()

    def stalled(self, processing: Mapping[str, Sequence[Any]]) -> bool:
        """Look at the tasks of each worker; return whether they have been the same for too long."""
        now = time.monotonic()
        pairs = frozenset((worker, str(key)) for worker, keys in processing.items() for key in keys)
        if pairs != self.seen:
            self.seen, self.since = pairs, now
        return 0 < self.stall < now - self.since


class NoAnswerError(TimeoutError):
    """A call that took too long; what the call itself raises is of other kinds."""


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Return what a call returns, or raise NoAnswerError: it is then left alone, until the process ends."""
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise NoAnswerError(f"no answer within {seconds:g} seconds") from None
    if error is not None:
        raise error
    return answer


def diagnose(client: Any, folder: Path, waiting: Mapping[str, Any]) -> None:
    """Leave what is known of a cluster in a folder; what does not answer in time leaves that instead.

    What looks like a credential is masked: tasks name their inputs, and logs quote tasks.

    Parameters
    ----------
    client
        Of the cluster.
    folder
        Gets ``cluster.json``, ``tasks.json`` (what we wait for, where it is and since when, and the last
        tasks that ended), ``stacks.json``, ``scheduler.log``, ``worker-*.log`` and ``report.html``.
    waiting
        What was asked for and is not done, by key.
    """
    with suppress(OSError):
        within(ANSWER, lambda: folder.mkdir(parents=True, exist_ok=True))
    # Masked before it is cut: half a signature looks like none.
    asked = {key: hide_secrets(repr(item))[:WORDS] for key, item in waiting.items()}
    _write(folder / "cluster.json", lambda: client.scheduler_info(n_workers=-1))
    _write(folder / "tasks.json", lambda: _add_words(client.run_on_scheduler(list_tasks), asked))
    _write(folder / "stacks.json", lambda: client.call_stack(keys=list(asked)))
    _write(folder / "scheduler.log", lambda: _lines(client.get_scheduler_logs(n=LINES)))
    # Each by itself: a worker that is gone must not keep the others' logs from us.
    for worker in _workers(client):
        name = "".join(letter if letter.isalnum() else "-" for letter in worker.partition("://")[2])
        _write(folder / f"worker-{name}.log", partial(_worker_log, client, worker))
    _write(folder / "report.html", lambda: _report(client))


def list_tasks(dask_scheduler: Any = None) -> dict[str, Any]:
    """Run on the scheduler: return what is under way and what ended last."""
    under_way = [
        {
            "key": str(task.key),
            "state": task.state,
            "worker": task.processing_on.address if task.processing_on else None,
            "seconds": task.processing_on.executing.get(task) if task.processing_on else None,
            "deaths": task.suspicious,
            "retries": task.retries,
        }
        for task in dask_scheduler.tasks.values()
        if task.state not in ("memory", "released", "forgotten", "erred")
    ]
    ended: list[dict[str, Any]] = []
    for entry in reversed(dask_scheduler.transition_log):
        if len(ended) >= TASKS:
            break
        if entry.start == "processing":
            ended.append({"key": str(entry.key), "state": entry.finish, "ago": time.time() - entry.timestamp})
    return {"under_way": under_way, "ended": ended}


def _add_words(tasks: dict[str, Any], asked: Mapping[str, str]) -> dict[str, Any]:
    for task in tasks["under_way"]:
        task["item"] = asked.get(task["key"])
    return tasks


def _workers(client: Any) -> list[str]:
    try:
        return list(within(ANSWER, lambda: client.scheduler_info(n_workers=-1))["workers"])
    except Exception:
        return []


def _worker_log(client: Any, worker: str) -> str:
    return _lines(client.get_worker_logs(n=LINES, workers=[worker])[worker])


def _lines(log: Sequence[tuple[str, str]]) -> str:
    # The newest comes first.
    return "".join(f"{line}\n" for _, line in reversed(log))


def _report(client: Any) -> str:
    # What `distributed.performance_report` writes at its end.
    report = client.sync(client.scheduler.performance_report, start=0, last_count=0, code="", mode="inline")
    return str(report)


def _write(path: Path, ask: Callable[[], Any]) -> None:
    try:
        answer = within(ANSWER, ask)
        if not isinstance(answer, str):
            text = json.dumps(hide_in(json.loads(json.dumps(answer, default=str))), indent=1) + "\n"
        else:
            # Of a page only addresses: its scripts are full of words such as token=.
            text = hide_addresses(answer) if path.suffix == ".html" else hide_secrets(answer)
    except Exception as error:
        text = hide_secrets(f"not known: {type(error).__name__}: {error}\n")
    # Storage may be what hangs: then there is no place to say so.
    with suppress(OSError):
        within(ANSWER, lambda: path.write_text(text, encoding="utf-8"))
