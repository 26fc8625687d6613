"""Every file of deploy/ as far as this machine can: parsed, checked against schemas, and its commands run.

Tests marked `deploy` need packages that carry schemas: `make deploy-test` installs them and runs these.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.harness import DEPLOY, ROOT, clusters, s3
from tests.harness.clusters import digests, free_port, job, wait_for_port, write_edges
from tests.harness.refreshes import night, write_days
from toffee_dist.batch.pipeline import start_run
from toffee_dist.cluster.certs import ROLES, write_certificates
from toffee_dist.cluster.client import WORKER_ENVIRONMENT
from toffee_dist.refresh.job import refresh
from toffee_dist.storage.runs import find_run

OVERLAYS = DEPLOY / "kubernetes" / "overlays"
BIN = Path(sys.executable).parent
SECONDS = 180


def read_environment() -> dict[str, str]:
    lines = (DEPLOY / "worker.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def run(*command: str | Path, expected: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False, **options)
    assert done.returncode == expected, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


def test_every_file_says_by_which_target_it_ran() -> None:
    # What is written by a program, and what every target runs with.
    kept = {"requirements.lock", "oldest.txt", "worker.env", "size.yaml", ".env"}
    files = [path for path in DEPLOY.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in files:
        if path.name not in kept:
            assert re.search(r"(Run|Checked) by\s+`?make ([a-z0-9]+-)?test\b", path.read_text()[:2500]), path


def test_the_worker_environment_is_one() -> None:
    environment = read_environment()
    assert environment == WORKER_ENVIRONMENT
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    for name, value in environment.items():
        assert f"{name}={value}" in dockerfile


# The image.


@pytest.mark.deploy
def test_dockerfile() -> None:
    parser = pytest.importorskip("dockerfile")
    commands = parser.parse_file(str(DEPLOY / "Dockerfile"))
    kinds = [command.cmd.upper() for command in commands]
    assert kinds.count("FROM") == 2
    [user] = [command.value[0] for command in commands if command.cmd.upper() == "USER"]
    assert user.split(":")[0] not in ("0", "root")
    assert "HEALTHCHECK" in kinds
    # The last word on who runs it is not root's.
    assert kinds.index("USER") > max(place for place, kind in enumerate(kinds) if kind == "RUN")
    copied = [c.value[:-1] for c in commands if c.cmd.upper() == "COPY" and not c.flags]
    for source in (source for sources in copied for source in sources):
        assert (ROOT / source).exists(), source
        assert not kept_out(source), source
    # Nothing that is fetched goes without its hash.
    assert "--require-hashes" in (DEPLOY / "Dockerfile").read_text()


def kept_out(source: str) -> bool:
    """Whether .dockerignore keeps a file or folder from the build; the last rule that fits counts."""
    path = ROOT / source
    name = f"{source}/x" if path.is_dir() else source
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            rule = line.removeprefix("!").replace("**", "*")
            if fnmatch.fnmatch(name, rule):
                out = not line.startswith("!")
    return out


def test_keys_and_data_stay_out_of_the_image() -> None:
    for name in ("certs/ca-key.pem", ".git", "edges", "deploy/.env", "tests"):
        assert kept_out(name), name


# Compose.


@pytest.mark.deploy
def test_compose_file() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(__file__).parent / "schemas" / "compose-spec.json").read_text())
    compose = read_compose()
    jsonschema.Draft202012Validator(schema).validate(compose)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(compose | {"servces": {}})
    for name, service in compose["services"].items():
        assert "ports" not in service, f"{name} must not be reached from outside"
        for needed in service.get("depends_on", {}):
            assert needed in compose["services"]
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or source.startswith("${EDGES")
    assert_own_keys_only(compose["services"])
    assert_own_account(compose["services"])
    # Every variable that must be given has a line in the example.
    text, example = (DEPLOY / "compose.yaml").read_text(), (DEPLOY / "compose.env.example").read_text()
    for name in re.findall(r"\$\{(\w+)", text):
        assert f"{name}=" in example
    assert "deploy/.env" in (ROOT / ".gitignore").read_text()


def assert_own_keys_only(services: dict[str, Any]) -> None:
    """Each role has the volume of its own key; only the maker of the keys has all of them."""
    roles = {"scheduler": "scheduler", "worker": "worker", "job": "client"}
    for name, service in services.items():
        mounted = {
            volume.split(":")[0] for volume in service.get("volumes", []) if volume.startswith("certs")
        }
        if name == "certs":
            assert mounted == {f"certs-{role}" for role in roles.values()}
            assert service["network_mode"] == "none"
        else:
            assert mounted == ({f"certs-{roles[name]}"} if name in roles else set())


def assert_own_account(services: dict[str, Any]) -> None:
    """Only the store and what makes its bucket know the store's own account; ours has that bucket alone."""
    knowing = {name for name, service in services.items() if "MINIO_ROOT" in json.dumps(service)}
    assert knowing == {"minio", "bucket"}
    for name in ("worker", "job"):
        assert services[name]["environment"]["AWS_ACCESS_KEY_ID"].startswith("${STORE_USER")
    for statement in json.loads(services["bucket"]["environment"]["POLICY"])["Statement"]:
        assert all(resource.startswith("arn:aws:s3:::toffee") for resource in statement["Resource"])
        assert not any("*" in action for action in statement["Action"])
    run("sh", "-n", "-c", services["bucket"]["command"][0].replace("$$", "$"))


def read_compose() -> dict[str, Any]:
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return compose


@contextmanager
def pods(
    commands: dict[str, list[str]], certificates: Path, tmp_path: Path
) -> Iterator[Callable[[list[str]], list[str]]]:
    """Start the scheduler's and the worker's command as they stand, moved to this machine's loopback.

    Gives what moves a command: names of hosts, ports and folders, nothing else.
    """
    port = free_port()
    moves = {
        "tls://0.0.0.0:8786": f"tls://127.0.0.1:{port}",
        "tls://127.0.0.1:8786": f"tls://127.0.0.1:{port}",
        "tls://scheduler:8786": f"tls://127.0.0.1:{port}",
        "tls://toffee-scheduler:8786": f"tls://127.0.0.1:{port}",
        "--worker-port=8788": "--host=127.0.0.1",
        "--nanny-port=8789": f"--nanny-port={free_port()}",
        "$(DASK_WORKER_NAME)": "a-worker",
        "--local-directory=/tmp": f"--local-directory={tmp_path}",
        "/opt/toffee/": f"{ROOT}/",
    }

    def move(command: list[str], role: str = "client") -> list[str]:
        moved = []
        # Where every role has a folder of its own, it sees no other.
        own = certificates / role if (certificates / role).is_dir() else certificates
        for word in command:
            for old, new in {**moves, "/certs": str(own)}.items():
                word = word.replace(old, new)
            moved.append(word)
        return [sys.executable if moved[0] == "python" else str(BIN / moved[0]), *moved[1:]]

    environment = os.environ | read_environment() | {"DASK_CONFIG": str(DEPLOY / "dask.yaml")}
    with ExitStack() as stack:
        for name in ("scheduler", "worker"):
            process = subprocess.Popen(
                move(commands[name], name),
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            stack.callback(clusters.stop, process)
            wait_for_port(port)
        yield move


@pytest.mark.job
@pytest.mark.cluster
@pytest.mark.slow
def test_the_commands_of_compose(tmp_path: Path) -> None:
    services = read_compose()["services"]
    commands = {name: services[name].get("command", []) for name in services}
    certificates = tmp_path / "certs"
    for role in ROLES:
        (certificates / role).mkdir(parents=True)
    # Compose takes $$ for $.
    places = {"/certs": str(certificates), "/tmp/new": str(tmp_path / "new"), "$$": "$"}
    made = commands["certs"]
    for old, new in places.items():
        made = [word.replace(old, new) for word in made]
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    # As one that was stopped half-way leaves it: all are made again.
    (certificates / "scheduler" / "ca.pem").write_text("old")
    run(*made, env=environment)
    for role in ROLES:
        names = {path.name for path in (certificates / role).iterdir()}
        assert names == {"ca.pem", f"{role}.pem", f"{role}-key.pem"}
        assert (certificates / role / f"{role}-key.pem").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "new").exists()
    before = (certificates / "client" / "ca.pem").read_bytes()
    assert before == (certificates / "scheduler" / "ca.pem").read_bytes()
    run(*made, env=environment)
    assert (certificates / "client" / "ca.pem").read_bytes() == before

    edges = write_edges(tmp_path / "edges.parquet", nodes=80, events=1500)
    with s3.server() as port, s3.use(port) as fs:
        fs.mkdir("toffee")
        with pods(commands, certificates, tmp_path) as move:
            job_command = [word.replace("/data/edges", str(edges)) for word in move(commands["job"])]
            run(*job_command, "--rank=8", "--freqs=all", "--trajectory-by=als", "--workers=1")
            check_health(move, certificates / "worker")
        fs.get("toffee/vectors", str(tmp_path), recursive=True)
    expected = start_run(job(edges, tmp_path / "threads"))
    assert digests(find_run(tmp_path / "vectors").path) == digests(expected.run.path)


def check_health(move: Callable[[list[str]], list[str]], certificates: Path) -> None:
    """The image's health check: what answers is healthy, what does not, or has no certificate, is not."""
    [address] = move(["HEALTH", "tls://scheduler:8786"])[1:]
    script = DEPLOY / "health.py"
    base = os.environ | {"TLS_DIR": str(certificates), "TLS_ROLE": "worker"}
    assert "Scheduler" in run(sys.executable, script, env=base | {"HEALTH": address}).stdout
    run(sys.executable, script, env=base | {"HEALTH": f"tls://127.0.0.1:{free_port()}"}, expected=1)
    run(sys.executable, script, env=base | {"HEALTH": address, "TLS_DIR": "/nowhere"}, expected=1)
    run(sys.executable, script, env=base | {"HEALTH": ""})


# Kubernetes.


def build(overlay: Path) -> list[dict[str, Any]]:
    """Return the objects of an overlay, by kustomize itself where it is installed."""
    for tool in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(tool[0]):
            return [found for found in yaml.safe_load_all(run(*tool, overlay).stdout) if found]
    return merge(overlay)


def merge(folder: Path) -> list[dict[str, Any]]:
    """Do the part of kustomize that our overlays use: resources, maps from files, images, JSON patches."""
    plan = yaml.safe_load((folder / "kustomization.yaml").read_text())
    known = {"apiVersion", "kind", "namespace", "resources", "configMapGenerator", "generatorOptions"}
    assert set(plan) <= known | {"images", "patches"}
    objects: list[dict[str, Any]] = []
    for name in plan["resources"]:
        path = folder / name
        objects += merge(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for made in plan.get("configMapGenerator", []):
        data = {name: (folder / name).read_text() for name in made["files"]}
        meta = {"name": made["name"]}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data})
    for thing in objects:
        if thing["kind"] != "Namespace":
            thing["metadata"]["namespace"] = plan["namespace"]
    for patch in plan.get("patches", []):
        [target] = [o for o in objects if (o["kind"], o["metadata"]["name"]) == named(patch["target"])]
        for step in yaml.safe_load((folder / patch["path"]).read_text()):
            *parents, last = step["path"].strip("/").split("/")
            place: Any = target
            for parent in parents:
                place = place[int(parent)] if isinstance(place, list) else place[parent]
            key = int(last) if isinstance(place, list) else last
            # A patch that replaces must meet something.
            assert step["op"] == "replace"
            assert place[key] is not None
            place[key] = step["value"]
    for image in plan.get("images", []):
        for container in (c for thing in objects for c in containers(thing)):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    return objects


def named(target: dict[str, Any]) -> tuple[str, str]:
    return target["kind"], target["name"]


def containers(thing: Any) -> Iterator[dict[str, Any]]:
    """Find the containers anywhere in an object."""
    if isinstance(thing, dict):
        for key, value in thing.items():
            if key == "containers":
                yield from value
            else:
                yield from containers(value)
    elif isinstance(thing, list):
        for value in thing:
            yield from containers(value)


@pytest.mark.parametrize("overlay", ["nightly", "once"])
def test_kustomize_overlays(overlay: str) -> None:
    objects = build(OVERLAYS / overlay)
    kinds = {"nightly": {"DaskCluster", "CronJob"}, "once": {"DaskJob"}}[overlay]
    found = {thing["kind"] for thing in objects}
    assert found == {"Namespace", "ServiceAccount", "ConfigMap", "NetworkPolicy"} | kinds
    if build is not merge:
        by_name = {(thing["kind"], thing["metadata"]["name"]): thing for thing in merge(OVERLAYS / overlay)}
        assert {(o["kind"], o["metadata"]["name"]): o for o in objects} == by_name
    # What pods mount is there: maps in the overlay, secrets in the example.
    examples = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "secrets.example.yaml").read_text()))
    secrets = {secret["metadata"]["name"] for secret in examples}
    text = json.dumps(objects)
    assert set(re.findall(r'"(?:secretName|secretRef)": (?:\{"name": )?"([^"]+)"', text)) == secrets
    assert set(re.findall(r'"configMap": \{"name": "([^"]+)"', text)) == {"toffee-jobs"}
    assert all(set(secret["stringData"].values()) == {"PLACEHOLDER"} for secret in examples)
    for container in (c for thing in objects for c in containers(thing)):
        assert container["image"].startswith("toffee:")
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        for kind in ("memory", "ephemeral-storage"):
            assert container["resources"]["requests"][kind] == container["resources"]["limits"][kind]
        assert container["volumeMounts"], "a folder to write to"
    # No pod fills the disk of its node: every volume that it can write to has an end, within that of the pod.
    folders = re.findall(r'"emptyDir": (\{[^}]*\})', text)
    assert len(folders) == 3
    assert all(re.fullmatch(r"\d+[MG]i", json.loads(folder)["sizeLimit"]) for folder in folders)


@pytest.mark.deploy
@pytest.mark.parametrize("overlay", ["nightly", "once"])
def test_kubernetes_schemas(overlay: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    jsonschema = pytest.importorskip("jsonschema")
    operator = importlib.util.find_spec("dask_kubernetes")
    if operator is None or not operator.submodule_search_locations:
        pytest.skip("dask-kubernetes, which has the operator's definitions, is not installed")
    objects = build(OVERLAYS / overlay)
    objects += yaml.safe_load_all((DEPLOY / "kubernetes" / "secrets.example.yaml").read_text())
    for thing in objects:
        if not thing["apiVersion"].startswith("kubernetes.dask.org/"):
            validate(thing, "1.29", strict=True)
            continue
        chart = Path(operator.submodule_search_locations[0]) / "operator/deployment/helm"
        [file] = chart.rglob(f"crds/{thing['kind'].lower()}.yaml")
        [version] = yaml.safe_load(file.read_text())["spec"]["versions"]
        schema = closed(version["schema"]["openAPIV3Schema"])
        schema["properties"] |= {"apiVersion": {}, "kind": {}, "metadata": {}}
        jsonschema.Draft7Validator(schema).validate(thing)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft7Validator(schema).validate(thing | {"spec": {**thing["spec"], "wrkr": {}}})


def closed(schema: Any) -> Any:
    """Return a schema that takes no names but its own: the API server would drop them without a word."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(made.get("properties"), dict) and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def test_only_the_pods_of_the_job_reach_the_scheduler() -> None:
    objects = build(OVERLAYS / "nightly")
    policies = [thing["spec"] for thing in objects if thing["kind"] == "NetworkPolicy"]
    [cron] = [thing for thing in objects if thing["kind"] == "CronJob"]
    ours = cron["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"]

    def pod(component: str, cluster: str = "toffee") -> dict[str, str]:
        # The labels that the operator gives.
        return {"dask.org/cluster-name": cluster, "dask.org/component": component}

    def allowed(source: dict[str, str], target: dict[str, str]) -> bool:
        on_target = [policy for policy in policies if matches(policy["podSelector"], target)]
        assert on_target
        assert all(
            "namespaceSelector" not in peer for p in on_target for r in p["ingress"] for peer in r["from"]
        )
        return any(
            matches(peer["podSelector"], source)
            for p in on_target
            for r in p["ingress"]
            for peer in r["from"]
        )

    assert ours == pod("job-runner")
    assert allowed(ours, pod("scheduler"))
    assert allowed(pod("worker"), pod("scheduler"))
    assert allowed(pod("worker"), pod("worker"))
    assert not allowed({"app": "other"}, pod("scheduler"))
    assert not allowed(pod("worker", "theirs"), pod("scheduler"))
    assert not allowed({"app": "other"}, pod("worker"))
    assert not allowed(pod("worker"), pod("job-runner"))


@pytest.mark.parametrize("overlay", ["nightly", "once"])
def test_pods_reach_each_other_names_and_storage_and_nothing_else(overlay: str) -> None:
    policies = [thing["spec"] for thing in build(OVERLAYS / overlay) if thing["kind"] == "NetworkPolicy"]

    def pod(component: str) -> dict[str, str]:
        return {"dask.org/cluster-name": "toffee", "dask.org/component": component}

    def rules(source: str) -> list[dict[str, Any]]:
        found = [policy for policy in policies if matches(policy["podSelector"], pod(source))]
        assert found
        assert all("Egress" in policy["policyTypes"] for policy in found)
        return [rule for policy in found for rule in policy["egress"]]

    def reaches(source: str, target: str, port: int) -> bool:
        return any(
            "namespaceSelector" not in peer
            and matches(peer["podSelector"], pod(target))
            and port in [one["port"] for one in rule["ports"]]
            for rule in rules(source)
            for peer in rule["to"]
            if "podSelector" in peer
        )

    def outside(source: str) -> set[int]:
        """Return the ports to machines that are no pods; never those where clouds hand out credentials."""
        ports = set()
        for rule in rules(source):
            for peer in rule["to"]:
                if "ipBlock" in peer:
                    assert set(peer["ipBlock"]["except"]) & {"169.254.0.0/16", "fd00:ec2::254/128"}
                    ports |= {one["port"] for one in rule["ports"]}
        return ports

    for source in ("scheduler", "worker", "job-runner"):
        # Every rule says to whom and on which ports; an empty one would be everybody.
        assert all(rule["to"] and rule["ports"] for rule in rules(source))
        assert any(one["port"] == 53 for rule in rules(source) for one in rule["ports"])
    assert reaches("worker", "scheduler", 8786)
    assert reaches("job-runner", "scheduler", 8786)
    for port in (8788, 8789):
        assert reaches("scheduler", "worker", port)
        assert reaches("worker", "worker", port)
        assert not reaches("job-runner", "worker", port)
    assert not reaches("worker", "job-runner", 8786)
    assert outside("worker") == outside("job-runner") == {443}
    # It runs no task and has no account of the store.
    assert outside("scheduler") == set()


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    equal = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    rules = selector.get("matchExpressions", [])
    assert all(rule["operator"] == "In" for rule in rules)
    return equal and all(labels.get(rule["key"]) in rule["values"] for rule in rules)


def test_one_cluster_in_both_overlays() -> None:
    cluster = yaml.safe_load((OVERLAYS / "nightly" / "cluster.yaml").read_text())["spec"]
    assert yaml.safe_load((OVERLAYS / "once" / "job.yaml").read_text())["spec"]["cluster"]["spec"] == cluster


@pytest.mark.cluster
def test_sizes_come_from_the_plan(tmp_path: Path) -> None:
    edges = write_edges(tmp_path / "edges.parquet")
    options = ["--rank=64", "--outputs=embedding,trajectory", "--freqs=all", "--json"]
    text = run(BIN / "toffee", "plan", edges, *options).stdout
    plan = json.loads(text)
    overlays = tmp_path / "overlays"
    shutil.copytree(DEPLOY / "kubernetes", tmp_path, dirs_exist_ok=True)
    size: list[str | Path] = [
        sys.executable,
        DEPLOY / "kubernetes" / "size.py",
        "--overlays",
        overlays,
        "--max-workers=3",
    ]
    said = run(*size, "-", "--threads=2", input=text).stdout
    assert "2 threads" in said
    for overlay in ("nightly", "once"):
        objects = merge(overlays / overlay)
        [worker] = [c for thing in objects for c in containers(thing) if c["name"] == "worker"]
        assert worker["args"][:3] == ["dask", "worker", "tls://toffee-scheduler:8786"]
        assert worker["args"][4] == "--nthreads=2"
        memory = worker["resources"]["limits"]["memory"]
        assert memory.endswith("Mi")
        assert int(memory[:-2]) * 2**20 * 0.95 >= plan["worker_bytes"]["2"]
        assert int(memory[:-2]) * 2**20 <= 1.2 * plan["worker_bytes"]["2"] + 2**28
        # Room for the copies of the tensor that a worker keeps.
        [spec] = [thing["spec"] for thing in objects if thing["kind"] in ("DaskCluster", "DaskJob")]
        tmp = spec.get("cluster", {"spec": spec})["spec"]["worker"]["spec"]["volumes"][1]
        assert tmp["name"] == "tmp"
        limit = int(tmp["emptyDir"]["sizeLimit"].removesuffix("Mi"))
        assert limit * 2**20 >= 4 * plan["mapped_bytes"] + 2**30
        assert int(worker["resources"]["limits"]["ephemeral-storage"].removesuffix("Mi")) >= limit + 1024
    assert "no plan" in run(*size, "-", input="{}", expected=2).stderr


@pytest.mark.job
@pytest.mark.cluster
@pytest.mark.slow
def test_the_commands_of_kubernetes(tmp_path: Path) -> None:
    objects = build(OVERLAYS / "nightly")
    commands = {c["name"]: c["args"] for thing in objects for c in containers(thing)}
    certificates = tmp_path / "certs"
    write_certificates(certificates)
    edges = write_days(tmp_path / "edges", 0, 30)
    out = tmp_path / "vectors"
    with pods(commands, certificates, tmp_path) as move:
        text = (DEPLOY / "kubernetes" / "base" / "nightly.toml").read_text()
        [moved] = move(["-", text])[1:]
        moved = moved.replace("s3://my-bucket/edges/", str(edges)).replace("s3://my-bucket/vectors", str(out))
        (tmp_path / "nightly.toml").write_text(moved)
        command = [word.replace("/etc/toffee/", f"{tmp_path}/") for word in move(commands["job"])]
        done = run(*command, "--rank=8", "--last=28d", "--as-of=2026-02-03")
    assert json.loads(done.stdout)["state"] == "published"
    refresh(night(edges, tmp_path / "threads", as_of="2026-02-03"))
    assert digests(find_run(out).path) == digests(find_run(tmp_path / "threads").path)


# Slurm.


def fake(folder: Path, name: str, code: str) -> None:
    """Put a program into a folder: Slurm's own ones are not here, so these start the processes instead."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{code}")
    path.chmod(0o755)


def test_shell_scripts() -> None:
    scripts = [DEPLOY / "slurm" / "toffee.sbatch", ROOT / ".ci" / "run"]
    for script in scripts:
        run("bash", "-n", script)
        if shutil.which("shellcheck"):
            run("shellcheck", "--external-sources", script, cwd=ROOT)


@pytest.mark.job
@pytest.mark.cluster
@pytest.mark.slow
def test_sbatch(tmp_path: Path) -> None:
    edges = write_edges(tmp_path / "edges.parquet", nodes=80, events=1500)
    out = tmp_path / "vectors"
    # srun starts the command once a task, and ends with them.
    fake(
        tmp_path / "bin",
        "srun",
        'trap "kill \\$(jobs -p); wait" TERM\n'
        'for word; do case "$word" in --ntasks=*) n=${word#*=};; esac; done\n'
        "while [[ $1 == --* ]]; do shift; done\n"
        'for _ in $(seq "$n"); do "$@" --host=127.0.0.1 & done\nwait\n',
    )
    config = tmp_path / "embed.toml"
    config.write_text(
        f'inputs = ["{edges}"]\noutputs = ["embedding", "trajectory"]\nfreqs = "all"\nrank = 8\n'
        'trajectory_by = "als"\n'
    )
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "TOFFEE_BIN": str(BIN),
        "TOFFEE_DEPLOY": str(DEPLOY),
        "CONFIG": str(config),
        "OUT": str(out),
    }
    run("bash", DEPLOY / "slurm" / "toffee.sbatch", env=environment, start_new_session=True)
    expected = start_run(job(edges, tmp_path / "threads"))
    assert digests(find_run(out).path) == digests(expected.run.path)
    # Neither certificates nor processes stay.
    assert not list(tmp_path.glob(".toffee-*"))
    # Nothing to resume is said as toffee says it.
    again = environment | {"RESUME": "1"}
    run("bash", DEPLOY / "slurm" / "toffee.sbatch", env=again, expected=3, start_new_session=True)


@pytest.mark.deploy
@pytest.mark.job
@pytest.mark.cluster
@pytest.mark.slow
def test_jobqueue(tmp_path: Path) -> None:
    pytest.importorskip("dask_jobqueue")
    edges = write_edges(tmp_path / "edges.parquet", nodes=80, events=1500)
    out, programs = tmp_path / "vectors", tmp_path / "bin"
    jobs = tmp_path / "slurm"
    jobs.mkdir()
    # sbatch starts the script and says its number; scancel ends it.
    fake(
        programs,
        "sbatch",
        f'cp "${{@: -1}}" {jobs}/script.$$\nsetsid bash {jobs}/script.$$ >{jobs}/out.$$ 2>&1 &\n'
        'echo "Submitted batch job $!"\n',
    )
    fake(programs, "scancel", 'for job; do kill -TERM -- "-$job"; done\n')
    command: list[str | Path] = [
        *(DEPLOY / "slurm" / "jobqueue.py", "--cores=1", "--memory=2GB", "--walltime=00:30:00", "--most=2"),
        *("--interface=lo", f"--shared={tmp_path}", "--"),
        *("embed", edges, f"--out={out}", "--rank=8", "--outputs=embedding,trajectory", "--freqs=all"),
        "--trajectory-by=als",
    ]
    run(sys.executable, *command, env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"})
    [script, *_] = jobs.glob("script.*")
    assert "--lifetime" in script.read_text()
    assert "#SBATCH -t 00:30:00" in script.read_text()
    expected = start_run(job(edges, tmp_path / "threads"))
    assert digests(find_run(out).path) == digests(expected.run.path)


# systemd and cron.


@pytest.fixture
def installed(tmp_path: Path) -> Callable[[str], str]:
    """What moves a unit or a crontab from /opt/toffee and /etc/toffee to this checkout."""
    edges, out = write_days(tmp_path / "edges", 0, 30), tmp_path / "vectors"
    text = (ROOT / "jobs" / "nightly.toml").read_text()
    changed = text.replace('["edges/"]', f'["{edges}"]').replace('"vectors"', f'"{out}"')
    changed = changed.replace('"90d"', '"28d"').replace("rank = 128", "rank = 8")
    changed = changed.replace('# as_of = "2026-03-01"', 'as_of = "2026-02-03"')
    (tmp_path / "nightly.toml").write_text(changed)

    def move(text: str) -> str:
        text = text.replace("/opt/toffee/bin/python", sys.executable).replace("/opt/toffee", str(ROOT))
        text = text.replace("$TOFFEE/bin/python", sys.executable).replace("$TOFFEE", str(ROOT))
        return text.replace("/etc/toffee", str(tmp_path)).replace("/var/lib/toffee", str(tmp_path))

    return move


@pytest.mark.cluster
@pytest.mark.slow
def test_systemd_units(tmp_path: Path, installed: Callable[[str], str]) -> None:
    units = tmp_path / "units"
    units.mkdir()
    for path in (DEPLOY / "systemd").iterdir():
        (units / path.name).write_text(installed(path.read_text()).replace("User=toffee", "User=root"))
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian's package systemd has it)")
    service = units / "toffee-refresh.service"
    checked = run("systemd-analyze", "verify", "--man=no", service, units / "toffee-refresh.timer")
    assert checked.stderr.strip() == ""
    [when] = re.findall(r"OnCalendar=(.*)", (units / "toffee-refresh.timer").read_text())
    assert "Next elapse" in run("systemd-analyze", "calendar", when).stdout
    judged = run("systemd-analyze", "security", "--offline=yes", "--threshold=30", service)
    assert "OK" in judged.stdout.splitlines()[-1]
    # A unit that is wrong would be noticed.
    broken = tmp_path / "broken.service"
    broken.write_text(service.read_text().replace("Restart=on-failure", "Restart=somtimes"))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(broken)], capture_output=True, text=True, check=False
    )
    assert "somtimes" in found.stderr

    [command] = re.findall(r"ExecStart=(.*)", service.read_text())
    done = run(*command.split(), env=os.environ | read_environment())
    assert json.loads(done.stdout)["state"] == "published"


@pytest.mark.cluster
@pytest.mark.slow
def test_cron(tmp_path: Path, installed: Callable[[str], str]) -> None:
    lines = (DEPLOY / "cron").read_text().splitlines()
    [entry] = [line for line in lines if line and not line.startswith("#") and "=" not in line.split()[0]]
    *times, user, command = entry.split(None, 6)
    assert user == "toffee"
    ranges = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
    for word, (low, high) in zip(times, ranges, strict=True):
        assert word == "*" or low <= int(word) <= high
    # A percent sign is a new line to cron.
    assert "%" not in command
    run("sh", "-c", installed(command), cwd=tmp_path)
    [line] = (tmp_path / "refresh.out").read_text().splitlines()
    assert json.loads(line)["state"] == "published"
    # What is not 5 is not tried again; what is 5 is, once.
    for code, calls in ((6, 1), (5, 2)):
        fake(tmp_path / "bin", "python", f"echo call >> {tmp_path}/calls-{code}; exit {code}\n")
        stubbed = installed(command).replace(sys.executable, str(tmp_path / "bin" / "python"))
        environment = os.environ | {"TOFFEE_PAUSE": "0"}
        run("sh", "-c", stubbed, cwd=tmp_path, env=environment, expected=code if calls == 2 else 1)
        assert (tmp_path / f"calls-{code}").read_text().split() == ["call"] * calls


# Watching.


@pytest.mark.job
def test_alerts(tmp_path: Path) -> None:
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
    assert set(rules) == {"groups"}
    edges, out = write_days(tmp_path / "edges", 0, 31), tmp_path / "out"
    for day in ("2026-02-03", "2026-02-04"):
        refresh(night(edges, out, as_of=day))
    written = set(re.findall(r"^(toffee_\w+) ", (out / "refresh.prom").read_text(), re.MULTILINE))
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in alerts}) == len(alerts)
    for rule in alerts:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        used = set(re.findall(r"toffee_\w+", rule["expr"]))
        assert used
        assert used <= written, rule["alert"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert set(rule["annotations"]) == {"summary", "action"}
        # Every alarm is explained to the one who gets it.
        assert rule["alert"] in (ROOT / "docs" / "operations.md").read_text()
    if shutil.which("promtool"):
        run("promtool", "check", "rules", DEPLOY / "alerts.yaml")


# The supply chain.


def read_lock(name: str) -> dict[str, str]:
    lines = (DEPLOY / name).read_text().splitlines()
    pins = (re.match(r"([A-Za-z0-9._-]+)==([^\s;\\]+)", line) for line in lines)
    return {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}


def read_project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return project


def test_the_lock_satisfies_the_project() -> None:
    text, pins = (DEPLOY / "requirements.lock").read_text(), read_lock("requirements.lock")
    project = read_project()
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    wanted += project["project"]["optional-dependencies"].get("s3", [])
    for line in wanted:
        requirement = Requirement(line)
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"{line}: the lock has {pin}; make lock"
    assert pins["dask"] == pins["distributed"]
    assert text.count("--hash=sha256:") >= len(pins)
    # Where packages come from is for the one who installs.
    assert "://" not in re.sub(r"#.*", "", text)
    assert not re.search(r"index-url|find-links|trusted-host", text)


def test_the_oldest_versions_are_the_minimums() -> None:
    pins = read_lock("oldest.txt")
    for line in read_project()["project"]["dependencies"]:
        requirement = Requirement(line)
        [minimum] = [s.version for s in requirement.specifier if s.operator == ">="]
        assert Version(pins[canonicalize_name(requirement.name)]) == Version(minimum), line
