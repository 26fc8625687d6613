"""What a filtered trajectory takes, for the plan: its maps, its two forms on storage, and the other way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from toffee_dist.batch.block_cost import find_energy_axes
from toffee_dist.batch.changes import ENTRY_NUMBERS, SAMPLE, is_watched
from toffee_dist.batch.trajectory import ENTRY_BYTES, Dense, most_looks
from toffee_dist.kernels.chance import AT_ONCE
from toffee_dist.kernels.changes import NODE_DIRECTIONS, NODES_AT_ONCE
from toffee_dist.kernels.gains import BLOCK_NUMBERS, EPOCH_GROWTH, FFT_COST, padded_length
from toffee_dist.kernels.patterns import NUMBERS, PRODUCTS, looks_for_patterns
from toffee_dist.limits import Limits
from toffee_dist.models.base import Cost
from toffee_dist.settings import ModelSettings
from toffee_dist.storage.compact import compact_bytes
from toffee_dist.storage.tensors import Sizes
from toffee_dist.units import show_bytes

# Seconds per entry and direction of projecting a block and writing its entries.
SECONDS_ENTRY = 6e-9
# Seconds per product of two numbers, in single precision, one thread: 5,000 nodes, 240 steps, rank 64.
SECONDS_PRODUCT = 1e-11


def in_chain(sizes: Sizes, settings: ModelSettings, refreshed: bool) -> Sizes:
    """Return the sizes of what a trajectory keeps: a causal chain has the entries of up to two windows."""
    if not (refreshed and settings.causal):
        return sizes
    return replace(sizes, n_steps=2 * sizes.n_steps, n_entries=2 * sizes.n_entries)


def filter_costs(sizes: Sizes, settings: ModelSettings, limits: Limits, refreshed: bool) -> list[Cost]:
    """Return the maps of a filtered trajectory, without its Parquet."""
    T, sizes = sizes.n_steps, in_chain(sizes, settings, refreshed)
    n, entries, rank = sizes.n_nodes, sizes.n_entries, settings.rank
    found = []
    if settings.basis == "energy":
        cost = find_energy_axes(sizes, min(rank, n), 4 if settings.precision == "single" else 8, limits)
        where = "" if cost.blocks == 1 else ", in blocks of nodes: every pass is a map over the blocks"
        found.append(
            Cost(
                "energy basis",
                f"axes of all energy{where}",
                cost.blocks,
                cost.task_bytes,
                cost.seconds,
                cost.disk,
                cost.passes,
                cost.moved,
            )
        )
    length = padded_length(T)
    # Causal gains are learnt from every past: lengths that grow by a constant share.
    pasts = 1 / (1 - 1 / EPOCH_GROWTH) if settings.causal else 1
    blocks = max(1, math.ceil(entries * ENTRY_BYTES * rank / limits.part_bytes))
    energies = int(8 * (length // 2 + 1) * (rank + 1) * pasts)
    # What a block may hold.
    block = 2 * min(limits.part_bytes, entries * ENTRY_BYTES * rank)
    if looks_for_patterns(T, settings.causal):
        looks = min(blocks, most_looks(T))
        products = min(PRODUCTS, float(T) ** 2 * rank * n)
        found.append(
            Cost(
                "patterns",
                "patterns in time that many nodes share",
                looks,
                block + 8 * NUMBERS + 24 * T**2,
                SECONDS_PRODUCT * products + SECONDS_ENTRY * entries * rank * looks / blocks,
                8 * T**2 * looks,
            )
        )
    transform = FFT_COST * 1e-9 * n * rank * length * math.log2(max(length, 2)) * pasts
    found.append(
        Cost(
            "filter",
            "energies of blocks of nodes, and the compact form of the trajectory",
            blocks,
            # Its rows in a transform, complex and squared.
            block + 24 * min(BLOCK_NUMBERS, n * length) + 3 * energies,
            SECONDS_ENTRY * entries * rank + transform,
            compact_bytes(n, entries, sizes.n_steps, rank) + blocks * energies,
        )
    )
    why = "one kernel in time per direction, from all energies"
    found.append(Cost("kernel", why, 1, 6 * energies + 16 * T * rank, 2e-8 * energies, 0))
    return found


def watch_costs(sizes: Sizes, settings: ModelSettings, limits: Limits, refreshed: bool) -> list[Cost]:
    """Return what looking for changes takes, where that is done."""
    if not is_watched(settings, refreshed):
        return []
    n, T, entries = sizes.n_nodes, sizes.n_steps, sizes.n_entries
    block = min(limits.part_bytes, entries * ENTRY_BYTES * ENTRY_NUMBERS)
    blocks = max(1, math.ceil(entries * ENTRY_BYTES * ENTRY_NUMBERS / limits.part_bytes))
    # Of the graph and of each community: a row per step, and a matrix of the directions.
    sums = 8 * (T + 64) * 64 * 3
    # The d×d matrices of some nodes, their products and eigenvalues; tails of many weights at once.
    matrices = 8 * NODES_AT_ONCE * NODE_DIRECTIONS**2 * 6 + 8 * AT_ONCE * 6
    why = "tests of nodes, communities, rhythms and moments"
    return [
        Cost(
            "watch",
            "when events come; communities",
            1,
            24 * n + 16 * SAMPLE * settings.rank,
            2e-8 * entries,
            n,
        ),
        Cost(
            "changes",
            why,
            blocks,
            2 * block + matrices + 8 * sums,
            4e-7 * entries + 3e-5 * n,
            24 * n + blocks * sums,
        ),
        Cost("judge", "what is significant", 1, 96 * n + 2 * sums, 1e-6 * n, 32 * n),
    ]


def describe_ways(
    sizes: Sizes,
    settings: ModelSettings,
    costs: Sequence[Cost],
    als_seconds: float,
    dense: Dense,
    dense_bytes: int,
    refreshed: bool,
) -> str:
    """Return what the trajectory takes in both forms, beside all of it as Parquet, and the seconds of ALS."""
    n, T, rank, kept = sizes.n_nodes, sizes.n_steps, settings.rank, in_chain(sizes, settings, refreshed)
    compact = compact_bytes(n, kept.n_entries, kept.n_steps, rank)
    of = " of active nodes" if dense.nodes == "active" else ""
    of += " in half precision" if dense.precision == "half" else ""
    everything = Dense(tuple(range(T))).bytes(n * T, rank)
    return (
        f"trajectory by the filter: about {sum(cost.seconds for cost in costs):,.1f} seconds (by als: up to "
        f"{als_seconds:,.0f}); {show_bytes(compact)} in its compact form, "
        f"{len(dense.steps):,} of {T:,} steps{of} as Parquet: {show_bytes(dense_bytes)} at the most "
        f"(all nodes and steps in single precision: {show_bytes(everything)})"
    )
