"""Bytes in the words of a person, and back."""

from __future__ import annotations

from toffee_dist.errors import ConfigError

MIB = 2**20


def parse_bytes(text: str, option: str = "memory") -> int:
    """Read ``8GiB``, ``500MB`` or a plain number of bytes, for an option."""
    # Saves start-up time.
    from dask.utils import parse_bytes as parse

    try:
        return int(parse(text))
    except ValueError:
        raise ConfigError(option, got=repr(text), allowed="bytes such as 8GiB or 500MB") from None


def show_bytes(count: float) -> str:
    """Return bytes as a person would write them.

    Examples
    --------
    >>> show_bytes(1536 * 2**20)
    '1.5 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
