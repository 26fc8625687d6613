"""A signed URL as input: its signature is in no file of a run and in no printed line, however it ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from tests.harness.clusters import digests
from tests.harness.commands import wait_until
from toffee_dist.batch.pipeline import start_run
from toffee_dist.cli import main
from toffee_dist.settings import JobConfig
from toffee_dist.storage.runs import find_run, find_unfinished

pytestmark = [pytest.mark.job, pytest.mark.cluster]

SECRET = "Zm9vYmFyc2lnbmF0dXJl"
OPTIONS = ["--rank=4", "--mode=threads", "--workers=1"]


class Store:
    """A web server on the loopback that gives edges to whoever has the signature."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        rows = zip(
            *rng.integers(30, size=(2, 800)), 1_767_571_200 + rng.integers(40 * 86400, size=800), strict=True
        )
        self.body = "source,target,time\n" + "".join(f"n{a},n{b},{t}\n" for a, b, t in rows)
        # What is called before the answer to a request for the whole file; may raise.
        self.before: Callable[[], None] = lambda: None
        store = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(head=True)

            def do_GET(self) -> None:
                self.answer(head=False)

            def answer(self, head: bool) -> None:
                found = parse_qs(urlsplit(self.path).query)
                if found.get("X-Amz-Signature") != [SECRET]:
                    self.send_error(403)
                    return
                try:
                    if not head:
                        store.before()
                except OSError:
                    self.send_error(500)
                    return
                body = store.body.encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", '"one"')
                self.end_headers()
                if not head:
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{port}/edges.csv?X-Amz-Credential=me&X-Amz-Signature={SECRET}"


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


Call = Callable[..., str]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Run a command in this process; see that the signature is nowhere, neither printed nor kept."""

    def run(*words: str, code: int = 0) -> str:
        try:
            main(list(words))
            found = 0
        except SystemExit as end:
            found = int(end.code or 0)
        said = "".join(capsys.readouterr())
        assert found == code, said
        assert SECRET not in said
        for path in tmp_path.rglob("*"):
            assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
        return said

    return run


def test_a_run(store: Store, call: Call, tmp_path: Path) -> None:
    out = tmp_path / "out"
    call("embed", store.url, f"--out={out}", *OPTIONS, "--keep-work")
    run = find_run(out)
    inputs = [store.url.partition("?")[0] + "?…"]
    for path in (run.manifest, run.job, run.staged.record):
        assert json.loads(path.read_text())["config"]["inputs"] == inputs
    call("report", str(out))
    call("ingest", store.url, f"--out={tmp_path / 'staged'}", "--mode=threads", "--workers=1")
    call(
        "evaluate",
        store.url,
        f"--out={tmp_path / 'quality'}",
        "--rank=4",
        "--seeds=1",
        "--protocol=link-paper",
    )


def test_a_run_that_fails(store: Store, call: Call, tmp_path: Path) -> None:
    out = tmp_path / "out"
    store.body += "n1,n2,never\n"
    assert "edges.csv?…" in call("embed", store.url, f"--out={out}", *OPTIONS, code=3)
    call("embed", store.url, f"--out={out}", *OPTIONS, "--on-bad-rows=skip", "--keep-work")
    assert "edges.csv?…" in find_run(out).read_manifest().summary.examples[0]
    call("embed", store.url.replace("=me", "=me&more=1") + "x", f"--out={out}", *OPTIONS, code=3)


def test_resuming_before_the_edges_are_read(
    store: Store, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("toffee_dist.batch.pipeline.run_job", killed)
        call("embed", store.url, f"--out={out}", *OPTIONS, code=5)
    assert find_unfinished(out).read_job().hidden == ("inputs",)
    said = call("resume", str(out), "--mode=threads", code=2)
    assert "edges.csv?…" in said
    assert "toffee resume OUT INPUT" in said
    call("resume", str(out), store.url, "--mode=threads", "--workers=1")
    expected = start_run(
        JobConfig(inputs=(store.url,), out=str(tmp_path / "other"), rank=4, mode="threads", workers=1)
    )
    assert digests(find_run(out).path) == digests(expected.run.path)
    # Nothing to give again where the edges are staged.
    with monkeypatch.context() as patch:
        patch.setattr("toffee_dist.batch.pipeline.settle", killed)
        call("embed", store.url, f"--out={out}", *OPTIONS, code=5)
    call("resume", str(out), "--mode=threads", "--workers=1")


def test_a_run_that_stalls(store: Store, call: Call, tmp_path: Path) -> None:
    out, requests = tmp_path / "out", 0

    def count() -> None:
        nonlocal requests
        requests += 1

    store.before = count
    call("embed", store.url, f"--out={tmp_path / 'before'}", *OPTIONS)
    left = requests

    def hang() -> None:
        nonlocal left
        left -= 1
        # The last request is that of the task; those before look at what kind of file it is.
        if not left:
            wait_until(lambda: list(out.glob("runs/*/diagnostics/report.html")), 60)

    store.before = hang
    said = call("embed", store.url, f"--out={out}", *OPTIONS, "--stall=2", code=5)
    assert "makes no progress" in said
    run = find_unfinished(out)
    task = json.loads((run.diagnostics / "tasks.json").read_text())["under_way"][0]
    assert "edges.csv?…" in task["item"]
    assert {path.name for path in run.diagnostics.iterdir()} >= {
        "stacks.json",
        "scheduler.log",
        "report.html",
    }


def test_refreshes(store: Store, call: Call, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = [f"--out={out}", *OPTIONS, "--last=20d", "--no-report"]
    call("refresh", store.url, *options, "--as-of=2026-02-01")
    call("refresh", store.url, *options, "--as-of=2026-02-03")

    def fail() -> None:
        raise OSError

    store.before = fail
    store.body += "n1,n2,1767571300\n"
    call("refresh", store.url, *options, "--as-of=2026-02-05", code=3)
    lines = [json.loads(line) for line in (out / "refresh.jsonl").read_text().splitlines()]
    assert [line["state"] for line in lines] == ["published", "published", "failed"]
    assert "edges.csv" in lines[-1]["reason"]
