"""The plan's encoding and its checks in C++."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from benchmarks import cases
from jax_splitk import _ffi
from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.kernels.contraction.wgrad import Config
from jax_splitk.problems.conv_wgrad import conv_output_spatial
from jax_splitk.runtime import plan
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.problems import random_case, seeded

LEGAL = {case.name: p for case in cases.SMALL_CASES if im2col.FAMILY.refusal(p := case.problem("float32")) is None}


def small_hopper_plan() -> DevicePlan:
    """Two launches, an im2col and a tiled map, every kind of parameter."""
    return im2col.FAMILY.plan(LEGAL["plain"], Config(64, 64, 4, False, 5))


def check(device_plan: DevicePlan) -> tuple[int, int, int]:
    return _ffi.check_plan(device_plan.words(), ",".join(device_plan.kernels()))


def test_magic_and_version_agree() -> None:
    assert (plan.PLAN_MAGIC, plan.PLAN_VERSION) == (_ffi.PLAN_MAGIC, _ffi.PLAN_VERSION)
    assert int.from_bytes(b"JSPK", "little") == plan.PLAN_MAGIC


def test_every_candidates_plan_is_accepted() -> None:
    assert set(LEGAL) == {case.name for case in cases.SMALL_CASES}
    for problem in list(LEGAL.values())[::4]:
        for config in im2col.FAMILY.candidates(problem, DEFAULT_CUDA):
            device_plan = im2col.FAMILY.plan(problem, config)
            assert check(device_plan) == (4, 2, 1 if config.splits == 1 else 2), config


def test_random_problems_plans_are_accepted() -> None:
    with seeded(1) as rng:
        for _ in range(100):
            problem = random_case(rng).problem("bfloat16")
            assert im2col.FAMILY.refusal(problem) is None, problem
            configs = im2col.FAMILY.candidates(problem, DEFAULT_CUDA)
            config = configs[rng.integers(len(configs))]
            check(im2col.FAMILY.plan(problem, config))


def test_words_follow_the_grammar_at_the_top_of_plan() -> None:
    im2col_map = plan.Im2colMap(
        1, "bfloat16", (64, 11, 12, 2), (128, 1408, 16896), (1, 2, 3, 1), (-1, -2), (4, 5), channels=32, pixels=128
    )
    made = DevicePlan(
        Source("", ()),
        (plan.Buffer(1000, 16), plan.Buffer(0, 256)),
        (plan.TiledMap(0, "float32", (32, 7), (256,), box=(16, 8), swizzle=2), im2col_map),
        (
            plan.Launch("second", (3, 4, 5), (128, 1, 1), (plan.Pointer(1, 40), plan.MapParam(1)), 99, (1, 2, 1), True),
            plan.Launch("first", (1, 1, 1), (32, 2, 1), (plan.Int32Struct((1, -1, 2)),)),
        ),
        label="",
    )
    struct = [2, 2, (0xFFFFFFFF << 32) + 1 - (1 << 64), 2]
    assert made.words() == [
        *(plan.PLAN_MAGIC, plan.PLAN_VERSION, 2, 2, 2),
        *(1000, 16, 0, 256),
        *(0, 0, plan.TENSOR_MAP_DTYPES["float32"], 2, 32, 7, 256, 1, 1, 16, 8, 2, plan.L2_PROMOTION_128B),
        *(1, 1, plan.TENSOR_MAP_DTYPES["bfloat16"], 4, 64, 11, 12, 2, 128, 1408, 16896, 1, 2, 3, 1),
        *(-1, -2, 4, 5, 32, 128, plan.SWIZZLE_128B, plan.L2_PROMOTION_128B),
        *(0, 3, 4, 5, 128, 1, 1, 1, 2, 1, 99, 1, 2, 0, 1, 40, 1, 1),
        *(1, 1, 1, 1, 32, 2, 1, 1, 1, 1, 0, 0, 1, *struct),
    ]
    assert made.kernels() == ["second", "first"]


HEADER = 5


def test_each_number_is_checked_with_its_range() -> None:
    words, kernels = small_hopper_plan().words(), ",".join(small_hopper_plan().kernels())
    map_at = HEADER + 2 * 4
    launch_at = len(words) - len(_launch_words(small_hopper_plan(), 1)) - len(_launch_words(small_hopper_plan(), 0))
    for index, value, message in [
        (0, 7, "plan magic is 7; accepted: 1263555402 to 1263555402"),
        (1, 99, "plan version is 99; accepted: 2 to 2"),
        (2, 0, "number of buffers is 0; accepted: 1 to 64"),
        (3, 65, "number of tensor maps is 65; accepted: 0 to 64"),
        (4, 0, "number of launches is 0; accepted: 1 to 64"),
        (5, -1, f"buffer bytes is -1; accepted: 0 to {2**50}"),
        (6, 24, "buffer alignment is 24; accepted: powers of two"),
        (6, 8192, "buffer alignment is 8192; accepted: 1 to 4096"),
        (map_at, 2, "tensor map kind is 2; accepted: 0 to 1"),
        (map_at + 1, 4, "tensor map buffer is 4; accepted: 0 to 3"),
        (map_at + 3, 6, "tensor map rank is 6; accepted: 3 to 5"),
        (map_at + 4, 0, f"tensor map dimension is 0; accepted: 1 to {2**32}"),
        (map_at + 8, -2, f"tensor map stride is -2; accepted: 0 to {2**40}"),
        (map_at + 11, 9, "tensor map element stride is 9; accepted: 1 to 8"),
        (launch_at, 2, "launch kernel is 2; accepted: 0 to 1"),
        (launch_at + 1, 2**31, f"launch grid is {2**31}; accepted: 1 to {2**31 - 1}"),
        (launch_at + 2, 65536, "launch grid is 65536; accepted: 1 to 65535"),
        (launch_at + 4, 1025, "launch block is 1025; accepted: 1 to 1024"),
        (launch_at + 7, 17, "launch cluster is 17; accepted: 1 to 16"),
        (launch_at + 8, 2, "launch grid 5 is not a multiple of its cluster 2"),
        (launch_at + 10, 227 * 1024 + 1, "launch shared memory is 232449; accepted: 0 to 232448"),
        (launch_at + 11, 2, "launch programmatic is 2; accepted: 0 to 1"),
        (launch_at + 12, 65, "launch parameters is 65; accepted: 0 to 64"),
        (launch_at + 13, 3, "parameter kind is 3; accepted: 0 to 2"),
        (launch_at + 14, 2, "parameter tensor map is 2; accepted: 0 to 1"),
    ]:
        changed = [*words[:index], value, *words[index + 1 :]]
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            _ffi.check_plan(changed, kernels)
    with pytest.raises(ValueError, match=f"plan has {len(words) + 1} words; {len(words)} were expected"):
        _ffi.check_plan([*words, 0], kernels)
    with pytest.raises(ValueError, match="launch kernel is 1; accepted: 0 to 0"):
        _ffi.check_plan(words, "wgrad_im2col_partial")
    for length in range(len(words)):
        with pytest.raises(ValueError, match=rf"plan ends before .* \({length} words\)"):
            _ffi.check_plan(words[:length], kernels)


def _launch_words(device_plan: DevicePlan, which: int) -> list[int]:
    one = dataclasses.replace(device_plan, launches=(device_plan.launches[which],))
    none = dataclasses.replace(device_plan, launches=())
    return one.words()[len(none.words()) :]


def test_buffers_must_be_as_planned() -> None:
    device_plan = small_hopper_plan()
    words, kernels = device_plan.words(), ",".join(device_plan.kernels())
    sizes, addresses = [buffer.bytes for buffer in device_plan.buffers], [4096] * 4
    run = functools.partial(_ffi.check_buffers, words, kernels)
    run(addresses, sizes)
    with pytest.raises(ValueError, match="the plan is for 4 buffers; the call has 3"):
        run(addresses[:3], sizes[:3])
    with pytest.raises(ValueError, match="the plan is for 4 buffers; the call has 5"):
        run([*addresses, 4096], [*sizes, 0])
    for i in range(4):
        for wrong in (sizes[i] - 1, sizes[i] + 1, 0, 2**40):
            changed = [*sizes[:i], wrong, *sizes[i + 1 :]]
            with pytest.raises(ValueError, match=f"buffer {i} has {wrong} bytes; the plan expects {sizes[i]}"):
                run(addresses, changed)
        moved = [*addresses[:i], 4096 + 8, *addresses[i + 1 :]]
        with pytest.raises(ValueError, match=f"buffer {i} is not aligned to the 16 bytes the plan expects"):
            run(moved, sizes)
        run([*addresses[:i], 4096 + 16, *addresses[i + 1 :]], sizes)


# ---- geometry and sizes --------------------------------------------------------------------------------------------


def test_output_spatial_is_laxs() -> None:
    with seeded(3) as rng:
        for _ in range(100):
            rank = int(rng.integers(1, 4))
            some = lambda low, high, rank=rank: tuple(int(v) for v in rng.integers(low, high, rank))  # noqa: E731
            spatial, kernel, strides = some(3, 12), some(1, 5), some(1, 4)
            padding = tuple(zip(some(-1, 5), some(-1, 5), strict=True))
            lhs_dilation, rhs_dilation = some(1, 4), some(1, 4)
            expected = jax.eval_shape(
                lambda x, w: jax.lax.conv_general_dilated(x, w, strides, padding, lhs_dilation, rhs_dilation),  # noqa: B023
                jax.ShapeDtypeStruct((1, 1, *spatial), np.float32),
                jax.ShapeDtypeStruct((1, 1, *kernel), np.float32),
            ).shape[2:]
            got = conv_output_spatial(spatial, kernel, strides, padding, lhs_dilation, rhs_dilation)
            assert got == expected, (spatial, kernel, strides, padding, lhs_dilation, rhs_dilation)


def test_int32_struct_is_little_endian_and_padded() -> None:
    with seeded(5) as rng:
        for length in range(1, 20):
            values = tuple(int(v) for v in rng.integers(-(2**31), 2**31, length))
            kind, count, *words = plan.Int32Struct(values).words()
            assert (kind, count) == (2, len(words))
            data = np.array(words, np.int64).view(np.int32)
            assert tuple(data[:length]) == values
            assert not data[length:].any()
            assert len(data) - length in (0, 1)
