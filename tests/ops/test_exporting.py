"""`jax_splitk.EXPORT_CHECKS`, which lets `jax.export` take our custom calls."""

import pathlib
import re
import tomllib

import jax
import pytest
from jax import export
from jax import numpy as jnp

import jax_splitk
from jax_splitk.runtime.plan import HOST_QUANTIZED_TARGET, HOST_WGRAD_TARGET, LAUNCH_TARGET
from tests.tuning_cache import finish, start

W, X = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.float32), jax.ShapeDtypeStruct((8, 14, 14, 64), jnp.bfloat16)


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    y = jax_splitk.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), compute_dtype=jnp.bfloat16
    )
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


def test_a_training_function_is_exported_as_the_readme_says() -> None:
    grad = jax.jit(jax.grad(loss))
    exported = export.export(grad, platforms=["cpu", "cuda"], disabled_checks=jax_splitk.EXPORT_CHECKS)(W, X)
    for target in (HOST_WGRAD_TARGET, LAUNCH_TARGET):
        assert f"@{target}" in exported.mlir_module()
    with pytest.raises(ValueError, match="compatibility guarantees"):
        export.export(grad, platforms=["cpu"])(W, X)


def test_a_quantized_product_is_exported() -> None:
    packed = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((128, 64)), "int4", group_size=64))
    product = jax.jit(lambda x: jax_splitk.quantized_matmul(x, packed))
    x = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)
    exported = export.export(product, platforms=["cpu", "cuda"], disabled_checks=jax_splitk.EXPORT_CHECKS)(x)
    for target in (HOST_QUANTIZED_TARGET, LAUNCH_TARGET):
        assert f"@{target}" in exported.mlir_module()


SERIALIZE = """
import json, sys
sys.modules["flatbuffers"] = None  # as where it is not installed
import jax
from jax import export, numpy as jnp
exported = export.export(jax.jit(jnp.sin))(jnp.ones(3))
try:
    exported.serialize()
    print(json.dumps(""))
except ImportError as error:
    print(json.dumps(str(error)))
"""


def test_the_extra_of_the_guide_has_what_serialize_needs() -> None:
    exported = export.export(jax.jit(jnp.sin))(jnp.ones(3))
    assert export.deserialize(exported.serialize()).call(jnp.zeros(3)).shape == (3,)
    ((said, _),) = finish(start(SERIALIZE))
    missing = re.search("flatbuffers", said)
    assert missing is not None, said
    root = pathlib.Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert [re.split("[<>=]", text)[0] for text in project["optional-dependencies"]["export"]] == [missing[0]]
    guide, install = ((root / "docs" / page).read_text() for page in ("guides/export.md", "install.md"))
    assert f"package `{missing[0]}`" in guide
    assert "pip install '.[export]'" in guide
    assert f"| `export` | `{missing[0]}`" in install
