"""The fields of problems in JSON. Imports nothing, so that `--help` is fast."""

_CONVOLUTION: dict[str, tuple[str, str]] = {
    "batch": ("", "images"),
    "input_spatial": ("", "one to three sizes, e.g. [56, 56]"),
    "in_channels": ("", "C"),
    "out_channels": ("", "K"),
    "kernel_spatial": ("", "the filter's sizes, e.g. [3, 3]"),
    "window_strides": ("1 each", "strides"),
    "padding": ('"SAME"', '"SAME", "SAME_LOWER", "VALID" or [low, high] for each dimension'),
    "lhs_dilation": ("1 each", "dilation of the input, as in a transposed convolution; padding must then be numbers"),
    "rhs_dilation": ("1 each", "dilation of the filter"),
    "output_spatial": ("computed", "sizes of the output; checked if given"),
    "feature_group_count": ("1", "feature groups"),
    "batch_group_count": ("1", "batch groups"),
    "dtype": ('"bfloat16"', "dtype of both operands: bfloat16, float16, float32 or float64"),
    "out_dtype": ("dtype", "dtype of the result"),
    "precision": ('"default"', '"default", "high", "highest", or two of them: "high,default"'),
}

# Fields of quantized weights.
_QTYPE = ("", "int4, uint4, int8, float8_e4m3fn, float4_e2m1fn or nf4")
_GROUP_SIZE = ("", "elements of k that share a scale: 16, 32, 64, 128, or all of k for one scale a column")
_MORE_OF_WEIGHTS: dict[str, tuple[str, str]] = {
    "scale_dtype": ('"bfloat16"', "bfloat16, float16, float32, float8_e8m0fnu or float8_e4m3fn"),
    "zero_dtype": ('"none"', "dtype of packed zero points: bfloat16, float16, float32 or none"),
    "layout": ("the newest", "version of the order of packed weights"),
    "channel_dtype": ('"none"', "float32 for a second scale of each feature, or none"),
}

_QUANTIZED: dict[str, tuple[str, str]] = {
    "rows": ("", "rows of x, all leading dimensions together"),
    "k": ("", "length of the reduction"),
    "features": ("", "columns of the weight"),
    "qtype": _QTYPE,
    "group_size": _GROUP_SIZE,
    "x_dtype": ('"bfloat16"', "bfloat16, float16 or float8_e4m3fn"),
    "out_dtype": ("x_dtype", "bfloat16, float16 or float32; if x is float8_e4m3fn the default is bfloat16"),
    **_MORE_OF_WEIGHTS,
    "compute_dtype": ('"none"', "float8_e4m3fn if kernels may round x and the weight to it; or none"),
}

_RAGGED_QUANTIZED: dict[str, tuple[str, str]] = {
    "groups": ("", "weights of the stack"),
    "m": ("", "rows of lhs, of all groups together"),
    "k": ("", "columns of lhs"),
    "n": ("", "columns of each weight"),
    "qtype": _QTYPE,
    "group_size": _GROUP_SIZE,
    "dtype": ('"bfloat16"', "dtype of lhs: bfloat16, float16 or float8_e4m3fn"),
    "out_dtype": ("dtype", "bfloat16, float16 or float32; if lhs is float8_e4m3fn the default is bfloat16"),
    **_MORE_OF_WEIGHTS,
    "total_groups": ("0", "elements of group_sizes where group_offset is given"),
}

_BIAS = ('"none"', "dtype of the bias")
_ACTIVATION = ('"none"', "relu, gelu (tanh), gelu_exact (erf) or silu; or gated: swiglu, geglu, swigluoai")
_RESIDUAL = ('"none"', "dtype of the residual, an array of the result's shape that is added last")

# For each operation and field: the default in words ("" if the field is required), and the meaning.
FIELDS: dict[str, dict[str, tuple[str, str]]] = {
    "conv_fprop": _CONVOLUTION,
    "conv_dgrad": _CONVOLUTION,
    "conv_wgrad": _CONVOLUTION,
    "dot_general": {
        "batch": ("1", "number of matrix products"),
        "m": ("", "rows of the result"),
        "n": ("", "columns of the result"),
        "k": ("", "length of the reduction"),
        "lhs_order": ('"bmk"', "dimensions in memory, the contiguous one last: bmk, mbk, bkm or kbm"),
        "rhs_order": ('"bkn"', "the same for rhs: bkn, kbn, bnk or nbk"),
        "dtype": ('"bfloat16"', "dtype of both operands: bfloat16, float16, float32, float64 or float8_e4m3fn"),
        "out_dtype": ("dtype", "dtype of the result; for float8_e4m3fn the default is bfloat16"),
        "precision": ('"default"', "default, high or highest"),
        "bias": ('"none"', '"m" for a bias of each row of the result, "n" for one of each column'),
        "bias_dtype": _BIAS,
        "activation": ('"none"', "relu, gelu (tanh), gelu_exact (erf) or silu, applied to product + bias"),
        "residual_dtype": _RESIDUAL,
    },
    "quantized_matmul": _QUANTIZED,
    "quantized_matmul_epilogue": {
        **_QUANTIZED,
        "bias_dtype": _BIAS,
        "activation": _ACTIVATION,
        "residual_dtype": _RESIDUAL,
        "norm_epsilon": ('"none"', "text of the number that is added to the mean square of a row of x, or none"),
        "norm_scale_dtype": ('"none"', "dtype of the scale of the normalized x, [k]"),
    },
    "quantized_matmul_transposed": {
        **_QUANTIZED,
        "k": ("", "rows of the weight, and columns of the result"),
        "features": ("", "columns of the weight: length of the reduction"),
    },
    "ragged_dot": {
        "mode": ('"forward"', "forward (and the lhs gradient) or rhs_gradient"),
        "groups": ("", "matrices of rhs, or of a rhs gradient"),
        "m": ("", "rows of lhs, of all groups together"),
        "k": ("", "columns of lhs"),
        "n": ("", "columns of the other matrices"),
        "dtype": ('"bfloat16"', "dtype of both operands: bfloat16, float16, float32, float64 or float8_e4m3fn"),
        "out_dtype": ("dtype", "dtype of the result; for float8_e4m3fn the default is bfloat16"),
        "precision": ('"default"', "default, high or highest"),
        "rhs_order": ('"gkn"', "a forward product's rhs in memory, the contiguous dimension last: gkn or gnk"),
        "total_groups": ("0", "elements of group_sizes where group_offset is given"),
    },
    "quantized_ragged_dot": _RAGGED_QUANTIZED,
    "quantized_ragged_dot_epilogue": {**_RAGGED_QUANTIZED, "bias_dtype": _BIAS, "activation": _ACTIVATION},
}


def schema() -> str:
    """`FIELDS` as text, a line for each."""
    lines = []
    for op, fields in FIELDS.items():
        lines.append(f'"op": "{op}"')
        for name, (default, meaning) in fields.items():
            lines.append(f"  {name:20}{f'({default})' if default else 'required':15}{meaning}")
    return "\n".join(lines)
