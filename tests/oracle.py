"""The definition of attention, dense, in plain torch: what every backend is held against.

Nothing of the library is used here. A score function is called as users think of it, once per pair,
on numbers (`torch.vmap` does it for all pairs at once), and only for pairs that are kept; a mask is
called on index tensors that broadcast; gradients are PyTorch's autograd on these lines. In float64
this is the truth. In another dtype it is what plain PyTorch makes of the same formulas (products in
that dtype, the softmax in float32), whose error is the yardstick for everyone else.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Dense(NamedTuple):
    out: Tensor  # (b, hq, q_len, dv)
    lse: Tensor  # (b, hq, q_len)
    max_logit: Tensor  # (b, hq)
    entropy: Tensor | None = None  # (b, hq, q_len), if it is asked for


class Pairs(NamedTuple):
    """The square of pairs: (b, hq, q_len, kv_len) each."""

    s: Tensor  # logits: scale * q kᵀ
    t: Tensor  # scores, -inf where a pair is not kept
    kept: Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor,
    score: Callable | None = None, mask: Callable | None = None, *,
    scale: float | None = None, sink: Tensor | None = None,
    keep: Tensor | None = None, dropout: float = 0.0, factors: torch.dtype | None = None,
    entropy: bool = False,
) -> Dense:  # fmt: skip
    """out, lse, max_logit and, if asked for, entropy, as DESIGN.md section 1 has them,
    differentiable by autograd.

    With `factors`, P and dS go into their products rounded to it, as they do on tensor cores.
    """
    pairs = scores(q, k, score, mask, scale)
    if factors is not None and pairs.s.requires_grad:
        pairs.s.register_hook(lambda ds: ds.to(factors).to(ds.dtype))
    p, lse = softmax(pairs.t, sink)
    disorder = -p_log_p(pairs.t, lse, sink).sum(-1) if entropy else None
    if keep is not None:
        p = p * factor(keep, dropout, p.dtype)
    if factors is not None:
        p = p + (p.to(factors) - p).detach()
    logits = pairs.s.detach().masked_fill(~pairs.kept, -math.inf).flatten(2)
    largest = logits.amax(2) if logits.shape[2] else logits.new_full(logits.shape[:2], -math.inf)
    return Dense(p.to(v.dtype) @ to_heads(v, q.shape[1]), lse, largest, disorder)


def scores(
    q: Tensor, k: Tensor, score: Callable | None, mask: Callable | None, scale: float | None
) -> Pairs:
    (b, hq, q_len, d), kv_len = q.shape, k.shape[2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = 1 / math.sqrt(d or 1) if scale is None else scale
    s = scale * (q @ to_heads(k, hq).mT).to(dtype)
    kept = torch.ones_like(s, dtype=torch.bool)
    if mask is not None:
        kept = kept & mask(*grid(b, hq, q_len, kv_len, q.device))
    return Pairs(s, *through(score, s, kept))


def through(score: Callable | None, s: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """T, -inf where not kept, and what is kept in the end: T may be -inf too."""
    if score is None:
        t = s.masked_fill(~kept, -math.inf)
    else:
        t = torch.full_like(s, -math.inf)
        where = kept.nonzero(as_tuple=True)
        if len(where[0]):
            if getattr(score, "on_tensors", False):  # PyTorch itself: vmap rounds constants
                new = torch.as_tensor(score(s[where], *where))
            else:
                with IndexNumbers():
                    new = torch.vmap(lambda *pair: torch.as_tensor(score(*pair)))(s[where], *where)
            t = t.index_put(where, new.to(s.dtype))
    return t, kept & (t > -math.inf)


def softmax(t: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """P and lse. A row that sees nothing has P = 0 and lse = -inf."""
    every = t
    if sink is not None:
        one = sink.to(t.dtype)[:, None, None].expand(t.shape[0], -1, t.shape[2], 1)
        every = torch.cat([t, one], -1)
    nothing = (every == -math.inf).all(-1)
    lse = torch.logsumexp(every.masked_fill(nothing[..., None], 0.0), -1)
    p = (t - lse[..., None]).exp()
    return p, lse.masked_fill(nothing, -math.inf)


def p_log_p(t: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
    """P log P of every pair, and behind them of the sink; 0 where P is."""
    if sink is not None:
        t = torch.cat([t, sink.to(t.dtype)[:, None, None].expand(*t.shape[:3], 1)], -1)
    log_p = t - lse.masked_fill(lse == -math.inf, 0.0)[..., None]
    log_p = log_p.masked_fill(t == -math.inf, 0.0)
    return (log_p.exp() * log_p).masked_fill(t == -math.inf, 0.0)


def magnitudes(
    q: Tensor, k: Tensor, v: Tensor,
    score: Callable | None, mask: Callable | None, scale: float | None, sink: Tensor | None,
    keep: Tensor | None, dropout: float, dout: Tensor, dlse: Tensor | None,
    learned: dict[str, Tensor], dentropy: Tensor | None = None,
) -> dict[str, float]:  # fmt: skip
    """The largest sum of absolute terms behind each result: one rounding of it, times the dtype's
    epsilon, is an error that every algorithm may make, even where the exact result is 0."""
    hq, hk, d = q.shape[1], k.shape[1], q.shape[3]
    scale = 1 / math.sqrt(d) if scale is None else scale
    with torch.enable_grad():
        s = scores(q.detach(), k.detach(), None, mask, scale)
        leaf = s.s.detach().requires_grad_()
        t, kept = through(score, leaf, s.kept)
        on = [leaf, *learned.values()]
        slope = None
        if t.requires_grad:
            total = t.masked_fill(~kept, 0).sum()
            slope, *_ = torch.autograd.grad(total, on, allow_unused=True, retain_graph=True)
        slope = torch.zeros_like(leaf) if slope is None else slope.abs()
    with torch.no_grad():
        p, lse = softmax(t, sink)
        live = factor(keep, dropout, p.dtype) if keep is not None else torch.ones_like(p)
        vs, ks = to_heads(v, hq).abs(), to_heads(k, hq).abs()
        size = lambda x: x.abs().max().item() if x.numel() else 0.0
        over_group = lambda x: x.unflatten(1, (hk, hq // hk)).sum(2)
        out = (p * live) @ vs
        delta = (dout.abs() * out).sum(-1) + (0.0 if dlse is None else dlse.abs())
        logs = -p_log_p(t, lse, sink)
        if dentropy is not None:
            delta = delta + (dentropy * logs.sum(-1)).abs()
        dt = p * ((dout.abs() @ vs.mT) * live + delta[..., None])
        if dentropy is not None:
            dt = dt + dentropy.abs()[..., None] * logs[..., : dt.shape[-1]].abs()
        ds = abs(scale) * dt * slope
        sizes = {
            "out": size(out),
            "lse": size(lse.masked_fill(lse == -math.inf, 0)),
            "max_logit": size(leaf),
            "entropy": size(lse.masked_fill(lse == -math.inf, 0)) + size(leaf),
            "q": size(ds @ ks),
            "k": size(over_group(ds.mT @ q.abs())),
            "v": size(over_group((p * live).mT @ dout.abs())),
        }
        if sink is not None:
            weight = (sink[:, None] - lse).exp()
            share = weight * delta
            if dentropy is not None:
                share = share + dentropy.abs() * logs[..., -1].abs()
            sizes["sink"] = size(share.sum((0, 2)))
        # An error of a score is one of exp(score): relative, of the size of the scores.
        spread = 1 + max(sizes["max_logit"], size(t.masked_fill(~kept, 0)))
        sizes |= {n: spread * sizes[n] for n in ("out", "q", "k", "v", "sink") if n in sizes}
    if learned and t.requires_grad:
        by = torch.autograd.grad(t, list(learned.values()), dt, allow_unused=True)
        sizes |= {n: 0.0 if g is None else size(g) for n, g in zip(learned, by, strict=True)}
    return dict.fromkeys(learned, 0.0) | sizes


def grid(b: int, h: int, q_len: int, kv_len: int, device: torch.device | str = "cpu") -> tuple:
    """b, h, q_idx, kv_idx as int64 tensors that broadcast to the square of pairs."""
    sizes = (b, h, q_len, kv_len)
    return tuple(
        torch.arange(n, device=device).view([-1 if dim == at else 1 for dim in range(4)])
        for at, n in enumerate(sizes)
    )


def to_heads(x: Tensor, hq: int) -> Tensor:
    """Query head h reads key head h // (hq // hk)."""
    return x[:, [h // (hq // x.shape[1]) for h in range(hq)]]


def factor(keep: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
    """keep / (1 - p), of the p that is asked of 15 bits; with p = 1 nothing is kept."""
    return keep.to(dtype) / (1 - threshold(dropout) / 2**15 if dropout < 1 else 1.0)


class IndexNumbers(TorchFunctionMode):
    """`table[h, 2]` with numbers that are tensors: an index, not a conversion to Python."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__getitem__:
            table, index = args
            index = index if isinstance(index, tuple) else (index,)
            return torch.ops.aten.index(table, [torch.as_tensor(i) for i in index])
        return func(*args, **(kwargs or {}))


# -- dropout, from the paper (Salmon et al. 2011, section 3.3), in unsigned integers ---------------


def philox4x32(counter: tuple, key: tuple, rounds: int) -> tuple[np.ndarray, ...]:
    """Four 32-bit words (in uint64 arrays) from four counters and two keys."""
    c, (k0, k1) = [np.asarray(x, dtype=np.uint64) for x in counter], map(np.uint64, key)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(rounds):
        left, right = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [right >> half ^ c[1] ^ k0, right & low, left >> half ^ c[3] ^ k1, left & low]
        k0 = k0 + np.uint64(0x9E3779B9) & low
        k1 = k1 + np.uint64(0xBB67AE85) & low
    return tuple(c)


def keep(p: float, seed: int, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Which pairs survive dropout: key = seed (low, high word); counter = (i, j, h, b), where rows 8
    apart within 16, columns 8 apart within 16 and an even column and the next one share theirs;
    which of its 8 shares of 15 bits (those of 16 but the first) says the columns' parity, then whether the column, then the
    row is one of the last 8."""
    at = [np.asarray(x.cpu().numpy(), dtype=np.uint64) for x in (q_idx, kv_idx, h, b)]
    i, j, h, b = np.broadcast_arrays(*at)
    counter = i - i % 16 + i % 8, j - j % 16 + j % 8 - j % 2, h, b
    words = philox4x32(counter, (seed % 2**32, seed // 2**32), rounds=7)
    bits = [word // 2 ** (16 * n) % 2**15 for word in words for n in (0, 1)]
    share = (i % 16 // 8 * 4 + j % 16 // 8 * 2 + j % 2).astype(np.int64)
    return torch.from_numpy(np.choose(share, bits) >= np.uint64(threshold(p)))


def threshold(p: float) -> int:
    """p in units of 2^-15. What is not 0 or 1 does not become so."""
    nearest = round(p * 32768)
    return nearest if p in (0, 1) else 1 if nearest == 0 else 32767 if nearest == 32768 else nearest
