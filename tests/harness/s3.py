"""A real S3 API for tests: a server as processes on the loopback, and a misbehaving proxy before it.

The server is moto's; `make s3-test` names a second one, Ceph's gateway, in TOFFEE_S3_SERVERS.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from s3fs import S3FileSystem

from tests.harness import ceph
from tests.harness.clusters import free_port, stop, wait_for_port
from toffee_dist.storage import paths

SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please slow down.</Message></Error>"
# What a test must not find in any file or message.
SECRET = "a-secret-that-nobody-must-see"
BUCKET = "graphs"
KEY = "AKIDTEST"
# Which servers the tests of storage run against, one after the other.
SERVERS = os.environ.get("TOFFEE_S3_SERVERS", "moto").split(",")


def environment(port: int) -> dict[str, str]:
    """Return what a user's environment would hold."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_EC2_METADATA_DISABLED": "true",
        # Whatever the machine says about proxies, this is the loopback.
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


@contextmanager
def server(kind: str = "moto") -> Iterator[int]:
    """Give the port of an S3 server of its own: ``moto`` or ``ceph``."""
    if kind == "ceph":
        with ceph.gateway(KEY, SECRET) as port:
            yield port
        return
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | environment(port),
        start_new_session=True,
    )
    try:
        wait_for_port(port, 60)
        yield port
    finally:
        stop(process)


Fault = Callable[[str, str], str | None]
"""From method and path to ``503``, ``drop``, ``stall`` or None, which lets a request pass."""


@dataclass
class Proxy:
    """Stands before a server, counts requests, and answers some itself."""

    port: int
    fault: Fault = lambda method, path: None
    seen: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    # Bytes of objects that were given out, by path.
    sent: Counter[str] = field(default_factory=Counter)
    stall: float = 5.0


@contextmanager
def proxy(upstream: int, port: int = 0) -> Iterator[Proxy]:
    """Give a proxy before the server of the port `upstream`; 0 is any port."""
    closing = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def pass_on(self) -> None:
            body = self._body()
            here.seen[self.command] += 1
            fault = here.fault(self.command, self.path)
            if fault is not None:
                here.faults[fault] += 1
            if fault == "stall":
                closing.wait(here.stall)
            if fault in ("stall", "drop"):
                self.close_connection = True
                return
            if fault == "503":
                self._answer(503, [("Content-Type", "application/xml")], SLOW_DOWN)
                return
            connection = http.client.HTTPConnection("127.0.0.1", upstream, timeout=60)
            try:
                names = {"transfer-encoding", "connection"}
                headers = {k: v for k, v in self.headers.items() if k.lower() not in names}
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                data = answer.read()
                if self.command == "GET":
                    here.sent[self.path.partition("?")[0]] += len(data)
                self._answer(answer.status, answer.getheaders(), data)
            except OSError:
                self.close_connection = True
            finally:
                connection.close()

        def _body(self) -> bytes:
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                pieces = []
                while size := int(self.rfile.readline().partition(b";")[0], 16):
                    pieces.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(pieces)
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response_only(status)
            length = str(len(body))
            for name, value in headers:
                if name.lower() == "content-length":
                    length = value if self.command == "HEAD" else length
                elif name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on  # noqa: N815

    listening = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    listening.daemon_threads = True
    here = Proxy(listening.server_port)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield here
    finally:
        closing.set()
        listening.shutdown()
        listening.server_close()
        thread.join(10)


@contextmanager
def use(port: int) -> Iterator[Any]:
    """Give a file system of our own on a port, as this process's environment says."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(port).items():
            patch.setenv(name, value)
        S3FileSystem.clear_instance_cache()
        paths.open_filesystem.cache_clear()
        try:
            yield paths.open_filesystem("s3")
        finally:
            S3FileSystem.clear_instance_cache()
            paths.open_filesystem.cache_clear()


def unique(name: str) -> str:
    """Return a folder of the bucket that no other test has."""
    return f"s3://{BUCKET}/{name}-{time.time_ns():x}"
