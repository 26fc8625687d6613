"""The evaluation as a job: a TOML file of options, and any of them again on the command line.

python jobs/evaluate.py jobs/evaluate.toml --out quality --seeds 3
"""

from __future__ import annotations

import sys
from pathlib import Path

from toffee_dist.cli import main as toffee
from toffee_dist.cli_evaluate import toml_arguments
from toffee_dist.errors import ToffeeError


def main(arguments: list[str]) -> None:
    """Run `toffee evaluate` with the options of a file; flags override it."""
    if not arguments or arguments[0].startswith("-"):
        sys.exit("usage: python jobs/evaluate.py CONFIG.toml [OPTIONS of toffee evaluate]")
    try:
        command = toml_arguments(Path(arguments[0]), arguments[1:])
    except ToffeeError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    toffee(["evaluate", *command])


if __name__ == "__main__":
    main(sys.argv[1:])
