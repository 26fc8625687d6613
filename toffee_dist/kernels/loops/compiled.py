"""How the loops are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])

# Sums may be taken in another order, so that they fill the vector units (a dot product of 128 numbers takes
# 8 ns instead of 35). The order is that of the processor's kind, as with BLAS, and not of chance. NaN and
# infinity keep their meaning.
FLAGS = {"reassoc", "nsz", "arcp", "contract"}


def compiled(function: F) -> F:
    """Compile a function when it is first called; it releases the interpreter while it runs."""
    return cast(F, numba.njit(fastmath=FLAGS, error_model="numpy", nogil=True)(function))
