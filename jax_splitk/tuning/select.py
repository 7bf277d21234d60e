"""Problem to choice, in the order of the design: an explicit config, the `TuningResult` in force, the caches, the
shipped table, a measurement where one may be made, the cost model, and XLA where no kernel of ours may or should serve.
"""

import dataclasses
import functools
import itertools
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

from jax_splitk import kernels
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import disk, settings, toolchain
from jax_splitk.runtime.target import Target
from jax_splitk.tuning import agreement, store, tuner, watch
from jax_splitk.tuning.entry import XLA, Candidate, Entry, family_named, merge
from jax_splitk.tuning.key import Key, key_for
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT, Options

logger = logging.getLogger("jax_splitk")

AUTOTUNE = ("off", "on_miss")


@dataclasses.dataclass(frozen=True)
class Choice:
    """What computes a problem. `family` and `config` are None for XLA.

    Attributes:
      because: what decided.
      estimated_seconds: the cost model's prediction, None for XLA.
      times: what was measured, in words; nobody may want to read them.
    """

    problem: Problem
    implementation: str
    family: kernels.Family | None
    config: Any
    workspace_bytes: int
    estimated_seconds: float | None
    because: str
    times: Callable[[], str] = dataclasses.field(compare=False, repr=False)

    @functools.cached_property
    def why(self) -> str:
        """One sentence, for logs and `jax_splitk.explain`."""
        return self.because + self.times()


def autotune(target: Target) -> bool:
    """Whether a miss is measured: `JAX_SPLITK_AUTOTUNE`, by default "on_miss" on a GPU and "off" on the CPU.

    Raises ValueError for any other word.
    """
    default = "on_miss" if target.platform == "cuda" else "off"
    return settings.word("JAX_SPLITK_AUTOTUNE", AUTOTUNE, default) == "on_miss"


def select(problem: Problem, target: Target, options: Options, *, measure: bool = False, final: bool = False) -> Choice:
    """The choice for `problem` on `target`.

    Args:
      measure: whether a miss may be measured now (and stored), if tuning is on.
      final: whether the choice will be lowered, and not only looked at.

    Raises:
      NotImplementedError: an explicit implementation or config cannot serve; the message names the limit.
      ValueError: the config is not legal for the problem, or its workspace is over the limit.
      FrozenCacheMiss: no entry, under `JAX_SPLITK_CACHE_MODE=frozen`, for a final choice.
    """
    if options.implementation == "xla":
        return xla(problem, "implementation='xla' was asked for")
    serving: list[kernels.Family] = []
    refusals: dict[str, list[str]] = {}  # families by reason
    explicit = options.explicit
    limits = {f.name: f.refusal(problem, None, target) for f in kernels.families(problem.op, target.platform)}
    for family in kernels.families(problem.op):
        if options.implementation not in (None, family.implementation):
            continue
        if options.config is not None and not isinstance(options.config, family.Config):
            continue
        refusal = _refusal(family, limits.get(family.name), target, options, measure)
        if refusal is None:
            serving.append(family)
        elif refusal:
            refusals.setdefault(refusal, []).append(family.name)
    if serving and options.config is not None:
        return _explicit(serving[0], problem, target, options)
    if serving:
        legal = [f for f in kernels.families(problem.op, target.platform) if limits[f.name] is None]
        key = key_for(problem, target, legal)
        choice = _decided(key, options, measure, final) or _predicted(serving, problem, target, options)
        if isinstance(choice, Choice):
            return choice
        for refusal, names in choice.items():
            refusals.setdefault(refusal, []).extend(names)
    reason = "; ".join(f"{', '.join(names)}: {refusal}" for refusal, names in refusals.items())
    reason = reason or f"no kernel for platform {target.platform}"
    if explicit:
        raise NotImplementedError(
            f"{problem}: {reason}. Use implementation=None (falls back to XLA) or implementation='xla'."
        )
    return xla(problem, reason)


def _refusal(family: kernels.Family, reason: str | None, target: Target, options: Options, measure: bool) -> str | None:
    """Why the family, which supports the problem but for `reason`, cannot serve; "" for another platform's family that
    nobody asked for."""
    if family.platform != target.platform:
        return f"runs on {family.platform}, not {target.platform}" if options.explicit else ""
    # A process of a job that lacks the compiler says so to the others when it comes to compile (tuning/code.py).
    together = measure and not options.explicit and agreement.needed()
    if reason is None and family.platform == "cuda" and not together:
        reason = toolchain.unavailable()
    return reason


def _explicit(family: kernels.Family, problem: Problem, target: Target, options: Options) -> Choice:
    config, limit = options.config, options.workspace_limit
    reason = family.refusal(problem, config, target)
    if reason is not None:
        raise ValueError(f"config={config!r} is not legal for {problem}: {reason}")
    size = family.workspace_bytes(problem, config)
    if size > limit:
        raise ValueError(
            f"config={config!r} needs {size} bytes of workspace for {problem}; workspace_limit_bytes={limit}"
        )
    return _ours(family, problem, config, target, "the config was given explicitly")


# ---- decisions by measurement --------------------------------------------------------------------------------------


def _decided(key: Key, options: Options, measure: bool, final: bool) -> Choice | None:
    """What a TuningResult, a cache, the shipped table or a measurement says; None where nothing does."""
    limit = options.workspace_limit
    entry = None if options.tuning is None else options.tuning.get(key)
    if entry is not None and entry.best(key, limit) is not None:
        return _from_entry(entry, "the TuningResult in force", key, options)
    if options.tuning is not None and entry is None:
        _say_what_does_not_match(options.tuning, key)
    if measure:
        entry, where = _agreed(key, limit)
    else:
        entry, where = _held(key, limit) or (None, "")
        if entry is None and final:
            _refuse_if_frozen(key, limit)
    return None if entry is None else _from_entry(entry, where, key, options)


_mismatches: set[Key] = set()


def _say_what_does_not_match(tuning: Any, key: Key) -> None:
    """One log line where a TuningResult has the problem, but not for this machine."""
    others = [other for other, _ in tuning if other.problem == key.problem]
    if not others or key in _mismatches:
        return
    _mismatches.add(key)
    logger.warning(
        "%s: the TuningResult in force is passed over: it decides for %s, and this is %s",
        *(key.problem, "; ".join(map(_machine, others)), _machine(key)),
    )


def _machine(key: Key) -> str:
    env = key.environment
    return f"{env.device_kind} ({env.platform}, {env.cores} cores, CUDA {env.cuda_major}, {', '.join(env.abi)})"


def _held(key: Key, workspace_limit: int) -> tuple[Entry, str] | None:
    """The first entry that this process or a layer of the cache has and that has an answer for the limit."""
    unsaved = [(_unsaved[key], "measured now")] if key in _unsaved else []
    answers = (e for e in itertools.chain(unsaved, store.found(key)) if e[0].best(key, workspace_limit) is not None)
    return next(answers, None)


def _agreed(key: Key, workspace_limit: int) -> tuple[Entry | None, str]:
    """The same entry in every process of the job, and where it comes from."""
    where = "process 0's decision"

    def decide() -> Entry | None:
        nonlocal where
        entry, where = measured_or_held(key, workspace_limit)
        return entry

    if (key, workspace_limit) in _settled:
        return _settled[key, workspace_limit]
    agreed, entry = agreement.agree(key, workspace_limit, decide)
    watch.decided(key, entry)
    decision = (entry, where) if agreed else (store.shipped(key), "shipped table")
    if agreement.needed():
        _settled[key, workspace_limit] = decision
    return decision


# Threads that miss the same problem at once measure it once.
_measuring = threading.Lock()

# Measurements that could not be stored: a process measures a problem once in any case.
_unsaved: dict[Key, Entry] = {}

# What the processes of a job settled on, by key and workspace limit: it holds for the life of the process, so that a
# problem that is lowered again needs no other agreement and cannot come out otherwise.
_settled: dict[tuple[Key, int], tuple[Entry | None, str]] = {}


def measured_or_held(key: Key, workspace_limit: int) -> tuple[Entry | None, str]:
    """The entry that decides in this process, and where it comes from: one that was searched under the limit, or a
    measurement, if tuning is on; else, or if that fails, which is logged, what is held. None for a miss."""
    again = watch.wants_again(key)
    held = _held(key, workspace_limit)
    if held is not None and not again and held[0].is_searched(workspace_limit):
        return held
    if held is None:
        _refuse_if_frozen(key, workspace_limit)
    if disk.mode() == "frozen" or not autotune(key.target):
        if held is None:
            logger.info("%s: not tuned; %s", key.problem, _command(key, workspace_limit))
        return held or (None, "")
    seconds = tuner.budget_seconds()
    try:
        with _measuring:
            held = _held(key, workspace_limit)  # another thread may have decided meanwhile
            if held is not None and not again and held[0].is_searched(workspace_limit):
                return held
            old = next((entry for entry, _ in store.found(key)), None)
            entry = tuner.tune(key, workspace_limit, old, seconds)
            if not store.save(key, entry):
                _unsaved[key] = merge(_unsaved.get(key), entry)
            return entry, "measured now"
    except Exception as error:  # a failed measurement (out of memory, say) must not fail the user's program
        fallback = "the cost model" if held is None else "the cache"
        logger.warning("%s: tuning failed (%s: %s); %s decides", key.problem, type(error).__name__, error, fallback)
        return held or (None, "")


def _refuse_if_frozen(key: Key, workspace_limit: int) -> None:
    if disk.mode() == "frozen":
        command = _command(key, workspace_limit)
        raise store.FrozenCacheMiss(f"{key.problem}: no entry, and JAX_SPLITK_CACHE_MODE=frozen; {command}")


def _command(key: Key, workspace_limit: int) -> str:
    """How to tune the problem ahead of time."""
    fields = json.dumps({"op": key.problem.op, **dataclasses.asdict(key.problem)})
    limit = "" if workspace_limit == DEFAULT_WORKSPACE_LIMIT else f" --workspace-limit-bytes {workspace_limit}"
    return f"to tune it ahead of time: python -m jax_splitk tune '{fields}'{limit}"


def _from_entry(entry: Entry, where: str, key: Key, options: Options) -> Choice | None:
    """The entry's answer within the limit, or its best of the implementation that was asked for."""
    candidate = entry.best(key, options.workspace_limit, options.implementation)
    if candidate is None:
        return None
    if candidate.family == XLA:
        return xla(key.problem, where, lambda: _times_of_xla(entry))
    family = family_named(key.problem.op, candidate.family)
    return _ours(family, key.problem, candidate.config, key.target, where, lambda: _times_of(entry, candidate))


def _times_of(entry: Entry, candidate: Candidate) -> str:
    ours, theirs = entry.us(candidate), entry.us(Candidate(XLA))
    return "" if ours is None or theirs is None else f": {ours:.1f} us, XLA {theirs:.1f} us"


def _times_of_xla(entry: Entry) -> str:
    best = min((m.us for m in entry.measurements if m.us and m.candidate.family != XLA), default=None)
    theirs = entry.us(Candidate(XLA))
    return "" if best is None or theirs is None else f": XLA {theirs:.1f} us, ours {best:.1f} us"


# ---- decisions by the cost model -----------------------------------------------------------------------------------


def _predicted(
    serving: list[kernels.Family], problem: Problem, target: Target, options: Options
) -> Choice | dict[str, list[str]]:
    """The cost model's best legal config, or why there is none: families by reason."""
    explicit, limit = options.implementation is not None, options.workspace_limit
    refusals: dict[str, list[str]] = {}
    found: list[tuple[float, int, kernels.Family, Any]] = []
    total = 0
    for family in serving:
        reason = None if explicit else family.unmeasured_refusal(problem)
        best, count = _best_by_model(family, problem, target, limit) if reason is None else (None, 0)
        total += count
        if best is None:
            refusals.setdefault(reason or f"no config fits in workspace_limit_bytes={limit}", []).append(family.name)
        else:
            found.append((family.estimate(problem, best, target), len(found), family, best))
    if not found:
        return refusals
    seconds, _, family, best = min(found, key=lambda item: item[:2])
    why = f"the cost model's best of {total} configs ({seconds * 1e6:.1f} us predicted)"
    return _ours(family, problem, best, target, why)


@functools.lru_cache(maxsize=4096)
def _best_by_model(family: kernels.Family, problem: Problem, target: Target, workspace_limit: int) -> tuple[Any, int]:
    """(config or None, number of configs that fit in the workspace)."""
    configs = [c for c in family.candidates(problem, target) if family.workspace_bytes(problem, c) <= workspace_limit]
    best = min(configs, key=lambda config: family.estimate(problem, config, target), default=None)
    return best, len(configs)


def _none() -> str:
    return ""


def _ours(
    family: kernels.Family,
    problem: Problem,
    config: Any,
    target: Target,
    because: str,
    times: Callable[[], str] = _none,
) -> Choice:
    size = family.workspace_bytes(problem, config)
    seconds = family.estimate(problem, config, target)
    return Choice(problem, family.implementation, family, config, size, seconds, because, times)


def xla(problem: Problem, because: str, times: Callable[[], str] = _none) -> Choice:
    """The operation in XLA's own terms, and why."""
    return Choice(problem, "xla", None, None, 0, None, because, times)


_announced: set[tuple[Problem, str]] = set()


def announce(choice: Choice) -> None:
    """One log line for each problem and outcome: falling back is never silent."""
    watch.chosen(choice)
    key = (choice.problem, choice.because)
    if key in _announced or not logger.isEnabledFor(logging.INFO):
        return
    _announced.add(key)
    if choice.family is None:
        logger.info("%s: XLA (%s)", choice.problem, choice.why)
    else:
        what = f"{choice.implementation} {choice.family.name} {choice.config}"
        logger.info("%s: %s (%s)", choice.problem, what, choice.why)
