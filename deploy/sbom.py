"""What is in the image, as CycloneDX: every package of Python and of Debian, with its version and licence.

    python deploy/sbom.py > sbom.json

Lists where it runs. The image has its own list in /opt/toffee/sbom.json, written by its build.
Run by `make image-test` (tests/deploy/test_image.py), which checks it against CycloneDX's schema.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any


def list_python() -> Iterator[dict[str, Any]]:
    """Yield the packages of this environment."""
    for found in distributions():
        name = found.metadata["Name"]
        component: dict[str, Any] = {
            "type": "library",
            "name": name,
            "version": found.version,
            "purl": f"pkg:pypi/{name.lower().replace('_', '-')}@{found.version}",
        }
        told = found.metadata.json
        licence = str(told.get("license_expression") or told.get("license") or "")
        # Some packages have the whole text there.
        if licence and "\n" not in licence and len(licence) < 80:
            component["licenses"] = [{"license": {"name": licence}}]
        yield component


def list_debian() -> Iterator[dict[str, Any]]:
    """Yield the packages of the system, where it is a Debian."""
    if shutil.which("dpkg-query") is None:
        return
    form = "${db:Status-Abbrev}\t${Package}\t${Version}\t${Architecture}\n"
    command = ["dpkg-query", "--show", f"--showformat={form}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        status, name, version, architecture = line.split("\t")
        if status.startswith("ii"):
            purl = f"pkg:deb/debian/{name}@{version.replace('+', '%2B')}?arch={architecture}"
            yield {"type": "library", "name": name, "version": version, "purl": purl}


def make_list() -> dict[str, Any]:
    """Return the whole list."""
    found = {str(one["purl"]): one for one in (*list_python(), *list_debian())}
    components = [found[purl] for purl in sorted(found)]
    [own] = [one for one in components if one["purl"].startswith("pkg:pypi/toffee-dist@")]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": {**own, "type": "application", "bom-ref": own["purl"]},
        },
        "components": [{**one, "bom-ref": one["purl"]} for one in components if one is not own],
    }


if __name__ == "__main__":
    text = json.dumps(make_list(), indent=1) + "\n"
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)
    else:
        print(text, end="")
