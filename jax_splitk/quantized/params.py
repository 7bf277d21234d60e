"""Quantizing a tree of parameters by rules on their paths, and what that saves and costs."""

import dataclasses
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.typing import DTypeLike

from jax_splitk.quantized.array import QuantizedArray, Weight, dequantize, is_weight, quantize, unwrapped
from jax_splitk.quantized.formats import QType
from jax_splitk.quantized.packed_weight import PackedWeight, prepack, unpack
from jax_splitk.runtime.arguments import require

_SHOWN = 8  # paths in a message


@dataclasses.dataclass(frozen=True)
class QuantizationRule:
    """Which parameters are quantized, and how.

    Attributes:
      pattern: a regular expression that is searched in a parameter's path, such as "layers/attention/query/kernel".
      dtype: as in `quantize`; None leaves the parameter as it is.
      group_size: as in `quantize`.
      axis: as in `quantize`. The layers of `jax_splitk.layers` know it.
      stack: as in `prepack`. None: 0, or what the layers of `jax_splitk.layers` know.
      symmetric: as in `quantize`.
      scale_dtype: as in `quantize`.

    Examples:
      >>> rule = jax_splitk.QuantizationRule("out/kernel$", "nf4", group_size=32, axis=(0, 1))
      >>> rule.dtype, rule.stack
      ('nf4', None)
    """

    pattern: str
    dtype: QType | np.dtype | type[Any] | None
    group_size: int | None = 64
    axis: int | Sequence[int] | None = None
    stack: int | None = None
    symmetric: bool = True
    scale_dtype: DTypeLike | None = None


def quantize_params(params: Any, rules: QuantizationRule | Sequence[QuantizationRule]) -> Any:
    """Quantizes and packs the weights in a tree of parameters.

    Runs under jit. Of an abstract tree it makes an abstract one, without any computation.

    Args:
      params: a pytree of arrays, or of jax.ShapeDtypeStruct.
      rules: a `QuantizationRule`, or several. The first whose pattern is found in a parameter's path counts. The path
        joins the keys by "/". Parameters without a rule stay as they are: embeddings, norms and biases should.

    Returns:
      The tree with a `PackedWeight` in place of each weight that a rule quantizes.

    Raises:
      ValueError: a rule that applies to no parameter; a parameter that its rule cannot quantize: one of fewer than two
        dimensions after the stack, one of more than two and no axis in the rule, or a group size that does not divide
        the weight.
      TypeError: a rule for a parameter that is quantized already, or no floating array.

    Examples:
      >>> params = {"up": {"kernel": jnp.ones((128, 256)), "bias": jnp.zeros(256)}, "norm": {"scale": jnp.ones(128)}}
      >>> packed = jax_splitk.quantize_params(params, jax_splitk.QuantizationRule("kernel$", "int4"))
      >>> packed["up"]["kernel"].shape, packed["up"]["bias"].dtype
      ((128, 256), dtype('float32'))
    """
    flat, tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_weight)
    paths = [path_of(keys) for keys, _ in flat]
    found = rules_of(paths, rules)
    leaves = [quantized(path, leaf, found.get(path)) for path, (_, leaf) in zip(paths, flat, strict=True)]
    return jax.tree.unflatten(tree, leaves)


def path_of(keys: Sequence[Any]) -> str:
    """The path of a leaf, from the keys that JAX gives."""
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def rules_of(
    paths: Sequence[str], rules: QuantizationRule | Sequence[QuantizationRule], layers: Container[str] | None = None
) -> Mapping[str, QuantizationRule]:
    """The rule for each path that one applies to.

    `layers` are the paths of layers' kernels, whose axes are known. Rules without an axis then apply to no others.
    Raises ValueError if there is a rule for none of the paths.
    """
    every: list[QuantizationRule] = list(rules) if isinstance(rules, list | tuple) else [rules]  # pyright: ignore
    for rule in every:
        require(isinstance(rule, QuantizationRule), f"rules with {rule!r}", "jax_splitk.QuantizationRule", TypeError)

    def applies(rule: QuantizationRule, path: str) -> bool:
        takes = layers is None or path in layers or rule.axis is not None or rule.dtype is None
        return takes and re.search(rule.pattern, path) is not None

    found = {path: rule for path in paths for rule in reversed(every) if applies(rule, path)}
    for i, rule in enumerate(every):
        if not any(rule is used for used in found.values()):
            earlier = [path for path in paths if applies(rule, path)]
            why = f"; earlier rules take {_some(earlier)}" if earlier else ""
            of = "parameter" if layers is None else "kernel of a layer"
            known = [path for path in paths if layers is None or path in layers]
            raise ValueError(
                f"pattern={rule.pattern!r} of rule {i} applies to no {of}{why}; accepted: a regular expression that is "
                f"found in one of the paths {_some(known)}"
            )
    return found


def quantized(path: str, leaf: Any, rule: QuantizationRule | None) -> Any:
    """The parameter `leaf` at a path, quantized if its rule says so."""
    if rule is None or rule.dtype is None:
        return leaf
    given = f"{path} of type {type(leaf).__name__}"
    array = hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not is_weight(leaf)
    require(array, given, "an array that is not quantized, or dtype=None in its rule", TypeError)
    shape, stack = tuple(leaf.shape), rule.stack or 0
    valid = len(shape) - stack >= 2
    require(valid, f"{path} of shape {shape}", f"two dimensions after {stack} of the stack, or dtype=None in its rule")
    axis = stack if rule.axis is None and len(shape) - stack == 2 else rule.axis

    def packed(w: Any) -> PackedWeight:
        q = quantize(
            w,
            rule.dtype,  # pyright: ignore[reportArgumentType]
            group_size=rule.group_size,
            axis=axis,
            symmetric=rule.symmetric,
            scale_dtype=rule.scale_dtype,
        )
        return prepack(q, axis=axis, stack=stack)

    try:
        return jax.eval_shape(packed, leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else packed(leaf)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path} of shape {shape}: {error}; or dtype=None in its rule") from error


def _some(paths: Sequence[str]) -> str:
    shown = ", ".join(map(repr, paths[:_SHOWN]))
    return f"{shown} and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else shown or "(none)"


# ---- report --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class QuantizedParam:
    """A parameter before and after quantization.

    Attributes:
      path: its keys, joined by "/".
      shape: of the whole parameter, with its stack.
      qtype: the format, or None for a parameter that is not quantized.
      group_size: how many elements share a scale, or None.
      bytes_before: its size as an array.
      bytes_after: its size now.
      errors: |quantized - before| / |before| in Frobenius norms, one for each weight of the stack; () for abstract
        parameters and those that are not quantized.
    """

    path: str
    shape: tuple[int, ...]
    qtype: str | None
    group_size: int | None
    bytes_before: int
    bytes_after: int
    errors: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class QuantizationReport:
    """What `quantization_report` returns. `print` shows a table.

    Attributes:
      params: the parameters in the tree's order.

    Examples:
      >>> kernel = {"kernel": jnp.ones((64, 32))}
      >>> packed = jax_splitk.quantize_params(kernel, jax_splitk.QuantizationRule("kernel", "int4"))
      >>> report = jax_splitk.quantization_report(kernel, packed)
      >>> [param.path for param in report.params], report.bytes_before
      (['kernel'], 8192)
    """

    params: tuple[QuantizedParam, ...]

    @property
    def bytes_before(self) -> int:
        return sum(param.bytes_before for param in self.params)

    @property
    def bytes_after(self) -> int:
        return sum(param.bytes_after for param in self.params)

    def __str__(self) -> str:
        from tabulate import tabulate  # noqa: PLC0415 - only for people

        rows = [
            [
                p.path,
                "x".join(map(str, p.shape)),
                p.qtype,
                p.group_size,
                p.bytes_before,
                p.bytes_after,
                _range(p.errors),
            ]
            for p in self.params
            if p.qtype is not None
        ]
        left = [p for p in self.params if p.qtype is None]
        if left:
            before, after = (sum(getattr(p, name) for p in left) for name in ("bytes_before", "bytes_after"))
            rows.append([f"{len(left)} not quantized", None, None, None, before, after, None])
        rows.append(["all", None, None, None, self.bytes_before, self.bytes_after, None])
        headers = ["parameter", "shape", "format", "group size", "bytes before", "bytes after", "relative error"]
        return tabulate(rows, headers, disable_numparse=True, colalign=("left",) * 3 + ("right",) * 4)


def _range(errors: Sequence[float]) -> str | None:
    if not errors:
        return None
    low, high = (f"{bound(errors):.4f}" for bound in (min, max))
    return low if low == high else f"{low} to {high}"


def quantization_report(before: Any, after: Any) -> QuantizationReport:
    """Bytes and errors of the parameters that `quantize_params` quantized.

    Args:
      before: the tree that it was given.
      after: the tree that it returned, also as the state of an nnx model. Each may be abstract.

    Raises:
      ValueError: the trees have parameters of other paths or shapes.

    Examples:
      >>> params = {"kernel": jax.random.normal(jax.random.key(0), (128, 256)), "bias": jnp.zeros(256)}
      >>> packed = jax_splitk.quantize_params(params, jax_splitk.QuantizationRule("kernel", "int8"))
      >>> report = jax_splitk.quantization_report(params, packed)
      >>> report.bytes_before, report.bytes_after, report.params[1].errors[0] < 0.01
      (132096, 35840, True)
    """
    old, new = _by_path(before), _by_path(after)
    if old.keys() != new.keys():
        missing, added = _some(sorted(old.keys() - new.keys())), _some(sorted(new.keys() - old.keys()))
        raise ValueError(f"after lacks {missing} and adds {added}; accepted: the parameters of before")
    return QuantizationReport(tuple(_compared(path, old[path], new[path]) for path in old))


def _by_path(tree: Any) -> dict[str, Any]:
    """The parameters by their paths: a variable of nnx counts as its value."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: is_weight(x) or hasattr(x, "get_raw_value"))
    values = (leaf.get_raw_value() if hasattr(leaf, "get_raw_value") else leaf for _, leaf in flat)
    return {path_of(keys): unwrapped(value) for (keys, _), value in zip(flat, values, strict=True)}


def _compared(path: str, old: Any, new: Any) -> QuantizedParam:
    shape = tuple(old.shape)
    if tuple(new.shape) != shape:
        raise ValueError(f"{path} of shape {shape} before and {tuple(new.shape)} after; accepted: equal shapes")
    given = (path, shape)
    if not isinstance(new, Weight) or isinstance(old, Weight):
        return QuantizedParam(*given, None, None, _nbytes(old), _nbytes(new), ())
    w: Any = new
    leaves = (old, *jax.tree.leaves(w))
    errors = () if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves) else tuple(_errors(old, w))
    return QuantizedParam(*given, str(w.qtype), w.group_size, _nbytes(old), w.nbytes, errors)


def _nbytes(x: Any) -> int:
    return x.nbytes if isinstance(x, Weight) else math.prod(x.shape) * x.dtype.itemsize  # pyright: ignore


def _errors(old: Any, w: PackedWeight | QuantizedArray) -> Iterable[float]:
    stack = w.stack if isinstance(w, PackedWeight) else ()
    for index in np.ndindex(*stack):
        q = unpack(w[index] if stack else w) if isinstance(w, PackedWeight) else w
        exact = jnp.asarray(old[index] if stack else old, jnp.float32)
        yield float(jnp.linalg.norm(dequantize(q, jnp.float32) - exact) / jnp.linalg.norm(exact))
