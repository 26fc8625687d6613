"""The main job on a small made-up graph: communities that follow the clock and the week.

The same as `toffee demo`. Takes seconds, needs no input. Run by `make demo` and by the tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

from toffee_dist.demo import run_demo
from toffee_dist.progress import choose_progress

if __name__ == "__main__":
    run_demo(Path(sys.argv[1] if len(sys.argv) > 1 else "toffee-demo"), print, choose_progress())
