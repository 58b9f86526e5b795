"""`monitor`, against the dense definition: what it sees of any model, and that it changes nothing."""

import copy
import importlib
import math
import pickle
import threading
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as checkpoints
from torch.utils.flop_counter import FlopCounterMode

import headway as hw
from attention.test_row_statistics import dense
from headway import run
from headway.compat import torch_sdpa
from headway.compat.flash import flash_attn_varlen_func
from headway.errors import ArgumentError
from headway.inference import attention as attend_cache
from headway.nn import MLA, Attention, Rotary
from headway.stability import monitor

WIDTH = 16
LOOK = {"rtol": 1e-4, "atol": 1e-5}


def dense_stats(calls: list[tuple]) -> list[torch.Tensor]:
    """Return largest logits, mean entropies and mean sink masses of some calls of one layer."""
    largest, sums, rows = -math.inf, [0.0, 0.0], [0, 0]
    for q, k, score, mask, scale, sink in calls:
        q, k = (
            q.detach().double() * (q.shape[-1] ** 0.5 * scale if scale else 1),
            k.detach().double(),
        )
        positions = torch.meshgrid(*map(torch.arange, (*q.shape[:3], k.shape[2])), indexing="ij")
        kept = torch.ones_like(positions[0]).bool() if mask is None else mask(*positions)
        s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[-1] ** 0.5
        t = s if score is None else score(s, *positions)
        kept = kept & (t != -math.inf)
        largest = torch.maximum(
            torch.as_tensor(largest), s.masked_fill(~kept, -math.inf).amax((0, 2, 3))
        )
        right = dense(q, k, score, mask, None if sink is None else sink.detach().double())
        seen = kept.any(-1) if sink is None else torch.ones_like(kept[..., 0])
        sums = [
            x + right[n].sum((0, 2)) for x, n in zip(sums, ("entropy", "sink_mass"), strict=True)
        ]
        first = kept[..., 0] if sink is None and kept.numel() else seen
        rows = [n + x.sum((0, 2)) for n, x in zip(rows, (seen, first), strict=True)]
    return [largest, *(x / n for x, n in zip(sums, rows, strict=True))]


def assert_reports(report, calls: dict[str, list[tuple]]) -> None:
    assert list(report) == list(calls)
    for name, of_layer in calls.items():
        for made, right in zip(report[name], dense_stats(of_layer), strict=True):
            assert made.dtype == torch.float32
            torch.testing.assert_close(made, right.float(), **LOOK, equal_nan=True)


class Own(nn.Module):
    """An attention of one's own: any call, whose arguments it keeps."""

    def __init__(self, call, heads=4, kv_heads=2, score=None, mask=None, sink=False):
        super().__init__()
        self.call, self.heads, self.kv_heads = call, heads, kv_heads
        self.score, self.mask, self.calls = score, mask, []
        self.project = nn.Linear(WIDTH, (heads + 2 * kv_heads) * 8)
        self.out = nn.Linear(heads * 8, WIDTH)
        self.sink = nn.Parameter(torch.randn(heads)) if sink else None

    def forward(self, x):
        qkv = 2 * self.project(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        self.calls.append((q, k, self.score, self.mask, None, self.sink))
        out = self.call(self, q, k, v)
        return x + self.out(out.transpose(1, 2).flatten(2))


def plain(self, q, k, v):
    return hw.attention(q, k, v, self.score, self.mask, sink=self.sink)


def with_stats(self, q, k, v):
    hw.expect(q, k, lambda b, h, i, j, s: i - j, self.score, self.mask)
    return hw.attention_with_stats(
        q, k, v, self.score, self.mask, sink=self.sink, entropy=True, sink_mass=True
    ).out


def dropped(self, q, k, v):
    return hw.attention(q, k, v, self.score, self.mask, sink=self.sink, dropout=0.2)


def block_mask(self, q, k, v):
    mask = hw.block_mask(self.mask, None, None, q.shape[2], k.shape[2])
    return hw.attention(q, k, v, self.score, mask, sink=self.sink)


def sdpa(self, q, k, v):
    return torch_sdpa.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def jvp(self, q, k, v):
    return hw.attention_jvp(q, k, v, self.score, self.mask, tangents={"q": torch.ones_like(q)})[0]


def even(b, h, i, j):
    return (i - j) % 2 == 0


def rarely(b, h, i, j):
    """Queries 3 and 4 see nothing, head 1 nothing at all."""
    return (j <= i) & (i != 3) & (i != 4) & (h != 1)


def curved(s, b, h, i, j):
    return torch.tanh(s) - 0.3 * h * torch.abs(i - j)


def packed(self, q, k, v, attend=hw.varlen_attention):
    """Two sequences in a row, each from its own start on: the calls are two."""
    (b, _, length, _), call = q.shape, self.calls.pop()
    cut = length // 2
    for n in range(b):
        for start, end in ((0, cut), (cut, length)):
            qk = (x[n : n + 1, :, start:end] for x in call[:2])
            self.calls.append((*qk, *call[2:]))
    offsets = torch.tensor([n * length + x for n in range(b) for x in (0, cut)] + [b * length])
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = attend(*rows, self.score, self.mask, cu_q=offsets.int(), max_q=length)
    return out.unflatten(0, (b, length)).transpose(1, 2)


def flash_packed(self, q, k, v):
    def attend(q, k, v, score, mask, cu_q, max_q):
        return flash_attn_varlen_func(q, k, v, cu_q, cu_q, max_q, max_q, causal=True)

    return packed(self, q, k, v, attend)


def near(b, h, i, j):
    return (i - j).abs() < 2


MODELS = {
    "causal": lambda: Own(plain, mask=hw.causal()),
    "no mask": lambda: Own(plain, kv_heads=4),
    "score": lambda: Own(plain, score=curved, mask=even),
    "queries that see nothing": lambda: Own(plain, mask=rarely),
    "sink": lambda: Own(plain, mask=rarely, sink=True),
    "statistics of its own": lambda: Own(with_stats, score=curved, mask=hw.causal()),
    "dropout": lambda: Own(dropped, mask=hw.causal()),
    "window": lambda: Own(plain, mask=near),
    "packed": lambda: Own(packed, score=lambda s, b, h, i, j: s + j, mask=near),
    "flash-attn's packed": lambda: Own(flash_packed, mask=hw.causal()),
    "block mask": lambda: Own(block_mask, mask=hw.causal()),
    "sdpa": lambda: Own(sdpa),
    "forward mode": lambda: Own(jvp, mask=hw.causal()),
}


@pytest.mark.parametrize("name", MODELS)
def test_any_call_is_seen_as_defined_and_unchanged(name):
    net = nn.Sequential(MODELS[name](), nn.GELU(), MODELS[name]())
    batches = [torch.randn(2, 7, WIDTH), torch.randn(3, 5, WIDTH)]

    def steps() -> list[torch.Tensor]:
        torch.manual_seed(0)
        net.zero_grad()
        out = [net(x) for x in batches]
        sum(x.square().sum() for x in out).backward()
        return [*out, *(p.grad.clone() for p in net.parameters()), torch.get_rng_state()]

    right = steps()
    for layer in net[0], net[2]:
        layer.calls.clear()
    with monitor(net) as watch:
        made = steps()
    assert all(map(torch.equal, made, right))
    assert_reports(watch.report(), {"0": net[0].calls, "2": net[2].calls})
    assert not run.watchers


class Records:
    def trained(self, q, k, v, mask, score, start=0, layout=None):
        by_query, options = self._scaled(q)
        self.calls.append((by_query, k, score, mask, options["scale"], options["sink"]))
        return super().trained(q, k, v, mask, score, start, layout)


class Recorded(Records, Attention):
    pass


class RecordedMLA(Records, MLA):
    pass


def layers() -> nn.ModuleList:
    made = nn.ModuleList([
        Recorded(WIDTH, 4, 2, rotary=Rotary(4), sink=True),
        RecordedMLA(WIDTH, 2, kv_lora_rank=8, nope_width=8, rope_width=4, value_width=6),
        Recorded(WIDTH, 2, scaling="query"),
    ])  # fmt: skip
    for layer in made:
        layer.calls = []
    return made


class Net(nn.Module):
    """Modules of the library; `recompute` says how their activations are checkpointed."""

    def __init__(self, recompute: str = "no"):
        super().__init__()
        self.recompute, self.layers = recompute, layers()

    def forward(self, x):
        for layer in self.layers:
            call = partial(layer, mask=hw.causal())
            if self.recompute == "no":
                x = x + call(x)
            elif self.recompute == "selective":
                contexts = partial(checkpoints.create_selective_checkpoint_contexts, hw.save_ops())
                x = x + checkpoints.checkpoint(call, x, use_reentrant=False, context_fn=contexts)
            else:
                reentrant = self.recompute == "reentrant"
                x = x + checkpoints.checkpoint(call, x, use_reentrant=reentrant)
        return x


@pytest.mark.parametrize("recompute", ["no", "reentrant", "saved", "selective"])
def test_recomputed_forwards_count_once_and_stay_the_same(recompute):
    net = Net(recompute)
    batches = torch.randn(3, 2, 9, WIDTH, requires_grad=True)

    def gradients() -> list[torch.Tensor]:
        net.zero_grad()
        for x in batches:  # micro-batches
            net(x).square().sum().backward()
        return [p.grad.clone() for p in net.parameters()]

    right = gradients()
    with monitor(net, every=2) as watch:
        for layer in net.layers:
            layer.calls.clear()
        made = gradients()
    assert all(map(torch.equal, made, right))
    per_batch = 1 if recompute == "no" else 2  # forward and recomputed
    calls = {f"layers.{n}": layer.calls[::per_batch] for n, layer in enumerate(net.layers)}
    assert_reports(watch.report(), {name: [of[0], of[2]] for name, of in calls.items()})


def test_a_backward_in_a_forward_does_not_count_twice():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Own(plain, mask=hw.causal())

        def forward(self, x):
            y = checkpoints.checkpoint(self.inner, x, use_reentrant=False)
            return y + torch.autograd.grad(y.sum(), x, retain_graph=True)[0]

    net = Outer()
    with monitor(net) as watch:
        net(torch.randn(2, 5, WIDTH, requires_grad=True))
    assert_reports(watch.report(), {"inner": net.inner.calls[:1]})


def test_every_mode_reset_and_remove():
    net = Own(plain, mask=hw.causal())
    batches = torch.randn(7, 2, 5, WIDTH)
    watch, training = monitor(net, every=3), monitor(net, training=True)
    for n, x in enumerate(batches):
        net.train(n % 2 == 0)
        with torch.set_grad_enabled(n % 2 == 0):
            net(x)
    calls = list(net.calls)
    assert_reports(watch.report(), {"Own": calls[::3]})
    assert_reports(training.report(), {"Own": calls[::2]})
    watch.reset()
    with pytest.raises(ArgumentError, match=r"in 7 forwards of Own \(every=3\)"):
        watch.report()
    training.remove()
    training.remove()
    for x in batches[:3]:  # the eighth to tenth forward
        net(x)
    assert_reports(watch.report(), {"Own": net.calls[-1:]})
    assert_reports(training.report(), {"Own": calls[::2]})
    watch.remove()
    assert not net._forward_hooks
    assert not net._forward_pre_hooks


def test_inference_mode_autocast_and_counted_operators():
    net = Own(plain, mask=hw.causal())
    x = torch.randn(2, 6, WIDTH)
    watch = monitor(net)
    with torch.inference_mode():
        net(x)
    with FlopCounterMode(display=False) as measured:
        net(x)
    assert_reports(watch.report(), {"Own": net.calls})
    watch.reset()
    with torch.autocast("cpu", torch.bfloat16):
        half = net(x)
    assert_reports(watch.report(), {"Own": net.calls[-1:]})
    watch.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net(x), half)
    with FlopCounterMode(display=False) as alone:
        net(x)
    assert measured.get_total_flops() == alone.get_total_flops()


def test_no_rows_and_bad_numbers():
    net = Own(plain, mask=hw.causal())
    with monitor(net) as watch:
        net(torch.randn(0, 5, WIDTH))
        net(torch.randn(2, 0, WIDTH))
        of_none = watch.report()["Own"]
        assert of_none.max_logit.tolist() == [-math.inf] * 4
        assert of_none.entropy.isnan().all()
        net(torch.randn(2, 5, WIDTH))
        assert_reports(watch.report(), {"Own": net.calls[-1:]})
        net(torch.full((2, 5, WIDTH), math.nan))
    bad = watch.report()["Own"]
    assert bad.max_logit.tolist() == [math.inf] * 4
    assert bad.entropy.isnan().all()


class Places(nn.Module):
    """Modules that are called from several places, and calls of no module of their own."""

    def __init__(self):
        super().__init__()
        self.first = Own(plain, mask=hw.causal())
        self.blocks = nn.ModuleList([nn.Sequential(self.first), Own(plain, heads=2, kv_heads=1)])
        self.calls = []

    def forward(self, x, times=2):
        for _ in range(times):
            x = self.blocks[0](x)
        x = self.blocks[1](x)
        self.blocks[1].heads, self.blocks[1].kv_heads = 2, 1
        q = x[:, None].expand(-1, 3, -1, -1)
        for heads in (3, 2):
            self.calls.append((q[:, :heads], q[:, :heads], None, None, None, None))
            hw.attention(q[:, :heads], q[:, :heads], q[:, :heads])
        if times > 1:
            self(x, times - 1)  # a part of this forward
        return x


def test_modules_at_several_places_and_calls_of_the_model_itself():
    net = Places()
    with monitor(net, every=2) as watch:
        for _ in range(3):
            net(torch.randn(2, 4, WIDTH))
    first, other = net.first.calls, net.blocks[1].calls
    assert len(first) == 9
    assert_reports(watch.report(), {
        "first": first[:3] + first[6:], "blocks.1": other[:2] + other[4:],
        "Places": [c for n, c in enumerate(net.calls) if n % 2 == 0 and n // 4 != 1],
        "Places (2 heads)": [c for n, c in enumerate(net.calls) if n % 2 and n // 4 != 1],
    })  # fmt: skip


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.error = Own(plain, mask=hw.causal()), None

    def forward(self, x):
        x = self.inner(x)
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=type)
def test_errors_in_a_forward(error):
    net, other = Fails(), Own(plain, mask=hw.causal())
    x = torch.randn(2, 4, WIDTH)
    compiled = torch.compile(lambda y: y + torch.compiler.is_compiling(), backend="eager")
    watch = monitor(net, every=2)
    net.error = error
    with pytest.raises(type(error)):
        net(x)
    other(x)  # no part of the model
    net.error = None
    net(x)
    assert not run.watchers
    assert compiled(torch.zeros(())) == 1  # the compiler is as it was
    net(x)
    assert_reports(watch.report(), {"inner": [net.inner.calls[0], net.inner.calls[2]]})
    net.error = error
    for _ in range(2):
        with pytest.raises(type(error)):
            net(x)
    watch.remove()
    assert not run.watchers
    assert compiled(torch.ones(())) == 2


def test_threads_and_monitors_do_not_mix():
    nets = [Net() for _ in range(2)]
    data = torch.randn(2, 6, 2, 5, WIDTH)
    watches = [monitor(net) for net in nets]
    inner = monitor(nets[0].layers[1])
    together = threading.Barrier(2)

    def forwards(net, batches):
        together.wait()
        for x in batches:
            net(x)

    threads = [threading.Thread(target=forwards, args=p) for p in zip(nets, data, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for net, watch in zip(nets, watches, strict=True):
        assert_reports(
            watch.report(), {f"layers.{n}": layer.calls for n, layer in enumerate(net.layers)}
        )
    assert_reports(inner.report(), {"RecordedMLA": nets[0].layers[1].calls})
    net, watch = nets[0], watches[0]
    watch.reset()
    for layer in net.layers:
        layer.calls.clear()
    both = [threading.Thread(target=forwards, args=(net, batches)) for batches in data]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert not run.watchers
    assert_reports(
        watch.report(), {f"layers.{n}": layer.calls for n, layer in enumerate(net.layers)}
    )


@pytest.mark.parametrize("through", ["deepcopy", "pickle", "copy"])
def test_copies_watch_nothing(through):
    copied = {
        "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x)),
        "copy": lambda pair: tuple(map(copy.copy, pair)),
    }[through]  # fmt: skip
    net = nn.Sequential(Attention(WIDTH, 2))
    watch = monitor(net)
    x = torch.randn(2, 5, WIDTH)
    net(x)
    right = watch.report()["0"]
    other, of_other = copied((net, watch))
    if through != "copy":  # which shares the hooks
        other(3 * x)
    if through == "deepcopy":
        torch.compile(lambda y: other(y), backend="eager", fullgraph=True)(x)
    for each in (watch, of_other):
        assert all(map(torch.equal, each.report()["0"], right))
    of_other.reset()
    of_other.remove()
    net(3 * x)
    assert not torch.equal(watch.report()["0"].max_logit, right.max_logit)


class Compilable(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Attention(WIDTH, 2) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x, hw.causal())
        return x


def compiled_whole(net, **options):
    return torch.compile(net, **options), None


def compiled_blocks(net, **options):
    net.blocks[0].compile(**options)
    net.blocks[1] = torch.compile(net.blocks[1], **options)
    return net, None


def compiled_inner(net, **options):
    return net, torch.compile(net, **options)


def compiled_in_place(net, **options):
    net.compile(**options)
    return net, net


def compiled_step(net, **options):
    return net, torch.compile(lambda x: net(x).square(), **options)


@pytest.mark.parametrize(("how", "fullgraph"), [(compiled_whole, False), (compiled_blocks, True)])
def test_compiled_models_are_measured_uncompiled(how, fullgraph):
    torch._dynamo.reset()
    net = Compilable()
    batches = torch.randn(4, 2, 7, WIDTH)
    with monitor(net) as watch:
        for x in (batches[0], batches[2]):
            net(x)
    graphs = []
    backend = lambda graph, _: (graphs.append(1), graph.forward)[1]
    model, _ = how(net, backend=backend, fullgraph=fullgraph)
    counted = []
    with monitor(model, every=2) as compiled:
        for x in batches:
            model(x)
            counted.append(len(graphs))
    assert counted[0] == 0
    assert counted[1] > 0
    assert counted[3] == counted[1]
    assert list(compiled.report()) == ["blocks.0", "blocks.1"]
    for name, right in watch.report().items():
        for made, x in zip(compiled.report()[name], right, strict=True):
            torch.testing.assert_close(made, x)


def test_an_export_of_a_watched_model_is_refused():
    net, x = nn.Sequential(Attention(WIDTH, 2)).eval(), torch.randn(2, 5, WIDTH)
    with monitor(net) as watch:
        with pytest.raises(ArgumentError, match=r"remove\(\) it to export"):
            torch.export.export(net, (x,))
        net(x)
        assert list(watch.report()) == ["0"]
    torch.export.export(net, (x,))


@pytest.mark.parametrize(
    ("how", "fullgraph"),
    [(compiled_inner, False), (compiled_in_place, True), (compiled_step, False),
     (compiled_step, True)],
)  # fmt: skip
def test_a_model_inside_of_what_is_compiled_is_refused(how, fullgraph):
    torch._dynamo.reset()
    model, call = how(Compilable(), backend="eager", fullgraph=fullgraph)
    watch, x = monitor(model, every=100), torch.randn(2, 7, WIDTH)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"open the monitor on what torch\.compile re"):
            call(x)
    watch.remove()
    call(x)
    assert not run.watchers


class Unmeasured(nn.Module):
    def forward(self, x, how):
        q = x[:, None]
        if how == "cache":
            lengths = torch.full((len(x),), x.shape[1], dtype=torch.int32)
            return attend_cache(q, q, q, lengths=lengths)
        if how == "vmap":
            return torch.vmap(hw.attention)(q[None], q[None], q[None])
        if how == "dual":
            with torch.autograd.forward_ad.dual_level():
                return hw.attention(q, q, q)
        if how == "meta":
            return hw.attention(*[q.to("meta")] * 3)
        return hw.attention(q, q, q)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("cache", "over a KV cache"), ("vmap", "transform of torch.func"),
        ("dual", "forward mode"), ("meta", "on the meta device"),
    ],
)  # fmt: skip
def test_calls_that_are_not_measured_say_so_once(how, why):
    net = nn.Sequential()
    net.add_module("part", Unmeasured())
    x = torch.randn(2, 5, WIDTH)
    net.forward = lambda x: net.part(x, how)
    with monitor(net) as watch:
        with pytest.warns(UserWarning, match=rf"monitor: calls of part are not measured: .*{why}"):
            net(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net(x)
        with pytest.raises(ArgumentError, match=rf"(?s)could not be measured:.*part: .*{why}"):
            watch.report()


def test_a_past_is_not_measured():
    from headway.nn import Past

    layer, x = Attention(WIDTH, 2), torch.randn(2, 4, WIDTH)
    past = Past()
    with monitor(layer) as watch:
        layer(x, hw.causal(), past=past)
        with pytest.warns(UserWarning, match="Attention are not measured: .*after a past"):
            layer(x, hw.causal(), past=past)
        assert list(watch.report()) == ["Attention"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((hw.attention,), r"model must be a torch.nn.Module, got function"),
        ((nn.Identity(), 0), "every=0 must be an integer, 1 or more"),
        ((nn.Identity(), 1.5), "every=1.5 must be an integer"),
        ((nn.Identity(), 1, "yes"), "training='yes' must be True or False"),
    ],
)
def test_refused(arguments, message):
    options = dict(zip(("every", "training"), arguments[1:], strict=False))
    with pytest.raises(ArgumentError, match=message):
        monitor(arguments[0], **options)


def test_a_model_without_attention_has_no_report():
    watch = monitor(nn.Identity(), training=True)
    with pytest.raises(ArgumentError, match=r"in 0 forwards in train\(\) of Identity"):
        watch.report()


def test_a_model_of_hugging_face():
    hf = pytest.importorskip("transformers")
    importlib.import_module("headway.integrations.transformers").register()
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model, ids = hf.LlamaForCausalLM(config), torch.randint(1, 64, (2, 9))
    model.set_attn_implementation("eager")
    weights = model(ids, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation("headway")
    watch = monitor(model, training=True)
    model.train()(ids, labels=ids).loss.backward()
    report = watch.report()
    assert list(report) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for head, p in zip(report.values(), weights, strict=True):
        assert head.max_logit.isfinite().all()
        entropy = -torch.where(p == 0, 0.0, p * p.log()).sum(-1)
        torch.testing.assert_close(head.entropy, entropy.mean((0, 2)), **LOOK)
        torch.testing.assert_close(head.sink_mass, p[..., 0].mean((0, 2)), **LOOK)
    model.eval().generate(ids, max_new_tokens=3, do_sample=False)
    assert all(map(torch.equal, watch.report()["model.layers.1.self_attn"], head))
    with monitor(model) as watch, pytest.warns(UserWarning, match="over a KV cache") as warned:
        model.generate(ids, max_new_tokens=3, do_sample=False)
    assert len(warned) == 2  # one for each layer
    with pytest.raises(ArgumentError, match=r"layers\.1\.self_attn: they are over a KV cache"):
        watch.report()
