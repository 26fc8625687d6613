"""Shared fixtures and hypothesis profiles."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real graphs, or a skip."""
    if not SHARED.is_dir():
        pytest.skip("the real graphs of ../shared/data are not on this machine")
    return SHARED
