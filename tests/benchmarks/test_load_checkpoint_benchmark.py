"""benchmarks.load_checkpoint with a small model."""

import json
import pathlib
from typing import Any

import jax
import pytest

import jax_splitk
from benchmarks import load_checkpoint

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("form", list(load_checkpoint.FORMATS))
def test_a_small_model_is_written_and_read(form: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    products = {"self_attn.q_proj": (256, 256), "mlp.down_proj": (384, 256)}
    for name, value in {"WIDTH": 256, "TOKENS": 32, "PRODUCTS": products, "FILE_BYTES": 70_000}.items():
        monkeypatch.setattr(load_checkpoint, name, value)
    load_checkpoint.write(tmp_path, form, 2)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    weights = jax_splitk.load_checkpoint(tmp_path, pack=True).read()
    packed = {name: weight for name, weight in weights.items() if isinstance(weight, jax_splitk.PackedWeight)}
    assert {weight.shape for weight in packed.values()} == set(products.values())
    assert len(packed) == 4
    assert len(weights) == 4 + 2 * 2 + 3
    found: dict[str, Any] = json.loads(json.dumps(load_checkpoint.read(tmp_path)))
    assert found["device_bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    assert found["largest_file_bytes"] < found["bytes"]
    assert found["seconds"] > 0 <= found["peak_bytes"]
