"""The evaluation: are these embeddings any good on my graph, and better than the simple thing.

| module | question |
|---|---|
| events.py | rows in the order of time, cut into past and future |
| protocols.py | which pairs are asked about; saved and reusable |
| features.py | what two vectors say of a pair |
| classify.py | the classifier and its marks |
| compare.py | models × features × seeds, and the choice of settings on a validation part |
| steps.py | questions about one step: its links, its communities |
| report.py | tables, Parquet, JSON, plots |
| job.py | all of it, from options to a folder |
"""

from __future__ import annotations

from toffee_dist.evaluation.compare import Cell, EvaluateConfig, evaluate
from toffee_dist.evaluation.events import Events, read_events

__all__ = ["Cell", "EvaluateConfig", "Events", "evaluate", "read_events"]
