"""The nightly refresh, for a scheduler: a TOML file of options, and any of them again on the command line.

python jobs/nightly.py jobs/nightly.toml --as-of 2026-03-01

Exit codes as of `toffee`: 0 done (or nothing to do), 5 try again, 6 kept but not published. One JSON line on
stdout; the same line goes to OUT/refresh.jsonl, and its figures to OUT/refresh.prom for Prometheus.
Run, with its TOML file, by tests/deploy/test_deploy.py.
"""

from __future__ import annotations

import sys

from toffee_dist.cli import main

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python jobs/nightly.py CONFIG.toml [OPTIONS of toffee refresh]")
    main(["refresh", "--json", "--config", *sys.argv[1:]])
