"""Compiled kernels in cache folders, for `cache merge`, `cache export` and `cache verify`."""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence

from jax_splitk.cli import output
from jax_splitk.cli.output import UsageError
from jax_splitk.cli.stored import Stored
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import compiler, disk, toolchain
from jax_splitk.runtime.compiler import CompilationError, Kernel
from jax_splitk.runtime.nvrtc import NvrtcError
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.runtime.source import Source, source_files
from jax_splitk.tuning import buckets
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry


def unusable(folder: pathlib.Path, code: Iterable[tuple[pathlib.Path, Kernel | None]]) -> Iterator[Stored]:
    """The files that cannot be used, with the reason. `code` is `compiler.cached` of the folder."""
    reason = disk.code_refusal(folder) or "it is not whole, or not to be trusted"
    for path, kernel in code:
        if kernel is None:
            yield Stored(path, None, reason, foreign=compiler.is_old(path))


# ---- merge and export ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Carried:
    """How many kernels were copied, compiled, and not written; and the files that were not used."""

    kernels: int = 0
    compiled: int = 0
    failed: int = 0
    unusable: list[Stored] = dataclasses.field(default_factory=list)


def carry(
    folders: Iterable[pathlib.Path], destination: pathlib.Path, entries: Sequence[Entry], *, complete: bool
) -> Carried:
    """Copies the folders' kernels, except those of candidates that were only measured.

    Args:
      entries: the decisions that the kernels go with.
      complete: whether kernels that the decisions need, and no folder has, are compiled.
    """
    wanted = {compiler.source_key(source): source for entry in entries for source in _needed(entry)}
    measured = {compiler.source_key(source) for entry in entries for source in _measured(entry)}
    carried = Carried()
    for folder in folders:
        if (refusal := disk.code_refusal(folder)) is not None and next(disk.files(folder, "cubin/*"), None):
            carried.unusable.append(Stored(folder / "cubin", None, refusal))
            continue
        code = list(compiler.cached(folder))
        carried.unusable += unusable(folder, code)
        for path, kernel in code:
            if kernel is not None and (kernel.source_key in wanted or kernel.source_key not in measured):
                _copy(path, destination / "cubin" / path.name, carried)
    if complete:
        there = {kernel.source_key for _, kernel in compiler.cached(destination) if kernel is not None}
        _compile([source for key, source in wanted.items() if key not in there], destination, carried)
    return carried


def _copy(path: pathlib.Path, to: pathlib.Path, carried: Carried) -> None:
    """Copies a file unless the destination has the same bytes; nothing else at the destination is trusted."""
    data = disk.read(path, own=True)
    if data is None or (os.path.lexists(to) and disk.read(to, own=True) == data):
        return
    if disk.write(to, data):
        carried.kernels += 1
    else:
        carried.failed += 1


def _compile(sources: list[Source], destination: pathlib.Path, carried: Carried) -> None:
    missing = toolchain.unavailable() if sources else None
    if missing is not None:
        reason = f"{len(sources)} kernels are missing and not compiled: {missing}"
        carried.unusable.append(Stored(destination / "cubin", None, reason))
        return
    for source, compiled in zip(sources, compiler.compile_sources(sources), strict=True):
        if compiler.store(destination, source, compiled):
            carried.compiled += 1
        else:
            carried.failed += 1


def _needed(entry: Entry) -> Iterator[Source]:
    """The sources of the kernels that lowering by an entry needs."""
    for candidate, problem in buckets.needed(entry):
        yield from _sources(candidate, problem)


def _measured(entry: Entry) -> Iterator[Source]:
    for measurement in entry.measurements:
        if measurement.candidate.refusal(entry.key.problem, entry.key.target) is None:
            yield from _sources(measurement.candidate, entry.key.problem)


def _sources(candidate: Candidate, problem: Problem) -> Iterator[Source]:
    plan = None if candidate == XLA else candidate.plan(problem)
    if isinstance(plan, DevicePlan):
        yield plan.source


# ---- verify ----------------------------------------------------------------------------------------------------------


def verify(arguments: argparse.Namespace) -> int:
    """Compiles every kernel again, and compares the results."""
    if (missing := toolchain.unavailable()) is not None:
        raise UsageError(f"kernels are compiled again, and there is no compiler: {missing}")
    for text in arguments.paths:
        if not os.path.isdir(text):
            raise UsageError(f"PATH={text!r}; accepted: a cache folder")
    folders = [pathlib.Path(text) for text in arguments.paths] or [output.users_cache()]
    code = [pair for folder in folders for pair in compiler.cached(folder)]
    refused = list(filter(None, map(disk.code_refusal, folders)))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        reasons = list(pool.map(_difference, (kernel for _, kernel in code)))
    wrong = [{"path": path, "reason": why} for (path, _), why in zip(code, reasons, strict=True) if why is not None]
    lines = [f"{item['path']}: {item['reason']}" for item in wrong]
    lines.append(f"{len(code) - len(wrong)} of {len(code)} kernels are what the compiler makes of their sources")
    value = {"kernels": len(code), "verified": len(code) - len(wrong), "wrong": wrong, "refused": refused}
    output.emit(value, "\n".join([*lines, *refused]), arguments.json)
    return 1 if wrong or refused else 0


def _difference(kernel: Kernel | None) -> str | None:
    """Why a kernel may differ from what the compiler makes of its source; None if it is the same."""
    if kernel is None:
        return "it is not whole, not to be trusted, or another version's"
    if kernel.source.file not in source_files():
        return f"not compared: its source {kernel.source.file!r} is not the package's"
    try:
        if compiler.source_key(kernel.source) != kernel.source_key:
            return "not compared: its source is another version's, or does not match its name"
        if compiler.content_key(kernel.source) != kernel.key:
            return f"not compared: {kernel.compiler} compiled it, and here is {toolchain.identity()}"
        compiled = compiler.compile_anew(kernel.source)
    except (CompilationError, NvrtcError, ValueError) as error:
        return f"its source does not compile: {error}"
    return None if compiled.image == kernel.compiled.image else "it is not what the compiler makes of its source"
