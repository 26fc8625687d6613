"""The evaluation as a job: a TOML file of options, and any of them again on the command line.

python jobs/evaluate.py jobs/evaluate.toml --out quality --seeds 3

Run, with its TOML file, by tests/cli/test_evaluate.py.
"""

from __future__ import annotations

import sys

from toffee_dist.cli import main

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python jobs/evaluate.py CONFIG.toml [OPTIONS of toffee evaluate]")
    main(["evaluate", "--config", *sys.argv[1:]])
