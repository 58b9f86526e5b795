"""FlashAttention's functions: `(batch, length, heads, width)`, causal aligned bottom-right.

    from headway.compat.flash import flash_attn_func, flash_attn_varlen_func

The signatures are flash-attn 2's, with FlashAttention-4's `learnable_sink` as a keyword.
`headway.compat.flash3` and `flash4` have the later ones. Beyond the original: any dtype, width and
device, gradients of `alibi_slopes` and sinks, and a differentiable log-sum-exp (flash-attn 2 and 3
drop its gradient without an error).
"""

from typing import Any

from torch import Tensor

from .errors import NotSupported
from .flash_attend import attend, side_of
from .flash_cache import flash_attn_combine as flash_attn_combine
from .flash_cache import flash_attn_with_kvcache as flash_attn_with_kvcache
from .flash_pages import attend_rows
from .flash_parts import FLASH_2, FlashOptions, Window, check_axes, flag, options_of, unpack

_DENSE = "(b, length, heads, width)"
_PACKED = "(total, heads, width)"


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
    """Return attention, with the signature of flash-attn 2.

    **Arguments:**

    - `q`, `k`, `v`: `(b, q_len, hq, d)`, `(b, kv_len, hk, d)` and `(b, kv_len, hk, dv)`.
    - `dropout_p`: the probability of dropping a weight. Pass 0.0 in evaluation.
    - `softmax_scale`: the factor of the logits. None: `1/sqrt(d)`.
    - `causal`: a query attends to keys up to its own position. The last query is aligned with the
      last key (bottom-right).
    - `window_size`: `(left, right)` keys around each query's diagonal. A negative number or None
      is no limit.
    - `softcap`: caps logits by `softcap · tanh(logit / softcap)`. 0.0 is off.
    - `alibi_slopes`: `(hq,)` or `(b, hq)`; adds `-slope · |i + kv_len - q_len - j|`.
    - `deterministic`: gradients have the same bits in every run.
    - `return_attn_probs`: also return the log-sum-exp `(b, hq, q_len)`, differentiable, and None
      in place of the probabilities, which are never computed. It is refused with dropout.
    - `learnable_sink`: `(hq,)`, a logit per head that joins the softmax and has no value.

    **Returns:** `(b, q_len, hq, dv)`, contiguous. With `return_attn_probs`, `(out, lse, None)`.

    **Raises:** a `RuntimeError` that is also an `ArgumentError`.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_axes(name, x, _DENSE)
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, learnable_sink,
    )  # fmt: skip
    out, lse, _ = attend(q, k, v, options)
    return (out, lse, None) if options.want_lse else out


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
    """Return `flash_attn_func` of `qkv` `(b, length, 3, h, d)`."""
    q, k, v = unpack("qkv", qkv, 3, "(b, length, 3, heads, width)")
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
    """Return `flash_attn_func` of `q` `(b, q_len, hq, d)` and `kv` `(b, kv_len, 2, hk, d)`."""
    k, v = unpack("kv", kv, 2, "(b, length, 2, heads, width)")
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
    """Return attention inside of packed sequences (varlen), with flash-attn 2's signature.

    Sequence n has the queries `q[cu_seqlens_q[n]:cu_seqlens_q[n + 1]]`, and keys likewise. It
    attends to itself alone, as in `flash_attn_func`. Tiles without pairs are skipped.

    **Arguments:** as `flash_attn_func`, and

    - `q`, `k`, `v`: `(total_q, hq, d)`, `(total_k, hk, d)` and `(total_k, hk, dv)`, no padding.
    - `cu_seqlens_q`, `cu_seqlens_k`: int `(sequences + 1,)`, from 0 to at most the totals. You may
      write to them between replays of a CUDA graph, whose calls visit every tile that other offsets
      may need. Where keys are packed as queries are, pass one tensor for both: kernels then read
      plain positions.
    - `max_seqlen_q`, `max_seqlen_k`: the longest sequence. They are not needed, but checked on the
      CPU.
    - `block_table`: int32 `(sequences, max_pages)`. k and v are then pages, `(pages, page, hk, ·)`,
      and sequence n has `cu_seqlens_k[n + 1] - cu_seqlens_k[n]` keys. For training, the pages are
      copied.
    - `alibi_slopes`: `(hq,)` or `(sequences, hq)`.

    **Returns:** `(total_q, hq, dv)`. With `return_attn_probs`, `(out, lse, None)`, lse
    `(hq, total_q)`. Tokens after the last sequence get 0.

    **Raises:** as `flash_attn_func`.
    """
    check_axes("q", q, _PACKED)
    for name, x in (("k", k), ("v", v)):
        check_axes(name, x, _PACKED if block_table is None else "(pages, page, heads, width)")
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, learnable_sink,
    )  # fmt: skip
    q_side = side_of("q", q, cu_seqlens_q, None, max_seqlen_q)
    out, lse, _ = attend_rows(
        q, k, v, q_side, (cu_seqlens_k, None, max_seqlen_k), block_table, options
    )
    return (out, lse, None) if options.want_lse else out


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Return `flash_attn_varlen_func` of `qkv` `(total, 3, h, d)`."""
    q, k, v = unpack("qkv", qkv, 3, "(total, 3, heads, width)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
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
) -> Any:
    """Return `flash_attn_varlen_func` of `q` `(total_q, hq, d)` and `kv` `(total_k, 2, hk, d)`."""
    k, v = unpack("kv", kv, 2, "(total, 2, heads, width)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _options(
    dropout: Any, scale: Any, causal: Any, window: Any, softcap: Any, slopes: Any,
    deterministic: Any, probabilities: Any, sink: Any,
) -> FlashOptions:  # fmt: skip
    options = options_of(
        FLASH_2, scale, causal, window, softcap, deterministic, dropout, slopes=slopes, sink=sink,
        want_lse=flag("return_attn_probs", probabilities),
    )  # fmt: skip
    if options.want_lse and options.dropout:
        raise NotSupported(
            "return_attn_probs with dropout asks for the dropped probabilities, which are never "
            "made; the log-sum-exp is the same with dropout_p=0.0"
        )
    return options
