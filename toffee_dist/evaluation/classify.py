"""The classifier on top of the features, and its marks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from toffee_dist.errors import ConfigError
from toffee_dist.evaluation.features import Features
from toffee_dist.evaluation.protocols import Examples
from toffee_dist.tensor import Floats

Classifier = Literal["logistic", "trees"]
# Where a score bends for the logistic regression: at these quantiles of the training part.
HINGES = np.linspace(0, 1, 9)[1:-1]
N_TREES = 200


@dataclass(frozen=True)
class Marks:
    """How good the predictions of the test part are.

    ``fresh_f1`` is the Micro-F1 of those test examples whose pair is not in the classifier's training part
    too: repeated links put most pairs of ``link-paper`` into both.
    """

    micro_f1: float
    roc_auc: float
    average_precision: float
    fresh_f1: float


def check_classifier(name: str) -> Classifier:
    """Return the classifier of this name."""
    for classifier in get_args(Classifier):
        if classifier == name:
            return classifier  # type: ignore[no-any-return]
    raise ConfigError("classifier", got=repr(name), allowed=", ".join(get_args(Classifier)))


def mark(features: Features, examples: Examples, classifier: Classifier = "logistic", seed: int = 0) -> Marks:
    """Train on the training part, and score the test part.

    Parameters
    ----------
    classifier
        ``logistic``: on standardised operators, and on scores as piecewise linear functions; the paper's.
        ``trees``: extremely randomised trees on the columns as they are.
    seed
        Of the trees.
    """
    known = examples.train > 0
    weights = examples.train[known]
    labels = examples.linked[known]
    columns: NDArray[Any]
    train: Callable[..., Any]
    if classifier == "logistic":
        columns, train = standardise(features, examples.train), _fit_logistic
    else:
        columns, train = np.hstack([features.operators, features.scores]), partial(_fit_trees, seed=seed)
    asked = examples.test > 0
    if len(np.unique(labels)) < 2 or not columns[known].any():
        # One label, or columns that say nothing: the share of links is all there is to know.
        chance = np.full(int(asked.sum()), np.average(labels, weights=weights))
    else:
        chance = train(columns[known], labels, weights).predict_proba(columns[asked])[:, 1]
    return marks_of(chance, examples)


def _fit_trees(columns: NDArray[Any], labels: Any, weights: Any, seed: int) -> Any:
    # Saves start-up time.
    from sklearn.ensemble import ExtraTreesClassifier

    return ExtraTreesClassifier(N_TREES, random_state=seed).fit(columns, labels, sample_weight=weights)


def _fit_logistic(columns: NDArray[np.float32], labels: Any, weights: Any) -> Any:
    """Fit in single precision, or in double where that is too coarse.

    Measured on email: the same marks to the fourth digit, in 0.4 of the time.
    """
    # Saves start-up time.
    from sklearn.linear_model import LogisticRegression

    with warnings.catch_warnings():
        # What a singular Hessian or a failed line search makes the solver say.
        warnings.simplefilter("error")
        try:
            model = LogisticRegression(solver="newton-cholesky", max_iter=300)
            return model.fit(columns, labels, sample_weight=weights)
        except (UserWarning, RuntimeWarning):
            pass
    model = LogisticRegression(solver="newton-cholesky", max_iter=300)
    return model.fit(columns.astype(np.float64), labels, sample_weight=weights)


def marks_of(chance: Floats, examples: Examples) -> Marks:
    """Return the marks of probabilities for the examples of the test part."""
    # Saves start-up time.
    from sklearn.metrics import average_precision_score, roc_auc_score

    asked = examples.test > 0
    labels, weights = examples.linked[asked], examples.test[asked]
    # Micro-F1 of two classes of which each example has one is the share that is right.
    right = (chance > 0.5) == (labels == 1)
    fresh = examples.train[asked] == 0
    both = len(np.unique(labels)) == 2
    return Marks(
        float(np.average(right, weights=weights)),
        float(roc_auc_score(labels, chance, sample_weight=weights)) if both else float("nan"),
        float(average_precision_score(labels, chance, sample_weight=weights)) if both else float("nan"),
        float(np.average(right[fresh], weights=weights[fresh])) if fresh.any() else float("nan"),
    )


def standardise(features: Features, train: NDArray[Any]) -> NDArray[np.float32]:
    """Return columns of mean 0 and deviation 1 in the training part; scores also bent at their quantiles.

    Only rows of the training part decide on means, deviations and hinges.
    """
    F = features.operators
    if features.scores.shape[1]:
        scores = features.scores
        known = train > 0
        bends = np.quantile(scores[known], HINGES, axis=0)
        hinges = [np.maximum(scores - bend, 0.0) for bend in bends]
        F = np.hstack([F, scores, *hinges])
    mean = np.average(F, axis=0, weights=train)
    deviation = np.sqrt(np.average((F - mean) ** 2, axis=0, weights=train))
    # A column that is constant, to the rounding of single precision, says nothing.
    usable = deviation > 1e-7 * np.abs(F).max(axis=0, initial=0.0)
    scale = np.where(usable, 1.0 / np.where(usable, deviation, 1.0), 0.0)
    return ((F - mean) * scale).astype(np.float32)
