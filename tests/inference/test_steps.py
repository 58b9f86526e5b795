"""Nothing is made for a length, and no number comes back to the host."""

import importlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import headway as hw
from headway import call_cache, inference
from headway.errors import ArgumentError
from headway.inference import Cache, Level, PagedCache
from headway.mods import lowering
from headway.nn import Attention, Rotary

HQ, HK, D = 4, 2, 16


class NothingComesBack(TorchDispatchMode):
    """Fails where a number of a tensor, or a tensor of a size that its numbers decide, is read."""

    READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select",
             "unique", "bincount", "_to_cpu", "repeat_interleave.Tensor")  # fmt: skip

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        assert not any(name.startswith(read) for read in self.READS), name
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


def new(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("paged", [True, False])
def test_no_number_comes_back_to_the_host(paged):
    cache = PagedCache(1, 8, 4, HK, D, rows=2) if paged else Cache(1, 2, HK, D, capacity=16)
    cache.reserve([0, 1], [3, 1])
    k, v, q = new(2, HK, 3, D), new(2, HK, 3, D), new(2, HQ, 3, D)
    cu_q = torch.tensor([0, 3, 4], dtype=torch.int32)
    rows = torch.tensor([1, 0], dtype=torch.int32)
    score, mask = hw.alibi(HQ), hw.causal() & hw.padding(torch.tensor([3, 9]))
    with NothingComesBack():
        cache[0].append(k, v)
        inference.attention_with_stats(q, *cache[0].kv, score, mask, **cache[0].options)
        packed = new(1, HQ, 4, D)
        cache.reserve([0, 1], [3, 1])
        cache[0].append(new(1, HK, 4, D), new(1, HK, 4, D), cu_q=cu_q)
        inference.attention(packed, *cache[0].kv, cu_q=cu_q, max_q=3, **cache[0].options)
        level = Level(new(2, HK, 9, D), new(2, HK, 9, D), cache.lengths, None, rows)
        own = (*cache[0].kv, cache.lengths, cache.page_table)
        inference.cascade_with_stats(q, [level, own], score, mask)
        inference.cascade_with_stats(packed, [level, own], score, mask, cu_q=cu_q, max_q=3)


def test_nothing_is_made_for_a_length(monkeypatch):
    """300 lengths: one entry of the call cache, no graph traced, no block mask built."""
    builds, traces = [], []
    blocks = importlib.import_module("headway.blocks.build")
    real, trace = blocks.build, lowering.trace
    monkeypatch.setattr(blocks, "build", lambda *given: builds.append(1) or real(*given))
    monkeypatch.setattr(lowering, "trace", lambda *a, **kw: traces.append(1) or trace(*a, **kw))
    cache = PagedCache(1, 40, 16, HK, D, rows=2)
    q, k, v = new(2, HQ, 1, D), new(2, HK, 1, D), new(2, HK, 1, D)
    score, mask = hw.softcap(20.0), hw.causal() & hw.sliding_window(64)

    def step():
        cache.reserve([0, 1], 1)
        cache[0].append(k, v)
        inference.attention(q, *cache[0].kv, score, mask, **cache[0].options)

    step()
    before = len(call_cache._signatures), len(traces)
    for _ in range(300):
        step()
    assert (len(call_cache._signatures), len(traces)) == before
    assert builds == []


def test_a_cache_that_is_made_anew_is_the_same_call():
    """Its capacity is its length, as where every step concatenates; but values are as long as keys."""
    q, k = new(2, HQ, 1, D), new(2, HK, 90, D)
    step = lambda k, v: inference.attention(
        q,
        k,
        v,
        hw.softcap(20.0),
        hw.causal(),
        lengths=torch.full((2,), k.shape[2], dtype=torch.int32),
    )
    step(k[:, :, :20].clone(), k[:, :, :20].clone())
    before = len(call_cache._signatures)
    for n in range(21, 90):
        out = step(k[:, :, :n].clone(), k[:, :, :n].clone())
    assert len(call_cache._signatures) == before
    wanted = hw.attention(q, k[:, :, :89], k[:, :, :89], hw.softcap(20.0))
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-6)
    with pytest.raises(hw.errors.ArgumentError, match="differ before their width"):
        step(k[:, :, :50].clone(), k[:, :, :49].clone())


def test_a_compiled_step_is_one_graph():
    graphs = []
    cache = PagedCache(1, 40, 16, HK, D, rows=2)
    layer = cache[0]

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def step(q, k, v):
        layer.append(k, v)
        return inference.attention(q, *layer.kv, hw.alibi(HQ), hw.causal(), **layer.options)

    with torch.inference_mode(False), torch.no_grad():
        for _ in range(23):
            q, k, v = new(2, HQ, 1, D), new(2, HK, 1, D), new(2, HK, 1, D)
            cache.reserve([0, 1], 1)
            out = step(q, k, v)
            eager = inference.attention(q, *layer.kv, hw.alibi(HQ), hw.causal(), **layer.options)
            torch.testing.assert_close(out, eager, atol=1e-6, rtol=1e-6)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("kind", "form"), [("paged", "append"), ("fixed", "past"), ("growing", "past")]
)
def test_a_compiled_model_indexes_its_cache(kind, form):
    """`cache[n]` inside of a graph: one token, any number of them, and another capacity."""
    graphs = []
    with torch.inference_mode(False):
        modules = [Attention(HQ * D, HQ, HK, rotary=Rotary(D)).eval() for _ in range(2)]

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def append(cache, x):
        for n, module in enumerate(modules):
            q, k, v = module._project(x)
            cache[n].append(k, v)
            out = inference.attention(q, *cache[n].kv, mask=hw.causal(), **cache[n].options)
            x = x + out.transpose(1, 2).flatten(2)
        return x

    def past(cache, x):
        for n, module in enumerate(modules):
            x = x + module(x, hw.causal(), past=cache[n])
        return x

    def made():
        if kind == "paged":
            return PagedCache(2, 16, 4, HK, D, rows=2)
        capacity, most = (4, None) if kind == "growing" else (16, 16)
        return Cache(2, 2, HK, D, capacity=capacity, max_capacity=most)

    forward = {"append": append, "past": past}[form]
    compiled, cache, right = torch.compile(forward, backend=backend, fullgraph=True), made(), made()
    with torch.inference_mode(False), torch.no_grad():
        for tokens in (1, 3, 2):
            x = new(2, tokens, HQ * D)
            for c in (cache, right):
                c.reserve([0, 1], tokens)
            torch.testing.assert_close(compiled(cache, x), forward(right, x), atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(cache.keys, right.keys, atol=1e-6, rtol=1e-5)
    assert len(graphs) <= (3 if kind == "growing" else 2)


def test_a_compiled_step_keeps_count():
    """One graph for every layer and one for any number of tokens; what was not reserved is refused."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def append(layer, k):
        layer.append(k, k)
        return layer.options["lengths"] + 1

    cache = Cache(5, 2, HK, D, capacity=64, max_capacity=64)
    with torch.inference_mode(False), torch.no_grad():
        for tokens in (1, 1, 5, 3, 7, 2):
            cache.reserve(0, 1)
            cache.reserve([0, 1], tokens)
            k = new(2, HK, tokens + 1, D)
            for layer in cache:
                after = append(layer, k).tolist()
                assert after == [n + 1 for n in cache.row_lengths]
        assert len(graphs) <= 4, "one token or more, layer 0 or another"
        with pytest.raises(ArgumentError, match="nothing was reserved for layer 3"):
            append(cache[3], k)
        cache.reserve(0, 4)
        with pytest.raises(ArgumentError, match="4 tokens were reserved for row 0, got 3"):
            append(cache[3], k)
        whole = torch.compile(append, fullgraph=True, backend="eager")
        with pytest.raises(
            ArgumentError, match=r"\Aappend: 4 tokens were reserved for row 0, got 3"
        ):
            whole(cache[3], k)
        torch.testing.assert_close(cache.keys[:, 0, :, 22:25], k[:1].expand(5, -1, -1, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoding_step_of_causal_is_no_mask(dtype):
    q, k, v = (new(2, h, n, D).to(dtype) for h, n in ((HQ, 1), (HK, 300), (HK, 300)))
    assert torch.equal(hw.attention(q, k, v, mask=hw.causal(299)), hw.attention(q, k, v))
    stats = hw.attention_with_stats(q, k, v, mask=hw.causal(299))
    for x, y in zip(stats, hw.attention_with_stats(q, k, v), strict=True):
        assert torch.equal(x, y)


def test_heads_of_a_rank_are_global():
    """Tensor parallel: ALiBi sees the heads of the whole."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    q, k, v = new(2, HQ, 1, D), new(2, HK, 20, D), new(2, HK, 20, D)
    options = {"lengths": torch.tensor([20, 13], dtype=torch.int32)}
    scale = torch.rand(HK) + 0.5
    whole = inference.attention(
        q, k, v, hw.alibi(HQ), hw.causal(), k_scale=scale, v_scale=scale, **options
    )
    with torch.inference_mode(False), torch.no_grad():
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        try:
            mesh = DeviceMesh("cpu", [0, 1])
            shard = lambda x: DTensor.from_local(x.chunk(2, 1)[1].clone(), mesh, [Shard(1)])
            out = inference.attention(
                shard(q), shard(k), shard(v), hw.alibi(HQ), hw.causal(), k_scale=scale,
                v_scale=scale, **options,
            )  # fmt: skip
            mine = out.to_local()
        finally:
            dist.destroy_process_group()
    torch.testing.assert_close(mine, whole.chunk(2, 1)[1], atol=1e-6, rtol=1e-6)


def test_a_profiler_sees_a_call_as_a_range_and_its_operator():
    q, (k, v) = new(1, HQ, 1, D), new(2, 1, HK, 32, D)
    lengths = torch.tensor([20], dtype=torch.int32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        inference.attention(q, k, v, lengths=lengths)
    names = [event.name for event in seen.events()]
    assert names.count("headway::attention") == names.count("headway::infer") == 1
