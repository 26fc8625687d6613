"""The chain of a refresh: what a run takes from the previous one, and what it must show beside it."""

from __future__ import annotations

from dataclasses import replace

from toffee_dist.batch import solve
from toffee_dist.batch.chain import Chain
from toffee_dist.batch.job import Job
from toffee_dist.batch.past import NO_PAST, Past
from toffee_dist.batch.plan import Shape, Stage
from toffee_dist.batch.stages import compare_stage, wanted_parts
from toffee_dist.batch.write_outputs import OutputFolder
from toffee_dist.errors import UnfinishedError
from toffee_dist.kernels.embedding import TimeWeights
from toffee_dist.limits import Limits
from toffee_dist.refresh import align, append, drift, links
from toffee_dist.refresh.expiry import ExpireTask, expire_nodes
from toffee_dist.refresh.gate import judge
from toffee_dist.refresh.warm import KeepTask, keep_slices
from toffee_dist.settings import RefreshConfig
from toffee_dist.storage.manifest import (
    AlignmentRecord,
    Drift,
    Following,
    LinksRecord,
    RefreshRecord,
)
from toffee_dist.storage.runs import RunFolder, find_latest
from toffee_dist.storage.slices import HELD, Starts, ZeroSlice


class RefreshChain(Chain):
    """What a refresh follows, and what was found about it so far.

    Parameters
    ----------
    settings
        The whole job, with the limits of the gate.
    following
        What it follows; its `previous` is empty at the start of a chain.
    """

    def __init__(self, settings: RefreshConfig, following: Following) -> None:
        self.settings, self._following = settings, following
        self._past = NO_PAST
        self.alignment: AlignmentRecord | None = None
        self.links: LinksRecord | None = None

    @property
    def following(self) -> Following:
        """What the run is of, and what it follows."""
        return self._following

    @property
    def previous(self) -> str:
        """Folder of the previous run; empty at the start of a chain."""
        return self._following.previous

    @property
    def rotated(self) -> bool:
        """Whether a rotation onto the previous run was found."""
        return self.alignment is not None

    @property
    def past(self) -> Past:
        """What the trajectory goes on from: of a causal one, that of the previous run."""
        return self._past

    def stages(self, shape: Shape, limits: Limits) -> tuple[Stage, ...]:
        """Return what the chain adds to the plan."""
        return (compare_stage(shape, self.settings, limits),)

    def known_nodes(self, job: Job) -> str | None:
        """Return the previous run, without the nodes that are to be forgotten."""
        follow = self.following
        if not follow.previous:
            return None
        earlier = RunFolder.at(follow.previous).kept(RunFolder.at(follow.reference).run_id)
        if follow.expire is None and not earlier.exists():
            return follow.previous
        task = ExpireTask(str(job.run.path), follow.previous, follow.reference, follow.expire)
        with job.progress.stage("expire", 1) as done:
            [known] = job.tasks(done)(expire_nodes, [task])
        return str(known)

    def starts(self, job: Job) -> Starts:
        """Return the slices of the previous run, where they serve."""
        if not self.following.warm:
            return Starts()
        kept = job.run.kept(RunFolder.at(self.previous).run_id)
        return Starts(str(self.following.warm), str(kept) if kept.exists() else "")

    def align(self, job: Job, zero: ZeroSlice | None) -> None:
        """Find the rotation onto the previous run, and what its vectors know of the held-out links.

        A causal trajectory is not turned: its new nodes are, into the axes that it has.
        """
        self._past = self._find_past(job)
        if not self.previous or zero is None:
            return
        run, outputs = str(job.run.path), _roles(job)
        first = align.AlignTask(run, self.previous, outputs, zero, job.bounds)
        blocks = [replace(first, index=index) for index in range(len(job.bounds) - 1)]
        sums = job.map("align", align.align_block, blocks)
        self.alignment = align.write_rotation(job.run, job.config.rank, sums)
        holdout = min(self.following.holdout, job.shape.n_steps - 1)
        if holdout < 1 or not zero.fitted:
            return
        held = solve.SolveTask(
            str(job.run.staged.tensor),
            str(job.run.slices),
            (0,),
            job.config.solver_settings(),
            TimeWeights(job.config.reduce, holdout),
            slice=HELD,
            # The previous run's own slice has not seen the steps that are held out.
            starts=replace(self.starts(job), name=zero.name),
        )
        job.solve("solve held out", [held], basis=True)
        asked = links.LinksTask(
            run,
            self.previous,
            job.shape.n_steps - holdout,
            holdout,
            outputs,
            links.held_out(zero),
            job.bounds,
            job.config.seed,
        )
        parts = [replace(asked, index=index) for index in range(len(job.bounds) - 1)]
        links.write_links(asked, job.map("links", links.find_links, parts))
        self.links = links.score_links(asked, job.map("links", links.look_up, parts))

    def _find_past(self, job: Job) -> Past:
        """Return what the trajectory goes on from; leave its basis, with the rows of new nodes."""
        if not job.config.appends:
            return NO_PAST
        begun = Past(age=job.shape.n_steps)
        if self.following.append is None:
            return begun
        first = append.BasisTask(str(job.run.path), self.previous, job.bounds)
        blocks = [replace(first, index=index) for index in range(len(job.bounds) - 1)]
        job.map("append", append.find_fixed, [first])
        sums = job.map("append", append.add_up_block, blocks)
        if not append.write_map(job.run, job.config.rank, sums):
            job.progress.say("trajectory: too few nodes are in both runs to append to it, so it begins anew")
            return begun
        job.map("append", append.write_rows, blocks)
        job.progress.say(f"trajectory: {self.following.append:,} steps are appended")
        return append.make_past(job.run, RunFolder.at(self.previous), self.following.append)

    def space(self) -> str:
        """Return that of the previous run, where enough nodes are in both to say how its axes lie."""
        if self.alignment is None:
            return ""
        before = RunFolder.at(self.previous).read_manifest()
        active = before.summary.nodes if before.metrics.active is None else before.metrics.active
        enough = self.alignment.nodes >= min(self.settings.rank, active)
        return before.space_id if enough else ""

    def finish(self, job: Job, zero: ZeroSlice | None) -> RefreshRecord:
        """Keep the slices for the next refresh, measure drift, and judge."""
        run, follow = str(job.run.path), self.following
        keep = KeepTask(run, tuple(job.slices), str(follow.warm))
        [saved] = job.map("keep slices", keep_slices, [keep])
        found: list[Drift] = []
        reasons: list[str] = []
        expired = 0
        if self.alignment is not None and zero is not None:
            with job.stage("drift") as tasks:
                for path in dict.fromkeys([self.previous, follow.reference]):
                    item = drift.DriftTask(
                        run,
                        path,
                        zero,
                        path == self.previous,
                        job.config.seed,
                        job.bounds,
                        rows_at_once=job.limits.table_rows,
                    )
                    found.append(drift.measure_drift(tasks, item))
            before = RunFolder.at(self.previous).read_manifest()
            expired = (0 if before.refresh is None else before.refresh.expired) + found[0].expired
            now = job.outcome.metrics()
            reasons = judge(now, before.metrics, found[0], self.links, self.settings)
        self._check_place(job)
        names = {name: getattr(follow, name).rpartition("/")[2] for name in ("previous", "reference")}
        return RefreshRecord(
            **follow.model_dump(exclude={"warm", *names}),
            **names,
            warm=bool(follow.warm),
            alignment=self.alignment,
            links=self.links,
            saved=saved,
            expired=expired,
            drift=found,
            reasons=reasons,
        )

    def _check_place(self, job: Job) -> None:
        """Raise where another run was published since this one began: it must not be replaced unseen."""
        latest = find_latest(job.run.out)
        now = "" if latest is None else latest.run_id
        then = self.previous.rpartition("/")[2]
        if then and now != then:
            raise UnfinishedError(
                "another run was published meanwhile",
                got=f"{now or 'none'}, where this run follows {then}",
                remedy="Was its lock lost? toffee refresh makes one that follows the new run.",
            )


def _roles(job: Job) -> tuple[OutputFolder, ...]:
    """Return the outputs of one vector per node."""
    outputs = wanted_parts(job.config, job.shape.directed)
    return tuple(output for output in outputs if output.startswith("embedding"))
