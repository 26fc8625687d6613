"""As much of a Kubernetes API server as an operator needs: objects are kept and watched, and nothing runs."""

from __future__ import annotations

import copy
import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

DASK = "kubernetes.dask.org/v1"
# Plural, kind and whether it is in a namespace, by group and version.
KINDS = {
    "v1": [
        ("namespaces", "Namespace", False),
        ("pods", "Pod", True),
        ("services", "Service", True),
        ("events", "Event", True),
    ],
    "apps/v1": [("deployments", "Deployment", True)],
    "apiextensions.k8s.io/v1": [("customresourcedefinitions", "CustomResourceDefinition", False)],
    DASK: [
        (f"{kind.lower()}s", kind, True)
        for kind in ("DaskCluster", "DaskWorkerGroup", "DaskJob", "DaskAutoscaler")
    ],
}
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


def merge(old: Any, new: Any) -> Any:
    """Return a JSON merge patch applied: None removes, maps are merged, anything else replaces."""
    if not isinstance(new, dict):
        return new
    made = dict(old) if isinstance(old, dict) else {}
    for key, value in new.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = merge(made.get(key), value)
    return made


def apply(old: Any, steps: list[dict[str, Any]]) -> Any:
    """Return a JSON patch applied: what an operator uses to add and remove its mark."""
    made = copy.deepcopy(old)
    for step in steps:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in step["path"][1:].split("/")]
        place = made
        for parent in parents:
            place = place[int(parent)] if isinstance(place, list) else place.setdefault(parent, {})
        if isinstance(place, list):
            if step["op"] == "add":
                place.insert(len(place) if last == "-" else int(last), step["value"])
            elif step["op"] == "remove":
                del place[int(last)]
            elif step["op"] == "replace":
                place[int(last)] = step["value"]
        elif step["op"] in ("add", "replace"):
            place[last] = step["value"]
        elif step["op"] == "remove":
            place.pop(last, None)
    return made


class Api:
    """The objects, by version, plural, namespace and name, and everything that happened to them."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str, str], dict[str, Any]] = {}
        self.log: list[tuple[str, str, str, dict[str, Any]]] = []
        self.changed = threading.Condition()
        self.open = True

    def find(self, version: str, plural: str, namespace: str = "") -> list[dict[str, Any]]:
        with self.changed:
            return [
                one
                for (v, p, n, _), one in sorted(self.objects.items())
                if (v, p) == (version, plural) and namespace in ("", n)
            ]

    def put(self, event: str, key: tuple[str, str, str, str], thing: dict[str, Any]) -> dict[str, Any]:
        """Note what happened; an object that waits for nobody any more goes when it is marked."""
        with self.changed:
            meta = thing["metadata"]
            if event == "MODIFIED" and meta.get("deletionTimestamp") and not meta.get("finalizers"):
                event = "DELETED"
            self.log.append((event, key[0], key[1], thing))
            meta["resourceVersion"] = str(len(self.log))
            if event == "DELETED":
                self.objects.pop(key, None)
            else:
                self.objects[key] = thing
            self.changed.notify_all()
        return thing

    def create(self, version: str, plural: str, namespace: str, thing: dict[str, Any]) -> dict[str, Any]:
        meta = {**thing.get("metadata", {}), "uid": str(uuid.uuid4()), "generation": 1}
        meta["creationTimestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if namespace:
            meta["namespace"] = namespace
        name = meta.setdefault("name", f"{meta.get('generateName', '')}{uuid.uuid4().hex[:6]}")
        kind = next(kind for p, kind, _ in KINDS[version] if p == plural)
        made = {"apiVersion": version, "kind": kind, **thing, "metadata": meta}
        return self.put("ADDED", (version, plural, namespace, name), made)

    def patch(self, version: str, plural: str, namespace: str, name: str, change: Any) -> dict[str, Any]:
        key = (version, plural, namespace, name)
        old = self.objects[key]
        return self.put(
            "MODIFIED", key, apply(old, change) if isinstance(change, list) else merge(old, change)
        )

    def delete(self, version: str, plural: str, namespace: str, name: str) -> None:
        key = (version, plural, namespace, name)
        gone = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.put("MODIFIED", key, merge(self.objects[key], {"metadata": {"deletionTimestamp": gone}}))

    def watch(self, version: str, plural: str, namespace: str, since: int, until: float) -> Iterator[Any]:
        """Yield what happened after a moment, and then what happens."""
        while self.open and time.monotonic() < until:
            with self.changed:
                if len(self.log) <= since:
                    self.changed.wait(0.2)
                news, since = self.log[since:], len(self.log)
            for event, v, p, thing in news:
                if (v, p) == (version, plural) and namespace in ("", thing["metadata"].get("namespace", "")):
                    yield {"type": event, "object": thing}


def handler(api: Api) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def answer(self, content: Any, status: int = 200) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def handle_request(self) -> None:
            url = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            words = url.path.strip("/").split("/")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            given = json.loads(body) if body else {}
            if words == ["version"]:
                return self.answer({"major": "1", "minor": "29", "gitVersion": "v1.29.0"})
            if words == ["api"]:
                return self.answer({"kind": "APIVersions", "versions": ["v1"]})
            if words == ["apis"]:
                groups = [version.split("/") for version in KINDS if "/" in version]
                made = [{"groupVersion": f"{g}/{v}", "version": v} for g, v in groups]
                return self.answer(
                    {
                        "kind": "APIGroupList",
                        "groups": [
                            {"name": g, "versions": [one], "preferredVersion": one}
                            for (g, _), one in zip(groups, made, strict=True)
                        ],
                    }
                )
            version = "/".join(words[1:3]) if words[0] == "apis" else words[1]
            rest = words[3:] if words[0] == "apis" else words[2:]
            if version not in KINDS:
                return self.answer({"kind": "Status", "code": 404, "reason": "NotFound"}, 404)
            if not rest:
                return self.answer(self.resources(version))
            namespace = ""
            if rest[0] == "namespaces" and len(rest) > 2:
                namespace, rest = rest[1], rest[2:]
            return self.serve(version, rest, namespace, query, given)

        def resources(self, version: str) -> dict[str, Any]:
            found = [
                {
                    "name": plural,
                    "singularName": kind.lower(),
                    "kind": kind,
                    "namespaced": inside,
                    "verbs": VERBS,
                }
                for plural, kind, inside in KINDS[version]
            ]
            # So that a change of a status is sent to its own address.
            status = [{**one, "name": f"{one['name']}/status"} for one in found if version == DASK]
            return {"kind": "APIResourceList", "groupVersion": version, "resources": found + status}

        def serve(self, version: str, rest: list[str], namespace: str, query: Any, given: Any) -> None:
            plural, name = rest[0], rest[1] if len(rest) > 1 else ""
            if self.command == "POST":
                return self.answer(api.create(version, plural, namespace, given), 201)
            if not name and query.get("watch") in ("true", "1"):
                return self.stream(version, plural, namespace, query)
            if not name:
                items = api.find(version, plural, namespace)
                wanted = dict(
                    part.split("=", 1) for part in query.get("labelSelector", "").split(",") if "=" in part
                )
                wanted = {key.rstrip("="): value.lstrip("=") for key, value in wanted.items()}
                items = [i for i in items if wanted.items() <= i["metadata"].get("labels", {}).items()]
                fields = dict(
                    word.split("=", 1) for word in query.get("fieldSelector", "").split(",") if word
                )
                if named := fields.get("metadata.name", "").lstrip("="):
                    items = [one for one in items if one["metadata"]["name"] == named]
                meta = {"resourceVersion": str(len(api.log))}
                kind = next(kind for p, kind, _ in KINDS[version] if p == plural)
                return self.answer(
                    {"kind": f"{kind}List", "apiVersion": version, "metadata": meta, "items": items}
                )
            key = (version, plural, namespace, name)
            if key not in api.objects:
                return self.answer({"kind": "Status", "code": 404, "reason": "NotFound"}, 404)
            if self.command == "PATCH":
                return self.answer(api.patch(*key, given))
            if self.command == "DELETE":
                api.delete(*key)
                return self.answer({"kind": "Status", "status": "Success"})
            return self.answer(api.objects[key])

        def stream(self, version: str, plural: str, namespace: str, query: Any) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            until = time.monotonic() + float(query.get("timeoutSeconds") or 600)
            since = int(query.get("resourceVersion") or 0)
            try:
                for event in api.watch(version, plural, namespace, since, until):
                    self.wfile.write(json.dumps(event).encode() + b"\n")
                    self.wfile.flush()
            except OSError:
                pass

        do_GET = do_POST = do_PATCH = do_DELETE = handle_request  # noqa: N815

    return Handler


@contextmanager
def server(folder: Path) -> Iterator[tuple[Api, Path]]:
    """Give the objects of a server, and a configuration that leads there."""
    api = Api()
    for plural, kind, _ in KINDS[DASK]:
        definition = {"metadata": {"name": f"{plural}.{DASK[:-3]}"}, "spec": {"names": {"kind": kind}}}
        api.create("apiextensions.k8s.io/v1", "customresourcedefinitions", "", definition)
    api.create("v1", "namespaces", "", {"metadata": {"name": "toffee"}})
    listening = ThreadingHTTPServer(("127.0.0.1", 0), handler(api))
    listening.daemon_threads = True
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    config = folder / "kubeconfig"
    address = {"server": f"http://127.0.0.1:{listening.server_port}"}
    config.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "clusters": [{"name": "test", "cluster": address}],
                "users": [{"name": "test", "user": {"token": "nothing"}}],
                "contexts": [
                    {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "toffee"}}
                ],
            }
        )
    )
    try:
        yield api, config
    finally:
        api.open = False
        listening.shutdown()
        listening.server_close()
        thread.join(10)
