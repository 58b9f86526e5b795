"""On a GPU: compiled whole, CUDA graphs, the drop-ins, autocast. Skipped where there is none."""

import gc
import random
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

import captured
import headway as hw
from headway import autograd
from headway.compat import flash, flex, torch_sdpa
from headway.errors import ArgumentError
from headway.resolve import prepare
from headway.types import Coords

if find_spec("triton") is None or not torch.cuda.is_available():
    pytest.skip("needs Triton and a GPU", allow_module_level=True)

from headway.backends.gpu.runtime import call_plan
from headway.backends.gpu.runtime.device_guard import outside_capture

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


def record(step):
    """A CUDA graph of a call that was made before, and what it returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    return graph, made


@pytest.fixture(params=["triton", "hopper"])
def backend(request):
    q = torch.zeros(1, 1, 16, 64, device="cuda", dtype=torch.bfloat16)
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    hw.attention(q, q, q, backend=request.param)
    return request.param


def test_work_aside_of_a_capture_is_done_at_once():
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.arange(5, device=device)
    graph = torch.cuda.CUDAGraph()

    def made():
        assert x.sum().item() == 10  # the host waits
        there = torch.arange(7).to(device)
        assert there.nonzero().cpu().flatten().tolist() == [1, 2, 3, 4, 5, 6]
        return there

    with torch.cuda.graph(graph):
        before = x * 2
        there = outside_capture(device, made)
        after = before + 1
    assert there.tolist() == [*range(7)]  # before any replay
    x.fill_(3)
    graph.replay()
    assert after.tolist() == [7] * 5


@pytest.mark.parametrize("lengths", [(300, 300), (640, 2048)], ids=str)
@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
@pytest.mark.parametrize("make", captured.MASKS, ids=lambda make: make.__name__)
def test_what_is_written_after_a_capture_counts(backend, make, known, lengths):
    """Plans are made before it or in it; and no memory that the graph reads is let go of."""
    of = make(*lengths, "cuda")
    step = captured.Step(
        backend, of, *lengths, "cuda", torch.bfloat16, width=64, deterministic=not known
    )

    def forgetting():
        if not known:
            call_plan.clear()
        return step()

    graph, made = record(forgetting)
    call_plan.clear()
    hw.clear_block_cache()
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((n,), -1, device="cuda") for n in (64, 256, 1024, 4096) for _ in range(100)]
    for _ in range(3):
        step.rewrite()
        graph.replay()
        assert max(step.wrong(made)) < 1
        assert max(step.wrong(step())) < 1
    del junk


def test_block_masks_that_take_turns_in_a_graph(backend):
    """Given ones are used as they are, and kept."""
    q = torch.randn(1, 2, 640, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    masks = [hw.causal(), hw.causal() & hw.sliding_window(100), hw.sliding_window(70)]
    given = [hw.block_mask(mask, 1, 1, 640, 640, device="cuda") for mask in masks]

    def step(backend=backend):
        made = []
        for mask in given:
            out = hw.attention(q, q, q, None, mask, backend=backend, deterministic=True)
            made += out, *torch.autograd.grad(out, q, torch.ones_like(out))
        return made

    graph, made = record(step)
    call_plan.clear()
    with torch.no_grad():
        q.copy_(torch.randn_like(q))
    graph.replay()
    for x, y in zip(made, step("reference"), strict=True):
        torch.testing.assert_close(x, y, **HALF)


def test_graphs_of_compiled_programs_find_new_lengths(backend):
    """`reduce-overhead`: what a mask captures is copied to where the graph reads it."""
    torch.compiler.reset()
    q = torch.randn(2, 2, 640, 64, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([640, 640], device="cuda")
    call = lambda q, n: hw.attention(q, q, q, None, hw.padding(n), backend=backend)
    compiled = torch.compile(call, mode="reduce-overhead", fullgraph=True)
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        lengths.copy_(torch.tensor([random.randint(1, 640), random.randint(1, 640)]))
        torch.testing.assert_close(compiled(q, lengths), call(q, lengths), **HALF)


def test_a_block_mask_whose_ids_were_written_to_is_refused(backend):
    q = torch.randn(1, 2, 1024, 64, device="cuda", dtype=torch.bfloat16)
    ids = torch.arange(1024, device="cuda") // 100
    mask = hw.causal() & hw.document(ids)
    build = lambda: hw.block_mask(mask, 1, 1, 1024, 1024)
    given = build()
    hw.attention(q, q, q, None, given, backend=backend)
    ids.copy_(torch.arange(1024, device="cuda") // 170)
    with pytest.raises(ArgumentError, match="written to since"):
        hw.attention(q, q, q, None, given, backend=backend)
    right = hw.attention(q, q, q, None, mask, backend="reference")
    torch.testing.assert_close(hw.attention(q, q, q, None, build(), backend=backend), right, **HALF)


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


@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
def test_offsets_of_a_varlen_graph_are_read_at_its_replay(known):
    """Forward and backward, with a window, ALiBi and the log-sum-exp."""
    total, longest = 700, 700
    q, k, v = (
        torch.randn(total, h, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h in (HQ, HK, HK)
    )
    slopes = torch.rand(HQ, device="cuda")

    def cuts():
        inner = sorted(random.choices(range(total + 1), k=4))
        return torch.tensor([0, *inner, total], device="cuda", dtype=torch.int32)

    def step(cu_q, cu_k):
        made = flash.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, longest, longest, causal=True, window_size=(200, 0),
            alibi_slopes=slopes, return_attn_probs=True,
        )[:2]  # fmt: skip
        seen = [x.masked_fill(x.isneginf(), 0) for x in made]
        return [*seen, *torch.autograd.grad(seen, (q, k, v), [torch.ones_like(x) for x in seen])]

    for own in (True, False):
        cu_q = cuts()
        cu_k = cu_q if own else cuts()
        if known:
            step(cu_q, cu_k)
        graph, made = record(lambda a=cu_q, b=cu_k: step(a, b))
        before = [x.clone() for x in step(cu_q, cu_k)]  # finds nothing that is the graph's
        for _ in range(3):
            cu_q.copy_(cuts())
            if not own:
                cu_k.copy_(cuts())
            graph.replay()
            for a, b in zip(made, step(cu_q.clone(), cu_k.clone()), strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())
        assert not torch.equal(before[0], made[0])


def test_steps_of_new_offsets_and_block_masks_keep_no_memory():
    q = torch.randn(20_000, 1, 64, device="cuda", dtype=torch.bfloat16)

    def step(n):
        cu = torch.tensor([0, 5000 + n, len(q)], device="cuda", dtype=torch.int32)
        flash.flash_attn_varlen_func(q, q, q, cu, cu, len(q), len(q), causal=True)
        kept = torch.ones(1, 1, 1000, 1000, dtype=torch.bool, device="cuda").tril()
        hw.block_mask(hw.dense(kept), 1, 1, 1000, 1000)

    held = []
    for first in (0, 200):
        for n in range(first, first + 100):
            step(n)
        gc.collect()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[1] - held[0] < 2**20


def test_several_gradients_at_once(qkv):
    """The engine's thread of a GPU does not know the nesting of the caller's `vmap`."""
    table, score = learned()
    leaves = [*qkv, table]
    results = attend(*qkv, score, hw.causal())
    sent = [torch.randn(3, *x.shape, device="cuda").to(x.dtype) for x in results]
    take = lambda by, **how: torch.autograd.grad(results, leaves, by, retain_graph=True, **how)
    made = take(sent, is_grads_batched=True)
    for n in range(3):
        for x, right in zip(made, take([d[n] for d in sent]), strict=True):
            torch.testing.assert_close(x[n], right, **HALF)


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda"])
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_a_default_device_and_dtype_change_nothing(qkv, backend, device):
    q, k, v = qkv
    table, score = learned()
    lengths = torch.tensor([200, LENGTH], device="cuda")

    def everything():
        call_plan.clear()
        hw.clear_block_cache()
        mask = hw.causal() & hw.padding(lengths) & hw.sliding_window(100)
        out = hw.attention(q, k, v, score, mask, backend=backend)
        biased = hw.attention(q, k, v, hw.alibi(HQ) >> hw.softcap(5.0), mask, backend=backend)
        return out, biased, *grads([out, biased], [*qkv, table])

    right = everything()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device(device), torch.autograd.set_detect_anomaly(True):
            made = everything()
    finally:
        torch.set_default_dtype(before)
    for x, y in zip(made, right, strict=True):
        assert x.device == y.device
        torch.testing.assert_close(x, y, **HALF)


def test_threads(qkv):
    """First calls of many kinds from several threads: each compiles, or takes what others have."""
    q, k, v = (x.detach() for x in qkv)
    masks = [hw.causal(), hw.sliding_window(50), hw.causal() & hw.prefix(30)]
    calls = [(score, mask) for score in (None, hw.softcap(5.0), hw.alibi(HQ)) for mask in masks]
    right = [hw.attention(q, k, v, *call, backend="reference") for call in calls]
    call_plan.clear()
    hw.clear_block_cache()

    def work(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(30):
            n = order.randrange(len(calls))
            made = hw.attention(q, k, v, *calls[n])
            torch.testing.assert_close(made, right[n], **HALF)

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work, n) for n in range(6)]:
            done.result()


@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("per_batch", [False, True], ids=["one_order", "order_per_batch"])
def test_positions_one_by_one(backend, per_batch):
    """Shuffled, and put back in order."""
    make = lambda h: torch.randn(2, h, LENGTH, D, device="cuda", dtype=torch.bfloat16)
    qkv = [make(h).requires_grad_() for h in (HQ, HK, HK)]
    table, score = learned()
    leaves = [*qkv, table]
    right = hw.attention(*qkv, score, hw.causal(), backend=backend)
    expected = grads([right], leaves)
    rows = 2 if per_batch else 1
    orders = [
        torch.stack([torch.randperm(LENGTH, device="cuda") for _ in range(rows)]) for _ in range(2)
    ]
    at = [x.expand(2, -1)[:, None, :, None] for x in orders]
    q, k, v = (x.take_along_dim(at[n > 0], 2) for n, x in enumerate(qkv))
    q_pos, kv_pos = (x if per_batch else x[0] for x in orders)
    out, *_ = autograd.attention(
        *prepare(
            q, k, v, score, hw.causal(), backend=backend, keys=Coords(q_pos=q_pos, kv_pos=kv_pos)
        )
    )
    out = out.take_along_dim(at[0].argsort(2), 2)
    torch.testing.assert_close(out, right, **HALF)
    for x, y in zip(grads([out], leaves), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2 * y.abs().max().item())
