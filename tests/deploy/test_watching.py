"""What watches a deployment: Dask's figures behind TLS, Prometheus, the alarms, the dashboard.

`make watch-test` installs Debian's prometheus and runs these; without it promtool's part is skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness import DEPLOY, clusters
from tests.harness.clusters import free_port, security_options, start, stop, wait_for_port
from tests.harness.commands import wait_until
from tests.harness.refreshes import night, write_days
from toffee_dist.cluster.certs import write_certificates
from toffee_dist.refresh.job import refresh

needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus has it)"
)


@dataclass
class Scheduler:
    """A scheduler with one worker, and where its figures are."""

    port: int
    certificates: Path

    def fetch(self, context: ssl.SSLContext | None = None, scheme: str = "https") -> str:
        url = f"{scheme}://localhost:{self.port}/metrics"
        with urllib.request.urlopen(url, timeout=10, context=context) as answer:
            return str(answer.read().decode())


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    """The commands of Compose, with deploy/metrics.env."""
    certificates = tmp_path_factory.mktemp("certificates") / "certs"
    write_certificates(certificates, ["localhost", "scheduler"])
    lines = (DEPLOY / "metrics.env").read_text().splitlines()
    pairs = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    environment = {name: value.replace("/certs", str(certificates)) for name, value in pairs.items()}
    port, metrics = free_port(), free_port()
    where = [f"--host=tls://127.0.0.1:{port}", "--no-dashboard", f"--dashboard-address=127.0.0.1:{metrics}"]
    processes = [
        start("scheduler", *where, *security_options(certificates, "scheduler"), environment=environment)
    ]
    try:
        wait_for_port(metrics)
        options = ["--host=127.0.0.1", "--nthreads=1", "--no-dashboard", "--no-nanny"]
        worker = [f"tls://127.0.0.1:{port}", *options, *security_options(certificates, "worker")]
        processes.append(start("worker", *worker))
        yield Scheduler(metrics, certificates)
    finally:
        for process in reversed(processes):
            stop(process)


@pytest.mark.cluster
def test_figures_behind_tls(scheduler: Scheduler) -> None:
    trusted = ssl.create_default_context(cafile=str(scheduler.certificates / "ca.pem"))
    wait_until(lambda: 'dask_scheduler_workers{state="idle"} 1.0' in scheduler.fetch(trusted))
    # Who does not know the authority does not believe it, and nothing is said in the clear.
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        scheduler.fetch(ssl.create_default_context())
    with pytest.raises((OSError, urllib.error.URLError)):
        scheduler.fetch(scheme="http")
    # Figures, and no pages: nothing that runs code, or shows it.
    for page in ("/status", "/info/main/workers.html", "/json/counts.json"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"https://localhost:{scheduler.port}{page}", timeout=10, context=trusted)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of figures that a refresh leaves."""
    folder = tmp_path_factory.mktemp("nights")
    edges = write_days(folder / "edges", 0, 31)
    for day in ("2026-02-03", "2026-02-04"):
        refresh(night(edges, folder / "out", as_of=day))
    return folder / "out" / "refresh.prom"


def read_dashboard() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    return panels


@pytest.mark.job
@pytest.mark.cluster
def test_every_figure_of_the_dashboard_is_there(scheduler: Scheduler, written: Path) -> None:
    trusted = ssl.create_default_context(cafile=str(scheduler.certificates / "ca.pem"))
    text = written.read_text() + scheduler.fetch(trusted)
    there = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)) | {"ALERTS"}
    places = set()
    for panel in read_dashboard():
        at = panel["gridPos"]
        columns, rows = range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        places |= {(x, y) for x in columns for y in rows}
        assert columns.stop <= 24
        for target in panel["targets"]:
            used = set(re.findall(r"\b(?:toffee|dask)_\w+|\bALERTS\b", target["expr"]))
            assert used
            assert used <= there, panel["title"]
    # No panel lies on another.
    assert len(places) == sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in read_dashboard())


def promtool(*words: str | Path) -> str:
    done = subprocess.run(
        ["promtool", *map(str, words)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_prometheus
@pytest.mark.cluster
def test_promtool(tmp_path: Path, scheduler: Scheduler) -> None:
    for name in ("alerts.yaml", "prometheus.yaml"):
        shutil.copy(DEPLOY / name, tmp_path)
    shutil.copy(Path(__file__).parent / "alarms.yaml", tmp_path)
    alarms = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert f"{len(alarms)} rules found" in promtool("check", "rules", tmp_path / "alerts.yaml")
    config = tmp_path / "prometheus.yaml"
    config.write_text(config.read_text().replace("/certs", str(scheduler.certificates)))
    promtool("check", "config", config)
    # When each of them fires, and when not.
    promtool("test", "rules", tmp_path / "alarms.yaml")
    fired = re.findall(r"alertname: (\w+)\n +exp_alerts", (tmp_path / "alarms.yaml").read_text())
    assert set(fired) == {alarm["alert"] for alarm in alarms}
    # The expressions of the dashboard, as rules that record.
    expressions = [target["expr"] for panel in read_dashboard() for target in panel["targets"]]
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(expressions)]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", tmp_path / "panels.yaml")
    (tmp_path / "panels.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "panels", "rules": [{"record": "x", "expr": "sum("}]}]})
    )
    with pytest.raises(AssertionError, match="parse error"):
        promtool("check", "rules", tmp_path / "panels.yaml")


@needs_prometheus
@pytest.mark.daemons
@pytest.mark.cluster
def test_a_prometheus_that_fetches_and_warns(scheduler: Scheduler, tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "alerts.yaml", tmp_path)
    text = (DEPLOY / "prometheus.yaml").read_text().replace("/certs", str(scheduler.certificates))
    text = text.replace('"scheduler:8787"', f'"localhost:{scheduler.port}"').replace("15s", "1s")
    (tmp_path / "prometheus.yaml").write_text(text.replace("localhost:9100", f"localhost:{free_port()}"))
    # The alarm that needs no figure: it says that there is none. Its ten minutes are not for a test.
    rules = tmp_path / "alerts.yaml"
    rules.write_text(rules.read_text().replace("for: 10m", "for: 1s"))
    port = free_port()
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={tmp_path / 'prometheus.yaml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            env=os.environ | clusters.ENVIRONMENT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def ask(query: str) -> list[Any]:
        url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found: list[Any] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError:
            # It listens before it is ready.
            return []
        return found

    try:
        wait_for_port(port)
        [found] = wait_until(lambda: ask('dask_scheduler_workers{state="idle", job="dask"} == 1'), 60)
        assert found["metric"]["instance"] == f"localhost:{scheduler.port}"
        wait_until(lambda: ask('ALERTS{alertname="ToffeeSilent", alertstate="firing", severity="page"}'), 60)
    finally:
        stop(process)
