"""A tile of a block mask may be several CTAs' keys, the last of which lie past the end of the keys:
what they would add to a captured tensor's gradient belongs to no pair."""

import pytest
import torch

import headway as hw
from headway.backends.gpu.codegen.dependence import finite_past_the_end
from headway.mods import lower_mod
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


N = 100  # queries: the last block has some, and some that are past the end
UNFINISHED = torch.full((200,), torch.nan).index_fill(0, torch.arange(N), 0.5)
TABLE = torch.randn(2, 2 * N - 1)
UNDEFINED = {
    "position": lambda s, b, h, i, j: s + (1.0 * (N - i)).log(),
    "derivative": lambda s, b, h, i, j: s * (N - 0.5 - i).sqrt(),
    "quotient": lambda s, b, h, i, j: s / (N - 0.5 - i).abs().sqrt() / (N - i),
    "table": lambda s, b, h, i, j: s + UNFINISHED[i],
    "score": lambda s, b, h, i, j: s + s.log(),
    "steep": lambda s, b, h, i, j: s - s * (i - 0.13 * N).exp() * 1e-38,
    "infinite": lambda s, b, h, i, j: s * torch.where(i < N, 1.0, torch.inf),
    "relative": hw.relative_bias(TABLE),
}
DEFINED = {
    "alibi": hw.alibi(2),
    "softcap": hw.softcap(5.0) >> hw.alibi(2),
    "keys": lambda s, b, h, i, j: s / (1.0 + j).log1p() + TABLE[h, j] + 0.01 * (i - j),
}


@pytest.mark.parametrize("name", UNDEFINED | DEFINED)
def test_queries_past_the_end_give_nothing(name):
    """Whatever a score is there: their logits are 0, and their positions beyond all others."""
    torch.manual_seed(0)
    score = (UNDEFINED | DEFINED)[name]
    graph, _ = lower_mod("score", score, torch.float32)
    assert finite_past_the_end(graph) == (name in DEFINED)
    q, k = (torch.rand(1, 2, N, 64).bfloat16().requires_grad_() for _ in range(2))
    v, dout = (torch.randn(1, 2, N, 64).bfloat16() for _ in range(2))
    v.requires_grad_()
    found = {}
    for backend in ("reference", "hopper"):
        with simulating():
            out = hw.attention(q, k, v, score, backend=backend)
        with simulating():
            grads = torch.autograd.grad(out, (q, k, v), dout)
        found[backend] = out, *grads
    for x, y in zip(found["hopper"], found["reference"], strict=True):
        assert (x - y).abs().max() < 0.03 * y.abs().max()
