"""The problems that both families serve."""

from jax_splitk.kernel_api import ConvWgradProblem


def refusal(problem: ConvWgradProblem) -> str | None:
    """None for a dense float32 convolution with 1x1 filters, without strides and padding; else the reason for the
    refusal."""
    for name, value, accepted in (
        ("dtype", problem.dtype, "float32"),
        ("out_dtype", problem.out_dtype, "float32"),
        ("kernel_spatial", set(problem.kernel_spatial), {1}),
        ("window_strides", set(problem.window_strides), {1}),
        ("lhs_dilation", set(problem.lhs_dilation), {1}),
        ("padding", set(problem.padding), {(0, 0)}),
        ("feature_group_count", problem.feature_group_count, 1),
        ("batch_group_count", problem.batch_group_count, 1),
    ):
        if value != accepted:
            return f"{name} {getattr(problem, name)}; accepted: {accepted}"
    return None
