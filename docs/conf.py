"""The documentation site: `make docs` builds it into build/site, from README, docs/ and the docstrings.

The pages stay plain Markdown that reads well in the repository; what only the site needs is here. Nothing is
fetched, neither when it is built nor when it is read. docs/check_site.py checks what came out.
"""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path
from typing import Any

from toffee_dist import settings

ROOT = Path(__file__).resolve().parents[1]

project = "toffee_dist"
author = "the authors of toffee_dist"
version = release = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]

extensions = ["sphinx.ext.autodoc", "sphinx.ext.viewcode", "numpydoc", "myst_nb"]
# Sources are where readers of the repository find them: links are the same in both.
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "docs/*.ipynb"]
exclude_patterns = [".*", "build", "toffee_dist", "tests", "benchmarks", "deploy", "jobs"]

# `name` in a docstring is a name of ours where there is one, and code elsewhere.
default_role = "py:obj"
# A block without a language is commands, output or a formula.
highlight_language = "none"
myst_heading_anchors = 4

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
maximum_signature_line_length = 100
numpydoc_show_class_members = False

# The notebook runs while the site is built, in a folder of its own: its answers are those of this version.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_merge_streams = True

html_theme = "furo"
html_title = f"toffee_dist {version}"
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
# Wide enough for the lines of code that README has.
html_static_path = ["site.css"]
html_css_files = ["site.css"]

# The table of contents, which README shows as its last table. A page that no line names is in it too.
CONTENTS = """
```{toctree}
:hidden:
:caption: Begin

Overview <self>
docs/tutorial
docs/tour
docs/glossary
docs/faq
```

```{toctree}
:hidden:
:caption: Use

docs/edges
docs/runs
docs/refresh
docs/spaces
docs/ask
docs/report
docs/evaluation
```

```{toctree}
:hidden:
:caption: Run

docs/operations
docs/storage
docs/scale
docs/security
docs/reliability
```

```{toctree}
:hidden:
:caption: Look up

docs/configuration
docs/api
docs/method
docs/results
OTHERS
```

```{toctree}
:hidden:
:caption: Change

CONTRIBUTING
CHANGELOG
```
"""
# A page that is named in words, as the repository's readers know it: on the site a link.
NAMED = re.compile(r"(?<![\w`\](/])docs/(\w+)\.md\b(?![`\])])")


def read_source(app: Any, docname: str, source: list[str]) -> None:
    """Give README the table of contents, and make links of the names of pages."""
    if docname == root_doc:
        named = set(re.findall(r"^(docs/\w+)$", CONTENTS, re.MULTILINE))
        pages = {f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md")}
        source[0] += CONTENTS.replace("OTHERS", "\n".join(sorted(pages - named)))
    if docname.startswith("docs/") and docname != "docs/tour":
        source[0] = NAMED.sub(r"[\1](\1.md)", source[0])


def describe_settings(app: Any, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Give a class of settings its options, whose words are in its fields."""
    if inspect.isclass(thing) and issubclass(thing, settings.Settings):
        lines += ["", "Parameters", "----------"]
        for field_name, field in thing.model_fields.items():
            lines += [f"{field_name} : default {field.default!r}", f"    {field.description}"]


def shorten_signature(
    app: Any, kind: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Show defaults that are objects by their names; options of settings are said one by one below."""
    if inspect.isclass(thing) and issubclass(thing, settings.Settings):
        return "(**options)", None
    if signature:
        signature = re.sub(r"= ?Limits\([^()]*\)", "= LIMITS", signature)
        signature = re.sub(r"<function .*? at 0x[0-9a-f]+>", "...", signature)
    return signature, returns


def skip_member(app: Any, kind: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leave out what scikit-learn and pydantic put into every class."""
    return True if name.startswith("model_") or name.endswith("_request") else None


def write_index(app: Any, error: Exception | None) -> None:
    """Make README the page that a web server shows first."""
    if error is None:
        shutil.copyfile(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Any) -> None:
    """Connect the hooks; numpydoc reads a docstring after ours has written to it."""
    app.connect("source-read", read_source)
    app.connect("autodoc-process-docstring", describe_settings, priority=400)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("build-finished", write_index)
