"""Leaving: a worker that is told to stop gives its tasks back before it goes.

For workers that come and go (spot machines, adaptive clusters, time limits of a queue):

    dask worker --preload-nanny toffee_dist.cluster.retire …

Without it a task whose worker was stopped counts a death, and after four of them is taken for the cause.
(Dask's setting `distributed.nanny.preload` does nothing for workers that its command starts.)
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

# Seconds for the scheduler to take the tasks back: far less than the notice that a spot machine gets.
NOTICE = 15.0


async def dask_teardown(nanny: Any) -> None:
    """Have the scheduler take the worker off its list in peace; called first when a nanny closes."""
    if nanny.worker_address is None:
        return
    # Where the scheduler is what is gone there is nobody to tell.
    with suppress(OSError, TimeoutError):
        leaving = nanny.scheduler.retire_workers(
            workers=[nanny.worker_address], close_workers=False, remove=True
        )
        await asyncio.wait_for(leaving, NOTICE)
