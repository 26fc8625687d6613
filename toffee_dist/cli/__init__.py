"""The command line: `toffee`. Thin: options in, one call, text or JSON out."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from typing import Any

import click

from toffee_dist.cli.batch import BATCH_COMMANDS
from toffee_dist.cli.help import LateCommand, Sections, completion_command, narrow_terminal
from toffee_dist.cli.output import complain
from toffee_dist.cli.refresh import REFRESH_COMMANDS
from toffee_dist.cli.report import REPORT_COMMANDS
from toffee_dist.cli.results import ASK_COMMANDS
from toffee_dist.cli.tools import TOOL_COMMANDS
from toffee_dist.errors import ToffeeError


@click.group(cls=Sections, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="toffee_dist", prog_name="toffee")
def cli() -> None:
    """Vectors for the nodes of a graph that changes in time, as batch jobs on Dask."""


for _command in (
    *BATCH_COMMANDS,
    *REFRESH_COMMANDS,
    *ASK_COMMANDS,
    *REPORT_COMMANDS,
    LateCommand(
        "evaluate",
        "Are the vectors any good on this graph?",
        ("toffee_dist.cli.evaluate", "evaluate_command"),
    ),
    *TOOL_COMMANDS,
    completion_command,
):
    cli.add_command(_command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors a user can meet become one message and an exit code."""
    # A scheduler's or an operator's "stop" is an interruption like Ctrl-C: close everything, stay resumable.
    signal.signal(signal.SIGTERM, _interrupt)
    if not os.environ.get("TOFFEE_DEBUG"):
        # Of timers that a closed cluster leaves behind it writes tracebacks, which no user can act upon.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    try:
        cli.main(args=arguments, standalone_mode=False, **narrow_terminal())
    except click.ClickException as error:
        # It quotes the words of the command line.
        said = io.StringIO()
        error.show(said)
        complain(said.getvalue().rstrip("\n"))
        sys.exit(2)
    except ToffeeError as error:
        complain(f"Error: {error}")
        if not error.remedy:
            complain(f"Next: toffee {_command_name(arguments)}--help says what each option takes.")
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        complain("Interrupted. A run that had begun is finished by: toffee resume OUT")
        sys.exit(5)
    except OSError as error:
        complain(f"Error: {error}. Is the disk full or not writable? A run that had begun: toffee resume OUT")
        sys.exit(5)
    except SystemExit:
        raise
    except BaseException as error:
        # A panic of a Rust library too, which is no Exception.
        if os.environ.get("TOFFEE_DEBUG"):
            raise
        complain(
            f"Internal error: {type(error).__name__}: {error}. This is a bug in toffee, not in your data; "
            "set TOFFEE_DEBUG=1 for the details that a report needs."
        )
        sys.exit(1)


def _command_name(arguments: list[str] | None) -> str:
    """Return the command that was called, and a space; nothing where there was none."""
    words = sys.argv[1:] if arguments is None else arguments
    return f"{words[0]} " if words and words[0] in cli.commands else ""


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt
