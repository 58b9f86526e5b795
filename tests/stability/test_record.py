"""What is recorded, when, and that nothing else leaves a trace."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from torch import func, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import headway
from headway.errors import BackendRefused
from headway.nn import MLA, Attention, Rotary
from headway.stability import LogitError, MaxLogit, QKClip, logit_stats, reset_logit_stats

INF = math.inf


class Net(nn.Module):
    """Two layers; `recompute` says how activations are checkpointed."""

    def __init__(self, recompute: str = "no"):
        super().__init__()
        self.recompute = recompute
        self.layers = nn.ModuleList(
            [
                Attention(32, 4, 2, bias=True, rotary=Rotary(8)),
                MLA(32, 2, kv_lora_rank=8, nope_width=8, rope_width=4, value_width=6),
            ]
        )

    def forward(self, x):
        for layer in self.layers:
            if self.recompute == "no":
                x = x + layer(x, headway.causal())
            else:
                reentrant = self.recompute == "reentrant"
                x = x + checkpoint(layer, x, headway.causal(), use_reentrant=reentrant)
        return x


def logits_of(layer: Attention, x):
    q, k, _ = layer._project(x)
    angles = layer.rotary.angles(torch.arange(x.shape[1]))
    q, k = layer.rotary.rotate(q, angles), layer.rotary.rotate(k, angles)
    s = q @ k.repeat_interleave(layer.heads // layer.kv_heads, 1).mT * layer.scale
    return s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -INF).amax((0, 2, 3))


@pytest.mark.parametrize("recompute", ["no", "reentrant", "saved"])
def test_running_max_over_micro_batches_and_recompute(recompute):
    net = Net(recompute)
    batches = [3 * torch.randn(2, 11, 32, requires_grad=True) for _ in range(3)]
    for x in batches:
        net(x).square().sum().backward()
    expected = torch.stack([logits_of(net.layers[0], x) for x in batches]).amax(0)
    stats = logit_stats(net)
    assert list(stats) == ["layers.0", "layers.1"]
    torch.testing.assert_close(stats["layers.0"], expected)
    assert [len(s) for s in stats.values()] == [4, 2]
    reset_logit_stats(net)
    assert all(layer.max_logit.empty for layer in net.layers)
    assert all((s == -INF).all() for s in logit_stats(net).values())


def test_evaluation_leaves_no_trace():
    net = Net()
    net(torch.randn(2, 5, 32))
    before = {name: s.clone() for name, s in logit_stats(net).items()}
    large = 100 * torch.randn(2, 5, 32)
    with torch.no_grad():
        net(large)
    with torch.inference_mode():
        net(large)
    net.eval()
    net(large)
    assert all(torch.equal(before[name], s) for name, s in logit_stats(net).items())


def test_signed_scaled_before_the_score_and_without_sinks():
    layer = Attention(16, 2, bias=True, sink=True)
    x = torch.randn(2, 7, 16)
    layer(x)
    plain = layer.max_logit.value.clone()
    layer.max_logit.reset()
    nn.init.constant_(layer.sink, 1e3)
    layer(x, None, headway.softcap(0.01) >> headway.alibi(2))
    torch.testing.assert_close(layer.max_logit.value, plain)
    q = layer.q_proj
    with torch.no_grad():  # q = -k: every logit on the diagonal is negative
        q.weight.copy_(-layer.k_proj.weight)
        q.bias.copy_(-layer.k_proj.bias)
    layer.max_logit.reset()
    layer(x, lambda b, h, i, j: i == j)
    assert (layer.max_logit.value < 0).all()
    layer.max_logit.reset()
    layer(x, lambda b, h, i, j: (h == 0) & (i < 0))
    assert not layer.max_logit.empty
    assert (layer.max_logit.value == -INF).all()


def test_backends_agree():
    x = torch.randn(2, 40, 32)
    found = {}
    for backend in headway.backends.NAMES:
        torch.manual_seed(0)
        layer = Attention(32, 4, 2, backend=backend)
        try:
            layer(x, headway.causal() & headway.sliding_window(9))
        except BackendRefused:
            continue
        found[backend] = layer.max_logit.value
    assert {"cpu", "reference"} <= found.keys()
    for value in found.values():
        torch.testing.assert_close(value, found["reference"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mask", ["causal", "window by head", "none"])
@pytest.mark.parametrize("bad", [0.0, math.nan, INF])
def test_maxima_beside_the_flash_kernels(mask, bad):
    """They come from a product of their own there: the same numbers, and as deaf to masked keys."""
    q, k, v = torch.randn(2, 4, 300, 16), torch.randn(2, 2, 300, 16), torch.randn(2, 2, 300, 16)
    k[1, :, 280] += bad  # kept by a few rows at most, and in the second sample only
    masks = {
        "causal": headway.causal(),
        "window by head": lambda b, h, i, j: (j <= i) & (i - j < 20 * h + 1) & (j != 280),
        "none": None,
    }
    found = [
        headway.attention_with_stats(q, k, v, mask=masks[mask], backend=backend).max_logit
        for backend in ("cpu", "reference")
    ]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found[0][0].isfinite().all()
    assert found[0][1].isfinite().all() == (mask == "window by head" or not bad)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([[[1.0, -2.0]], [[0.5, -1.0]]], [1.0, -1.0]),
        ([[[math.nan, 1.0]], [[5.0, 2.0]]], [INF, 2.0]),
        ([[[5.0, 2.0]], [[math.nan, 1.0]]], [INF, 2.0]),
        ([[[-INF, 1.0], [-INF, 0.0]]], [-INF, 1.0]),
        ([[[INF, 1.0]], [[0.0, 3.0]]], [INF, 3.0]),
    ],
)
def test_nan_becomes_infinite_and_is_never_lost(calls, expected):
    record = MaxLogit(2)
    for call in calls:
        record(torch.tensor(call))
    assert record.value.tolist() == expected


def test_an_empty_batch_keeps_nothing():
    record = MaxLogit(2)
    record(torch.empty(0, 2))
    assert record.value.tolist() == [-INF, -INF]
    record(torch.tensor([[1.0, 2.0]]))
    assert record.value.tolist() == [1.0, 2.0]


def test_the_record_is_no_buffer_and_keeps_its_precision():
    layer = Attention(16, 2)
    layer(torch.randn(2, 7, 16))
    value = layer.max_logit.value.clone()
    assert not [name for name, _ in layer.named_buffers()]  # DDP would overwrite it with rank 0's
    assert not [name for name in layer.state_dict() if "max_logit" in name]
    for module in (layer.bfloat16(), copy.deepcopy(layer)):
        assert module.max_logit.value.dtype == torch.float32
        assert torch.equal(module.max_logit.value, value)
        assert not module.max_logit.empty
    assert not layer.max_logit.value.requires_grad


@pytest.mark.parametrize("through", ["deepcopy", "pickle"])
def test_copies_know_whether_they_hold_a_record(through):
    copied = copy.deepcopy if through == "deepcopy" else lambda x: pickle.loads(pickle.dumps(x))
    net = Attention(16, 2)
    x = torch.randn(2, 7, 16)
    assert copied(net).max_logit.empty
    net(x)  # the first record
    largest = logit_stats(net)
    found = QKClip(copied(net), tau=0.01).step().max_logit
    assert list(found) == list(largest)
    assert all(torch.equal(found[name], largest[name]) for name in largest)
    QKClip(net, tau=0.01).step()
    with pytest.raises(LogitError, match="no logits were recorded"):
        QKClip(copied(net), tau=0.01).step()
    assert copy.copy(net.max_logit).empty
    net(x)
    assert not copied(copied(net)).max_logit.empty
    assert not copy.copy(net.max_logit).empty


def test_a_copied_clip_scales_the_weights_of_its_own_model():
    net = Attention(16, 2)
    clip = QKClip(net, tau=0.01)
    x = torch.randn(2, 7, 16)
    net(x)
    clip.step()
    other, own = copy.deepcopy((net, clip))
    before = net.q_proj.weight.clone()
    other(3 * x)
    assert own.step().count > 0
    assert torch.equal(net.q_proj.weight, before)
    assert not torch.equal(other.q_proj.weight, before)


def _summed(net, parameters, x):
    return functional_call(net, parameters, (x,)).square().sum()


TRANSFORMED = {
    "grad": lambda net, p, x: func.grad(partial(_summed, net))(p, x.flatten(0, 1)),
    "vjp": lambda net, p, x: func.vjp(net, x.flatten(0, 1))[1],
    "jacrev": lambda net, p, x: func.jacrev(lambda y: net(y).sum((0, 2)))(x.flatten(0, 1)),
    "vmap": lambda net, p, x: func.vmap(net)(x),
    "vmap, last": lambda net, p, x: func.vmap(net, in_dims=3)(x.movedim(0, 3)),
    "vmap of vmap": lambda net, p, x: func.vmap(func.vmap(lambda y: net(y[None])), 1)(x),
    "each sample": lambda net, p, x: func.vmap(
        func.grad(partial(_summed, net)), (None, 0)
    )(p, x),
    "grad of vmap": lambda net, p, x: func.grad(
        lambda p: func.vmap(partial(_summed, net), (None, 0))(p, x).sum()
    )(p),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMED)
def test_records_beneath_the_transforms_of_torch_func(name):
    net = Net()
    x = torch.randn(3, 2, 7, 32)
    net(x.flatten(0, 1))
    expected = {n: s.clone() for n, s in logit_stats(net).items()}
    reset_logit_stats(net)
    TRANSFORMED[name](net, dict(net.named_parameters()), x)
    for n, s in logit_stats(net).items():
        torch.testing.assert_close(s, expected[n])
    assert QKClip(net, tau=0.01).step().count > 0


def test_compiled_vmap_runs_as_it_is():
    layer, x = Attention(16, 2), torch.randn(3, 2, 7, 16)
    layer(x.flatten(0, 1))
    expected = layer.max_logit.value.clone()
    layer.max_logit.reset()
    torch.compile(func.vmap(layer), backend="eager")(x)
    torch.testing.assert_close(layer.max_logit.value, expected)


def test_gradients_in_training_mode_are_those_of_backward():
    net = Net()
    x = torch.randn(2, 7, 32)
    net(x).square().sum().backward()
    found = func.grad(partial(_summed, net))(dict(net.named_parameters()), x)
    for n, p in net.named_parameters():
        torch.testing.assert_close(found[n], p.grad)


def test_an_ensemble_on_the_meta_device_records_all_its_members():
    nets = [Net() for _ in range(3)]
    x = torch.randn(3, 2, 7, 32)
    parameters, buffers = func.stack_module_state(nets)
    base = copy.deepcopy(nets[0]).to("meta")
    func.vmap(lambda p, b, x: functional_call(base, (p, b), (x,)))(parameters, buffers, x)
    stats = [(net(y), logit_stats(net))[1] for net, y in zip(nets, x, strict=True)]
    for n, s in logit_stats(base).items():
        torch.testing.assert_close(s, torch.stack([of[n] for of in stats]).amax(0))


@pytest.mark.parametrize("recompute", ["no", "saved"])
def test_compiles_without_break_or_recompilation(recompute):
    torch._dynamo.reset()
    net = Net(recompute)
    clip = QKClip(net, tau=0.5)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    step = torch.compile(lambda x: net(x).square().sum(), fullgraph=True, backend=count)
    after = []
    for _ in range(4):
        x = torch.randn(2, 11, 32)
        expected = copy.deepcopy(net)
        expected(x)
        step(x).backward()
        for name, s in logit_stats(net).items():
            torch.testing.assert_close(s, logit_stats(expected)[name])
        optimizer.step()
        optimizer.zero_grad()
        assert clip.step().count > 0
        after.append(len(compiled))
    assert after[0] >= 1
    assert after[-1] == after[1]
