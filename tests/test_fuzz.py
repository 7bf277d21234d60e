"""Data from files and from XLA is damaged at random. It must be used if it is legal, and refused otherwise. No other
error escapes, and nothing crashes. Each run draws anew, and names its seed (JAX_SPLITK_TEST_SEED) at its beginning and
in failures."""

import collections
import dataclasses
import hashlib
import itertools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import cases
from jax_splitk import _ffi
from jax_splitk.cli import stored
from jax_splitk.cli.kernels import _difference as difference
from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.runtime import compiler, disk, execute
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning import buckets, once, search, select, store, table
from jax_splitk.tuning.choice import XLA
from jax_splitk.tuning.key import Key, key_for
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.result import TuningResult
from tests.damage import ODD_VALUES, mutate_json, mutate_text
from tests.problems import seeded
from tests.tuning_cache import (
    CASE,
    CPU,
    ONE,
    Candidate,
    assert_legal,
    put,
    random_entry,
    random_key,
    served,
    ship,
    wgrad_host,
)

Rng = np.random.Generator
# Tries one thing; "taken" or "refused".
Trial = Callable[[], str]


def damaged(rng: Rng, text: str, other: str) -> bytes:
    return mutate_json(rng, text, other).encode() if rng.integers(2) else mutate_text(rng, text)


def with_fewer_rows(rng: Rng, problem: Any) -> Any:
    """The problem; for a product with a quantized weight, one with fewer rows."""
    if not isinstance(problem, QuantizedMatmulProblem):
        return problem
    return dataclasses.replace(problem, rows=int(rng.integers(max(1, problem.rows - 20), problem.rows + 1)))


def with_full_tiles(key: Key) -> Key:
    """The problem of the first representative."""
    return next(iter(buckets.representatives(key)), key)


def entries(rng: Rng, cache: pathlib.Path) -> Trial:
    """Entries in the user's cache, and the choices that are made of them."""
    known = []
    for target, op in served((CPU, DEFAULT_CUDA)):
        for _ in range(2):
            key = with_full_tiles(random_key(rng, target, op))
            known.append((key, target, random_entry(rng, key, target).dumps()))

    def trial() -> str:
        key, target, text = known[rng.integers(len(known))]
        other = known[rng.integers(len(known))][-1]
        path = put(cache, key, other if rng.integers(50) == 0 else damaged(rng, text, other))
        found = store.lookup(key)
        if found is not None:
            assert_legal(found[0].choice, key, target)
            assert_legal(found[0].best(int(rng.integers(2**26))) or XLA, key, target)
        fewer = key_for(with_fewer_rows(rng, key.problem), target)  # which the entry may serve, too
        asked = (None, "host" if target is CPU else "cutlass")
        for each, implementation in itertools.product((key, fewer), asked):
            choice = select.select(each.problem, target, Options(implementation=implementation))
            assert_legal(choice.candidate, each, target)
            assert isinstance(choice.why, str)
        stored.read(path, cache)
        return "refused" if found is None else "taken"

    return trial


def shipped(rng: Rng, cache: pathlib.Path) -> Trial:
    """A table that ships with the package."""
    del cache
    keys = [key_for(CASE.problem(), CPU), key_for(CASE.problem("bfloat16"), CPU)]
    (path,) = {ship(key, Candidate(wgrad_host.FAMILY, ONE)) for key in keys}
    whole = path.read_text()

    def trial() -> str:
        path.write_bytes(damaged(rng, whole, whole))
        once.state = once.Once()
        key = keys[rng.integers(2)]
        found = table.lookup(key)
        choice = select.select(key.problem, CPU, Options(implementation="host"))
        assert_legal(choice.candidate, key, CPU)
        expected = None if found is None or found.best(2**28) is None else found.best(2**28, "host")
        assert expected in (None, choice.candidate)
        stored.read_table(path)
        return "refused" if found is None else "taken"

    return trial


def results(rng: Rng, cache: pathlib.Path) -> Trial:
    """The text of a TuningResult."""
    del cache
    key = random_key(rng, CPU)
    whole = TuningResult(((key, random_entry(rng, key, CPU)),)).dumps()
    item = json.dumps(json.loads(whole)[0])

    def trial() -> str:
        text = f"[{mutate_json(rng, item, item)}]" if rng.integers(2) else mutate_text(rng, whole)
        try:
            loaded = TuningResult.loads(text)
        except ValueError:
            return "refused"
        for key, entry in loaded:
            assert_legal(entry.choice, key, key.target)
        return "taken"

    return trial


def kernels(rng: Rng, cache: pathlib.Path) -> Trial:
    """A compiled kernel's file, of which half have a right checksum."""
    source = Source("contraction/wgrad.cu", (("TILE", 64), ("NAME", "x")))
    key = compiler.content_key(source)
    path = cache / compiler._file(key)
    whole = compiler._pack(key, "NVRTC 13.0", source, compiler.Compiled(b"", "Used 32 registers"))
    whole_kernel = compiler._unpack(whole)
    assert whole_kernel is not None
    header = json.loads(whole[len(compiler._FILE_MAGIC) + 32 : -1])

    def trial() -> str:
        text = damaged(rng, json.dumps(header), json.dumps(header)) if rng.integers(3) else json.dumps(header).encode()
        body = text + b"\0" * int(rng.integers(8) > 0) + rng.bytes(int(rng.integers(100)))
        data = compiler._FILE_MAGIC + hashlib.sha256(body).digest() + body
        if rng.integers(2):
            at = int(rng.integers(len(data)))
            data = data[:at] + rng.bytes(int(rng.integers(3))) + data[at + int(rng.integers(3)) :]
        assert disk.write(path, data)
        found = compiler._load(key)
        ((listed, kernel),) = compiler.cached(cache)
        assert (listed, kernel is None) == (path, found is None)
        assert compiler._load_any(compiler.source_key(source)) == found
        if kernel is None or kernel.source != whole_kernel.source:
            assert isinstance(difference(kernel), str)  # and nothing is compiled
        assert found is None or (isinstance(found.log, str) and data.endswith(found.image))
        return "refused" if found is None else "taken"

    return trial


EXTREMES = [0, 1, -1, 2, 16, 64, 65, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63)]


def changed_words(rng: Rng, words: list[int], other: list[int]) -> list[int]:
    at, extreme = int(rng.integers(len(words))), EXTREMES[rng.integers(len(EXTREMES))]
    changes = [
        [*words[:at], extreme, *words[at + 1 :]],
        [*words[:at], int(rng.integers(-(2**63), 2**63 - 1)), *words[at + 1 :]],
        [*words[:at], words[at] + int(rng.choice([-1, 1])), *words[at + 1 :]],
        [*words[:at], *words[at + int(rng.choice([1, 10, 1000])) :]],
        [*words[:at], *[extreme] * int(rng.choice([1, 3, 100])), *words[at:]],
        [*words[:at], *other[int(rng.integers(len(other))) :]],
    ]
    return [max(-(2**63), min(2**63 - 1, word)) for word in changes[rng.integers(len(changes))]] or [0]


def plans(rng: Rng, cache: pathlib.Path) -> Trial:
    """The launcher's plan, parsed in C++."""
    del cache
    problems = [case.problem("float32") for case in cases.SMALL_CASES if case.name in ("plain", "1x1", "c320k320")]
    made = []
    for problem in problems:
        configs = im2col.FAMILY.candidates(problem, DEFAULT_CUDA)
        made.append(im2col.FAMILY.plan(problem, configs[rng.integers(len(configs))]))

    def trial() -> str:
        plan, other = (made[rng.integers(len(made))] for _ in range(2))
        words, names = plan.words(), ",".join(plan.kernels())
        for _ in range(int(rng.choice([1, 1, 2, 5]))):
            words = changed_words(rng, words, other.words())
        try:
            counts = _ffi.check_plan(words, str(rng.choice([names, names, names, "", ",", "wgrad_direct", "a,b,c"])))
        except ValueError as error:
            assert str(error)
            return "refused"
        assert counts == tuple(words[2:5])
        return "taken"

    return trial


def calls(rng: Rng, cache: pathlib.Path) -> Trial:
    """The CPU kernels' handlers, with other attributes and another workspace."""
    del cache
    known = []
    for _, op in served((CPU,)):
        problem = random_key(rng, CPU, op).problem
        call = search.ranked(key_for(problem, CPU))[0].plan(problem).custom_call()
        known.append((problem, call, OPERATIONS[op].random_operands(problem, 1)))

    def trial() -> str:
        problem, call, operands = known[rng.integers(len(known))]
        attributes: dict[str, Any] = dict(call.attributes)
        name = str(rng.choice(list(attributes)))
        value = attributes[name]
        if isinstance(value, np.ndarray) and value.ndim:
            attributes[name] = np.array(changed_words(rng, value.tolist(), value.tolist()), value.dtype)
        elif rng.integers(4):
            attributes[name] = np.int64(EXTREMES[rng.integers(len(EXTREMES))])
        else:
            attributes[name] = str(ODD_VALUES[rng.integers(len(ODD_VALUES))]).encode("ascii", "ignore").decode()
        size = max(0, call.workspace_bytes + int(rng.choice([0, 0, 64, -64, -1])))
        changed = dataclasses.replace(call, attributes=attributes, workspace_bytes=size)
        if rng.integers(8) == 0:
            changed = call
        run = jax.jit(lambda *operands: execute.call(changed, problem, *operands))
        try:
            assert run(*operands).block_until_ready().shape == problem.out_shape
        except jax.errors.JaxRuntimeError as error:
            assert str(error)
            return "refused"
        return "taken"

    return trial


# 12 seconds in all for `make test-all`.
@pytest.mark.parametrize("seconds", [0.7, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("subject", [entries, shipped, results, kernels, plans, calls])
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of the CPU's handlers and keys")
def test_fuzz(subject: Callable[[Rng, pathlib.Path], Trial], seconds: float, cache: pathlib.Path) -> None:
    outcomes: collections.Counter[str] = collections.Counter()
    with seeded(70) as rng:
        trial = subject(rng, cache)
        until = time.monotonic() + seconds
        while time.monotonic() < until or not outcomes:
            outcomes[trial()] += 1
            disk._warn.cache_clear()
    print(subject.__name__, dict(outcomes))
    # It means something only if much is refused, and some is taken.
    assert sum(outcomes.values()) < 200 or min(outcomes["taken"], outcomes["refused"]) > 0, outcomes
