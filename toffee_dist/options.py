"""Command-line options made from the configuration, so that names, help and defaults exist once."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import click

from toffee_dist.config import Settings

F = TypeVar("F", bound=Callable[..., Any])


def config_options(*groups: type[Settings], without: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Give a command ``--config`` and an option for every field of some settings.

    An option that is not given arrives as None: the file, or the default of the field, decides.
    """
    fields = {
        name: field
        for group in groups
        for name, field in group.model_fields.items()
        if name not in without and name != "inputs"
    }

    def decorate(command: F) -> F:
        for name, field in reversed(fields.items()):
            command = _option(name, field)(command)
        return click.option(
            "--config", metavar="FILE", help="TOML file with these options; flags override it."
        )(command)

    return decorate


def _option(name: str, field: Any) -> Callable[[F], F]:
    kind = _plain(field.annotation)
    flag = "--" + name.replace("_", "-")
    settings: dict[str, Any] = {"default": None, "help": field.description}
    if kind is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    elif typing.get_origin(kind) is Literal:
        settings["type"] = click.Choice(typing.get_args(kind))
    elif kind in (int, float):
        settings["type"] = kind
    elif typing.get_origin(kind) is tuple:
        # Several times, or several words with commas between them.
        settings |= {"metavar": "LIST", "multiple": True, "callback": lambda _, __, words: words or None}
    else:
        settings["metavar"] = "TEXT"
    if field.default not in (None, False, ""):
        default = field.default if not isinstance(field.default, tuple) else ",".join(field.default)
        settings["help"] += f"  [default: {default}]"
    return click.option(flag, name, **settings)


def _plain(annotation: Any) -> Any:
    """Return X of X | None and of Annotated[X, ...]."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return next(part for part in typing.get_args(annotation) if part is not type(None))
    return annotation
