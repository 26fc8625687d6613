"""The first screen of `toffee`, and completion of its words in a shell."""

from __future__ import annotations

import shutil
from importlib import import_module
from typing import Any

import click
from click.shell_completion import get_completion_class

from toffee_dist.cli.output import echo

SECTIONS = {
    "Batch": ("plan", "embed", "resume", "inspect", "ingest"),
    "Nightly": ("refresh", "runs", "rollback", "fold-in", "forget"),
    "Ask": (
        "neighbors",
        "trajectory",
        "similar-periods",
        "changes",
        "explain",
        "score",
        "report",
        "serve",
        "index",
        "export",
    ),
    "More": ("evaluate", "demo", "certs", "completion"),
}
# Columns below which a section has a line of its own.
NARROW = 72


class LateCommand(click.Command):
    """A command whose module is loaded when it is called: for the start-up time of all others.

    Parameters
    ----------
    name, short_help
        As of the command itself.
    place
        Module and name of the command.
    """

    def __init__(self, name: str, short_help: str, place: tuple[str, str]) -> None:
        super().__init__(name, short_help=short_help)
        self.place = place

    def load(self) -> click.Command:
        """Return the command itself."""
        module, name = self.place
        found: click.Command = getattr(import_module(module), name)
        return found


class Sections(click.Group):
    """Commands by what they are for, one line each: all of it fits 30 lines of 80 columns."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name, loaded."""
        found = super().get_command(ctx, cmd_name)
        return found.load() if isinstance(found, LateCommand) else found

    def sections(self) -> dict[str, list[str]]:
        """Return the names of the commands by section; one that no section names comes last."""
        named = {name for names in SECTIONS.values() for name in names}
        found = {title: [n for n in names if n in self.commands] for title, names in SECTIONS.items()}
        found["More"] += [name for name in self.commands if name not in named]
        return found

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write usage, commands and exit codes."""
        wide = formatter.width >= NARROW
        usage = "Usage: toffee COMMAND ..."
        formatter.write(f"{usage}   (toffee COMMAND --help: options, an example)\n" if wide else f"{usage}\n")
        formatter.write_text((self.help or "").partition("\n")[0])
        for title, names in self.sections().items():
            room = formatter.width - 26 if wide else 200
            rows = [(name, self.commands[name].get_short_help_str(room)) for name in names]
            if not wide:
                with formatter.section(title):
                    formatter.write_dl(rows)
                continue
            for number, (name, text) in enumerate(rows):
                formatter.write(f"{title if number == 0 else '':<8} {name:<16} {text}\n")
        formatter.write_text("Exit codes: 0 done, 2 usage, 3 input, 4 memory, 5 resumable, 6 not published")


def narrow_terminal() -> dict[str, Any]:
    """Return the width of help on a terminal below 52 columns, where click would not go by itself."""
    columns = shutil.get_terminal_size().columns
    return {"terminal_width": max(columns - 2, 20)} if columns < 52 else {}


@click.command("completion", short_help="Complete commands and options in bash, zsh, fish")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print a script that completes commands and options.

    \b
    bash: toffee completion bash >> ~/.bashrc
    zsh:  toffee completion zsh >> ~/.zshrc
    fish: toffee completion fish > ~/.config/fish/completions/toffee.fish

    \b
    Example:
      toffee completion bash
    """
    kind = get_completion_class(shell)
    assert kind is not None
    root = ctx.find_root().command
    complete = kind(root, {}, "toffee", "_TOFFEE_COMPLETE")
    # Not .source(), which starts bash to look at its version.
    echo(complete.source_template % complete.source_vars())
