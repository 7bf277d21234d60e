"""CUTLASS's header of WGMMA, cut to what a source uses: which instructions stay, and when the whole header is read."""

import pathlib
import re

import pytest

from jax_splitk.runtime import compiler, toolchain, wgmma_header
from jax_splitk.runtime.source import Source, source_files
from tests.runtime.test_plan import small_hopper_plan

pytestmark = pytest.mark.skipif(toolchain.unavailable() is not None, reason="needs NVRTC and CUTLASS's headers")

NAMES = "cute/arch/mma_sm90_gmma.hpp", "cute/arch/mma_sm90_gmma_ext.hpp"
INCLUDE, OF_OTHERS = (f"#include <{name}>\n" for name in NAMES)


def instructions(text: str) -> set[str]:
    headers = wgmma_header.needed(text)
    assert set(headers) <= set(NAMES)
    return {name for header in headers.values() for name in re.findall(r"^struct (MMA_\w+)$", header, re.MULTILINE)}


def test_a_kind_is_there_for_every_number_of_columns() -> None:
    columns = (8, 16, 32, 64, 96, 128, 192, 256)
    found = instructions(f"{INCLUDE}using A = WGMMA(TILE_N, x8_F32TF32TF32_RS_TN)<>;")
    assert found == {f"MMA_64x{n}x8_F32TF32TF32_RS_TN" for n in columns}
    found = instructions(f"{INCLUDE}using A = WGMMA_16(TILE_N,\n  SS)<K, K>;")
    assert found == {f"MMA_64x{n}x16_F32{e}{e}_SS" for n in columns for e in ("F16", "BF16")}
    found = instructions(f"{INCLUDE}{OF_OTHERS}using A = WGMMA_16(TILE_N, SS)<K, K>;")
    assert found == {f"MMA_64x{n}x16_F32{e}{e}_SS" for n in range(8, 257, 8) for e in ("F16", "BF16")}


@pytest.mark.parametrize("file", source_files())
def test_every_source_of_the_package_gets_less(file: str) -> None:
    text = Source(file, (), "").text()
    assert bool(instructions(text)) == (INCLUDE in text)


def test_the_machine_code_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    source = small_hopper_plan().source
    assert instructions(source.text())
    image, log = compiler._machine_code(source, in_worker=False)
    monkeypatch.setattr(wgmma_header, "needed", lambda text: {})
    whole, of_whole = compiler._machine_code(source, in_worker=True)
    assert image is not None and image == whole
    strip = lambda log: re.sub(r"Compile time = .*", "", log)  # noqa: E731
    assert strip(log) == strip(of_whole)


@pytest.mark.parametrize(
    "text",
    [
        "using A = WGMMA(TILE_N, x8_F32TF32TF32_RS_TN)<>;",
        INCLUDE,
        f"{INCLUDE}using A = WGMMA(TILE_N, KIND)<>;",
        f"{INCLUDE}using A = cute::SM90::GMMA::MMA_64x8x8_F32TF32TF32_RS_TN<>;",
        f"{INCLUDE}using A = WGMMA(8, x8_F32TF32TF32_RS_TN)<>;\nusing B = GMMA::MMA_64x64x16_F32F16F16_SS<>;",
    ],
    ids=["no header", "no instruction", "a macro", "CUTLASS's name", "both names"],
)
def test_otherwise_the_whole_header_is_read(text: str) -> None:
    assert wgmma_header.needed(text) == {}


@pytest.mark.parametrize("header", ["", "struct MMA_64x8x8_F32TF32TF32_RS_TN {};\n"])
def test_another_cutlass_is_read_as_it_is(header: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cute/arch/mma_sm90_gmma.hpp"
    path.parent.mkdir(parents=True)
    path.write_text(header)
    monkeypatch.setattr(toolchain, "include_folders", lambda: (tmp_path,))
    text = f"{INCLUDE}using A = WGMMA(TILE_N, x8_F32TF32TF32_RS_TN)<>;"
    assert wgmma_header.needed(text) == {}
    assert not path.with_name("mma_sm90_gmma_ext.hpp").exists()
    assert wgmma_header.needed(OF_OTHERS + text) == {}
    path.unlink()
    wgmma_header._reduced.cache_clear()
    assert wgmma_header.needed(text) == {}
