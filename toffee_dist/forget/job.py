"""`toffee forget`: erase nodes from every run of a folder, and keep them out of later ones.

    list → receipt → new versions of all runs → pointer → old runs, work, logs removed → receipt done

A run is never changed where readers see it: each gets a new version under a new name, and one pointer leads
to them all. Cut short anywhere, the same command goes on: the receipt says how far it is.
"""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from toffee_dist.errors import ConfigError, InputError, UnfinishedError
from toffee_dist.forget import rewrite
from toffee_dist.forget.rewrite import Erasing, find_rows
from toffee_dist.progress import Progress
from toffee_dist.refresh.log import LOG
from toffee_dist.storage.exports import list_exports
from toffee_dist.storage.files import (
    link_or_copy,
    read_text,
    remove_file,
    remove_tree,
    replacing,
    seal_file,
)
from toffee_dist.storage.forgotten import (
    RECEIPTS,
    ErasedFile,
    ErasedRun,
    Forgotten,
    Receipt,
    find_unfinished_erasure,
    forget_ids,
)
from toffee_dist.storage.lock import hold_lock
from toffee_dist.storage.manifest import FileRecord, IndexRecord, read_record, write_record
from toffee_dist.storage.runs import RunFolder, get_run, list_runs, point_to, read_pointer
from toffee_dist.tasks import Say

MOST_IDS = 100_000


@dataclass(frozen=True)
class Erased:
    """What an erasure did, or would do."""

    receipt: Receipt
    path: str
    dry_run: bool = False

    def to_json(self) -> dict[str, object]:
        """Return plain types."""
        return {"dry_run": self.dry_run, "receipt": self.path, **self.receipt.to_json()}


def forget(
    out: Path, ids: Sequence[str], *, dry_run: bool = False, progress: Progress | None = None
) -> Erased:
    """Erase nodes from every run of a folder.

    Parameters
    ----------
    out
        The folder of the runs.
    ids
        As text; those of runs whose ids are numbers are read as numbers.
    dry_run
        Whether to say only what would be done.
    progress
        Is told.

    Raises
    ------
    ConfigError
        Where there are no ids, or too many at once.
    InputError
        Where there is no folder of runs, or a run is damaged.
    UnfinishedError
        Where an earlier erasure of other ids is to be finished first.
    """
    wanted, say = list(dict.fromkeys(ids)), (progress or Progress()).say
    if not 0 < len(wanted) <= MOST_IDS:
        raise ConfigError(
            "ids",
            got=f"{len(wanted):,}",
            allowed=f"1 to {MOST_IDS:,} at once",
            remedy="Name them, or --file.",
        )
    if read_pointer(out) is None:
        raise InputError(
            "no runs to erase from",
            got=str(out),
            allowed="a folder with latest.json",
            remedy="Name the folder that toffee embed or toffee refresh wrote with --out.",
        )
    if dry_run:
        names = {name: ("", 0) for name in wanted}
        runs = [ErasedRun(old=run.run_id, new="", nodes=len(find_rows(run, names))) for run in _complete(out)]
        receipt = Receipt(begun=_now(), digests=(), names=(), runs=runs, exports=list_exports(out))
        return Erased(receipt.replaced(removed=_leftovers(out)), "", dry_run=True)
    with hold_lock(out):
        known = forget_ids(out, wanted)
        path, receipt = _begin(out, wanted, known)
        names = _names(wanted, known, receipt)
        if receipt.state == "writing":
            receipt = _write_versions(out, path, receipt, names, say)
            _switch(out, receipt)
            receipt = _note(path, receipt.replaced(state="switched", removed=_leftovers(out)))
        say("removing what is left of the old runs")
        _remove_rest(out, receipt, names)
        receipt = _note(path, receipt.replaced(state="done", finished=_now()))
    return Erased(receipt, str(path))


def read_id_file(path: Path) -> list[str]:
    """Return the ids of a text file, one per line.

    Raises
    ------
    InputError
        Where it cannot be read.
    """
    try:
        return [line for line in read_text(path).splitlines() if line]
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read ids from {path}",
            got=str(error),
            allowed="a text file with one id per line",
            remedy="Check its name and its encoding, which must be UTF-8.",
        ) from None


def _begin(out: Path, ids: Sequence[str], known: Forgotten) -> tuple[Path, Receipt]:
    """Return the receipt of this erasure: one that was cut short, or a new one."""
    digests = tuple(sorted(map(known.digest, ids)))
    unfinished = find_unfinished_erasure(out)
    if unfinished is not None:
        receipt = read_record(unfinished, Receipt)
        if receipt.digests != digests:
            raise UnfinishedError(
                "an earlier erasure was cut short",
                got=f"{unfinished.name}, of {len(receipt.digests):,} other ids",
                remedy="Finish it first: toffee forget OUT with the ids that were given then.",
            )
        return unfinished, receipt
    moment = datetime.now(UTC)
    runs = [ErasedRun(old=run.run_id, new=_new_name(run.run_id)) for run in _complete(out)]
    names = tuple(f"forgotten-{secrets.token_hex(8)}" for _ in digests)
    receipt = Receipt(begun=_now(), digests=digests, names=names, runs=runs, exports=list_exports(out))
    path = out / RECEIPTS / f"{moment:%Y%m%dT%H%M%S.%f}-{uuid.uuid4().hex[:4]}.json"
    path.parent.mkdir(exist_ok=True)
    return path, _note(path, receipt)


def _names(ids: Sequence[str], known: Forgotten, receipt: Receipt) -> dict[str, tuple[str, int]]:
    """Return what each id is called from now on: a word, and a number that no one has."""
    words = dict(zip(receipt.digests, receipt.names, strict=True))
    found = {}
    for name in ids:
        word = words[known.digest(name)]
        # Far below zero, and for ids without a sign near the top: see `Erasing`.
        found[name] = (word, -(2**63) + int(word[-15:], 16))
    return found


def _complete(out: Path) -> list[RunFolder]:
    return [run for run in list_runs(out) if run.complete]


def _new_name(name: str) -> str:
    """Return another name of the same age."""
    moment, _, word = name.partition("-")
    return f"{moment}-{(int(word, 16) + 1 + secrets.randbelow(0xFFFE)) % 0x10000:04x}"


def _write_versions(
    out: Path, path: Path, receipt: Receipt, names: Mapping[str, tuple[str, int]], say: Say
) -> Receipt:
    """Write every run once more, without the nodes; note what was changed."""
    mapping = {run.old: run.new for run in receipt.runs}
    runs = []
    for number, erased in enumerate(receipt.runs):
        old, new = get_run(out, erased.old), get_run(out, erased.new)
        if not (new.complete and erased.files):
            # What is there of a version that was cut short may be half a file on a store.
            remove_tree(new.path)
            erased = write_version(old, new, names, mapping)
        runs.append(erased)
        receipt = _note(path, receipt.replaced(runs=[*runs, *receipt.runs[number + 1 :]]))
        say(f"run {erased.old}: {erased.nodes:,} nodes erased, now {erased.new}")
    return receipt


def write_version(
    old: RunFolder, new: RunFolder, names: Mapping[str, tuple[str, int]], mapping: Mapping[str, str]
) -> ErasedRun:
    """Write a run under another name, without some nodes; its manifest comes last."""
    manifest = old.read_manifest()
    erasing = Erasing(names, find_rows(old, names))
    erased: dict[str, int] = {}
    compact, active = False, getattr(manifest.config, "dense_nodes", "all") == "active"
    for file in sorted(old.result_files("*")):
        name = file.relative_to(old.path).as_posix()
        to = new.path / _renamed(name, mapping)
        to.parent.mkdir(parents=True, exist_ok=True)
        if name.startswith("compact/"):
            compact = True
        elif name.endswith(".parquet"):
            remove = active and name.startswith("trajectory/")
            erased[name] = rewrite.rewrite_table(file, to, erasing, remove=remove)
        elif name == old.changes.name:
            erased[name] = rewrite.rewrite_changes(file, to, erasing)
        elif name.endswith(".json"):
            erased[name] = rewrite.rewrite_json(file, to, names)
        elif name != old.report.name:
            link_or_copy(file, to)
    if compact:
        dropped = rewrite.rewrite_compact(old.compact, new.compact, erasing.rows)
        erased |= {file.relative_to(old.path).as_posix(): dropped for file in old.compact.glob("*")}
    for file in sorted(old.path.glob("index/*.npy")):
        record = old.index_record(file.stem)
        # Without its record an index is not read, and not needed.
        if record.exists():
            new.index(file.stem).parent.mkdir(exist_ok=True)
            name = file.relative_to(old.path).as_posix()
            erased[name] = rewrite.rewrite_rows(file, new.index(file.stem), erasing.rows)
            said = read_record(record, IndexRecord).replaced(run_id=new.run_id)
            write_record(new.index_record(file.stem), said)
    changed = rewrite.rewrite_manifest(manifest, erasing, mapping)
    if old.report.exists():
        # For the start-up time of commands without one: Bokeh and scikit-learn take two seconds.
        from toffee_dist.report.write import write_report

        write_report(new, changed, new.report)
        erased[old.report.name] = len(erasing.rows)
    files = {file.relative_to(new.path).as_posix(): _seal(file) for file in new.result_files("*")}
    new.write_manifest(changed.replaced(files=files))
    erased[old.manifest.name] = len(erasing.rows)
    listed = []
    for name, rows in sorted(erased.items()):
        was, now = manifest.files.get(name) or _seal(old.path / name), _seal(new.path / name)
        if rows and was != now:
            listed.append(ErasedFile(name=name, rows=rows, before=was, after=now))
    return ErasedRun(old=old.run_id, new=new.run_id, nodes=len(erasing.rows), files=listed)


def _seal(path: Path) -> FileRecord:
    return FileRecord(**seal_file(path)._asdict())


def _renamed(name: str, mapping: Mapping[str, str]) -> str:
    """Return what a file is called in the new version: some are named after earlier runs."""
    earlier = name.removeprefix("kept-").removesuffix(".npy")
    return f"kept-{mapping[earlier]}.npy" if name == f"kept-{earlier}.npy" and earlier in mapping else name


def _switch(out: Path, receipt: Receipt) -> None:
    """Let the pointer lead to the new versions, at once."""
    pointer = read_pointer(out)
    assert pointer is not None
    mapping = {run.old: run.new for run in receipt.runs}
    if pointer.run_id in mapping:
        withdrawn = tuple(mapping.get(name, name) for name in pointer.withdrawn)
        point_to(get_run(out, mapping[pointer.run_id]), withdrawn)


def _leftovers(out: Path) -> list[str]:
    """Return what is removed without a new version: it may name the nodes, or cannot be told apart."""
    found = [f"runs/{run.run_id}" for run in list_runs(out) if not run.complete and run.begun]
    for run in _complete(out):
        for folder in (run.work, run.warm, run.diagnostics):
            if folder.exists():
                found.append(f"runs/{run.run_id}/{folder.name}")
    return found


def _remove_rest(out: Path, receipt: Receipt, names: Mapping[str, tuple[str, int]]) -> None:
    new = {run.new for run in receipt.runs}
    gone = [get_run(out, run.old) for run in receipt.runs]
    gone += [run for run in list_runs(out) if not run.complete and run.run_id not in new]
    for run in gone:
        # Without them it is no run any more, whatever happens then.
        for file in (run.manifest, run.job):
            if file.exists():
                remove_file(file)
        run.remove(run.path)
    for folder in sorted(out.glob(".fold-*")):
        remove_tree(folder)
    log = out / LOG
    if log.exists():
        text = log.read_text(encoding="utf-8")
        lines = [_hide_in_line(line, names) for line in text.splitlines()]
        if lines != text.splitlines():
            with replacing(log) as temporary:
                temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _hide_in_line(line: str, names: Mapping[str, tuple[str, int]]) -> str:
    """Return a line of the log whose reason names none of the nodes."""
    try:
        found = json.loads(line)
        reason = str(found["reason"])
    except (ValueError, KeyError, TypeError):
        return line
    hidden = rewrite.hide_names(reason, names)
    return line if hidden == reason else json.dumps(found | {"reason": hidden})


def _note(path: Path, receipt: Receipt) -> Receipt:
    write_record(path, receipt)
    return receipt


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
