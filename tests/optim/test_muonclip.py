"""MuonClip is torch.optim.Muon, AdamW and QK-Clip, one after the other."""

import copy
import pickle

import pytest
import torch
from torch import nn

import headway
from headway.errors import ArgumentError
from headway.nn import MLA, Attention
from headway.optim import MuonClip
from headway.optim.muonclip import parameter_groups
from headway.stability import QKClip


class Model(nn.Module):
    def __init__(self, fused=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 16)
        self.attention = Attention(16, 4, 2, bias=True, fused=fused)
        self.mla = MLA(16, 2, kv_lora_rank=8, nope_width=8, rope_width=4, value_width=6)
        self.norm = nn.RMSNorm(16)
        self.head = nn.Linear(16, 11)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(x, headway.causal())
        x = x + self.mla(x, headway.causal())
        return self.head(self.norm(x)).log_softmax(-1)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(11, (2, 9), generator=generator)


def run(model, steps, update, accumulate=1):
    for step in range(steps):
        for part in batch(step).chunk(accumulate):
            tokens = part
            loss = -model(tokens)[:, :-1].gather(-1, tokens[:, 1:, None]).mean()
            (loss / accumulate).backward()
        update()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_the_rule_for_groups():
    model = Model()
    model.norm.weight.requires_grad_(False)
    names = {p: name for name, p in model.named_parameters()}
    groups = [sorted(names[p] for p in group) for group in parameter_groups(model)]
    assert groups[0] == [
        "attention.k_proj.weight", "attention.o_proj.weight", "attention.q_proj.weight",
        "attention.v_proj.weight", "mla.kv_a_proj_with_mqa.weight", "mla.kv_b_proj.weight",
        "mla.o_proj.weight", "mla.q_proj.weight",
    ]  # fmt: skip
    assert groups[1] == ["embedding.weight", "head.weight"]
    assert "norm.weight" not in groups[2]
    assert "mla.kv_a_layernorm.weight" in groups[2]
    model.head.weight = model.embedding.weight
    assert model.head.weight not in set(parameter_groups(model, ("mla.q_proj",))[0])
    assert len(parameter_groups(Model(), ("mla",))[0]) == 5  # the head is now Muon's
    with pytest.raises(ArgumentError, match="called 'lm_heads'"):
        parameter_groups(model, ("lm_heads",))


def test_it_is_muon_then_adamw_then_the_clip():
    model = Model()
    optimizer = MuonClip(model, lr=0.02, tau=0.5)

    def update():
        optimizer.step()
        optimizer.zero_grad()

    ours = run(model, 4, update)
    assert optimizer.clipped.count > 0

    plain = Model()
    muon, decayed, rest = parameter_groups(plain)
    both = [
        torch.optim.Muon(muon, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
            lr=0.02, betas=(0.9, 0.95),
        ),
    ]  # fmt: skip
    clip = QKClip(plain, 0.5)

    def by_hand():
        for o in both:
            o.step()
            o.zero_grad()
        clip.step()

    theirs = run(plain, 4, by_hand)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_state_dict_continues_to_the_same_bits():
    def make():
        model = Model()
        optimizer = MuonClip(model, lr=0.02, tau=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

        def update():
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

        return model, optimizer, schedule, update

    model, _, _, update = make()
    whole = run(model, 6, update)
    model, optimizer, schedule, update = make()
    run(model, 3, update)
    saved = copy.deepcopy([x.state_dict() for x in (model, optimizer, schedule)])
    model, optimizer, schedule, update = make()
    for x, state in zip((model, optimizer, schedule), saved, strict=True):
        x.load_state_dict(state)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01] * 3
    for step in range(3, 6):
        tokens = batch(step)
        (-model(tokens)[:, :-1].gather(-1, tokens[:, 1:, None]).mean()).backward()
        update()
    assert all(torch.equal(p, whole[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("options", [{}, {"per_head": True}, {"tau": None}], ids=str)
def test_a_copy_goes_on_as_the_original_does(options, copied):
    model = Model(fused=True)
    optimizer = MuonClip(model, lr=0.05, **{"tau": 0.3} | options)

    def train(model, optimizer, steps):
        def update():
            optimizer.step()
            optimizer.zero_grad()

        return run(model, steps, update)

    train(model, optimizer, 2)
    pair = copied((model, optimizer))
    assert pair[1].param_groups[0]["params"][0] in set(pair[0].parameters())
    original, copy_of_it = train(model, optimizer, 2), train(*pair, 2)
    assert all(torch.equal(p, copy_of_it[name]) for name, p in original.items())
    pair[1].param_groups[0]["lr"] = 0.0  # as a schedule does, and the two optimizers within see it
    before = pair[0].attention.o_proj.weight.clone()
    train(*pair, 1)
    assert torch.equal(before, pair[0].attention.o_proj.weight)


def test_gradient_accumulation_sees_every_micro_batch():
    models = Model(), Model()
    results, seen = [], []
    for model, parts in zip(models, (1, 2), strict=True):
        optimizer = MuonClip(model, lr=0.02, tau=0.5)
        results.append(run(model, 1, optimizer.step, accumulate=parts))
        seen.append(optimizer.clipped.max_logit)
    for name in seen[0]:
        torch.testing.assert_close(seen[0][name], seen[1][name])
    for name in results[0]:  # bfloat16 inside Muon
        torch.testing.assert_close(results[0][name], results[1][name], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("per_head", [False, True])
def test_blocks_are_orthogonalised_by_themselves(per_head):
    """A fused weight trains like the separate ones; per head like a matrix per head."""
    model, fused = Model(), Model(fused=True)
    with torch.no_grad():
        a, b = model.attention, fused.attention
        for kind in ("weight", "bias"):
            parts = [getattr(getattr(a, f"{n}_proj"), kind) for n in "qkv"]
            getattr(b.qkv_proj, kind).copy_(torch.cat(parts))
        b.o_proj.load_state_dict(a.o_proj.state_dict())
        fused.mla.load_state_dict(model.mla.state_dict())
        fused.head.load_state_dict(model.head.state_dict())
    before = model.attention.q_proj.weight.detach().clone()
    gradients = []
    for m in (model, fused):
        optimizer = MuonClip(m, lr=0.1, weight_decay=0.0, tau=None, per_head=per_head)
        run(m, 1, optimizer.step)
        gradients.append(m.attention)
    separate = torch.cat([getattr(a, f"{n}_proj").weight for n in "qkv"])
    torch.testing.assert_close(b.qkv_proj.weight, separate, rtol=1e-2, atol=2e-3)
    step = model.attention.q_proj.weight.detach() - before  # (4 heads * 4, 16)
    values = torch.linalg.svdvals(step.view(4, 4, 16)) / (0.1 * 0.2 * 16**0.5)
    if per_head:
        assert ((values > 0.5) & (values < 1.4)).all()
    largest = torch.linalg.svdvals(step).max() / (0.1 * 0.2 * 16**0.5)
    assert (largest > 1.4) == per_head  # four orthogonal heads are no orthogonal matrix
    optimizer = MuonClip(model, per_head=per_head)
    sizes = optimizer.blocks.get(model.mla.kv_b_proj.weight)
    assert sizes == ([8, 6, 8, 6] if per_head else None)


def test_a_closure_and_models_without_attention():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = MuonClip(model, tau=None)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > optimizer.step(closure)
    with pytest.raises(ArgumentError, match="no attention"):
        MuonClip(model)
    with pytest.raises(ArgumentError, match=r"not model\.parameters\(\)"):
        MuonClip(model.parameters())
    with pytest.raises(ArgumentError, match=r"no nn\.Linear"):
        MuonClip(nn.Embedding(2, 2))
    for wrong in ({"betas": (0.9, 1.0)}, {"weight_decay": -0.1}, {"eps": -1.0}, {"momentum": -0.5}):
        with pytest.raises(ValueError, match=r"beta parameter|weight decay|epsilon|momentum"):
            MuonClip(nn.Linear(2, 2), tau=None, **wrong)
    with pytest.raises(ArgumentError, match="make a new one"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
