"""Registers that a loop reads before they have a value are found. tests/kernels/test_machine_code.py looks for them in
every kernel."""

from tests import ptx

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
