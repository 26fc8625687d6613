"""The refresh: a rolling window, rows and axes of the previous run, published only when it is good.

    lock → what it is of (window, input) → run it, finish it, or find it done → gate → pointer → retention

The batch job itself is that of `batch.pipeline`; here is only what a refresh is of, and what it follows.
Every step may be cut short: what is on storage says how far it is, and the next call goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toffee_dist.batch.pipeline import asked_for, resume_locked, run_locked
from toffee_dist.cluster.client import open_cluster
from toffee_dist.cluster.mapping import runner
from toffee_dist.errors import ConfigError, InputError, QualityError
from toffee_dist.ingest.files import find_files, fingerprint
from toffee_dist.ingest.prepare import find_newest
from toffee_dist.limits import LIMITS, Limits
from toffee_dist.progress import Progress
from toffee_dist.refresh.append import find_appended
from toffee_dist.refresh.chain import RefreshChain
from toffee_dist.refresh.gate import judge
from toffee_dist.refresh.history import remove_old_runs
from toffee_dist.refresh.log import FailedRefresh, Refreshed, record_refresh
from toffee_dist.refresh.warm import COLD
from toffee_dist.refresh.window import Window, count_steps, find_expiry, find_window
from toffee_dist.settings import EdgeSettings, JobRuntimeSettings, ModelSettings, RefreshConfig
from toffee_dist.storage.files import check_writable
from toffee_dist.storage.forgotten import check_no_erasure
from toffee_dist.storage.lock import hold_lock
from toffee_dist.storage.manifest import Following, Manifest
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.registry import count_known, registry_files
from toffee_dist.storage.runs import RunFolder, find_latest, get_run, list_runs, point_to, read_pointer
from toffee_dist.storage.spaces import check_space
from toffee_dist.storage.vectors import damaged, first_line
from toffee_dist.timegrid import TimeGrid
from toffee_dist.words import hide_in

# What a later refresh may change without becoming another chain: what it reads, where it runs, its limits.
_FREE = {"inputs", "since", "until", "last", "known", "on_bad_rows"}
_FREE |= {"outputs", "vectors", "freqs", "tol", "max_iter"}


def refresh(config: RefreshConfig, progress: Progress | None = None, limits: Limits = LIMITS) -> Refreshed:
    """Bring the published run of `config.out` up to date.

    Returns
    -------
    Refreshed
        Its state is ``published``, or ``unchanged`` where this refresh was done before.

    Raises
    ------
    QualityError
        Where the new run breaks a limit: it is kept, and the previous run stays published.
    ToffeeError
        As `start_run`.
    """
    if not config.out:
        raise ConfigError("out", got="nothing", allowed="a folder for the runs", remedy="Add --out DIR.")
    if config.basis == "energy" and "trajectory" in config.outputs:
        raise ConfigError(
            "basis of a refresh",
            got="energy, whose axes no refresh can turn onto those of the previous run",
            allowed="sum",
            remedy="Use toffee embed for a trajectory with --basis energy.",
        )
    progress = progress or Progress()
    out = to_path(config.out).absolute()
    check_writable(out)
    return _locked(out, config.keep, lambda: _refresh(config, out, progress, limits))


def resume_refresh(
    run: RunFolder, where: dict[str, Any], progress: Progress | None = None, limits: Limits = LIMITS
) -> Refreshed:
    """Go on with a refresh that was cut short, unless another run was published since.

    Parameters
    ----------
    run
        The run.
    where
        Runtime settings, and the inputs where they were not kept; those of the start do not count, see
        `resume_run`.
    progress, limits
        As in `refresh`; the limits must be those of the start.
    """
    record = run.read_job()
    config = RefreshConfig.read({**asked_for(record), **where})
    following = record.following
    assert following is not None

    def work() -> Refreshed:
        latest = find_latest(run.out)
        now, then = "" if latest is None else str(latest.path), following.previous
        if now != then:
            raise InputError(
                f"run {run.run_id} is of an earlier refresh",
                got=f"it follows {_name(then)}, but {_name(now)} is published",
                allowed="a run that follows the published one",
                remedy="toffee refresh makes a new one; a later one removes this.",
            )
        return _resume(run, config, where, progress, limits)

    check_writable(run.out)
    return _locked(run.out, config.keep, work)


def _resume(
    run: RunFolder, config: RefreshConfig, where: dict[str, Any], progress: Progress | None, limits: Limits
) -> Refreshed:
    following = run.read_job().following
    assert following is not None
    _check_following(run, following)
    resume_locked(run, where, progress, RefreshChain(config, following), limits)
    return Refreshed(run.run_id, "published", run.read_manifest())


def _check_following(run: RunFolder, following: Following) -> None:
    """Raise where what a run follows, which its folder says, is not beside it."""
    for path in (following.previous, following.reference):
        if path and path != str(get_run(run.out, _name(path)).path):
            raise _not_ours(run, path)
    previous = RunFolder.at(following.previous)
    if following.warm and following.warm != str(previous.warm):
        raise _not_ours(run, str(following.warm))


def _not_ours(run: RunFolder, path: str) -> InputError:
    return InputError(
        f"run {run.run_id} cannot be resumed",
        got=f"it follows {path}, which is no run of {run.out}",
        remedy="Was the folder moved? toffee refresh makes a new one; a later one removes this.",
    )


def _name(run: str) -> str:
    return run.rpartition("/")[2] or "no run"


def _locked(out: Path, keep: int, work: Callable[[], Refreshed]) -> Refreshed:
    """Do the work of a refresh alone, remove what is old, and leave a line about it, however it ends."""
    began = time.monotonic()
    with hold_lock(out):
        try:
            done = work()
        except QualityError as error:
            run, seconds = list_runs(out)[-1], time.monotonic() - began
            if run.complete:
                manifest = run.read_manifest()
                removed = remove_old_runs(out, keep)
                record_refresh(out, Refreshed(run.run_id, "rejected", manifest, seconds, str(error), removed))
            else:
                record_refresh(out, FailedRefresh(str(error), seconds, "rejected"))
            raise
        except Exception as error:
            record_refresh(out, FailedRefresh(str(error), time.monotonic() - began))
            raise
        done.seconds = time.monotonic() - began
        done.removed = remove_old_runs(out, keep)
        record_refresh(out, done)
        return done


def _refresh(config: RefreshConfig, out: Path, progress: Progress, limits: Limits) -> Refreshed:
    check_no_erasure(out)
    latest = None if config.fresh else find_latest(out)
    before = None if latest is None else read_previous(latest)
    files, _ = find_files(config.inputs)
    digest = fingerprint(files)
    window, newest = _look(config, before, digest, progress)
    find_expiry(config, window)  # Bad words are refused before anything is done.
    identity = _identity(config, window, digest)
    if latest is not None and before is not None:
        if before.refresh is not None and before.refresh.night == identity:
            progress.say(f"nothing new since run {latest.run_id}")
            return Refreshed(latest.run_id, "unchanged", before)
        check_chain(config, before)
        check_clock(config, before, window)
    found = None if config.fresh else _find_same(out, identity, latest)
    if found is not None:
        return _finish(config, out, found, progress, limits)
    following = Following(night=identity, window=window.texts, newest=newest)
    if latest is not None and before is not None:
        following = follow(config, latest, before, window, following)
        if following.cold:
            progress.say(f"slices start from scratch: {following.cold}")
        if config.appends and following.append is None:
            progress.say(f"trajectory: run {latest.run_id} has none to append to, so it begins anew")
    else:
        progress.say("no earlier run to follow: this one begins a chain")
    since, until = window.texts
    known = following.previous or None
    job = config.changed(since=since, until=until, last=None, known=known)
    outcome = run_locked(job, digest, progress, RefreshChain(job, following), limits)
    return Refreshed(outcome.run.run_id, "published", outcome.run.read_manifest())


def follow(
    config: RefreshConfig, latest: RunFolder, before: Manifest, window: Window, following: Following
) -> Following:
    """Return what a refresh follows where there is a previous run."""
    new = count_steps(config.step, before.grid.until, window)
    warm, cold = _find_warm(config, latest, before.grid, window)
    return following.replaced(
        previous=str(latest.path),
        reference=str(find_reference(config, latest, before).path),
        holdout=min(new, config.holdout),
        expire=find_expiry(config, window),
        warm=warm,
        cold=cold,
        append=find_appended(config, latest, before, window),
    )


def _finish(
    config: RefreshConfig, out: Path, run: RunFolder, progress: Progress, limits: Limits
) -> Refreshed:
    """Go on with the run of this refresh, as far as it is."""
    if not run.complete:
        progress.say(f"going on with run {run.run_id}")
        where = config.model_dump(include={*JobRuntimeSettings.model_fields, "inputs"})
        return _resume(run, config, where, progress, limits)
    manifest = run.read_manifest()
    if manifest.state == "rejected":
        manifest = _judge_again(config, out, run, manifest)
    pointer = read_pointer(out)
    if pointer is not None and run.run_id in pointer.withdrawn:
        progress.say(f"run {run.run_id} of this refresh was withdrawn")
        published = get_run(out, pointer.run_id)
        return Refreshed(published.run_id, "unchanged", published.read_manifest())
    # It was whole, and then we were stopped before the pointer.
    point_to(run)
    run.remove_work()
    return Refreshed(run.run_id, "published", manifest)


def _judge_again(config: RefreshConfig, out: Path, run: RunFolder, manifest: Manifest) -> Manifest:
    """Let a run that was rejected pass where the limits were changed since."""
    record = manifest.refresh
    assert record is not None
    before = get_run(out, record.previous).read_manifest()
    drift = record.drift[0] if record.drift else None
    reasons = judge(manifest.metrics, before.metrics, drift, record.links, config)
    if reasons:
        raise QualityError(
            f"run {run.run_id} of this refresh is not published",
            got="; ".join(reasons),
            allowed="the limits of the configuration",
            remedy="toffee rollback --to publishes it anyway.",
        )
    passed = manifest.replaced(state="published")
    run.write_manifest(passed)
    return passed


def read_previous(run: RunFolder) -> Manifest:
    """Return the manifest of the run to follow, and see that what we need of it is there."""
    try:
        manifest = run.read_manifest()
    except InputError as error:
        raise damaged(run, str(error)) from None
    for name in (run.registry.name, "embedding"):
        if not run.parts(name):
            raise damaged(run, f"nothing in {name}/")
    try:
        known = count_known(registry_files(run.registry))
    except Exception as error:  # Whatever polars says of a broken file.
        raise damaged(run, f"registry: {first_line(error)}") from None
    if known != manifest.summary.nodes:
        raise damaged(run, f"{known:,} of {manifest.summary.nodes:,} nodes in registry/")
    return manifest


def check_chain(config: RefreshConfig, before: Manifest) -> None:
    """Raise where the vectors of two runs would not mean the same."""
    names = (set(EdgeSettings.model_fields) | set(ModelSettings.model_fields)) - _FREE
    now = hide_in(config.model_dump(mode="json", include=names))
    then = before.config.to_json()
    changed = sorted(name for name in names if name in then and then[name] != now[name])
    if changed:
        raise ConfigError(
            "settings that the previous run had otherwise",
            got=", ".join(f"{name} = {now[name]!r} after {then[name]!r}" for name in changed),
            allowed="the same as in the run to follow",
            remedy="Set them back, or start a new chain with --fresh.",
        )


def check_clock(config: RefreshConfig, before: Manifest, window: Window) -> None:
    """Raise where the window would move back, unless a moment was asked for."""
    grid = before.grid
    if grid.scale != window.scale:
        raise ConfigError(
            "times mean something else than in the previous run",
            got=f"{window.scale}",
            allowed=f"{grid.scale}",
            remedy="Check --time-unit and --zone, or start a new chain with --fresh.",
        )
    if config.as_of is None and window.until < grid.until:
        raise InputError(
            "the window would move back",
            got=f"an end at {window.texts[1]}, after a run up to {grid.scale.show(grid.until)}",
            allowed="a window that ends no earlier",
            remedy="Is the clock right, and are all files there? The past is asked for by --as-of.",
        )


def _find_warm(config: RefreshConfig, latest: RunFolder, grid: TimeGrid, window: Window) -> tuple[str, str]:
    """Return where solves start from, or why they start from scratch."""
    n_steps = count_steps(config.step, window.since, window)
    if not config.warm:
        return "", "asked for"
    if (grid.step, grid.n_steps) != (config.step, n_steps):
        # Frequency k is another period.
        then, now = (
            f"{count} steps of {step}" for step, count in ((grid.step, grid.n_steps), (config.step, n_steps))
        )
        return "", f"{now} after {then}"
    if not (latest.warm / COLD).exists():
        return "", f"run {latest.run_id} has kept no slices"
    return str(latest.warm), ""


def find_reference(config: RefreshConfig, latest: RunFolder, before: Manifest) -> RunFolder:
    """Return the run that chain drift is measured against: as asked for, or that of the chain."""
    known = "" if before.refresh is None else before.refresh.reference
    run = get_run(latest.out, config.reference or known or latest.run_id)
    if not run.complete:
        raise ConfigError(
            "reference",
            got=run.run_id,
            allowed="a complete run of this folder",
            remedy="toffee runs lists them; --reference pins another.",
        )
    manifest = run.read_manifest()
    check_space(
        before.space_id,
        manifest.space_id,
        f"reference {run.run_id}",
        f"the run to follow, {latest.run_id}",
        "Leave --reference out, or choose a run of this chain: toffee runs lists them.",
    )
    # How its rows lie in the new run's is known from one refresh to the next.
    if _expired(manifest) != _expired(before) and not latest.kept(run.run_id).exists():
        raise ConfigError(
            "reference",
            got=f"{run.run_id}, after which nodes were forgotten",
            allowed="the reference of the chain, or a run since nodes were last forgotten",
            remedy="Leave --reference out.",
        )
    return run


def _expired(manifest: Manifest) -> int:
    return 0 if manifest.refresh is None else manifest.refresh.expired


def _look(
    config: RefreshConfig, before: Manifest | None, digest: str, progress: Progress
) -> tuple[Window, int]:
    """Find the window; the times are read again only where the input changed."""
    if before is not None and before.fingerprint == digest and before.refresh is not None:
        scale, newest = before.grid.scale, before.refresh.newest
    else:
        with open_cluster(config) as client, progress.stage("look") as done:
            run = runner(client, wait=config.wait, stall=config.stall, done=done)
            scale, newest = find_newest(config, run)
    return find_window(config, scale, newest), newest


def _identity(config: RefreshConfig, window: Window, digest: str) -> str:
    """Return a digest of what a refresh is of: equal where a second run would give the same."""
    text = json.dumps([config.identity(), list(window.texts), digest])
    return hashlib.sha256(text.encode()).hexdigest()


def _find_same(out: Path, identity: str, latest: RunFolder | None) -> RunFolder | None:
    """Return the newest run of this refresh: complete, or unfinished and following what we would follow."""
    previous = "" if latest is None else str(latest.path)
    found = None
    for run in list_runs(out):
        of: Following | None = None
        if run.complete:
            try:
                of = run.read_manifest().refresh
            except InputError:
                continue
        elif run.begun:
            try:
                of = run.read_job().following
            except InputError:
                continue
            if of is not None and of.previous != previous:
                of = None
        if of is not None and of.night == identity:
            found = run
    return found
