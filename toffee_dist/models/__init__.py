"""Models of a temporal graph behind one interface: a staged tensor and options in, vectors on storage out.

The eight systems of the paper give vectors: `toffee`, `toffee-`, `tsvd`, `rescal`, `tne`, `ctdne`, `htne` and
`hnip`; `toffee-paper` is the first as the paper computes it. `memory`, `degree` and `pair-count` are controls
that only score pairs: a model that is no better than them has learnt nothing that counting would not tell.
Models in time (`in_time.py`) give a vector per node and step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from toffee_dist.errors import ConfigError
from toffee_dist.models.base import (
    FitContext,
    FitReport,
    Model,
    ModelEmbedding,
    reductions,
)
from toffee_dist.models.controls import degree, memory
from toffee_dist.models.ctdne import ctdne_costs, fit_ctdne
from toffee_dist.models.hnip import fit_hnip, hnip_costs
from toffee_dist.models.htne import fit_htne, htne_costs
from toffee_dist.models.in_time import (
    fit_als,
    fit_filter,
    fit_filter_pairs,
    fit_ipp,
    fit_snapshot,
    fit_static,
    fit_uase,
    pair_count,
)
from toffee_dist.models.paper import fit_paper, paper_costs
from toffee_dist.models.rescal import fit_rescal, rescal_costs
from toffee_dist.models.rivals import fit_aligned, fit_omni, fit_tne_in_time, fit_urlse
from toffee_dist.models.tne import fit_tne, tne_costs
from toffee_dist.models.toffee import fit_toffee, fit_toffee_minus
from toffee_dist.models.tsvd import fit_tsvd, tsvd_costs
from toffee_dist.settings import FitSettings
from toffee_dist.storage.files import scratch
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.tensors import stage_tensor
from toffee_dist.tasks import RunTasks, run_here
from toffee_dist.tensor import TemporalTensor

__all__ = [
    "MODELS",
    "FitContext",
    "FitReport",
    "Model",
    "ModelEmbedding",
    "find_model",
    "fit",
    "fit_staged",
    "reductions",
]

# Steps of IPP's kernel, from hardly any smoothing to a tenth of a year of days.
BANDWIDTHS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
# From a plain product to a cosine.
POWERS = (0.0, 0.5, 0.75, 1.0)

MODELS = {
    model.name: model
    for model in (
        Model(
            "toffee",
            "X_k ≈ A_k R_k A_kᴴ, the zero frequency, in the canonical gauge",
            fit_toffee,
            from_zero_slice=True,
            fit_in_time=fit_filter,
            powers=POWERS,
        ),
        Model("toffee-", "the same without regularisation (λ = 0)", fit_toffee_minus, from_zero_slice=True),
        Model(
            "toffee-paper",
            "the paper to the letter: all slices by ALS, A∗R summed over time, raw axes",
            fit_paper,
            costs=paper_costs,
            two_roles=False,
            reduces=False,
            weights=("count", "raw"),
        ),
        Model("tsvd", "U·S of the zero frequency", fit_tsvd, costs=tsvd_costs),
        Model("rescal", "X(t) ≈ A R_t Aᵀ, one A for all snapshots", fit_rescal, costs=rescal_costs),
        Model(
            "tne",
            "Z Zᵀ of every snapshot, non-negative and smooth; the last snapshot's Z",
            fit_tne,
            costs=tne_costs,
            two_roles=False,
            reduces=False,
            fit_in_time=fit_tne_in_time,
        ),
        Model(
            "ctdne",
            "skip-gram on walks that respect time",
            fit_ctdne,
            costs=ctdne_costs,
            two_roles=False,
            reduces=False,
        ),
        Model(
            "htne",
            "neighbours as a Hawkes process with attention over the history",
            fit_htne,
            costs=htne_costs,
            two_roles=False,
            reduces=False,
        ),
        Model(
            "hnip",
            "reconstruction: proximity on decayed walks, guided auto-encoder",
            fit_hnip,
            costs=hnip_costs,
            two_roles=False,
            reduces=False,
        ),
        Model("memory", "control: was this pair seen before", score=memory),
        Model("degree", "control: the product of the degrees", score=degree),
        Model("pair-count", "control: how often this pair was seen", score=pair_count),
        Model(
            "toffee-pairs",
            "in time: toffee, and what known pairs tell",
            fit_in_time=fit_filter_pairs,
            powers=POWERS,
        ),
        Model(
            "toffee-als", "in time: ALS of the frequencies that stand out of the noise", fit_in_time=fit_als
        ),
        Model("uase", "in time: unfolded SVD, of all steps at once", fit_in_time=fit_uase, powers=POWERS),
        Model(
            "ipp",
            "in time: intensity profile projection",
            fit_in_time=fit_ipp,
            smoothing=BANDWIDTHS,
            powers=POWERS,
        ),
        Model("urlse", "in time: UASE of regularised Laplacians", fit_in_time=fit_urlse, powers=POWERS),
        Model("omni", "in time: omnibus matrix of all steps", fit_in_time=fit_omni),
        Model("snapshot", "in time: SVD of each step alone", fit_in_time=fit_snapshot),
        Model("aligned", "in time: the same, each turned onto the step before", fit_in_time=fit_aligned),
        Model("static", "in time: the sum, the same at every step", fit_in_time=fit_static, powers=POWERS),
    )
}


def find_model(name: str) -> Model:
    """Return the model of this name, or say which names there are."""
    if name not in MODELS:
        raise ConfigError("model", got=repr(name), allowed=", ".join(MODELS))
    return MODELS[name]


def fit_staged(name: str, context: FitContext) -> FitReport:
    """Fit the embedding model of this name to a staged tensor; the vectors are in the context's folder.

    What is finished there is not computed again.
    """
    model = find_model(name)
    if model.fit is None:
        allowed = ", ".join(other.name for other in MODELS.values() if other.fit)
        raise ConfigError("model that gives vectors", got=repr(name), allowed=allowed)
    check_reduce(model, context.options.reduce)
    to_path(context.folder).mkdir(parents=True, exist_ok=True)
    return model.fit(context)


def check_reduce(model: Model, reduce: str) -> None:
    """Refuse a reduction over time for a model that has none."""
    if reduce != "sum" and not model.reduces:
        raise ConfigError(
            f"reduce of model {model.name}",
            got=repr(reduce),
            allowed="sum, the default: it does not sum over time",
            remedy="To learn from recent links only, read them with --last or --since.",
        )


def fit(
    name: str,
    tensor: TemporalTensor,
    options: FitSettings | None = None,
    run: RunTasks = run_here,
    work: Path | None = None,
) -> ModelEmbedding:
    """Fit the embedding model of this name to a tensor in memory, through a folder that is gone afterwards.

    Parameters
    ----------
    name
        One of `MODELS` that gives vectors.
    tensor
        The graph.
    options
        How; the defaults of `FitSettings` where absent.
    run
        Where the tasks run.
    work
        A folder that every worker sees; needed where `run` goes to other machines.

    Examples
    --------
    >>> X = TemporalTensor.from_events([0, 1, 2], [1, 2, 0], [0, 0, 1], directed=False)
    >>> fit("tsvd", X, FitSettings(rank=2)).source.shape
    (3, 2)
    """
    with scratch(work or Path(tempfile.gettempdir()), "toffee-", mode=0o700) as folder:
        stage_tensor(tensor, folder / "tensor")
        context = FitContext(str(folder / "tensor"), str(folder / "fit"), options or FitSettings(), run)
        return context.read_embedding(fit_staged(name, context))
