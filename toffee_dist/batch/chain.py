"""What a run follows: nothing, unless it is a refresh, which has a chain of its own (`refresh.chain`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toffee_dist.batch.past import NO_PAST, Past
from toffee_dist.batch.plan import Shape, Stage
from toffee_dist.limits import Limits
from toffee_dist.storage.manifest import Following, RefreshRecord
from toffee_dist.storage.slices import NO_STARTS, Starts, ZeroSlice

if TYPE_CHECKING:
    from toffee_dist.batch.job import Job


class Chain:
    """The chain of a run that follows no other: every answer is none."""

    @property
    def following(self) -> Following | None:
        """What a resumed run must know of its chain, for job.json."""
        return None

    @property
    def previous(self) -> str:
        """Folder of the previous run; empty: none."""
        return ""

    @property
    def rotated(self) -> bool:
        """Whether vectors are turned onto those of the previous run."""
        return False

    @property
    def past(self) -> Past:
        """What the trajectory goes on from, known once vectors are aligned."""
        return NO_PAST

    def stages(self, shape: Shape, limits: Limits) -> Sequence[Stage]:
        """Return what the chain adds to the plan."""
        return ()

    def known_nodes(self, job: Job) -> str | None:
        """Return the run or ingest whose nodes keep their rows."""
        return job.config.known

    def starts(self, job: Job) -> Starts:
        """Return what the solves start from."""
        return NO_STARTS

    def align(self, job: Job, zero: ZeroSlice | None) -> None:
        """Find the rotation onto the previous run, and what the trajectory goes on from."""

    def space(self) -> str:
        """Return the id of the space that the vectors were turned into; empty: into none."""
        return ""

    def finish(self, job: Job, zero: ZeroSlice | None) -> RefreshRecord | None:
        """Set the run beside earlier ones; return what was found, with the reasons not to publish it."""
        return None


NO_CHAIN = Chain()
