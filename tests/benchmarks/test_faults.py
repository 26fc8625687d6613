"""The counts of many faults may be made in pieces: nothing is counted twice, nothing is forgotten."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from faults import Counts, Log, Piece, count_outcomes, run_pieces


def test_outcomes_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    said = ["good", "hang", "different", "internal error KeyError: 1", "error InputError: 2", "ended"]
    cases = [(f"case {number}", partial(str, words)) for number, words in enumerate(said)]
    assert count_outcomes("injected", cases) == {
        "injected": 6,
        "hangs": 1,
        "different": 1,
        "internal_errors": 1,
        "lost": 2,
    }
    out = capsys.readouterr().out
    assert "case 0" not in out
    assert "case 5: ended" in out


def test_pieces_go_on_where_they_stopped(tmp_path: Path) -> None:
    done: Counter[str] = Counter()
    path, asked = tmp_path / "log", {"every": 1}

    def run(name: str) -> Counts:
        done[name] += 1
        if name == "2" and done[name] == 1:
            raise KeyboardInterrupt
        return {"injected": 1}

    pieces = [Piece(str(number), partial(run, str(number))) for number in range(4)]
    run_pieces(pieces, Log(path, asked), workers=1, minutes=-1)
    assert not done
    with pytest.raises(KeyboardInterrupt):
        run_pieces(pieces, Log(path, asked), workers=1, minutes=0)
    run_pieces(pieces, log := Log(path, asked), workers=2, minutes=0)
    assert (done["0"], done["1"], done["2"], done["3"]) == (1, 1, 2, 1)
    assert log.found == Log(path, asked).found == {str(number): {"injected": 1} for number in range(4)}
    with pytest.raises(SystemExit, match="is the log of"):
        Log(path, {"every": 2})
