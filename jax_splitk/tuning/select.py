"""Problem to choice: an explicit config or implementation, else the cost model's best legal config, else XLA."""

import dataclasses
import functools
import logging
from typing import Any

from jax_splitk import compiler, kernels
from jax_splitk.problem import ConvWgradProblem
from jax_splitk.target import Target

logger = logging.getLogger("jax_splitk")

IMPLEMENTATIONS = ("cutlass", "host", "xla")
DEFAULT_WORKSPACE_LIMIT = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class Options:
    """What the caller asked for; see `jax_splitk.conv_wgrad` for each field."""

    config: Any = None
    implementation: str | None = None
    deterministic: bool = True
    workspace_limit_bytes: int | None = None

    @property
    def workspace_limit(self) -> int:
        limit = self.workspace_limit_bytes
        return DEFAULT_WORKSPACE_LIMIT if limit is None else limit


@dataclasses.dataclass(frozen=True)
class Choice:
    """What computes a problem. `family` and `config` are None for XLA.

    Attributes:
      why: one sentence, for logs and `jax_splitk.explain`.
      estimated_seconds: the cost model's prediction, None for XLA.
    """

    problem: ConvWgradProblem
    implementation: str
    family: kernels.Family | None
    config: Any
    workspace_bytes: int
    estimated_seconds: float | None
    why: str


def check_options(op: str, options: Options) -> None:
    """Raises ValueError or TypeError for options that no problem could make right."""
    if options.implementation is not None and options.implementation not in IMPLEMENTATIONS:
        accepted = ", ".join(repr(name) for name in IMPLEMENTATIONS)
        raise ValueError(f"implementation={options.implementation!r}; accepted: None, {accepted}")
    limit = options.workspace_limit_bytes
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
        raise ValueError(f"workspace_limit_bytes={limit!r}; accepted: None or an integer of at least 0")
    if not isinstance(options.deterministic, bool):
        raise TypeError(f"deterministic={options.deterministic!r}; accepted: True or False")
    if options.config is None:
        return
    known = [family for family in kernels.families(op) if isinstance(options.config, family.Config)]
    if not known:
        accepted = ", ".join(f"jax_splitk.kernels.{family.name}.Config" for family in kernels.families(op))
        raise TypeError(f"config={options.config!r} of type {type(options.config).__name__}; accepted: {accepted}")
    if options.implementation not in (None, known[0].implementation):
        raise ValueError(
            f"config={options.config!r} belongs to implementation={known[0].implementation!r}, "
            f"not {options.implementation!r}"
        )


@functools.lru_cache(maxsize=4096)
def select(problem: ConvWgradProblem, target: Target, options: Options) -> Choice:
    """The choice for `problem` on `target`: deterministic, the same in every process.

    Raises:
      NotImplementedError: an explicit implementation or config cannot serve; the message names the limit.
      ValueError: the config is not legal for the problem, or its workspace is over the limit.
    """
    if options.implementation == "xla":
        return _xla(problem, "implementation='xla' was asked for")
    refusals = []
    explicit = options.implementation is not None or options.config is not None
    for family in kernels.families(problem.op):
        if options.implementation not in (None, family.implementation):
            continue
        if options.config is not None and not isinstance(options.config, family.Config):
            continue
        refusal = _refusal(family, problem, target, explicit)
        if refusal is None:
            choice = _with_family(family, problem, target, options)
            if isinstance(choice, Choice):
                return choice
            refusal = choice
        if refusal:
            refusals.append(f"{family.name}: {refusal}")
    reason = "; ".join(refusals) or f"no kernel for platform {target.platform}"
    if explicit:
        raise NotImplementedError(
            f"{problem}: {reason}. Use implementation=None (falls back to XLA) or implementation='xla'."
        )
    return _xla(problem, reason)


def _refusal(family: kernels.Family, problem: ConvWgradProblem, target: Target, explicit: bool) -> str | None:
    """Why the family cannot serve (or, unless asked for by name, should not); "" for another platform's."""
    if family.platform != target.platform:
        return f"runs on {family.platform}, not {target.platform}" if explicit else ""
    reason = family.supports(problem, None, target)
    if reason is None and family.platform == "cuda":
        reason = compiler.unavailable()
    if reason is None and not explicit:
        reason = family.preferred(problem, target)
    return reason


def _with_family(family: kernels.Family, problem: ConvWgradProblem, target: Target, options: Options) -> Choice | str:
    """The family's choice, or why it has none."""
    limit = options.workspace_limit
    if options.config is not None:
        reason = family.supports(problem, options.config, target)
        if reason is not None:
            raise ValueError(f"config={options.config!r} is not legal for {problem}: {reason}")
        size = family.workspace_bytes(problem, options.config)
        if size > limit:
            raise ValueError(
                f"config={options.config!r} needs {size} bytes of workspace for {problem}; "
                f"workspace_limit_bytes={limit}"
            )
        seconds = family.estimate(problem, options.config, target)
        return Choice(
            problem,
            family.implementation,
            family,
            options.config,
            size,
            seconds,
            "the config was given explicitly",
        )
    configs = [c for c in family.candidates(problem, target) if family.workspace_bytes(problem, c) <= limit]
    if not configs:
        return f"no config fits in workspace_limit_bytes={limit}"
    best = min(configs, key=lambda c: family.estimate(problem, c, target))
    seconds = family.estimate(problem, best, target)
    why = f"the cost model's best of {len(configs)} configs ({seconds * 1e6:.1f} us predicted)"
    size = family.workspace_bytes(problem, best)
    return Choice(problem, family.implementation, family, best, size, seconds, why)


def _xla(problem: ConvWgradProblem, why: str) -> Choice:
    return Choice(problem, "xla", None, None, 0, None, why)


_announced: set[tuple[ConvWgradProblem, str]] = set()


def announce(choice: Choice) -> None:
    """One log line for each problem and outcome: falling back is never silent."""
    key = (choice.problem, choice.why)
    if key in _announced:
        return
    _announced.add(key)
    if choice.family is None:
        logger.info("%s: XLA (%s)", choice.problem, choice.why)
    else:
        logger.info("%s: %s %s (%s)", choice.problem, choice.implementation, choice.config, choice.why)
