"""No kernel's loop reads a register before it has a value. ptxas may share such a register with another variable, which
gives wrong results that neither the emulator nor the PTX shows."""

import collections
from typing import Any

import pytest

from jax_splitk.runtime import toolchain
from jax_splitk.runtime.source import Source
from tests import ptx
from tests.every_kernel import RUNS

WINDOW = """
.visible .entry first(
	.param .u64 first_param_0
)
.maxntid 32, 1, 1
{
	.reg .f32 	%f<4>;
	mov.u32 	%r1, 0;
	BEGIN
$L__BB0_1:
	.pragma "nounroll";
	mov.f32 	%f2, %f1;
	mov.f32 	%f1, 0f3F800000;
	{ add.s32 	%r1, %r1, 1;
	setp.lt.s32 	%p1, %r1, 8;
	@%p1 bra 	$L__BB0_1;

	@%p1 bra 	$L__BB0_3;
	mov.u32 	%r2, 5;
	bra.uni 	$L__BB0_4;
$L__BB0_3:
	st.global.v2.u32 	[%rd1], {%r2, %r1};
$L__BB0_4:
	st.global.f32 	[%rd1], %f2;
	ret;
}
"""


def test_what_a_loop_carries_without_a_value_is_seen() -> None:
    assert ptx.carried_without_value(WINDOW.replace("BEGIN", "ld.param.u64 %rd1, [first_param_0];")) == {
        "first": {"%f1"}
    }
    for begin in ("mov.f32 \t%f1, 0f00000000;", "ld.global.v2.f32 {%f1, %f2}, [%rd1];", "@%p1 mov.f32 %f1, %f3;"):
        assert ptx.carried_without_value(WINDOW.replace("BEGIN", begin)) == {}


def sources() -> list[Any]:
    """One source of every family; further ones for `make test-all`."""
    found: dict[str, dict[Source, None]] = collections.defaultdict(dict)
    for run in RUNS:
        found[run.family.name][run.plan.source] = None
    first = [pytest.param([*of][:1], id=family) for family, of in found.items()]
    others = [pytest.param([*of][1:], id=family, marks=pytest.mark.exhaustive) for family, of in found.items()]
    return [*first, *others]


@pytest.mark.skipif(toolchain.unavailable() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("of", sources())
def test_no_loop_reads_what_has_no_value(of: list[Source]) -> None:
    for source in of:
        assert ptx.carried_without_value(ptx.of(source)) == {}, source.defines
