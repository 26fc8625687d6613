"""The index: the vectors of an output once more as one matrix, which is read several times as fast."""

from __future__ import annotations

from pathlib import Path

from toffee_dist.results.published import PublishedRun
from toffee_dist.storage.files import ArrayWriter, remove_file, replacing
from toffee_dist.storage.manifest import IndexRecord, write_record
from toffee_dist.storage.vectors import map_blocks

INDEXED = ("embedding", "embedding_target", "spectrum")


def build_index(run: PublishedRun) -> list[Path]:
    """Write the index of every output that has one vector per node; return the files.

    They appear whole or not at all; queries use them from then on.
    """
    paths = []
    for output in INDEXED:
        if output in run.manifest.outputs:
            table, path = run.vectors(output), run.folder.index(output)
            path.parent.mkdir(exist_ok=True)
            record = run.folder.index_record(output)
            # Without its record an index is not read: not before all of it is there.
            remove_file(record)
            with replacing(path) as temporary, ArrayWriter(temporary, "<f4", table.shape) as writer:
                for vectors in map_blocks(lambda block: block.read(), table.groups()):
                    writer.append(vectors)
            write_record(record, IndexRecord(run_id=run.folder.run_id, space_id=table.space_id))
            paths.append(path)
    return paths
