"""Problems as people write them, in files and on command lines: fields with an obvious value may be left out."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax import lax

from jax_splitk.cli.schema import FIELDS
from jax_splitk.problems.conv_wgrad import conv_output_spatial, dilated
from jax_splitk.runtime.arguments import quoted, require

_WORDS = ("SAME", "SAME_LOWER", "VALID")


def with_defaults(op: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a problem of a known operation, completed.

    Values are checked only as far as that needs; `validate` of the problem checks the rest.

    Raises:
      ValueError: fields are missing or unknown, or the padding has no meaning.
    """
    known = FIELDS[op]
    unknown = sorted(set(fields) - set(known))
    missing = [name for name, (default, _) in known.items() if not default and name not in fields]
    if unknown or missing:
        accepted = f"{', '.join(known)}; the missing ones are required" if missing else ", ".join(known)
        raise ValueError(f"{op} problem: unknown fields {unknown}, missing fields {missing}; accepted: {accepted}")
    return _COMPLETE[op](fields)


def _convolution(fields: Mapping[str, Any]) -> dict[str, Any]:
    spatial, dtype = fields["input_spatial"], fields.get("dtype", "bfloat16")
    ones = [1] * _length(spatial)
    counts = {"feature_group_count": 1, "batch_group_count": 1}
    moves = {"window_strides": ones, "lhs_dilation": ones, "rhs_dilation": ones, "padding": "SAME"}
    full = {**counts, **moves, "dtype": dtype, "out_dtype": dtype, "precision": "default", **fields}
    word = full["padding"]
    if isinstance(word, str):
        require(word in _WORDS, f"padding={word!r}", f"{quoted(_WORDS)}, or pairs of integers")
        dilation = full["lhs_dilation"]
        require(dilation == ones, f"padding={word!r} with lhs_dilation={dilation!r}", "explicit pairs")
    # Where a value is of no use, the validation of the problem says which.
    with contextlib.suppress(TypeError, ValueError, ArithmeticError), np.errstate(all="raise"):
        window = dilated(full["kernel_spatial"], full["rhs_dilation"])
        if isinstance(word, str):
            full["padding"] = lax.padtype_to_pads(spatial, window, full["window_strides"], word)
        names = ("kernel_spatial", "window_strides", "padding", "lhs_dilation", "rhs_dilation")
        full.setdefault("output_spatial", conv_output_spatial(spatial, *(full[name] for name in names)))
    full.setdefault("output_spatial", spatial)
    return full


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 1


def _product(dtype_field: str, **others: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Completes the fields of a product. The default of `dtype_field` is bfloat16. The result has the operand's dtype,
    but bfloat16 for an operand in float8_e4m3fn. `others` are further defaults."""

    def completed(fields: Mapping[str, Any]) -> dict[str, Any]:
        dtype = fields.get(dtype_field, "bfloat16")
        out_dtype = "bfloat16" if dtype == "float8_e4m3fn" else dtype
        return {dtype_field: dtype, "out_dtype": out_dtype, **others, **fields}

    return completed


_COMPLETE: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "conv_fprop": _convolution,
    "conv_dgrad": _convolution,
    "conv_wgrad": _convolution,
    "dot_general": _product("dtype", batch=1, lhs_order="bmk", rhs_order="bkn"),
    "quantized_matmul": _product("x_dtype", scale_dtype="bfloat16"),
    "quantized_ragged_dot": _product("dtype", scale_dtype="bfloat16"),
    "quantized_ragged_dot_epilogue": _product("dtype", scale_dtype="bfloat16"),
    "quantized_matmul_epilogue": _product("x_dtype", scale_dtype="bfloat16"),
    "quantized_matmul_transposed": _product("x_dtype", scale_dtype="bfloat16"),
    "ragged_dot": _product("dtype", mode="forward"),
}
