"""Problems as people write them, in files and on command lines: what is obvious may be left out."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax import lax

from jax_splitk.problems.conv_wgrad import conv_output_spatial, dilated
from jax_splitk.runtime.arguments import quoted, require

# By operation and field: what it is where it is left out, in words ("" where it must be there), and what it means.
FIELDS: dict[str, dict[str, tuple[str, str]]] = {
    "conv_wgrad": {
        "batch": ("", "images"),
        "input_spatial": ("", "one to three sizes, e.g. [56, 56]"),
        "in_channels": ("", "C"),
        "out_channels": ("", "K"),
        "kernel_spatial": ("", "the filter's sizes, e.g. [3, 3]"),
        "window_strides": ("1 each", "strides"),
        "padding": ('"SAME"', '"SAME", "SAME_LOWER", "VALID" or [low, high] for each dimension'),
        "lhs_dilation": ("1 each", "of the input, as in a transposed convolution; padding is in numbers then"),
        "rhs_dilation": ("1 each", "of the filter"),
        "output_spatial": ("computed", "checked where it is given"),
        "feature_group_count": ("1", "feature groups"),
        "batch_group_count": ("1", "batch groups"),
        "dtype": ('"bfloat16"', "of input and cotangent: bfloat16, float16, float32 or float64"),
        "out_dtype": ("dtype", "of the weight gradient"),
        "precision": ('"default"', '"default", "high", "highest", or two of them: "high,default"'),
    },
    "quantized_matmul": {
        "rows": ("", "rows of x, all leading dimensions together"),
        "k": ("", "length of the reduction"),
        "features": ("", "columns of the weight"),
        "qtype": ("", "int4, uint4, int8, float8_e4m3fn, float4_e2m1fn or nf4"),
        "group_size": ("", "k that share a scale: 32, 64, 128, or k for one for each channel"),
        "x_dtype": ('"bfloat16"', "bfloat16, float16 or float8_e4m3fn"),
        "out_dtype": ("x_dtype", "bfloat16, float16 or float32; bfloat16 for x of float8_e4m3fn"),
        "scale_dtype": ('"bfloat16"', "bfloat16, float16 or float32"),
        "zero_dtype": ('"none"', "of packed zero points: as the scales, or none"),
        "layout": ("the newest", "version of the packed order"),
    },
}
_WORDS = ("SAME", "SAME_LOWER", "VALID")


def with_defaults(op: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a problem of a known operation, with those that were left out.

    Values are checked no further than that takes; `validate` of the problem does that.

    Raises:
      ValueError: fields that are missing or unknown, or a padding that means nothing.
    """
    known = FIELDS[op]
    unknown = sorted(set(fields) - set(known))
    missing = [name for name, (default, _) in known.items() if not default and name not in fields]
    if unknown or missing:
        accepted = f"{', '.join(known)}, of which those that are missing must be there" if missing else ", ".join(known)
        raise ValueError(f"{op} problem: unknown fields {unknown}, missing fields {missing}; accepted: {accepted}")
    return _COMPLETE[op](fields)


def _conv_wgrad(fields: Mapping[str, Any]) -> dict[str, Any]:
    spatial, dtype = fields["input_spatial"], fields.get("dtype", "bfloat16")
    ones = [1] * (len(fields["input_spatial"]) if isinstance(spatial, list) else 1)
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


def _quantized_matmul(fields: Mapping[str, Any]) -> dict[str, Any]:
    x_dtype = fields.get("x_dtype", "bfloat16")
    out_dtype = "bfloat16" if x_dtype == "float8_e4m3fn" else x_dtype
    return {"x_dtype": x_dtype, "out_dtype": out_dtype, "scale_dtype": "bfloat16", **fields}


_COMPLETE: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "conv_wgrad": _conv_wgrad,
    "quantized_matmul": _quantized_matmul,
}


def schema() -> str:
    """`FIELDS` as text, a line for each."""
    lines = []
    for op, fields in FIELDS.items():
        lines.append(f'"op": "{op}"')
        for name, (default, meaning) in fields.items():
            lines.append(f"  {name:20}{f'({default})' if default else 'required':15}{meaning}")
    return "\n".join(lines)
