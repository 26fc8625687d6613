"""What is handed to a registry is whole; `make dist` builds it, installs it and runs the demonstration."""

from __future__ import annotations

import fnmatch
import subprocess
import tomllib

import toffee_dist
from tests.harness import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_file_of_the_package_is_in_the_wheel() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "toffee_dist"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    data = [name.removeprefix("toffee_dist/") for name in listed if not name.endswith(".py")]
    assert "report/assets/page.css" in data
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["toffee_dist"]
    assert [name for name in data if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []
    # Without one, a folder of modules is no package, and is left out without a word.
    modules = {(ROOT / name).parent for name in listed if name.endswith(".py")}
    assert [folder for folder in modules if not (folder / "__init__.py").exists()] == []


def test_version_is_said_once() -> None:
    assert toffee_dist.__version__ == PROJECT["project"]["version"]


def test_users_need_no_tool_of_developers() -> None:
    """An extra of users is what a feature needs; what checks us is in extras of our own."""
    needed = " ".join(PROJECT["project"]["dependencies"])
    for tool in ("pytest", "ruff", "mypy", "sphinx", "twine", "pandas", "s3fs", "openlineage", "mlflow"):
        assert tool not in needed
