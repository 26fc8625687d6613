"""The batch job, top to bottom: ingest, solve, reduce, publish.

    ingest    edges → staged tensor, registry, grid                          (edges.py)
    solve     zero slice → common basis → frequencies → all other slices     (tasks.solve_batch)
    reduce    blocks of nodes: rows of every slice → Parquet parts           (parts.write_part)
    publish   read back, small tables, report, manifest, pointer             (store.py)

Tasks hand over through storage. Whatever is on storage is not done again, so the same function starts a run
and resumes one; where the tasks run changes no byte.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from toffee_dist import activity, drift, parts, runtime, staging, survey, tables, tasks
from toffee_dist.config import JobConfig, RefreshConfig
from toffee_dist.edges import ingest
from toffee_dist.errors import ConfigError, InputError, QualityError, TooLargeError, UnfinishedError
from toffee_dist.expiry import ExpireTask, expire_nodes, kept_path
from toffee_dist.gate import Following, Night, judge
from toffee_dist.plan import (
    Plan,
    Shape,
    batch_freqs,
    iter_parts,
    make_plan,
    parse_bytes,
    part_rows,
    wanted_parts,
)
from toffee_dist.progress import Progress
from toffee_dist.report import REPORT, ReportTask, try_report
from toffee_dist.slices import HELD, MODEL, REDUCED, array_path, is_finished, slice_name
from toffee_dist.sources import find_files, fingerprint
from toffee_dist.spectrum import count_freqs
from toffee_dist.store import (
    LATEST,
    RunFolder,
    copy_tree,
    new_run,
    place,
    point_to,
    read_json,
    remote,
    remove_tree,
    save_array,
    write_json,
)
from toffee_dist.summary import MANIFEST as INGEST_MANIFEST
from toffee_dist.timegrid import TimeGrid


@dataclass
class Outcome:
    """What a run did, this time."""

    run: RunFolder
    plan: Plan
    solved: int = 0
    reused: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain types."""
        return {"run": str(self.run.path), **self.metrics()}

    def metrics(self) -> dict[str, Any]:
        """Return the figures alone, for the manifest."""
        return {
            "nodes": self.plan.shape.n_nodes,
            "steps": self.plan.shape.n_steps,
            "solved": self.solved,
            "reused": self.reused,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            **self.figures,
        }


def start_run(
    config: JobConfig, progress: Progress | None = None, following: Following | None = None
) -> Outcome:
    """Start a new run in `config.out` and see it through.

    Parameters
    ----------
    config
        What to do.
    progress
        Is shown how far it is.
    following
        The night that a refresh is of, and the run it follows.

    Raises
    ------
    ToffeeError
        With the exit code of the documentation; after an `UnfinishedError`, `resume_run` goes on.
    """
    if not config.out:
        raise ConfigError("out", got="nothing", allowed="a folder for the runs", remedy="Add --out DIR.")
    runtime.check_mode(config.mode)
    ingest_config = config.ingest_config()
    files, _ = find_files(ingest_config.inputs)
    run = new_run(place(config.out))
    job = {
        "config": config.model_dump(mode="json"),
        "identity": config.identity(),
        "fingerprint": fingerprint(files),
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    run.write_job(job if following is None else {**job, "following": following.to_json()})
    try:
        return _work(config, run, progress or Progress())
    except (ConfigError, InputError, TooLargeError):
        # Nothing that a resume could use: the same words would be said again.
        if not run.staged:
            run.remove_work()
            run.path.rmdir()
        raise


def resume_run(run: RunFolder, where: dict[str, Any], progress: Progress | None = None) -> Outcome:
    """Go on with a run that was interrupted.

    Parameters
    ----------
    run
        The run.
    where
        Runtime settings that replace those of the start.
    """
    job = run.read_job()
    kind = RefreshConfig if "following" in job else JobConfig
    config = kind.read({**job["config"], **where})
    if not run.staged:
        files, _ = find_files(config.inputs)
        if fingerprint(files) != job["fingerprint"]:
            raise InputError(
                "the input changed since this run began",
                got=f"{len(files)} files with another fingerprint",
                allowed="the same files, sizes and times",
                remedy="Start a new run with toffee embed.",
            )
    return _work(config, run, progress or Progress())


def _work(config: JobConfig, run: RunFolder, progress: Progress) -> Outcome:
    with ExitStack() as stack:
        client = stack.enter_context(runtime.open_cluster(config))
        if dashboard := survey.find_dashboard(client):
            progress.say(f"dashboard: {dashboard}")
        workers = survey.ask_workers(client, run.work)
        if not run.staged:
            with progress.stage("ingest") as done:
                on = task_runner(client, config, run, done)
                _ingest(_forget(config, run, on), run, workers, on, progress)
        shape, grid = read_shape(run)
        plan = make_plan(shape, config)
        plan.check_disk(free_bytes(run.path))
        if config.mode == "auto":
            memory = allowed_memory(config, workers[0].memory)
            mode, count = plan.choose_mode(runtime.count_cores(), memory)
            if mode != "threads" or count != workers[0].threads:
                stack.close()
                chosen = config.model_copy(update={"mode": mode, "workers": config.workers or count})
                client = stack.enter_context(runtime.open_cluster(chosen))
                workers = survey.ask_workers(client, run.work)
        _check_memory(config, plan, workers)
        return _Job(config, run, client, plan, grid, progress).finish()


def _forget(config: JobConfig, run: RunFolder, on: runtime.Run) -> JobConfig:
    """Leave out the known nodes that a refresh is to forget."""
    job = run.read_job().get("following")
    following = None if job is None else Following(**job)
    if following is None or not following.previous:
        return config
    earlier = kept_path(place(following.previous), place(following.reference).name)
    if following.expire is None and not earlier.exists():
        return config
    task = ExpireTask(str(run.path), following.previous, following.reference, following.expire)
    [known] = on(expire_nodes, [task])
    return config.model_copy(update={"known": known})


def task_runner(client: Any, config: JobConfig, run: RunFolder, done: Callable[[], None]) -> runtime.Run:
    """Return what runs the tasks of a run: patient as the settings say, with a place for diagnostics."""
    return runtime.runner(
        client, wait=config.wait, stall=config.stall, diagnostics=run.diagnostics, done=done
    )


def _ingest(
    config: JobConfig, run: RunFolder, workers: list[survey.Worker], on: runtime.Run, progress: Progress
) -> None:
    def check(n_nodes: int, n_steps: int) -> None:
        # As soon as the nodes are counted: hours of reading must not come before a refusal.
        shape = Shape(n_nodes, n_steps, n_nodes, n_nodes, not config.undirected, rows=0, exact=False)
        # Auto takes as few threads as fit.
        threads = 1 if config.mode == "auto" else None
        _check_memory(config, make_plan(shape, config, chosen=1), workers, threads)

    # On a store, what an ingest that was cut short left is there.
    remove_tree(run.ingest)
    ingest(config.ingest_config(), run.ingest, on, progress.say, check)


def _check_memory(
    config: JobConfig, plan: Plan, workers: list[survey.Worker], threads: int | None = None
) -> None:
    for worker in workers:
        memory = allowed_memory(config, worker.memory)
        plan.check_memory(memory, threads or worker.threads, f"worker {worker.address}")


def allowed_memory(config: JobConfig, found: int) -> int:
    """Return what a worker may use: what the user said, or what it has."""
    return found if config.memory is None else parse_bytes(config.memory)


def free_bytes(folder: Path) -> int:
    """Return what is free where the run goes; a store has no end."""
    if remote(folder) is not None:
        return sys.maxsize
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def read_shape(run: RunFolder) -> tuple[Shape, TimeGrid]:
    """Return the sizes and the grid of a staged tensor."""
    manifest = read_json(run.ingest / INGEST_MANIFEST)
    summary = manifest["summary"]
    shape = Shape(
        summary["nodes"],
        summary["steps"],
        summary["pairs"],
        summary["entries"],
        manifest["config"]["directed"],
        rows=summary["rows"],
        exact=True,
    )
    return shape, TimeGrid.from_json(manifest["grid"])


class _Job:
    """One run on one client, after the ingest."""

    def __init__(
        self, config: JobConfig, run: RunFolder, client: Any, plan: Plan, grid: TimeGrid, progress: Progress
    ) -> None:
        self.config, self.run, self.client = config, run, client
        self.grid, self.progress = grid, progress
        self.tensor, self.slices = str(run.ingest / "tensor"), str(run.slices)
        self.outcome = Outcome(run, plan)
        self.shape = plan.shape
        self.parts = wanted_parts(config, self.shape.directed)
        # What one vector a node comes from, and in which form.
        self.zero = REDUCED if config.reduce != "sum" else slice_name(0)
        self.gauge: str = config.gauge
        if config.model in ("tsvd", "rescal"):
            # What the model says its vectors are is what is published.
            self.zero, self.gauge = MODEL, "canonical"
        following = run.read_job().get("following")
        self.night = None if following is None else Night(Following(**following))
        self.warm, self.kept, self.previous = "", "", ""
        if self.night is not None:
            self.warm, self.previous = self.night.following.warm, self.night.following.previous
            kept = kept_path(run.path, place(self.previous).name)
            self.kept = str(kept) if self.previous and kept.exists() else ""

    def map(self, stage: str, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Run one map of tasks, and show how far it is."""
        items = list(items)
        began = time.monotonic()
        with self.progress.stage(stage, len(items)) as done:
            run = task_runner(self.client, self.config, self.run, done)
            results = list(run(function, items))
        spent = self.outcome.seconds
        spent[stage] = spent.get(stage, 0.0) + time.monotonic() - began
        return results

    def finish(self) -> Outcome:
        """Solve, reduce, publish."""
        outputs = self.config.outputs
        names: list[str] = []
        chosen: tuple[int, ...] = ()
        if self.config.model in ("tsvd", "rescal"):
            self.fit_model()
        elif set(outputs) != {"spectrum"}:
            names = self.solve_zero()
        self.look_at_nodes()
        if self.night is not None and self.night.following.previous:
            self.align(self.night)
        if "trajectory" in outputs:
            chosen = self.choose()
        wanted = set(chosen)
        if "factors" in outputs:
            wanted |= set(range(count_freqs(self.shape.n_steps)))
        names += self.solve_others(sorted(wanted - {0}))
        checks = self.reduce(chosen)
        self.publish(names, checks)
        return self.outcome

    def solve_zero(self) -> list[str]:
        """Solve the slices that one vector a node and the common basis come from."""
        options = self.config.solve_options()
        reduces = []
        if self.config.reduce == "sum" or set(self.config.outputs) & {"trajectory", "factors"}:
            reduces.append("sum")
        if self.config.reduce != "sum" and "embedding" in self.config.outputs:
            reduces.append(self.config.reduce)
        items = [
            tasks.SolveTask(self.tensor, self.slices, (0,), options, reduce, warm=self.warm, kept=self.kept)
            for reduce in reduces
        ]
        self.solve("solve zero", items)
        names = [item.name(0) for item in items]
        self.map("basis", tasks.write_basis, [tasks.BasisTask(self.slices, name) for name in names])
        return names

    def look_at_nodes(self) -> None:
        """Leave degree, activity and residual of every node."""
        zero = self.zero if "embedding" in self.config.outputs else ""
        reduce = self.config.reduce if zero else "sum"
        item = activity.ActivityTask(str(self.run.path), zero, reduce, self.gauge)
        [figures] = self.map("nodes", activity.write_activity, [item])
        self.outcome.figures |= figures

    @property
    def roles(self) -> tuple[parts.Part, ...]:
        """The outputs of one vector a node."""
        return tuple(part for part in self.parts if part.startswith("embedding"))

    def align(self, night: Night) -> None:
        """Find the rotation onto the run before, and what its vectors know of the held-out links."""
        run, previous, gauge = str(self.run.path), night.following.previous, self.gauge
        item = drift.AlignTask(run, previous, self.roles, self.zero, gauge)
        [night.alignment] = self.map("align", drift.align_run, [item])
        night.holdout = min(night.following.holdout, self.shape.n_steps - 1)
        if night.holdout < 1 or self.zero == MODEL:
            return
        options, reduce = self.config.solve_options(), self.config.reduce
        held = tasks.SolveTask(
            self.tensor,
            self.slices,
            (0,),
            options,
            reduce,
            holdout=night.holdout,
            warm=self.warm,
            kept=self.kept,
        )
        self.map("solve held out", tasks.solve_batch, [held])
        self.map("basis", tasks.write_basis, [tasks.BasisTask(self.slices, HELD)])
        links = drift.LinksTask(run, previous, night.holdout, self.roles, gauge, self.config.seed)
        [night.links] = self.map("links", drift.score_links, [links])

    def fit_model(self) -> None:
        """Fit another model, and leave its vectors where those of a zero slice would be."""
        from toffee_dist.models import ModelOptions, fit

        folder = place(self.slices)
        if "embedding" not in self.config.outputs or (folder / f"{MODEL}.json").exists():
            return
        names = ("rank", "reg_a", "reg_r", "reduce", "gauge", "tol", "max_iter", "precision", "seed")
        options = ModelOptions(**{name: getattr(self.config, name) for name in names})
        began = time.monotonic()
        with self.progress.stage(self.config.model) as done:
            run = task_runner(self.client, self.config, self.run, done)
            # The sweeps of RESCAL are tasks; what they exchange goes through storage.
            found = fit(self.config.model, staging.open_tensor(self.tensor), options, run, self.run.work)
        target = found.source if found.target is None else found.target
        for key, array in (("U", found.source), ("V", target), ("S", np.ones(found.source.shape[1]))):
            save_array(array_path(folder, key, MODEL), array)
        write_json(folder / f"{MODEL}.json", {})
        self.outcome.seconds[self.config.model] = time.monotonic() - began

    def choose(self) -> tuple[int, ...]:
        """Choose the frequencies of the trajectory; the plan then knows how many there are."""
        item = tasks.ChoiceTask(self.tensor, self.slices, self.config.freqs, str(self.run.path))
        [record] = self.map("choose", tasks.choose, [item])
        self.outcome.figures |= {"freqs": len(record.freqs), "energy_kept": record.energy_kept}
        share = f"{len(record.freqs):,} of {count_freqs(self.shape.n_steps):,} frequencies"
        self.progress.say(f"trajectory: {share}, {record.energy_kept:.1%} of the energy")
        freqs: tuple[int, ...] = record.freqs
        return freqs

    def solve_others(self, freqs: list[int]) -> list[str]:
        """Solve the other slices, in batches, and project them on the common basis."""
        options, projected = self.config.solve_options(), "trajectory" in self.config.outputs
        items = [
            tasks.SolveTask(
                self.tensor, self.slices, batch, options, projected=projected, warm=self.warm, kept=self.kept
            )
            for batch in batch_freqs(freqs, self.shape, self.config.rank)
        ]
        if items:
            self.solve("solve", items)
        return [slice_name(k) for k in freqs]

    def solve(self, stage: str, items: list[tasks.SolveTask]) -> None:
        """Run tasks of the solver, and count the slices that were there already."""
        folder = place(self.slices)
        wanted = sum(len(item.freqs) for item in items)
        missing = [
            item
            for item in items
            if not all(is_finished(folder, item.name(k), item.arrays) for k in item.freqs)
        ]
        solved = sum(self.map(stage, tasks.solve_batch, missing))
        self.outcome.solved += solved
        self.outcome.reused += wanted - solved

    def reduce(self, chosen: tuple[int, ...]) -> list[parts.CheckTask]:
        """Write the Parquet parts of every output; return how each can be checked."""
        rotated = self.night is not None and self.night.alignment is not None
        checks = []
        for output in self.parts:
            freqs: tuple[int, ...] = ()
            if output == "trajectory":
                freqs = chosen
            elif output.startswith("factors"):
                freqs = tuple(range(count_freqs(self.shape.n_steps)))
            rows = part_rows(self.shape, self.config, output, len(freqs))
            items = [
                parts.PartTask(str(self.run.path), output, *part, freqs, self.zero, self.gauge, rotated)
                for part in iter_parts(self.shape.n_nodes, rows)
            ]
            self.map(output, parts.write_part, items)
            columns = ["node_id", *(["space"] if self.config.bipartite else []), *parts.COLUMNS[output]]
            if self.zero == MODEL and "residual" in columns:
                columns.remove("residual")
            each = {"trajectory": self.shape.n_steps, "factors/A_time": self.shape.n_steps}.get(output, 1)
            each = len(freqs) if output == "factors/A_freq" else each
            checks += [
                parts.CheckTask(str(item.path), (item.stop - item.start) * each, tuple(columns))
                for item in items
            ]
        return checks

    def publish(self, names: list[str], checks: list[parts.CheckTask]) -> None:
        """Read every part back, write the small tables, then the manifest, then the pointer."""
        sizes = self.map("check", parts.check_part, checks)
        factors = range(count_freqs(self.shape.n_steps)) if "factors" in self.config.outputs else ()
        item = tables.TablesTask(str(self.run.path), self.grid, tuple(names), tuple(factors), self.previous)
        [figures] = self.map("tables", tables.write_tables, [item])
        self.outcome.figures |= figures | {"output_bytes": sum(sizes)}
        job, ingested = self.run.read_job(), read_json(self.run.ingest / INGEST_MANIFEST)
        # A later run extends the rows of this one.
        copy_tree(self.run.ingest / "nodes", self.run.registry)
        if self.night is not None:
            [self.night.saved] = self.map(
                "keep slices",
                drift.keep_slices,
                [drift.KeepTask(str(self.run.path), tuple(names), self.warm)],
            )
        reasons = self.judge()
        self.check_place()
        self.outcome.figures["peak_bytes"] = survey.peak_bytes(self.client)
        manifest = {
            "state": "rejected" if reasons else "published",
            "begun": job["begun"],
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "config": job["config"],
            "identity": job["identity"],
            "fingerprint": ingested["summary"]["fingerprint"],
            "versions": survey.versions(),
            "directed": self.shape.directed,
            "summary": ingested["summary"],
            "grid": ingested["grid"],
            "outputs": self.parts,
            **({} if self.night is None else {"refresh": self.night.to_json()}),
        }
        if self.config.report:
            self.report(manifest)
        self.run.complete(manifest | {"metrics": self.outcome.metrics()})
        if not reasons:
            point_to(self.run)
        if not self.config.keep_work:
            self.run.remove_work()
        if reasons:
            raise QualityError(
                f"run {self.run.run_id} is not published",
                got="; ".join(reasons),
                allowed="the limits of the configuration",
                remedy="The run published before stays. toffee rollback --to publishes this one anyway.",
            )

    def report(self, manifest: dict[str, Any]) -> None:
        """Write the page about this run; one that cannot be drawn is told, and loses nothing."""
        draft = self.run.work / "manifest.json"
        write_json(draft, {"run_id": self.run.run_id, "metrics": self.outcome.metrics(), **manifest})
        try:
            [problem] = self.map("report", try_report, [ReportTask(str(self.run.path), str(draft))])
        except UnfinishedError as error:
            problem = str(error)
        if problem:
            self.progress.say(f"no report: {problem} (toffee report {self.run.path} tries again)")
        else:
            self.outcome.figures["report"] = REPORT

    def check_place(self) -> None:
        """Raise where another run was published since this one began: it must not be replaced unseen."""
        if self.night is None:
            return
        pointer = self.run.out / LATEST
        now = str(read_json(pointer)["run_id"]) if pointer.exists() else ""
        then = self.night.following.previous.rpartition("/")[2]
        if then and now != then:
            raise UnfinishedError(
                "another run was published meanwhile",
                got=f"{now or 'none'}",
                allowed=f"{then}, which this run follows",
                remedy="Was its lock lost? toffee refresh makes one that follows the new run.",
            )

    def judge(self) -> list[str]:
        """Measure how far this run is from those before it; return why it must not be published, if so."""
        if self.night is None or self.night.alignment is None:
            return []
        assert isinstance(self.config, RefreshConfig)
        following, run = self.night.following, str(self.run.path)
        earlier = dict.fromkeys([following.previous, following.reference])
        items = [
            drift.DriftTask(run, path, self.zero, self.gauge, path == following.previous, self.config.seed)
            for path in earlier
        ]
        self.night.drift = [found.to_json() for found in self.map("drift", drift.measure_drift, items)]
        before = read_json(place(following.previous) / "manifest.json")
        self.night.expired = before.get("refresh", {}).get("expired", 0) + self.night.drift[0]["expired"]
        self.night.reasons = judge(self.night, self.outcome.figures, before["metrics"], self.config)
        return self.night.reasons
