"""The size of a cluster on Kubernetes, computed from a plan.

    toffee plan s3://my-bucket/edges/ --rank 128 --json > plan.json
    python deploy/kubernetes/size.py plan.json --max-workers 20

Writes size.yaml of every overlay: how many workers, and the memory and disk that each asks for. Requests
equal limits, so that no worker is put where it does not fit. Run by `make test`
(tests/deploy/test_deploy.py) on a real plan.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OVERLAYS = Path(__file__).parent / "overlays"
# Where an overlay has the specification of its cluster.
PREFIXES = {"nightly": "/spec", "once": "/spec/cluster/spec"}
# Dask ends a worker at this share of its limit (deploy/dask.yaml), and the plan must fit below.
USABLE_SHARE = 0.95
MEBIBYTE = 2**20
# Tensors of which a worker keeps a local copy (toffee_dist/storage/local_cache.py) and the one that is being
# made; and what is left for logs and small files.
COPIES, LOG_BYTES = 4, 1024 * MEBIBYTE


def size_workers(plan: Mapping[str, Any], threads: int, max_workers: int) -> dict[str, int]:
    """Return workers, and bytes and threads of each: as many as have work, within what is allowed."""
    widest = max(int(stage["tasks"]) for stage in plan["stages"])
    needed = int(plan["worker_bytes"][str(threads)]) / USABLE_SHARE
    # What is known before the plan's first task: estimates are within 3 %.
    memory = math.ceil(1.05 * needed / (256 * MEBIBYTE)) * 256 * MEBIBYTE
    disk = math.ceil((COPIES * int(plan["mapped_bytes"]) + LOG_BYTES) / (256 * MEBIBYTE)) * 256 * MEBIBYTE
    return {
        "workers": max(1, min(max_workers, math.ceil(widest / threads))),
        "bytes": memory,
        "disk": disk,
        "threads": threads,
    }


def make_patch(prefix: str, size: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the size as a JSON patch of the object whose cluster is below `prefix`."""
    container = f"{prefix}/worker/spec/containers/0"
    memory, disk = f"{size['bytes'] // MEBIBYTE}Mi", f"{size['disk'] // MEBIBYTE}Mi"
    logs = f"{(size['disk'] + LOG_BYTES) // MEBIBYTE}Mi"
    return [
        {"op": "replace", "path": f"{prefix}/worker/replicas", "value": size["workers"]},
        # The fifth argument, which a test holds to be --nthreads.
        {"op": "replace", "path": f"{container}/args/4", "value": f"--nthreads={size['threads']}"},
        {
            "op": "replace",
            "path": f"{container}/resources",
            "value": {
                "requests": {"cpu": str(size["threads"]), "memory": memory, "ephemeral-storage": logs},
                "limits": {"memory": memory, "ephemeral-storage": logs},
            },
        },
        # The second volume, which a test holds to be /tmp.
        {"op": "replace", "path": f"{prefix}/worker/spec/volumes/1/emptyDir/sizeLimit", "value": disk},
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the patches."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", help="file of `toffee plan --json`, or - for standard input")
    parser.add_argument("--threads", type=int, choices=(1, 2, 4), default=1, help="tasks at once in a worker")
    parser.add_argument("--max-workers", type=int, default=10)
    parser.add_argument("--overlays", type=Path, default=OVERLAYS, help="folder of the overlays")
    given = parser.parse_args(arguments)
    try:
        text = sys.stdin.read() if given.plan == "-" else Path(given.plan).read_text()
        size = size_workers(json.loads(text), given.threads, given.max_workers)
    except (OSError, ValueError, KeyError) as error:
        print(f"Error: {given.plan} is no plan of `toffee plan --json`: {error!r}", file=sys.stderr)
        return 2
    for overlay, prefix in PREFIXES.items():
        # JSON is YAML, and one form less to get wrong.
        lines = ",\n".join(f"  {json.dumps(step)}" for step in make_patch(prefix, size))
        note = "# Written by deploy/kubernetes/size.py from `toffee plan --json`."
        (given.overlays / overlay / "size.yaml").write_text(f"{note}\n[\n{lines}\n]\n")
    print(f"{size['workers']} workers, {size['threads']} threads and {size['bytes'] / 2**30:.2f} GiB each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
