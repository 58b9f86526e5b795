"""Every case of the table, on every backend that runs here, against float64."""

from dataclasses import replace

import pytest
import torch

from cases import CASES
from checks import check
from long import long_unless

HALF = [case for case in CASES if "half" in case.tags]
# Which tiles a mask skips does not depend on the dtype, and float64 has every mask. Nor does where
# rows end depend on which of the half precisions it is, and bfloat16 has all fourteen shapes.
LONG_MASKS = [case for case in CASES if case.name.startswith("long_") and "mask" in case.tags]
MASKS = [case for case in LONG_MASKS if case not in HALF]
FLOAT32 = {*CASES} - {*MASKS} | {*MASKS[::4]}
FOURTEEN = [case for case in CASES if "fourteen" in case.tags]
FLOAT16 = {*HALF} - {*FOURTEEN} | {*FOURTEEN[::4]}
BOTH = [(case, dtype) for dtype in (torch.bfloat16, torch.float16) for case in HALF]
NAMES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def _id(x) -> str:
    return NAMES.get(x, str(x))


def _both(case, dtype) -> None:
    check(case, "reference", dtype)
    _cpu(case, dtype)


def _cpu(case, dtype) -> None:
    # Two ways through the backend: without statistics it may leave the work to PyTorch's kernels.
    check(case, "cpu", dtype, stats=False)
    check(case, "cpu", dtype, stats=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64(case):
    _both(case, torch.float64)


# Behind what it shares exact results with (`checks.yardstick`).
@pytest.mark.parametrize("tile", [(64, 32), (50, 300)], ids=str)
@pytest.mark.parametrize("case", LONG_MASKS, ids=str)
def test_block_masks_in_place_of_masks(case, tile):
    check(case, "cpu", torch.float64, tile=tile, stats=tile == (50, 300))


@pytest.mark.parametrize("case", long_unless(FLOAT32, CASES), ids=str)
def test_float32(case):
    _cpu(case, torch.float32)
    if case in LONG_MASKS:
        check(case, "cpu", torch.float32, tile=(64, 32), stats=False)


@pytest.mark.parametrize(
    ("case", "dtype"),
    long_unless([row for row in BOTH if row[1] == torch.bfloat16 or row[0] in FLOAT16], BOTH),
    ids=_id,
)
def test_half(case, dtype):
    if dtype == torch.bfloat16:  # to the reference, in float64, one is like the other
        check(case, "reference", dtype)
    _cpu(case, dtype)


@pytest.mark.parametrize("case", HALF[::4], ids=str)
def test_entropy(case):
    case = replace(case, entropy=True)
    check(case, "reference", torch.float64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        check(case, "cpu", dtype)


def test_the_table_has_the_fourteen_shapes_on_which_a_kernel_failed():
    shapes = {(c.hk, c.d, c.q_len) for c in CASES if "fourteen" in c.tags}
    assert len(shapes) == 14
    assert all(
        c.hq == 8 and c.q_len == c.kv_len and c in HALF for c in CASES if "fourteen" in c.tags
    )
    assert sum("fourteen" in c.tags for c in CASES) == 28
