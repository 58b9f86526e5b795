"""Random calls of flash_attn_with_kvcache against its definition in float64, row by row, written
from flash-attn's documentation:

- the new keys go to positions `cache_seqlens` and on, turned by these positions, or from
  `rotary_seqlens` on, and nothing else is written; so are the queries, all by the first position where there is no window;
- the last query is aligned with the last key; keys before `cache_leftpad` are none;
- `cache_batch_idx` says which row of the cache, or of `page_table`, is a row of q's.
"""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.compat.flash import flash_attn_with_kvcache

HK, D, CAPACITY, PAGE = 2, 16, 32, 8


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x `(length, heads, d)` by `angles` `(length, rotary / 2)`."""
    cos, sin, half = angles[:, None].cos().double(), angles[:, None].sin().double(), angles.shape[1]
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    first = turning[..., 0::2] if interleaved else turning[..., :half]
    second = turning[..., 1::2] if interleaved else turning[..., half:]
    pair = first * cos - second * sin, first * sin + second * cos
    return torch.cat(
        (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), rest), -1
    )


def of_row(
    q: Tensor, k: Tensor, v: Tensor, left: int, options: dict, slopes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out and lse of q `(length, hq, d)` over all keys of a row, the queries its last."""
    k, v = (x.repeat_interleave(q.shape[1] // HK, 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, k) * (options["softmax_scale"] or 1 / math.sqrt(D))
    if options["softcap"]:
        s = options["softcap"] * (s / options["softcap"]).tanh()
    i, j = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
    if slopes is not None:
        s = s - slopes[:, None, None] * (i - j).abs()
    before, after = options["window_size"]
    after = 0 if options["causal"] else after
    kept = (j >= left) & ((i - j <= before) | (before < 0)) & ((j - i <= after) | (after < 0))
    s = s.masked_fill(~kept, -math.inf)
    sink = options["learnable_sink"]
    sink = torch.full(s.shape[:1], -math.inf) if sink is None else sink
    lse = torch.cat((s, sink.double()[:, None, None].expand(-1, len(q), 1)), -1).logsumexp(-1)
    p = (s - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    return torch.einsum("hij,jhd->ihd", p, v.masked_fill(~kept.any(0)[:, None, None], 0)), lse


def cut(x: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Rows `(b, length, heads, d)` packed, and where each begins."""
    ends = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    return torch.cat([row[:n] for row, n in zip(x, counts, strict=True)]), ends


def call(seed: int) -> None:
    """What no row has is NaN: other rows of the cache, what lies behind the last key, padding."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    maybe = lambda x, share=0.3: x if draw.random() < share else None
    ints = lambda x: torch.tensor(x, dtype=torch.int32)
    b, group = draw.randint(1, 4), draw.choice([1, 2, 4])
    hq, q_len, new = HK * group, draw.choice([1, 2, 5]), draw.randint(0, 3)
    lengths = [draw.choice([0, draw.randint(0, CAPACITY - new), CAPACITY - new]) for _ in range(b)]
    lefts = maybe([draw.randint(0, min(n, 5)) for n in lengths])
    options: dict[str, Any] = {
        "causal": draw.random() < 0.6, "softcap": draw.choice([0.0, 5.0]),
        "window_size": draw.choice([(-1, -1), (3, 0), (4, 2), (-1, 3)]),
        "softmax_scale": maybe(0.3), "learnable_sink": maybe(torch.randn(hq)),
    }  # fmt: skip
    slopes = maybe(torch.rand(draw.choice([(hq,), (b, hq)])))
    scales = {name: maybe(torch.rand(b, HK) + 0.5, 0.15) for name in "qkv"}
    keys, values = (torch.full((b, CAPACITY, HK, D), torch.nan) for _ in "kv")
    for r, n in enumerate(lengths):
        first = lefts[r] if lefts else 0
        keys[r, first:n], values[r, :n] = torch.randn(n - first, HK, D), torch.randn(n, HK, D)

    # Where the rows are: in a cache, in pages, or in pages whose table has other rows, too.
    kind, others = draw.choice(["rows", "block_table", "page_table", "both"]), draw.randint(0, 2)
    rows = torch.randperm(b + others)[:b] if kind in ("rows", "both") else torch.arange(b)
    if kind == "rows":
        table, caches = None, [torch.full((b + others, CAPACITY, HK, D), torch.nan) for _ in "kv"]
        for cache, own in zip(caches, (keys, values), strict=True):
            cache[rows] = own
    else:
        count = b * CAPACITY // PAGE
        table = torch.randperm(count + 1)[:-1].view(b, -1)
        caches = [torch.full((count + 1, PAGE, HK, D), torch.nan) for _ in "kv"]
        for cache, own in zip(caches, (keys, values), strict=True):
            cache[table.flatten()] = own.reshape(-1, PAGE, HK, D)
    where: dict[str, Any] = {}
    if kind in ("rows", "both"):
        where["cache_batch_idx"] = rows.int()
    if kind == "both":
        of_cache = torch.randint(count + 1, (b + others, CAPACITY // PAGE))
        of_cache[rows] = table
        where["page_table"] = of_cache.int()
    elif table is not None:
        where[kind] = table.int()

    angles = torch.rand(CAPACITY + 8, draw.choice([D // 2, D // 4])) * 6
    rotary, interleaved = draw.random() < 0.6, draw.random() < 0.5
    starts = maybe([draw.randint(0, CAPACITY) for _ in range(b)]) if rotary else None
    if rotary:
        where |= {
            "rotary_cos": angles.cos(), "rotary_sin": angles.sin(),
            "rotary_interleaved": interleaved, "rotary_seqlens": None if not starts else ints(starts),
        }  # fmt: skip
    q, (k, v) = torch.randn(b, q_len, hq, D), torch.randn(2, b, new, HK, D)
    asked, given = [q_len] * b, [new] * b
    some_q, new_keys = q, (k, v)
    if packed := draw.random() < 0.3:
        asked = [draw.randint(0, q_len) for _ in range(b)]
        some_q, where["cu_seqlens_q"] = cut(q, asked)
        where["max_seqlen_q"] = q_len
    if new and draw.random() < 0.3:
        given = [draw.randint(0, new) for _ in range(b)]
        packed_k, where["cu_seqlens_k_new"] = cut(k, given)
        no_rows = torch.full((draw.randint(0, 3), HK, D), 7.0)  # tokens behind the last row
        new_keys = torch.cat((packed_k, no_rows)), torch.cat((cut(v, given)[0], no_rows))
    before = [cache.clone() for cache in caches]
    with torch.inference_mode():
        out, lse = flash_attn_with_kvcache(
            some_q, *caches, *(new_keys if new else ()), cache_seqlens=ints(lengths),
            cache_leftpad=None if lefts is None else ints(lefts), return_softmax_lse=True,
            num_splits=draw.choice([0, 7]), alibi_slopes=slopes,
            **{f"{name}_descale": scale for name, scale in scales.items()}, **where, **options,
        )  # fmt: skip
    if packed:
        out, lse = out.split(asked), lse.split(asked, 1)
    for cache, old in zip(caches, before, strict=True):
        changed = ~torch.isclose(cache, old, rtol=0, atol=0, equal_nan=True)
        assert changed.any(-1).any(-1).sum() == (sum(given) if new else 0)
    moving = options["causal"] or options["window_size"] != (-1, -1)
    for r, n in enumerate(lengths):
        own_q, own_k, own_v = (
            q[r, : asked[r]].double(),
            *(x[r, : given[r]].double() for x in (k, v)),
        )
        if rotary:
            at = (starts[r] if starts else n) + torch.arange(max(q_len, new))
            own_k = turned(own_k, angles[at[: given[r]]], interleaved)
            at = at[: asked[r]] if moving else at[:1].expand(asked[r])
            own_q = turned(own_q, angles[at], interleaved)
        written = caches[0][table[r]].flatten(0, 1) if table is not None else caches[0][rows[r]]
        torch.testing.assert_close(written[n : n + given[r]].double(), own_k, atol=1e-5, rtol=1e-5)
        all_k, all_v = (
            torch.cat((x[r, :n].double(), y)) for x, y in ((keys, own_k), (values, own_v))
        )
        by = {name: 1 if s is None else s[r].double()[:, None] for name, s in scales.items()}
        if scales["q"] is not None:
            own_q = own_q * by["q"].repeat_interleave(group, 0)
        wanted = of_row(
            own_q, all_k * by["k"], all_v * by["v"], lefts[r] if lefts else 0, options,
            slopes if slopes is None or slopes.dim() == 1 else slopes[r],
        )  # fmt: skip
        torch.testing.assert_close(out[r].double(), wanted[0], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse[r].double(), wanted[1], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("forty", range(10))
def test_random_calls(forty):
    for n in range(40):
        call(40 * forty + n)
