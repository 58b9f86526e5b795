"""FlashAttention-4's functions (`flash_attn.cute`), on every device and in every dtype.

    from headway.compat.flash4 import flash_attn_func, flash_attn_varlen_func

`score_mod` and `mask_mod` are Headway's: functions of PyTorch's ops, differentiated here, which
capture what they read. FlashAttention-4's own, in CuTe, are refused.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from .errors import CallError, NotSupported
from .flash_attend import attend, joined, side_of
from .flash_cache import flash_attn_combine as flash_attn_combine
from .flash_pages import attend_rows
from .flash_parts import (
    FLASH_4,
    FlashOptions,
    Window,
    check_axes,
    check_tuning,
    flag,
    function_of,
    limits_of_signed,
    options_of,
    tensor_or_none,
)  # fmt: skip
from .flex_lists import block_pair
from .flex_mask import BlockMask, as_tiles

_DENSE = "(b, length, heads, width)"
_PACKED = "(total, heads, width)"


class BlockSparseTensorsTorch(NamedTuple):
    """The blocks of keys for every block of queries: partial ones, in which `mask_mod` decides
    (`mask_block_*`), and full ones (`full_block_*`).

    Counts are `(b or 1, heads or 1, rows)`, indices `(b or 1, heads or 1, rows, columns)`.
    `block_size` is `(queries, keys)`; None is (128, 128).
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_block_idx_offsets: Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: list | None = None,
    aux_scalars: tuple | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return attention, with the signature of FlashAttention-4.

    **Arguments:** `q` `(b, q_len, hq, d)`, `k` `(b, kv_len, hk, d)`, `v` `(b, kv_len, hk, dv)`, the
    other names of `headway.compat.flash.flash_attn_func`, and

    - `qv`: `(b, q_len, hq, dv)`; adds `qv · v` to q · k. A `softmax_scale` of None is then
      `1 / sqrt(d + dv)`. k and v are copied side by side. q and k may be None.
    - `window_size`: None is no limit, and a negative number is a limit beyond the diagonal. As in
      the original, a window that holds no key at all is ignored.
    - `score_mod`: `(score, b, h, q_idx, kv_idx) -> score`; not with `softcap`.
    - `mask_mod`: `(b, h, q_idx, kv_idx) -> bool`. True: the query attends to the key. It is refused
      with `causal` or a window, which the original ignores without an error.
    - `block_sparse_tensors`: a `BlockSparseTensorsTorch`, Headway's or the original's. The lists of
      the backward follow from it, so `block_sparse_tensors_bwd` is not read.
    - `score_mod_bwd`, `aux_tensors`, `aux_scalars`, `gather_kv_indices`: refused by name.
    - `num_splits`, `pack_gqa`: accepted without effect. Headway chooses how to cut the work.

    **Returns:** `(out, lse)`. out is `(b, q_len, hq, dv)`, contiguous. lse is `(b, hq, q_len)`, or
    `(b, q_len, hq)` with `qv` and where k is v, 512 wide. It is differentiable, and None unless you
    pass `return_lse` or something is trained.

    **Raises:** a `RuntimeError` that is also an `ArgumentError`; `NotImplementedError` for what
    only the original's kernels have.
    """
    q, k, qv, heads_last = _of_latent(q, k, v, qv)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_axes(name, x, _DENSE)
    check_tuning(FLASH_4, num_splits, pack_gqa)
    _refuse(
        gather_kv_indices=gather_kv_indices, score_mod_bwd=score_mod_bwd, aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
    )  # fmt: skip
    options = _options(
        softmax_scale, causal, window_size, learnable_sink, softcap, deterministic, score_mod,
        mask_mod, return_lse,
    )  # fmt: skip
    if block_sparse_tensors is not None:
        options = _with_blocks(options, block_sparse_tensors, q, k)
    elif block_sparse_tensors_bwd is not None:
        raise CallError("block_sparse_tensors_bwd goes with block_sparse_tensors")
    options = _with_lse(options, q, k, v, qv)
    out, lse, _ = attend(*joined(q, k, v, tensor_or_none("qv", qv, FLASH_4)), options)
    return out, lse.mT if lse is not None and heads_last else lse


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list | None = None,
    aux_scalars: tuple | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return `flash_attn_func` of sequences, packed with offsets or padded without.

    **Arguments:** as `flash_attn_func`, and

    - `q`: `(total_q, hq, d)` with `cu_seqlens_q`, else `(sequences, q_len, hq, d)`; likewise k and
      v with `cu_seqlens_k`. With `page_table`, int32 `(sequences, max_pages)`, k and v are pages,
      `(pages, page, hk, ·)`, full unless `seqused_k` says how many keys there are.
    - `seqused_q`, `seqused_k`: int `(sequences,)`, the number of valid tokens per sequence.
    - `max_seqlen_q`, `max_seqlen_k`, `min_seqlen_k`: the longest and the shortest sequence. They
      are not needed.
    - `score_mod`, `mask_mod`: b is the number of the sequence, and positions count from its start.
    - `scheduler_metadata`, `seqlen_k_per_split`, `disable_scheduler_metadata`: accepted without
      effect. Headway chooses how to cut the work.

    **Returns:** `(out, lse)`. out has the layout of q. lse is `(hq, total_q)`, or
    `(sequences, hq, q_len)` if q is padded. Queries that are not valid get 0.

    **Raises:** as `flash_attn_func`.
    """
    q, k, qv, heads_last = _of_latent(q, k, v, qv)
    axes = (_PACKED, _DENSE) if page_table is None else ("(pages, page, heads, width)",)
    check_axes("q", q, _PACKED, _DENSE)
    for name, x in (("k", k), ("v", v)):
        check_axes(name, x, *axes)
    check_tuning(FLASH_4, num_splits, pack_gqa)
    _refuse(
        gather_kv_indices=gather_kv_indices, score_mod_bwd=score_mod_bwd, aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    if page_table is not None and cu_seqlens_k is not None:
        raise CallError("page_table goes with seqused_k, not with cu_seqlens_k")
    options = _options(
        softmax_scale, causal, window_size, learnable_sink, softcap, deterministic, score_mod,
        mask_mod, return_lse,
    )  # fmt: skip
    options = _with_lse(options, q, k, v, qv)
    q, k, v = joined(q, k, v, tensor_or_none("qv", qv, FLASH_4))
    q_side = side_of("q", q, cu_seqlens_q, seqused_q, max_seqlen_q)
    out, lse, _ = attend_rows(
        q, k, v, q_side, (cu_seqlens_k, seqused_k, max_seqlen_k), page_table, options
    )
    return out, lse.mT if lse is not None and heads_last else lse


def get_scheduler_metadata(
    max_seqlen_q: int,
    max_seqlen_k: int,
    nheads: int,
    nheads_kv: int,
    headdim: int,
    num_splits: int,
    headdim_v: int | None = None,
    pack_gqa: int | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqlen_k_new: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqlen_k_per_split: int | None = None,
) -> None:
    """Return None, to pass as `scheduler_metadata`. Headway's kernels read the lengths when they
    run."""


_INSTEAD = {
    "gather_kv_indices": "keys listed for every query are a mask here: pass mask_mod, or "
    "headway.top_k_blocks for blocks of them",
    "score_mod_bwd": "score_mod is differentiated here; leave it out",
    "aux_tensors": "let score_mod and mask_mod capture the tensors that they read",
    "aux_scalars": "let score_mod and mask_mod capture the numbers that they read",
    "block_sparse_tensors": "of packed sequences they are not supported; pass their mask as "
    "mask_mod",
}


def _refuse(**arguments: Any) -> None:
    """Refuse what has no meaning here."""
    for name, x in arguments.items():
        if x is not None:
            raise NotSupported(f"{name}: {_INSTEAD[name]}")


def _options(
    scale: Any, causal: Any, window: Any, sink: Any, softcap: Any, deterministic: Any,
    score_mod: Any, mask_mod: Any, want_lse: Any,
) -> FlashOptions:  # fmt: skip
    options = options_of(
        FLASH_4, scale, causal, window, softcap, deterministic, limits=limits_of_signed,
        sink=tensor_or_none("learnable_sink", sink, FLASH_4),
        score=function_of("score_mod", score_mod, "score, b, h, q_idx, kv_idx"),
        mask=function_of("mask_mod", mask_mod, "b, h, q_idx, kv_idx"),
        want_lse=flag("return_lse", want_lse, FLASH_4),
    )  # fmt: skip
    if options.softcap and options.score is not None:
        raise CallError("softcap and score_mod cannot be used together")
    if options.mask is not None and options.limits != (None, None):
        raise CallError(
            "mask_mod together with causal or window_size: the original drops the latter; say both "
            "in mask_mod, as in headway.causal() & mask"
        )
    return options


def _of_latent(q: Any, k: Any, v: Any, qv: Any) -> tuple[Any, Any, Any, bool]:
    """Return q, k and qv, where q and k are None those of the latent cache v alone, and whether lse
    has heads last: the original has it so over a latent cache."""
    if q is None and k is None and qv is not None:
        return qv, v, None, True
    shared = k is v and isinstance(v, Tensor) and v.shape[-1] == _LATENT_WIDTH
    return q, k, qv, qv is not None or shared


_LATENT_WIDTH = 512


def _with_lse(options: FlashOptions, *inputs: Any) -> FlashOptions:
    """Return the options with the log-sum-exp, where something is trained, as in the original."""
    trained = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in inputs
    )
    return options._replace(want_lse=options.want_lse or trained)


def _with_blocks(options: FlashOptions, blocks: Any, q: Tensor, k: Tensor) -> FlashOptions:
    """Return the options with the blocks as their mask."""
    if options.limits != (None, None):
        raise CallError(
            "block_sparse_tensors together with causal or window_size: blocks and mask_mod say "
            "which keys are seen; leave causal and window_size out"
        )
    if not hasattr(blocks, "mask_block_cnt"):
        raise CallError(
            f"block_sparse_tensors must be a BlockSparseTensorsTorch, got {type(blocks).__name__}"
        )
    if getattr(blocks, "cu_total_m_blocks", None) is not None:
        raise NotSupported(f"block_sparse_tensors: {_INSTEAD['block_sparse_tensors']}")
    size = block_pair(blocks.block_size or 128)
    rows = -(-q.shape[1] // size[0])
    if blocks.mask_block_cnt.shape[-1] != rows:
        raise CallError(
            f"block_sparse_tensors has {blocks.mask_block_cnt.shape[-1]} rows of blocks; with "
            f"block_size={size} {q.shape[1]} queries have {rows}"
        )
    try:
        tiles = as_tiles(
            BlockMask.from_kv_blocks(
                blocks.mask_block_cnt, blocks.mask_block_idx, blocks.full_block_cnt,
                blocks.full_block_idx, size, options.mask, (q.shape[1], k.shape[1]),
            )
        )  # fmt: skip
    except ArgumentError as error:
        raise CallError(f"block_sparse_tensors: {error}") from error
    return options._replace(blocks=tiles, mask=None)
