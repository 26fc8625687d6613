"""The errors a user can meet: what is wrong, the value, what is allowed, what to do."""

from __future__ import annotations


class ToffeeError(Exception):
    """Base of every error that toffee_dist raises on purpose.

    Parameters
    ----------
    what
        What is wrong, in a few words.
    got
        The offending value, as the user would recognise it.
    allowed
        What would have been accepted.
    remedy
        What to do next.
    """

    exit_code = 1

    def __init__(self, what: str, *, got: object, allowed: str, remedy: str = "") -> None:
        message = f"{what}: got {got}; allowed: {allowed}."
        super().__init__(f"{message} {remedy}".rstrip())


class ConfigError(ToffeeError, ValueError):
    """A parameter has a value that cannot work."""

    exit_code = 2


class InputError(ToffeeError, ValueError):
    """The data cannot be used as they are."""

    exit_code = 3


class NotFittedError(ToffeeError, AttributeError):
    """A result was asked for before `fit`."""

    exit_code = 2
