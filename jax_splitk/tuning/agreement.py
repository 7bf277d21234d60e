"""The processes of a job lower the same program: process 0 decides, and tells the others.

Each process first waits at a barrier that is named after the key. The barrier holds only if all of them are about to
lower that problem. Then process 0 publishes its entry in the key-value store of `jax.distributed`. Where the barrier
does not hold, every process uses the shipped tables and the cost model, which are the same in all of them on machines
of one kind. At a second barrier each process says what keeps it from compiling the chosen kernel, such as a missing
compiler: then XLA computes the operation in all of them.
"""

import hashlib
import json
import logging
from collections.abc import Callable

from jax_splitk.runtime import _compat, settings
from jax_splitk.tuning import entry as entries
from jax_splitk.tuning import once
from jax_splitk.tuning.choice import Candidate
from jax_splitk.tuning.entry import Entry, InvalidEntry
from jax_splitk.tuning.key import Key

_logger = logging.getLogger("jax_splitk")

_MISS = "miss"

# The shortest wait for process 0's decision, which may take a measurement.
_DECISION_MS = 3_600_000


def timeout_seconds() -> float:
    """`JAX_SPLITK_AGREEMENT_TIMEOUT_S`, 60 by default: how long a process waits at each of the two barriers. For
    process 0's entry, which may take a measurement, it waits an hour, or this time if that is longer; then the lowering
    fails."""
    return settings.seconds("JAX_SPLITK_AGREEMENT_TIMEOUT_S")


def needed() -> bool:
    """Whether this process is one of several."""
    client, _, processes = _compat.distributed()
    return client is not None and processes > 1


def agree(key: Key, workspace_limit: int, decide: Callable[[], Entry | None]) -> tuple[bool, Entry | None]:
    """(agreed, process 0's entry or None for a miss there). `decide` runs in process 0 alone.

    In a job of a single process the result is that of `decide()`.
    """
    client, process, processes = _compat.distributed()
    if client is None or processes == 1:
        return True, decide()
    # Each round has a name of its own: the key-value store refuses to set a key again.
    asked = f"jax_splitk/{key.digest}/{workspace_limit}"
    name = f"{asked}/{once.state.count(asked)}"
    wait_ms = int(timeout_seconds() * 1000)
    try:
        client.wait_at_barrier(f"{name}/barrier", wait_ms)
    except Exception as error:
        _logger.warning("%s: the processes did not agree (%s); no cache is asked", key.problem, error)
        once.state.stopped_agreeing.add(key.digest)
        return False, None
    if process == 0:
        entry = None
        try:
            entry = decide()
        finally:  # the others wait, and must get an answer whatever happens here
            client.key_value_set(f"{name}/entry", _MISS if entry is None else entry.dumps())
        return True, entry
    # Process 0 answers in any case, and its death ends the job.
    text = client.blocking_key_value_get(f"{name}/entry", max(wait_ms, _DECISION_MS))
    if text == _MISS:
        return True, None
    try:
        return True, entries.loads(text, key)
    except InvalidEntry as error:
        raise RuntimeError(
            f"{key.problem}: process 0's decision is not valid in process {process} ({error}); "
            "the processes run different versions of jax_splitk, or on different devices"
        ) from error


def obstacle(key: Key, chosen: Candidate, own: str | None) -> str | None:
    """What keeps any process of the job from using the kernel that was chosen for the key; None if nothing does.

    Each process asks once for each kernel. `own` is what keeps this process from using the kernel, and the answer where
    not all processes ask. Kernels that differ only in their epilogue have one key.
    """
    client, process, processes = _compat.distributed()
    if client is None or processes == 1 or key.digest in once.state.stopped_agreeing:
        return own
    which = hashlib.sha256(json.dumps(chosen.as_dict(), sort_keys=True).encode()).hexdigest()[:16]
    asked = f"jax_splitk/{key.digest}/{which}"
    name = f"{asked}/{once.state.count(asked)}"
    if own is not None:
        client.key_value_set(f"{name}/obstacles/{process}", own.splitlines()[0])
    try:
        client.wait_at_barrier(f"{name}/compiled", int(timeout_seconds() * 1000))
    except Exception as error:
        _logger.warning("%s: not all processes have compiled %s (%s)", key.problem, chosen, error)
        return own
    others = client.key_value_dir_get(f"{name}/obstacles/")
    if own is not None or not others:
        return own
    where, text = min(others)
    return f"process {where.rpartition('/')[2]}: {text}"
