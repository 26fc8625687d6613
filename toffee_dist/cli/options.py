"""Command-line options made from the settings, so that names, help, groups and defaults exist once."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import click

from toffee_dist.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])

# Groups of the help, in order. What no setting declares, and what is required, comes before them.
FIRST = "Options"
GROUPS = (
    "Input",
    "Time",
    "Model",
    "Other models",
    "Evaluation",
    "Refresh",
    "Output",
    "Cluster",
    "Who is told",
)

# Other names of options of several words.
ALIASES = {"model": ("models",)}

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON line.")
inputs_argument = click.argument("inputs", nargs=-1, metavar="INPUT...")


class GroupedOption(click.Option):
    """An option that knows its group in the help."""

    def __init__(self, *words: Any, group: str = FIRST, **settings: Any) -> None:
        super().__init__(*words, **settings)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help shows its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section per group."""
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in (FIRST, *GROUPS)}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                sections[getattr(parameter, "group", FIRST)].append(record)
        for name, rows in sections.items():
            if rows:
                with formatter.section(name):
                    formatter.write_dl(rows)


def config_options(*groups: type[Settings], without: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Give a command ``--config`` and an option for every field of some settings.

    An option that is not given arrives as None: the file, or the default of the field, decides. ``--out``
    comes first and is marked as required, though the file may say it.
    """
    fields = {
        name: field
        for group in groups
        for name, field in group.model_fields.items()
        if name not in (*without, "inputs")
    }

    def decorate(command: F) -> F:
        for name, field in reversed(fields.items()):
            if name != "out":
                command = _option(name, field)(command)
        command = click.option(
            "--config", metavar="FILE", help="TOML file with these options; flags override it."
        )(command)
        return _option("out", fields["out"], required=True)(command) if "out" in fields else command

    return decorate


def _option(name: str, field: Any, *, required: bool = False) -> Callable[[F], F]:
    kind = _plain(field.annotation)
    flag = "--" + name.replace("_", "-")
    words = [field.description]
    group = FIRST if required else field.json_schema_extra["group"]
    settings: dict[str, Any] = {"default": None, "group": group}
    if kind is bool:
        words += [f"[default: {flag}]"] if field.default else []
        flag = f"{flag}/--no-{flag[2:]}"
    elif typing.get_origin(kind) is Literal:
        settings["type"] = click.Choice(typing.get_args(kind))
    elif kind in (int, float):
        settings["type"] = kind
    elif typing.get_origin(kind) is tuple:
        # Several times, or several words with commas between them.
        settings |= {"metavar": "LIST", "multiple": True, "callback": lambda _, __, words: words or None}
    else:
        settings["metavar"] = field.json_schema_extra["metavar"] or "TEXT"
    words += [f"[default: {default}]"] if (default := _show(field.default)) else []
    words += ["[required]"] if required else []
    flags = [
        flag,
        *(f"--{other}" for other in ALIASES.get(name, ()) if kind is not bool and settings.get("multiple")),
    ]
    return click.option(*flags, name, cls=GroupedOption, help="  ".join(words), **settings)


def _show(default: object) -> str:
    """Return a default as a user would write it; nothing for flags and where there is none."""
    if default is None or isinstance(default, bool):
        return ""
    if isinstance(default, tuple):
        return ",".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def _plain(annotation: Any) -> Any:
    """Return X of X | None."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return next(part for part in typing.get_args(annotation) if part is not type(None))
    return annotation
