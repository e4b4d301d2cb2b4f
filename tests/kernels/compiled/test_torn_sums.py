"""What every compiled kernel is searched for: sums over warps that are not neighbours."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from kernel_aot import torn_sums


@pytest.mark.parametrize(
    ("warps", "found"), [([[0, 0, 16], [0, 1, 0], [0, 0, 1]], 1), ([[0, 1, 0], [0, 0, 16]], 0)]
)
def test_a_sum_over_warps_that_are_not_neighbours_is_found(warps, found):
    """The first layout is that of the kernel which was wrong on an H200."""
    text = (
        f"#linear = #ttg.linear<{{register = [], lane = [], warp = {warps}, block = []}}>\n"
        '%45 = "tt.reduce"(%44) <{axis = 1 : i32}> ({\n}) : (tensor<16x2x32xi32, #linear>) -> x'
    )
    assert len(torn_sums(text)) == found
