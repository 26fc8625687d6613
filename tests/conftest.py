"""Shared fixtures and hypothesis profiles."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

QUIET = [HealthCheck.too_slow]
settings.register_profile("default", max_examples=60, deadline=None, suppress_health_check=QUIET)
# The same examples every time: a red run is about the change, not about luck. Look for more with
# `HYPOTHESIS_PROFILE=thorough make test`.
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=1500)
# A glance, for `make quick`.
settings.register_profile("quick", settings.get_profile("default"), max_examples=8)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "default"))

MEMORY = Path("/dev/shm")
# Far more than two tests have at once; containers often have 64 MiB there.
MEMORY_BYTES = 4 << 30


def keep_files_in_memory() -> None:
    """Let temporary files, also those of processes that tests start, be in memory where there is room.

    Everything published is synced, which takes half of the time of a small job on a disk; which syncs come in
    which order is tested by what they are asked to do (tests/storage/test_disk.py). A TMPDIR is respected.
    """
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return
    folder = MEMORY / f"toffee-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    ours = folder.stat().st_uid == os.getuid() and not folder.is_symlink()
    if ours and shutil.disk_usage(MEMORY).free > MEMORY_BYTES:
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


keep_files_in_memory()

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real graphs, or a skip."""
    if not SHARED.is_dir():
        pytest.skip("the real graphs of ../shared/data are not on this machine")
    return SHARED
