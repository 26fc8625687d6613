"""Write docs/configuration.md from the settings, docs/api.md from the docstrings: `python docs/generate.py`.

A test fails where the files are not what this would write.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from pathlib import Path
from typing import Any, Literal

import toffee_dist
from toffee_dist import evaluation, settings
from toffee_dist.evaluation.job import EvaluateSettings
from toffee_dist.ingest import job
from toffee_dist.kernels import frequencies
from toffee_dist.models import fit
from toffee_dist.results import export, index, neighbors, published, rhythm, run, score, tables, trajectory

HERE = Path(__file__).parent
NOTE = "<!-- Written by docs/generate.py: change the code, not this file. -->"

Groups = tuple[type[settings.Settings], ...]
SECTIONS: dict[str, tuple[Groups, str]] = {
    "Reading edges": (
        (settings.InputSettings, settings.EdgeSettings),
        "All of `ingest`, `plan`, `embed`, `refresh`, `evaluate`.",
    ),
    "What is computed": (
        (settings.ModelSettings, settings.VectorSettings, settings.SolverSettings),
        "`plan`, `embed`, `refresh`.",
    ),
    "Where it runs": (
        (settings.RuntimeSettings,),
        "Every command that computes. Changes no byte of the results.",
    ),
    "The batch job": ((settings.JobConfig,), "`embed`, `refresh`."),
    "The nightly refresh": ((settings.RefreshSettings,), "`refresh` (docs/refresh.md)."),
    "The evaluation": (
        (settings.OutSettings, EvaluateSettings, settings.FitSettings),
        "`evaluate` (docs/evaluation.md), which also has `gauge` and what says how slices are solved.",
    ),
}

API: dict[str, list[Any]] = {
    "In memory": [toffee_dist.Toffee, toffee_dist.TemporalTensor, frequencies.FrequencyChoice],
    "A published run": [run.load_run, run.Run, published.PublishedRun, tables.Table],
    "Ask it": [
        neighbors.neighbors,
        trajectory.read_trajectory,
        trajectory.NodeTrajectory,
        rhythm.find_rhythm,
        rhythm.Rhythm,
        score.score_pairs,
        index.build_index,
    ],
    "Hand it on": [export.export_run, export.temporal_arrays],
    "Read edges": [settings.EdgeSettings, job.ingest],
    "Evaluate": [
        evaluation.EvaluateConfig,
        evaluation.evaluate,
        evaluation.read_events,
        settings.FitSettings,
        fit,
    ],
    "The t-product": [toffee_dist.tproduct, toffee_dist.ttranspose],
    "Errors": [
        toffee_dist.ToffeeError,
        toffee_dist.ConfigError,
        toffee_dist.InputError,
        toffee_dist.NotFittedError,
    ],
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


def reference() -> str:
    """Return the reference of the Python interface."""
    lines = ["# Python API", "", NOTE, "", "Docstrings are in NumPy's form. Tutorial: docs/tutorial.md."]
    for title, things in API.items():
        lines += ["", f"## {title}"]
        for thing in things:
            lines += ["", f"### `{_place(thing)}`", "", *_describe(thing)]
            if inspect.isclass(thing) and not issubclass(thing, Exception):
                for name, member in _members(thing):
                    lines += ["", f"#### `.{name}`", "", *_describe(member, name)]
    return "\n".join(lines) + "\n"


def _place(thing: Any) -> str:
    short = getattr(toffee_dist, thing.__name__, None) is thing
    return f"toffee_dist.{thing.__name__}" if short else f"{thing.__module__}.{thing.__name__}"


def _members(thing: type) -> list[tuple[str, Any]]:
    """Return public methods and properties that the class itself documents, in the order of the source."""
    return [
        (name, member)
        for name, member in vars(thing).items()
        if not name.startswith(("_", "model_"))
        and (
            inspect.isfunction(member)
            or isinstance(member, property | classmethod)
            or hasattr(member, "func")
        )
        and inspect.getdoc(member)
    ]


def _describe(thing: Any, name: str = "") -> list[str]:
    function = thing.__func__ if isinstance(thing, classmethod) else thing
    lines = ["```text"]
    if inspect.isclass(thing) and issubclass(thing, settings.Settings):
        options = (f"{name}={field.default!r}" for name, field in thing.model_fields.items())
        lines += [f"{thing.__name__}(*, {', '.join(options)})", "", *inspect.getdoc(thing).splitlines(), ""]
        for name, field in thing.model_fields.items():
            lines += [name, f"    {field.description}"]
        return [*lines, "```"]
    if callable(function) and not (inspect.isclass(thing) and issubclass(thing, Exception)):
        # Annotations are text: without their quotes they read as they were written.
        signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))
        signature = re.sub(r"= Limits\([^()]*\)", "= LIMITS", signature)
        signature = re.sub(r"<function .*? at 0x[0-9a-f]+>", "...", signature)
        lines += [f"{name or thing.__name__}{signature}", ""]
    return [*lines, *(inspect.getdoc(thing) or "").splitlines(), "```"]


PAGES = {"configuration.md": configuration, "api.md": reference}

if __name__ == "__main__":
    for page, write in PAGES.items():
        (HERE / page).write_text(write())
        print(HERE / page)
