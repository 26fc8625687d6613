"""Shared fixtures and hypothesis profiles."""

from __future__ import annotations

import os
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

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real graphs, or a skip."""
    if not SHARED.is_dir():
        pytest.skip("the real graphs of ../shared/data are not on this machine")
    return SHARED
