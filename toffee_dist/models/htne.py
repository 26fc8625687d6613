"""HTNE (Zuo et al., KDD '18): the neighbours of a node as a Hawkes process with attention over its history.

Links are read both ways, as the public code reads them: one vector per node, whatever its role. The history
of a link are the last links of its node before it, in the order of time and then of the neighbours' rows.
Time runs from 0 (the first link) to 1 (the last): raw seconds break the kernel.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from toffee_dist.kernels.hawkes import train_hawkes
from toffee_dist.kernels.walks import TimedLinks
from toffee_dist.models.base import Cost, FitContext, FitReport, ReductionTask, fit_reductions, one_role
from toffee_dist.settings import FitSettings
from toffee_dist.storage.tensors import Sizes, open_tensor

# The public code's.
NEGATIVES, EPOCHS, RATE = 10, 20, 0.01


def fit_htne(context: FitContext) -> FitReport:
    """Fit HTNE, in one task: stochastic gradients follow one another."""
    return fit_reductions(context, fit_links)


def fit_links(task: ReductionTask) -> FitReport:
    """Learn from all links, and leave the vectors."""
    began = time.perf_counter()
    options = task.options
    vectors, losses = train_hawkes(
        TimedLinks.of(open_tensor(task.tensor), both_ways=True),
        options.rank,
        history=options.history,
        negatives=options.negatives or NEGATIVES,
        epochs=options.epochs or EPOCHS,
        rate=options.learning_rate or RATE,
        decaying=options.kernel == "decaying",
        seed=options.seed,
    )
    seconds = time.perf_counter() - began
    report = FitReport(losses[-1] if losses else None, len(losses), seconds, converged=True)
    task.write(one_role(vectors), report)
    return report


# Rough, on the safe side: on the six graphs of the paper the estimate is 1.9 to 2.5 times what was measured
# (benchmarks/paper.py).
# Seconds per link, candidate (the neighbour and the negatives), term (the node and its history) and column;
# and those of the compiler.
TERM_SECONDS, COMPILE_SECONDS = 6e-10, 5.0
# Bytes of the links while they are sorted, and of a process with the compiler.
LINK_BYTES, COMPILER_BYTES = 96, 120 * 2**20


def htne_costs(sizes: Sizes, directed: bool, options: FitSettings) -> Sequence[Cost]:
    """Return what a fit takes."""
    links = sizes.n_entries * (2 if directed else 1)
    terms = (1 + (options.negatives or NEGATIVES)) * (1 + options.history) * options.rank
    tall = 4 * sizes.n_nodes * options.rank
    seconds = TERM_SECONDS * links * (options.epochs or EPOCHS) * terms + COMPILE_SECONDS
    bytes_ = COMPILER_BYTES + LINK_BYTES * links + 4 * tall
    return [Cost("htne", "stochastic gradients, one link after the other", 1, bytes_, seconds, tall)]
