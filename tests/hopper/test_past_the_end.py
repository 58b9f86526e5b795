"""A tile of a block mask may be several CTAs' keys, the last of which lie past the end of the keys:
what they would add to a captured tensor's gradient belongs to no pair."""

import pytest
import torch

import headway as hw
from tools.simulator import simulating


@pytest.mark.parametrize(
    ("widths", "kv_len", "tile"),
    [((64, 256), 64, None), ((64, 64), 128, (128, 256)), ((64, 256), 192, None)],
    ids=["wide", "two tiles of 128 keys", "wide, half a tile"],
)
def test_keys_past_the_end_get_no_gradient(widths, kv_len, tile):
    torch.manual_seed(0)
    d, dv = widths
    q, k, v = (torch.randn(1, 2, n, w).bfloat16() for n, w in ((200, d), (kv_len, d), (kv_len, dv)))
    table = torch.randn(400).requires_grad_()
    near = lambda b, h, i, j: (i - j).abs() < 40
    mask = near
    if tile is not None:
        mask = hw.block_mask(near, 1, 1, 200, kv_len, tile=tile, device="cpu")
    found = {}
    for backend in ("reference", "hopper"):
        with simulating():
            out = hw.attention(q, k, v, lambda s, b, h, i, j: s + table[j], mask, backend=backend)
        with simulating():
            (found[backend],) = torch.autograd.grad(out.float().square().sum(), table)
    assert torch.equal(found["hopper"][kv_len:], torch.zeros(400 - kv_len))
    assert (found["hopper"] - found["reference"]).abs().max() < 0.02 * found[
        "reference"
    ].abs().max()
