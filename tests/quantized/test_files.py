"""Files of quantized weights: five kinds, and each refuses a weight that is not what the file holds."""

import ast
import dataclasses
import gc
import json
import os
import pathlib
import pickle
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from jax import export
from jax import numpy as jnp

import jax_splitk
from jax_splitk import (
    PackedWeight,
    PermutedWeight,
    QuantizedArray,
    from_state,
    load_file,
    prepack,
    quantize,
    save_file,
    to_state,
)
from jax_splitk.layers.qwix import PackedQArray
from jax_splitk.quantized.array import Weight
from tests.problems import generator, on_device

# Where a restore fails, orbax drops coroutines that it has not awaited, and tensorstore's threads go on to read.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module", autouse=True)
def failed_restores_end_here() -> Iterator[None]:
    """Otherwise their exceptions would count as those of a later test."""
    yield
    time.sleep(0.2)  # tensorstore does not say when its reads have ended; they take milliseconds
    gc.collect()


# ---- the kinds of file: what writes a tree, and what reads it, with a target or without ------------------------------


def save_orbax(tree: Any, path: pathlib.Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def load_orbax(path: pathlib.Path, like: Any = None) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        if like is None:
            return from_state(checkpointer.restore(path))
        return checkpointer.restore(path, jax.eval_shape(lambda: like))


def load_orbax_state(path: pathlib.Path, like: Any = None) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        if like is None:
            return from_state(checkpointer.restore(path))
        shapes = jax.eval_shape(lambda: like)
        return from_state(checkpointer.restore(path, to_state(shapes)), shapes)


def save_flax(tree: Any, path: pathlib.Path) -> None:
    jax_splitk.register_flax_serialization()
    path.write_bytes(serialization.to_bytes(tree))


def load_flax(path: pathlib.Path, like: Any = None) -> Any:
    data = path.read_bytes()
    return from_state(serialization.msgpack_restore(data)) if like is None else serialization.from_bytes(like, data)


def load_flax_state(path: pathlib.Path, like: Any = None) -> Any:
    return from_state(serialization.msgpack_restore(path.read_bytes()), like)


def load_pickle(path: pathlib.Path, like: Any = None) -> Any:
    state = pickle.loads(path.read_bytes())
    return state if like is None else from_state(to_state(state), like)


KINDS: dict[str, tuple[Callable[[Any, pathlib.Path], Any], Callable[..., Any]]] = {
    "safetensors": (save_file, load_file),
    "orbax": (save_orbax, load_orbax),
    "orbax of the state": (lambda tree, path: save_orbax(to_state(tree), path), load_orbax_state),
    "flax": (save_flax, load_flax),
    "flax of the state": (lambda tree, path: path.write_bytes(serialization.to_bytes(to_state(tree))), load_flax_state),
    "pickle": (lambda tree, path: path.write_bytes(pickle.dumps(tree)), load_pickle),
}


def values(*shape: int) -> jax.Array:
    return on_device(generator(141).normal(size=shape), jnp.float32)


def weights() -> Any:
    stack = quantize(values(3, 128, 2, 40), "uint4", group_size=32, axis=1, symmetric=False, scale_dtype="bfloat16")
    return {
        "int4": prepack(quantize(values(128, 200), "int4", group_size=64)),
        "nf4": prepack(quantize(values(100, 64), "nf4", group_size=None, scale_dtype="float16")),
        "stack": prepack(stack, axis=1, stack=1),
        "heads": prepack(quantize(values(2, 64, 96), "float8_e4m3fn", group_size=32, axis=(0, 1)), axis=(0, 1)),
        "plain": quantize(values(64, 3), "float4_e2m1fn", group_size=32),
        "permuted": [
            PermutedWeight(prepack(quantize(values(64, 3), "int4", group_size=32)), jnp.arange(64)[::-1]),
            PermutedWeight(quantize(values(64, 3), "int8", group_size=32), jnp.arange(64, dtype="int16")),
        ],
        "norm": values(7),
    }


def unsigned() -> dict[str, Any]:
    """What orbax stores only as `to_state`, since tensorstore has no uint4."""
    return {
        "uint4": quantize(values(64, 3), "uint4", group_size=32, symmetric=False),
        "nf4": quantize(values(64, 3), "nf4", group_size=32),
    }


def assert_equal(one: Any, other: Any) -> None:
    is_weight = lambda x: isinstance(x, Weight)  # noqa: E731
    flat = jax.tree.leaves(one, is_leaf=is_weight), jax.tree.leaves(other, is_leaf=is_weight)
    assert len(flat[0]) == len(flat[1])
    for left, right in zip(*flat, strict=True):
        assert jax.tree.structure(left) == jax.tree.structure(right)
        for x, y in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: str, tmp_path: pathlib.Path) -> None:
    save, load = KINDS[kind]
    tree = weights() if kind == "orbax" else weights() | {"unsigned": unsigned()}
    save(tree, tmp_path / "file")
    restored = load(tmp_path / "file", tree)
    assert_equal(restored, tree)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    assert_equal(load(tmp_path / "file"), tree)  # says what it is without a target, too
    x = jnp.ones((4, 128), jnp.bfloat16)
    np.testing.assert_array_equal(x @ restored["int4"], x @ tree["int4"])


# What a file holds, and a target of equal shapes, or of other ones.
INT4 = prepack(quantize(jnp.ones((128, 64)), "int4", group_size=64))
OTHERS = {
    "type": dataclasses.replace(INT4, qtype="nf4"),
    "shape": dataclasses.replace(INT4, dims=(100, 64), group_size=64),
    "axes": dataclasses.replace(INT4, dims=(2, 64, 64), contracted=(0, 1)),
    "contracted": dataclasses.replace(INT4, dims=(128, 64, 1), contracted=(0, 2)),
    "group": prepack(quantize(jnp.ones((128, 64)), "int4", group_size=32)),
    "stack": jax.tree.map(lambda leaf: leaf[None], INT4),
    "zeros": dataclasses.replace(INT4, zero_dtype="int8", zero_point=INT4.scale),
}


def fields(w: PackedWeight) -> set[str]:
    return {w.qtype, f"group{w.group_size}", "x".join(map(str, w.dims))}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_another_weight_than_the_files_is_refused(kind: str, other: str, tmp_path: pathlib.Path) -> None:
    save, load = KINDS[kind]
    save({"up": INT4}, tmp_path / "file")
    with pytest.raises(ValueError) as refused:
        load(tmp_path / "file", {"up": OTHERS[other]})
    message = str(refused.value)
    if other == "stack" and kind.startswith("orbax"):  # which compares the shapes of one of the arrays
        asked, stored, *_ = map(ast.literal_eval, re.findall(r"\((?:\d+, ?)*\d*\)", message))
        assert asked == (1, *stored), message
        return
    assert "up" in message
    assert all(re.search(rf"words-\S*{re.escape(word)}", message) for w in (INT4, OTHERS[other]) for word in fields(w))


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_arrays_of_equal_dtypes_are_told_apart(kind: str, tmp_path: pathlib.Path) -> None:
    save, load = KINDS[kind]
    given, other = (
        {"w": QuantizedArray(jnp.ones((64, 8), "int8"), jnp.ones((2, 8)), None, qtype)} for qtype in ("int8", "nf4")
    )
    if kind != "orbax":
        given = {"w": quantize(jnp.ones((64, 8)), "nf4", group_size=32)}
        other = {"w": dataclasses.replace(given["w"], qtype="uint4")}
    save(given, tmp_path / "file")
    with pytest.raises(ValueError, match=r"(?s)qvalue-.*qvalue-"):
        load(tmp_path / "file", other)


@pytest.mark.parametrize("kind", KINDS)
def test_another_layout_version_is_refused(kind: str, tmp_path: pathlib.Path) -> None:
    save, load = KINDS[kind]
    save({"up": dataclasses.replace(INT4, layout=7)}, tmp_path / "file")
    with pytest.raises(ValueError, match=r"layout 7; accepted: 1"):
        load(tmp_path / "file")
    with pytest.raises(ValueError, match=r"(?s)layout.?7.*(layout1|accepted: 1)|layout1.*layout7"):
        load(tmp_path / "file", {"up": INT4})


def test_a_derived_class_is_kept(tmp_path: pathlib.Path) -> None:
    """As qwix's models have it."""
    like = PackedQArray(**{field.name: getattr(INT4, field.name) for field in dataclasses.fields(INT4)})
    save_file({"up": like}, tmp_path / "file")
    assert type(load_file(tmp_path / "file")["up"]) is PackedWeight
    assert type(load_file(tmp_path / "file", {"up": like})["up"]) is PackedQArray
    with pytest.raises(ValueError, match=r"accepted: PackedWeight words-nf4"):
        load_file(tmp_path / "file", {"up": dataclasses.replace(like, qtype="nf4")})


def test_copies_and_pickles_keep_abstract_leaves() -> None:
    shapes = jax.eval_shape(lambda: INT4)
    assert pickle.loads(pickle.dumps(shapes)).words == shapes.words


# ---- jax.export ------------------------------------------------------------------------------------------------------


def test_exported_functions_know_their_weights() -> None:
    x = jnp.ones((4, 128), jnp.bfloat16)
    function = jax.jit(lambda x, w, q: (x @ w["up"], w, q))
    plain = quantize(jnp.ones((64, 8)), "nf4", group_size=32)
    checks = jax_splitk.EXPORT_CHECKS
    data = export.export(function, disabled_checks=checks)(x, {"up": INT4}, plain).serialize()
    again = export.deserialize(data)
    out, w, q = again.call(x, {"up": INT4}, plain)
    np.testing.assert_array_equal(out, x @ INT4)
    assert_equal([w["up"], q], [INT4, plain])
    for other in ("type", "shape", "axes", "contracted"):
        with pytest.raises(ValueError) as refused:
            again.call(x, {"up": OTHERS[other]}, plain)
        assert all(str(tuple(w.static.values())) in str(refused.value) for w in (INT4, OTHERS[other]))
    with pytest.raises(ValueError, match=r"(?s)metadata uint4 .*metadata nf4 "):
        again.call(x, {"up": INT4}, dataclasses.replace(plain, qtype="uint4"))


# ---- safetensors -----------------------------------------------------------------------------------------------------

DTYPES = (
    *(
        "bool",
        "int2",
        "uint2",
        "int4",
        "uint4",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
    ),
    *(
        "float4_e2m1fn",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e8m0fnu",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
    ),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
)


def every_value(dtype: Any) -> np.ndarray:
    """All bit patterns of a narrow dtype, random ones of others; an odd number."""
    dtype = jnp.dtype(dtype)
    small = {"bool": 2, "int2": 4, "uint2": 4, "int4": 16, "uint4": 16, "float4_e2m1fn": 16}
    if dtype.name.startswith(("int2", "int4")):
        count = small[dtype.name]
        return np.append(np.arange(-count // 2, count // 2), [1]).astype(np.int8).astype(dtype)
    if dtype.name in small:
        codes = np.append(np.arange(small[dtype.name]), [1]).astype(np.uint8)
        return codes.astype(dtype) if dtype.name.startswith("uint") else codes.view(dtype)
    return np.frombuffer(generator(142).bytes(257 * dtype.itemsize), dtype)


def bits(x: Any) -> np.ndarray:
    return np.asarray(x).reshape(-1).view(np.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str, tmp_path: pathlib.Path) -> None:
    array = every_value(dtype)
    tree = {
        "odd": array,
        "empty": array[:0].reshape(0, 3),
        "one": array[:1].reshape(()),
        "plane": array[:2].reshape(2, 1),
    }
    save_file(tree, tmp_path / "file")
    restored = load_file(tmp_path / "file")
    for name, x in tree.items():
        assert (restored[name].dtype, restored[name].shape) == (x.dtype, x.shape)
        np.testing.assert_array_equal(bits(restored[name]), bits(x))


def test_two_elements_of_four_bits_take_a_byte(tmp_path: pathlib.Path) -> None:
    save_file({"x": jnp.asarray([[1, -2, 3]], "int4")}, tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["x"] == {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
    assert data[8 + length :] == bytes([0xE1, 0x03])


def test_the_header_says_what_a_weight_is(tmp_path: pathlib.Path) -> None:
    tree = {"layers": [{"up": weights()["stack"]}], "norm": np.arange(3.0, dtype=np.float32)}
    save_file(tree, tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    about = json.loads(header["__metadata__"]["jax_splitk"])
    assert about["leaves"]["layers.0.up"]["weight"] == {
        "qtype": "uint4", "group_size": 32, "dims": [128, 2, 40], "contracted": [0], "zero_dtype": "uint4", "layout": 1,
    }  # fmt: skip
    assert header["layers.0.up.words"]["dtype"] == "U32"
    start, stop = header["norm"]["data_offsets"]
    assert np.frombuffer(data[8 + length :][start:stop], "<f4").tolist() == [0, 1, 2]
    assert not (8 + length) % 8


def test_files_of_other_writers_are_arrays_by_name(tmp_path: pathlib.Path) -> None:
    header = json.dumps({"a.b": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    data = len(header).to_bytes(8, "little") + header + np.array([1, 2], "<f2").tobytes()
    (tmp_path / "file").write_bytes(data)
    assert {name: x.tolist() for name, x in load_file(tmp_path / "file").items()} == {"a.b": [1, 2]}
    (nested,) = load_file(tmp_path / "file", {"a": {"b": jax.ShapeDtypeStruct((2,), jnp.float16)}}).values()
    assert nested["b"].tolist() == [1, 2]


def test_arrays_go_where_the_target_says(tmp_path: pathlib.Path) -> None:
    save_file({"up": INT4}, tmp_path / "file")
    device = jax.devices()[-1]
    restored = load_file(tmp_path / "file", jax.device_put({"up": INT4}, device))
    assert {leaf.device for leaf in jax.tree.leaves(restored)} == {device}


def test_structures_come_back(tmp_path: pathlib.Path) -> None:
    x = jnp.ones(2)
    for tree in (x, [x, {"a": (x,)}], {"0": x, "b": [[x], None, x]}, {0: {1: x}}, INT4):
        save_file(tree, tmp_path / "file")
        expected = jax.tree.map(lambda leaf: leaf, json_like(tree))
        assert jax.tree.structure(load_file(tmp_path / "file")) == jax.tree.structure(expected)
        assert jax.tree.structure(load_file(tmp_path / "file", tree)) == jax.tree.structure(tree)


def json_like(tree: Any) -> Any:
    """The tree with lists in the place of tuples."""
    if isinstance(tree, tuple | list):
        return [json_like(item) for item in tree]
    return {key: json_like(item) for key, item in tree.items()} if isinstance(tree, dict) else tree


@pytest.mark.parametrize(("tree", "error", "match"), [
    ({"a.b": 1.0, "a": {"b": 2.0}}, ValueError, "two leaves of the name 'a.b'"),
    ({"a": INT4, "a.words": 1.0}, ValueError, "two arrays of the name 'a.words'"),
    ({"a": jax.random.key(0)}, TypeError, "jax.random.key_data"),
    ({"a": "text"}, TypeError, "a of type str"),
])  # fmt: skip
def test_trees_that_cannot_be_written(tree: Any, error: Any, match: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(error, match=match):
        save_file(tree, tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_names_that_differ_from_the_targets(tmp_path: pathlib.Path) -> None:
    save_file({"up": INT4, "norm": jnp.ones(3)}, tmp_path / "file")
    with pytest.raises(ValueError, match=r"has also norm, and lacks down"):
        load_file(tmp_path / "file", {"up": INT4, "down": INT4})
    for other in (jnp.ones(4), jnp.ones(3, jnp.bfloat16), INT4):
        with pytest.raises(ValueError, match=r"norm of .*file: float32\[3\]; accepted: "):
            load_file(tmp_path / "file", {"up": INT4, "norm": other})


def test_a_write_that_fails_leaves_the_old_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": jnp.ones(2)}, tmp_path / "file")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_file({"a": jnp.zeros(2)}, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert load_file(tmp_path / "file")["a"].tolist() == [1, 1]


def test_damaged_files_are_refused_or_read(tmp_path: pathlib.Path) -> None:
    """Cut short at any byte, or with any byte changed, a file raises ValueError, or only its values are other ones."""
    random = generator(143)
    tree = {"layers": [{"up": INT4}], "q": unsigned()["uint4"], "x": jnp.ones(3, "int4")}
    save_file(tree, tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    cuts = [whole[:stop] for stop in (0, 7, 8, length - 1, length, len(whole) - 1)]
    changed = []
    for at in random.integers(0, length, 300):
        data = bytearray(whole)
        data[at] = b'0123456789"{}[],:ax\xff'[random.integers(20)]
        changed.append(bytes(data))
    refused = 0
    for data in (*cuts, *changed):
        (tmp_path / "damaged").write_bytes(data)
        try:
            load_file(tmp_path / "damaged")
        except ValueError as error:
            assert str(tmp_path / "damaged") in str(error)
            refused += 1
    assert refused > len(cuts) + len(changed) // 2


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04" + bytes(60), b"\x93NUMPY" + bytes(90), os.urandom(200)])
def test_foreign_files_are_refused(data: bytes, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match="accepted: "):
        load_file(tmp_path / "file")


def test_a_dtype_that_is_no_name(tmp_path: pathlib.Path) -> None:
    save_file({"a": jnp.ones(2, jnp.int4)}, tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(data.replace(b'[\\"int4\\"', b'[\\",,,,\\"'))
    assert (tmp_path / "file").read_bytes() != data
    with pytest.raises(jax_splitk.CheckpointError, match="file: damaged"):
        load_file(tmp_path / "file")


def test_no_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_file(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        save_file({"a": jnp.ones(2)}, tmp_path / "folder" / "file")


# ---- the state -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_with_permuted_rows_is_no_other(kind: str, tmp_path: pathlib.Path) -> None:
    save, load = KINDS[kind]
    q = quantize(values(64, 3), "int8", group_size=32)
    permuted = PermutedWeight(q, jnp.arange(64))
    for given, other in ((permuted, q), (q, permuted), (permuted, PermutedWeight(q, jnp.arange(32)))):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        save({"up": given}, path)
        # orbax compares shapes, and flax one leaf at a time.
        with pytest.raises(ValueError, match=r"up|PermutedWeight|Requested shape: \(32,\)"):
            load(path, {"up": other})


def test_states_that_are_no_weight() -> None:
    key, leaves = "words-int4-group64-128x64-contracts0-layout1", {"scale": INT4.scale}
    assert to_state(INT4).keys() == {key, "scale"}
    for state, match in (
        ({key: INT4.words}, "with the arrays words; accepted: words, scale, zero_point"),
        ({key: INT4.words, "bias": INT4.scale, **leaves}, "with the arrays words, bias, scale"),
        ({key: INT4.words[:, :1], **leaves}, r"words \(1, 1, 512\)"),
        ({key: INT4.words, key.replace("int4", "nf4"): INT4.words, **leaves}, "stored as .* and as"),
        ({key.replace("int4", "int5"): INT4.words, **leaves}, "qtype 'int5'"),
        ({"permuted": {key: INT4.words, **leaves}, "order": jnp.arange(5)}, r"order int32\[5\] .*\(128, 64\)"),
        ({"permuted": {key: INT4.words, **leaves}, "order": jnp.ones(128)}, r"order float32\[128\]"),
    ):
        with pytest.raises(ValueError, match=match):
            from_state({"up": state})
