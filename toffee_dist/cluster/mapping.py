"""Running tasks on a client, and waiting for them."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toffee_dist.cluster.client import ALLOWED_FAILURES
from toffee_dist.cluster.watchdog import ANSWER, NoAnswerError, Watch, diagnose, within
from toffee_dist.errors import ToffeeError, UnfinishedError
from toffee_dist.settings import STALL
from toffee_dist.tasks import RunTasks, give_back

# Enough that no worker waits, few enough that a million items do not sit in the scheduler.
AHEAD = 256
# A task that raises is tried again this often; then the run ends, resumable.
RETRIES = 2
# Seconds between two looks at whether there still is a cluster.
LOOK = 1.0

log = logging.getLogger(__name__)


def runner(
    client: Any,
    *,
    wait: float = 60.0,
    stall: float = STALL,
    diagnostics: Path | None = None,
    done: Callable[[], None] = lambda: None,
) -> RunTasks:
    """Turn a client into the plain callable that the stages take: run(function, items) → results in order.

    A task that raises is tried again, unless it says that the input or configuration is wrong. All workers
    gone for `wait` seconds, the scheduler gone, or `stall` seconds in which no task ends and none begins,
    end the run with `UnfinishedError`.

    Parameters
    ----------
    client
        Where the tasks run.
    wait
        Seconds for new workers to come when all are gone.
    stall
        Seconds without progress; 0 waits for ever.
    diagnostics
        Folder for what is known of the cluster after a stall.
    done
        Called after every task.
    """

    def run(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        waiting: deque[tuple[Any, Any]] = deque()
        source = iter(items)
        # What the dashboard and the logs call the tasks; a partial is called what it calls.
        name = getattr(getattr(function, "func", function), "__name__", "task")
        try:
            while True:
                for item in source:
                    key = f"{name}-{uuid.uuid4().hex}"
                    future = client.submit(_attempt, function, item, key=key, pure=False, retries=RETRIES)
                    waiting.append((future, item))
                    if len(waiting) >= AHEAD:
                        break
                if not waiting:
                    return
                try:
                    result = _result(client, waiting[0][0], wait, Watch(stall))
                except _StallError:
                    raise _explain_stall(client, stall, diagnostics, waiting) from None
                waiting.popleft()
                done()
                yield result
        finally:
            # On failure the rest must not go on writing into a folder that is about to go.
            if waiting and client.status == "running":
                with suppress(TimeoutError, OSError):
                    within(ANSWER, lambda: client.cancel([future for future, _ in waiting]))

    return run


class _StallError(Exception):
    """Nothing has happened for too long."""


def _explain_stall(
    client: Any, stall: float, folder: Path | None, waiting: Iterable[tuple[Any, Any]]
) -> UnfinishedError:
    where = "no folder"
    if folder is not None:
        diagnose(client, folder, {future.key: item for future, item in waiting})
        where = str(folder)
    return UnfinishedError(
        "the job makes no progress",
        got=f"no task that ended or began for {stall:g} seconds; diagnostics in {where}",
        remedy="Restart the workers that hang, then go on with toffee resume.",
    )


@dataclass(frozen=True)
class _Refused:
    """An answer of a task that no second try will change."""

    error: ToffeeError


class TaskError(Exception):
    """What went wrong in a task, in words: the error itself may not be able to travel."""


def _attempt(function: Callable[[Any], Any], item: Any) -> Any:
    problem: Exception
    try:
        return function(item)
    except (KeyboardInterrupt, SystemExit):
        # The end of the worker, not of the task.
        raise
    except UnfinishedError as error:
        problem = error
    except ToffeeError as error:
        return _Refused(error)
    except OSError as error:
        problem = OSError(error.errno, error.strerror or str(error), error.filename)
    except BaseException as error:
        # A panic of a Rust library is no Exception, and does not travel: the client would wait for ever.
        if os.environ.get("TOFFEE_DEBUG"):
            log.exception("a task failed")
        problem = TaskError(f"{type(error).__name__}: {error}")
    finally:
        give_back()
    # Raised here, without the frames it came through: a client that cannot rebuild those waits for ever.
    raise problem


def _result(client: Any, future: Any, wait: float, watch: Watch) -> Any:
    # Saves start-up time.
    from distributed import CancelledError, KilledWorker
    from distributed.comm import CommClosedError

    try:
        _await(client, future, wait, watch)
        result = _take(future, watch.stall)
    except (CancelledError, CommClosedError):
        raise lost("the scheduler is gone") from None
    except KilledWorker as error:
        raise UnfinishedError(
            "a task lost its worker again and again",
            got=f"{ALLOWED_FAILURES + 1} workers died under {error.task}",
            remedy="Out of memory? See toffee plan; then go on with toffee resume.",
        ) from None
    except OSError as error:
        raise UnfinishedError(
            "storage failed",
            got=f"{error}",
            remedy="Make room or fix it, then go on with toffee resume.",
        ) from None
    except (ToffeeError, _StallError):
        raise
    except Exception as error:
        raise UnfinishedError(
            f"a task failed {RETRIES + 1} times",
            got=str(error) if isinstance(error, TaskError) else f"{type(error).__name__}: {error}",
            remedy="Workers started with TOFFEE_DEBUG=1 log the details; toffee resume tries again.",
        ) from None
    if isinstance(result, _Refused):
        raise result.error
    return result


def _take(future: Any, stall: float) -> Any:
    """Return the answer of a future that is done; one that never arrives is a stall too."""
    if not stall:
        return future.result()
    try:
        return within(stall, future.result)
    except NoAnswerError:
        raise _StallError from None


def _await(client: Any, future: Any, wait: float, watch: Watch) -> None:
    """Wait for a future as long as there is somebody to work on it, and work is being done."""
    alone_since: float | None = None
    # Not future.result(timeout): what times out there is reported as an exception that nobody took.
    finished = threading.Event()
    future.add_done_callback(lambda _: finished.set())
    while future.status == "pending":
        if finished.wait(LOOK):
            return
        processing = _processing(client)
        alone_since = None if processing else (alone_since or time.monotonic())
        if alone_since is not None and time.monotonic() - alone_since > wait:
            raise lost(f"no worker for {wait:g} seconds")
        if watch.stalled(processing):
            raise _StallError


def lost(got: str) -> UnfinishedError:
    """Return what is said of a cluster that is gone."""
    return UnfinishedError(
        "the cluster is lost",
        got=got,
        remedy="Start them again, then go on with toffee resume.",
    )


def _processing(client: Any) -> dict[str, Any]:
    """Return the tasks of every worker; nothing where nobody answers."""
    try:
        return dict(within(ANSWER, client.processing))
    except OSError:
        return {}
