"""Whether a scheduler or worker answers, for health checks: exit code 0 or 1.

    HEALTH=tls://127.0.0.1:8786 TLS_DIR=/certs TLS_ROLE=scheduler python deploy/health.py

Asks by Dask's own protocol, with the certificate of the role. Without HEALTH there is nothing to ask.
Run by `make image-test` (in containers) and `make test` (against a TLS cluster, tests/deploy/test_deploy.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from distributed.core import rpc
from distributed.security import Security

SECONDS = 6.0


async def ask(address: str, folder: Path, role: str) -> str:
    """Return what answers: its type."""
    security = Security(
        require_encryption=True,
        tls_ca_file=str(folder / "ca.pem"),
        tls_client_cert=str(folder / f"{role}.pem"),
        tls_client_key=str(folder / f"{role}-key.pem"),
    )
    async with rpc(address, connection_args=security.get_connection_args("client")) as server:
        answer = await server.identity()
    return str(answer["type"])


def main() -> int:
    """Ask, and say what was found."""
    address = os.environ.get("HEALTH", "")
    if not address:
        return 0
    folder, role = Path(os.environ.get("TLS_DIR", "/certs")), os.environ.get("TLS_ROLE", "client")
    try:
        found = asyncio.run(asyncio.wait_for(ask(address, folder, role), SECONDS))
    except (TimeoutError, OSError, ValueError) as error:
        print(f"{address}: {type(error).__name__}: {error}")
        return 1
    print(f"{address}: {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
