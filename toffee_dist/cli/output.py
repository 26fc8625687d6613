"""What every command prints goes through here: nothing that strangers wrote commands the terminal."""

from __future__ import annotations

import click

from toffee_dist.words import hide_secrets, show_text


def echo(text: str = "", *, err: bool = False) -> None:
    """Print text, its control characters made visible."""
    click.echo(show_text(text), err=err)


def complain(text: str) -> None:
    """Print what went wrong to stderr, without secrets."""
    echo(hide_secrets(text), err=True)
