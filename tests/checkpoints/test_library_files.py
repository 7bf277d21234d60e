"""Files that the libraries of the formats wrote have the values that the libraries make of them (write_files.py)."""

import json
import pathlib
import shutil

import numpy as np
import pytest

import jax_splitk
from jax_splitk import PermutedWeight
from jax_splitk.runtime.safetensors_file import SafetensorsFile
from tests.checkpoints.test_formats import same_bits, values

FILES = pathlib.Path(__file__).parent / "files"
NAMES = sorted(path.name for path in FILES.iterdir() if path.is_dir())


def test_there_are_files_of_every_library() -> None:
    table = (FILES / "README.md").read_text()
    assert len(NAMES) >= 18 and all(f"`{name}`" in table for name in NAMES)
    assert all(name in table for name in ("gptqmodel", "autoawq", "compressed-tensors", "bitsandbytes", "transformers"))


def test_version_1_stores_0_as_15(tmp_path: pathlib.Path) -> None:
    """GPTQModel borrows from the next zero point of the word; the files of others have 16 where 15 is stored."""
    zeros = jax_splitk.load_checkpoint(FILES / "gptq_v1")["layer.weight"].zero_point
    assert int(zeros.min()) == 0
    shutil.copytree(FILES / "gptq_v1", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]["meta"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    others = jax_splitk.load_checkpoint(tmp_path)["layer.weight"].zero_point
    assert int(others.max()) == 16
    borrowed = np.argwhere(np.asarray(zeros != others))
    assert {int(others[tuple(place)]) - int(zeros[tuple(place)]) for place in borrowed} == {16, -1}


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_library(name: str, pack: bool) -> None:
    expected = SafetensorsFile(str(FILES / name / "values.safetensors")).array("values")
    checkpoint = jax_splitk.load_checkpoint(FILES / name, pack=pack)
    (key,) = (key for key, stored in checkpoint.stored.items() if stored.format != "array")
    weight = checkpoint[key]
    assert isinstance(weight, PermutedWeight) == ("act_order" in name)
    same_bits(values(weight, expected.dtype), expected)
