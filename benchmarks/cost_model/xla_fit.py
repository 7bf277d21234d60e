"""The fit of XLA's time: a ridge regression of the logarithm of time over roofline, robust to single problems."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.cost_model.constants import rounded
from benchmarks.cost_model.records import Record
from jax_splitk.kernels import xla

NOISE = 0.1  # of logarithms of times, which the model cannot explain
# How large weights usually are, by what they belong to.
_WIDTHS = {"one": 3.0, "kind": 0.7, "size": 0.3, "own size": 0.15}
_ROUNDS = 5  # of weighting down what is far off
_PRIOR_COUNT = 3.0  # problems that have everybody's errors, in a class's uncertainty


def fit(found: Sequence[Record]) -> dict[str, Any]:
    """The data of the estimate for one operation, from records that have XLA's time."""
    features = [xla.features(record.problem, record.target) for record in found]
    logs = np.array([math.log((r.xla_us or 1) * 1e-6 / f.floor) for r, f in zip(found, features, strict=True)])
    names = list(dict.fromkeys(name for f in features for name in f.all()))
    rows = np.array([[f.all().get(name, 0.0) for name in names] for f in features])
    of = {"one": "one", **{kind: "kind" for f in features for kind in f.kinds}}
    of |= {name: "size" for f in features for name in f.sizes}
    widths = np.array([_WIDTHS[of.get(name, "own size")] for name in names])
    weights, errors = _ridge(rows, logs, widths)
    of_class = uncertainties([f.name for f in features], errors, np.ones(len(errors)))
    classes = {}
    for name, of in of_class.items():
        sizes = [f.sizes for f in features if f.name == name]
        ends = {size: [end(s[size] for s in sizes) for end in (min, max)] for size in sizes[0]}
        ranges = {size: [rounded(end) for end in both] for size, both in ends.items()}
        classes[name] = {"uncertainty": of, "ranges": ranges}
    return {"weights": {n: rounded(w) for n, w in zip(names, weights, strict=True)}, "classes": classes}


def uncertainties(names: Sequence[str], errors: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """By class: the root mean square of errors, of a small class that of all for the most part."""
    squares, found = weights * errors**2, {}
    prior = _PRIOR_COUNT * float(np.sum(squares) / np.sum(weights))
    for name in dict.fromkeys(names):
        own = np.array([n == name for n in names])
        variance = (float(np.sum(squares[own])) + prior) / (float(np.sum(weights[own])) + _PRIOR_COUNT)
        found[name] = rounded(math.sqrt(variance))
    return found


def _ridge(rows: np.ndarray, logs: np.ndarray, widths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(weights, the error of each row's estimate by the fit to the others)."""
    trust = np.ones(len(logs))
    prior = np.diag(1 / widths**2)
    weights, errors = np.zeros(len(widths)), np.zeros(len(logs))
    for _ in range(_ROUNDS):
        scaled = rows * (trust / NOISE**2)[:, None]
        inverse = np.linalg.inv(rows.T @ scaled + prior)
        weights = inverse @ (scaled.T @ logs)
        leverage = np.sum((rows @ inverse) * scaled, axis=1)
        errors = (logs - rows @ weights) / np.maximum(1 - leverage, 0.05)
        trust = np.minimum(1, 2 * NOISE / np.maximum(np.abs(errors), 1e-9))
    return weights, errors
