"""Which vectors may be compared: the id of the space that they are in.

A space is decided by the first run of a chain: the tensor it was made of, and the options that shape its
vectors. The id is a digest of both, so equal runs have equal ids, wherever and however often they ran, and
after any interruption. A refresh that was turned onto the previous run has that run's id. A version of ours
is no part of it.

Each output has an id of its own kind: a trajectory is in the axes of the embedding but not at its scale.
Outputs that a refresh does not turn (factors, and trajectories in other axes than the embedding's) are in a
space of their own run; but a causal trajectory that is appended to is in that of the first of its chain.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from toffee_dist.errors import InputError
from toffee_dist.settings import JobConfig, RivalSettings, TrajectorySettings, VectorSettings
from toffee_dist.words import show_line

# In the metadata of every Parquet file of vectors; the column of the same name says it for every row.
SPACE_KEY = "toffee.space_id"
SPACE_COLUMN = "space_id"

# The options that shape the vectors since there are spaces: they always count. One that a later version adds
# counts where it is not its default, so that ids of before stay what they were.
_SHAPE = (
    "gauge",
    "max_iter",
    "model",
    "precision",
    "rank",
    "reduce",
    "reg_a",
    "reg_r",
    "seed",
    "solver",
    "tol",
)
_SHAPE_IN_TIME = ("basis", "causal", "denoise", "trajectory_by")
# A bound changes no vector; frequencies are terms of a sum, in the same axes.
_NO_SHAPE = {"bound", "freqs"}


class Spaces(NamedTuple):
    """The id of the chain, which is that of its embedding, and that of every output."""

    space_id: str
    outputs: dict[str, str]


def make_spaces(
    config: JobConfig, outputs: Sequence[str], tensor: str, chain: str = "", appended: str = ""
) -> Spaces:
    """Return the ids of the spaces of a run.

    Parameters
    ----------
    config
        What was asked for.
    outputs
        Names of the outputs.
    tensor
        Digest of the tensor of this run.
    chain
        Id of the embedding of the previous run, where the vectors were turned onto it; else empty.
    appended
        Id of the trajectory of the previous run, where steps are appended to it; else empty.

    Examples
    --------
    >>> eight, nine = (make_spaces(JobConfig(rank=rank), ["embedding"], "edges") for rank in (8, 9))
    >>> eight.space_id == nine.space_id
    False
    """
    own = _digest("space", tensor, _chosen(config, VectorSettings, _SHAPE))
    # What turns the embedding turns these too: they are in its axes. A causal chain keeps those it began in.
    turned = config.basis == "sum" and config.reduce == "sum" and config.gauge == "canonical"
    turned = turned and not config.causal
    spaces = {}
    for output in outputs:
        if output.startswith("embedding"):
            spaces[output] = chain or own
        elif output == "trajectory":
            shape = _chosen(config, TrajectorySettings, _SHAPE_IN_TIME, VectorSettings)
            spaces[output] = appended or _digest("trajectory", (chain or own) if turned else own, shape)
        else:
            spaces[output] = _digest(output, own)
    return Spaces(chain or own, spaces)


def _chosen(
    config: JobConfig,
    kind: type[VectorSettings],
    always: Sequence[str],
    but: type[VectorSettings] | None = None,
) -> dict[str, Any]:
    """Return the options that count, by their names."""
    later = {*kind.model_fields, *RivalSettings.model_fields} - {*always} - _NO_SHAPE
    if but is not None:
        later -= {*but.model_fields}
    fields = type(config).model_fields
    changed = {name for name in later if getattr(config, name) != fields[name].default}
    return config.model_dump(mode="json", include={*always, *changed})


def old_space(first_run: str, output: str) -> str:
    """Return the id of an output of a run that was made before there were ids: by the first of its chain."""
    return _digest("before", first_run, "embedding" if output.startswith("embedding") else output)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def check_space(expected: str, found: str, what: str, whose: str, remedy: str) -> None:
    """Raise unless two ids are the same.

    Parameters
    ----------
    expected, found
        Ids of spaces.
    what, whose
        What is of the space that was found, and what is of the one that is expected.
    remedy
        What to do about it.

    Raises
    ------
    InputError
        Where they differ.
    """
    if expected != found:
        raise InputError(
            f"{what}: vectors of another space",
            got=f"space {show_line(found) or 'unknown'}",
            allowed=f"space {expected}, that of {whose}",
            remedy=f"Vectors of two spaces cannot be compared. {remedy}",
        )
