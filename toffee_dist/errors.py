"""The errors a user can meet: what is wrong, the value, what is allowed, what to do."""

from __future__ import annotations

from collections.abc import Callable

from toffee_dist.words import hide_secrets, show_line, show_text


class ToffeeError(Exception):
    """Base of every error that toffee_dist raises on purpose.

    Its message can be printed and kept: secrets are masked, control characters visible.

    Parameters
    ----------
    what
        What is wrong, in a few words.
    got
        The offending value, as the user would recognise it.
    allowed
        What would have been accepted; empty where the trouble is a state, not a value.
    remedy
        What to do next.
    """

    exit_code = 1

    def __init__(self, what: str, *, got: object, allowed: str = "", remedy: str = "") -> None:
        # A value may hold anything; what we say ourselves may have lines.
        what, got = show_line(what), show_line(str(got))
        message = f"{what}: got {got}; allowed: {allowed}." if allowed else f"{what}: {got}."
        super().__init__(hide_secrets(show_text(f"{message} {remedy}".rstrip())))
        self.remedy = remedy

    def __reduce__(self) -> tuple[Callable[..., ToffeeError], tuple[type[ToffeeError], str, str]]:
        """Travel between processes as the message: the keywords are already part of it."""
        return _rebuild, (type(self), str(self), self.remedy)


def _rebuild(kind: type[ToffeeError], message: str, remedy: str) -> ToffeeError:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.remedy = remedy
    return error


class ConfigError(ToffeeError, ValueError):
    """A parameter has a value that cannot work."""

    exit_code = 2


class InputError(ToffeeError, ValueError):
    """The data cannot be used as they are."""

    exit_code = 3


class NotFittedError(ToffeeError, AttributeError):
    """A result was asked for before `fit`."""

    exit_code = 2


class TooLargeError(ToffeeError):
    """The job needs more memory than the workers have."""

    exit_code = 4


class UnfinishedError(ToffeeError):
    """The run could not be finished here and now, and can be resumed: a lost cluster, a full disk."""

    exit_code = 5


class QualityError(ToffeeError):
    """The results are not fit to be published; the run published before stays."""

    exit_code = 6
