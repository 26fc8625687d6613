"""The live page: who is let in, who is not, and that answers are those of the run."""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner

from tests.harness.clusters import job, write_edges
from toffee_dist import Run, load_run
from toffee_dist.batch.pipeline import start_run
from toffee_dist.cli import cli
from toffee_dist.cluster.certs import write_certificates
from toffee_dist.errors import ConfigError
from toffee_dist.report import serve
from toffee_dist.report.serve import Door, PageServer

pytestmark = [pytest.mark.job]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("serve")
    edges = write_edges(folder / "edges.parquet", nodes=80, events=1500, days=20)
    start_run(job(edges, folder / "out", undirected=True, trajectory_by="filter"))
    return load_run(folder / "out")


@contextmanager
def serving(run: Run, **door: Any) -> Iterator[PageServer]:
    server = PageServer(run, Door(**door))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


@pytest.fixture(scope="module")
def server(run: Run) -> Iterator[PageServer]:
    with serving(run) as found:
        yield found


def get(server: PageServer, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Ask as a program does, with exactly these headers."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.putrequest("GET", path, skip_host=True)
        for name, value in ({"Host": f"127.0.0.1:{port}"} | headers).items():
            if value:
                connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


def ask(server: PageServer, what: str, **words: object) -> dict[str, Any]:
    status, _, body = get(server, f"/api/{what}?{urlencode(words)}", Cookie=f"toffee={server.door.token}")
    return {"status": status, **json.loads(body)}


def test_the_token_lets_in_once_and_becomes_a_cookie(server: PageServer) -> None:
    assert len(server.door.token) >= 40
    address = urlsplit(server.url)
    status, headers, _ = get(server, f"{address.path}?{address.query}")
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    for word in ("HttpOnly", "SameSite=Strict", "Path=/"):
        assert word in cookie
    status, headers, page = get(server, "/", Cookie=cookie.partition(";")[0])
    assert status == 200
    assert b"Nodes in time" in page
    assert server.door.token.encode() not in page
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "toffee" in headers["server"]
    assert "Python" not in headers["server"]


REFUSED: dict[str, tuple[str, dict[str, str], int]] = {
    "no token": ("/", {"Cookie": ""}, 401),
    "no token for questions": ("/api/find?text=n", {"Cookie": ""}, 401),
    "a wrong token": ("/?token=wrong", {"Cookie": ""}, 401),
    "an empty token": ("/?token=", {"Cookie": "toffee="}, 401),
    "a token that is no ASCII": ("/?token=%C3%A9", {"Cookie": ""}, 401),
    "a wrong cookie": ("/", {"Cookie": "toffee=wrong"}, 401),
    "a damaged cookie": ("/", {"Cookie": 'toffee="\\'}, 401),
    "a token in the address of a question": ("/api/find?text=n&token=TOKEN", {"Cookie": ""}, 401),
    "another origin": ("/api/find?text=n", {"Origin": "https://evil.example"}, 403),
    "no origin that is one": ("/api/find?text=n", {"Origin": "null"}, 403),
    "another port of this machine": ("/api/find?text=n", {"Origin": "http://127.0.0.1:1"}, 403),
    "another site, says the browser": ("/", {"Sec_Fetch_Site": "cross-site"}, 403),
    "another page of this machine": ("/", {"Sec_Fetch_Site": "same-site"}, 403),
    "a name that leads here": ("/", {"Host": "evil.example"}, 421),
    "a name that leads here, and its port": ("/", {"Host": "evil.example:PORT"}, 421),
    "a name with ours in it": ("/", {"Host": "127.0.0.1:PORT.evil.example"}, 421),
    "no name": ("/", {"Host": ""}, 421),
    "another path": ("/report.html", {}, 404),
    "a way up": ("/../../etc/passwd", {}, 404),
    "a coded way up": ("/api/%2e%2e%2fmanifest.json", {}, 404),
    "another question": ("/api/answer?question=page", {}, 404),
    "a long address": ("/api/find?text=" + "n" * 5000, {}, 414),
    "many words": ("/api/find?" + "&".join(f"a{k}=1" for k in range(50)), {}, 400),
}


@pytest.mark.parametrize("what", REFUSED)
def test_who_is_not_let_in(server: PageServer, what: str) -> None:
    path, headers, expected = REFUSED[what]
    port, token = str(server.server_address[1]), server.door.token
    filled = {name: value.replace("PORT", port) for name, value in headers.items()}
    status, _, body = get(server, path.replace("TOKEN", token), **({"Cookie": f"toffee={token}"} | filled))
    assert status == expected
    assert token.encode() not in body
    assert b"n000" not in body


def test_our_own_page_is_let_in(server: PageServer) -> None:
    port, cookie = server.server_address[1], f"other=1; toffee={server.door.token}"
    for headers in (
        {"Origin": f"http://127.0.0.1:{port}", "Sec_Fetch_Site": "same-origin"},
        {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"},
    ):
        status, _, body = get(server, "/api/find?text=n0000", Cookie=cookie, **headers)
        assert status == 200
        assert json.loads(body)["names"]


def test_only_reading(server: PageServer) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
        connection.request(method, "/", headers={"Cookie": f"toffee={server.door.token}"})
        assert connection.getresponse().status == 501
        connection.close()


def test_answers_are_those_of_the_run(server: PageServer, run: Run) -> None:
    node = "n00003"
    found = ask(server, "neighbors", node=node, at=5)["neighbors"]
    expected = run.neighbors(node, 8, at=5)
    assert [row["name"] for row in found] == expected["node_id"].to_list()
    assert [row["similarity"] for row in found] == pytest.approx(expected["similarity"].to_list())
    found = ask(server, "explain", node=node, at=5)
    table = run.explain(node, at=5, k=8).links.table
    assert [row["name"] for row in found["links"]] == table["node_id"].to_list()
    assert found["rhythms"]
    assert ask(server, "explain", node=node)["rhythms"] == []
    found = ask(server, "compare", one=node, two="n00008", at=5)
    a, b = (run.trajectory_of(name).vectors[5] for name in (node, "n00008"))
    assert found["cosine"] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-4)
    assert found["score"] == pytest.approx(run.score([node], ["n00008"], 5)[0], rel=1e-6)
    names = run.nodes.polars().collect()["node_id"].to_list()
    found = ask(server, "find", text="N0001")["names"]
    assert found == [name for name in sorted(names) if name.startswith("n0001")][:8]
    # The same place as on the page, for a node that is there.
    nodes = server.answers.facts.nodes
    assert nodes is not None
    assert nodes.paths is not None
    found = ask(server, "node", node=node)
    at = [nodes.ids[index] for index in nodes.paths.nodes].index(node)
    limit = np.abs(nodes.paths.drawn.points).max()
    drawn = np.frombuffer(base64.b64decode(found["path"]["xy"]), "<i2").reshape(-1, 2) / 32767 * limit
    np.testing.assert_allclose(drawn, nodes.paths.drawn.points[at], atol=limit / 16000)
    assert found["degree"] == nodes.degree[nodes.paths.nodes[at]]


def test_what_cannot_be_answered_is_said_in_words(server: PageServer) -> None:
    for what, words, status, said in (
        ("node", {"node": "nobody"}, 404, "unknown node"),
        ("neighbors", {"node": "n00003", "at": "999"}, 404, "0 to 19"),
        ("neighbors", {}, 400, "Say which"),
        ("find", {"text": "x" * 600}, 400, "shorter"),
        ("compare", {"one": "n00003", "two": "<b>"}, 404, "unknown node"),
    ):
        found = ask(server, what, **words)
        assert found["status"] == status
        assert said in found["error"]
        assert "Traceback" not in found["error"]


def test_two_sides_and_hostile_ids(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pl.DataFrame(
        {
            "source": [f"<i>\x1b{v}" for v in rng.integers(10, size=200)],
            "target": [f"</script>{v}" for v in rng.integers(10, size=200)],
            "time": rng.integers(10, size=200),
        }
    )
    frame.write_parquet(tmp_path / "edges.parquet")
    options: dict[str, Any] = {"step": "1", "bipartite": True, "rank": 4, "trajectory_by": "filter"}
    start_run(job(tmp_path / "edges.parquet", tmp_path / "out", **options))
    with serving(load_run(tmp_path / "out")) as server:
        assert server.page.count(b"</script>") == 2
        assert b"\x1b" not in server.page
        found = ask(server, "node", node="target </script>3")
        assert found["name"] == "target </script>3"
        assert "path" not in found
        assert ask(server, "neighbors", node="target </script>3")["neighbors"]
        assert ask(server, "explain", node="target </script>3", at=2)["status"] == 404


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.org", "::", ""])
def test_beyond_the_loopback_only_with_a_certificate(host: str, run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="host"):
        Door(host)
    if host not in ("192.0.2.1", "example.org"):
        # All addresses at once: no request could be told from one that a strange name led here.
        with pytest.raises(ConfigError, match="one name or address"):
            Door(host, cert=tmp_path / "c", key=tmp_path / "k")
    done = CliRunner().invoke(cli, ["serve", str(run.path), "--host", host])
    assert isinstance(done.exception, ConfigError)
    with pytest.raises(ConfigError, match="both, or neither"):
        Door("127.0.0.1", cert=tmp_path / "c")


def test_with_a_certificate(run: Run, tmp_path: Path) -> None:
    write_certificates(tmp_path, ("127.0.0.1", "localhost"), 2)
    files = {"cert": tmp_path / "scheduler.pem", "key": tmp_path / "scheduler-key.pem"}
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    with serving(run, **files) as server:
        assert server.origin.startswith("https://")
        connection = http.client.HTTPSConnection(
            "127.0.0.1", server.server_address[1], timeout=20, context=context
        )
        connection.request("GET", f"/?token={server.door.token}")
        response = connection.getresponse()
        assert response.status == 303
        assert "Secure" in (response.getheader("Set-Cookie") or "")
        connection.close()
    with pytest.raises(ConfigError, match="PEM files"):
        PageServer(run, Door(cert=tmp_path / "ca.pem", key=tmp_path / "none.pem"))


def test_those_who_keep_it_waiting_are_bounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "PATIENCE", 0.5)
    monkeypatch.setattr(serve.PageHandler, "timeout", 0.5)
    monkeypatch.setattr(serve, "CONNECTIONS", 3)
    with serving(run) as server:
        silent = [socket.create_connection(("127.0.0.1", server.server_address[1])) for _ in range(8)]
        for one in silent:
            one.settimeout(10)
            assert one.recv(1) == b""  # Closed: by the limit of connections, or of patience.
            one.close()
        assert get(server, "/", Cookie=f"toffee={server.door.token}")[0] == 200


@pytest.mark.cluster
def test_the_command_serves_until_it_is_told_to_end(run: Run) -> None:
    command = [sys.executable, "-m", "toffee_dist.cli", "serve", str(run.path)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            address = urlsplit(process.stdout.readline().strip())
            assert address.hostname == "127.0.0.1"
            connection = http.client.HTTPConnection("127.0.0.1", address.port or 0, timeout=30)
            connection.request("GET", f"/?{address.query}")
            assert connection.getresponse().status == 303
            connection.close()
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            assert "Ended." in process.stdout.read()
        finally:
            process.kill()


def test_a_run_shows_itself_in_a_notebook(run: Run) -> None:
    assert "run.explore()" in run._repr_html_()
    shown = run.explore(height=500)
    assert "toffee report" in repr(shown)
    html = shown._repr_html_()
    assert html.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert 'sandbox="allow-scripts"' in html
    assert 'height="500"' in html
