"""FlashAttention's functions: `(batch, length, heads, width)`, causal aligned bottom-right.

    from headway.compat.flash import flash_attn_func, flash_attn_varlen_func

Signatures of flash-attn 2, with FlashAttention-4's `learnable_sink` as a keyword. Beyond it: any
dtype, width and device, gradients of `alibi_slopes` and sinks, and a differentiable log-sum-exp
(flash-attn 2 and 3 drop its gradient in silence).
"""

from typing import Any

import torch
from torch import Tensor

from ..caches import TensorCache
from ..errors import ArgumentError
from ..mods import Mask
from ..mods import causal as lower_right
from ..mods.base import Both, MaskFn, Not, value
from ..run import run, run_out
from ..types import Request
from .errors import CallError, NotSupported
from .flash_cache import flash_attn_combine as flash_attn_combine
from .flash_cache import flash_attn_with_kvcache as flash_attn_with_kvcache
from .flash_parts import Window, Words, check_dense, heads_swapped, limits_of, score_of, words_of


@value
class span(Mask):
    """`first[i] <= j <= last[i]`: every query sees one stretch of keys."""

    first: Tensor
    last: Tensor

    def __call__(self, b, h, q_idx, kv_idx):
        return (kv_idx >= self.first[q_idx]) & (kv_idx <= self.last[q_idx])


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
) -> Any:
    """Attention over `q` `(b, q_len, hq, d)`, `k` `(b, kv_len, hk, d)`, `v` `(b, kv_len, hk, dv)`.

    **Arguments:**

    - `causal`: the last query sees the last key (bottom-right).
    - `window_size`: `(left, right)` keys around each query's diagonal; -1 or None means no limit.
    - `softcap`: `cap · tanh(score / cap)`; 0.0 is none.
    - `alibi_slopes`: `(hq,)` or `(b, hq)`; adds `-slope · |i + kv_len - q_len - j|`.
    - `deterministic`: bit-equal gradients run after run.
    - `return_attn_probs`: also return the log-sum-exp `(b, hq, q_len)`, differentiable, and None
      in place of the probabilities, which are never made (refused together with dropout).
    - `learnable_sink`: `(hq,)`, a logit that joins the softmax and has no value.

    **Returns:** `(b, q_len, hq, dv)`; with `return_attn_probs` `(out, lse, None)`.

    **Raises:** `RuntimeError` (also an `ArgumentError`).
    """
    _check((q, k, v), ("b", "length", "heads", "width"))
    words = words_of(dropout_p, softmax_scale, causal, softcap, deterministic, return_attn_probs)
    offset = k.shape[1] - q.shape[1]
    mask = _mask(limits_of(words.causal, window_size), offset)
    score = score_of(words.softcap, alibi_slopes, offset, q.shape[0], q.shape[2])
    out, lse = _attend(q, k, v, score, mask, learnable_sink, words)
    return out if lse is None else (out, lse, None)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of `qkv` `(b, length, 3, h, d)`."""
    q, k, v = _unpack("qkv", qkv, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of `q` `(b, q_len, hq, d)` and `kv` `(b, kv_len, 2, hk, d)`."""
    k, v = _unpack("kv", kv, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    learnable_sink: Tensor | None = None,
) -> Any:
    """Packed sequences: `q` `(total_q, hq, d)`, `k` and `v` `(total_k, hk, ·)`, nothing padded.

    Sequence n is `q[cu_seqlens_q[n]:cu_seqlens_q[n + 1]]` and likewise for keys; each attends to
    itself alone, as `flash_attn_func` would. Only tiles with pairs in them are visited.

    **Arguments:** as `flash_attn_func`, and

    - `cu_seqlens_q`, `cu_seqlens_k`: int `(sequences + 1,)`, from 0 to the totals. You may write to
      them between replays of a CUDA graph, whose calls visit every tile.
    - `max_seqlen_q`, `max_seqlen_k`: no sequence is longer; not needed, but checked on CPU.
    - `block_table`: paged keys; refused.
    - `alibi_slopes`: `(hq,)`; one set per sequence is refused.

    **Returns:** `(total_q, hq, dv)`; with `return_attn_probs` `(out, lse, None)`, lse
    `(hq, total_q)`.
    """
    if block_table is not None:
        raise NotSupported("block_table: paged keys are not supported; pass k and v packed")
    _check((q, k, v), ("total", "heads", "width"))
    words = words_of(dropout_p, softmax_scale, causal, softcap, deterministic, return_attn_probs)
    if isinstance(alibi_slopes, Tensor) and alibi_slopes.dim() != 1:
        raise NotSupported("alibi_slopes per sequence are not supported; pass (heads,)")
    _check_offsets("q", cu_seqlens_q, q)
    _check_offsets("k", cu_seqlens_k, k)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise CallError(
            f"cu_seqlens_q {tuple(cu_seqlens_q.shape)} and cu_seqlens_k "
            f"{tuple(cu_seqlens_k.shape)} count different numbers of sequences"
        )
    limits = limits_of(words.causal, window_size)
    sizes = (q.shape[0], k.shape[0]), (max_seqlen_q, max_seqlen_k)
    mask, diagonal = _spans(cu_seqlens_q, cu_seqlens_k, *sizes, limits)
    score = score_of(words.softcap, alibi_slopes, diagonal, 1, q.shape[1])
    out, lse = _attend(q[None], k[None], v[None], score, mask, learnable_sink, words)
    return out[0] if lse is None else (out[0], lse[0], None)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, score: Any, mask: Any, sink: Tensor | None, words: Words
) -> tuple[Tensor, Tensor | None]:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    request = Request(
        q, k, v, score, mask, scale=words.scale, sink=sink, dropout=words.dropout,
        deterministic=words.deterministic,
    )  # fmt: skip
    try:
        out, lse = run(request)[:2] if words.want_lse else (run_out(request), None)
    except ArgumentError as error:
        raise CallError(f"{error}{heads_swapped(q, k, sink)}") from error
    return out.transpose(1, 2), lse


# -- masks and scores -----------------------------------------------------------------------------


def _mask(limits: tuple[int | None, int | None], offset: int) -> MaskFn | None:
    left, right = limits
    mask: MaskFn | None = None if right is None else lower_right(offset + right)
    if left is not None:
        in_window = Not(lower_right(offset - left - 1))
        mask = in_window if mask is None else Both(mask, in_window)
    return mask


def _stamp(offsets: Tensor) -> Any:
    """Return the offsets, where reading them waits for nothing or no writes are counted."""
    if offsets.is_cpu or offsets.is_inference():
        return offsets.tolist()
    return offsets._version


_known: TensorCache[tuple[Mask, Tensor]] = TensorCache(64, _stamp)


def _spans(
    cu_q: Tensor, cu_k: Tensor, totals: tuple[int, int], longest: tuple[int, int],
    limits: tuple[int | None, int | None],
) -> tuple[Mask, Tensor]:  # fmt: skip
    """Return the keys that each packed query sees, and the one on its diagonal, from a cache."""
    if torch.compiler.is_compiling():
        return _new_spans(cu_q, cu_k, totals[0], limits)

    def checked_spans() -> tuple[Mask, Tensor]:
        for name, offsets, total, most in zip("qk", (cu_q, cu_k), totals, longest, strict=True):
            if offsets.is_cpu:
                _check_lengths(name, offsets, total, most)
        with torch.inference_mode(False):  # fit to be saved for a backward, and to be cached
            return _new_spans(cu_q, cu_k, totals[0], limits)

    limits_checked = tuple(map(int, longest)) if cu_q.is_cpu else None
    return _known.of((cu_q, cu_k), (totals, limits_checked, limits), checked_spans)


def _new_spans(
    cu_q: Tensor, cu_k: Tensor, total_q: int, limits: tuple[int | None, int | None]
) -> tuple[Mask, Tensor]:
    cu_q, cu_k = cu_q.long(), cu_k.long()
    token = torch.arange(total_q, device=cu_q.device)
    n = torch.searchsorted(cu_q[1:].contiguous(), token, right=True).clamp(max=cu_q.shape[0] - 2)
    first_key, last_key = cu_k[n], cu_k[n + 1] - 1
    diagonal = token - cu_q[n + 1] + cu_k[n + 1]  # the last query of a sequence meets its last key
    left, right = limits
    if left is not None:
        first_key = torch.maximum(first_key, diagonal - left)
    if right is not None:
        last_key = torch.minimum(last_key, diagonal + right)
    # Queries after the last sequence see nothing.
    last_key = torch.where(token < cu_q[-1], last_key, -1)
    return span(first_key, last_key), diagonal


# -- checks ---------------------------------------------------------------------------------------


def _check(qkv: tuple, axes: tuple[str, ...]) -> None:
    for name, x in zip("qkv", qkv, strict=True):
        check_dense(**{name: x})
        if not isinstance(x, Tensor) or x.dim() != len(axes):
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise CallError(f"{name} must be ({', '.join(axes)}), got {got}")


def _check_offsets(name: str, offsets: Any, x: Tensor) -> None:
    if not isinstance(offsets, Tensor) or offsets.dim() != 1 or offsets.shape[0] < 2:
        raise CallError(f"cu_seqlens_{name} must be an int tensor (sequences + 1,)")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise CallError(f"cu_seqlens_{name} must be int32, got {offsets.dtype}")
    if offsets.device != x.device:
        raise CallError(f"cu_seqlens_{name} is on {offsets.device}, {name} on {x.device}")


def _check_lengths(name: str, offsets: Tensor, total: int, longest: int) -> None:
    lengths = offsets.diff()
    if int(offsets[0]) or int(offsets[-1]) != total or bool((lengths < 0).any()):
        raise CallError(
            f"cu_seqlens_{name} must rise from 0 to {total}, the length of {name}, got "
            f"{offsets.tolist() if len(offsets) < 12 else (int(offsets[0]), int(offsets[-1]))}"
        )
    if int(lengths.max()) > longest:
        raise CallError(
            f"max_seqlen_{name}={longest}, but the longest sequence has {int(lengths.max())}"
        )


def _unpack(name: str, x: Any, parts: int) -> tuple[Tensor, ...]:
    check_dense(**{name: x})
    if not isinstance(x, Tensor) or x.dim() != 5 or x.shape[2] != parts:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise CallError(f"{name} must be (b, length, {parts}, heads, width), got {got}")
    return x.unbind(2)
