"""A few hundred mutations into every reader: none is a bug, none hangs."""

from __future__ import annotations

import pytest
from fuzz import READERS, run_fuzz


@pytest.mark.slow
@pytest.mark.cluster
def test_mutations_are_read_or_refused() -> None:
    found = run_fuzz(mutations=200, seed=7)
    assert tuple(found["by_reader"]) == READERS
    assert found["mutations"] == len(READERS) * 201  # each with its seed
    assert (found["internal_errors"], found["hangs"]) == (0, 0), found
    assert set(found["exit_codes"]) <= {"0", "2", "3", "4", "5"}
    # Readers do read: what a mutation leaves whole is no error.
    assert all(counts.get("0", 0) > 1 for counts in found["by_reader"].values())
