"""The batch job, for a scheduler: a TOML file of options, and any of them again on the command line.

python jobs/embed.py jobs/embed.toml --out vectors

After exit code 5, `toffee resume OUT` goes on. Run, with its TOML file, by tests/deploy/test_scripts.py.
"""

from __future__ import annotations

import sys

from toffee_dist.cli import main

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python jobs/embed.py CONFIG.toml [OPTIONS of toffee embed]")
    main(["embed", "--config", *sys.argv[1:]])
