"""The calls of all versions of FlashAttention, in the words of `flash_parts.FlashOptions`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, ModError
from ..mods import Mask
from ..mods import causal as lower_right
from ..mods.base import MaskFn, Not, composition, intersection, value
from ..packed import ArgumentNames, Side, pack, sequence_of_tokens
from ..run import run, run_out
from ..types import Request
from .errors import CallError, CallModError, NotSupported, as_call_error
from .flash_parts import FlashOptions, heads_swapped, score_of, shown

_NAMES = ArgumentNames("cu_seqlens_{}", "seqused_{}", "max_seqlen_{}")


class Results(NamedTuple):
    """Results of a call; those that were not asked for are None."""

    out: Tensor  # of q's layout
    lse: Tensor | None  # (b, heads, length) or (heads, tokens)
    max_logit: Tensor | None  # (b, heads) or (heads,)


@value
class same_chunk(Mask):
    """A query and a key in the same chunk of keys; the query stands at `i + offset`."""

    size: int
    offset: int

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx + self.offset) // self.size == kv_idx // self.size


def attend(q: Tensor, k: Tensor, v: Tensor, options: FlashOptions) -> Results:
    """Attend to whole sequences: q `(b, length, heads, width)`, the last query at the last key."""
    offset = k.shape[1] - q.shape[1]
    score = score_of(options.softcap, options.slopes, offset, q.shape[0], q.shape[2])
    mask = options.blocks
    if mask is None:
        mask = intersection(_within(options, offset), options.mask)
    return _run(_request(q, k, v, composition(score, options.score), mask, options), options)


def attend_sequences(
    q: Tensor, k: Tensor, v: Tensor, q_side: Side, k_side: Side, options: FlashOptions
) -> Results:
    """Attend inside of sequences: q `(tokens, heads, width)`, or padded `(b, length, heads,
    width)`, and likewise the keys. Queries that no sequence has get 0."""
    if k.shape[:-1] != v.shape[:-1]:
        raise CallError(f"k {tuple(k.shape)} and v {tuple(v.shape)} differ before their width")
    if options.blocks is not None:
        raise NotSupported(
            "block_sparse_tensors of packed or partly used sequences; pass their mask as mask_mod"
        )
    rows = q.shape[:-2]
    row = lambda x: x.flatten(0, -3)[None]
    request = _request(row(q), row(k), row(v), options.score, options.mask, options)
    packing = as_call_error(pack, q_side, k_side)
    request, aligned = as_call_error(packing.request, request), packing.aligned()
    score = score_of(options.softcap, options.slopes, 0, packing.sequences, q.shape[-2])
    request = request._replace(score=composition(aligned.score(score), request.score))
    if options.mask is None:  # which goes with no limits
        request = request._replace(mask=aligned.mask(_within(options, 0)))
    out, lse, max_logit = _run(request, options)
    out = out.view(*rows, *out.shape[2:])
    if lse is not None:
        lse = lse[0] if q.dim() == 3 else lse[0].unflatten(1, rows).transpose(0, 1)
    return Results(out, lse, None if max_logit is None else max_logit[0])


def side_of(
    name: str, x: Tensor, cu: Any, used: Any, longest: Any = None, names: ArgumentNames = _NAMES
) -> Side:
    """Return where the sequences of q or k lie: packed `(tokens, heads, width)`, or in rows."""
    packed = x.dim() == 3
    if (cu is None) == packed:
        raise CallError(
            f"{name} is {tuple(x.shape)}: packed, (tokens, heads, width), goes with "
            f"{names.starts.format(name)}, and (batch, length, heads, width) without"
        )
    if longest is not None and not torch.compiler.is_compiling():
        longest = int(longest)
    tokens, rows = (x.shape[0], None) if packed else (x.shape[0] * x.shape[1], x.shape[0])
    side = Side(name, tokens, x.device, cu, used, longest, rows, names)
    return as_call_error(side.checked)


def joined(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q with `qv`, and k with v, side by side: their product is q k + qv v."""
    if qv is None:
        return q, k, v
    if qv.shape[:-1] != q.shape[:-1] or qv.shape[-1] != v.shape[-1]:
        raise CallError(
            f"qv must be {(*q.shape[:-1], v.shape[-1])}, with q's heads and v's width, got "
            f"{tuple(qv.shape)}"
        )
    return torch.cat((q, qv), -1), torch.cat((k, v), -1), v


def in_dtype_of(q: Tensor, out: Tensor, *scales: Any) -> Tensor:
    """Return out in bfloat16 for a q in float8, and in q's dtype where scales widened it."""
    if _is_float8(q):
        return out.to(torch.bfloat16)
    return out if scales == (None,) * len(scales) else out.to(q.dtype)


def _is_float8(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype.itemsize == 1


def widened(x: Tensor) -> Tensor:
    """Return x, in float32 where it is float8."""
    return x.float() if _is_float8(x) else x


def descaled(
    tensors: tuple[Tensor, Tensor, Tensor], scales: tuple[Any, Any, Any],
    cu_q: Tensor | None = None, cu_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q, k and v times their scales `(rows, key heads)`, in float32 where there are any or
    the tensors are float8."""
    if scales == (None, None, None) and not any(map(_is_float8, tensors)):
        return tensors
    hk, scaled = tensors[1].shape[-2], []
    for name, x, scale, cu in zip("qkv", tensors, scales, (cu_q, cu_k, cu_k), strict=True):
        product = x.float()
        scaled.append(product if scale is None else product * scale_of(name, x, scale, hk, cu))
    return tuple(scaled)  # type: ignore[return-value]


def scale_of(name: str, x: Tensor, scale: Any, hk: int, cu: Tensor | None) -> Tensor:
    """Return the scale of every token and head of x from those of rows and key heads."""
    rows = x.shape[0] if cu is None else cu.shape[0] - 1
    if not isinstance(scale, Tensor) or tuple(scale.shape) != (rows, hk):
        raise CallError(f"{name}_descale must be ({rows}, {hk}), got {shown(scale)}")
    of_heads = scale.repeat_interleave(x.shape[-2] // hk, 1)[..., None]  # (rows, heads, 1)
    return of_heads[:, None] if cu is None else of_heads[sequence_of_tokens(cu, x.shape[0])]


def unpaged(k: Tensor, page_table: Tensor, lengths: Tensor) -> Tensor:
    """Return the keys of every row, `(rows, pages · page, heads, width)`, copied."""
    pages, last = page_table.long(), len(k) - 1
    if pages.is_cpu and lengths.is_cpu and not torch.compiler.is_compiling():
        first_key = torch.arange(pages.shape[1], device=pages.device) * k.shape[1]
        read = first_key < lengths[:, None]  # entries after a row's last page may hold anything
        wrong = read & ((pages < 0) | (pages > last))
        if bool(wrong.any()):
            n = int(pages[wrong][0])
            raise CallError(f"the table of pages names page {n}, which is none of the {len(k)}")
    return k[pages.clamp(0, last)].flatten(1, 2)


def _request(
    q: Tensor, k: Tensor, v: Tensor, score: Any, mask: Any, options: FlashOptions
) -> Request:
    return Request(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), score, mask, scale=options.scale,
        sink=options.sink, dropout=options.dropout, deterministic=options.deterministic,
        max_logit=options.want_max_logit,
    )  # fmt: skip


def _run(request: Request, options: FlashOptions) -> Results:
    lse = max_logit = None
    try:
        if options.want_lse or options.want_max_logit:
            out, lse, max_logit, *_ = run(request)
        else:
            out = run_out(request)
    except ArgumentError as error:
        raise CallError(f"{error}{heads_swapped(request.q, request.k, options.sink)}") from error
    except ModError as error:
        raise CallModError(str(error)) from error
    return Results(
        out.transpose(1, 2).contiguous(), lse, max_logit if options.want_max_logit else None
    )


def _within(options: FlashOptions, offset: int) -> MaskFn | None:
    """Return the mask of limits and chunks around the diagonal of `i + offset`."""
    left, right = options.limits
    mask: MaskFn | None = None if right is None else lower_right(offset + right)
    if left is not None:
        mask = intersection(mask, Not(lower_right(offset - left - 1)))
    return intersection(mask, same_chunk(options.chunk, offset)) if options.chunk else mask
