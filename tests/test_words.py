"""What is shown and kept: no control character, no secret, and no text that takes long to look at."""

from __future__ import annotations

import pickle
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.terminal import CLIPBOARD, TITLE, commands
from toffee_dist.errors import InputError
from toffee_dist.progress import BarProgress, LineProgress
from toffee_dist.words import MASK, hide_in, hide_secrets, show_line, show_text

HOSTILE = f"{TITLE}{CLIPBOARD}\x9b31m\x7f\u202eabc\u2066\u2028\r\udc80"


@given(st.text())
def test_nothing_shown_commands_a_terminal(text: str) -> None:
    assert not commands(show_text(text))
    assert not commands(show_line(text))
    assert "\n" not in show_line(text)
    assert "\t" not in show_line(text)
    if not commands(text):
        assert show_text(text) == text


def test_errors_and_notes_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    error = InputError(f"file {HOSTILE}", got=f"{HOSTILE}\nError: none", allowed=HOSTILE, remedy=HOSTILE)
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert not commands(str(one))
        assert "\\x1b]0;owned\\x07" in str(one)
        # A value cannot pretend to be a line of its own.
        assert "\n" not in str(one)
    for progress in (LineProgress(), BarProgress()):
        progress.say(f"columns {HOSTILE} of https://host/e.csv?sig=abc")
    said = capsys.readouterr().err
    assert not commands(said)
    assert said.count("\\u202eabc") == 2
    assert "abc\n" not in said.replace("\\u202eabc", "")


SECRET = "Zm9vYmFyc2VjcmV0"


@pytest.mark.parametrize(
    "text",
    [
        f"https://host/edges.csv?X-Amz-Credential=me&X-Amz-Signature={SECRET}",
        f"cannot read https://host/edges.csv?{SECRET}: 403",
        f"SourceFile(path='https://host/e.csv?sig={SECRET}', size=3)",
        f"abfs://box@account/e.parquet?sv=2024&sig={SECRET}%3D",
        f"sftp://me:{SECRET}@host/e.csv",
        f"password={SECRET}",
        f"DB_PASSWORD={SECRET}; rest",
        f"AWS_SECRET_ACCESS_KEY={SECRET}/x+y",
        f"aws_session_token={SECRET}",
        f"{{'secret': '{SECRET}', 'key': 'AKIAIOSFODNN7EXAMPLE'}}",
        f'{{"api_key": "{SECRET}"}}',
        f"options(token='{SECRET}')",
        f"Authorization: Bearer {SECRET}",
        f"X-Amz-Signature={SECRET}&x=1",
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str) -> None:
    shown = hide_secrets(text)
    assert SECRET not in shown
    assert "AKIA" not in shown
    assert MASK in shown
    assert hide_secrets(shown) == shown
    assert SECRET not in str(InputError("input", got=text, allowed="one", remedy=text))


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/part-?.parquet",
        "edges/*.csv, --rank=8, sigma=3, tokens, secret",
        "unknown name: got token; allowed: the names of the options.",
        "/data/a?b=c.csv",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert hide_secrets(text) == text


def test_values_of_options() -> None:
    asked = {
        "inputs": [f"https://h/a?{SECRET}"],
        "nested": {"x": (f"pwd={SECRET}", 3)},
        "rank": 8,
        "no": None,
    }
    expected = {"inputs": [f"https://h/a?{MASK}"], "nested": {"x": (f"pwd={MASK}", 3)}, "rank": 8, "no": None}
    assert hide_in(asked) == expected


@pytest.mark.parametrize("word", ["a.", "://", "token", "x", "https://a?", "=", "'", "secret='", "bearer "])
def test_no_text_takes_long(word: str) -> None:
    began = time.process_time()
    hide_secrets(word * (200_000 // len(word)))
    assert time.process_time() - began < 5
