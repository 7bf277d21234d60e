"""Trees of parameters: quantized by rules, reported, and parted into what is trained and what is not."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.quantized import PackedWeight
from tests.problems import on_device, seeded
from tests.training import fallen

Rule = jax_splitk.QuantizationRule


def params(rng: np.random.Generator) -> Any:
    def normal(*shape: int) -> jax.Array:
        return on_device(rng.standard_normal(shape), jnp.float32)

    layer = {
        "query": {"kernel": normal(3, 64, 2, 32), "bias": normal(3, 2, 32)},
        "out": {"kernel": normal(3, 2, 32, 64)},
        "up": {"kernel": normal(3, 64, 96)},
        "norm": {"scale": normal(3, 64)},
    }
    return {"embed": {"embedding": normal(80, 64)}, "layers": layer, "head": [normal(64, 80), normal(80)]}


RULES = [
    Rule("head/0", "int8", group_size=None),
    Rule("query/kernel", "nf4", group_size=32, axis=1, stack=1),
    Rule("out/kernel", "int4", group_size=64, axis=(1, 2), stack=1),
    Rule("up/kernel", "uint4", group_size=32, stack=1, symmetric=False, scale_dtype=jnp.bfloat16),
    Rule("embed", None),
]


def test_the_first_rule_that_matches_counts() -> None:
    with seeded(0) as rng:
        tree = params(rng)
        packed = jax_splitk.quantize_params(tree, RULES)
        layers = packed["layers"]
        found = {name: layers[name]["kernel"] for name in ("query", "out", "up")}
        assert {name: (w.qtype, w.group_size, w.stack, w.dims, w.contracted) for name, w in found.items()} == {
            "query": ("nf4", 32, (3,), (64, 2, 32), (0,)),
            "out": ("int4", 64, (3,), (2, 32, 64), (0, 1)),
            "up": ("uint4", 32, (3,), (64, 96), (0,)),
        }
        assert found["up"].scale.dtype == jnp.bfloat16 and found["up"].zero_point is not None
        assert packed["head"][0].group_size == 64
        for path in (("embed", "embedding"), ("layers", "query", "bias"), ("layers", "norm", "scale")):
            old, new = tree, packed
            for key in path:
                old, new = old[key], new[key]
            assert new is old
        expected = jax_splitk.prepack(jax_splitk.quantize(tree["head"][0], "int8", group_size=None))
        jax.tree.map(np.testing.assert_array_equal, packed["head"][0], expected)


def test_shapes_give_shapes() -> None:
    with seeded(1) as rng:
        tree = params(rng)
        abstract = jax_splitk.quantize_params(jax.eval_shape(lambda: tree), RULES)
        concrete = jax_splitk.quantize_params(tree, RULES)
        assert jax.tree.structure(abstract) == jax.tree.structure(concrete)
        for one, other in zip(jax.tree.leaves(abstract), jax.tree.leaves(concrete), strict=True):
            assert isinstance(one, jax.ShapeDtypeStruct) and (one.shape, one.dtype) == (other.shape, other.dtype)
        jitted = jax.jit(lambda tree: jax_splitk.quantize_params(tree, RULES))(tree)
        jax.tree.map(np.testing.assert_array_equal, jitted, concrete)
        report = jax_splitk.quantization_report(tree, abstract)
        weights = jax.tree.leaves(concrete, is_leaf=lambda leaf: isinstance(leaf, PackedWeight))
        assert report.bytes_after == sum(leaf.nbytes for leaf in weights)
        assert all(param.errors == () for param in report.params)


def test_the_report_has_bytes_and_errors_by_layer() -> None:
    with seeded(2) as rng:
        tree = params(rng)
        packed = jax_splitk.quantize_params(tree, RULES)
        report = jax_splitk.quantization_report(tree, packed)
        of = {param.path: param for param in report.params}
        up = of["layers/up/kernel"]
        assert (up.shape, up.qtype, up.group_size, up.bytes_before) == ((3, 64, 96), "uint4", 32, 3 * 64 * 96 * 4)
        assert up.bytes_after == packed["layers"]["up"]["kernel"].nbytes
        for i, error in enumerate(up.errors):
            w, old = (
                np.asarray(a, np.float64)
                for a in (
                    jax_splitk.dequantize(jax_splitk.unpack(packed["layers"]["up"]["kernel"][i]), jnp.float32),
                    tree["layers"]["up"]["kernel"][i],
                )
            )
            assert error == pytest.approx(np.linalg.norm(w - old) / np.linalg.norm(old), rel=1e-5)
        assert len(up.errors) == 3 and 0.02 < max(up.errors) < 0.2
        assert of["embed/embedding"].qtype is None
        assert report.bytes_before == sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        text = str(report)
        assert "layers/up/kernel" in text and "uint4" in text and "embedding" not in text and "4 not quantized" in text
    with pytest.raises(ValueError, match=r"after lacks 'b' and adds \(none\)"):
        jax_splitk.quantization_report({"a": jnp.ones(2), "b": jnp.ones(2)}, {"a": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"a of shape \(2,\) before and \(3,\) after"):
        jax_splitk.quantization_report({"a": jnp.ones(2)}, {"a": jnp.ones(3)})


@pytest.mark.parametrize(("rules", "message"), [
    ([Rule("kernle", "int4")], r"pattern='kernle' of rule 0 applies to no parameter; accepted: .*'embed/embedding'"),
    ([Rule("kernel", None), Rule("up", "int4")], r"pattern='up' of rule 1 .*; earlier rules take 'layers/up/kernel'"),
    ([Rule("bias", "int4")], r"layers/query/bias of shape \(3, 2, 32\): axis=None .* or dtype=None in its rule"),
    ([Rule("bias", "int4", stack=2)], r"layers/query/bias of shape \(3, 2, 32\); accepted: two dimensions after 2"),
    ([Rule("head/1", "int4")], r"head/1 of shape \(80,\); accepted: two dimensions after 0"),
    ([Rule("up/kernel", "int4")], r"layers/up/kernel of shape \(3, 64, 96\): axis=None with w of rank 3"),
    ([Rule("head/0", "int4", group_size=48)], r"head/0 of shape \(64, 80\): group_size=48 of 64 elements along axis 0"),
    ([Rule("out/kernel", "int4", axis=(1, 2), stack=9)], r"layers/out/kernel .*; accepted: two dimensions after 9"),
])  # fmt: skip
def test_rules_that_do_not_fit_are_refused(rules: Any, message: str) -> None:
    with seeded(3) as rng:
        tree = params(rng)
        for given in (tree, jax.eval_shape(lambda: tree)):
            with pytest.raises(ValueError, match=message):
                jax_splitk.quantize_params(given, rules)


def test_parameters_that_are_no_float_arrays_are_refused() -> None:
    packed = jax_splitk.quantize_params({"w": jnp.ones((64, 64))}, Rule("w", "int4"))
    with pytest.raises(TypeError, match=r"w of type PackedWeight; accepted: an array that is not quantized"):
        jax_splitk.quantize_params(packed, Rule("w", "int8"))
    assert jax_splitk.quantize_params(packed, Rule("w", None))["w"] is packed["w"]
    with pytest.raises(TypeError, match=r"w of shape \(64, 64\): w of dtype int32; accepted: a floating dtype"):
        jax_splitk.quantize_params({"w": jnp.ones((64, 64), jnp.int32)}, Rule("w", "int4"))
    with pytest.raises(TypeError, match=r"rules with 'int4'; accepted: jax_splitk.QuantizationRule"):
        jax_splitk.quantize_params({"w": jnp.ones((64, 64))}, "int4")  # pyright: ignore[reportArgumentType]


# ---- what is trained -----------------------------------------------------------------------------------------------


def adapted(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    normal = lambda *shape: on_device(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    q = jax_splitk.quantize(normal(64, 32), "uint4", group_size=32, symmetric=False)
    tree = {
        "kernel": jax_splitk.prepack(q),
        "plain": q,
        "lora_a": normal(64, 4),
        "lora_b": jnp.zeros((4, 32)),
        "steps": jnp.zeros((), jnp.int32),
    }
    return tree, normal(8, 64), normal(8, 32)


def loss(tree: Any, x: Any, y: Any) -> Any:
    out = x @ tree["kernel"] + (x @ tree["lora_a"]) @ tree["lora_b"] + 0 * (x @ tree["plain"])
    return jnp.mean(jnp.square(out - y))


def test_a_tree_with_packed_weights_has_no_gradient_and_needs_a_partition() -> None:
    with seeded(4) as rng:
        tree, x, y = adapted(rng)
        with pytest.raises(TypeError, match="uint"):
            jax.grad(loss)(tree, x, y)
        trained, frozen = jax_splitk.partition(tree)
        grads = jax.grad(lambda trained: loss(jax_splitk.combine(trained, frozen), x, y))(trained)
        assert sorted(map(jnp.shape, jax.tree.leaves(grads))) == [(4, 32), (64, 4)]


@pytest.mark.parametrize(("trainable", "leaves"), [
    (None, ["lora_a", "lora_b"]), ("lora_b$", ["lora_b"]), ("^kernel/scale$", ["kernel/scale"]),
    ("lora|^kernel/(scale|words)", ["kernel/scale", "lora_a", "lora_b"]),
])  # fmt: skip
def test_optimizers_see_only_what_is_trained(trainable: str | None, leaves: list[str]) -> None:
    with seeded(5) as rng:
        tree, x, y = adapted(rng)
        trained, frozen = jax_splitk.partition(tree, trainable)
        paths = [
            jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(trained)
        ]
        assert paths == leaves
        optimizer = optax.adamw(1e-2)
        moments = [leaf for leaf in jax.tree.leaves(optimizer.init(trained)) if leaf.ndim]
        assert len(moments) == 2 * len(leaves) and {leaf.dtype.name for leaf in moments} == {"float32"}

        trained = fallen(lambda t: loss(jax_splitk.combine(t, frozen), x, y), optimizer, trained, 5)
        after = jax_splitk.combine(trained, frozen)
        assert jax.tree.structure(after) == jax.tree.structure(tree)
        assert isinstance(after["kernel"], PackedWeight)
        for path, old in jax.tree.leaves_with_path(tree):
            new = dict(jax.tree.leaves_with_path(after))[path]
            changed = jax.tree_util.keystr(path, simple=True, separator="/") in leaves
            assert np.array_equal(old, new) != changed, path


def test_masks_of_optax_are_the_other_way() -> None:
    """The recipe of the guide: gradients that JAX allows, and an optimizer that passes packed weights over."""
    with seeded(6) as rng:
        tree, x, y = adapted(rng)
        mask = jax.tree.map(lambda a, b: a is not None, *jax_splitk.partition(tree), is_leaf=lambda leaf: leaf is None)
        optimizer = optax.masked(optax.adamw(1e-2), mask)
        moments = [leaf for leaf in jax.tree.leaves(optimizer.init(tree)) if leaf.ndim]
        assert sorted(map(jnp.shape, moments)) == [(4, 32), (4, 32), (64, 4), (64, 4)]
        grads = jax.grad(loss, allow_int=True)(tree, x, y)
        assert grads["kernel"].words.dtype == jax.dtypes.float0


def test_parts_that_do_not_belong_together_are_refused() -> None:
    tree = {"a": jnp.ones(2), "b": jnp.ones(2, jnp.int32)}
    trained, frozen = jax_splitk.partition(tree)
    with pytest.raises(ValueError, match="b is in both trees; accepted: trees that `partition` returned"):
        jax_splitk.combine(tree, frozen)
    with pytest.raises(ValueError, match=r"trainable='b' is found in no path of a floating array; .*one of a$"):
        jax_splitk.partition(tree, "b")
    assert frozen["a"] is None and frozen["b"] is tree["b"]
    assert trained["a"] is tree["a"] and trained["b"] is None
