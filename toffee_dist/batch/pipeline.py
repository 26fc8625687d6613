"""The batch job, top to bottom: `run_job`.

    stage     edges → staged tensor, registry, grid                          ingest/
    solve     zero slice → common basis → frequencies → other slices         batch/solve.py
    filter    blocks of nodes: energies → kernels in time (trajectory)       batch/trajectory.py
    watch     blocks of nodes: tests of changes → table and alert file       batch/changes.py
    reduce    blocks of nodes: rows of every slice → Parquet parts           batch/write_outputs.py
    publish   read back, small tables, report, manifest, pointer             storage/runs.py

Tasks hand over through storage. Whatever is on storage is not done again, so the same function starts a run
and resumes one; where the tasks run changes no byte.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from toffee_dist.batch import changes, choose, energy, node_stats, solve, tables, trajectory, write_outputs
from toffee_dist.batch import seal as sealing
from toffee_dist.batch.blocks import find_bounds
from toffee_dist.batch.chain import NO_CHAIN, Chain
from toffee_dist.batch.job import Job, Outcome, free_bytes, open_job
from toffee_dist.batch.past import Past
from toffee_dist.batch.plan import Shape
from toffee_dist.batch.stages import batch_freqs, iter_parts, make_plan, part_rows, wanted_parts
from toffee_dist.batch.write_outputs import CheckTask, PartTask, freqs_of
from toffee_dist.cluster.client import check_mode, count_cores
from toffee_dist.cluster.versions import versions
from toffee_dist.cluster.workers import peak_bytes
from toffee_dist.errors import ConfigError, InputError, QualityError, TooLargeError, UnfinishedError
from toffee_dist.ingest.files import find_files, fingerprint, list_files
from toffee_dist.ingest.job import ingest
from toffee_dist.kernels.embedding import SUM, TimeWeights
from toffee_dist.kernels.patterns import looks_for_patterns
from toffee_dist.kernels.spectrum import count_freqs
from toffee_dist.limits import LIMITS, Limits
from toffee_dist.models import FitContext, find_model, fit_staged
from toffee_dist.progress import Progress
from toffee_dist.report.task import ReportTask, try_report
from toffee_dist.settings import EdgeSettings, FitSettings, JobConfig, JobRuntimeSettings
from toffee_dist.storage.changes import ALERT_RATE
from toffee_dist.storage.files import check_writable, copy_tree
from toffee_dist.storage.forgotten import check_no_erasure, read_forgotten
from toffee_dist.storage.lock import hold_lock
from toffee_dist.storage.manifest import (
    FileRecord,
    IngestRecord,
    JobRecord,
    Manifest,
    RefreshRecord,
    RunConfig,
    write_record,
)
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.runs import RunFolder, lacks_pointer, new_run, point_to
from toffee_dist.storage.slices import REDUCED, Starts, ZeroSlice, slice_name
from toffee_dist.storage.spaces import make_spaces
from toffee_dist.storage.tensors import check_tensor, digest_tensor
from toffee_dist.words import hide_in, show_line


def run_job(job: Job, chain: Chain = NO_CHAIN) -> Outcome:
    """Do a run, or what is left of one: every stage, in order."""
    stage_edges(job, chain)
    settle(job, chain)
    zero = fit_zero(job, chain.starts(job))
    write_node_stats(job, zero)
    chain.align(job, zero)
    find_spaces(job, chain)
    chosen = choose_frequencies(job)
    solve_others(job, chosen, chain.starts(job))
    filter_in_time(job, chain.past)
    watch_changes(job, chain)
    parts = write_parts(job, zero, chosen, chain.rotated)
    check_parts(job, parts)
    write_tables(job, chain.previous)
    publish(job, chain.finish(job, zero))
    return job.outcome


def start_run(config: JobConfig, progress: Progress | None = None, limits: Limits = LIMITS) -> Outcome:
    """Start a new run in `config.out` and see it through, alone: the folder is locked.

    Parameters
    ----------
    config
        What to do.
    progress
        Is shown how far it is.
    limits
        The sizes of tasks.

    Raises
    ------
    ToffeeError
        With the exit code of the documentation; after an `UnfinishedError`, `resume_run` goes on.
    """
    if not config.out:
        raise ConfigError("out", got="nothing", allowed="a folder for the runs", remedy="Add --out DIR.")
    check_mode(config.mode, config.workers)
    files, _ = find_files(config.inputs)
    out = to_path(config.out)
    check_writable(out)
    with hold_lock(out):
        return run_locked(config, fingerprint(files), progress, NO_CHAIN, limits)


def run_locked(
    config: JobConfig, digest: str, progress: Progress | None, chain: Chain, limits: Limits
) -> Outcome:
    """Start a new run of the input of this fingerprint, for whoever holds the lock of `config.out`."""
    check_mode(config.mode)
    check_no_erasure(to_path(config.out))
    run = new_run(to_path(config.out))
    # A folder of runs is data: where a job runs is not written there, nor read from there.
    asked = config.model_dump(mode="json", exclude=set(JobRuntimeSettings.model_fields))
    kept = hide_in(asked)
    run.write_job(
        JobRecord(
            config=kept,
            hidden=tuple(name for name in asked if kept[name] != asked[name]),
            identity=config.identity(),
            fingerprint=digest,
            begun=_now(),
            following=chain.following,
        )
    )
    try:
        with open_job(config, run, progress, limits) as job:
            return run_job(job, chain)
    except (ConfigError, InputError, TooLargeError):
        # Nothing that a resume could use: the same words would be said again.
        if not run.staged.complete:
            run.remove_work()
            run.path.rmdir()
        raise


def resume_run(
    run: RunFolder, where: dict[str, Any], progress: Progress | None = None, limits: Limits = LIMITS
) -> Outcome:
    """Go on with a run that was interrupted, alone: the folder is locked.

    Parameters
    ----------
    run
        The run.
    where
        Runtime settings, and the inputs where they were not kept. Those of the start do not count: whoever
        may write to OUT must not say where a job runs, and so whose answers we believe.
    progress, chain, limits
        As in `start_run`; the chain and the limits must be those of the start.
    """
    check_writable(run.out)
    with hold_lock(run.out):
        return resume_locked(run, where, progress, NO_CHAIN, limits)


# What a run meant that was begun before there were these options, where their default means something else.
BEFORE_OPTIONS = {"trajectory_by": "als"}


def asked_for(record: JobRecord) -> dict[str, Any]:
    """Return the settings of a run's start, without any that say where it runs."""
    asked = {
        name: value for name, value in record.config.items() if name not in JobRuntimeSettings.model_fields
    }
    return {**BEFORE_OPTIONS, **asked}


def resume_locked(
    run: RunFolder, where: dict[str, Any], progress: Progress | None, chain: Chain, limits: Limits
) -> Outcome:
    """Go on with a run that follows `chain`, for whoever holds the lock of its folder."""
    if run.complete and not lacks_pointer(run):
        raise InputError(
            "nothing to resume", got=f"run {run.run_id} is complete", remedy="Somebody else has finished it."
        )
    check_no_erasure(run.out)
    record = run.read_job()
    known = {name: value for name, value in asked_for(record).items() if name in JobConfig.model_fields}
    config = JobConfig.read({**known, **where})
    if not run.staged.complete:
        _check_kept(record, where)
        # The names come from the folder of the run: the user sees them, and nothing of the files is read,
        # before they are known to be those of the start.
        progress = progress or Progress()
        for text in config.inputs:
            progress.say(f"input: {show_line(text)}")
        if config.known:
            progress.say(f"known: {show_line(config.known)}")
        files, _ = list_files(config.inputs)
        if fingerprint(files) != record.fingerprint:
            raise InputError(
                "the input changed since this run began",
                got=f"{len(files)} files with another fingerprint",
                allowed="the same files, sizes and times",
                remedy="Start a new run with toffee embed.",
            )
    # An empty folder may not have survived what interrupted the run.
    run.slices.mkdir(parents=True, exist_ok=True)
    with open_job(config, run, progress, limits) as job:
        return run_job(job, chain)


def _check_kept(record: JobRecord, where: dict[str, Any]) -> None:
    """Raise where what is to be read was not written down, because a secret is part of it."""
    masked = sorted({*record.hidden} & {*EdgeSettings.model_fields} - {*where})
    if masked:
        raise ConfigError(
            "a signed address or a password is not kept, and the edges were not read yet",
            got=", ".join(f"{name} {record.config[name]}" for name in masked),
            remedy="Give the input again: toffee resume OUT INPUT..."
            if masked == ["inputs"]
            else "Start a new run with toffee embed.",
        )


def stage_edges(job: Job, chain: Chain) -> None:
    """Read the edges into a staged tensor, unless that was done."""
    config, staged = job.config, job.run.staged
    if staged.complete:
        check_tensor(staged.tensor)
        return

    def check(n_nodes: int, n_steps: int) -> None:
        # As soon as the nodes are counted: hours of reading must not come before a refusal.
        shape = Shape(n_nodes, n_steps, n_nodes, n_nodes, not config.undirected, rows=0, exact=False)
        plan = make_plan(shape, config, chosen=1, limits=job.limits, more=chain.stages(shape, job.limits))
        # Auto takes as few threads as fit.
        job.check_memory(plan, threads=1 if config.mode == "auto" else None)

    # On a store, what an ingest that was cut short left is there.
    job.run.remove(staged.path)
    with job.traces.stage("ingest", job.client), job.progress.stage("ingest") as done:
        edges = config.changed(known=chain.known_nodes(job))
        forgotten = read_forgotten(job.run.out)
        ingest(edges, staged.path, job.tasks(done), job.progress.say, check, job.limits, forgotten)


def settle(job: Job, chain: Chain) -> None:
    """Plan the rest, refuse what does not fit, and let ``auto`` take the mode that pays."""
    config, record = job.config, job.run.staged.read()
    job.shape, job.grid = Shape.of(record.summary, not config.undirected), record.grid
    job.bounds = find_bounds(str(job.run.staged.tensor), job.limits)
    count_dense_rows(job)
    job.plan = make_plan(job.shape, config, limits=job.limits, more=chain.stages(job.shape, job.limits))
    job.outcome = Outcome(job.run, job.plan)
    job.note_peak("ingest")
    job.plan.check_disk(free_bytes(job.run.path))
    if config.mode == "auto":
        memory = job.allowed_memory(job.workers[0].memory)
        mode, count = job.plan.choose_mode(count_cores(), memory)
        if mode != "threads" or count != job.workers[0].threads:
            job.connect(config.changed(mode=mode, workers=config.workers or count))
    job.check_memory(job.plan)


def count_dense_rows(job: Job) -> None:
    """Count the rows of active nodes that are asked for as Parquet: the plan would only know a bound."""
    dense, run = job.shape.dense(job.config), str(job.run.path)
    if "trajectory" not in job.config.outputs or not dense.steps or dense.nodes == "all":
        return
    with job.traces.stage("count", job.client), job.progress.stage("count") as done:
        run_tasks = job.tasks(done)
        [cuts] = run_tasks(trajectory.cut_blocks, [trajectory.CutTask(run, 1, job.limits.part_bytes)])
        blocks = [trajectory.ActiveTask(run, *block, dense.steps) for block in pairwise(cuts)]
        job.shape = replace(job.shape, n_dense=sum(run_tasks(trajectory.count_active, blocks)))


def fit_zero(job: Job, starts: Starts) -> ZeroSlice | None:
    """Fit what one vector per node and the common basis come from; return where the vectors are."""
    config, run = job.config, job.run
    embeds = "embedding" in config.outputs
    if not find_model(config.model).from_zero_slice:
        if not embeds:
            return None
        with job.stage(config.model) as run_tasks:
            context = FitContext(str(run.staged.tensor), str(run.slices), config.only(FitSettings), run_tasks)
            fit_staged(config.model, context)
        return ZeroSlice(context.name, "given")
    if set(config.outputs) == {"spectrum"}:
        return None
    slices = []
    if config.reduce == "sum" or set(config.outputs) & {"trajectory", "factors"}:
        slices.append((slice_name(0), SUM))
    if config.reduce != "sum" and embeds:
        slices.append((REDUCED, TimeWeights(config.reduce)))
    options = config.solver_settings()
    items = [
        solve.SolveTask(
            str(run.staged.tensor), str(run.slices), (0,), options, weights, slice=name, starts=starts
        )
        for name, weights in slices
    ]
    job.solve("solve zero", items, basis=True)
    names = [name for name, _ in slices]
    job.slices += names
    return ZeroSlice(names[-1], config.gauge) if embeds else None


def write_node_stats(job: Job, zero: ZeroSlice | None) -> None:
    """Leave degree, activity and residual of every node."""
    run, shape = job.run, job.shape
    figures = node_stats.read_record(run)
    if figures is None:
        weights = TimeWeights(job.config.reduce if zero is not None else "sum")
        node_stats.prepare(run, job.bounds)
        with job.stage("nodes") as run_tasks:
            blocks = job.cut(run_tasks, "activity" if zero is None else zero.name, weights)
            items = [node_stats.NodeStatsTask(str(run.path), zero, block, shape.directed) for block in blocks]
            figures = node_stats.finish(run, zero, list(run_tasks(node_stats.write_node_stats, items)))
    job.outcome.figures |= figures


def find_spaces(job: Job, chain: Chain) -> None:
    """Name the spaces that the vectors are in, by what they are made of or by what they follow."""
    [tensor] = job.map("space", digest_tensor, [str(job.run.staged.tensor)])
    outputs = wanted_parts(job.config, job.shape.directed)
    job.spaces = make_spaces(job.config, outputs, tensor, chain.space(), chain.past.space_id)


def choose_frequencies(job: Job) -> tuple[int, ...]:
    """Choose the frequencies of the trajectory; none where there is none."""
    run = job.run
    if "trajectory" not in job.config.outputs:
        return ()
    first = choose.ChoiceTask(
        str(run.staged.tensor),
        str(run.slices),
        job.bounds,
        0,
        job.shape.directed,
        job.shape.n_steps,
        job.config.freqs,
        str(run.frequencies),
    )
    record = choose.read_choice(first)
    if record is None:
        blocks = (replace(first, index=index) for index in range(len(job.bounds) - 1))
        job.map("choose", choose.add_up_block, blocks)
        [record] = job.map("choose", choose.make_choice, [first])
    job.outcome.figures |= {"freqs": len(record.freqs), "energy_kept": record.energy_kept}
    share = f"{len(record.freqs):,} of {count_freqs(job.shape.n_steps):,} frequencies"
    if job.config.filtered:
        job.progress.say(f"rhythms: {share} stand out of the noise")
        return ()
    job.progress.say(f"trajectory: {share}, {record.energy_kept:.1%} of the energy")
    freqs: tuple[int, ...] = record.freqs
    return freqs


def filter_in_time(job: Job, past: Past) -> None:
    """Leave the trajectory in its compact form: entries, basis and kernels; unless it comes from slices."""
    config, run = job.config, job.run
    if "trajectory" not in config.outputs or not config.filtered:
        return
    run.compact.mkdir(parents=True, exist_ok=True)
    if config.basis == "energy":
        axes = energy.EnergyTask(str(run.staged.tensor), str(run.slices), config.solver_settings())
        if job.in_blocks(zero=True):
            with job.stage("energy basis") as run_tasks:
                job.add_passes(energy.solve_in_blocks(run_tasks, axes, job.bounds))
        else:
            job.map("energy basis", energy.write_basis, [axes])
    cut = trajectory.CutTask(str(run.path), config.rank, job.limits.part_bytes, past)
    [cuts] = job.map("cut", trajectory.cut_blocks, [cut])
    blocks = [
        trajectory.BlockTask(str(run.path), index, start, stop, config.basis, config.causal, past)
        for index, (start, stop) in enumerate(pairwise(cuts))
    ]
    n_steps = job.shape.n_steps
    looks = trajectory.look_tasks(blocks, n_steps) if looks_for_patterns(n_steps, config.causal) else []
    job.map("patterns", trajectory.look_for_patterns, looks)
    patterns = trajectory.PatternsTask(str(run.path), tuple(look.name for look in looks))
    [count] = job.map("patterns", trajectory.choose_patterns, [patterns])
    job.outcome.figures["patterns"] = count
    job.map("filter", trajectory.write_block, blocks)
    space = job.spaces.outputs["trajectory"]
    kernel = trajectory.KernelTask(str(run.path), cuts, config.causal, config.denoise, space, past)
    [record] = job.map("kernel", trajectory.learn_kernels, [kernel])
    if record.kept is not None:
        job.outcome.figures["movement_kept"] = record.kept
        job.progress.say(f"trajectory: {record.kept:.1%} of the movement stands out of the noise")


def watch_changes(job: Job, chain: Chain) -> None:
    """Leave what changed in the window: of a run with a trajectory, and of every refresh."""
    config, run = job.config, job.run
    if not changes.is_watched(config, chain.following is not None):
        return
    job.map("watch", changes.write_watch, [changes.WatchTask(str(run.path), config.seed)])
    cut = trajectory.CutTask(str(run.path), changes.ENTRY_NUMBERS, job.limits.part_bytes)
    [cuts] = job.map("cut", trajectory.cut_blocks, [cut])
    blocks = [
        changes.WatchBlockTask(str(run.path), index, start, stop)
        for index, (start, stop) in enumerate(pairwise(cuts))
    ]
    job.map("changes", changes.watch_block, blocks)
    judge = changes.JudgeTask(str(run.path), cuts, job.grid, chain.previous, job.limits.table_rows)
    [found] = job.map("judge", changes.judge_changes, [judge])
    shown = ", ".join(f"{count:,} {kind}" for kind, count in found.items())
    job.progress.say(f"changes at a false discovery rate of {ALERT_RATE:g}: {shown}")


def solve_others(job: Job, chosen: tuple[int, ...], starts: Starts) -> None:
    """Solve the other slices that the outputs need, in batches, and project them on the common basis."""
    outputs, run = job.config.outputs, job.run
    wanted = set(chosen)
    if "factors" in outputs:
        wanted |= set(range(count_freqs(job.shape.n_steps)))
    freqs = sorted(wanted - {0})
    options, projected = job.config.solver_settings(), bool(chosen)
    items = [
        solve.SolveTask(
            str(run.staged.tensor), str(run.slices), batch, options, projected=projected, starts=starts
        )
        for batch in batch_freqs(freqs, job.shape, job.config.rank, job.limits)
    ]
    if items:
        job.solve("solve", items)
    job.slices += [slice_name(k) for k in freqs]


def write_parts(job: Job, zero: ZeroSlice | None, chosen: tuple[int, ...], rotated: bool) -> list[CheckTask]:
    """Write the Parquet parts of every output; return how each can be checked."""
    config, shape, checks = job.config, job.shape, []
    for output in wanted_parts(config, shape.directed):
        freqs = freqs_of(output, chosen, shape.n_steps)
        dense = None
        if output == "trajectory" and config.filtered:
            dense = shape.dense(config)
            if not dense.steps:
                continue
        rows = part_rows(shape, config, output, len(freqs), job.limits)
        items = [
            PartTask(
                str(job.run.path),
                output,
                *part,
                freqs=freqs,
                zero=zero if output.startswith("embedding") else None,
                raw=config.gauge == "none",
                rotated=rotated,
                dense=dense,
                space_id=job.spaces.outputs[output],
                lists=config.vectors == "list",
            )
            for part in iter_parts(shape.n_nodes, rows)
        ]
        job.map(output, write_outputs.write_part, items)
        checks += [item.check(shape.n_steps, config.bipartite) for item in items]
    return checks


def check_parts(job: Job, parts: list[CheckTask]) -> None:
    """Read every part back, from the disk, and seal it."""
    seals = job.map("check", write_outputs.check_part, parts)
    job.outcome.figures["output_bytes"] = sum(seal.bytes for seal in seals)
    names = (sealing.file_name(job.run, to_path(part.path)) for part in parts)
    job.seals |= dict(zip(names, seals, strict=True))


def write_tables(job: Job, previous: str) -> None:
    """Write the small tables, and the rows of all nodes for a later run."""
    factors = range(count_freqs(job.shape.n_steps)) if "factors" in job.config.outputs else ()
    item = tables.TablesTask(
        str(job.run.path), job.grid, tuple(job.slices), tuple(factors), previous, job.limits.table_rows
    )
    [figures] = job.map("tables", tables.write_tables, [item])
    job.outcome.figures |= figures
    copy_tree(job.run.staged.nodes, job.run.registry)


def publish(job: Job, refresh: RefreshRecord | None) -> None:
    """Write the report, then the manifest, then the pointer; a run that broke a limit gets no pointer."""
    run, reasons = job.run, [] if refresh is None else refresh.reasons
    job.outcome.figures["peak_bytes"] = peak_bytes(job.client)
    manifest = _describe(job, run.staged.read(), refresh)
    if job.config.report:
        _write_report(job, manifest)
    [others] = job.map("seal", sealing.seal_run, [sealing.SealTask(str(run.path), frozenset(job.seals))])
    files = {name: FileRecord(**seal._asdict()) for name, seal in sorted((job.seals | others).items())}
    run.write_manifest(manifest.replaced(files=files, metrics=job.outcome.metrics()))
    if not reasons:
        point_to(run)
    if not job.config.keep_work:
        run.remove_work()
    if reasons:
        raise QualityError(
            f"run {run.run_id} is not published",
            got="; ".join(reasons),
            allowed="the limits of the configuration",
            remedy="The previous run stays published. toffee rollback --to publishes this one anyway.",
        )


def _describe(job: Job, ingested: IngestRecord, refresh: RefreshRecord | None) -> Manifest:
    record = job.run.read_job()
    return Manifest(
        run_id=job.run.run_id,
        state="rejected" if refresh is not None and refresh.reasons else "published",
        begun=record.begun,
        finished=_now(),
        config=RunConfig(**record.config),
        identity=record.identity,
        fingerprint=ingested.summary.fingerprint,
        versions=versions(),
        directed=job.shape.directed,
        summary=ingested.summary,
        grid=ingested.grid,
        outputs=tuple(wanted_parts(job.config, job.shape.directed)),
        space_id=job.spaces.space_id,
        spaces=job.spaces.outputs,
        refresh=refresh,
        metrics=job.outcome.metrics(),
    )


def _write_report(job: Job, manifest: Manifest) -> None:
    """Write the page about this run; one that cannot be drawn is told, and loses nothing."""
    run = job.run
    write_record(run.draft, manifest)
    try:
        [problem] = job.map("report", try_report, [ReportTask(str(run.path), str(run.draft))])
    except UnfinishedError as error:
        problem = str(error)
    if problem:
        job.progress.say(f"no report: {problem} (toffee report {run.path} tries again)")
    else:
        job.outcome.figures["report"] = run.report.name


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
