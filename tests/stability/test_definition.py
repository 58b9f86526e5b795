"""QK-Clip and the records beside their definition, dense and in float64, on random attention."""

import copy
import math
import random

import pytest
import torch

import headway as hw
from headway.nn import MLA, Attention, Rotary
from headway.stability import QKClip

MASKS = (
    None,
    hw.causal() & hw.sliding_window(5),
    lambda b, h, i, j: (i + j) % 3 != b,
    lambda b, h, i, j: (h != 0) & (i >= j),  # no key for the first head
    lambda b, h, i, j: j < 0,
)
LENGTH, WIDTH = 13, 16


def rotated(x, rotary):
    if rotary is None:
        return x
    turned, rest = x[..., : rotary.width], x[..., rotary.width :]
    powers = torch.arange(0, rotary.width, 2, dtype=x.dtype) / rotary.width
    turns = torch.polar(
        torch.ones((), dtype=x.dtype), torch.arange(LENGTH)[:, None] * rotary.base**-powers
    )
    pair = (lambda t: t) if rotary.interleaved else (lambda t: t.unflatten(-1, (2, -1)).mT)
    numbers = pair(turned).reshape(*turned.shape[:-1], -1, 2)
    out = torch.view_as_real(torch.view_as_complex(numbers.contiguous()) * turns)
    out = out.flatten(-2) if rotary.interleaved else out.mT.flatten(-2)
    return torch.cat((out, rest), dim=-1)


def largest(module, batches, mask):
    """The largest logit of every head, by the formulas of the modules' docstrings."""
    a = copy.deepcopy(module).double()
    by_head = lambda x, heads: x.unflatten(-1, (heads, -1)).transpose(1, 2)
    of_batches = []
    for x in batches:
        x = x.double()
        if isinstance(a, MLA):
            q = a.q_proj(x) if a.q_proj is not None else a.q_b_proj(a.q_a_layernorm(a.q_a_proj(x)))
            q_nope, q_rope = by_head(q, a.heads).split([a.nope_width, a.rope_width], -1)
            latent, k_rope = a.kv_a_proj_with_mqa(x).split([a.kv_lora_rank, a.rope_width], -1)
            k_nope = by_head(a.kv_b_proj(a.kv_a_layernorm(latent)), a.heads)[..., : a.nope_width]
            logits = q_nope @ k_nope.mT
            logits = logits + rotated(q_rope, a.rotary) @ rotated(k_rope[:, None], a.rotary).mT
        else:
            q_rows, k_rows = a.heads * a.head_width, a.kv_heads * a.head_width
            q, k = a.qkv_proj(x).split([q_rows, k_rows, k_rows], -1)[:2]
            q, k = rotated(by_head(q, a.heads), a.rotary), rotated(by_head(k, a.kv_heads), a.rotary)
            logits = q @ k.repeat_interleave(a.heads // a.kv_heads, 1).mT
        logits = logits if a.scaling == "init" else logits * a.scale
        if mask is not None:
            axes = torch.meshgrid(*map(torch.arange, logits.shape), indexing="ij")
            logits = logits.masked_fill(~mask(*axes), -math.inf)
        of_batches.append(logits.amax((0, 2, 3)))
    return torch.stack(of_batches).amax(0)


@pytest.mark.parametrize("seed", range(24))
def test_the_record_and_the_clip_are_those_of_the_definition(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    heads, gqa = rng.choice([2, 4]), rng.choice(["query", "group", "balanced"])
    options = {
        "scaling": rng.choice(["logits", "query", "init"]), "scale": rng.choice([None, 0.7]),
        "bias": rng.random() < 0.5, "dtype": dtype,
    }  # fmt: skip
    if rng.random() < 0.5:
        per_key = 1
        module = MLA(
            WIDTH, heads, q_lora_rank=rng.choice([None, 8]), kv_lora_rank=8, nope_width=8,
            rope_width=4, value_width=6, **options,
        )  # fmt: skip
    else:
        per_key = rng.choice([1, 2])
        rotary = rng.choice([None, Rotary(4), Rotary(8, interleaved=True)])
        module = Attention(
            WIDTH, heads, heads // per_key, head_width=8, fused=True, rotary=rotary, **options
        )
    gain = rng.choice([1, 10])
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(gain) if p.dim() == 2 else p.normal_()
    mask, score = (
        rng.choices(MASKS, (4, 4, 4, 4, 1))[0],
        rng.choice([None, hw.softcap(5.0), lambda s, b, h, i, j: -s]),
    )
    batches = [torch.randn(2, LENGTH, WIDTH, dtype=dtype) for _ in range(rng.choice([1, 3]))]

    exact = largest(module, batches, mask)
    kept = exact[exact.isfinite()]
    tau = max(1e-3, rng.choice([0.3, 0.5, 0.9, 2.0]) * kept.median().item()) if len(kept) else 1.0
    masters = {p: p.detach().float() * 1.001 for p in module.parameters()}
    before = {p: (p.detach().clone(), master.clone()) for p, master in masters.items()}
    clipper = QKClip(module, tau, rng.choice([0.0, 0.3, 0.5]), gqa=gqa, masters=masters.get)
    for x in batches:
        module(x, mask, score)
    clipped = clipper.step()
    (recorded,), (gamma,) = clipped.max_logit.values(), clipped.gamma.values()  # of one layer
    # Three roundings of a product's operands, of numbers up to the largest logit.
    eps = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-7
    close = {"rtol": 16 * eps, "atol": 16 * eps * (1 + kept.abs().max().item() if len(kept) else 1)}
    torch.testing.assert_close(recorded.double(), exact, **close)
    over = recorded > tau
    torch.testing.assert_close(gamma, torch.where(over, tau / recorded, 1.0))

    shared = gamma.view(-1, per_key).amin(1).repeat_interleave(per_key)
    factor = shared if gqa == "group" and per_key > 1 else gamma
    torch.testing.assert_close(largest(module, batches, mask), exact * factor, **close)
    for p, (weight, master) in before.items():
        if not over.any():
            assert p.equal(weight)
            assert masters[p].equal(master)
        ratio = (masters[p] / master).nan_to_num(1.0).to(weight)
        torch.testing.assert_close(p, weight * ratio, rtol=4 * eps, atol=0.0)
