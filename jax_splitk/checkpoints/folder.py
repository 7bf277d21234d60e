"""The files of a checkpoint: which safetensors files belong to it, and what its JSON files say about quantization."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jax_splitk.runtime.safetensors_file import CheckpointError, SafetensorsFile, Tensor

_INDEX = "model.safetensors.index.json"
# Files that may describe the quantization, and the keys that lead to the description. The first that has one counts.
_DESCRIPTIONS = (
    ("config.json", ("quantization_config",)),
    ("config.json", ("text_config", "quantization_config")),
    ("config.json", ("compression_config",)),
    ("hf_quant_config.json", ("quantization",)),  # ModelOpt
    ("quantize_config.json", ()),  # AutoGPTQ
    ("quant_config.json", ()),  # AutoAWQ
)
_METHODS = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}


@dataclasses.dataclass(frozen=True)
class Description:
    """What a checkpoint says about its quantization.

    Attributes:
      method: the name in `quant_method`; None if the checkpoint says nothing.
      fields: all that it says.
      path: the file that says it.
      asked: whether the caller says it, not a file.
    """

    method: str | None
    fields: Mapping[str, Any]
    path: str
    asked: bool = False

    def says(self, *fields: str) -> str:
        """The method and these fields, as a message quotes them."""
        said = [f"{field}={self.fields[field]!r}" for field in ("quant_method", *fields) if field in self.fields]
        return f"{self.path} says {', '.join(said or ['nothing'])}"


class Tensors(Mapping[str, Tensor]):
    """The tensors of all files of a checkpoint, by name, in the order of their bytes."""

    def __init__(self, files: Iterable[SafetensorsFile], within: Mapping[str, str] | None = None):
        self._files: dict[str, SafetensorsFile] = {}
        for file in files:
            base = os.path.basename(file.path)
            for name in file.tensors:
                if within is not None and within.get(name, base) != base:
                    continue
                if name in self._files:
                    both = f"{name!r} in {self._files[name].path} and in {file.path}"
                    raise CheckpointError(f"{both}; accepted: each tensor once, or an index ({_INDEX})")
                self._files[name] = file

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def array(self, name: str) -> np.ndarray:
        """A read-only view of a tensor in its mapped file."""
        return self._files[name].array(name)

    def prefetch(self, names: Iterable[str]) -> None:
        """Tells the system that the tensors' bytes are needed soon."""
        for name in names:
            self._files[name].prefetch([name])

    def release(self, names: Iterable[str]) -> None:
        """Gives the tensors' pages back to the system."""
        for name in names:
            self._files[name].release([name])


def open_files(path: str | os.PathLike[str]) -> tuple[Tensors, Description]:
    """Maps the files of a checkpoint.

    Args:
      path: a folder with `config.json` and safetensors files, as Hugging Face's libraries write it, or one safetensors
        file. JSON files beside it count, too.

    Raises:
      FileNotFoundError: there is no such file or folder, no safetensors file, or one of the index is missing.
      CheckpointError: the files are damaged or contradict each other.
    """
    given = pathlib.Path(path)
    if given.is_dir():
        folder, (names, index) = given, _indexed(given)
    elif given.exists():
        folder, names, index = given.parent, [given.name], None
    else:
        raise FileNotFoundError(f"{given}; accepted: a folder, or a safetensors file")
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}, which {folder / _INDEX} names")
    tensors = Tensors((SafetensorsFile(str(folder / name)) for name in names), index)
    if index is not None and (missing := [name for name in index if name not in tensors]):
        name = missing[0]
        raise CheckpointError(f"{folder / _INDEX} says that {name!r} is in {index[name]}, which does not have it")
    return tensors, _description(folder)


def _indexed(folder: pathlib.Path) -> tuple[list[str], dict[str, str] | None]:
    """The names of the folder's safetensors files, and the index, which says in which file a tensor is."""
    path = folder / _INDEX
    if path.is_file():
        index = _json(path).get("weight_map")
        plain = isinstance(index, dict) and index and all(isinstance(f, str) and _is_name(f) for f in index.values())
        if not plain:
            raise CheckpointError(f"{path} without a weight_map of tensors to names of files beside it")
        assert isinstance(index, dict)
        return sorted(set(index.values())), index
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if not found:
        others = [p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in sorted(folder.glob(pattern))]
        has = f" (it has {others[0]}: convert it to safetensors)" if others else ""
        raise FileNotFoundError(f"{folder} has no safetensors file{has}")
    return (["model.safetensors"] if "model.safetensors" in found else found), None


def _is_name(file: str) -> bool:
    return file not in ("", ".", "..") and os.path.basename(file) == file


def _description(folder: pathlib.Path) -> Description:
    for file, keys in _DESCRIPTIONS:
        path = folder / file
        if not path.is_file():
            continue
        fields: Any = _json(path)
        for key in keys:
            fields = fields.get(key) if isinstance(fields, dict) else None
        if isinstance(fields, dict) and fields:
            method = fields.get("quant_method", _METHODS.get(file))
            return Description(None if method is None else str(method).lower(), fields, str(path))
    return Description(None, {}, str(folder / "config.json"))


def _json(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no object of JSON")
    return found
