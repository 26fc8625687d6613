"""The report of a run: sections from what was gathered, and the file that they become."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from toffee_dist.report.gather import Facts, gather
from toffee_dist.report.layout import Method
from toffee_dist.report.page import Section, asset, bullets, data_block, render, table
from toffee_dist.report.plots import draw_fit, draw_rhythms, draw_seconds, draw_turns
from toffee_dist.report.scene import PLAYER, describe, make_scene
from toffee_dist.storage.files import replacing
from toffee_dist.storage.manifest import Drift, Manifest
from toffee_dist.storage.runs import RunFolder
from toffee_dist.timegrid import name_period
from toffee_dist.units import show_bytes
from toffee_dist.words import hide_secrets

# Up to so many slices a table says more than a plot.
FEW_SLICES = 3


def write_report(run: RunFolder, manifest: Manifest, to: Path, method: Method = "pca") -> None:
    """Write the page about a run.

    Parameters
    ----------
    run
        Its folder.
    manifest
        Its manifest.
    to
        The file.
    method
        How the map of nodes is laid out.
    """
    page = make_page(gather(run, manifest, method))
    with replacing(to) as temporary:
        temporary.write_text(page, encoding="utf-8")


def make_page(facts: Facts, *, live: bool = False) -> str:
    """Return the page as text; a live one asks the server that it comes from."""
    manifest, summary = facts.manifest, facts.manifest.summary
    return render(
        f"Run {manifest.run_id}",
        f"{summary.nodes:,} nodes over {summary.steps:,} steps of {facts.grid.step}, "
        f"{summary.first} to {summary.last}. Finished {manifest.finished}.",
        [
            _nodes(facts, live),
            _about(facts),
            *_rhythms(facts),
            *_fit(facts),
            *_drift(facts),
            _resources(facts),
            _settings(facts),
        ],
        scripts=() if facts.nodes is None else PLAYER,
        live=live,
    )


def remarks(facts: Facts) -> Iterator[str]:
    """Yield what somebody who trusts this run should know, one line each."""
    manifest, summary, metrics = facts.manifest, facts.manifest.summary, facts.manifest.metrics
    refresh = manifest.refresh
    for reason in [] if refresh is None else refresh.reasons:
        yield f"Not published when it was finished: {reason}."
    skipped = sum(summary.skipped.values())
    if skipped:
        kinds = ", ".join(f"{count:,} × {kind}" for kind, count in summary.skipped.items())
        yield f"{skipped:,} of {summary.rows:,} rows were invalid and were left out: {kinds}."
        yield from (f"Left out: {hide_secrets(example)}" for example in summary.examples)
    if summary.cancelled:
        yield f"{summary.cancelled:,} entries have weights that sum to zero, and are no entries."
    stopped = metrics.slices - metrics.converged
    if stopped:
        yield (
            f"{stopped:,} of {metrics.slices:,} frequencies stopped at the limit of iterations before "
            "they had converged; --max-iter raises it."
        )
    if 2 * summary.empty_steps > summary.steps:
        yield f"{summary.empty_steps:,} of {summary.steps:,} steps have no edge; is --step too short?"
    if refresh is not None and refresh.cold:
        yield f"Slices were solved from scratch, not from the previous run: {refresh.cold}."


def _about(facts: Facts) -> Section:
    manifest, summary, metrics = facts.manifest, facts.manifest.summary, facts.manifest.metrics
    config = manifest.config
    inputs = [hide_secrets(path) for path in config.inputs]
    if len(inputs) > 3:
        inputs = [*inputs[:3], f"and {len(inputs) - 3:,} more"]
    read = [
        ("input", ", ".join(inputs)),
        ("rows", f"{summary.rows:,} in {summary.files:,} files"),
        ("outside the window", f"{summary.outside:,}"),
        ("edges used", f"{summary.used:,}, {'directed' if manifest.directed else 'undirected'}"),
        ("repeated in a step", f"{summary.duplicates:,}"),
        ("from a node to itself", f"{summary.self_loops:,}"),
        ("nodes", f"{summary.nodes:,} ({summary.new_nodes:,} new)"),
        ("pairs of nodes", f"{summary.pairs:,}"),
        ("steps", f"{summary.steps:,} of {facts.grid.step} ({summary.empty_steps:,} without edges)"),
        ("time", f"{summary.first} to {summary.last}"),
    ]
    done = [
        ("model", f"{config.model}, vectors of length {config.rank}"),
        ("outputs", ", ".join(manifest.outputs)),
        ("begun", manifest.begun),
        ("finished", f"{manifest.finished} ({_took(manifest):,.0f} s later)"),
        ("was then", manifest.state),
    ]
    if metrics.slices:
        done.append(("frequencies solved", f"{metrics.slices:,}, {metrics.converged:,} converged"))
    if metrics.freqs:
        kept = f"{metrics.freqs:,} frequencies, {metrics.energy_kept:.1%} of the variation in time"
        done.append(("trajectory from", kept))
    if metrics.energy_share is not None:
        done.append(("explained", f"{metrics.energy_share:.1%} of the sum over time"))
    if metrics.active is not None:
        done.append(("nodes with edges", f"{metrics.active:,}"))
    both = table(read, caption="What was read") + table(done, caption="What was done")
    html = bullets(remarks(facts)) + f'<div class="beside">{both}</div>'
    return Section("What this is", html=html)


def _took(manifest: Manifest) -> float:
    begun, finished = (datetime.fromisoformat(moment) for moment in (manifest.begun, manifest.finished))
    return (finished - begun).total_seconds()


def _nodes(facts: Facts, live: bool) -> Section:
    nodes = facts.nodes
    if nodes is None:
        return Section("Map of nodes", "This run has no vector of a node to draw.")
    active = facts.manifest.metrics.active
    every = facts.manifest.summary.nodes if active is None else active
    scene = data_block("scene", make_scene(nodes, facts.grid, live=live))
    player = asset("player.html").replace("<!-- words -->", describe(nodes, facts.grid, every))
    title = "Map of nodes" if nodes.paths is None else "Nodes in time"
    return Section(title, html=player + scene)


def _rhythms(facts: Facts) -> Iterator[Section]:
    if facts.frequencies is None or facts.peaks is None or facts.frequencies.is_empty():
        return
    rows = [
        (_rhythm(row["k"], facts), f"{row['significance']:,.0f}", "yes" if row["chosen"] else "no")
        for row in facts.peaks.iter_rows(named=True)
    ]
    found = table(rows, ("rhythm", "standard deviations above noise", "in the trajectory"))
    yield Section(
        "Rhythms",
        "How far the structure of the graph at each frequency stands out of noise; above the dashed line it "
        "is no accident. A rhythm that is no plain wave has overtones: 7.0, 3.5 and 2.3 days tell of one "
        "week. Coloured frequencies make up the trajectory.",
        (found if rows else "<p>No frequency stands out: no rhythm of this graph shows in these steps.</p>")
        + draw_rhythms(facts.frequencies, facts.peaks, facts.grid),
    )


def _rhythm(k: int, facts: Facts) -> str:
    if k < 2:
        return "a slow change over the window" if k else "the sum over time"
    return name_period(facts.grid.n_steps / k, facts.grid)


def _fit(facts: Facts) -> Iterator[Section]:
    fit = facts.fit
    if fit.is_empty():
        return
    says = (
        "What the model leaves over of each solved frequency (0 is a perfect fit; noise cannot be fitted, so "
        "high values are normal), and where a lower bound is known the gap: how much better any fit of this "
        "rank could be at the most."
    )
    known = fit["gap"].drop_nulls().len()
    if known < len(fit):
        says += f" {known:,} of {len(fit):,} have a bound; --bound computes the others."
    if len(fit) > FEW_SLICES:
        yield Section("Fit by frequency", says, draw_fit(fit, facts.grid))
        return
    rows = [
        (
            _rhythm(row["k"], facts),
            f"{row['left']:.1%}" if row["energy"] else "nothing to fit",
            "unknown" if row["gap"] is None else f"{row['gap']:.2%}",
            "yes" if row["converged"] else "no",
            f"{row['solver']}, {row['iterations']:,} iterations, {row['seconds']:.2f} s",
        )
        for row in fit.iter_rows(named=True)
    ]
    header = ("frequency", "left over", "gap", "converged", "solver")
    yield Section("Fit by frequency", says, table(rows, header))


def _drift(facts: Facts) -> Iterator[Section]:
    refresh = facts.manifest.refresh
    if refresh is None:
        return
    if not refresh.drift:
        yield Section("Drift", "This run begins a chain: there is no previous run to compare with.")
        return
    last = refresh.drift[0]
    columns = {"the previous run": last}
    if len(refresh.drift) > 1:
        columns["the reference"] = refresh.drift[-1]
    rows = [
        ("run", *(found.earlier for found in columns.values())),
        ("nodes in both", *(f"{found.nodes:,}" for found in columns.values())),
        ("new, left, returned", *(_counts(found) for found in columns.values())),
        ("median cosine of a node's vectors", *(_quantile(found.cosine) for found in columns.values())),
        ("median ratio of lengths", *(_quantile(found.norm_ratio) for found in columns.values())),
        ("of ten neighbours, the same", *(_overlap(found) for found in columns.values())),
        ("angle between the spaces, mean", *(f"{found.angle_mean:.1f}°" for found in columns.values())),
    ]
    links = refresh.links
    html = table(rows, ("compared with", *columns))
    if links is not None and links.now is not None:
        html += (
            f"<p>Of {links.links:,} links of the newest steps, which neither had seen, the vectors of the "
            f"previous run put {links.before:.1%} above a pair without a link, this run's "
            f"{links.now:.1%} (AUC).</p>"
        )
    html += bullets(refresh.reasons) or "<p>Within every limit.</p>"
    movers = [(one.node_id, f"{one.cosine:.3f}", f"{one.degree:,}") for one in last.movers]
    if movers:
        caption = "Well-connected nodes that moved most since the previous run"
        html += table(movers, ("node", "cosine", "degree"), caption)
    yield Section(
        "Drift",
        "How far nodes moved since earlier runs. A cosine of 1 is a vector that points where it did, 0.9 one "
        "that turned by 26 degrees; the plot counts nodes by how far they turned since the previous run.",
        html + ("" if facts.turns is None else draw_turns(facts.turns)),
    )


def _counts(found: Drift) -> str:
    return f"{found.new:,}, {found.left:,}, {found.returned:,}"


def _quantile(found: dict[str, float]) -> str:
    return f"{found['p50']:.3f} (of 5 % below {found['p05']:.3f})" if "p50" in found else "unknown"


def _overlap(found: Drift) -> str:
    return "unknown" if found.overlap10 is None else f"{10 * found.overlap10:.1f}"


def _resources(facts: Facts) -> Section:
    manifest, metrics = facts.manifest, facts.manifest.metrics
    seconds = dict(metrics.seconds)
    if not metrics.reused:
        rest = _took(manifest) - sum(seconds.values())
        seconds = {"reading, starting": max(0.0, rest), **seconds}
    rows = [
        ("seconds of the solvers, all workers", f"{metrics.solve_seconds:,.1f}"),
        ("slices solved, found on storage", f"{metrics.solved:,}, {metrics.reused:,}"),
        ("bytes of vectors", show_bytes(metrics.output_bytes)),
    ]
    if metrics.peak_bytes:
        rows.append(("most memory of one worker", show_bytes(metrics.peak_bytes)))
    return Section(
        "Time and memory",
        "Wall seconds of each stage of the run, in order; the report itself comes after this picture.",
        table(rows) + draw_seconds(seconds),
    )


def _settings(facts: Facts) -> Section:
    manifest = facts.manifest
    config = [(name, hide_secrets(str(value))) for name, value in manifest.config.to_json().items()]
    inner = table(config) + table(manifest.versions.items(), caption="Versions")
    prints = [("input", manifest.fingerprint), ("settings", manifest.identity)]
    inner += table(prints, caption="Fingerprints")
    html = f"<details><summary>All of them</summary>{inner}</details>"
    return Section("Settings and versions", "Enough to make this run again.", html)
