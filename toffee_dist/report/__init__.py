"""The report: one page about a run, to look at rather than to read; small for graphs of any size."""

from toffee_dist.report.write import REPORT, ReportTask, try_report, write_report

__all__ = ["REPORT", "ReportTask", "try_report", "write_report"]
