"""Models of a temporal graph behind one interface: a tensor and options in, vectors or scores out.

`toffee`, `toffee-`, `tsvd` and `rescal` give vectors; `memory` and `degree` are controls that only score
pairs: a model that is no better than them has learnt nothing that counting would not tell.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from toffee_dist.edges import Run, run_here
from toffee_dist.errors import ConfigError
from toffee_dist.models.base import Block, Fit, ModelEmbedding, ModelOptions, PairScores, reductions
from toffee_dist.models.controls import degree, memory
from toffee_dist.models.rescal import fit_rescal
from toffee_dist.models.toffee import fit_toffee, fit_toffee_minus
from toffee_dist.models.tsvd import fit_tsvd
from toffee_dist.tensor import TemporalTensor

__all__ = ["MODELS", "Block", "Model", "ModelEmbedding", "ModelOptions", "find_model", "fit", "reductions"]


class Model(NamedTuple):
    """Either vectors (`fit`) or only scores of pairs (`score`)."""

    name: str
    about: str
    fit: Fit | None = None
    score: PairScores | None = None


MODELS = {
    model.name: model
    for model in (
        Model("toffee", "X_k ≈ A_k R_k A_kᴴ, the zero frequency, in the canonical gauge", fit_toffee),
        Model("toffee-", "the same without regularisation (λ = 0)", fit_toffee_minus),
        Model("tsvd", "U·S of the zero frequency", fit_tsvd),
        Model("rescal", "X(t) ≈ A R_t Aᵀ, one A for all snapshots", fit_rescal),
        Model("memory", "control: was this pair seen before", score=memory),
        Model("degree", "control: the product of the degrees", score=degree),
    )
}


def find_model(name: str) -> Model:
    """Return the model of this name, or say which names there are."""
    if name not in MODELS:
        raise ConfigError("model", got=repr(name), allowed=", ".join(MODELS))
    return MODELS[name]


def fit(
    name: str,
    tensor: TemporalTensor,
    options: ModelOptions | None = None,
    run: Run = run_here,
    work: Path | None = None,
) -> ModelEmbedding:
    """Fit the embedding model of this name.

    Parameters
    ----------
    name
        One of `MODELS` that gives vectors.
    tensor
        The graph.
    options
        How; the defaults of `ModelOptions` where absent.
    run
        Where the tasks of a model that has several run.
    work
        A folder that every worker sees; needed where `run` goes to other processes, so that what is large
        travels through storage.

    Examples
    --------
    >>> X = TemporalTensor.from_events([0, 1, 2], [1, 2, 0], [0, 0, 1], directed=False)
    >>> fit("tsvd", X, ModelOptions(rank=2)).source.shape
    (3, 2)
    """
    model = find_model(name)
    if model.fit is None:
        allowed = ", ".join(other.name for other in MODELS.values() if other.fit)
        raise ConfigError("model that gives vectors", got=repr(name), allowed=allowed)
    return model.fit(tensor, options or ModelOptions(), run, work)
