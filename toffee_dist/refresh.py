"""The nightly refresh: a rolling window, rows and axes of the run before, published only when it is good.

    lock → night (window, input) → run it, finish it, or find it done → gate → pointer → retention

The batch job itself is that of `pipeline`; here is only which night it is, and what a night follows. Every
step may be cut short: what is on storage says how far the night is, and the next call goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toffee_dist import runtime
from toffee_dist.config import EdgeSettings, ModelSettings, RefreshConfig, RuntimeSettings
from toffee_dist.drift import damaged
from toffee_dist.edges import find_newest
from toffee_dist.errors import ConfigError, InputError, QualityError
from toffee_dist.expiry import kept_path
from toffee_dist.gate import Following, Night, judge
from toffee_dist.operations import append_log, hold_lock, remove_old_runs, write_metrics
from toffee_dist.pipeline import resume_run, start_run
from toffee_dist.progress import Progress
from toffee_dist.sources import find_files, fingerprint
from toffee_dist.store import (
    LATEST,
    MANIFEST,
    RunFolder,
    check_writable,
    list_runs,
    place,
    point_to,
    read_json,
    write_json,
)
from toffee_dist.timegrid import TimeGrid
from toffee_dist.window import Window, count_steps, find_expiry, find_window

# What a later night may change without becoming another chain: what it reads, where it runs, its limits.
_FREE = {"inputs", "since", "until", "last", "known", "on_bad_rows", "outputs", "freqs", "tol", "max_iter"}


@dataclass
class Refreshed:
    """What a refresh did."""

    run: str
    state: str
    seconds: float
    manifest: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    removed: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the figures that an operator alarms on, as one flat line."""
        refresh, metrics = self.manifest.get("refresh", {}), self.manifest.get("metrics", {})
        drift = refresh.get("drift") or [{}]
        links = refresh.get("links") or {}
        summary = self.manifest.get("summary", {})
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": self.run,
            "state": self.state,
            "reason": self.reason,
            "seconds": round(self.seconds, 3),
            "window": refresh.get("window"),
            "rows": summary.get("used"),
            "nodes": summary.get("nodes"),
            "active": metrics.get("active"),
            "new": drift[0].get("new", summary.get("new_nodes")),
            "left": drift[0].get("left"),
            "expired": drift[0].get("expired"),
            "cosine": drift[0].get("cosine", {}).get("p50"),
            "cosine_reference": drift[-1].get("cosine", {}).get("p50"),
            "overlap10": drift[0].get("overlap10"),
            "auc": links.get("now"),
            "auc_before": links.get("before"),
            "energy_share": metrics.get("energy_share"),
            "iterations": metrics.get("iterations"),
            "solve_seconds": metrics.get("solve_seconds"),
            "warm_slices": (refresh.get("saved") or {}).get("slices"),
            "iterations_saved": (refresh.get("saved") or {}).get("iterations"),
            "seconds_saved": (refresh.get("saved") or {}).get("seconds"),
            "removed": len(self.removed),
        }


def refresh(config: RefreshConfig, progress: Progress | None = None) -> Refreshed:
    """Bring the published run of `config.out` up to date.

    Returns
    -------
    Refreshed
        Its state is ``published``, or ``unchanged`` where this night was done before.

    Raises
    ------
    QualityError
        Where tonight's run breaks a limit: it is kept, and the run before stays published.
    ToffeeError
        As `start_run`.
    """
    if not config.out:
        raise ConfigError("out", got="nothing", allowed="a folder for the runs", remedy="Add --out DIR.")
    progress = progress or Progress()
    out = place(config.out).absolute()
    check_writable(out)
    return _locked(out, config.keep, lambda: _refresh(config, out, progress))


def resume_night(run: RunFolder, where: dict[str, Any], progress: Progress | None = None) -> Refreshed:
    """Go on with a refresh that was cut short, unless another run was published since.

    Parameters
    ----------
    run
        The run.
    where
        Runtime settings that replace those of the start.
    """
    job = run.read_job()

    def work() -> Refreshed:
        latest = find_latest(run.out)
        now, then = "" if latest is None else str(latest.path), job["following"]["previous"]
        if now != then:
            raise InputError(
                f"run {run.run_id} is of an earlier night",
                got=f"it follows {_name(then)}, but {_name(now)} is published",
                allowed="a run that follows the published one",
                remedy="toffee refresh makes tonight's; a later one removes this.",
            )
        resume_run(run, where, progress)
        return Refreshed(run.run_id, "published", 0.0, read_json(run.manifest))

    return _locked(run.out, int(job["config"]["keep"]), work)


def _name(run: str) -> str:
    return run.rpartition("/")[2] or "no run"


def _locked(out: Path, keep: int, work: Callable[[], Refreshed]) -> Refreshed:
    """Do the work of a night alone, remove what is old, and leave a line about it, however it ends."""
    began = time.monotonic()
    with hold_lock(out):
        try:
            done = work()
        except QualityError as error:
            run = list_runs(out)[-1]
            manifest = read_json(run.manifest) if run.published else {}
            kept = Refreshed(run.run_id, "rejected", time.monotonic() - began, manifest, str(error))
            if run.published:
                kept.removed = remove_old_runs(out, keep)
            _record(out, kept)
            raise
        except Exception as error:
            _record(out, Refreshed("", "failed", time.monotonic() - began, reason=str(error)))
            raise
        done.seconds = time.monotonic() - began
        done.removed = remove_old_runs(out, keep)
        _record(out, done)
        return done


def _record(out: Path, done: Refreshed) -> None:
    line = done.to_json()
    append_log(out, line)
    write_metrics(out, line)


def _refresh(config: RefreshConfig, out: Path, progress: Progress) -> Refreshed:
    latest = None if config.fresh else find_latest(out)
    before = None if latest is None else read_previous(latest)
    files, _ = find_files(config.inputs)
    digest = fingerprint(files)
    window, newest = _look(config, before, digest, progress)
    find_expiry(config, window)  # Bad words are refused before anything is done.
    night = _night(config, window, digest)
    if latest is not None and before is not None:
        if before.get("refresh", {}).get("night") == night:
            progress.say(f"nothing new since run {latest.run_id}")
            return Refreshed(latest.run_id, "unchanged", 0.0, before)
        check_chain(config, before)
        check_clock(config, before, window)
    found = None if config.fresh else _find_night(out, night, latest)
    if found is not None:
        return _finish(config, out, found, progress)
    since, until = window.texts
    following = Following(night, (since, until), newest)
    known = None
    if latest is not None and before is not None:
        grid = TimeGrid.from_json(before["grid"])
        fresh = count_steps(config.step, grid.until, window)
        reference = find_reference(config, out, latest, before)
        following = Following(
            night,
            (since, until),
            newest,
            previous=str(latest.path),
            reference=str(reference.path),
            holdout=min(fresh, config.holdout),
            expire=find_expiry(config, window),
            **_find_warm(config, latest, grid, window),
        )
        if following.cold:
            progress.say(f"slices start afresh: {following.cold}")
        known = str(latest.path)
    else:
        progress.say("no earlier run to follow: this one begins a chain")
    job = config.model_copy(update={"since": since, "until": until, "last": None, "known": known})
    outcome = start_run(job, progress, following)
    return Refreshed(outcome.run.run_id, "published", 0.0, read_json(outcome.run.manifest))


def _finish(config: RefreshConfig, out: Path, run: RunFolder, progress: Progress) -> Refreshed:
    """Go on with tonight's run, as far as it is."""
    if not run.published:
        progress.say(f"going on with run {run.run_id}")
        where = config.model_dump(include=set(RuntimeSettings.model_fields))
        resume_run(run, where, progress)
        return Refreshed(run.run_id, "published", 0.0, read_json(run.manifest))
    manifest = read_json(run.manifest)
    if manifest["state"] == "rejected":
        # The limits may have been changed since.
        data = manifest["refresh"]
        night = Night(Following("", ("", ""), 0), links=data["links"], drift=data["drift"])
        before = read_json(out / "runs" / data["previous"] / MANIFEST)["metrics"]
        reasons = judge(night, manifest["metrics"], before, config)
        if reasons:
            raise QualityError(
                f"run {run.run_id} of this night is not published",
                got="; ".join(reasons),
                allowed="the limits of the configuration",
                remedy="toffee rollback --to publishes it anyway.",
            )
        manifest["state"] = "published"
        write_json(run.manifest, manifest)
    pointer = read_json(out / LATEST) if (out / LATEST).exists() else {}
    if run.run_id in pointer.get("withdrawn", []):
        progress.say(f"run {run.run_id} of this night was withdrawn")
        return Refreshed(
            pointer["run_id"], "unchanged", 0.0, read_json(out / "runs" / pointer["run_id"] / MANIFEST)
        )
    # It was whole, and then we were stopped before the pointer.
    point_to(run)
    run.remove_work()
    return Refreshed(run.run_id, "published", 0.0, manifest)


def find_latest(out: Path) -> RunFolder | None:
    """Return the published run, or None where there never was one."""
    if not (out / LATEST).exists():
        return None
    pointer = read_json(out / LATEST)
    return RunFolder(out / "runs" / str(pointer["run_id"]))


def read_previous(run: RunFolder) -> dict[str, Any]:
    """Return the manifest of the run to follow, and see that what we need of it is there."""
    try:
        manifest: dict[str, Any] = read_json(run.manifest)
        rows = int(manifest["summary"]["nodes"])
    except (InputError, KeyError, TypeError, ValueError):
        raise damaged(run.path, "no manifest that can be read") from None
    for name in ("registry", "embedding"):
        if not any((run.path / name).glob("part-*.parquet")):
            raise damaged(run.path, f"nothing in {name}/")
    from toffee_dist.registry import count_known, registry_files

    try:
        known = count_known(registry_files(run.registry))
    except Exception as error:  # Whatever polars says of a broken file.
        raise damaged(run.path, f"registry: {str(error).splitlines()[0]}") from None
    if known != rows:
        raise damaged(run.path, f"{known:,} of {rows:,} nodes in registry/")
    return manifest


def check_chain(config: RefreshConfig, before: dict[str, Any]) -> None:
    """Raise where the vectors of two nights would not mean the same."""
    names = (set(EdgeSettings.model_fields) | set(ModelSettings.model_fields)) - _FREE
    now = config.model_dump(mode="json", include=names)
    then = before["config"]
    changed = sorted(name for name in names if name in then and then[name] != now[name])
    if changed:
        raise ConfigError(
            "settings that the last run had otherwise",
            got=", ".join(f"{name} = {now[name]!r} after {then[name]!r}" for name in changed),
            allowed="the same as in the run to follow",
            remedy="Set them back, or start a new chain with --fresh.",
        )


def check_clock(config: RefreshConfig, before: dict[str, Any], window: Window) -> None:
    """Raise where the window would move back, unless a moment was asked for."""
    grid = TimeGrid.from_json(before["grid"])
    if grid.scale != window.scale:
        raise ConfigError(
            "times mean something else than in the last run",
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


def _find_warm(config: RefreshConfig, latest: RunFolder, grid: TimeGrid, window: Window) -> dict[str, str]:
    """Return where solves start from, or why they start afresh."""
    n_steps = count_steps(config.step, window.since, window)
    if not config.warm:
        return {"cold": "asked for"}
    if (grid.step, grid.n_steps) != (config.step, n_steps):
        # Frequency k is another period.
        then, now = (
            f"{count} steps of {step}" for step, count in ((grid.step, grid.n_steps), (config.step, n_steps))
        )
        return {"cold": f"{now} after {then}"}
    if not latest.warm.is_dir():
        return {"cold": f"run {latest.run_id} has kept no slices"}
    return {"warm": str(latest.warm)}


def find_reference(config: RefreshConfig, out: Path, latest: RunFolder, before: dict[str, Any]) -> RunFolder:
    """Return the run that chain drift is measured against: as asked for, or that of the chain."""
    name = config.reference or before.get("refresh", {}).get("reference") or latest.run_id
    run = RunFolder(out / "runs" / name)
    if not run.published:
        raise ConfigError(
            "reference",
            got=name,
            allowed="a complete run of this folder",
            remedy="toffee runs lists them; --reference pins another.",
        )
    # How its rows lie in tonight's is known from one night to the next.
    then = read_json(run.manifest).get("refresh", {}).get("expired", 0)
    if then != before.get("refresh", {}).get("expired", 0) and not kept_path(latest.path, name).exists():
        raise ConfigError(
            "reference",
            got=f"{name}, after which nodes were forgotten",
            allowed="the reference of the chain, or a run since nodes were last forgotten",
            remedy="Leave --reference out.",
        )
    return run


def _look(
    config: RefreshConfig, before: dict[str, Any] | None, digest: str, progress: Progress
) -> tuple[Window, int]:
    """Find the window; the times are read again only where the input changed."""
    if before is not None and before["fingerprint"] == digest and "refresh" in before:
        scale, newest = TimeGrid.from_json(before["grid"]).scale, int(before["refresh"]["newest"])
    else:
        with runtime.open_cluster(config) as client, progress.stage("look") as done:
            edges = config.ingest_config()
            scale, newest = find_newest(
                edges, runtime.runner(client, wait=config.wait, stall=config.stall, done=done)
            )
    return find_window(config, scale, newest), newest


def _night(config: RefreshConfig, window: Window, digest: str) -> str:
    """Return the name of a night: equal where a second run would give the same."""
    text = json.dumps([config.identity(), list(window.texts), digest])
    return hashlib.sha256(text.encode()).hexdigest()


def _find_night(out: Path, night: str, latest: RunFolder | None) -> RunFolder | None:
    """Return the newest run of this night: complete, or unfinished and following what we would follow."""
    previous = "" if latest is None else str(latest.path)
    found = None
    for run in list_runs(out):
        if run.published:
            try:
                name = read_json(run.manifest).get("refresh", {}).get("night")
            except InputError:
                continue
        elif (run.work / "job.json").exists():
            following = run.read_job().get("following", {})
            name = following.get("night") if following.get("previous") == previous else None
        else:
            name = None
        if name == night:
            found = run
    return found
