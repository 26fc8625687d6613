"""`toffee serve`: the page of a run, live, for one person on this machine.

Who may ask: who has the token, which is in the address that is printed. The first request with it gets a
cookie that scripts cannot read and other sites cannot send, and an address without it. A request must also
name this server as its host (a name of somebody else that leads here is a trick of another page, DNS
rebinding) and, where a browser says so, come from this server's own page. Beyond the loopback it listens only
when told to, and only with a certificate.

Read only: one page, five questions; nothing of a request becomes a path. Requests, their number, their size
and their time are bounded.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from toffee_dist.errors import ConfigError
from toffee_dist.report.answers import Answers
from toffee_dist.results.run import Run

COOKIE = "toffee"
# Seconds that a connection may keep us waiting, connections at once, and letters of a request's address.
PATIENCE, CONNECTIONS, LETTERS = 20.0, 16, 4000
# Of every answer: nobody may keep, frame or guess what it is, and nobody learns its address.
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True)
class Door:
    """Where a server listens, and what it takes to come in.

    Parameters
    ----------
    host, port
        Where; port 0 is any that is free.
    cert, key
        Files of a certificate and its key; needed beyond the loopback.
    token
        What the address has.
    """

    host: str = "127.0.0.1"
    port: int = 0
    cert: Path | None = None
    key: Path | None = None
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    def __post_init__(self) -> None:
        """Refuse to be overheard."""
        if (self.cert is None) != (self.key is None):
            raise ConfigError("certificate", got="a certificate or a key alone", allowed="both, or neither")
        if self.cert is None and not is_loopback(self.host):
            raise ConfigError(
                "host",
                got=self.host,
                allowed="127.0.0.1, ::1 or localhost without a certificate",
                remedy="Others could read along: give --tls-cert and --tls-key, or use an SSH tunnel.",
            )
        if self.host in ("", "0.0.0.0", "::"):
            raise ConfigError(
                "host",
                got=self.host or "nothing",
                allowed="one name or address, which requests must then name",
                remedy="Give the one by which others reach this machine.",
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

    Examples
    --------
    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class PageServer(ThreadingHTTPServer):
    """A server of one page and its questions; close it with `server_close`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS

    def __init__(self, run: Run, door: Door) -> None:
        self.door, self.answers = door, Answers(run)
        self._places = threading.BoundedSemaphore(CONNECTIONS)
        # One question at a time: each may read a whole run in two threads of its own.
        self.asking = threading.Lock()
        self._context: ssl.SSLContext | None = None
        if door.cert is not None and door.key is not None:
            self._context = _load_certificate(door.cert, door.key)
        self.address_family = socket.AF_INET6 if ":" in door.host else socket.AF_INET
        try:
            super().__init__((door.host, door.port), PageHandler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                "host and port",
                got=f"{door.host} port {door.port}: {error}",
                allowed="an address of this machine and a free port",
                remedy="Leave --port out: any free one is taken.",
            ) from None
        self.page = self.answers.page().encode()

    @property
    def origin(self) -> str:
        """The address of the page, without the token."""
        host = f"[{self.door.host}]" if ":" in self.door.host else self.door.host
        return f"{'http' if self._context is None else 'https'}://{host}:{self.server_address[1]}"

    @property
    def url(self) -> str:
        """The address that lets somebody in."""
        return f"{self.origin}/?token={self.door.token}"

    def names(self) -> set[str]:
        """Return what a request may call this server in its header Host."""
        port = self.server_address[1]
        hosts = {self.door.host}
        if is_loopback(self.door.host):
            hosts |= {"127.0.0.1", "localhost", "::1"}
        return {f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, where there is a place; else drop it."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection; a slow handshake of TLS holds up its own thread only."""
        try:
            request.settimeout(PATIENCE)
            if self._context is not None:
                request = self._context.wrap_socket(request, server_side=True)
            super().process_request_thread(request, client_address)
        except (OSError, ssl.SSLError):
            self.shutdown_request(request)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a connection that broke off is no trouble of ours."""


class PageHandler(BaseHTTPRequestHandler):
    """Answers one connection's requests."""

    server: PageServer
    server_version, sys_version = "toffee", ""
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE

    def do_GET(self) -> None:
        """Answer a question, or give the page."""
        if len(self.path) > LETTERS:
            self._send(HTTPStatus.REQUEST_URI_TOO_LONG, {"error": "Too long."})
            return
        if self.headers.get("Host", "").lower() not in self.server.names():
            self._send(HTTPStatus.MISDIRECTED_REQUEST, {"error": "This server has another name."})
            return
        if not self._from_our_page():
            self._send(HTTPStatus.FORBIDDEN, {"error": "Not from another page."})
            return
        address = urlsplit(self.path)
        try:
            words = dict(parse_qsl(address.query, max_num_fields=16))
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, {"error": "Too many words."})
            return
        if address.path == "/" and self._is_token(words.get("token", "")):
            self._let_in()
            return
        if not self._is_token(self._cookie()):
            text = "Open the address with the token that toffee serve printed."
            self._send(HTTPStatus.UNAUTHORIZED, {"error": text})
            return
        if address.path == "/":
            self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
        elif address.path.startswith("/api/"):
            with self.server.asking:
                status, found = self.server.answers.answer(address.path.removeprefix("/api/"), words)
            self._send(HTTPStatus(status), found)
        else:
            self._send(HTTPStatus.NOT_FOUND, {"error": "There is one page, at /."})

    def _from_our_page(self) -> bool:
        """Whether the browser says that our own page asks, or a person who opened the address."""
        origin = self.headers.get("Origin")
        if origin is not None:
            host = self.headers.get("Host", "").lower()
            return origin.lower() == f"{self.server.origin.partition(':')[0]}://{host}"
        return self.headers.get("Sec-Fetch-Site", "none") in ("same-origin", "none")

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.server.door.token.encode())

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            return ""
        return "" if found is None else found.value

    def _let_in(self) -> None:
        secure = "" if self.server.origin.startswith("http:") else "; Secure"
        cookie = f"{COOKIE}={self.server.door.token}; HttpOnly; SameSite=Strict; Path=/{secure}"
        self._send(HTTPStatus.SEE_OTHER, b"", "text/plain", {"Set-Cookie": cookie, "Location": "/"})

    def _send(
        self,
        status: HTTPStatus,
        body: bytes | dict[str, Any],
        kind: str = "application/json",
        more: dict[str, str] | None = None,
    ) -> None:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        self.send_response(status)
        for name, value in (_HEADERS | (more or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if status >= HTTPStatus.BAD_REQUEST:
            # What a refused request still wants to send is not waited for.
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: addresses have the token, questions have ids."""


def _load_certificate(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A key with a password would stop and ask for it.
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            "certificate",
            got=f"{cert}, {key}: {error}",
            allowed="a certificate and its key without a password, as PEM files",
            remedy="toffee certs makes some.",
        ) from None
    return context


def serve_run(run: Run, door: Door, say: Callable[[PageServer], None]) -> None:
    """Serve until interrupted; `say` is told when it listens."""
    server = PageServer(run, door)
    try:
        say(server)
        server.serve_forever(poll_interval=0.2)
    finally:
        server.server_close()
