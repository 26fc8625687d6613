"""Ceph's object gateway for tests: a second S3 server, from Debian's packages, its data in memory.

A monitor, one store and the gateway, as processes on the loopback; about three seconds until it answers.
"""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from tests.harness.clusters import free_port, stop

PACKAGES = ("ceph-mon", "ceph-osd", "radosgw")
SECONDS = 60.0
# Nobody else: the gateway asks for keys, the daemons behind it are this test's and on the loopback.
CONFIG = """[global]
fsid = {cluster}
mon_host = [v2:127.0.0.1:{monitor}/0]
mon_initial_members = a
public_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_client_mode = crc
ms_mon_client_mode = crc
ms_bind_port_min = {first}
ms_bind_port_max = {last}
mon_data = {folder}/monitor
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
paxos_propose_interval = 0.1
osd_data = {folder}/store
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_crush_chooseleaf_type = 0
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
rgw_frontends = beast endpoint=127.0.0.1:{gateway}
run_dir = {folder}
crash_dir = {folder}
admin_socket = {folder}/$name.asok
log_file = {folder}/$name.log
keyring = {folder}/keyring
pid_file =
"""


def missing() -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in PACKAGES if shutil.which(name) is None]


@contextmanager
def gateway(key: str, secret: str) -> Iterator[int]:
    """Give the port of a gateway with one account."""
    if absent := missing():
        raise RuntimeError(f"{', '.join(absent)}: not installed; `make s3-test` does that")
    # Sockets have names of 107 letters at the most, and those of pytest's folders are long.
    with tempfile.TemporaryDirectory(prefix="ceph-") as name, ExitStack() as stack:
        folder, port, cluster, first = Path(name), free_port(), str(uuid.uuid4()), free_port()
        monitor = free_port()
        ports = {"monitor": monitor, "gateway": port, "first": first, "last": min(first + 200, 65000)}
        config = folder / "ceph.conf"
        config.write_text(CONFIG.format(folder=folder, cluster=cluster, **ports))
        for made in ("monitor", "store"):
            (folder / made).mkdir()
        (folder / "keyring").touch()
        conf = f"--conf={config}"

        def run(*command: str) -> str:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=folder
            )
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
            return done.stdout

        def start(*command: str) -> None:
            with open(folder / f"{command[0]}.out", "wb") as log:
                process = subprocess.Popen(
                    [*command, conf, "--foreground"], stdout=log, stderr=log, start_new_session=True
                )
            stack.callback(stop, process)

        address = f"[v2:127.0.0.1:{monitor}/0]"
        run("monmaptool", "--create", "--fsid", cluster, "--addv", "a", address, str(folder / "monmap"))
        run("ceph-mon", conf, "--mkfs", "-i", "a", "--monmap", str(folder / "monmap"))
        start("ceph-mon", "-i", "a")
        store = str(uuid.uuid4())
        run("ceph", conf, "osd", "new", store)
        run("ceph-osd", conf, "-i", "0", "--mkfs", "--osd-uuid", store)
        start("ceph-osd", "-i", "0")
        until = time.monotonic() + SECONDS
        while not json.loads(run("ceph", conf, "osd", "stat", "--format=json"))["num_up_osds"]:
            if time.monotonic() > until:
                raise TimeoutError(f"Ceph's store does not start: {config}")
        start("radosgw", "-n", "client.gateway")
        _wait_for_answer(port, until)
        user = ["user", "create", "--uid=toffee", "--display-name=toffee"]
        run("radosgw-admin", conf, *user, f"--access-key={key}", f"--secret-key={secret}")
        yield port


def _wait_for_answer(port: int, until: float) -> None:
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with closing(connection), suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/")
            if connection.getresponse().status == 200:
                return
        if time.monotonic() > until:
            raise TimeoutError("Ceph's gateway does not answer")
        time.sleep(0.1)
