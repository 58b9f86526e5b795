"""What ships compiles for every kind of GPU, with none of them there, and how much it spills."""

from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from long import long_unless
from tools.compile_triton import report

# Bytes of registers stored to memory by a causal call: forward, dq, dk and dv; 256 wide, dk, and dv.
# What dk and dv store is mostly what they need between two runs of tiles, once for each run.
SPILLS = {
    ("sm_80", "bf16_64"): (0, 0, 0),
    ("sm_90", "bf16_128"): (0, 0, 20),
    ("sm_90", "bf16_256"): (0, 0, 0, 0),
    ("sm_90", "f32_16"): (0, 8, 0),
    ("sm_90", "entropy_bf16_128"): (0, 0, 0),
    ("sm_90", "expect_bf16_128"): (0, 0, 0),
    ("sm_90", "tangent_bf16_64"): (0,),
    ("sm_90", "tangent_bf16_128"): (0,),
    ("sm_90", "alone_bf16_16"): (0, 0, 0),
    ("sm_100", "bf16_64"): (0, 0, 0),
    ("sm_120", "bf16_64"): (0, 0, 0),
    ("gfx942", "bf16_64"): (0, 2, 179),
    ("gfx950", "bf16_64"): (0, 0, 0),
}
# Widths at which a forward read registers that nothing had written, when its loads were 2 bytes wide.
ODD = {("sm_90", f"bf16_{widths}"): (0,) for widths in ("72_40", "184_136")}
# Where Triton took a length of 1 for a constant, a loop of one round was no loop: dk was wrong on an
# H100.
ONE = {
    ("sm_90", "one_bf16_72_32"): (0, 0, 0, 0, 0, 0),
    ("sm_90", "one_bf16_128_128"): (0, 0, 16, 0, 0, 16),
}
CALLS = SPILLS | ODD | ONE


LONG = {("sm_90", "one_bf16_128_128")}  # the loop of one round is in the narrower one, too


@pytest.mark.parametrize(("target", "call"), long_unless({*CALLS} - LONG, CALLS))
def test_compiles(target, call):
    found = report(target, call)
    assert [fault for kernel in found for fault in kernel.faults] == []
    spilled = tuple(kernel.spills for kernel in found)
    most = CALLS[target, call]
    assert all(a <= b for a, b in zip(spilled, most, strict=True)), spilled
    if (target, call) not in ONE:  # loops over blocks touch nothing of it (sm_80 and sm_90)
        assert not any(kernel.inside for kernel in found), found
