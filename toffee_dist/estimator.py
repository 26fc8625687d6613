"""`Toffee`: the estimator, in scikit-learn's manner."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator

from toffee_dist.batch.remote_solver import RemoteSolver
from toffee_dist.errors import ConfigError, InputError, NotFittedError
from toffee_dist.ingest.frames import is_edges, read_edges
from toffee_dist.kernels import embedding
from toffee_dist.kernels.energy_basis import energy_basis
from toffee_dist.kernels.entries import ActiveRows
from toffee_dist.kernels.filter import TimeKernel, filter_rows
from toffee_dist.kernels.frequencies import FrequencyChoice, choose_freqs
from toffee_dist.kernels.gauge import CommonBasis, common_basis
from toffee_dist.kernels.patterns import learn_filter
from toffee_dist.kernels.solvers import SliceFactors, SliceReport, solve_slices
from toffee_dist.kernels.spectrum import count_freqs, node_energies
from toffee_dist.settings import Basis, Gauge, ModelSettings, Precision, SolverName, TrajectoryBy
from toffee_dist.tensor import Floats, as_tensor
from toffee_dist.tproduct import tproduct

# The settings declare the options; the signature is explicit because scikit-learn reads it.
_DEFAULT = ModelSettings()


class Toffee(BaseEstimator):  # type: ignore[misc]
    """Embeddings of the nodes of a temporal graph (Toffee, CIKM '21).

    Factorises the adjacency tensor, X ≈ A∗R∗Aᵀ under the t-product: in the Fourier domain along time, one
    problem X_k ≈ A_k R_k A_kᴴ a frequency. `fit` solves what the embedding needs, which is one frequency
    (a sum over time is the zero frequency); `trajectory`, `factors` and `score_pairs` solve the others
    that they need when they are first asked for.

    Parameters
    ----------
    rank
        Length of a vector. Above the number of nodes, the spare columns are zero.
    reg_a, reg_r
        λ_A and λ_R; both positive or both zero (the paper's Toffee⁻).
    solver
        ``auto``, ``als`` (the paper's), ``closed_form`` or ``compressed``; see `settings.SolverSettings`.
    gauge
        ``canonical``: axes from the singular vectors of the zero slice, comparable over time and seeds.
        ``none``: the paper's raw A·R, whose axes are arbitrary.
    reduce
        What one vector per node sums over: ``sum``, ``last:N`` or ``decay:HALF_LIFE``, in steps.
    trajectory_by
        ``filter``: each node's links, smoothed in time as far as they stand out of noise; ``als``: a low-rank
        fit per frequency, as in the paper, slower.
    denoise
        How strongly the filter removes noise: 1 reconstructs best, more is steadier.
    causal
        Whether the vector of a step uses nothing after it (given the basis, and entries that know nothing of
        it either: ``pair_weight="raw"``).
    basis
        Axes of the filtered trajectory: of the ``sum`` over time, or of all ``energy``.
    freqs
        Frequencies of a trajectory by ALS: ``auto``, ``all``, ``lowest:K`` or ``strongest:K``.
    tol
        A slice has converged when an iteration lowers its objective by less than this share of it.
    max_iter
        Iterations a slice at the most.
    precision
        ``single`` or ``double``, of n-sized arrays; r-sized algebra is always in double.
    bound
        Also compute each slice's lower bound, and report the gap to it.
    seed
        Of all random numbers; the same seed gives the same bytes.

    Attributes
    ----------
    embedding_ : (n_nodes, rank) float32
    embedding_target_ : (n_nodes, rank) float32
        Directed graphs in the canonical gauge: the nodes in their role as targets.
    node_ids_ : list
        Of edges: the id of every row.
    fit_report_ : polars.DataFrame
        A row per solved frequency: energy, objective, bound, gap, iterations, seconds, solver, converged.

    Examples
    --------
    >>> from toffee_dist import TemporalTensor, Toffee
    >>> X = TemporalTensor.from_events([0, 1, 2], [1, 2, 0], [0, 0, 1], directed=False)
    >>> Toffee(rank=2).fit(X).embedding_.shape
    (3, 2)
    """

    def __init__(
        self,
        rank: int = _DEFAULT.rank,
        *,
        reg_a: float = _DEFAULT.reg_a,
        reg_r: float = _DEFAULT.reg_r,
        solver: SolverName = _DEFAULT.solver,
        gauge: Gauge = _DEFAULT.gauge,
        reduce: str = _DEFAULT.reduce,
        trajectory_by: TrajectoryBy = _DEFAULT.trajectory_by,
        denoise: float = _DEFAULT.denoise,
        causal: bool = _DEFAULT.causal,
        basis: Basis = _DEFAULT.basis,
        freqs: str = _DEFAULT.freqs,
        tol: float = _DEFAULT.tol,
        max_iter: int = _DEFAULT.max_iter,
        precision: Precision = _DEFAULT.precision,
        bound: bool = _DEFAULT.bound,
        seed: int = _DEFAULT.seed,
    ) -> None:
        self.rank = rank
        self.reg_a = reg_a
        self.reg_r = reg_r
        self.solver = solver
        self.gauge = gauge
        self.reduce = reduce
        self.trajectory_by = trajectory_by
        self.denoise = denoise
        self.causal = causal
        self.basis = basis
        self.freqs = freqs
        self.tol = tol
        self.max_iter = max_iter
        self.precision = precision
        self.bound = bound
        self.seed = seed

    @classmethod
    def paper(cls, rank: int = _DEFAULT.rank, **options: Any) -> PaperToffee:
        """Return the paper's estimator to the letter: see `PaperToffee`."""
        return PaperToffee(rank, **{"solver": "als", "gauge": "none", "freqs": "all", **options})

    def fit(
        self, X: Any, y: None = None, *, client: Any = None, storage: str | None = None, **edges: Any
    ) -> Self:
        """Learn the embedding.

        Parameters
        ----------
        X
            A `TemporalTensor`, or anything that `as_tensor` reads; or edges: a path, glob, URL or list of
            them, or a pandas, polars or Arrow frame.
        y
            Ignored; there for scikit-learn.
        client
            A `distributed.Client` on which slices are solved (and edges read); None solves here.
        storage
            A folder that every worker of the client sees; where absent, a temporary one of this machine.
        **edges
            Of edges: what `toffee embed` takes, such as ``step="1h"``, ``source="from"`` or
            ``undirected=True``.
        """
        settings = ModelSettings(**self.get_params(deep=False))
        options = settings.solver_settings()
        self._solver = None if client is None else RemoteSolver(client, storage)
        if is_edges(X):
            if self._solver is None:
                tensor, self.node_ids_ = read_edges(X, edges, Path(tempfile.gettempdir()))
            else:
                tensor, self.node_ids_ = read_edges(X, edges, self._solver.path, self._solver.run)
        elif edges:
            raise ConfigError("options of edges", got=", ".join(edges), allowed="none for a tensor")
        else:
            tensor = as_tensor(X)
        weights = embedding.step_weights(self.reduce, tensor.n_steps)
        self._fitted_options, self._fitted_settings = options, settings
        self._filter_cache: tuple[NDArray[Any], ActiveRows, TimeKernel] | None = None
        self._fitted_freqs, self._fitted_gauge = self.freqs, self.gauge
        self._tensor = tensor
        self._slices: dict[int, SliceFactors] = {}
        self._basis_cache: CommonBasis | None = None
        self._choice_cache: FrequencyChoice | None = None
        if weights is None:
            self._reduced = self._solve([0])[0]
            basis = self._basis()
        else:
            # Fact 7: weights in time go in before the transform, so this is one slice again.
            if self._solver is None:
                self._reduced = next(solve_slices(tensor.with_step_weights(weights), [0], options))
            else:
                [self._reduced] = self._solver.solve(tensor, [0], options, self.reduce)
            basis = common_basis(self._reduced)
        self._directed_embedding: NDArray[np.float32] | None = None
        if self.gauge == "none":
            self.embedding_ = embedding.raw_embedding(self._reduced)
        else:
            self.embedding_ = basis.embedding()
            if tensor.directed:
                self._directed_embedding = basis.embedding_target()
        return self

    def _repr_html_(self) -> str:
        """Say in a notebook what was asked for and, after `fit`, what was found."""
        # Saves start-up time.
        from toffee_dist.results.tables import html_facts

        changed = {k: v for k, v in self.get_params().items() if v != getattr(type(self)(), k)}
        facts: dict[str, object] = {
            "parameters": ", ".join(f"{k}={v!r}" for k, v in changed.items()) or "defaults"
        }
        if not hasattr(self, "_reduced"):
            return html_facts("Toffee", facts | {"state": "not fitted"})
        tensor = self._tensor
        facts |= {
            "nodes": f"{tensor.n_nodes:,}, {'directed' if tensor.directed else 'undirected'}",
            "steps": f"{tensor.n_steps:,}",
            "entries": f"{tensor.n_entries:,} on {tensor.n_pairs:,} pairs",
            "embedding_": self.embedding_.shape,
            "solved": f"{len(self.fit_report_)} of {count_freqs(tensor.n_steps)} frequencies",
        }
        return html_facts("Toffee", facts)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        # scikit-learn's own would draw a diagram of one box instead.
        return {"text/plain": repr(self), "text/html": self._repr_html_()}

    @property
    def embedding_target_(self) -> NDArray[np.float32]:
        """The canonical embedding of the nodes as targets; for directed graphs."""
        self._check_fitted()
        if self._directed_embedding is None:
            raise NotFittedError(
                "embedding_target_",
                got="an undirected graph" if not self._tensor.directed else f"gauge={self._fitted_gauge!r}",
                allowed="a directed graph in the canonical gauge",
                remedy="Use embedding_, where both roles are the same.",
            )
        return self._directed_embedding

    @property
    def fit_report_(self) -> pl.DataFrame:
        """A row per solved frequency in the order of k, after that of the embedding."""
        self._check_fitted()
        reports = {k: f.report for k, f in sorted(self._slices.items())}
        rows = [
            self._reduced.report,
            *(r for r in reports.values() if r is not self._reduced.report),
        ]
        return pl.DataFrame([asdict(row) for row in rows], schema=_REPORT_SCHEMA)

    @property
    def freqs_(self) -> FrequencyChoice:
        """The frequencies that the trajectory uses, their rhythms and their share of the energy."""
        self._check_fitted()
        if self._choice_cache is None:
            self._choice_cache = choose_freqs(self._tensor, self._fitted_freqs, self._basis())
        return self._choice_cache

    @property
    def patterns_(self) -> Floats:
        """Patterns in time that many nodes share, (n_steps, count): the filter sets them aside."""
        self._check_fitted()
        return self._filter()[2].aside[0]

    def trajectory(self, nodes: ArrayLike | None = None, steps: ArrayLike | None = None) -> NDArray[Any]:
        """Return a vector per step and node, (n_steps, n_nodes, rank), in the common basis.

        Its sum over the steps is X_0 V, or by ALS U·S of the zero slice: the canonical embedding up to a
        scale of each column. By ALS, the frequencies of ``freqs`` that are not solved yet are solved now.
        With ``gauge="none"``, the paper's raw inverse transform of A_k R_k.

        Parameters
        ----------
        nodes, steps
            Rows and steps wanted, default all.
        """
        self._check_fitted()
        nodes = None if nodes is None else self._check_rows("nodes", nodes, self._tensor.n_nodes)
        steps = None if steps is None else self._check_rows("steps", steps, self._tensor.n_steps)
        if self._fitted_settings.filtered:
            _, rows, kernel = self._filter()
            rows = rows if nodes is None else rows.take(np.asarray(nodes))
            wanted = np.arange(self._tensor.n_steps) if steps is None else np.asarray(steps)
            return filter_rows(rows, kernel, wanted).transpose(1, 0, 2)
        slices = self._solve(self.freqs_.freqs)
        V = None if self._fitted_gauge == "none" else self._basis().V
        return embedding.trajectory(slices, V, self._tensor.n_steps, nodes, steps)

    def factors(self, domain: Literal["time", "frequency"] = "time") -> tuple[NDArray[Any], NDArray[Any]]:
        """Return A and R, from all frequencies (solved now where they are not yet).

        Parameters
        ----------
        domain
            ``time``: A (n_steps, n_nodes, rank) and R (n_steps, rank, rank), real, X ≈ A∗R∗Aᵀ;
            ``frequency``: A (n_freqs, …) and R (n_freqs, …), complex, X_k ≈ A_k R_k A_kᴴ.
        """
        self._check_fitted()
        if domain not in ("time", "frequency"):
            raise ConfigError("domain", got=repr(domain), allowed="time, frequency")
        slices = self._solve(range(count_freqs(self._tensor.n_steps)))
        if domain == "time":
            return embedding.factors_in_time(slices, self._tensor.n_steps)
        return np.stack([f.A for f in slices.values()]), np.stack([f.R for f in slices.values()])

    def spectrum(self) -> Floats:
        """Return the energy of every node at every frequency, (n_nodes, n_freqs); solves nothing."""
        self._check_fitted()
        return node_energies(self._tensor)

    def score_pairs(self, source: ArrayLike, target: ArrayLike, step: int | None = None) -> Floats:
        """Return the model's own score of links, entries of A∗R∗Aᵀ.

        Parameters
        ----------
        source, target
            Rows of the pairs.
        step
            A step: the entry of the filtered trajectory, or by ALS of the frequencies of ``freqs``; None sums
            over time as ``reduce`` says.
        """
        self._check_fitted()
        i = self._check_rows("source", source, self._tensor.n_nodes)
        j = self._check_rows("target", target, self._tensor.n_nodes)
        if len(i) != len(j):
            raise InputError(
                "source and target",
                got=f"{len(i)} and {len(j)}",
                allowed="equal lengths",
                remedy="Give one target for each source.",
            )
        if step is None:
            return embedding.pair_scores({0: self._reduced}, i, j, self._tensor.n_steps, None)
        self._check_rows("step", [step], self._tensor.n_steps)
        if self._fitted_settings.filtered:
            V, rows, kernel = self._filter()
            Z = filter_rows(rows, kernel, np.array([step]))[:, 0]
            scores = np.einsum("pr,pr->p", Z[i], V[j])
            if not self._tensor.directed:
                scores = (scores + np.einsum("pr,pr->p", Z[j], V[i])) / 2
            return np.asarray(scores, dtype=np.float64)
        slices = self._solve(self.freqs_.freqs)
        return embedding.pair_scores(slices, i, j, self._tensor.n_steps, step)

    def _solve(self, freqs: Sequence[int]) -> dict[int, SliceFactors]:
        """Return these slices, solving the ones that are missing."""
        missing = [k for k in freqs if k not in self._slices]
        solve = solve_slices if self._solver is None else self._solver.solve
        for factors in solve(self._tensor, missing, self._fitted_options):
            self._slices[factors.k] = factors
        return {k: self._slices[k] for k in freqs}

    def _basis(self) -> CommonBasis:
        if self._basis_cache is None:
            self._basis_cache = common_basis(self._solve([0])[0])
        return self._basis_cache

    def _filter(self) -> tuple[NDArray[Any], ActiveRows, TimeKernel]:
        """Return the basis, the rows in it, and the kernel in time."""
        if self._filter_cache is None:
            settings, tensor = self._fitted_settings, self._tensor
            energy = settings.basis == "energy"
            V = energy_basis(tensor, self._fitted_options) if energy else self._basis().V
            rows, kernel = learn_filter(tensor, V, causal=settings.causal, strength=settings.denoise)
            self._filter_cache = V, rows, kernel
        return self._filter_cache

    def _check_fitted(self) -> None:
        if not hasattr(self, "_reduced"):
            raise NotFittedError(
                "this Toffee is not fitted",
                got="no results yet",
                allowed="results after fit(tensor)",
                remedy="Call fit first.",
            )

    @staticmethod
    def _check_rows(name: str, data: ArrayLike, size: int) -> NDArray[np.int64]:
        rows = np.atleast_1d(np.asarray(data))
        if rows.dtype.kind not in "iu" or rows.ndim != 1:
            raise InputError(
                name,
                got=f"{rows.dtype} of shape {rows.shape}",
                allowed="integers",
                remedy="Pass rows of the tensor; node_ids_ has the id of each.",
            )
        wrong = (rows < 0) | (rows >= size)
        if wrong.any():
            raise InputError(
                name, got=rows[wrong][0], allowed=f"0 to {size - 1}", remedy="Rows and steps count from 0."
            )
        return rows.astype(np.int64)


class PaperToffee(Toffee):
    """Toffee as the paper writes it: all slices by ALS, A and R back in time, Σ_t A∗R (Eq. 5), raw axes.

    Its ``embedding_`` is, to rounding, A_0·R_0, for which `Toffee` solves one slice. Edges are read as counts
    with their raw totals. λ is what is given; the paper's grid is 1e-4, 1e-3, 1e-2, 1e-1, which
    ``toffee evaluate --grid reg=…`` chooses from.

    Examples
    --------
    >>> from toffee_dist import TemporalTensor, Toffee
    >>> X = TemporalTensor.from_events([0, 1, 2], [1, 2, 0], [0, 0, 1], directed=False)
    >>> Toffee.paper(2).fit(X).embedding_.shape
    (3, 2)
    """

    def fit(
        self, X: Any, y: None = None, *, client: Any = None, storage: str | None = None, **edges: Any
    ) -> Self:
        """Learn the embedding from all slices; parameters as in `Toffee.fit`."""
        if is_edges(X):
            edges = {"entry": "count", "pair_weight": "raw", **edges}
        super().fit(X, y, client=client, storage=storage, **edges)
        A, R = self.factors()
        product = tproduct(*(np.moveaxis(array.astype(np.float64), 0, 2) for array in (A, R)))
        self.embedding_ = product.sum(axis=2).astype(np.float32)
        return self


_COLUMN_TYPES = {
    "int": pl.Int64,
    "float": pl.Float64,
    "float | None": pl.Float64,
    "str": pl.String,
    "bool": pl.Boolean,
}
_REPORT_SCHEMA = {field.name: _COLUMN_TYPES[str(field.type)] for field in fields(SliceReport)}
