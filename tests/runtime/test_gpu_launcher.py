"""Calls of the launcher on a GPU: recorded and replayed, side by side, with their workspace, and refusals."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from benchmarks import cases
from benchmarks.cases import Case
from jax_splitk import _ffi
from jax_splitk.kernels.contraction.wgrad import FAMILY, Config
from jax_splitk.runtime import execute
from jax_splitk.runtime.plan import Int32Struct, Pointer
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import float64, on_gpu
from tests.on_gpu import integers, normals

pytestmark = pytest.mark.gpu

IMAGE, SMALL = (case for case in cases.WGRAD_CASES if case.name in ("c64k64_r3_56x56_b8", "c128k128_r3_28x28_b8"))


def ours(case: Case, out_dtype: str | None = None, **options: Any) -> Callable[..., jax.Array]:
    return jax.jit(
        lambda lhs, g: jax_splitk.conv_wgrad(
            lhs, g, case.rhs_shape, **case.lax_arguments(), preferred_element_type=out_dtype, **options
        )
    )


@pytest.mark.parametrize("config", [Config(128, 64, 8, True, 7), Config(128, 128, 7, False, 1)], ids=str)
def test_replayed_in_a_command_buffer_with_moving_buffers(config: Config) -> None:
    """Six calls in one jitted function are recorded by XLA and stay right when every address changes."""
    wgrad = ours(SMALL, "float32", config=config)
    six = jax.jit(lambda lhs, g: sum(wgrad(lhs * (i + 1), g) for i in range(6)))
    before = _ffi.launch_counts()
    kept = []
    for i in range(30):
        kept.append(jnp.zeros((i % 7 + 1, 1 << 18)) + i)  # moves the allocator
        if i % 5 == 0:
            kept = kept[-2:]
        lhs, g = integers(SMALL.problem(), seed=i, limit=1)
        expected = 21 * float64.conv_wgrad(SMALL.problem(), lhs, g)
        np.testing.assert_array_equal(np.asarray(six(lhs, g)), expected.astype(np.float32))
    after = _ffi.launch_counts()
    assert after["captured"] > before["captured"], (before, after)
    # XLA shares the six workspaces where it can, and reports them.
    temp = six.lower(lhs, g).compile().memory_analysis().temp_size_in_bytes
    assert temp >= FAMILY.workspace_bytes(SMALL.problem("float32"), config)


def test_two_executables_at_once() -> None:
    pair = (IMAGE, SMALL)
    inputs = [integers(case.problem(), seed=5) for case in pair]
    runs = [ours(case, "float32", config=Config(64, 64, 8, False, 3)) for case in pair]
    expected = [float64.conv_wgrad(case.problem(), *xs) for case, xs in zip(pair, inputs, strict=True)]
    wrong = []

    def worker(i: int) -> None:
        for _ in range(40):
            if not np.array_equal(np.asarray(runs[i](*inputs[i])), expected[i].astype(np.float32)):
                wrong.append(i)

    threads = [threading.Thread(target=worker, args=(i,)) for i in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_workspace_is_visible() -> None:
    p = IMAGE.problem()
    config = FAMILY.with_splits(p, Config(64, 192, 4, True, 1), 40)
    compiled = ours(IMAGE, config=config).lower(*normals(IMAGE.problem())).compile()
    assert compiled.memory_analysis().temp_size_in_bytes >= FAMILY.workspace_bytes(p, config) > 0


def test_errors_are_python_errors() -> None:
    lhs, g = normals(IMAGE.problem())
    config = Config(64, 192, 4, True, 44)
    with pytest.raises(ValueError, match=r"tile 128x999; accepted: 64x64"):
        ours(IMAGE, config=Config(128, 999, 4, False, 1))(lhs, g)
    with pytest.raises(ValueError, match=r"workspace_limit_bytes=-1"):
        ours(IMAGE, workspace_limit_bytes=-1)(lhs, g)
    with pytest.raises(ValueError, match=r"needs \d+ bytes of workspace .*workspace_limit_bytes=1000"):
        ours(IMAGE, config=config, workspace_limit_bytes=1000)(lhs, g)
    with pytest.raises(NotImplementedError, match=r"wgrad_im2col: dtype float32; accepted: bfloat16, float16"):
        ours(IMAGE, config=config)(lhs.astype(jnp.float32), g.astype(jnp.float32))


def test_a_plan_for_other_buffers_is_refused() -> None:
    p = SMALL.problem()
    call = on_gpu.plan(FAMILY, p, FAMILY.candidates(p, DEFAULT_CUDA)[0]).custom_call()
    out = jax.ShapeDtypeStruct(p.out_shape, jnp.bfloat16)
    short = jax.ShapeDtypeStruct((call.workspace_bytes + 512,), np.uint8)
    run = jax.jit(lambda *xs: jax.ffi.ffi_call(call.target, (out, short))(*xs, **call.attributes)[0])
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT.*buffer 3 has \d+ bytes; the plan expects \d+"):
        jax.block_until_ready(run(*normals(SMALL.problem())))


def test_a_plan_for_another_kernel_is_refused() -> None:
    """The driver reports a kernel's parameters since CUDA 12.4."""
    p = SMALL.problem()
    made = on_gpu.plan(FAMILY, p, FAMILY.candidates(p, DEFAULT_CUDA)[0])
    first, *others = made.launches
    count = len(first.params)
    longer = tuple(
        Int32Struct((*param.values, 0, 0)) if isinstance(param, Int32Struct) else param for param in first.params
    )
    for params, message in (
        (first.params[:-1], rf"takes {count} parameters; the plan gives {count - 1}"),
        ((*first.params, Pointer(0)), rf"takes {count} parameters; the plan gives {count + 1}"),
        (longer, r"takes \d+ bytes as parameter \d+; the plan gives \d+"),
    ):
        changed = dataclasses.replace(made, launches=(dataclasses.replace(first, params=params), *others))
        call = changed.custom_call()
        with pytest.raises(Exception, match=f"INVALID_ARGUMENT.*kernel '{first.kernel}' {message}"):
            jax.block_until_ready(execute.call(call, p, *normals(SMALL.problem())))
