"""Profiles a small training step: which kernels run, when, and under which names. See ../README.md.

python -m benchmarks.profile_step [--json benchmarks/results/profile_step_h200.json] [--tiny]
"""

import argparse
import functools
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

import jax_splitk
from benchmarks import report
from benchmarks.models import passes
from benchmarks.models.passes import FORWARD, INPUT, WEIGHT, Launch
from benchmarks.report import say

INT4, XLA = "int4 product", "XLA"
PARTS = (FORWARD, INPUT, WEIGHT, INT4, XLA)

# Parts of the step, by parts of the operation's name in HLO and of the kernel's name.
_SCOPES = {"conv_fprop": FORWARD, "conv_dgrad": INPUT, "conv_wgrad": WEIGHT, "quantized_matmul": INT4}
_SCOPES |= dict.fromkeys(("quantized_matmul_transposed", "quantized_matmul_epilogue"), INT4)
_SCOPES |= dict.fromkeys(("quantized_ragged_dot", "quantized_ragged_dot_epilogue"), INT4)
_KERNELS = {"fprop_": FORWARD, "dgrad_": INPUT, "wgrad_": WEIGHT, "quantized_": INT4}
_SCOPE = re.compile(r"jax_splitk\.(\w+)")
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .*metadata=\{[^}]*op_name="([^"]*)"', re.MULTILINE)

STEPS = 3  # steps in the profile. Only the last one counts: the first ones wait for the host
DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def sizes(tiny: bool) -> dict[str, int]:
    """Images, their height and width, channels, and features of the quantized product."""
    if tiny:
        return {"batch": 2, "size": 8, "channels": 16, "features": 64}
    return {"batch": 64, "size": 56, "channels": 64, "features": 4096}


def operands(batch: int, size: int, channels: int, features: int) -> tuple[Any, Any, Any, Any]:
    """(weights that are trained, int4 weights, images, targets)."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape) / np.sqrt(np.prod(shape[:-1])), jnp.float32)  # noqa: E731
    pooled = 16 * channels
    head = normal(pooled, features)
    pack = lambda w: jax_splitk.prepack(jax_splitk.quantize(w, "int4", group_size=64))  # noqa: E731
    weights = {name: normal(3, 3, channels, channels) for name in ("stem", "dense")}
    weights["depthwise"] = normal(7, 7, 1, channels)
    images = jnp.asarray(rng.standard_normal((batch, size, size, channels)), jnp.bfloat16)
    return weights, pack(head), images, jnp.asarray(rng.integers(0, features, batch))


def loss(weights: Any, head: Any, images: jax.Array, targets: jax.Array) -> jax.Array:
    """Dense and depthwise convolutions, and a product with frozen int4 weights."""
    conv = functools.partial(
        jax_splitk.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=DIMENSIONS,
        compute_dtype=jnp.bfloat16,
    )
    batch, size, _, channels = images.shape
    with jax.named_scope("stem"):
        x = jax.nn.relu(conv(images, weights["stem"]))
    with jax.named_scope("depthwise"):
        x = jax.nn.relu(conv(x, weights["depthwise"], feature_group_count=channels))
    with jax.named_scope("dense"):
        x = jax.nn.relu(conv(x, weights["dense"]))
    x = x.reshape(batch, 4, size // 4, 4, size // 4, channels).mean((2, 4)).reshape(batch, -1)
    with jax.named_scope("head"):
        logits = jax_splitk.quantized_matmul(x.astype(jnp.bfloat16), head)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), targets[:, None], 1).mean()


def step(weights: Any, *data: Any) -> tuple[Any, jax.Array]:
    """One of SGD: (weights, loss)."""
    value, gradients = jax.value_and_grad(loss)(weights, *data)
    return jax.tree.map(lambda w, d: w - 0.1 * d, weights, gradients), value


def op_names(text: str) -> dict[str, str]:
    """The `op_name` of each instruction of a compiled program, by the instruction's name."""
    return dict(_INSTRUCTION.findall(text))


def scope(op_name: str) -> str | None:
    """Our operation in an instruction's `op_name`, or None."""
    found = _SCOPE.search(op_name)
    return found[1] if found else None


def part_of(kernel: str, op_name: str) -> str:
    """The part of a step that a kernel computes: by the kernel's name if it is ours, else by the operation's name."""
    by_kernel = (part for start, part in _KERNELS.items() if kernel.startswith(start))
    return next(by_kernel, _SCOPES.get(scope(op_name) or "", XLA))


def described(launches: Sequence[Launch], names: dict[str, str]) -> list[dict[str, Any]]:
    """One step's launches as plain data, in the order of their starts. Times are microseconds since the first start."""
    ordered = sorted(launches, key=lambda launch: launch.start)
    return [
        {
            "kernel": launch.kernel,
            "instruction": launch.instruction,
            "op_name": (op_name := names.get(launch.instruction, "")),
            "part": part_of(launch.kernel, op_name),
            "start_us": (launch.start - ordered[0].start) * 1e-3,
            "us": (launch.end - launch.start) * 1e-3,
        }
        for launch in ordered
    ]


def last_step(launches: Sequence[Launch], steps: int) -> list[Launch]:
    """The launches of the last of `steps` equal steps. Raises ValueError if the steps are not equal."""
    ordered = sorted(launches, key=lambda launch: launch.start)
    each, rest = divmod(len(ordered), steps)
    of_steps = [ordered[i * each : (i + 1) * each] for i in range(steps)]
    kernels = [sorted(launch.kernel for launch in of_step) for of_step in of_steps]
    if rest or kernels != kernels[:1] * steps:
        raise ValueError(f"{len(ordered)} kernels in {steps} steps; accepted: the same kernels in each step")
    return of_steps[-1]


def ours(names: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(instruction, op_name) of our operations, each op_name once."""
    found = {op_name: name for name, op_name in reversed(names.items()) if scope(op_name)}
    return ((name, op_name) for op_name, name in sorted(found.items()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile_step", description="A profile of a small training step on a GPU."
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE.json", help="write the kernels of one step")
    parser.add_argument("--tiny", action="store_true", help="small arrays, to try it on a CPU")
    options = parser.parse_args(argv)
    # A profile does not say which instruction launched a kernel of a CUDA graph.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    weights, *data = operands(**sizes(options.tiny))
    say(str(jax_splitk.explain(step, weights, *data)))
    compiled: Any = jax.jit(step).lower(weights, *data).compile()
    names = op_names(compiled.as_text())
    say(report.markdown([("instruction", "op_name"), *ours(names)]))

    def run(steps: int) -> None:
        jax.block_until_ready([compiled(weights, *data) for _ in range(steps)])

    run(STEPS)
    launches = passes.launches_of(functools.partial(run, STEPS)) if report.on_gpu() else []
    if not launches:
        say(f"no GPU kernels in the profile on {jax.devices()[0].device_kind}: nothing is written")
        return 1 if options.json else 0
    kernels = described(last_step(launches, STEPS), names)
    rows = [(k["kernel"], k["part"], f"{k['start_us']:.1f}", f"{k['us']:.1f}") for k in kernels]
    say(report.markdown([("kernel", "part", "start us", "us"), *rows]))
    if options.json:
        result = {"name": "step", "sizes": sizes(options.tiny), "launches": kernels}
        whole = {"benchmark": "profile_step", "environment": report.environment(), "results": [result]}
        report.write(options.json, whole)
    return 0


if __name__ == "__main__":
    sys.exit(main())
