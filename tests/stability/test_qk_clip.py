"""QK-Clip: the published cases, the algebra, and every way in which others' go wrong."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils._python_dispatch import TorchDispatchMode

import headway
from headway.errors import ArgumentError
from headway.nn import MLA, Attention, Rotary
from headway.stability import Block, Layout, LogitError, Projection, QKClip, logit_stats

INF, NAN = math.inf, math.nan


def mla(heads, rank=2, **options):
    """The shapes of MaxText's unit tests: nope 4, rope 2, v 2."""
    return MLA(
        8, heads, q_lora_rank=rank, kv_lora_rank=2, nope_width=4, rope_width=2, value_width=2,
        **options,
    )  # fmt: skip


def clip(module, max_logits, **options):
    """Clip once, as if these logits `(batch, heads)` had been seen; returns what was before."""
    clipper = QKClip(module, **options)
    module.max_logit(torch.tensor(max_logits))
    before = copy.deepcopy(module.state_dict())
    return before, clipper.step(), clipper


def ratios(before, module, name, width):
    """By what each head's rows were multiplied: `(heads, width)`."""
    ratio = dict(module.named_parameters())[name].detach() / before[name]
    ratio = ratio.reshape(-1, width, *ratio.shape[1:])
    return ratio.flatten(2).mean(-1) if ratio.dim() > 2 else ratio


def near(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected).expand_as(actual), rtol=1e-6, atol=0)


# -- MaxText's cases -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tau", "logits", "gamma"),
    [
        (10.0, [[20.0, 5.0]], [0.5, 1.0]),
        (10.0, [[40.0, 9.9, 1.0]], [0.25, 1.0, 1.0]),
        (100.0, [[50.0]], [1.0]),
        (10.0, [[100.0]], [0.1]),
        (10.0, [[100.0, 1.0]], [0.1, 1.0]),
        (10.0, [[3.0, 5.0], [20.0, 1.0]], [0.5, 1.0]),
    ],
)
@pytest.mark.parametrize("rank", [2, None])
def test_mla_cases(tau, logits, gamma, rank):
    module = mla(len(gamma), rank)
    before, clipped, _ = clip(module, logits, tau=tau)
    torch.testing.assert_close(clipped.gamma["MLA"], torch.tensor(gamma))
    assert clipped.count == sum(g < 1 for g in gamma)
    q = ratios(before, module, "q_proj.weight" if rank is None else "q_b_proj.weight", 6)
    kv = ratios(before, module, "kv_b_proj.weight", 6)
    for h, g in enumerate(gamma):
        near(q[h, :4], g**0.5)
        near(q[h, 4:], g)
        near(kv[h, :4], g**0.5)
        near(kv[h, 4:], 1.0)
    names = "kv_a_proj_with_mqa.weight kv_a_layernorm.weight o_proj.weight".split()
    for name in names + ["q_a_proj.weight"] * (rank is not None):
        assert torch.equal(before[name], dict(module.named_parameters())[name]), name
    for h, g in enumerate(gamma):  # not clipped: not a bit of it
        if g == 1:
            rows = slice(6 * h, 6 * h + 6)
            now = module.kv_b_proj.weight[rows]
            assert torch.equal(before["kv_b_proj.weight"][rows], now)


def test_the_statistic_is_that_of_a_known_product():
    layer = Attention(4, 1, scale=1.0)
    q = torch.tensor([[10.0, 0, 0, 0], [0, 10, 0, 0]])
    k = torch.tensor([[1.0, 0, 0, 0]] * 2)
    max_logit = headway.attention_with_stats(q[None, None], k[None, None], k[None, None], scale=1.0)
    layer.max_logit(max_logit.max_logit)
    assert logit_stats(layer) == {"Attention": torch.tensor([10.0])}


# -- Megatron-LM's cases ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "eta"),
    [
        ([[150.0, 160.0, 170.0, 180.0]], [0.66667, 0.625, 0.588235, 0.555556]),
        ([[80.0, 150.0, 90.0, 200.0]], [1.0, 0.66667, 1.0, 0.5]),
    ],
)
@pytest.mark.parametrize("alpha", [0.5, 0.2, 1.0])
@pytest.mark.parametrize("fused", [False, True])
def test_mha(logits, eta, alpha, fused):
    module = Attention(12, 4, bias=True, fused=fused)
    before, _, _ = clip(module, logits, alpha=alpha)
    eta = torch.tensor(eta)[:, None].expand(4, 3)
    for kind in ("weight", "bias"):
        if fused:
            q, k, v = ratios(before, module, f"qkv_proj.{kind}", 3).split([4, 4, 4])
        else:
            q, k, v = (ratios(before, module, f"{n}_proj.{kind}", 3) for n in "qkv")
        torch.testing.assert_close(q, eta**alpha, rtol=1e-5, atol=0)
        torch.testing.assert_close(k, eta ** (1 - alpha), rtol=1e-5, atol=0)
        near(v, 1.0)


GROUPED = [[150.0, 160.0, 170.0, 180.0, 190.0, 200.0, 210.0, 220.0]]
QUIET = [[150.0, 10.0, 20.0, 30.0, 40.0, 200.0, 210.0, -5.0]]


@pytest.mark.parametrize("rule", ["query", "group", "balanced"])
@pytest.mark.parametrize("logits", [GROUPED, QUIET])
@pytest.mark.parametrize("fused", [False, True])
def test_gqa_rules(rule, logits, fused):
    module = Attention(16, 8, 4, bias=True, fused=fused)
    before, _, _ = clip(module, logits, gqa=rule)
    gamma = (100 / torch.tensor(logits[0])).where(torch.tensor(logits[0]) > 100, torch.tensor(1.0))
    group = gamma.view(4, 2).amin(1)
    if logits is GROUPED:
        torch.testing.assert_close(group, torch.tensor([0.625, 0.555556, 0.5, 0.454545]))
    pair = group.repeat_interleave(2)
    q_expected, k_expected = {
        "query": (gamma, torch.ones(4)),
        "group": (pair**0.5, group**0.5),
        "balanced": (gamma / pair**0.5, group**0.5),
    }[rule]
    for kind in ("weight", "bias"):
        if fused:
            q, k, v = ratios(before, module, f"qkv_proj.{kind}", 2).split([8, 4, 4])
        else:
            q, k, v = (ratios(before, module, f"{n}_proj.{kind}", 2) for n in "qkv")
        torch.testing.assert_close(q[:, 0], q_expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(k[:, 0], k_expected, rtol=1e-5, atol=0)
        near(v, 1.0)


# -- the algebra: logits are scaled by gamma, exactly ----------------------------------------------

MODULES = {
    "mha": lambda: Attention(24, 3, bias=True, rotary=Rotary(8)),
    "mqa": lambda: Attention(24, 4, 1, 8, fused=True, bias=True, rotary=Rotary(4)),
    "gqa": lambda: Attention(24, 6, 2, 4, bias=True),
    "init": lambda: Attention(24, 3, bias=True, scaling="init"),
    "query": lambda: Attention(24, 3, bias=True, scaling="query"),
    "mla": lambda: mla24(12),
    "mla without lora": lambda: mla24(None),
}


def mla24(rank):
    return MLA(24, 3, q_lora_rank=rank, kv_lora_rank=8, nope_width=8, rope_width=4, value_width=6)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("rule", ["query", "balanced"])
def test_the_next_forward_has_logits_of_tau(make, rule):
    module = make().double()
    with torch.no_grad():
        for p in module.parameters():
            nn.init.normal_(p)
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    module(x, headway.causal())
    stats = module.max_logit.value.clone()
    tau = stats.clamp(min=1).median().item() * 0.7
    clipper = QKClip(module, tau, gqa=rule)
    clipper.step()
    module(x, headway.causal())
    # negative and small ones stay as they were
    torch.testing.assert_close(module.max_logit.value, stats.clamp(max=tau), rtol=2e-6, atol=1e-6)


def test_the_group_rule_bounds_every_head():
    module = MODULES["gqa"]()
    with torch.no_grad():
        for p in module.parameters():
            nn.init.normal_(p)
    x = torch.randn(2, 9, 24)
    module(x)
    QKClip(module, 5.0, gqa="group").step()
    module(x)
    assert module.max_logit.value.max() <= 5.001


# -- statistics that must not do damage ------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: Attention(8, 4, 2, bias=True), lambda: mla(4)])
def test_small_negative_and_missing_pairs_leave_every_bit(make):
    module = make()
    logits = [[-3.0, 0.0, 10.0, -INF]]
    before, clipped, clipper = clip(module, logits, tau=10.0)
    for name, p in module.named_parameters():
        assert torch.equal(before[name], p), name
    assert clipped.count == 0
    clipper.check()


@pytest.mark.parametrize("rule", ["query", "group", "balanced"])
def test_negative_next_to_large_makes_no_nan(rule):
    module = Attention(8, 4, 2, bias=True)
    clip(module, [[-3.0, 500.0, -0.1, -1e30]], tau=10.0, gqa=rule)
    assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("bad", [NAN, INF])
def test_not_finite_leaves_its_head_and_raises_at_the_next_step(bad):
    net = nn.ModuleDict({"first": Attention(8, 2), "second": Attention(8, 2)})
    clipper = QKClip(net, tau=10.0)
    before = copy.deepcopy(net.state_dict())
    net["first"].max_logit(torch.tensor([[1.0, 40.0]]))
    net["second"].max_logit(torch.tensor([[20.0, bad], [1.0, 2.0]]))
    clipper.step()
    now = net["second"].q_proj.weight
    assert torch.equal(now[4:], before["second.q_proj.weight"][4:])
    near(now[:4] / before["second.q_proj.weight"][:4], 0.5**0.5)
    for layer in net.values():
        layer.max_logit(torch.tensor([[1.0, 1.0]]))
    with pytest.raises(LogitError, match=r"second head 1\. Their weights were left") as error:
        clipper.step()
    assert "first" not in str(error.value)
    clipper.step()  # told once; the statistics of this step are fine


def test_a_layer_without_statistics_raises_at_once():
    net = nn.ModuleDict({"first": Attention(8, 2), "second": Attention(8, 2)})
    clipper = QKClip(net, tau=0.01)
    net["first"](torch.randn(1, 3, 8))
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(LogitError, match="for second since the last step"):
        clipper.step()
    assert all(torch.equal(before[n], p) for n, p in net.named_parameters())
    net["second"](torch.randn(1, 3, 8))
    clipper.step()
    with pytest.raises(LogitError, match="first, second"):
        clipper.step()


def test_nan_in_the_input_is_found_by_real_forwards():
    layer = Attention(8, 2)
    clipper = QKClip(layer, tau=10.0)
    x = torch.randn(1, 4, 8)
    x[0, 2] = NAN
    layer(x)
    clipper.step()
    with pytest.raises(LogitError, match="Attention head 0, Attention head 1"):
        clipper.check()


# -- what other implementations got wrong ----------------------------------------------------------
#
# MaxText: one gamma for all scanned layers; a negative maximum gives NaN; nothing is clipped if the
# tree has another level, or without q_lora_rank; micro-batches are summed; inf zeroes a head for
# good; sinks and softcaps enter the maximum; unequal numbers of heads. Megatron-LM: NaN next to a
# negative maximum; biases stay behind; evaluation enters; logged maxima are neither detached nor
# reset; flat masters; layers without attention crash, those outside the decoder are missed; QK-norm
# makes it a silent no-op; a sync per layer. Others: one scalar for all heads. What is not below
# (cases above: inf, NaN, biases, q_lora_rank) is in test_record.py (evaluation, recomputation,
# sinks, softcaps, detached) and test_distributed.py (NaN whatever the order of ranks).


def test_layers_do_not_share_a_gamma():
    net = nn.ModuleList([mla(1), mla(1)])
    before = copy.deepcopy(net.state_dict())
    net[0].max_logit(torch.tensor([[20.0]]))
    net[1].max_logit(torch.tensor([[5.0]]))
    QKClip(net, tau=10.0).step()
    assert not torch.equal(net[0].kv_b_proj.weight, before["0.kv_b_proj.weight"])
    assert torch.equal(net[1].kv_b_proj.weight, before["1.kv_b_proj.weight"])


class Mixer(nn.Module):
    """A layer without attention, as in hybrid models."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        return self.mix(x)


def hybrid():
    """Attention of different sizes at different depths: in a layer, and in a prediction head."""
    return nn.ModuleDict(
        {
            "layers": nn.ModuleList([Mixer(), nn.ModuleDict({"self_attention": Attention(8, 2)})]),
            "mtp": nn.ModuleDict({"block": nn.ModuleDict({"attn": mla(3)})}),
        }
    )


def _recomputed(net):
    apply_activation_checkpointing(net, check_fn=lambda m: isinstance(m, Attention | MLA | Mixer))
    return net


def _compiled_by_layer(net):
    net["mtp"]["block"]["attn"] = torch.compile(net["mtp"]["block"]["attn"], backend="eager")
    return net


WRAPPERS = {
    "none": lambda net: net,
    "compiled": lambda net: torch.compile(net, backend="eager"),
    "compiled by layer": _compiled_by_layer,
    "recomputed": _recomputed,
}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_every_attention_is_found_at_any_depth(wrap):
    net = hybrid()
    before = copy.deepcopy(net.state_dict())
    clipper = QKClip(WRAPPERS[wrap](net), tau=10.0)
    names = ["layers.1.self_attention", "mtp.block.attn"]
    assert [layer.name for layer in clipper.layers] == names
    for layer, maximum in zip(clipper.layers, (20.0, 40.0), strict=True):
        layer.record(torch.full((1, layer.layout.heads), maximum))
    clipped = clipper.step()
    assert clipped.count == 5
    attention, latent = (layer.module for layer in clipper.layers)
    near(attention.q_proj.weight / before[f"{names[0]}.q_proj.weight"], 0.5**0.5)
    near(latent.kv_b_proj.weight[:4] / before[f"{names[1]}.kv_b_proj.weight"][:4], 0.5)


class NoSync(TorchDispatchMode):
    """Refuses what would wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        assert func.overloadpacket not in (aten._local_scalar_dense, aten.nonzero, aten.is_nonzero)
        return func(*args, **kwargs or {})


def test_nothing_waits_for_the_device(monkeypatch):
    net = hybrid()
    clipper = QKClip(net, tau=10.0)

    def step():
        for layer in clipper.layers:
            layer.record(torch.full((2, layer.layout.heads), 20.0))
        logit_stats(net)
        clipper.step()

    step()  # the first one plans
    with NoSync(), pytest.raises(AssertionError):
        torch.ones(2).sum().item()
    # `check` looks at a copy on the host, queued one step before.
    monkeypatch.setattr(clipper, "check", lambda: None)
    with NoSync():
        step()


def test_micro_batches_are_not_summed_and_the_record_starts_anew():
    module = Attention(8, 2)
    clipper = QKClip(module, tau=100.0)
    for _ in range(8):
        module.max_logit(torch.tensor([[90.0, 101.0]]))
    clipped = clipper.step()
    assert clipped.max_logit["Attention"].tolist() == [90.0, 101.0]
    module.max_logit(torch.tensor([[1.0, 2.0]]))
    assert clipper.step().max_logit["Attention"].tolist() == [1.0, 2.0]


def test_masters_are_scaled_too():
    module = Attention(8, 2, bias=True).bfloat16()
    masters = {p: p.detach().float() + 1e-4 for p in module.parameters()}
    before = {p: m.clone() for p, m in masters.items()}
    _, _, _ = clip(module, [[40.0, 1.0]], tau=10.0, masters=masters.get)
    for p in (module.q_proj.weight, module.q_proj.bias, module.k_proj.weight, module.k_proj.bias):
        near(masters[p][:4] / before[p][:4], 0.5)
        assert torch.equal(masters[p][4:], before[p][4:])
        torch.testing.assert_close(p.float(), masters[p], rtol=2**-7, atol=2e-3)
    assert torch.equal(masters[module.v_proj.weight], before[module.v_proj.weight])


def test_flat_masters_are_refused():
    module = Attention(8, 2)
    with pytest.raises(ArgumentError, match="not flattened"):
        clip(module, [[40.0, 1.0]], tau=10.0, masters=lambda p: p.detach().flatten())


def test_qk_norm_is_refused_with_the_reason():
    with pytest.raises(ArgumentError, match=r"layer.*q_norm, k_norm.*changes no logit"):
        QKClip(nn.ModuleDict({"layer": Attention(8, 2, qk_norm=True)}))
    QKClip(mla(2))  # norms of latents come before the weights that are clipped


def test_nothing_is_skipped_in_silence():
    with pytest.raises(ArgumentError, match="no attention"):
        QKClip(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="MultiheadAttention looks like an attention"):
        QKClip(nn.MultiheadAttention(8, 2))
    for own in (nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.Parameter(torch.ones(4, 4))):
        other = type("MySelfAttn", (nn.Module,), {})()
        other.c_attn = own
        with pytest.raises(ArgumentError, match="MySelfAttn looks like an attention"):
            QKClip(nn.ModuleList([other, Attention(8, 2)]))
    both = nn.ModuleList([nn.MultiheadAttention(8, 2), Attention(8, 2)])
    assert len(QKClip(both, adapters={nn.MultiheadAttention: None}).layers) == 1


def test_replaced_shared_and_wrapped_parameters_are_refused():
    module = Attention(8, 2)
    clipper = QKClip(module)
    module(torch.randn(1, 2, 8))
    module.q_proj.weight = nn.Parameter(torch.randn(8, 8))
    with pytest.raises(ArgumentError, match="replaced"):
        clipper.step()
    pair = nn.ModuleList([Attention(8, 2), Attention(8, 2)])
    pair[1].q_proj = pair[0].q_proj
    with pytest.raises(ArgumentError, match="0 and 1 share a parameter"):
        QKClip(pair)
    one = Attention(8, 2)
    one.k_proj.weight = one.q_proj.weight
    with pytest.raises(ArgumentError, match="Queries and keys of Attention share a parameter"):
        QKClip(one)
    torch.nn.utils.parametrizations.weight_norm(module.q_proj)
    with pytest.raises(ArgumentError, match="parametrised"):
        QKClip(module)


@pytest.mark.parametrize("gqa", ["query", "group", "balanced"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("make", [lambda: Attention(8, 4, 2, bias=True), lambda: mla(2)])
def test_frozen_weights_stay(make, alpha, gqa):
    """Whatever is frozen: its bits stay, or the clip is refused by the weight's name."""
    names = [name for name, _ in make().named_parameters() if "norm" not in name]
    for mask in range(0, 2 ** len(names), 3):
        module = make()
        frozen = {name for n, name in enumerate(names) if mask >> n & 1}
        for name, p in module.named_parameters():
            p.requires_grad_(name not in frozen)
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        try:
            clipper = QKClip(module, tau=1e-3, alpha=alpha, gqa=gqa)
        except ArgumentError as error:
            named = error.args[0].partition(" is frozen")[0]
            assert any(name in named for name in frozen) or "no attention" in named
            continue
        module(torch.randn(1, 3, 8))
        clipper.step()
        assert all(before[name].equal(module.get_parameter(name)) for name in frozen)


def test_frozen_layers_are_left_out():
    pair = nn.ModuleList([Attention(8, 2), Attention(8, 2)])
    pair[0].requires_grad_(False)
    clipper = QKClip(pair)
    assert [layer.name for layer in clipper.layers] == ["1"]
    pair[1](torch.randn(1, 2, 8))
    pair[1].k_proj.requires_grad_(False)
    with pytest.raises(ArgumentError, match="replaced or frozen after"):
        clipper.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 0.0}, "tau=0.0"),
        ({"tau": INF}, "tau=inf"),
        ({"tau": "100"}, "tau='100' must be a number"),
        ({"tau": True}, "tau=True must be a number"),
        ({"alpha": 1.5}, "alpha=1.5"),
        ({"alpha": None}, "alpha=None must be a number"),
        ({"gqa": "max"}, "gqa='max'"),
        ({"group": "world"}, "group='world'"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ArgumentError, match=message):
        QKClip(Attention(8, 2), **options)


def test_tau_above_every_logit_trains_to_the_same_bits():
    def train(tau):
        torch.manual_seed(0)
        net = nn.Sequential(Attention(16, 4, 2, bias=True), Attention(16, 2, fused=True))
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        clipper = QKClip(net, tau) if tau else None
        for _ in range(5):
            net(torch.randn(2, 6, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if clipper:
                clipper.step()
        return net.state_dict()

    plain, clipped = train(None), train(1e6)
    assert all(torch.equal(plain[name], clipped[name]) for name in plain)


# -- modules of others -----------------------------------------------------------------------------


class Interleaved(nn.Module):
    """Megatron-LM's fused layout: per key head its query heads, the key, the value."""

    def __init__(self):
        super().__init__()
        self.linear_qkv = nn.Linear(6, 2 * (2 + 1 + 1) * 3, bias=True)


def interleaved_layout(module):
    blocks = [
        Block(role, head, 3)
        for g in range(2)
        for role, head in (("query", 2 * g), ("query", 2 * g + 1), ("key", g), ("value", g))
    ]
    return Layout(4, 2, (Projection(module.linear_qkv, tuple(blocks)),))


def test_an_adapter_of_ones_own():
    module = Interleaved()
    clipper = QKClip(module, 10.0, gqa="group", adapters={Interleaved: interleaved_layout})
    before = copy.deepcopy(module.state_dict())
    module.max_logit(torch.tensor([[40.0, 1.0, 2.0, 3.0]]))
    clipper.step()
    for kind in ("weight", "bias"):
        ratio = ratios(before, module, f"linear_qkv.{kind}", 3)
        near(ratio[:3], 0.5)
        near(ratio[3:], 1.0)


HF = {
    "Llama": {}, "Qwen2": {}, "Phi3": {"pad_token_id": 0},
    "Gemma2": {"head_dim": 6, "query_pre_attn_scalar": 6, "attn_logit_softcapping": 1.0},
    "DeepseekV2": {"num_key_value_heads": 4}, "DeepseekV3": {"num_key_value_heads": 4},
}  # fmt: skip
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "first_k_dense_replace": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", HF)
@pytest.mark.parametrize("recompute", [False, True])
def test_huggingface_models(name, recompute):
    transformers = pytest.importorskip("transformers")
    from headway.integrations.transformers import register

    register()
    options = {
        "vocab_size": 11, "hidden_size": 24, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "headway",
    } | HF[name]  # fmt: skip
    if name.startswith("Deepseek"):
        options |= LATENT
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}Model")(config).train()
    if recompute:  # its name before transformers 5.20 or so, and after
        old = model.gradient_checkpointing_enable
        getattr(model, "activation_checkpointing_enable", old)()
    for p in model.parameters():
        nn.init.normal_(p)
    clipper = QKClip(model, tau=2.0, gqa="balanced")
    tokens = torch.randint(11, (2, 7))
    model(tokens, use_cache=False).last_hidden_state.sum().backward()
    with torch.no_grad():
        model(tokens.flip(1), use_cache=False)  # leaves no trace
    first = clipper.step()
    assert list(first.gamma) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert first.count > 0
    model(tokens, use_cache=False)
    # Layer 0 sees the same input again; what reaches layer 1 has changed. Softcaps come later.
    after = logit_stats(model)["layers.0.self_attn"]
    before = first.max_logit["layers.0.self_attn"]
    torch.testing.assert_close(after, before.clamp(max=2.0), rtol=1e-4, atol=1e-5)


def test_huggingface_qk_norm_is_refused():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=11, hidden_size=16, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    with pytest.raises(ArgumentError, match="normalises queries and keys"):
        QKClip(transformers.Qwen3Model(config))
