"""On a GPU: compiled whole, CUDA graphs, the drop-ins, autocast. Skipped where there is none."""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

import headway as hw
from headway.compat import flash, flex, torch_sdpa

if find_spec("triton") is None or not torch.cuda.is_available():
    pytest.skip("needs Triton and a GPU", allow_module_level=True)

HQ, HK, LENGTH, D = 4, 2, 300, 64
HALF = {"rtol": 2e-2, "atol": 2e-2}


@pytest.fixture
def qkv():
    make = lambda h: torch.randn(2, h, LENGTH, D, device="cuda", dtype=torch.bfloat16)
    return [make(h).requires_grad_() for h in (HQ, HK, HK)]


def learned():
    table = torch.randn(HQ, 2 * LENGTH - 1, device="cuda", requires_grad=True)
    return table, lambda s, b, h, i, j: s + table[h, i - j + LENGTH - 1]


def attend(q, k, v, score, mask):
    made = hw.attention_with_stats(q, k, v, score, mask)
    return made.out, made.lse


def grads(results, leaves):
    generator = torch.Generator("cuda").manual_seed(1)
    sent = [
        torch.randn(x.shape, generator=generator, device="cuda", dtype=x.dtype) for x in results
    ]
    return torch.autograd.grad(results, leaves, sent)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiles_whole(qkv, mode):
    """`reduce-overhead` records CUDA graphs: no synchronisation, no lazy tuning in the call."""
    torch.compiler.reset()
    table, score = learned()
    mask = hw.causal() & hw.sliding_window(70)
    compiled = torch.compile(attend, fullgraph=True, mode=mode)
    for _ in range(3):  # the third replays a graph
        torch.compiler.cudagraph_mark_step_begin()
        made = compiled(*qkv, score, mask)
        ours = [x.clone() for x in (*made, *grads(made, [*qkv, table]))]
    right = attend(*qkv, score, mask)
    for a, b in zip(ours, (*right, *grads(right, [*qkv, table])), strict=True):
        torch.testing.assert_close(a, b, **HALF)


def test_dynamic_lengths_compile_twice_at_most():
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    fn = torch.compile(lambda q: hw.attention(q, q, q, None, hw.causal()), backend=counter)
    for length in (128, 200, 333, 512):
        q = torch.randn(1, 2, length, D, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(fn(q), hw.attention(q, q, q, None, hw.causal()), **HALF)
    assert counter.frame_count <= 2


def test_a_cuda_graph_of_forward_and_backward(qkv):
    table, score = learned()
    leaves = [*qkv, table]

    def step():
        made = attend(*qkv, score, hw.causal())
        return [*made, *torch.autograd.grad(made, leaves, [torch.ones_like(x) for x in made])]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kernels are compiled before anything is recorded
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    with torch.no_grad():
        for x in leaves:
            x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(recorded, step(), strict=True):
        torch.testing.assert_close(a, b, **HALF)


def test_autocast(qkv):
    q, k, v = (x.detach().float().requires_grad_() for x in qkv)
    with torch.autocast("cuda", torch.bfloat16):
        out = hw.attention(q, k, v, None, hw.causal())
    assert out.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in grads([out], [q, k, v]))


def test_drop_ins(qkv):
    q, k, v = qkv
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = grads([right], qkv)
    causal = lambda b, h, i, j: i >= j
    blocks = flex.create_block_mask(causal, None, None, LENGTH, LENGTH, device="cuda")
    swapped = [x.transpose(1, 2) for x in qkv]
    for out in (
        torch_sdpa.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        flex.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True),
        flash.flash_attn_func(*swapped, causal=True).transpose(1, 2),
    ):
        torch.testing.assert_close(out, right, **HALF)
        for a, b in zip(grads([out], qkv), expected, strict=True):
            torch.testing.assert_close(a, b, **HALF)


def test_varlen(qkv):
    q, k, v = (x[0].transpose(0, 1) for x in qkv)
    offsets = torch.tensor([0, 90, 97, LENGTH], device="cuda", dtype=torch.int32)
    out = flash.flash_attn_varlen_func(q, k, v, offsets, offsets, 203, 203, causal=True)
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        alone = flash.flash_attn_func(*(x[None, start:stop] for x in (q, k, v)), causal=True)
        torch.testing.assert_close(out[start:stop], alone[0], **HALF)
