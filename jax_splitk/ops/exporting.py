"""What `jax.export` has to be told: it takes only custom calls whose compatibility somebody answers for."""

from jax import export

from jax_splitk.runtime.plan import TARGETS

# For `jax.export.export(..., disabled_checks=...)`. The names of our custom calls end in a version, and what calls the
# exported function must have imported a jax_splitk that registers the same ones.
EXPORT_CHECKS: tuple[export.DisabledSafetyCheck, ...] = tuple(
    export.DisabledSafetyCheck.custom_call(target) for target in TARGETS
)
