"""What CI says of the audit: asked and clean, asked and not, or not asked; by stubs of pip-audit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT

pytestmark = pytest.mark.cluster

CLEAN = {"name": "one", "version": "1.0", "vulns": []}
WEAK = {"name": "two", "version": "2.0", "vulns": [{"id": "CVE-2000-1"}]}
UNKNOWN = {"name": "three", "skip_reason": "not on the index"}


def stub(folder: Path, answer: object, code: int = 0) -> Path:
    """Leave a pip-audit that writes this answer; None: that fails and writes none."""
    folder.mkdir(exist_ok=True)
    text = f"""#!{sys.executable}
import sys
answer = {json.dumps(json.dumps(answer)) if answer is not None else None}
[out] = [word.partition("=")[2] for word in sys.argv if word.startswith("--output=")]
if answer is not None:
    open(out, "w").write(answer)
sys.exit({code})
"""
    (folder / "pip-audit").write_text(text)
    (folder / "pip-audit").chmod(0o755)
    return folder


def audit(folder: Path, *arguments: str) -> tuple[int, str]:
    path = f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "audit", *arguments],
        env={"PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("answer", "status", "code", "said"),
    [
        ({"dependencies": [CLEAN, UNKNOWN]}, 0, 0, "1 packages asked about, 0 with known weaknesses, 1 not"),
        ({"dependencies": [CLEAN, WEAK]}, 1, 1, "two 2.0: CVE-2000-1"),
        ({"dependencies": []}, 0, 75, "NOT AUDITED, nothing was asked: the answer is about no"),
        (
            {"dependencies": [UNKNOWN, UNKNOWN]},
            0,
            75,
            "NOT AUDITED, nothing was asked: the answer is about no",
        ),
        (None, 1, 75, "NOT AUDITED, nothing was asked: no answer"),
        ({}, 1, 75, "NOT AUDITED, nothing was asked: no answer"),
    ],
    ids=["clean", "weak", "none", "none known", "no network", "no list"],
)
def test_what_the_audit_says(tmp_path: Path, answer: object, status: int, code: int, said: str) -> None:
    found = audit(stub(tmp_path / "bin", answer, status))
    assert found[0] == code
    assert said in found[1]


def test_no_tool_is_no_audit(tmp_path: Path) -> None:
    code, said = audit(tmp_path, str(tmp_path))
    assert code == 75
    assert "NOT AUDITED" in said


@pytest.mark.parametrize(
    ("answer", "code", "last"),
    [
        ({"dependencies": [CLEAN]}, 0, "CI passed; audited"),
        (None, 0, "CI passed; NOT AUDITED"),
        ({"dependencies": []}, 0, "CI passed; NOT AUDITED"),
    ],
)
def test_what_ci_says(tmp_path: Path, answer: object, code: int, last: str) -> None:
    tools = stub(tmp_path / "bin", answer)
    (tools / "make").write_text("#!/bin/sh\nexit 0\n")
    (tools / "make").chmod(0o755)
    done = subprocess.run(
        [ROOT / ".ci" / "run"],
        env={"PATH": f"{tools}:{os.environ['PATH']}", "AUDIT_TOOLS": str(tools)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip().splitlines()[-1]) == (code, last)
