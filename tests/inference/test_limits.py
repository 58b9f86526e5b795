"""Which masks keep a range of keys, and nothing but that: plain calls with few queries take the kernel
of inference for these alone."""

import pytest
import torch

import headway as hw
from headway.backends.gpu.codegen.limits import is_packed, is_range
from headway.mods import lower_mod
from headway.packed import Side, pack

N = torch.tensor([3, 9])
WINDOW = hw.causal() & hw.sliding_window(4)


def text(mask) -> str:
    return lower_mod("mask", mask, torch.float32)[0].text


@pytest.mark.parametrize(
    "mask",
    [hw.causal(), WINDOW, hw.causal(5) & hw.padding(N), hw.chunked(3), hw.block_causal(3),
     lambda b, h, i, j: ~(j > i - 2 * h), lambda b, h, i, j: (3 * j + 1 < i) & (i > 4)],
)  # fmt: skip
def test_ranges(mask):
    assert is_range(text(mask))
    at = torch.meshgrid(*map(torch.arange, (2, 3, 12, 12)), indexing="ij")
    kept = mask(*at)
    first, count = kept.int().argmax(-1, keepdim=True), kept.sum(-1, keepdim=True)
    j = torch.arange(12)
    assert torch.equal(kept, (j >= first) & (j < first + count))


@pytest.mark.parametrize(
    "mask",
    [hw.document(torch.arange(12) // 5), hw.causal() | hw.prefix(3), hw.dilated(3, 2),
     hw.strided(3), hw.sliding_window(2) | hw.global_tokens(1), WINDOW & hw.dilated(9, 2),
     lambda b, h, i, j: j % 2 == 0, lambda b, h, i, j: j != i],
)  # fmt: skip
def test_others(mask):
    assert not is_range(text(mask))


@pytest.mark.parametrize("mask", [None, hw.causal(), WINDOW, hw.causal() & ~hw.causal(-3)])
def test_packed(mask):
    """Every key of packed sequences is some query's; of a document of the row it may be no one's."""
    device, offsets = torch.device("cpu"), torch.tensor([0, 3, 12])
    q, k = Side("q", 12, device, offsets), Side("k", 12, device, offsets.clone())
    for packing in (pack(q, q), pack(q, k), pack(q, k).aligned()):
        assert is_packed(text(packing.mask(mask)))
    assert not is_packed(text(hw.document(torch.arange(12) // 5)))
