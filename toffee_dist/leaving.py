"""Leaving: a worker that is told to stop gives its tasks back before it goes.

For workers that come and go (spot machines, adaptive clusters, time limits of a queue): loaded by Dask as a
preload of nanny and worker (deploy/dask.yaml). Without it a task whose worker was stopped counts a death, and
after four of them is taken for the cause.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

# Seconds for the scheduler to take the tasks back: far less than the notice that a spot machine gets.
NOTICE = 5.0


async def dask_teardown(server: Any) -> None:
    """Ask the scheduler to take this worker off its list in peace; called when SIGTERM or a limit comes."""
    address = getattr(server, "worker_address", None) or server.address
    # Where the scheduler is what is gone there is nobody to tell.
    with suppress(OSError, asyncio.TimeoutError, ValueError):
        await asyncio.wait_for(
            server.scheduler.retire_workers(workers=[address], close_workers=False, remove=True), NOTICE
        )
