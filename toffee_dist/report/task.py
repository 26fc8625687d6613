"""The task that writes the report of a run before it is published."""

from __future__ import annotations

from dataclasses import dataclass

from toffee_dist.storage.manifest import Manifest, read_record
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.runs import RunFolder


@dataclass(frozen=True)
class ReportTask:
    """The report of a run that is about to be published; `manifest` is a file with what will be its own."""

    run: str
    manifest: str


def try_report(task: ReportTask) -> str:
    """Write a run's report; return what went wrong, in one line, or nothing.

    A picture that cannot be drawn is no reason to lose the vectors: nothing is raised.
    """
    try:
        # For the start-up time of jobs and workers: Bokeh and scikit-learn take two seconds.
        from toffee_dist.report.write import write_report

        run = RunFolder.at(task.run)
        write_report(run, read_record(to_path(task.manifest), Manifest), run.report)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""
