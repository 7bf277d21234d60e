"""Which implementation and config computes a problem, and the messages about it."""

import dataclasses
import functools
import logging
import os
import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import cases
from jax_splitk import kernels
from jax_splitk.kernels import catalogue
from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.ops import lowering
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import compiler, toolchain
from jax_splitk.runtime.target import DEFAULT_CUDA, Target, target_for
from jax_splitk.tuning import agreement, search, store, table
from jax_splitk.tuning.choice import XLA, Candidate, Choice
from jax_splitk.tuning.entry import Entry, Measurement
from jax_splitk.tuning.key import Key, key_for
from jax_splitk.tuning.options import IMPLEMENTATIONS, Options, check_options
from jax_splitk.tuning.select import announce, code_of, select
from tests.kernels.conv.tried import IM2COL
from tests.tuning_cache import finish, isolate, start

CPU = Target("cpu", "cpu", "", 4)
TPU = Target("tpu", "TPU v5", "", 1)
A100 = Target("cuda", "NVIDIA A100-SXM4-80GB", "8.0", 108)

PROBLEM = next(case for case in cases.WGRAD_CASES if case.batch == 8 and case.in_channels == 64).problem()
UNKNOWN = dataclasses.replace(PROBLEM, batch=9)  # to the shipped table: the cost model chooses
GROUPED = next(case for case in cases.WGRAD_CASES if case.groups == 32).problem()
# 260 channels a group, in float32.
WIDE = dataclasses.replace(GROUPED, in_channels=8320, out_channels=8320, dtype="float32", out_dtype="float32")
BATCH_GROUPED = dataclasses.replace(PROBLEM, batch_group_count=2)


ON_CUDA = ", ".join(family.name for family in kernels.families("conv_wgrad", "cuda"))


def choose(problem: ConvWgradProblem, target: Target, **options: Any) -> Choice:
    return select(problem, target, Options(**options))


@pytest.mark.parametrize(("problem", "target", "implementation"), [
    (PROBLEM, DEFAULT_CUDA, "cutlass"),
    (PROBLEM, CPU, "host"),
    (PROBLEM, A100, "xla"),
    (PROBLEM, TPU, "xla"),
    (GROUPED, DEFAULT_CUDA, "cutlass"),
    (WIDE, DEFAULT_CUDA, "xla"),
    (GROUPED, CPU, "host"),
    (BATCH_GROUPED, DEFAULT_CUDA, "xla"),
    (BATCH_GROUPED, CPU, "xla"),
    (dataclasses.replace(PROBLEM, dtype="float64", out_dtype="float64"), CPU, "xla"),
    (dataclasses.replace(PROBLEM, dtype="float32", out_dtype="float32"), DEFAULT_CUDA, "cutlass"),
    (dataclasses.replace(PROBLEM, dtype="float64", out_dtype="float64"), DEFAULT_CUDA, "xla"),
])  # fmt: skip
def test_each_target_gets_what_it_can_run(problem: ConvWgradProblem, target: Target, implementation: str) -> None:
    choice = choose(problem, target)
    assert (choice.problem, choice.implementation) == (problem, implementation)
    if implementation == "xla":
        assert (choice.family, choice.config, choice.workspace_bytes) == (None, None, 0)
    else:
        assert choice.family.implementation == implementation
        assert choice.family.platform == target.platform
        assert choice.family.refusal(problem, choice.config, target) is None
        assert choice.workspace_bytes == choice.family.workspace_bytes(problem, choice.config)


def test_falling_back_says_why() -> None:
    assert choose(PROBLEM, A100).why == (
        f"{ON_CUDA}: needs a GPU of compute capability 9.0 (Hopper), not NVIDIA A100-SXM4-80GB (8.0)"
    )
    assert choose(PROBLEM, TPU).why == "no kernel for platform tpu"
    assert choose(BATCH_GROUPED, CPU).why == "wgrad_host: batch_group_count 2; accepted: 1"
    assert "8320 input and 8320 output channels in 32 groups" in choose(WIDE, DEFAULT_CUDA).why
    assert choose(PROBLEM, CPU, implementation="xla").why == "implementation='xla' was asked for"


def test_an_explicit_implementation_comes_before_preference() -> None:
    half = dataclasses.replace(PROBLEM, in_channels=256, dtype="float16")
    assert wgrad_host.FAMILY.why_xla_untuned(half) is not None
    assert choose(half, CPU).implementation == "xla"
    assert choose(half, CPU).why == f"wgrad_host: {wgrad_host.FAMILY.why_xla_untuned(half)}"
    assert choose(half, CPU, implementation="host").implementation == "host"
    assert choose(half, CPU, config=wgrad_host.Config(2, 128)).implementation == "host"


def test_an_explicit_config_comes_before_the_cost_model() -> None:
    best = choose(PROBLEM, DEFAULT_CUDA).config
    other = dataclasses.replace(best, swap=not best.swap)
    choice = choose(PROBLEM, DEFAULT_CUDA, config=other)
    assert (choice.config, choice.why) == (other, "the config was given explicitly")
    assert choice.workspace_bytes == im2col.FAMILY.workspace_bytes(PROBLEM, other)
    assert choose(PROBLEM, DEFAULT_CUDA, config=other, implementation="cutlass") == choice


def test_the_best_of_the_candidates_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(table, "FOLDER", tmp_path)  # which has an answer for this problem
    choice = choose(PROBLEM, DEFAULT_CUDA)
    serving = [f for f in kernels.families("conv_wgrad", "cuda") if f.refusal(PROBLEM, None, DEFAULT_CUDA) is None]
    serving = [f for f in serving if f.why_xla_untuned(PROBLEM) is None]
    assert len(serving) > 1
    times = [f.estimate(PROBLEM, c, DEFAULT_CUDA) for f in serving for c in f.candidates(PROBLEM, DEFAULT_CUDA)]
    assert choice.family.estimate(PROBLEM, choice.config, DEFAULT_CUDA) == min(times)
    assert choice.why == f"the cost model's best of {len(times)} configs ({min(times) * 1e6:.1f} us predicted)"


def test_an_explicit_implementation_takes_the_fastest_that_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """The fastest of all its families, even if the decision is XLA."""
    isolate(monkeypatch, tmp_path)
    key = key_for(PROBLEM, DEFAULT_CUDA)
    ranking = search.ranked(key)
    families = list(dict.fromkeys(candidate.name for candidate in ranking))
    assert len(families) > 1
    fastest = [next(c for c in ranking if c.name == name) for name in families]
    for slowest_first in (fastest, fastest[::-1]):
        times = [Measurement(c, 100.0 - 10 * i) for i, c in enumerate(slowest_first)]
        found = Entry.of(key, XLA, (Measurement(XLA, 5.0), *times), ranking[0], {})
        assert store.save(found)
        choice = choose(PROBLEM, DEFAULT_CUDA, implementation="cutlass")
        assert choice.family is not None
        assert (choice.family.name, choice.config) == (slowest_first[-1].name, slowest_first[-1].config)


@pytest.mark.parametrize("case", cases.SMALL_CASES[:6], ids=lambda case: case.name)
def test_no_workspace_means_one_launch_on_hopper(case: cases.Case) -> None:
    choice = choose(case.problem("float32"), DEFAULT_CUDA, implementation="cutlass", workspace_limit_bytes=0)
    assert choice.workspace_bytes == 0
    assert choice.family is not None
    assert len(choice.family.plan(choice.problem, choice.config).launches) == 1


def test_the_workspace_limit_is_the_limit() -> None:
    size = choose(UNKNOWN, DEFAULT_CUDA).workspace_bytes
    assert 0 < size <= 256 * 2**20
    assert choose(UNKNOWN, DEFAULT_CUDA, workspace_limit_bytes=size).workspace_bytes == size
    assert choose(UNKNOWN, DEFAULT_CUDA, workspace_limit_bytes=size - 1).workspace_bytes < size
    config = choose(UNKNOWN, DEFAULT_CUDA).config
    assert choose(UNKNOWN, DEFAULT_CUDA, config=config, workspace_limit_bytes=size).config == config
    with pytest.raises(ValueError, match=rf"needs {size} bytes of workspace .*; workspace_limit_bytes={size - 1}$"):
        choose(UNKNOWN, DEFAULT_CUDA, config=config, workspace_limit_bytes=size - 1)
    # The host kernel always packs into its workspace.
    assert choose(UNKNOWN, CPU, workspace_limit_bytes=0).why == "wgrad_host: no config fits in workspace_limit_bytes=0"


def test_default_workspace_limit_is_256_mib() -> None:
    assert Options().workspace_limit == 256 * 2**20
    assert Options(workspace_limit_bytes=0).workspace_limit == 0
    for case in cases.WGRAD_CASES:
        for target in (DEFAULT_CUDA, CPU):
            assert choose(case.problem(), target).workspace_bytes <= 256 * 2**20


@pytest.mark.parametrize(("problem", "target", "options", "reason"), [
    (PROBLEM, CPU, {"implementation": "cutlass"}, f"{ON_CUDA}: runs on cuda, not cpu"),
    (PROBLEM, DEFAULT_CUDA, {"implementation": "host"}, "wgrad_host: runs on cpu, not cuda"),
    (PROBLEM, DEFAULT_CUDA, {"config": wgrad_host.Config(1, 64)}, "wgrad_host: runs on cpu, not cuda"),
    (PROBLEM, TPU, {"implementation": "host"}, "wgrad_host: runs on cpu, not tpu"),
    (PROBLEM, A100, {"implementation": "cutlass"}, f"{ON_CUDA}: needs a GPU of compute capability 9.0"),
    (BATCH_GROUPED, DEFAULT_CUDA, {"implementation": "cutlass"}, ""),
    (BATCH_GROUPED, CPU, {"implementation": "host"}, "wgrad_host: batch_group_count 2"),
])  # fmt: skip
def test_an_explicit_choice_that_cannot_serve_is_an_error(
    problem: ConvWgradProblem, target: Target, options: dict[str, Any], reason: str
) -> None:
    way_out = "Use implementation=None (the best that can) or implementation='xla'."
    pattern = f"^{re.escape(str(problem))}: {re.escape(reason)}.*{re.escape(way_out)}$"
    with pytest.raises(NotImplementedError, match=pattern):
        choose(problem, target, **options)
    assert choose(problem, target, implementation="xla").implementation == "xla"


def test_an_illegal_config_is_a_value_error_with_the_reason() -> None:
    config = dataclasses.replace(choose(PROBLEM, DEFAULT_CUDA).config, stages=99)
    reason = re.escape(str(im2col.FAMILY.refusal(PROBLEM, config)))
    with pytest.raises(ValueError, match=rf"config=Config\(.*stages=99.*\) is not legal for conv_wgrad .*: {reason}$"):
        choose(PROBLEM, DEFAULT_CUDA, config=config)


def test_without_a_compiler_hopper_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering needs a compiler or a cached kernel; asking for the choice does not."""
    chosen = select(PROBLEM, DEFAULT_CUDA, Options())
    monkeypatch.setattr(toolchain, "unavailable", lambda: "no compiler in this test")
    lowered = functools.partial(select, PROBLEM, DEFAULT_CUDA, final=True)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "held", lambda source: compiler.Compiled(b"code", "log"))
        assert lowered(Options(implementation="cutlass")).implementation == "cutlass"
    monkeypatch.setattr(compiler, "held", lambda source: None)
    assert re.search(r"wgrad_im2col: no compiler in this test$", lowered(Options()).why)
    with pytest.raises(NotImplementedError, match="no compiler in this test"):
        lowered(Options(implementation="cutlass"))
    for options in (Options(), Options(implementation="cutlass"), Options(chosen.config)):
        found = select(PROBLEM, DEFAULT_CUDA, options)
        assert (found.implementation, found.config) == ("cutlass", chosen.config)
    assert select(PROBLEM, DEFAULT_CUDA, Options()) == chosen
    assert select(PROBLEM, CPU, Options()).implementation == "host"


def test_in_a_job_a_process_without_a_compiler_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must reach the others' barriers, where they learn that it cannot compile."""
    monkeypatch.setattr(compiler, "held", lambda source: None)
    monkeypatch.setattr(toolchain, "unavailable", lambda: "no compiler in this test")
    monkeypatch.setattr(agreement, "needed", lambda: True)
    monkeypatch.setattr(agreement, "agree", lambda key, limit, decide: (True, None))
    choice = select(PROBLEM, DEFAULT_CUDA, Options(), measure=True, final=True)
    assert choice.implementation == "cutlass"
    assert select(PROBLEM, DEFAULT_CUDA, Options(), final=True).why.endswith("no compiler in this test")
    with pytest.raises(NotImplementedError, match="no compiler in this test"):
        select(PROBLEM, DEFAULT_CUDA, Options(implementation="cutlass"), measure=True, final=True)
    told = []

    def refused(source: compiler.Source) -> compiler.Compiled:
        raise toolchain.CompilerUnavailable("no compiler in this test")

    def obstacle(key: Key, chosen: Candidate, own: str | None) -> str | None:
        told.append((key.problem, chosen.config, own))
        return own

    monkeypatch.setattr(compiler, "compile_source", refused)
    monkeypatch.setattr(agreement, "obstacle", obstacle)
    for _ in range(2):
        lowered, custom_call = code_of(choice, DEFAULT_CUDA, Options(), agreed=True)
        assert (lowered.implementation, custom_call) == ("xla", None)
        assert lowered.why == f"{choice.family.name}: no compiler in this test"
    assert told == [(PROBLEM, choice.config, lowered.why)]


def test_every_implementation_is_a_familys() -> None:
    assert {family.implementation for family in kernels.families("conv_wgrad")} | {"xla"} == set(IMPLEMENTATIONS)


OF_TYPE: dict[Any, Any] = {int: 1, bool: False, str: "word"}
OF_OTHERS: dict[Any, tuple[Any, ...]] = {
    int: (True, 1.0, 2.5, "1", None, np.int64(1), (1,)),
    bool: (0, 1, None, "", np.False_),
    str: (1, None, b"word", np.str_("word")),
}


@pytest.mark.parametrize(
    ("op", "family"),
    [pytest.param(op, family, id=family.name) for op, families in catalogue.FAMILIES.items() for family in families],
)
def test_a_configs_fields_are_of_exactly_their_types(op: str, family: kernels.Family) -> None:
    fields: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(family.Config)}
    right = {name: OF_TYPE[kind] for name, kind in fields.items()}
    check_options(op, Options(family.Config(**right)))
    for name, kind in fields.items():
        for value in OF_OTHERS[kind]:
            config = family.Config(**{**right, name: value})
            module = "numpy." if isinstance(value, np.generic) else ""  # some of whose types have Python's names
            of = f"{name}={value!r} of type {module}{type(value).__name__}; accepted: {kind.__name__}"
            said = f"config={config!r} has {of}"
            with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
                check_options(op, Options(config))
            with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
                check_options(op, Options(config, family.implementation))


@pytest.mark.parametrize("case", cases.WGRAD_CASES, ids=lambda case: case.name)
def test_the_suite_is_in_the_shipped_table(case: cases.Case) -> None:
    problem = case.problem()
    entry = table.lookup(key_for(problem, DEFAULT_CUDA))
    assert entry is not None
    choice = choose(problem, DEFAULT_CUDA)
    assert choice.why.startswith("shipped table: ")
    if choice.family is not None:
        assert choice.family.refusal(problem, choice.config, DEFAULT_CUDA) is None


# ---- the log -------------------------------------------------------------------------------------------------------


def test_each_outcome_is_announced_once_per_problem(caplog: pytest.LogCaptureFixture) -> None:
    ours, fallback = choose(PROBLEM, DEFAULT_CUDA), choose(PROBLEM, A100)
    other = choose(dataclasses.replace(PROBLEM, batch=16), DEFAULT_CUDA)
    with caplog.at_level(logging.INFO, "jax_splitk"):
        for choice in (ours, fallback, ours, other, fallback, other, ours):
            announce(choice, Options())
    assert [record.getMessage() for record in caplog.records] == [
        f"{PROBLEM}: cutlass {ours.family.name} {ours.config} ({ours.why})",
        f"{PROBLEM}: XLA ({fallback.why})",
        f"{other.problem}: cutlass {other.family.name} {other.config} ({other.why})",
    ]
    assert {record.name for record in caplog.records} == {"jax_splitk"}


def test_a_fallback_that_costs_time_is_a_warning_once_for_each_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def levels(problem: ConvWgradProblem, target: Target = DEFAULT_CUDA, **how: Any) -> list[str]:
        caplog.clear()
        announce(lowering.choose(problem, target, Options(), final=True, **how), Options())
        return [record.levelname for record in caplog.records]

    other, double = (dataclasses.replace(PROBLEM, **new) for new in ({"batch": 16}, {"dtype": "float64"}))
    with caplog.at_level(logging.INFO, "jax_splitk"):
        assert levels(PROBLEM, undivided="odd") == ["WARNING"]
        assert caplog.messages == [
            f"{PROBLEM}: XLA where a kernel would serve: automatic partitioning over several devices: odd "
            "(said once for each reason)"
        ]
        assert levels(other, undivided="odd") == ["INFO"]
        assert levels(other, undivided="even") == ["WARNING"]
        # No warning if no kernel would serve, or if XLA is the better choice.
        for problem, target in ((double, DEFAULT_CUDA), (WIDE, DEFAULT_CUDA), (PROBLEM, A100), (UNKNOWN, CPU)):
            assert levels(problem, target, undivided="other") == ["INFO"]
        assert levels(WIDE) == levels(PROBLEM, A100) == ["INFO"]
        monkeypatch.setattr(compiler, "held", lambda source: None)
        monkeypatch.setattr(toolchain, "unavailable", lambda: "no compiler")
        assert levels(PROBLEM) == ["WARNING"]
        assert levels(other) == ["INFO"]


def test_problems_that_differ_read_differently() -> None:
    changes: list[dict[str, Any]] = [
        {"batch": 9},
        {"input_spatial": (57, 56)},
        {"output_spatial": (57, 56)},
        {"kernel_spatial": (3, 1)},
        {"in_channels": 72},
        {"out_channels": 72},
        {"window_strides": (2, 1)},
        {"lhs_dilation": (1, 2)},
        {"rhs_dilation": (1, 2)},
        {"feature_group_count": 2},
        {"batch_group_count": 2},
        {"dtype": "float16"},
        {"out_dtype": "float32"},
    ]
    texts = [str(PROBLEM), *(str(dataclasses.replace(PROBLEM, **change)) for change in changes)]
    assert len(set(texts)) == len(texts)


# ---- determinism ---------------------------------------------------------------------------------------------------


def decisions() -> list[str]:
    """Choices for the suite, and the candidates of a forward pass: among equal estimates the first one is chosen."""
    choices = [
        choose(case.problem(), target, workspace_limit_bytes=limit)
        for case in cases.WGRAD_CASES
        for target in (DEFAULT_CUDA, CPU)
        for limit in (None, 10**6)
    ]
    volume = IM2COL.networks[5]
    assert volume.rank == 3
    described = [f"{choice} {choice.workspace_bytes} {choice.why}" for choice in choices]
    return [*described, *map(repr, IM2COL.of(volume).candidates(volume, DEFAULT_CUDA))]


@pytest.mark.parametrize("seed", ["1", pytest.param("2", marks=pytest.mark.exhaustive)])
def test_every_process_decides_the_same(seed: str) -> None:
    """The seed of this process is another one."""
    script = "import json; from tests.tuning.test_select import decisions; print(json.dumps(decisions()))"
    ((found, _),) = finish(start(script, environment={"PYTHONHASHSEED": seed}))
    assert found == decisions()


def test_the_number_of_cores_matters_and_the_name_does_not() -> None:
    renamed = dataclasses.replace(DEFAULT_CUDA, device_kind="NVIDIA GH200 480GB")
    assert choose(UNKNOWN, renamed).config == choose(UNKNOWN, DEFAULT_CUDA).config
    small = choose(UNKNOWN, dataclasses.replace(DEFAULT_CUDA, cores=20))
    assert small.config != choose(UNKNOWN, DEFAULT_CUDA).config
    predicted = [float(re.search(r"([\d.]+) us predicted", c.why)[1]) for c in (small, choose(UNKNOWN, DEFAULT_CUDA))]
    assert predicted[0] > predicted[1]


def test_targets_of_this_machine() -> None:
    assert DEFAULT_CUDA.is_hopper
    assert not A100.is_hopper
    assert not dataclasses.replace(DEFAULT_CUDA, platform="rocm").is_hopper
    cpu = target_for("cpu")
    assert (cpu.platform, cpu.is_hopper, cpu.cores) == ("cpu", False, len(os.sched_getaffinity(0)))
    assert cpu.device_kind not in ("", "cpu")  # one CPU's decisions are not another's
    assert target_for("cpu") is cpu
    assert target_for("tpu").platform == "tpu"


def test_without_a_gpu_cuda_means_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert target_for.__wrapped__("cuda") == DEFAULT_CUDA == Target("cuda", "NVIDIA H200", "9.0", 132)


def test_a_gpu_describes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        device_kind, compute_capability, core_count = "NVIDIA A100-SXM4-80GB", "8.0", 108

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [Device()])
    assert target_for.__wrapped__("cuda") == A100
