"""Quantized products, the second operation, in keys, selection, the search, the caches and the command line."""

import dataclasses
import functools
import json
import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from benchmarks.cases import Case
from jax_splitk import prepack, quantize, quantized_matmul
from jax_splitk.__main__ import main
from jax_splitk.kernels import catalogue
from jax_splitk.kernels.cpu import quantized as quantized_host
from jax_splitk.ops.primitives import PRIMITIVES
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.quantized_reference import problem_product
from jax_splitk.quantized import formats
from jax_splitk.tuning import entry, select, store, tuner
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.key import problem_from_dict
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.result import TuningResult
from tests.command_line import run
from tests.entries import as_dict, as_json
from tests.problems import SEED
from tests.tuning_cache import CPU

pytestmark = [
    pytest.mark.usefixtures("cache"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="tunes the CPU's family"),
]

PROBLEM = QuantizedMatmulProblem(5, 192, 100, "bfloat16", "float32", "uint4", 64, "bfloat16", "float16")
WGRAD = Case("small", 3, 9, 8, 6, 10, (3, 2), dtype="float32").problem()


# ---- problems, keys, operands ----------------------------------------------------------------------------------------


def test_every_operation_is_registered() -> None:
    assert set(OPERATIONS) == set(catalogue.FAMILIES) == {
        "conv_fprop", "conv_dgrad", "conv_wgrad", "dot_general", "quantized_matmul", "quantized_matmul_epilogue",
        "quantized_matmul_transposed", "ragged_dot", "quantized_ragged_dot", "quantized_ragged_dot_epilogue",
    }  # fmt: skip
    # lax has a dot_general, too; a product may have more than one primitive.
    assert {primitive.name.removeprefix("jax_splitk_") for primitive in PRIMITIVES} >= set(OPERATIONS)
    assert all(operation.problem.op == name for name, operation in OPERATIONS.items())


@pytest.mark.parametrize(("change", "message"), [
    ({"rows": -1}, "rows=-1; accepted: an integer of at least 0"),
    ({"k": True}, "k=True"),
    ({"features": 1.0}, "features=1.0"),
    ({"x_dtype": "float32"}, "x_dtype='float32'; accepted: 'bfloat16', 'float16', 'float8_e4m3fn'"),
    ({"out_dtype": "float64"}, "out_dtype='float64'"),
    ({"qtype": "int2"}, "qtype='int2'; accepted: 'int4', 'uint4',"),
    ({"scale_dtype": ["bfloat16"]}, "scale_dtype=('bfloat16',)"),
    ({"zero_dtype": None}, "zero_dtype=None; accepted: 'none', 'bfloat16'"),
    ({"qtype": "nf4"}, "zero_dtype='float16' with nf4; accepted: 'none'"),
    ({"group_size": 48}, "group_size=48; accepted: 16, 32, 64, 128 or k=192"),
    ({"group_size": 128}, "group_size=128; accepted: a divisor of k=192"),
    ({"layout": 0}, "layout=0; accepted: 1"),
    ({"bits": 4}, "unknown fields ['bits']"),
])  # fmt: skip
def test_problems_from_files_are_checked(change: dict[str, Any], message: str) -> None:
    fields = dataclasses.asdict(PROBLEM)
    assert problem_from_dict("quantized_matmul", fields) == PROBLEM
    with pytest.raises(ValueError, match=re.escape(message)):
        problem_from_dict("quantized_matmul", {**fields, **change})


@pytest.mark.parametrize(("qtype", "zero_dtype", "x_dtype", "k", "group"), [
    ("uint4", "bfloat16", "float16", 192, 192),
    ("int8", "float32", "bfloat16", 101, 101),
    ("float8_e4m3fn", "none", "float8_e4m3fn", 384, 128),
    ("float4_e2m1fn", "none", "float16", 96, 32),
])  # fmt: skip
def test_random_operands_are_a_fair_trial(qtype: str, zero_dtype: str, x_dtype: str, k: int, group: int) -> None:
    """Operands have the problem's shapes and dtypes, results of moderate size, and padding as from `prepack`."""
    problem = QuantizedMatmulProblem(7, k, 70, x_dtype, "float32", qtype, group, "float16", zero_dtype)
    problem.validate()
    operands, others = (OPERATIONS["quantized_matmul"].random_operands(problem, seed) for seed in (SEED, SEED + 1))
    out = jax.jit(functools.partial(problem_product, problem))(*operands)
    x, words, scale, *zeros = operands
    assert (x.shape, x.dtype) == (problem.x_shape, problem.x_dtype)
    assert (words.shape, words.dtype) == (problem.words_shape, jnp.uint32)
    assert (scale.shape, scale.dtype) == (problem.scale_shape, problem.scale_dtype)
    assert [(z.shape, z.dtype) for z in zeros] == [(problem.scale_shape, zero_dtype)] * (zero_dtype != "none")
    assert np.count_nonzero(np.asarray(scale)) == k // group * 70
    assert (out.shape, out.dtype) == ((7, 70), jnp.float32)
    assert 0.1 < np.std(out) < 10
    assert not any(np.array_equal(a, b) for a, b in zip(operands, others, strict=True))


@pytest.mark.parametrize(("scale", "channel"), [
    ("float8_e8m0fnu", "none"), ("float8_e4m3fn", "none"), ("float8_e4m3fn", "float32"),
])  # fmt: skip
def test_random_scales_of_a_byte_are_a_fair_trial(scale: str, channel: str) -> None:
    problem = QuantizedMatmulProblem(
        7, 4096, 70, "bfloat16", "float32", "float4_e2m1fn", 32, scale, channel_dtype=channel
    )
    problem.validate()
    operands = OPERATIONS["quantized_matmul"].random_operands(problem, SEED)
    assert [(x.shape, x.dtype) for x in operands] == [
        (shape, jnp.dtype(dtype)) for shape, dtype in problem.operand_types
    ]
    assert 0.1 < np.std(jax.jit(functools.partial(problem_product, problem))(*operands)) < 10


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
def test_kernels_that_round_the_table_of_nf4_pass_the_check(x_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for GPUs round it to x's dtype. Their float32 results differ from XLA's by more than sums do."""
    problem = QuantizedMatmulProblem(7, 1024, 70, x_dtype, "float32", "nf4", 64, "bfloat16")
    operation = OPERATIONS["quantized_matmul"]
    operands = operation.random_operands(problem, SEED)
    exact = problem_product(problem, *operands)
    monkeypatch.setattr(formats, "NF4", formats.NF4.astype(x_dtype).astype(np.float32))
    error = float(jnp.linalg.norm(problem_product(problem, *operands) - exact) / jnp.linalg.norm(exact))
    assert error < operation.operand_error(problem) < 10 * error
    assert operation.operand_error(dataclasses.replace(problem, qtype="int4")) == 0


# ---- measuring -------------------------------------------------------------------------------------------------------


def test_both_operations_are_tuned_once(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = prepack(quantize(jax.random.normal(jax.random.key(1), (48, 40)), "int4", group_size=None))

    def step(x: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax_splitk.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        return quantized_matmul(y.reshape(2, 48).astype(jnp.bfloat16), weight).astype(jnp.float32).sum()

    args = jnp.ones((2, 4, 4, 3)), jnp.ones((3, 3, 3, 3))
    grad = jax.grad(step, 1)
    result = jax_splitk.tune(grad, *args, seconds=0.1)
    assert [key.problem.op for key, _ in result] == ["quantized_matmul", "conv_wgrad"]
    for key, found in result:
        assert [m.error for m in found.measurements if m.error] == []
        assert found.us(XLA) > 0
        assert entry.loads((cache / key.file).read_text(), key) == found
    monkeypatch.setattr(tuner, "tune", None)
    assert len(jax_splitk.tune(grad, *args)) == 2
    whys = {d.problem.op: d.why for d in jax_splitk.explain(grad, *args).decisions}
    assert whys.pop("quantized_matmul_transposed") == "no kernel for platform cpu"
    assert len(whys) == 2
    assert all(why.startswith("user cache: ") for why in whys.values())
    quantized, _ = result
    forced = dataclasses.replace(quantized[1], choice=Candidate(quantized_host.FAMILY, quantized_host.Config(1, 5)))
    with TuningResult(((quantized[0], forced),)):
        assert "row_block = 5 : i64" in jax.jit(step).lower(*args).as_text()


@pytest.mark.parametrize("x_dtype, out_dtype, qtype, zero_dtype", [
    ("float8_e4m3fn", "bfloat16", "float8_e4m3fn", "none"),
    ("float16", "float32", "uint4", "float16"),
])  # fmt: skip
def test_every_dtype_is_tuned(x_dtype: str, out_dtype: str, qtype: str, zero_dtype: str) -> None:
    """The reduction is long, so that the rounding of XLA and of ours differs as much as in practice."""
    problem = QuantizedMatmulProblem(9, 2048, 40, x_dtype, out_dtype, qtype, 128, "bfloat16", zero_dtype)
    ((_, found),) = jax_splitk.tune_problems([problem], seconds=0.1)
    assert [m.error for m in found.measurements if m.error] == []
    assert len(found.measurements) > 3


def test_lowering_measures_a_miss_once(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    monkeypatch.setenv("JAX_SPLITK_TUNE_BUDGET_S", "0.05")
    weights = jax.vmap(lambda w: prepack(quantize(w, "int8", group_size=32)))(jnp.ones((3, 64, 33)))
    x = jnp.ones((3, 8, 64), jnp.bfloat16)
    out = jax.jit(jax.vmap(quantized_matmul))(x, weights)
    np.testing.assert_allclose(out.astype(jnp.float32), 64, rtol=1e-2)
    (path,) = store.files(cache)
    assert json.loads(path.read_text())["key"]["problem"]["rows"] == 8


# ---- the command line ------------------------------------------------------------------------------------------------


def test_command_line(cache: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # `tune` sets these for good in its own process: here they are put back.
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "")
    monkeypatch.setenv("JAX_SPLITK_TUNE_BUDGET_S", "0.1")
    found = run(capsys, "explain", as_json(PROBLEM, WGRAD))["decisions"]
    assert [d["problem"] for d in found] == [as_dict(PROBLEM), as_dict(WGRAD)]
    assert found[0]["config"] == dataclasses.asdict(select.select(PROBLEM, CPU, Options()).config)
    (tuned,) = run(capsys, "tune", as_json(PROBLEM), "--seconds", 0.05)["decisions"]
    ((listed,),) = [source["entries"] for source in run(capsys, "cache", "ls")]
    shown = run(capsys, "cache", "show", tuned["digest"])
    assert tuned["problem"] == listed["problem"] == shown["problem"] == as_dict(PROBLEM)
    assert run(capsys, "cache", "prune", "--environment", "other")["deleted"] == []
    assert main(["explain", as_json(PROBLEM), "--platform", "cuda", "--verbose"]) == 0
    assert str(PROBLEM) in capsys.readouterr().out
