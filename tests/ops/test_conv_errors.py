"""Every error of the public convolutions: its type, the argument, its value and what is accepted."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from benchmarks import cases
from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from tests.convolutions import PLAIN

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths")

LHS, G, RHS = (np.ones(shape, np.float32) for shape in (PLAIN.lhs_shape, PLAIN.g_shape, PLAIN.rhs_shape))
DTYPES = "bfloat16, float16, float32, float64"
HOPPER_CONFIG, HOST_CONFIG = im2col.Config(128, 128, 6, False, 1), wgrad_host.Config(1, 64)

CONFIGS = "None (leave it out: the fastest is chosen), or the Config of a family that computes conv_wgrad, e.g. "
ONE_GROUPING = "feature_group_count=2, batch_group_count=2; accepted: only one of them above 1"
# lax's messages, which lax's tests expect.
SAME_STRIDES = (
    "conv_general_dilated window and window_strides must have the same number of dimensions, but got 2 and 1."
)
SAME_RANKS = (
    "conv_general_dilated lhs and rhs must have the same number of dimensions, but got (9, 8, 6) and (3, 2, 6, 10)"
)
PAIRS = "padding argument to conv_general_dilated should be a string or a sequence of (low, high) pairs"
PRECISIONS = "accepted: None, a jax.lax.Precision, its name, or a pair of them"
Error = tuple[dict[str, Any], type[Exception], str]

# Wrong arguments for both functions.
COMMON_ERRORS: list[Error] = [
    ({"window_strides": (1,)}, ValueError, SAME_STRIDES),
    ({"window_strides": (1, 1, 1)}, ValueError, SAME_STRIDES.replace("2 and 1", "2 and 3")),
    ({"window_strides": None}, ValueError, "window_strides=None; accepted: 2 integers of at least 1"),
    ({"window_strides": (0, 1)}, ValueError, "window_strides=(0, 1); accepted: 2 integers of at least 1"),
    ({"window_strides": (1.5, 1)}, ValueError, "window_strides=(1.5, 1); accepted: 2 integers of at least 1"),
    ({"rhs_dilation": (1, 0)}, ValueError, "rhs_dilation=(1, 0); accepted: 2 integers of at least 1"),
    ({"rhs_dilation": (1, 1.5)}, ValueError, "rhs_dilation=(1, 1.5); accepted: 2 integers of at least 1"),
    ({"lhs_dilation": (1, 1, 1)}, ValueError, "lhs_dilation=(1, 1, 1); accepted: 2 integers of at least 1"),
    ({"padding": "SOME"}, ValueError, "padding='SOME'; accepted: 'SAME', 'SAME_LOWER', 'VALID' or 2 pairs"),
    ({"padding": ((1, 1), (1, 1, 1))}, ValueError, f"{PAIRS}, got ((1, 1), (1, 1, 1)); accepted: 'SAME', "),
    ({"padding": (1, 1)}, ValueError, f"{PAIRS}, got (1, 1); accepted: 'SAME', "),
    ({"padding": ((1, 1),)}, ValueError, "padding=((1, 1),); accepted: 'SAME', 'SAME_LOWER', 'VALID' or 2 pairs"),
    ({"lhs_dilation": (2, 1), "padding": "SAME"}, ValueError,
     "String padding is not implemented for transposed convolution using this op: padding='SAME' with lhs_dilation=(2"),
    ({"feature_group_count": 0}, ValueError, "feature_group_count=0; accepted: an integer of at least 1"),
    ({"feature_group_count": 1.7}, ValueError, "feature_group_count=1.7; accepted: an integer of at least 1"),
    ({"feature_group_count": "2"}, ValueError, "feature_group_count='2'; accepted: an integer of at least 1"),
    ({"batch_group_count": 0}, ValueError, "batch_group_count=0; accepted: an integer of at least 1"),
    ({"batch_group_count": 1.5}, ValueError, "batch_group_count=1.5; accepted: an integer of at least 1"),
    ({"feature_group_count": 2, "batch_group_count": 2}, ValueError, ONE_GROUPING),
    ({"precision": ("high",) * 3}, ValueError, f"precision=('high', 'high', 'high'); {PRECISIONS}"),
    ({"precision": ("high", "BF16_BF16_F32")}, ValueError, f"precision=('high', 'BF16_BF16_F32'); {PRECISIONS}"),
    ({"precision": "BF16"}, ValueError, "precision='BF16'; accepted: 'default', 'fastest', "),
    ({"preferred_element_type": jnp.int32}, TypeError, f"int32'>; accepted: {DTYPES}"),
    ({"preferred_element_type": "foo"}, TypeError, f"preferred_element_type='foo'; accepted: {DTYPES}"),
    ({"preferred_element_type": 3}, TypeError, f"preferred_element_type=3; accepted: {DTYPES}"),
    ({"preferred_element_type": "float8_e5m2"}, TypeError, f"preferred_element_type='float8_e5m2'; accepted: {DTYPES}"),
    ({"implementation": "cuda"}, ValueError, "implementation='cuda'; accepted: None, 'cutlass', 'host', 'xla'"),
    ({"workspace_limit_bytes": -1}, ValueError, "workspace_limit_bytes=-1; accepted: None or an integer of at least 0"),
    ({"workspace_limit_bytes": 1.5}, ValueError, "workspace_limit_bytes=1.5; accepted: None or an integer"),
    ({"workspace_limit_bytes": True}, ValueError, "workspace_limit_bytes=True; accepted: None or an integer"),
    ({"config": (1, 64)}, TypeError, f"config=(1, 64) of type tuple; accepted: {CONFIGS}"),
    ({"config": HOST_CONFIG, "implementation": "cutlass"}, ValueError,
     "config=Config(splits=1, block=64) belongs to implementation='host', not 'cutlass'"),
    ({"config": HOPPER_CONFIG, "implementation": "xla"}, ValueError,
     "belongs to implementation='cutlass', not 'xla'"),
]  # fmt: skip

WGRAD_ERRORS: list[Error] = [
    *(({"lhs": LHS.astype(lhs), "g": G.astype(g)}, TypeError,
       f"lhs is {lhs} and g is {g}; accepted: one of {DTYPES} for both")
      for lhs, g in (("float32", "bfloat16"), ("int32", "int32"), ("float8_e4m3fn", "float8_e4m3fn"))),
    ({"g": G[0]}, ValueError, f"and g of shape {PLAIN.g_shape[1:]}; accepted: one rank of at least 2"),
    ({"lhs": LHS[0, 0, 0], "g": G[0, 0, 0]}, ValueError, "lhs of shape (6,) and g of shape (10,); accepted: one rank"),
    *(({"rhs_shape": shape}, ValueError, f"rhs_shape={shape}; accepted: 4 integers of at least 0")
      for shape in ((3, 2, 6), (3.7, 2, 6, 10), (-3, 2, 6, 10), 9, None)),
    ({"rhs_shape": jax.device_put(RHS)}, ValueError,
     "rhs_shape is an array of shape (3, 2, 6, 10); accepted: 4 integers of at least 0"),
    ({"rhs_shape": (3, 0, 6, 10)}, ValueError,
     "rhs_shape=(3, 0, 6, 10) with a kernel of [3, 0]; accepted: sizes of at least 1"),
    ({"rhs_shape": (3, 2, 5, 10)}, ValueError,
     "has 5 input channels a group and lhs (4, 9, 8, 6) has 6 in feature_group_count=1 groups; accepted: 6"),
    ({"feature_group_count": 4}, ValueError,
     "lhs (4, 9, 8, 6) has 6 in feature_group_count=4 groups; accepted: groups that divide the 6"),
    ({"feature_group_count": 3, "rhs_shape": (3, 2, 2, 10)}, ValueError,
     "10 output channels and batch 4 in 3 groups; accepted: whole groups"),
    ({"batch_group_count": 5}, ValueError, "10 output channels and batch 4 in 5 groups; accepted: whole groups"),
    ({"g": G[:, 1:]}, ValueError, "g has shape (4, 8, 8, 10); the convolution's output has (4, 9, 8, 10)"),
    ({"g": G[..., 1:]}, ValueError, "g has shape (4, 9, 8, 9); the convolution's output has (4, 9, 8, 10)"),
]  # fmt: skip

COMPLEX = {"lhs": LHS.astype("complex64"), "rhs": RHS.astype("complex64")}
CONV_ERRORS: list[Error] = [
    *(({"lhs": LHS.astype(lhs), "rhs": RHS.astype(rhs)}, TypeError,
       f"lhs is {lhs} and rhs is {rhs}; accepted: one of {DTYPES} for both, or compute_dtype=")
      for lhs, rhs in (("float32", "bfloat16"), ("int32", "float32"))),
    *((COMPLEX | given, NotImplementedError, f"{said} with operands of complex64; accepted: {DTYPES}. Use implement")
      for given, said in (({"implementation": "host"}, "implementation='host'"),
                          ({"config": HOST_CONFIG}, "config=Config(splits=1, block=64)"))),
    ({"out_sharding": "data"}, TypeError, "out_sharding='data': "),
    ({"compute_dtype": jnp.int8}, TypeError, f"int8'>; accepted: {DTYPES}"),
    ({"compute_dtype": "float8_e4m3fn"}, TypeError, f"compute_dtype='float8_e4m3fn'; accepted: {DTYPES}"),
    ({"lhs": LHS.astype("complex64"), "compute_dtype": jnp.float32}, TypeError,
     "lhs is complex64 and rhs is float32; accepted: real numbers"),
    ({"compute_dtype": "foo"}, TypeError, f"compute_dtype='foo'; accepted: {DTYPES}"),
    ({"lhs": LHS[0]}, ValueError, SAME_RANKS),
    ({"lhs": LHS[0, 0, 0], "rhs": RHS[:, 0, 0, 0]}, ValueError,
     "lhs of shape (6,) and rhs of shape (3,); accepted: one r"),
    ({"lhs": LHS[..., 1:]}, ValueError, "conv_general_dilated lhs feature dimension size divided by feature_group_cou"),
]  # fmt: skip


def wgrad_call(**changes: Any) -> Any:
    arguments = {"lhs": LHS, "g": G, "rhs_shape": PLAIN.rhs_shape, **PLAIN.arguments, **changes}
    lhs, g = (jax.device_put(arguments.pop(name)) for name in ("lhs", "g"))
    return jax_splitk.conv_wgrad(lhs, g, arguments.pop("rhs_shape"), **arguments)


def conv_call(**changes: Any) -> Any:
    arguments = {"lhs": LHS, "rhs": RHS, **PLAIN.arguments, **changes}
    lhs, rhs = (jax.device_put(arguments.pop(name)) for name in ("lhs", "rhs"))
    return jax_splitk.conv_general_dilated(lhs, rhs, **arguments)


@pytest.mark.parametrize(("call", "changes", "kind", "message"), [
    *((wgrad_call, *error) for error in (*COMMON_ERRORS, *WGRAD_ERRORS)),
    *((conv_call, *error) for error in (*COMMON_ERRORS, *CONV_ERRORS)),
])  # fmt: skip
def test_wrong_argument_is_named_with_its_value_and_range(
    call: Callable[..., Any], changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    call()  # right without the changes
    with pytest.raises(kind, match=re.escape(message)):
        call(**changes)


@pytest.mark.parametrize(("changes", "message"), [
    ({"precision": "junk"}, "precision='junk'; accepted: 'default', 'high', 'highest' or two different ones, 'lhs,rh"),
    ({"precision": "high,high"}, "precision='high,high'; accepted: 'default'"),
    ({"precision": "high,default,high"}, "precision='high,default,high'; accepted: 'default'"),
    ({"precision": None}, "precision=None; accepted: 'default'"),
    ({"feature_group_count": 5}, "feature_group_count=5; accepted: a divisor of the channels"),
    ({"batch_group_count": 3}, "batch_group_count=3; accepted: a divisor of the batch and of out_channels"),
    ({"batch_group_count": 4, "out_channels": 6}, "batch_group_count=4; accepted: a divisor of the batch and of out"),
    ({"feature_group_count": 2, "batch_group_count": 2}, ONE_GROUPING),
])  # fmt: skip
def test_problem_whose_fields_do_not_belong_together(changes: dict[str, Any], message: str) -> None:
    problem = cases.Case("given", 4, 9, 8, 6, 12, (3, 3)).problem()
    for right in ({}, {"precision": "high,default"}, {"feature_group_count": 3}, {"batch_group_count": 4}):
        dataclasses.replace(problem, **right).validate()
    with pytest.raises(ValueError, match=re.escape(f"problems[1]: {message}")):
        jax_splitk.tune_problems([problem, dataclasses.replace(problem, **changes)])


def test_an_implementation_that_cannot_serve_names_the_limit_and_the_way_out() -> None:
    ways = r"Use implementation=None \(the best that can\) or implementation='xla'\."
    limited = {"implementation": "host", "workspace_limit_bytes": 0}
    for changes, reason in (
        ({"implementation": "cutlass"}, "wgrad_im2col, .*: runs on cuda, not cpu"),
        ({"config": HOPPER_CONFIG}, "wgrad_im2col, wgrad_im2col_padded: runs on cuda, not cpu"),
        (limited, "wgrad_host: no config fits in workspace_limit_bytes=0"),
    ):
        with pytest.raises(NotImplementedError, match=rf"conv_wgrad float32->float32 lhs .*{reason}.*{ways}"):
            wgrad_call(**changes)
    with pytest.raises(
        ValueError, match=r"config=Config\(splits=999, block=64\) is not legal for conv_wgrad .*splits 999"
    ):
        wgrad_call(config=wgrad_host.Config(999, 64))
    with pytest.raises(ValueError, match=r"needs \d+ bytes of workspace for conv_wgrad .*workspace_limit_bytes=100\b"):
        wgrad_call(config=HOST_CONFIG, workspace_limit_bytes=100)
