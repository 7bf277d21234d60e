"""Unchanged language models of Flax on packed weights, against the same models with bfloat16 weights. See README.md
beside this file. Models that qwix quantizes need the package qwix.

python -m benchmarks.quantized_models [--cases MODEL_FRAMEWORK_OR_NAME ...] [--qtype NAME] [--group N] [--json FILE]
"""

import argparse
import atexit
import dataclasses
import functools
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx, traverse_util
from jax import numpy as jnp

import jax_splitk
from benchmarks import report, timing
from benchmarks.cases import find
from benchmarks.language_models import MODELS, LinenModel, Model, Size
from benchmarks.report import say
from jax_splitk.layers import flax_linen, flax_nnx
from jax_splitk.quantized import PackedWeight

# A model of 8 billion parameters, with fewer layers and a smaller vocabulary.
SIZE = Size(layers=4, width=4096, heads=32, groups=8, head=128, hidden=14336, vocabulary=32768)
TOKENS = ((1, 1), (16, 1), (1, 1024))  # [sequences, tokens of each]
FRAMEWORKS = ("nnx", "linen", "qwix")
UNTUNED: dict[str, Any] = {"xla_gpu_autotune_level": 0}  # options of a program that is not timed

Program = tuple[Callable[..., Any], Any]  # a function of (parameters, tokens), and its parameters


@dataclasses.dataclass(frozen=True)
class Case:
    """A model's logits for some tokens.

    Attributes:
      framework: "nnx", with a list of layers; "linen", with `nn.scan` over stacked layers; or "qwix": qwix's
        post-training quantization of the nnx model.
      tokens: sequences, and tokens of each.
    """

    model: str
    framework: str
    tokens: tuple[int, int]

    @property
    def name(self) -> str:
        return f"{self.model}-{self.framework}-{self.tokens[0]}x{self.tokens[1]}"

    @property
    def groups(self) -> tuple[str, str]:
        """The words that select the case."""
        return self.model, self.framework


CASES = tuple(Case(model, framework, each) for model in MODELS for framework in FRAMEWORKS for each in TOKENS)


@dataclasses.dataclass(frozen=True)
class Result:
    """One case's figures.

    Attributes:
      times: of "packed" and "bf16".
      errors: relative distances of both models' logits from those of the dequantized weights in float32.
      bytes: of both models' parameters.
      products: the products with packed weights in the program, by the family that computes them ("xla" for none).
        Scanned layers share theirs.
    """

    case: Case
    times: Mapping[str, timing.Timing]
    errors: Mapping[str, float]
    bytes: Mapping[str, int]
    products: Mapping[str, int]

    @property
    def ratio(self) -> float:
        """The bfloat16 model's time over the packed model's."""
        return self.times["bf16"].us / self.times["packed"].us

    def line(self) -> str:
        said = (f"{name} {self.times[name].us:.0f} us, error {self.errors[name]:.1e}" for name in ("packed", "bf16"))
        return f" > {self.case.name}: {'; '.join(said)}; {self.ratio:.2f} times the speed; {dict(self.products)}"


# ---- models ----------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _drawn(key: jax.Array, shape: tuple[int, ...], dtype: Any, is_scale: bool) -> jax.Array:
    if is_scale:
        return jnp.ones(shape, dtype)
    return jax.random.normal(key, shape, dtype) * jnp.asarray(SIZE.width**-0.5, dtype)


def filled(shapes: Any) -> Any:
    """Random parameters: a product with one has about the size of its operand."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [
        _drawn(key, leaf.shape, leaf.dtype, "scale" in jax.tree_util.keystr(path))  # a norm's scale
        for key, (path, leaf) in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, drawn)


@functools.partial(jax.jit, static_argnums=1)
def _dequantized(weight: PackedWeight, dtype: Any) -> jax.Array:
    return jax_splitk.dequantize(jax_splitk.unpack(weight), dtype)


def dequantized(tree: Any, dtype: Any = None) -> Any:
    """The tree with arrays in place of packed weights, in this dtype; None: in that of the scales."""

    def array(leaf: Any) -> Any:
        return _dequantized(leaf, dtype) if isinstance(leaf, PackedWeight) else leaf

    return jax.tree.map(array, tree, is_leaf=lambda x: isinstance(x, PackedWeight))


def of_nnx(name: str, size: Size, rule: jax_splitk.QuantizationRule) -> tuple[Program, Callable[[Any], Program]]:
    """The program with packed weights, and the plain one in a dtype, whose weights are the dequantized ones."""
    model = _model_of_nnx(name, size)
    flax_nnx.quantize(model, rule)
    return _program(model), lambda dtype: _plain_of_nnx(name, size, dtype, nnx.to_pure_dict(nnx.state(model)))


def of_qwix(name: str, size: Size, rule: jax_splitk.QuantizationRule) -> tuple[Program, Callable[[Any], Program]]:
    """As `of_nnx`."""
    import qwix  # noqa: PLC0415 - an optional package

    from jax_splitk.layers import qwix as packed  # noqa: PLC0415

    rules = [qwix.QuantizationRule(module_path="layers.*|head", weight_qtype=rule.dtype, tile_size=rule.group_size)]
    plain = _model_of_nnx(name, size)
    weights = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(plain)))

    @nnx.jit
    def quantized(model: Any, x: jax.Array) -> Any:
        return qwix.quantize_model(model, packed.PtqProvider(rules), x)

    model = quantized(plain, jnp.zeros((1, 1), jnp.int32))
    # qwix has an object with the field `array` in the place of a kernel.
    weights |= {path[:-1]: each for path, each in nnx.iter_graph(model) if isinstance(each, PackedWeight)}
    return _program(model), lambda dtype: _plain_of_nnx(name, size, dtype, traverse_util.unflatten_dict(weights))


def _model_of_nnx(name: str, size: Size) -> Any:
    graph, shapes = nnx.split(_abstract_nnx(name, size))
    return nnx.merge(graph, filled(shapes))


def _abstract_nnx(name: str, size: Size) -> Any:
    layer, _, tied, _ = MODELS[name]
    return nnx.eval_shape(lambda: Model(layer, tied, size, nnx.Rngs(0)))


def _plain_of_nnx(name: str, size: Size, dtype: Any, weights: Any) -> Program:
    model = _abstract_nnx(name, dataclasses.replace(size, dtype=dtype))
    nnx.update(model, dequantized(weights, dtype))
    return _program(model)


def _program(model: Any) -> Program:
    graph, state = nnx.split(model)
    return lambda state, x: nnx.merge(graph, state)(x), state


def of_linen(name: str, size: Size, rule: jax_splitk.QuantizationRule) -> tuple[Program, Callable[[Any], Program]]:
    """As `of_nnx`."""
    _, layer, tied, _ = MODELS[name]
    model, x = LinenModel(layer, tied, size), jnp.zeros((1, 1), jnp.int32)
    variables = filled(jax.eval_shape(model.init, jax.random.key(0), x))
    packed = flax_linen.quantize(model, variables, rule, x)

    def plain(dtype: Any) -> Program:
        model = LinenModel(layer, tied, dataclasses.replace(size, dtype=dtype))
        return model.apply, dequantized(packed, dtype)

    return (flax_linen.intercept()(model.apply), packed), plain


@functools.cache
def _autotuning() -> dict[str, Any]:
    """Options with which XLA remembers its choices: models have products of the same shapes, and seconds to choose each
    add up to minutes."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return {"xla_gpu_per_fusion_autotune_cache_dir": folder.name}


# ---- measurements ----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def made(model: str, framework: str, size: Size, rule: jax_splitk.QuantizationRule) -> dict[str, Program]:
    """The programs "packed", "bf16" and "exact", in float32, whose weights have the same values."""
    packed, plain = {"nnx": of_nnx, "linen": of_linen, "qwix": of_qwix}[framework](model, size, rule)
    return {"packed": packed, "bf16": plain(jnp.bfloat16), "exact": plain(jnp.float32)}


def run(case: Case, options: argparse.Namespace) -> Result:
    """Compiles, times and checks one case."""
    size = dataclasses.replace(SIZE, layers=options.layers)
    rule = jax_splitk.QuantizationRule("kernel$", options.qtype, group_size=options.group)
    programs = dict(made(case.model, case.framework, size, rule))
    function, parameters = programs.pop("exact")
    keys = jax.random.split(jax.random.key(1), 3)
    inputs = [(jax.random.randint(key, case.tokens, 0, size.vocabulary),) for key in keys]
    compiled = {
        name: functools.partial(jax.jit(function).lower(parameters, *inputs[0]).compile(_autotuning()), parameters)
        for name, (function, parameters) in programs.items()
    }
    times = timing.compare(compiled, inputs, rounds=3 if options.quick else 7)
    logits = {name: np.asarray(program(*inputs[0]), np.float64) for name, program in compiled.items()}
    with jax.default_matmul_precision("highest"):
        slow = jax.jit(function).lower(parameters, *inputs[0]).compile(UNTUNED)
    exact = np.asarray(slow(parameters, *inputs[0]), np.float64)
    errors = {name: report.distance(found, exact) for name, found in logits.items()}
    products: dict[str, int] = {}
    for decision in jax_splitk.explain(*programs["packed"], *inputs[0]).decisions:
        family = decision.family or "xla"
        products[family] = products.get(family, 0) + decision.count
    sizes = {name: sum(leaf.nbytes for leaf in jax.tree.leaves(given)) for name, (_, given) in programs.items()}
    return Result(case, times, errors, sizes, products)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantized_models", description="Models of Flax.")
    parser.add_argument("--cases", nargs="*", default=[], help="names or groups (also separated by commas); all")
    parser.add_argument("--layers", type=int, default=SIZE.layers)
    parser.add_argument("--qtype", default="int4", help="the weights' format")
    parser.add_argument("--group", type=int, default=64, help="the weights' group size")
    report.add_quick_and_json(parser, "fewer rounds")
    options = parser.parse_args(argv)
    try:
        selected = find(options.cases, CASES, lambda case: case.groups)
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2

    def save(results: Sequence[Result], failures: Mapping[str, str]) -> None:
        if options.json:
            size = {**dataclasses.asdict(SIZE), "layers": options.layers, "dtype": "bfloat16"}
            weight = {"qtype": options.qtype, "group": options.group}
            found = [{**dataclasses.asdict(result), "ratio": result.ratio} for result in results]
            report.write(options.json, {"benchmark": "quantized_models", "environment": report.environment(), **size,
                                        **weight, "results": found, "failures": failures})  # fmt: skip

    results, failures = report.run_all(selected, lambda case: run(case, options), Result.line, save)
    for tokens in dict.fromkeys(result.case.tokens for result in results):
        ratios = [result.ratio for result in results if result.case.tokens == tokens]
        say(f"{tokens[0]} x {tokens[1]} tokens: {statistics.geometric_mean(ratios):.2f} times the speed of bfloat16")
    return report.say_failures(failures)


if __name__ == "__main__":
    sys.exit(main())
