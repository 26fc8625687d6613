"""What changed in a run's window, on storage: a table of all nodes, and a small file for alerts.

    changes.parquet   a row per node: node_id, (space,) row, community, p_value, step, size
    changes.json      what is significant at the rate of an alert, and all tests that are not of nodes

p is the chance that something which does not change seems to change as much. q is the false discovery rate at
which it is on the list, Benjamini and Hochberg's; the rate is shared by the four kinds (nodes, communities,
rhythms, moments), so that a graph without any change has a list at all with that chance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from toffee_dist.kernels.chance import discovery_rates
from toffee_dist.storage.manifest import Count, Record
from toffee_dist.storage.parquet import take_rows
from toffee_dist.storage.runs import RunFolder
from toffee_dist.tensor import Floats

# The rate of the alert file.
ALERT_RATE = 0.05
# Nodes, communities, rhythms, moments: each gets an equal share of the rate.
KINDS = 4
# Nodes that the alert file names at the most; the table has all.
MOST_NODES = 1000


class Tested(Record):
    """Something that was tested."""

    p_value: float = Field(ge=0, le=1)
    q_value: float = Field(ge=0, le=1)


class NodeChange(Tested):
    """A node that is another from a step on.

    `size`: ‖after − before‖ / (‖after‖ + ‖before‖) of its mean vectors; 1: nothing in common.
    `new`: the previous run's alert file does not have it.
    """

    node_id: Any
    space: str | None = None
    row: Count
    step: Count
    start: str
    size: float
    new: bool = True


class CommunityChange(Tested):
    """A community that links otherwise from a step on."""

    community: Count
    nodes: Count
    members: list[Any]
    step: int
    start: str
    size: float


class RhythmChange(Tested):
    """A period whose energy differs between the two halves of the window, in units of the noise."""

    k: Count
    period_steps: float
    period: str
    before: float
    after: float
    new: bool = True


class Moment(Tested):
    """A step from which on the graph as a whole is another."""

    step: int
    start: str
    size: float
    new: bool = True


class Tests(Record):
    """All tests that are not of nodes, significant or not."""

    communities: list[CommunityChange]
    rhythms: list[RhythmChange]
    moments: list[Moment]


class ChangesRecord(Record):
    """changes.json: the alert file of a run.

    `tested` counts the tests of every kind, `found` the nodes that are significant: more than `nodes` names,
    where they are many.
    """

    format: int = 1
    rate: float
    tested: dict[str, Count]
    found: Count
    nodes: list[NodeChange]
    communities: list[CommunityChange]
    rhythms: list[RhythmChange]
    moments: list[Moment]
    tests: Tests


def shared_rates(p: Floats) -> Floats:
    """Return q of the tests of one kind, each of which has a share of the rate.

    Examples
    --------
    >>> shared_rates([0.01, 0.5]).tolist()
    [0.08, 1.0]
    """
    found: Floats = (KINDS * discovery_rates(p)).clip(max=1.0)
    return found


def read_p_value(folder: RunFolder, row: int) -> float | None:
    """Return the chance of one node's change; None where it was not tested."""
    if not folder.change_table.exists():
        return None
    found = take_rows(folder.change_table, np.array([row]), ["p_value"])["p_value"][0].as_py()
    return None if found is None else float(found)


def read_p_values(folder: RunFolder, start: int, stop: int) -> pa.Array:
    """Return the chances of the nodes [start, stop); null where one was not tested."""
    if not folder.change_table.exists() or start == stop:
        return pa.nulls(stop - start, pa.float64())
    return take_rows(folder.change_table, np.arange(start, stop), ["p_value"])["p_value"].combine_chunks()
