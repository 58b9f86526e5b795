"""What the kernel of inference has to get right: each function returns its largest error, over 1 and
what is right, next to the definition over each row's own keys."""

from typing import Any

import torch
from torch import Tensor

import headway as hw
from headway import inference

from .gather import Caches, by_rows, caches

LENGTHS = [0, 1, 7, 8, 9, 150]  # pages are of 8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def off(made: Any, right: Any) -> float:
    """The largest error of out, lse and max_logit; inf where what is infinite or NaN differs."""
    worst = 0.0
    for x, y in zip(made, right, strict=True):
        x = x.cpu()
        if not torch.equal(x.isfinite(), y.isfinite()):
            return torch.inf
        kept = y.isfinite()
        error = (x.double() - y)[kept].abs() / (1 + y[kept].abs())
        worst = max(worst, error.max().item() if len(error) else 0.0)
    return worst


def run(c: Caches, *mods: Any, device: str = "cpu", **options: Any) -> Any:
    """out, lse and max_logit of the kernel."""
    to = lambda x: x.to(device) if isinstance(x, Tensor) else x
    given = {name: to(x) for name, x in (c.options | options).items()}
    return inference.attention_with_stats(
        to(c.q), to(c.k), to(c.v), *mods, backend="triton", **given
    )


def mods(device: str) -> list[tuple[Any, Any, dict]]:
    """Scores, masks and options; what they capture lies on the device."""
    draw = torch.Generator().manual_seed(0)
    slopes = torch.rand(4, generator=draw).to(device)
    sink = torch.randn(4, generator=draw).to(device)
    ends = torch.tensor([1, 0, 20, 5, 17, 100], device=device)
    ids = torch.arange(160, device=device) // 30
    return [
        (None, hw.causal() & hw.sliding_window(20), {}),
        (hw.alibi(slopes), hw.causal(), {"sink": sink}),
        (hw.softcap(2.0), hw.padding(ends), {}),
        (None, hw.chunked(16), {"scale": -0.3}),
        (lambda s, b, h, i, j: s * slopes[h] + b, hw.causal() | hw.prefix(4), {}),
        (None, lambda b, h, i, j: ~((j > i - 9 * h) & (j // 3 >= 5)), {}),
        (None, hw.document(ids) & hw.causal(), {"scale": 0.0}),
    ]


def masks_and_scores(dtype: torch.dtype, device: str = "cpu", some: slice = slice(None)) -> float:
    c = caches(LENGTHS, 4, 2, q_len=3, page=8, dtype=dtype)
    pairs = zip(mods(device)[some], mods("cpu")[some], strict=True)
    return max(
        off(run(c, *of, device=device, **more), by_rows(c, *right, **others))
        for (*of, more), (*right, others) in pairs
    )


def chosen(device: str, heads: int, capacity: int, page: int) -> Any:
    """Pages that every row and head has chosen, none of some; the lists as a router makes them."""
    draw = torch.Generator().manual_seed(3)
    count = capacity // page
    lists = torch.stack([
        torch.randperm(count, generator=draw)[:3] for _ in range(len(LENGTHS) * heads)
    ])  # fmt: skip
    lists[torch.rand(lists.shape, generator=draw) < 0.3] = -1
    lists = lists.view(len(LENGTHS), heads, 1, 3).to(device)
    return hw.top_k_blocks(lists, page, 1, capacity)


def block_masks(dtype: torch.dtype, device: str = "cpu", some: slice = slice(None)) -> float:
    """Of chosen pages; of positions, with tiles smaller and larger than the kernel's blocks, for
    all heads and for each; whole rows of which nothing is live."""
    c = caches(LENGTHS, 6, 2, q_len=3, page=8, dtype=dtype)
    room = c.page_table.shape[1] * 8

    def masks(device: str) -> list[Any]:
        own = lambda b, h, i, j: (i - j >= 4 * h) & (i - j < 30 + b) & (h != 1)
        of_heads = lambda b, h, i, j: (i - j >= 4 * h) & (i - j < 30) & (h != 1)
        return [
            chosen(device, 6, room, 8), chosen(device, 1, room, 8),
            hw.block_mask(
                hw.causal() & hw.sliding_window(9), 1, 1, room, room, tile=16, device=device
            ),
            hw.block_mask(own, len(LENGTHS), 6, room, room, tile=(8, 128), device=device),
            hw.block_mask(of_heads, 1, 6, room, room, tile=(64, 16), device=device),
        ]  # fmt: skip

    pairs = list(zip(masks(device), masks("cpu"), strict=True))
    found = [off(run(c, None, x, device=device), by_rows(c, None, y.mask)) for x, y in pairs[some]]
    cu_q = torch.tensor([0, 0, 1, 6, 7, 7, 12], dtype=torch.int32)
    q = torch.randn(1, 6, 12, 16).to(dtype)
    packed = run(c._replace(q=q), None, pairs[2][0], cu_q=cu_q, max_q=5, device=device)
    plain = run(c._replace(q=q), None, pairs[2][1].mask, cu_q=cu_q, max_q=5, device=device)
    return max(*found, off(packed, [x.cpu() for x in plain]), _unread(dtype, device))


def _unread(dtype: torch.dtype, device: str) -> float:
    """NaN on pages that nobody has chosen is not read."""
    c = caches([70, 33], 4, 2, page=8, dtype=dtype)
    lists = torch.tensor([[[[0, 7, -1]]], [[[3, 1, 2]]]], device=device)
    mask = hw.top_k_blocks(lists, 8, 1, c.page_table.shape[1] * 8)
    k = c.k.clone()
    for row, pages in enumerate(lists.flatten(1).tolist()):
        for n in set(range(c.page_table.shape[1])) - set(pages):
            if c.page_table[row, n] >= 0:
                k[c.page_table[row, n]] = torch.nan
    right = by_rows(c, None, hw.top_k_blocks(lists.cpu(), 8, 1, c.page_table.shape[1] * 8).mask)
    return off(run(c._replace(k=k), None, mask, device=device), right)


def groups(group: int, dtype: torch.dtype, device: str = "cpu") -> float:
    """Rows of a tile are queries of all heads of a group."""
    c = caches([70, 3], 2 * group, 2, q_len=2, page=64, d=16, dtype=dtype)
    return off(run(c, mask=hw.causal(), device=device), by_rows(c, mask=hw.causal()))


def strides(dtype: torch.dtype, device: str = "cpu") -> float:
    """No pages, heads last in memory, and rows that no wide load can read."""
    c = caches([65, 9], 4, 2, page=16, d=20, dtype=dtype)
    right = by_rows(c)
    k, v = c.contiguous()
    made = [inference.attention_with_stats(
        *[x.to(device) for x in (c.q, k, v)], lengths=c.lengths.to(device), backend="triton"
    )]  # fmt: skip
    last = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)
    made.append(run(c._replace(k=last(c.k), v=last(c.v)), device=device))
    apart = torch.full((*c.k.shape[:3], 27), torch.nan, dtype=dtype, device=device)
    apart[..., 3:23] = c.k
    made.append(run(c._replace(k=apart[..., 3:23]), device=device))
    return max(off(x, right) for x in made)


def packed(dtype: torch.dtype, device: str = "cpu") -> float:
    """A chunk of a prompt, a row without queries and one that decodes, in one call; tokens of no
    row get 0."""
    mask = hw.causal() & hw.sliding_window(50)
    cu_q = torch.tensor([0, 20, 20, 21, 24], dtype=torch.int32)
    c = caches([64, 30, 90, 3], 4, 2, page=16, dtype=dtype)
    q = torch.randn(1, 4, 30, 16).to(dtype)
    made = run(c._replace(q=q), mask=mask, cu_q=cu_q, max_q=20, device=device)
    out, lse, top = (x.cpu() for x in made)
    assert not out[:, :, 24:].any()
    assert (lse[:, :, 24:] == -torch.inf).all()
    assert (top[1] == -torch.inf).all()
    worst = 0.0
    for row in (0, 2, 3):
        i, one = slice(*cu_q[row : row + 2]), slice(row, row + 1)
        own = Caches(q[:, :, i], c.k, c.v, c.lengths[one], c.page_table, c.keys[one], c.values[one])
        worst = max(worst, off((out[:, :, i], lse[:, :, i], top[one]), by_rows(own, mask=mask)))
    return worst


def float8(dtype: torch.dtype, device: str = "cpu", stored: torch.dtype = E4M3) -> float:
    """A cache of one byte per number, with scales for every row and head."""
    c = caches([300, 17], 4, 2, page=64, d=16)
    k_scale, v_scale = torch.rand(2, 2) + 0.5, torch.rand(2) + 0.5
    eight = c._replace(q=c.q.to(dtype), k=c.k.to(stored), v=c.v.to(stored))
    scaled = lambda x, s: [y.to(stored).float() * s[n][:, None, None] for n, y in enumerate(x)]
    right = by_rows(c._replace(
        q=eight.q.float(), keys=scaled(c.keys, k_scale),
        values=scaled(c.values, v_scale.expand(2, 2)),
    ))  # fmt: skip
    return off(run(eight, k_scale=k_scale, v_scale=v_scale, device=device), right)


def latent(heads: int, dtype: torch.dtype, device: str = "cpu") -> float:
    """MLA: v is the first columns of k, which are read once."""
    c = caches([40, 7], heads, 1, page=16, d=576, dtype=dtype)
    k = c.k.to(device)
    c = c._replace(k=k, v=k[..., :512], values=[x[..., :512] for x in c.keys])
    return off(run(c, scale=0.02, device=device), by_rows(c, scale=0.02))


def lengths_change(dtype: torch.dtype, device: str = "cpu") -> float:
    """The same launch on other lengths, as in a CUDA graph."""
    c, worst = caches([33, 64, 2], 4, 2, page=16, dtype=dtype), 0.0
    ends = torch.tensor([40, 40, 40])
    mask, right = [hw.causal() & hw.padding(ends.to(where)) for where in (device, "cpu")]
    for lengths in ([33, 64, 2], [1, 0, 1], [17, 63, 2]):
        c.lengths.copy_(torch.tensor(lengths))
        worst = max(
            worst, off(run(c, mask=mask, device=device), by_rows(cut(c, lengths), mask=right))
        )
    return worst


def cut(c: Caches, lengths: list[int]) -> Caches:
    """The first keys of every row."""
    keys, values = (
        [x[:, :, :n] for x, n in zip(of, lengths, strict=True)] for of in (c.keys, c.values)
    )
    return c._replace(keys=keys, values=values)


def placement(dtype: torch.dtype, device: str = "cpu") -> float:
    """Where pages lie changes no bit, and entries after a row's last page may be anything."""
    c = caches([65, 200], 4, 2, page=16, dtype=dtype)
    order = torch.randperm(len(c.k))
    at = order.argsort()
    table = torch.where(c.page_table < 0, 10_000, at[c.page_table.clamp(min=0)])
    moved = c._replace(k=c.k[order], v=c.v[order], page_table=table.int())
    pairs = zip(run(c, device=device), run(moved, device=device), strict=True)
    return 0.0 if all(torch.equal(x, y) for x, y in pairs) else torch.inf
