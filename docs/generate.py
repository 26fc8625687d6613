"""Write docs/configuration.md from the settings: `python docs/generate.py`.

A test fails where the file is not what this would write.
"""

from __future__ import annotations

import inspect
import types
import typing
from pathlib import Path
from typing import Any, Literal

from toffee_dist import settings
from toffee_dist.evaluation.job import EvaluateSettings

HERE = Path(__file__).parent
NOTE = "<!-- Written by docs/generate.py: change the code, not this file. -->"

Groups = tuple[type[settings.Settings], ...]
SECTIONS: dict[str, tuple[Groups, str]] = {
    "Reading edges": (
        (settings.InputSettings, settings.EdgeSettings),
        "All of `ingest`, `plan`, `embed`, `refresh`, `evaluate`.",
    ),
    "What is computed": (
        (
            settings.ModelSettings,
            settings.TrajectorySettings,
            settings.VectorSettings,
            settings.SolverSettings,
        ),
        "`plan`, `embed`, `refresh`.",
    ),
    "Where it runs": (
        (settings.RuntimeSettings,),
        "Every command that computes. Changes no byte of the results.",
    ),
    "Who is told": (
        (settings.JobRuntimeSettings,),
        "`embed`, `refresh`, `resume` (docs/operations.md). Changes no byte of the results.",
    ),
    "The batch job": ((settings.JobConfig,), "`embed`, `refresh`."),
    "The nightly refresh": ((settings.RefreshSettings,), "`refresh` (docs/refresh.md)."),
    "The evaluation": (
        (settings.OutSettings, EvaluateSettings, settings.FitSettings),
        "`evaluate` (docs/evaluation.md), which also has `gauge` and what says how slices are solved.",
    ),
}


def configuration() -> str:
    """Return the reference of all options."""
    lines = [
        "# Configuration",
        "",
        NOTE,
        "",
        "Every option of the command line is a key of the TOML file that `--config` names, with the same",
        "name: `--pair-weight` is `pair_weight` (or `pair-weight`). Flags override the file, the file",
        "overrides the defaults. An unknown key is an error that names the nearest known one. The manifest",
        "of a run holds what it was made with under the same names.",
    ]
    for title, (groups, used_by) in SECTIONS.items():
        lines += [
            "",
            f"## {title}",
            "",
            used_by,
            "",
            "| key | what it takes | default | |",
            "|---|---|---|---|",
        ]
        # A section has the keys that its settings add to those they build on.
        for group in groups:
            for name in inspect.get_annotations(group):
                field = group.model_fields[name]
                cells = (f"`{name}`", _kind(field), _value(field.default), field.description or "")
                lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _kind(field: Any) -> str:
    kind = field.annotation
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is Literal:
        return ", ".join(f"`{word}`" for word in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        [inner, _] = typing.get_args(kind)
        words = typing.get_args(inner) if typing.get_origin(inner) is Literal else ()
        return "a list" + (" of " + ", ".join(f"`{word}`" for word in words) if words else "")
    names = {bool: "yes or no", int: "a whole number", float: "a number", str: "text"}
    return names.get(kind, str(kind))


def _value(value: object) -> str:
    if value is None or value == "" or value == ():
        return ""
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    if isinstance(value, tuple):
        return ", ".join(f"`{part}`" for part in value)
    return f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    (HERE / "configuration.md").write_text(configuration())
    print(HERE / "configuration.md")
