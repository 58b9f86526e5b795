"""Random calls of flash_attn_with_kvcache against its definition in float64, row by row."""

import math
import random

import pytest
import torch
from torch import Tensor

from headway.compat.flash import flash_attn_with_kvcache

HK, D, CAPACITY, PAGE = 2, 16, 32, 8


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x `(length, heads, d)` by the angles of its positions."""
    cos, sin, half = cos[:, None].double(), sin[:, None].double(), cos.shape[-1]
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    first = turning[..., 0::2] if interleaved else turning[..., :half]
    second = turning[..., 1::2] if interleaved else turning[..., half:]
    pair = first * cos - second * sin, first * sin + second * cos
    return torch.cat(
        (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), rest), -1
    )


def of_row(q: Tensor, k: Tensor, v: Tensor, left: int, options: dict) -> tuple[Tensor, Tensor]:
    """out and lse of q `(length, hq, d)` over all keys of a row, the queries its last."""
    k, v = (x.repeat_interleave(q.shape[1] // HK, 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(D)
    if options["softcap"]:
        s = options["softcap"] * (s / options["softcap"]).tanh()
    i, j = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
    before, after = options["window_size"]
    after = 0 if options["causal"] else after
    kept = (j >= left) & ((i - j <= before) | (before < 0)) & ((j - i <= after) | (after < 0))
    s = s.masked_fill(~kept, -math.inf)
    lse = s.logsumexp(-1) if len(k) else torch.full(s.shape[:2], -math.inf, dtype=s.dtype)
    p = (s - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    return torch.einsum("hij,jhd->ihd", p, v.masked_fill(~kept.any(0)[:, None, None], 0)), lse


@pytest.mark.parametrize("seed", range(30))
def test_random_calls(seed):
    """What no row has is NaN: other rows of the cache, what lies behind the last key, padding."""
    draw = random.Random(seed)
    b, group, q_len, new = (
        draw.randint(1, 4),
        draw.choice([1, 2, 4]),
        draw.choice([1, 2, 5]),
        draw.randint(0, 3),
    )
    lengths = [draw.choice([0, draw.randint(0, CAPACITY - new), CAPACITY - new]) for _ in range(b)]
    lefts = [draw.randint(0, min(n, 5)) if seed % 3 == 0 else 0 for n in lengths]
    rows = torch.randperm(b + 2)[:b] if draw.random() < 0.5 else torch.arange(b)
    paged, rotary, interleaved = draw.random() < 0.5, draw.random() < 0.5, draw.random() < 0.5
    ints = lambda x: torch.tensor(x, dtype=torch.int32)
    options = {
        "causal": draw.random() < 0.6, "softcap": draw.choice([0.0, 5.0]),
        "window_size": draw.choice([(-1, -1), (3, 0), (4, 2), (-1, 3)]),
    }  # fmt: skip
    keys, values = (torch.full((b, CAPACITY, HK, D), torch.nan) for _ in "kv")
    for r, n in enumerate(lengths):
        keys[r, lefts[r] : n], values[r, :n] = (
            torch.randn(n - lefts[r], HK, D),
            torch.randn(n, HK, D),
        )
    if paged:
        table = torch.randperm(b * CAPACITY // PAGE + 1)[:-1].view(b, -1)
        caches = [torch.full((b * CAPACITY // PAGE + 1, PAGE, HK, D), torch.nan) for _ in "kv"]
        for cache, own in zip(caches, (keys, values), strict=True):
            cache[table.flatten()] = own.reshape(-1, PAGE, HK, D)
        where = {draw.choice(["block_table", "page_table"]): table.int()}
    else:
        caches = [torch.full((b + 2, CAPACITY, HK, D), torch.nan) for _ in "kv"]
        for cache, own in zip(caches, (keys, values), strict=True):
            cache[rows] = own
        where = {"cache_batch_idx": rows.int()}
    q, (k, v) = torch.randn(b, q_len, HK * group, D), torch.randn(2, b, new, HK, D)
    angles = torch.rand(CAPACITY + 8, draw.choice([D // 2, D // 4])) * 6
    given = {
        "rotary_cos": angles.cos(),
        "rotary_sin": angles.sin(),
        "rotary_interleaved": interleaved,
    }
    with torch.inference_mode():
        out, lse = flash_attn_with_kvcache(
            q, *caches, *((k, v) if new else ()), cache_seqlens=ints(lengths), num_splits=draw.choice([0, 7]),
            cache_leftpad=ints(lefts) if any(lefts) else None, return_softmax_lse=True,
            **where, **options, **(given if rotary else {}),
        )  # fmt: skip
    moving = options["causal"] or options["window_size"] != (-1, -1)
    for r, n in enumerate(lengths):
        own_q, own_k, own_v = q[r].double(), k[r].double(), v[r].double()
        if rotary:
            at = n - lefts[r] + torch.arange(max(q_len, new))
            own_k = turned(own_k, angles[at[:new]].cos(), angles[at[:new]].sin(), interleaved)
            at = at[:q_len] if moving else at[:1].expand(q_len)
            own_q = turned(own_q, angles[at].cos(), angles[at].sin(), interleaved)
        all_k, all_v = (
            torch.cat((x[r, :n].double(), y)) for x, y in ((keys, own_k), (values, own_v))
        )
        wanted = of_row(own_q, all_k, all_v, lefts[r], options)
        torch.testing.assert_close(out[r].double(), wanted[0], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse[r].double(), wanted[1], atol=2e-5, rtol=2e-5)
        written = caches[0][table[r]].flatten(0, 1) if paged else caches[0][rows[r]]
        torch.testing.assert_close(written[n : n + new].double(), own_k, atol=1e-5, rtol=1e-5)
