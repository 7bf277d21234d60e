"""Runs every kernel of every CUDA family on its smallest problems. .ci/sanitize runs this under NVIDIA's
compute-sanitizer.

Operands and expected results are computed on the host, so that nothing else runs on the device.
"""

import collections
import re

import jax
import numpy as np
import pytest

from jax_splitk import kernels
from jax_splitk.kernels import catalogue
from jax_splitk.kernels.base.adapted import Adapted
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.every_kernel import RUNS, Run

FAMILIES = [family for op in catalogue.FAMILIES for family in kernels.families(op, "cuda")]


def device_code() -> set[compiler.Source]:
    return {run.plan.source for run in RUNS} if jax.default_backend() == "gpu" else set()


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_smallest_problems_are_exact(run: Run) -> None:
    operands, expected = run.operands()
    np.testing.assert_array_equal(np.asarray(run.function()(*operands)), expected)


def test_the_runs_are_legal_and_reach_every_kernel() -> None:
    for run in RUNS:
        assert run.family.refusal(run.problem, run.config, DEFAULT_CUDA) is None, run
    declared, launched = set(), set()
    for run in RUNS:
        plan, name = run.plan, run.family.trace_name(run.problem)
        text = re.sub(r"__launch_bounds__\([^)]*\)", "", plan.source.text())
        roles = re.findall(r"(?:__global__\s+(?:void\s+)?|SPLIT_K_KERNEL\()KERNEL\((\w*)\)", text)
        declared |= {(plan.source.file, role) for role in roles}
        launched |= {(plan.source.file, launch.kernel.removeprefix(name)) for launch in plan.launches}
    # Some sources include the header that declares these kernels for its other parts, and add their splits in another
    # way.
    assert {role for _, role in declared - launched} == {"_direct", "_partial", "_reduce_splits"}
    assert launched <= declared
    assert {role for _, role in launched} == {role for _, role in declared}
    count = collections.Counter(run.family.name for run in RUNS)
    assert set(count) == {family.name for family in FAMILIES}
    # Other runs use kernels of another family.
    assert all(count[family.name] >= 5 for family in FAMILIES if not isinstance(family, Adapted))


def test_the_runs_reach_every_specialisation() -> None:
    """Every element type, result type, weight format and reduction occurs."""
    macros = collections.defaultdict(set)
    for run in RUNS:
        for name, value in run.plan.source.defines:
            macros[run.family.name, name].add(value)
    assert macros["wgrad_gather", "ELEMENT"] == {0, 1, 2}
    assert macros["wgrad_gather", "PARTS"] == {1, 2, 3}
    for family in ("wgrad_gather", "wgrad_tf32"):
        assert macros[family, "RAGGED"] == {0, 1}
    for family in ("wgrad_im2col", "wgrad_gather", "wgrad_grouped", "wgrad_halo"):
        assert macros[family, "OUT"] == {0, 1, 2}, family
    for macro in ("RANK3", "SWAP", "TAIL", "X_TILED"):
        assert macros["wgrad_im2col", macro] == {0, 1}, macro
    assert macros["wgrad_im2col", "CHAIN"] == {0, 128}
    passes = {"OUT": 3, "REDUCTION": 3, "AXES": 4, "PHASED": 2, "SWAP": 2, "PERSISTENT": 2}
    for name, counts in {
        "dot_tma": {"ELEMENT": 4, "OUT": 3, "REDUCTION": 3, "A_MN": 2, "B_MN": 2, "A_WHOLE": 2, "B_WHOLE": 2},
        "dot_few_rows": {"OUT": 3, "W_MN": 2, "W_WHOLE": 2},
        "fprop_im2col": {**passes, "ELEMENT": 3, "B_WHOLE": 2, "TRANSPOSED": 2, "ODD": 2},
        "dgrad_im2col": {**passes, "ELEMENT": 3, "EMPTY": 2, "ODD": 2},
    }.items():
        for macro, values in counts.items():
            assert macros[name, macro] == set(range(values)), (name, macro)
    for family in ("fprop_gather", "dgrad_gather"):
        assert macros[family, "ELEMENT"] == {0, 1, 2}, family
        assert macros[family, "GROUPED"] == {0, 1}, family
    assert macros["quantized_tiled", "SCALING"] == {0, 1, 2}
    assert macros["quantized_stream", "FORMAT"] == set(range(6))
    assert macros["quantized_stream", "CLUSTER"] == {1, 2, 4, 8}
    assert macros["quantized_fp8", "MULTICAST"] == {1, 2}
    for macro in ("EIGHTS", "WHOLE", "K_WARPGROUPS"):
        assert len(macros["quantized_fp8", macro]) == len(macros["quantized_tiled", macro]) == 2, macro
    for family in ("quantized_fp8", "quantized_tiled"):
        assert macros[family, "N_TILES"] == {0, 1, 2, 3}, family
    for macro in ("ROUNDED", "PREPARED", "X_HALF"):
        assert macros["quantized_fp8", macro] == {0, 1}, macro
    assert macros["quantized_fp8", "SPLITS"] == {1, 2, 3}
