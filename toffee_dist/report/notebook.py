"""The page of a run inside a notebook: in a frame that can reach nothing, not even the notebook."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from toffee_dist.report.gather import gather
from toffee_dist.report.write import make_page
from toffee_dist.storage.manifest import Manifest
from toffee_dist.storage.runs import RunFolder


@dataclass(frozen=True)
class Explorer:
    """The page of a run, which shows itself where it is the last line of a cell."""

    run: RunFolder
    manifest: Manifest
    height: int

    def __repr__(self) -> str:
        return f"The page of run {self.run.run_id}; in a notebook it shows itself, else: toffee report --open"

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own origin: its script runs there, and sees nothing else."""
        page = escape(make_page(gather(self.run, self.manifest)))
        return (
            f'<iframe srcdoc="{page}" sandbox="allow-scripts" width="100%" height="{self.height}" '
            'style="border:0" title="The page of a run"></iframe>'
        )
