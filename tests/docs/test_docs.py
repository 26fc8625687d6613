"""Every example of the documentation runs, generated pages are up to date, and links lead somewhere."""

from __future__ import annotations

import importlib.util
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import toffee_dist
from tests.harness import ROOT
from tests.harness.examples import call, leave_a_run_unfinished, write_edges
from toffee_dist import Run, TemporalTensor, Toffee, load_run
from toffee_dist.results.tables import html_facts

DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *(
        DOCS / f"{name}.md"
        for name in ("tutorial", "edges", "runs", "ask", "spaces", "evaluation", "faq", "method")
    ),
]


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield (language, text) of fenced blocks; indented lines of commands are a console too."""
    pattern = r"^```(\w+)\n(.*?)^```$|((?:^ {4}(?:toffee|python) [^\n]*\n)+)"
    for language, fenced, indented in re.findall(pattern, text, re.MULTILINE | re.DOTALL):
        if indented:
            yield "console", re.sub(r"^ {4}", "$ ", indented, flags=re.MULTILINE)
        else:
            yield language, fenced


def test_blocks_are_found() -> None:
    text = "a\n\n    toffee runs x\n    python y.py\n\n```python\nz = 1\n```\n\n    not a command\n"
    assert list(blocks(text)) == [("console", "$ toffee runs x\n$ python y.py\n"), ("python", "z = 1\n")]
    assert sum(len(list(blocks(page.read_text()))) for page in PAGES) > 15


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that examples speak of."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "edges").mkdir()
    for month, days in enumerate((range(0, 31), range(31, 60), range(60, 100))):
        write_edges(tmp_path / "edges" / f"{month}.parquet", days)
    edges = pl.read_parquet(tmp_path / "edges" / "*.parquet")
    edges.write_csv(tmp_path / "mail.csv")
    edges.write_csv(tmp_path / "fb-forum.edges", include_header=False)
    (tmp_path / "pairs.csv").write_text("alice,bob\nbob,carol\n")
    people = sorted({*edges["source"], *edges["target"]})
    rows = "".join(f"{name},{('sales', 'research')[at % 2]}\n" for at, name in enumerate(people))
    (tmp_path / "departments.csv").write_text(f"node,label\n{rows}")
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    return tmp_path


@pytest.mark.job
@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_of_a_page_run(page: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    # What a reader has at hand where an example does not say it.
    names: dict[str, Any] = {
        "source": rng.integers(30, size=400),
        "target": rng.integers(30, size=400),
        "day": rng.integers(28, size=400),
        "i": np.arange(5),
        "j": np.arange(5, 10),
    }
    for language, text in blocks(page.read_text()):
        if language == "python":
            exec(compile(text, str(page), "exec"), names)
        elif language == "console":
            for line in text.splitlines():
                run_line(line.removeprefix("$ "), place, monkeypatch)


def run_line(line: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = line.partition(" #")[0]
    if " evaluate" in line or "jobs/evaluate" in line:
        line += " --seeds 1 --rank 8 --model toffee,memory"  # the same words, less work
    if line.startswith("python "):
        words = line.split()[1:]
        subprocess.run([sys.executable, *words], cwd=place, check=True, timeout=250, capture_output=True)
        return
    if line.startswith("toffee resume"):
        leave_a_run_unfinished(monkeypatch)
    call(line)


@pytest.mark.job
def test_notebook(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((DOCS / "tour.ipynb").read_text())
    assert notebook["nbformat"] == 4
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), "tour.ipynb", "exec"), names)
    assert "Monday noon 1.0" in capsys.readouterr().out
    assert names["rhythms"].height > 2


def load_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_configuration_is_up_to_date() -> None:
    written = load_script("generate").configuration()
    assert (DOCS / "configuration.md").read_text() == written, "run: python docs/generate.py"


def test_every_name_of_the_reference_exists() -> None:
    named = re.findall(r"^\.\. auto(\w+):: ([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert len(named) > 25
    things = [(kind, pkgutil.resolve_name(name)) for kind, name in named]
    for kind, thing in things:
        assert thing.__doc__, thing
        assert inspect.isfunction(thing) == (kind == "function"), thing
    # What `from toffee_dist import …` offers is documented.
    offered = [getattr(toffee_dist, name) for name in toffee_dist.__all__ if name != "__version__"]
    assert [thing for thing in offered if thing not in [known for _, known in things]] == []


def test_a_site_that_is_not_whole_is_found(tmp_path: Path) -> None:
    pages = {
        "index.html": '<a href="a.html#here">a</a><a href="https://example.org">people may follow</a>',
        "a.html": '<p id="here"><img src="data:image/png;base64,AA"><a href="#here">up</a>',
    }
    for name, text in pages.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "searchindex.js").write_text('Search.setIndex({"docnames": ["a"]})')
    check = load_script("check_site")
    assert check.find_problems(tmp_path) == []
    (tmp_path / "b.html").write_text(
        '<a href="gone.html">x</a><a href="a.html#gone">y</a><script src="https://cdn.example/x.js"></script>'
        '<img src="//cdn.example/x.png"><a href="../../etc/passwd">z</a>'
    )
    assert check.find_problems(tmp_path) == [
        "b.html: gone.html: no such file",
        "b.html: a.html#gone: no such place on the page",
        "b.html: https://cdn.example/x.js: loaded from elsewhere",
        "b.html: //cdn.example/x.png: loaded from elsewhere",
        "b.html: ../../etc/passwd: no such file",
        "b: the search does not know it",
    ]


def test_links_lead_somewhere() -> None:
    for page in [*DOCS.glob("*.md"), ROOT / "README.md"]:
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
        for target in re.findall(r"\bdocs/\w+\.\w+", text):
            assert (ROOT / target).exists(), f"{page.name}: {target}"


def test_tests_that_are_named_exist() -> None:
    """A door without a test is taken for open: what the pages on trust name must be there."""
    code = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    tests = re.findall(r"^def (test_\w+)", code, re.M)
    for page in ("security.md", "reliability.md"):
        text = (DOCS / page).read_text()
        named = re.findall(r"`(test_\w+)(…?)`", text)
        assert named or page == "reliability.md"
        for name, more in named:
            found = any(test.startswith(name) for test in tests) if more else name in tests
            assert found, f"{page}: {name}"
        for path in re.findall(r"`(?:python |pytest )?((?:tests|benchmarks|toffee_dist)/[\w/]+\.py)", text):
            assert (ROOT / path).exists(), f"{page}: {path}"


@pytest.mark.job
def test_objects_show_themselves_in_a_notebook(place: Path) -> None:
    assert html_facts("<b>", {"<i>": "&"}) == (
        "<table><caption>&lt;b&gt;</caption><tr><th>&lt;i&gt;</th><td>&amp;</td></tr></table>"
    )
    call("toffee embed mail.csv --out <script> --rank 4 --mode threads".replace("<script>", "'<script>'"))
    run: Run = load_run("<script>")
    for shown in (run._repr_html_(), run.embedding._repr_html_(), run.nodes._repr_html_()):
        assert "&lt;script&gt;" in shown
        assert "<script>" not in shown
        assert len(shown) < 2000
    model = Toffee(rank=3)
    assert "not fitted" in model._repr_html_()
    tensor = TemporalTensor.from_events([0, 1, 2], [1, 2, 0], [0, 0, 1], directed=False)
    shown = model.fit(tensor)._repr_mimebundle_()["text/html"]
    assert "rank=3" in shown
    assert "1 of 2 frequencies" in shown
