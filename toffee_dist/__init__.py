"""toffee_dist: embeddings of temporal graphs, as batch jobs on Dask."""

from typing import TYPE_CHECKING, Any

from toffee_dist.errors import ConfigError, InputError, NotFittedError, ToffeeError
from toffee_dist.tensor import TemporalTensor
from toffee_dist.tproduct import tproduct, ttranspose

if TYPE_CHECKING:
    from toffee_dist.estimator import Toffee
    from toffee_dist.results.run import Run, load_run

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "InputError",
    "NotFittedError",
    "Run",
    "TemporalTensor",
    "Toffee",
    "ToffeeError",
    "__version__",
    "load_run",
    "tproduct",
    "ttranspose",
]


def __getattr__(name: str) -> Any:
    # scikit-learn takes two seconds to import, which a command or a worker need not wait for.
    if name == "Toffee":
        # Saves start-up time.
        from toffee_dist.estimator import Toffee

        return Toffee
    if name in ("Run", "load_run"):
        # Saves start-up time.
        from toffee_dist.results import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
