"""What families of matrix products refuse alike."""

from jax_splitk.problems.dot_general import DotProblem

# XLA's xla_gpu_gemm_rewrite_size_threshold: products with a smaller (m + n) * k are loops.
_LEAST_ELEMENTS = 100


def tf32(problem: DotProblem) -> str | None:
    """Why a float32 product is not for tf32, None for others: of vectors, outer products and the smallest products XLA
    makes loops in float32."""
    p = problem
    if p.dtype != "float32":
        return None
    for name in "mnk":
        if getattr(p, name) == 1:
            return f"float32 with {name}=1, which XLA computes without tf32; accepted: at least 2"
    if (elements := (p.m + p.n) * p.k) < _LEAST_ELEMENTS:
        rule = f"XLA computes it without tf32; accepted: at least {_LEAST_ELEMENTS}"
        return f"float32 with (m + n) * k = {elements}: {rule}"
    return None
