"""What the Dask operator makes of our objects: its controllers, run by kopf, against an API server of ours.

Part of `make deploy-test`. Nothing runs in the pods: their commands are run by tests/deploy/test_deploy.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness import DEPLOY, kubernetes
from tests.harness.clusters import stop
from tests.harness.commands import wait_until
from tests.harness.kubernetes import DASK, Api

pytestmark = [pytest.mark.deploy, pytest.mark.cluster, pytest.mark.timeout(200)]

OVERLAYS = DEPLOY / "kubernetes" / "overlays"
WHERE = "toffee"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    """An API server with the operator at work."""
    pytest.importorskip("dask_kubernetes")
    with kubernetes.server(tmp_path) as (made, config), open(tmp_path / "operator.log", "wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-W", "ignore", "-m", "kopf", "run", "--standalone"),
                *(f"--namespace={WHERE}", "-m", "dask_kubernetes.operator.controller"),
            ],
            env=os.environ | {"KUBECONFIG": str(config), "NO_PROXY": "127.0.0.1", "HOME": str(tmp_path)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield made
        finally:
            stop(process)
            print((tmp_path / "operator.log").read_text()[-4000:])


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def check_cluster(api: Api, spec: dict[str, Any]) -> None:
    """Look at what became of a cluster: valid objects, our commands, the labels that the policies go by."""
    validate = pytest.importorskip("kubernetes_validate").validate
    count = 1 + spec["worker"]["replicas"]
    deployments = wait_until(lambda: len(f := api.find("apps/v1", "deployments")) == count and f, 60)
    [service] = wait_until(lambda: api.find("v1", "services"))
    assert service["metadata"]["name"] == "toffee-scheduler"
    assert service["spec"]["ports"][0]["port"] == 8786
    for thing in (*deployments, service):
        validate({key: value for key, value in thing.items() if key != "status"}, "1.29", strict=False)
    for deployment in deployments:
        template = deployment["spec"]["template"]
        part = template["metadata"]["labels"]["dask.org/component"]
        assert template["metadata"]["labels"]["dask.org/cluster-name"] == "toffee"
        assert part in ("scheduler", "worker")
        ours, [theirs] = spec[part]["spec"], template["spec"]["containers"]
        [wanted] = ours["containers"]
        # Nothing of what protects it is lost on the way.
        for name in ("args", "image", "securityContext", "resources", "volumeMounts"):
            assert theirs[name] == wanted[name], name
        for name in ("securityContext", "automountServiceAccountToken", "volumes", "serviceAccountName"):
            assert template["spec"][name] == ours[name], name
        if part == "worker":
            names = {one["name"]: one["value"] for one in theirs["env"]}
            assert names["DASK_WORKER_NAME"]
    selector = service["spec"]["selector"].items()
    [scheduler] = [d for d in deployments if d["metadata"]["name"] == "toffee-scheduler"]
    assert selector <= scheduler["spec"]["template"]["metadata"]["labels"].items()


def test_the_standing_cluster(api: Api) -> None:
    cluster = read(OVERLAYS / "nightly" / "cluster.yaml")
    api.create(DASK, "daskclusters", WHERE, cluster)
    check_cluster(api, cluster["spec"])
    # More workers, as size.py would write.
    api.patch(DASK, "daskclusters", WHERE, "toffee", {"spec": {"worker": {"replicas": 3}}})
    wait_until(lambda: len(api.find("apps/v1", "deployments")) == 4, 60)


def test_the_job_with_a_cluster_of_its_own(api: Api) -> None:
    job = read(OVERLAYS / "once" / "job.yaml")
    api.create(DASK, "daskjobs", WHERE, job)
    check_cluster(api, job["spec"]["cluster"]["spec"])
    [pod] = wait_until(lambda: api.find("v1", "pods"), 60)
    [container], [wanted] = pod["spec"]["containers"], job["spec"]["job"]["spec"]["containers"]
    assert container["args"] == wanted["args"]
    assert pod["metadata"]["labels"]["dask.org/cluster-name"] == "toffee"
    assert pod["metadata"]["labels"]["dask.org/component"] == "job-runner"

    # What a kubelet would say: it runs, it is done; then the cluster goes.
    def reported() -> str:
        [found] = api.find(DASK, "daskjobs")
        return str(found.get("status", {}).get("jobStatus"))

    for phase, status in (("Running", "Running"), ("Succeeded", "Successful")):
        api.patch("v1", "pods", WHERE, pod["metadata"]["name"], {"status": {"phase": phase}})
        wait_until(lambda expected=status: reported() == expected, 60)  # type: ignore[misc]
    wait_until(lambda: not api.find(DASK, "daskclusters"), 60)
