"""flash-attn 3's functions (`flash_attn_interface`), on every device and in every dtype.

    from headway.compat.flash3 import flash_attn_func, flash_attn_varlen_func

What `headway.compat.flash` says of flash-attn 2's functions holds for these. Beyond the original:
gradients through `attention_chunk`, `qv`, scales and the log-sum-exp, and `learnable_sink`.
"""

from typing import Any

import torch
from torch import Tensor

from . import flash_cache
from .errors import CallError
from .flash_attend import attend, descaled, in_dtype_of, joined, side_of
from .flash_pages import attend_rows
from .flash_parts import (
    FLASH_3,
    FlashOptions,
    Window,
    check_axes,
    check_tuning,
    count,
    flag,
    options_of,
    unpack,
)

_DENSE = "(b, length, heads, width)"
_PACKED = "(total, heads, width)"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
) -> Any:
    """Return attention, with the signature of flash-attn 3.

    **Arguments:** `q` `(b, q_len, hq, d)`, `k` `(b, kv_len, hk, d)`, `v` `(b, kv_len, hk, dv)`, the
    other names of `headway.compat.flash.flash_attn_func`, and

    - `qv`: `(b, q_len, hq, dv)`; adds `qv · v` to q · k. A `softmax_scale` of None is then
      `1 / sqrt(d + dv)`. k and v are copied side by side.
    - `q_descale`, `k_descale`, `v_descale`: `(b, hk)`, multiply q, k and v. float8 is computed in
      float32, and out is then bfloat16.
    - `attention_chunk`: a query attends inside of its chunk of this many keys. 0 is off.
    - `num_splits`, `pack_gqa`, `sm_margin`: accepted without effect. Headway chooses how to cut the
      work.

    **Returns:** `(b, q_len, hq, dv)`, contiguous. With `return_attn_probs`, `(out, lse)`, lse
    `(b, hq, q_len)`, differentiable.

    **Raises:** a `RuntimeError` that is also an `ArgumentError`.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_axes(name, x, _DENSE)
    check_tuning(FLASH_3, num_splits, pack_gqa, sm_margin)
    options = _options(
        softmax_scale, causal, window_size, attention_chunk, softcap, deterministic,
        return_attn_probs, learnable_sink,
    )  # fmt: skip
    scales = q_descale, k_descale, v_descale
    tensors = descaled((q, k, v), scales)
    out, lse, _ = attend(*joined(*tensors, qv), options)
    out = in_dtype_of(q, out, *scales)
    return (out, lse) if options.want_lse else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Return `flash_attn_func` of `qkv` `(b, length, 3, h, d)`, or `(b, length, hq + 2 hk, d)` with
    `num_heads_q`."""
    if num_heads_q is None or (isinstance(qkv, Tensor) and qkv.dim() == 5):
        q, k, v = unpack("qkv", qkv, 3, "(b, length, 3, heads, width)")
    else:
        check_axes("qkv", qkv, "(b, length, hq + 2 hk, width)")
        hq = count("num_heads_q", num_heads_q)
        shared, odd = divmod(qkv.shape[2] - hq, 2)
        if hq == 0 or shared <= 0 or odd:
            raise CallError(
                f"num_heads_q={hq}: qkv {tuple(qkv.shape)} has {qkv.shape[2]} heads, of which hq "
                "are q's, and k and v have half of the others each"
            )
        q, k, v = qkv.split((hq, shared, shared), 2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, deterministic=deterministic, sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
) -> Any:
    """Return `flash_attn_func` of packed q `(total_q, hq, d)`, k and v `(total_k, hk, ·)`.

    **Arguments:** as `flash_attn_func` and `headway.compat.flash.flash_attn_varlen_func`, and

    - `seqused_q`, `seqused_k`: int `(sequences,)`, the number of valid tokens per sequence. A q or
      k without offsets (`cu_seqlens_q=None`) is padded: `(sequences, length, heads, width)`.

    **Returns:** out in the layout of q, contiguous. With `return_attn_probs`, `(out, lse)`, lse
    `(hq, total_q)`, or `(sequences, hq, q_len)` if q is padded. Queries that are not valid get 0.

    **Raises:** as `flash_attn_func`.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_axes(name, x, _PACKED, _DENSE)
    check_tuning(FLASH_3, num_splits, pack_gqa, sm_margin)
    options = _options(
        softmax_scale, causal, window_size, attention_chunk, softcap, deterministic,
        return_attn_probs, learnable_sink,
    )  # fmt: skip
    q_side = side_of("q", q, cu_seqlens_q, seqused_q, max_seqlen_q)
    k_side = side_of("k", k, cu_seqlens_k, seqused_k, max_seqlen_k)
    scales = q_descale, k_descale, v_descale
    tensors = descaled((q, k, v), scales, q_side.starts, k_side.starts)
    out, lse, _ = attend_rows(
        *joined(*tensors, qv), q_side, (cu_seqlens_k, seqused_k, max_seqlen_k), None, options
    )
    out = in_dtype_of(q, out, *scales)
    return (out, lse) if options.want_lse else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: Tensor | None = None,
) -> Any:
    """Return `headway.compat.flash.flash_attn_with_kvcache`, in flash-attn 3's argument order."""
    return flash_cache.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
        cache_leftpad, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        softcap=softcap, rotary_interleaved=rotary_interleaved, num_splits=num_splits,
        return_softmax_lse=return_softmax_lse, page_table=page_table, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens, qv=qv, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, attention_chunk=attention_chunk,
        scheduler_metadata=scheduler_metadata, pack_gqa=pack_gqa, sm_margin=sm_margin,
        learnable_sink=learnable_sink,
    )  # fmt: skip


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return `headway.compat.flash.flash_attn_combine`, in flash-attn 3's argument order."""
    return flash_cache.flash_attn_combine(out_partial, lse_partial, out, out_dtype)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """Return an empty int32 tensor to pass as `scheduler_metadata`. Headway's kernels need none:
    they read the lengths when they run."""
    return cache_seqlens.new_empty(0, dtype=torch.int32)


def _options(
    scale: Any, causal: Any, window: Any, chunk: Any, softcap: Any, deterministic: Any,
    want_lse: Any, sink: Any,
) -> FlashOptions:  # fmt: skip
    return options_of(
        FLASH_3, scale, causal, window, softcap, deterministic,
        chunk=count("attention_chunk", chunk), sink=sink,
        want_lse=flag("return_attn_probs", want_lse, FLASH_3),
    )  # fmt: skip
