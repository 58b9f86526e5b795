"""The kernel of inference on a GPU: `make gpu-test`. Skipped where there is none."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None or not torch.cuda.is_available():
    pytest.skip("needs Triton and a GPU", allow_module_level=True)

import headway as hw
from headway import inference
from headway.backends.gpu.inference import plan

from . import gpu_kernel as kernel
from .gather import by_rows, caches
from .slot_writes import wrong_float8, wrong_write

SHAPES = {
    "masks and scores": kernel.masks_and_scores, "block masks": kernel.block_masks,
    "strides": kernel.strides,
    "packed": kernel.packed, "float8": kernel.float8, "float8 e5m2": partial(kernel.float8, stored=kernel.E5M2), "lengths change": kernel.lengths_change,
    "placement": kernel.placement,
    **{f"groups of {n}": partial(kernel.groups, n) for n in (1, 5, 7, 8, 20, 40)},
    **{f"latent, {n} heads": partial(kernel.latent, n) for n in (3, 16, 40, 128)},
}  # fmt: skip
CASES = [pytest.param(case, id=name) for name, case in SHAPES.items()]
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("case", CASES)
def test_half(case, dtype):
    assert case(dtype=dtype, device="cuda") < 0.01


@pytest.mark.parametrize(("precision", "bound"), [("highest", 1e-5), ("high", 3e-3)])
@pytest.mark.parametrize("case", CASES)
def test_float32(case, precision, bound):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        assert case(dtype=torch.float32, device="cuda") < bound
    finally:
        torch.set_float32_matmul_precision(before)


def test_writes_to_slots():
    assert [wrong_write(seed, device="cuda") for seed in range(50)] == [""] * 50


@pytest.mark.parametrize("dtype", [kernel.E4M3, kernel.E5M2], ids=str)
def test_writes_float8(dtype):
    assert not wrong_float8(dtype, "cuda")


def test_long_rows_are_the_same_bits_every_time():
    """Hundreds of CTAs share eight rows; the last one to come puts partial results together."""
    q = torch.randn(1, 32, 1, 128, **BF16)
    k, v = (torch.randn(1, 8, 1 << 17, 128, **BF16) for _ in range(2))
    n = torch.tensor([(1 << 17) - 5], dtype=torch.int32, device="cuda")
    run = lambda: inference.attention(q, k, v, lengths=n)
    first = run()
    right = hw.attention(q.double(), k[:, :, :-5].double(), v[:, :, :-5].double())
    assert (first - right).abs().max() < 1e-3
    for _ in range(200):
        assert torch.equal(run(), first)


@pytest.mark.parametrize("page", [16, 64])
def test_a_graph_on_other_lengths(page):
    """Captured, given new lengths, pages and queries, replayed; beside other launches."""
    mask = hw.causal() & hw.sliding_window(100)
    c = caches([300, 7, 64, 0], 8, 2, page=page, d=64, dtype=torch.bfloat16)
    q, k, v, n, table = (x.cuda() for x in (c.q, c.k, c.v, c.lengths, c.page_table))
    run = lambda: inference.attention_with_stats(
        q, k, v, None, mask, lengths=n, page_table=table, backend="triton"
    )
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    for lengths in ([300, 7, 64, 0], [1, 0, 63, 0], [299, 3, 17, 0]):
        c.lengths.copy_(torch.tensor(lengths))
        n.copy_(c.lengths)
        run()
        graph.replay()
        right = by_rows(kernel.cut(c, lengths), mask=mask)
        assert kernel.off(made, right) < 0.01


def test_a_cache_that_grows_makes_one_plan(monkeypatch):
    made = []
    init = plan.Plan.__init__
    monkeypatch.setattr(
        plan.Plan, "__init__", lambda self, *of: made.append(self) or init(self, *of)
    )
    q = torch.randn(2, 8, 1, 72, **BF16)
    k, v = (torch.randn(2, 2, 400, 72, **BF16) for _ in range(2))
    for n in range(100, 400):
        out = hw.attention(q, k[:, :, :n], v[:, :, :n], mask=hw.causal(n - 1))
    right = hw.attention(q.double(), k[:, :, :n].double(), v[:, :, :n].double())
    assert len(made) <= 1
    assert (out - right).abs().max() < 1e-2


def test_two_streams_at_once():
    """Each has counters of its own."""
    q = torch.randn(1, 32, 1, 128, **BF16)
    k, v = (torch.randn(1, 8, 1 << 15, 128, **BF16) for _ in range(2))
    n = torch.tensor([1 << 15], dtype=torch.int32, device="cuda")
    first = inference.attention(q, k, v, lengths=n)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    made = []
    for turn in range(30):
        with torch.cuda.stream(streams[turn % 3]):
            made.append(inference.attention(q, k, v, lengths=n))
    torch.cuda.synchronize()
    assert all(torch.equal(x, first) for x in made)
