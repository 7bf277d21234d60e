"""Folders, indices and safetensors files: whole ones are read, damaged ones are refused by name."""

import json
import pathlib
import re
import struct
from typing import Any

import jax
import numpy as np
import pytest

import jax_splitk
from jax_splitk.runtime.safetensors_file import DTYPES, SafetensorsFile
from jax_splitk.tuning import progress
from tests.checkpoints import writers
from tests.checkpoints.test_formats import drawn
from tests.damage import mutate_json, mutate_text
from tests.problems import generator, seeded

INDEX = "model.safetensors.index.json"


def in_files(folder: pathlib.Path, files: dict[str, dict[str, np.ndarray]]) -> None:
    for file, tensors in files.items():
        writers.write(folder, tensors, None, file)
    index = {name: f"{file}.safetensors" for file, tensors in files.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def test_several_files_and_a_weight_in_two_of_them(tmp_path: pathlib.Path) -> None:
    with seeded(1) as rng:
        written = writers.awq(rng, 64, 16, 32)
        named = {"up" + end: array for end, array in written.tensors.items()}
        one = {name: named.pop(name) for name in ("up.qweight", "up.scales")}
        in_files(tmp_path, {"model-00001-of-00002": one, "model-00002-of-00002": named | {"b": np.ones(2)}})
        writers.write(tmp_path, {"stale": np.ones(1)}, written.config, "other")
        checkpoint = jax_splitk.load_checkpoint(tmp_path)
        assert set(checkpoint) == {"up.weight", "b"}
        found = np.asarray(jax_splitk.dequantize(checkpoint["up.weight"]))
        assert np.array_equal(found, written.expected)


def test_one_file_without_a_folder(tmp_path: pathlib.Path) -> None:
    """config.json beside it counts."""
    with seeded(2) as rng:
        written = writers.gptq(rng, 64, 16, 32)
        file = writers.save(tmp_path, written) / "model.safetensors"
        (weight,) = jax_splitk.load_checkpoint(file).values()
        assert np.array_equal(np.asarray(jax_splitk.dequantize(weight)), written.expected)
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
        with pytest.raises(ValueError, match=r"config\.json says quant_method='awq'"):
            jax_splitk.load_checkpoint(str(file))


@pytest.mark.parametrize(("file", "fields"), [
    ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}),
    ("config.json", {"text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}}),
])  # fmt: skip
def test_other_places_of_the_description(file: str, fields: Any, tmp_path: pathlib.Path) -> None:
    with seeded(3) as rng:
        written = writers.gptq(rng, 64, 16, 32)
        writers.write(tmp_path, {"a" + end: array for end, array in written.tensors.items()}, None)
    (tmp_path / file).write_text(json.dumps(fields))
    assert list(jax_splitk.load_checkpoint(tmp_path)) == ["a.weight"]
    fields = json.loads((tmp_path / file).read_text().replace("32", "64"))
    (tmp_path / file).write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=f"{file} says .*group_size=64"):
        jax_splitk.load_checkpoint(tmp_path).read()


def test_what_is_missing_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere; accepted: a folder, or a safetensors file"):
        jax_splitk.load_checkpoint(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"no safetensors file \(it has pytorch_model.bin: convert it"):
        jax_splitk.load_checkpoint(tmp_path)
    in_files(tmp_path, {"one": {"a": np.ones(1)}, "two": {"b": np.ones(1)}})
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=f"two.safetensors, which .*{INDEX} names"):
        jax_splitk.load_checkpoint(tmp_path)
    writers.write(tmp_path, {"c": np.ones(1)}, None, "two")
    with pytest.raises(ValueError, match=f"{INDEX} says that 'b' is in two.safetensors, which does not have it"):
        jax_splitk.load_checkpoint(tmp_path)


@pytest.mark.parametrize("index", [
    "", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "../model.safetensors"}}', '{"weight_map": {"a": 1}}',
    '{"weight_map": {"a": "/etc/passwd"}}',
])  # fmt: skip
def test_damaged_indices(index: str, tmp_path: pathlib.Path) -> None:
    writers.write(tmp_path, {"a": np.ones(1)}, None)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(jax_splitk.CheckpointError, match=INDEX):
        jax_splitk.load_checkpoint(tmp_path)


def test_damaged_descriptions(tmp_path: pathlib.Path) -> None:
    writers.write(tmp_path, {"a": np.ones(1)}, None)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(jax_splitk.CheckpointError, match=r"config\.json"):
            jax_splitk.load_checkpoint(tmp_path)


def test_a_tensor_in_two_files_without_an_index(tmp_path: pathlib.Path) -> None:
    for file in ("one", "two"):
        writers.write(tmp_path, {"a": np.ones(1)}, None, file)
    with pytest.raises(jax_splitk.CheckpointError, match=r"'a' in .*one\.safetensors and in .*two\.safetensors"):
        jax_splitk.load_checkpoint(tmp_path)


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(("data", "message"), [
    (b"", "a file of 0 bytes"),
    (b"1234567", "a file of 7 bytes"),
    (struct.pack("<Q", 2**63), "a header of 9223372036854775808"),
    (struct.pack("<Q", 100) + b"{}", "a file of 10 bytes with a header of 100"),
    (struct.pack("<Q", 2) + b"[]", "a header that is not valid"),
    (struct.pack("<Q", 2) + b"{,", "a header that is not valid"),
    (struct.pack("<Q", 15) + b'{"a":1, "a": 2}', "a name twice"),
    (header(a=1), "tensor 'a' as 1"),
    (header(a={"dtype": "F32"}), "tensor 'a' as"),
    (header(a=entry("F4")) + bytes(8), "tensor 'a' of dtype F4; accepted: BOOL"),
    (header(a=entry(shape=(-2,))) + bytes(8), "tensor 'a' as"),
    (header(a=entry(shape=(2.0,))) + bytes(8), "tensor 'a' as"),
    (header(a=entry(offsets=(0, 4))) + bytes(8), r"F32 \(2,\), in bytes 0 to 4 of 8; accepted: 8 bytes"),
    (header(a=entry()) + bytes(7), "in bytes 0 to 8 of 7"),
    (header(a=entry(), b=entry(offsets=(4, 12))) + bytes(12), "tensor 'b' from byte .*, where the one before ends"),
])  # fmt: skip
def test_damaged_safetensors(data: bytes, message: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(data)
    with pytest.raises(jax_splitk.CheckpointError, match=rf"a\.safetensors: .*{message}"):
        jax_splitk.load_checkpoint(file)


def test_every_dtype(tmp_path: pathlib.Path) -> None:
    """At odd addresses, too: the header has any length."""
    tensors = {name: generator(4).integers(1, 3, (3, 5)).astype(dtype) for name, dtype in DTYPES.items()}
    assert set(writers.NAMES.values()) < set(tensors)
    tensors = {name: tensors[name] for name in writers.NAMES.values()}
    for metadata in (None, {"format": "pt"}, {"format": "pt."}):
        (tmp_path / "a.safetensors").write_bytes(writers.safetensors(tensors, metadata))
        file = SafetensorsFile(str(tmp_path / "a.safetensors"))
        for name, array in tensors.items():
            assert file.array(name).dtype == array.dtype and np.array_equal(file.array(name), array)
            assert not file.array(name).flags.writeable


def resident(file: pathlib.Path) -> int:
    """Bytes of a mapped file in this process's memory."""
    found, inside = 0, False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.parametrize("pack", [False, True])
def test_reading_keeps_no_pages_of_the_file(pack: bool, tmp_path: pathlib.Path) -> None:
    """So the host's memory holds one weight at a time, however large the files are."""
    size = (1024, 4096)  # 2 MiB of elements each
    tensors = {}
    for i in range(4):
        tensors[f"{i}.qweight"] = generator(i).integers(0, 2**31, (size[0] // 8, size[1]), np.int32)
        tensors[f"{i}.qzeros"] = np.full((size[0] // 128, size[1] // 8), 0x77777777, np.int32)
        tensors[f"{i}.scales"] = np.full((size[0] // 128, size[1]), 0.5, np.float16)
    file = writers.write(tmp_path, tensors, {"quant_method": "gptq", "bits": 4}) / "model.safetensors"
    checkpoint = jax_splitk.load_checkpoint(tmp_path, pack=pack)
    assert resident(file) < 1 << 20
    for name in checkpoint:
        assert checkpoint[name].shape == size
        assert resident(file) < 1 << 20
    view = SafetensorsFile(str(file)).array("0.qweight")
    assert view.any() and resident(file) >= view.nbytes, "that is what would be seen"


def test_released_pages_are_read_again(tmp_path: pathlib.Path) -> None:
    array = generator(5).integers(0, 256, 100_000).astype(np.uint8)
    (tmp_path / "a.safetensors").write_bytes(writers.safetensors({"a": array, "none": array[:0]}))
    file = SafetensorsFile(str(tmp_path / "a.safetensors"))
    file.prefetch(["a", "none"])
    view = file.array("a")
    file.release(["a", "none"])
    assert np.array_equal(view, array)


@pytest.mark.parametrize(
    "name", ["gptq, act-order", "awq", "pack-quantized, zeros", "nf4, nested", "mxfp4", "fp8, blocks"]
)
def test_damage_is_refused_or_read_as_another_checkpoint(name: str, tmp_path: pathlib.Path) -> None:
    """Headers and config.json change at random. No other error comes."""
    with seeded(6) as rng:
        written = drawn(name, rng)
        weights = writers.save(tmp_path, written) / "model.safetensors"
        config, data = tmp_path / "config.json", weights.read_bytes()
        text, said = data[8 : 8 + int.from_bytes(data[:8], "little")].decode(), config.read_text()
        refused = 0
        for i in range(40):
            change = mutate_text if i % 4 == 1 else lambda rng, text: mutate_json(rng, text, said).encode()
            header, description = text.encode(), said.encode()
            if i % 2:
                header = change(rng, text)
            else:
                description = change(rng, said)
            weights.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + len(text) :])
            config.write_bytes(description)
            try:
                checkpoint = jax_splitk.load_checkpoint(tmp_path)
                for key in checkpoint:
                    checkpoint.stored[key].parts and checkpoint.stored[key].parts()
            except jax_splitk.CheckpointError:
                refused += 1
        assert refused > 5


def test_values_are_read_when_they_are_looked_up(tmp_path: pathlib.Path) -> None:
    with seeded(7) as rng:
        good, bad = writers.gptq(rng, 64, 16, 32), writers.gptq(rng, 64, 16, 32, symmetric=True, version=2)
        tensors = {
            f"{name}{end}": array for name, w in {"a": good, "b": bad}.items() for end, array in w.tensors.items()
        }
        checkpoint = jax_splitk.load_checkpoint(writers.write(tmp_path, tensors, good.config))
        assert len(checkpoint) == 2 and "a.weight" in checkpoint and checkpoint.get("c") is None
        assert repr(checkpoint) == "Checkpoint(2 gptq, pack=False)"
        assert checkpoint["a.weight"].shape == (64, 16)
        assert list(checkpoint.read(["a.weight"])) == ["a.weight"]
        with pytest.raises(ValueError, match="'b' has qzeros that are all 8"):
            checkpoint.read()
        with pytest.raises(KeyError, match="c"):
            checkpoint.read(["c"])


def test_a_bar_shows_how_far_reading_is(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "shows_bar", lambda: True)
    checkpoint = jax_splitk.load_checkpoint(writers.write(tmp_path, {"a": np.ones(9), "b": np.ones(1)}, None))
    assert set(checkpoint.read()) == {"a", "b"}
    assert "reading weights:   0%" in capsys.readouterr().err
    assert checkpoint.read([]) == {}


def test_the_dict_is_a_pytree_that_jit_takes(tmp_path: pathlib.Path) -> None:
    with seeded(8) as rng:
        one, other = (writers.gptq(rng, 64, 16, 32, act_order=act) for act in (False, True))
        tensors = {f"{n}{end}": array for n, w in {"a": one, "b": other}.items() for end, array in w.tensors.items()}
        weights = jax_splitk.load_checkpoint(writers.write(tmp_path, tensors, other.config), pack=True).read()
        found = jax.jit(lambda w: jax.tree.map(lambda leaf: leaf + 0, w))(weights)
        assert jax.tree.structure(found) == jax.tree.structure(weights)
        assert "PermutedWeight(PackedWeight(" in repr(found["b.weight"])
        assert found["b.weight"].nbytes == found["b.weight"].weight.nbytes + 4 * 64
