"""How much one task does: sizes that bound memory and make tasks of seconds.

Results do not depend on where the work is cut, except that a run is written in more or fewer parts. Tests
pass small ones, so that small graphs are cut as large ones are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The sizes of tasks; each was chosen where its stage was measured (benchmarks/ingest.py, scaling.py).

    Parameters
    ----------
    table_bytes, task_rows, text_bytes, files_per_task
        What one task reads: bytes or rows of Parquet or Arrow, bytes of text, files.
    batch_rows, text_block_bytes, head_bytes
        Rows that are cleaned at once, bytes of text that are cut into columns at once, and bytes at the
        beginning of a text file that guesses are made from.
    bucket_ids
        Distinct ids, summed over the scan tasks, that one bucket of the registry merges.
    bin_entries, block_entries
        Entries of one bin, on average, and of one block: what a task merges at once, and what it writes. Bins
        have equal numbers of rows, and low ids are often the busy ones: with bins of 2²⁰ the fullest of ten
        million nodes had a tenth of all entries, and one task took 1,255 MiB; with 2¹⁵ it is 465.
    task_seconds, max_batch
        Seconds that a task of a solver should take, so that a lost worker costs little and a task's overhead
        nothing; and frequencies that it has at the most.
    part_bytes
        What a task that writes a part of an output holds.
    block_work, max_block_work
        Work of one block of a slice that is cut into blocks of nodes, in pairs (`batch.blocks.ROW_PAIRS`). A
        graph of less is one block, and its slices are solved in one task each. Every block reads all others
        in a pass, so blocks of a large graph are larger, up to what a worker can be expected to hold.
    slice_bytes
        What a task may hold that solves a slice whole; a larger one is cut into blocks too.
    table_rows
        Rows of a table that are held at once.
    """

    table_bytes: int = 32 << 20
    task_rows: int = 1 << 22
    text_bytes: int = 128 << 20
    files_per_task: int = 1000
    batch_rows: int = 1 << 21
    text_block_bytes: int = 32 << 20
    head_bytes: int = 256 << 10
    bucket_ids: int = 1 << 22
    bin_entries: int = 1 << 15
    block_entries: int = 1 << 21
    task_seconds: float = 4.0
    max_batch: int = 64
    part_bytes: int = 96 << 20
    block_work: int = 6 << 20
    max_block_work: int = 64 << 20
    slice_bytes: int = 3 << 30
    table_rows: int = 1 << 18


LIMITS = Limits()
