"""A stranger on this machine: asks whoever listens on a port to run a function, in every way that Dask knows.

python -m tests.harness.stranger FOLDER PORT...
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

from distributed import Client
from distributed.core import connect
from distributed.protocol.pickle import dumps
from distributed.security import Security

# What a connection to a scheduler, a nanny or a worker may ask for that runs a function there.
OPERATIONS = ("run_function", "run")
SECONDS = 3.0


def leave(path: str) -> None:
    Path(path).touch()


async def ask(port: int, operation: str, security: Security | None, mark: Path) -> None:
    """Speak to one port: without certificates, or with those of an authority of one's own."""
    address = f"{'tcp' if security is None else 'tls'}://127.0.0.1:{port}"
    options: dict[str, Any] = {} if security is None else security.get_connection_args("client")
    comm = await connect(address, timeout=SECONDS, **options)
    await comm.write(
        {"op": operation, "function": dumps(leave), "args": dumps((str(mark),)), "wait": True, "reply": True}
    )
    await comm.read()
    comm.abort()


async def be_a_client(port: int, mark: Path) -> None:
    """Do what any user of Dask would."""
    async with Client(f"tcp://127.0.0.1:{port}", timeout=SECONDS, asynchronous=True) as client:
        await client.run_on_scheduler(leave, str(mark))


async def main(folder: Path, ports: list[int]) -> None:
    own = Security.temporary()
    attempts = [be_a_client(port, folder / f"{port}-client") for port in ports]
    for port in ports:
        for operation in OPERATIONS:
            attempts.append(ask(port, operation, None, folder / f"{port}-{operation}"))
            attempts.append(ask(port, operation, own, folder / f"{port}-{operation}-tls"))
    await asyncio.gather(*(asyncio.wait_for(each, 2 * SECONDS) for each in attempts), return_exceptions=True)


if __name__ == "__main__":
    logging.disable()
    asyncio.run(main(Path(sys.argv[1]), [int(port) for port in sys.argv[2:]]))
