"""What may import what: the contracts of pyproject.toml, and what they cannot say."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ROOT

PACKAGE = ROOT / "toffee_dist"
# What a comment on an import inside a function must say, or the comment on the first of several.
REASON = "start-up"


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; from importlinter.cli import lint_imports_command as lint; lint(sys.argv[1:])"
    command = [
        sys.executable,
        "-c",
        program,
        "--no-cache",
        "--no-logo",
        "--config",
        str(ROOT / "pyproject.toml"),
    ]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


def test_contracts_are_kept() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("kernels/gauge.py", "import dask", "Kernels are numbers only"),
        ("kernels/gauge.py", "from toffee_dist.storage import files", "Kernels are numbers only"),
        ("storage/files.py", "from toffee_dist.ingest import files", "Packages import downwards only"),
        ("report/page.py", "import toffee_dist.cluster.client", "The cluster is known by orchestrators only"),
        ("results/run.py", "from toffee_dist.batch import pipeline", "Orchestrators are imported"),
        ("cluster/retire.py", "from toffee_dist.kernels import align", "The cluster knows nothing"),
    ],
)
def test_a_forbidden_import_breaks_its_contract(tmp_path: Path, module: str, line: str, broken: str) -> None:
    for path in PACKAGE.rglob("*.py"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    with (tmp_path / "toffee_dist" / module).open("a") as file:
        file.write(f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout
    assert any(broken in said and "BROKEN" in said for said in done.stdout.splitlines()), done.stdout


def test_the_top_level_is_small() -> None:
    modules = [path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"]
    assert len(modules) <= 12, sorted(modules)


def nested_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the imports inside functions that give no reason, as (line, text)."""
    text = path.read_text()
    lines = text.splitlines()
    found = {
        (node.lineno, node.end_lineno or node.lineno)
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    reasoned: set[int] = set()
    for first, last in sorted(found):
        above = lines[first - 2].strip()
        # Blank lines apart standard library, others' packages and ours.
        before = next(at for at in range(first - 1, 0, -1) if lines[at - 1].strip())
        if REASON in lines[first - 1] or (above.startswith("#") and REASON in above) or before in reasoned:
            reasoned.add(last)
        else:
            yield first, lines[first - 1].strip()


def test_imports_without_a_reason_are_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "def f():\n    import a\n    return a\n\n\n"
        "def g():\n    # Saves start-up time.\n    import b\n\n"
        "    from c import (\n        d,\n    )\n    import e\n"
    )
    assert list(nested_imports(tmp_path / "module.py")) == [(2, "import a")]


def test_imports_inside_functions_save_start_up_time() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in nested_imports(path)
    ]
    assert offenders == []


def test_no_test_file_imports_from_another() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
                assert ".test_" not in f"{node.module}.", f"{path.name}:{node.lineno}"
                assert not any(name.name.startswith("test_") for name in node.names), (
                    f"{path.name}:{node.lineno}"
                )
