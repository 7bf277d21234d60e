"""The checks to disable in `jax.export`, which takes only custom calls that somebody declares to be stable."""

from jax import export

from jax_splitk.runtime.plan import TARGETS

# For `jax.export.export(..., disabled_checks=...)`. The names of our custom calls end in a version. A process that
# calls the exported function must import a jax_splitk that registers the same names.
EXPORT_CHECKS: tuple[export.DisabledSafetyCheck, ...] = tuple(
    export.DisabledSafetyCheck.custom_call(target) for target in TARGETS
)
