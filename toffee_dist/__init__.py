"""toffee_dist: embeddings of temporal graphs, as batch jobs on Dask."""

from toffee_dist.errors import ConfigError, InputError, NotFittedError, ToffeeError
from toffee_dist.model import Toffee
from toffee_dist.tensor import TemporalTensor
from toffee_dist.tproduct import tproduct, ttranspose

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "InputError",
    "NotFittedError",
    "TemporalTensor",
    "Toffee",
    "ToffeeError",
    "__version__",
    "tproduct",
    "ttranspose",
]
