"""What workers say of themselves before the first task, and those that die just then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distributed.comm import CommClosedError

from toffee_dist.cluster.workers import ask_workers
from toffee_dist.errors import ConfigError, UnfinishedError


class Answers:
    """A client whose workers answer so."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def run(self, *given: Any, **options: Any) -> dict[str, Any]:
        return self.answers


@pytest.mark.parametrize("answers", [{}, {"one": CommClosedError("stream is closed")}])
def test_a_worker_that_dies_is_no_mistake_of_the_user(tmp_path: Path, answers: dict[str, Any]) -> None:
    """Exit code 5, to be resumed; it was 2, and the advice to install something."""
    with pytest.raises(UnfinishedError, match="the cluster is lost") as lost:
        ask_workers(Answers(**answers), tmp_path)
    assert lost.value.exit_code == 5
    assert list(tmp_path.iterdir()) == []


def test_a_worker_without_our_code_is_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot run our tasks"):
        ask_workers(Answers(one=ModuleNotFoundError("No module named 'toffee_dist'")), tmp_path)
