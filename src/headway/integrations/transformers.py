"""Hugging Face transformers 5: `attn_implementation="headway"`.

    from headway.integrations import transformers

    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="headway")

`register` registers the attention and its mask function together, since one without the other
would ignore padding without an error. The mask stays a function, and is not materialized. There is
one exception: under `torch.compile`, masks that are not causal are, since the functions that
transformers creates cannot be read there.

With this attention, `headway.stability.QKClip(model)` works on Llama-like and DeepSeek models.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import api
from ..distributed.layout import Layout
from ..errors import ArgumentError, BackendRefused
from ..mods import Score, bias, causal, dense, document, lower_mod
from ..mods.base import MaskFn, Not, composition, intersection
from ..mods.evaluation.pointwise import Positions, mask_at
from ..packed import ArgumentNames, Side, pack
from . import hf_attention, hf_calls, hf_models
from .hf_mask import AttentionMask, GraphMask, kept
from .hf_translate import (
    graph_mask,
    of_indices,
    of_padding,
    only_past,
    sees_all,
    shift,
    translate,
)

_OF_CACHE = ("block_table", "read_index", "write_index", "k_cache", "v_cache")
_FEW = 16  # new tokens of a step over a cache

# What a model or a caller may pass down and that would change its attention, but is not honoured.
# Everything else that comes along (labels, token types, a caller's own words) is not about it.
_REFUSED = frozenset(
    # which keys a query sees
    "topk_indices sparse_indices block_mask mask_mod attn_mask "
    "key_padding_mask attention_chunk_size window_size seq_idx "
    # what is added to a score or multiplies it
    "head_mask layer_head_mask cross_attn_head_mask score_mod alibi alibi_slopes attn_bias "
    "attention_bias position_bias relative_position_bias rel_pos_bias bias scale softmax_scale "
    "logit_cap logits_soft_cap dropout_p q_descale k_descale v_descale "
    # where keys and values are
    "cache block_table page_table k_cache v_cache cache_seqlens seqused_q seqused_k read_index "
    "write_index".split()
)


def register(name: str = "headway") -> None:
    """Register `attn_implementation=name` with transformers. You may call it several times.

    **Raises:** `ImportError` if transformers 5 is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "headway.integrations.transformers needs transformers: pip install 'transformers>=5.17'"
        ) from error
    hf_models.watch(name)
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def mask_over_ranks(
    layout: Layout,
    mask: MaskFn | None,
    batch: int = 1,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the `attention_mask` of a model whose sequence is split over ranks.

        model(layout.shard(tokens), position_ids=layout.positions[None],
              attention_mask=mask_over_ranks(layout, causal() & document(ids)), use_cache=False)

    A model with several patterns takes a dictionary of such masks.

    - `layout`: which tokens this rank holds.
    - `mask`: the mask of the whole sequence, equal on all ranks, such as `causal() & document(ids)`
      and windows. None masks nothing out.
    - `batch`: rows of the tokens. `dtype`, `device`: those of the model's activations.

    **Raises:** `ArgumentError` for a tensor as `mask`; `BackendRefused` if the model reads the
    contents of the mask.
    """
    if isinstance(mask, Tensor):
        raise ArgumentError(
            f"mask is a tensor {tuple(mask.shape)}; over ranks it is a function of the whole "
            f"sequence, of {layout.length} tokens: for padding, causal() & padding(lengths)"
        )

    def square() -> Tensor:
        raise BackendRefused(
            "the model looks inside its attention mask, which over ranks is a function of the "
            "whole sequence; such a model needs its sequence in one piece"
        )

    sizes = batch, 1, layout.local, layout.local
    where = layout.positions.device if device is None else device
    new_mask = AttentionMask.of(mask, sizes, True, square, dtype, where)
    new_mask.over_ranks = layout
    return new_mask


# -- the mask function ----------------------------------------------------------------------------


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Any = None,
    use_vmap: bool = False,
    device: Any = None,
    **hints: Any,
) -> Any:
    """Implement transformers' mask interface, which is called once per forward and pattern.

    `attention_mask` is the padding, `(batch, keys)`. Of the hints for other implementations only
    `dtype` is used: a model that reads the mask gets the one that "eager" would get.
    """
    if attention_mask is not None and attention_mask.ndim == 4:
        return attention_mask  # made by the user, or by an earlier call
    shape = (batch_size, 1, q_length, kv_length)
    if torch.compiler.is_compiling():
        padding = _padding(attention_mask, kv_length, kv_offset)
        return graph_mask(mask_function, shape, q_offset, kv_offset, use_vmap, device, padding)
    if isinstance(q_offset, Tensor):  # the counter of a static cache, which counts on in place
        q_offset = int(q_offset) if q_offset.is_cpu else q_offset.clone()
    pattern, packed = translate(mask_function)
    call = hf_calls.current()
    few = q_length <= _FEW and not packed and not torch.is_grad_enabled() and only_past(pattern)
    token_count = q_offset + q_length if few and isinstance(q_offset, int) else None
    padding = _padding(attention_mask, kv_length, kv_offset, token_count)
    if (
        pattern is None is padding
        and hints.get("allow_is_bidirectional_skip")
        and not getattr(hints.get("config"), "is_causal", False)
        and call is not None
        and call.none_keeps_all
    ):
        return None  # as "eager" has it: models compare a mask's sizes with their own

    def square() -> Tensor:
        from transformers.masking_utils import bidirectional_mask_function, eager_mask

        return eager_mask(
            batch_size, q_length, kv_length, int(q_offset), kv_offset,
            mask_function or bidirectional_mask_function, attention_mask, use_vmap=use_vmap,
            device=device, **hints | {"allow_is_bidirectional_skip": False},
        )  # fmt: skip

    parts = _MaskParts(pattern, padding, shape, q_offset, kv_offset, device)
    mask = AttentionMask.of(
        None, shape, packed, square, hints.get("dtype") or torch.float32, device, parts.later,
        parts.step if few else None, None if token_count is None else parts.near(token_count),
        None if padding is None else parts.unpadded_queries,
    )  # fmt: skip
    if call is not None:
        call.made.append(mask)
    return mask


@dataclass(frozen=True)
class _MaskParts:
    """The parts of an `AttentionMask`: a mask of positions, the padding, where each begins."""

    mask: MaskFn | None
    padding: Tensor | None
    sizes: tuple[int, ...]
    q_offset: int | Tensor
    kv_offset: int
    device: Any

    @cached_property
    def unpadded(self) -> MaskFn | None:
        """The mask that leaves out padding, if there is any."""
        return None if self.padding is None else of_padding(self.padding)

    def later(self) -> MaskFn | None:
        """Return the mask of queries and keys that begin at 0."""
        return intersection(shift(self.mask, int(self.q_offset), self.kv_offset), self.unpadded)

    def step(self) -> tuple[MaskFn | None, Tensor]:
        """Return the mask for a step over a cache, and how many keys each row has."""
        # The last keys of a row are its queries': what lies behind them does not exist.
        lengths = torch.full(
            self.sizes[:1], self.sizes[2] - self.kv_offset, dtype=torch.int32, device=self.device
        )
        mask = intersection(shift(self.mask, self.kv_offset, self.kv_offset), self.unpadded)
        return mask, lengths.add_(self.q_offset)

    def near(self, tokens: int) -> tuple[int, Tensor | None] | None:
        """Return, for one query per row on the CPU, how many keys there are up to the last of
        `tokens`, and which of them are seen, bool `(b, 1, 1, keys)` or None for all."""
        on_cpu = self.device is not None and torch.device(self.device).type == "cpu"
        if not on_cpu or self.sizes[2] != 1:
            return None
        keys = min(self.sizes[3], tokens - self.kv_offset)
        if sees_all(self.mask, keys - 1):
            return keys, None if self.padding is None else self.padding[:, None, None, :keys]
        mask, lengths = self.step()
        if mask is None:
            return keys, None
        graph, captured = lower_mod("mask", mask, torch.float32)
        by_row = lambda x: x.view(-1, 1, 1, 1)
        positions = Positions(
            by_row(torch.arange(len(lengths), device="cpu")),
            torch.zeros((), dtype=torch.int64, device="cpu"),
            by_row(lengths.long() - 1), torch.arange(keys, device="cpu"),
        )  # fmt: skip
        attended = mask_at(graph, captured, positions).expand(len(lengths), 1, 1, keys)
        return keys, None if bool(attended.all()) else attended

    def unpadded_queries(self) -> Tensor:
        """Return which queries are no padding, bool `(b, queries)`."""
        assert self.padding is not None
        return self.padding[:, int(self.q_offset) - self.kv_offset :][:, : self.sizes[2]]


def _padding(
    padding: Tensor | None, kv_length: int, kv_offset: int, seen: int | None = None
) -> Tensor | None:
    """Return bool (batch, kv_length), or None where no token (of the first `seen`) is padding."""
    if padding is None:
        return None
    padding = padding[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    # (On a GPU, the look would wait for it at every step.)
    look = padding.is_cpu and not torch.compiler.is_compiling()
    needed_keys = kv_length if seen is None else min(kv_length, seen - kv_offset)
    if look and padding.shape[1] >= needed_keys and bool(padding.all()):
        return None
    if padding.shape[1] < kv_length:  # a static cache is longer than what it holds
        padding = torch.nn.functional.pad(padding, (0, kv_length - padding.shape[1]))
    return padding


# -- the attention function -----------------------------------------------------------------------


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    deterministic: bool = False,
    output_attentions: bool | None = None,
    seq_idx: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: query `(b, hq, l, d)`, key and value
    `(b, hk, s, ·)`.

    Packed documents come from `cu_seq_lens_q` and `cu_seq_lens_k` (the last query of each is at its
    last key), from `seq_idx` `(b, s)` (the document of every key; queries are the last of them), or
    from `position_ids` where transformers reads them. For sparse models, `indices` `(b, l, k)` are
    the keys of each query, and `block_indices` `(b, hk, l, k)` blocks of keys; -1 names none.

    **Returns:** `(b, l, hq, dv)`, and None for the weights, which are never computed.

    **Raises:** `BackendRefused` (a `NotImplementedError`) for arguments that would change attention
    and are not supported; `ArgumentError` if the mask does not fit the call.
    """
    softmax = hf_attention.LayerSoftmax(module, scaling, softcap, s_aux if sinks is None else sinks)
    cache = kwargs.pop("cache", None)  # of continuous batching
    updated = kwargs.get("read_index") is not None and isinstance(cu_seq_lens_k, Tensor)
    if cache is not None or updated:
        others = {n: x for n, x in kwargs.items() if n not in _OF_CACHE}
        others |= {"position_bias": position_bias, "seq_idx": seq_idx, "indices": indices}
        _refuse(output_attentions, others | {"block_indices": block_indices})
        arguments = {**kwargs, "cu_seq_lens_k": cu_seq_lens_k}
        return hf_attention.continuous_batch(
            query, key, value, cache, arguments, cu_seq_lens_q, sliding_window, softmax
        ), None  # fmt: skip
    _refuse(output_attentions, kwargs)
    q_len, kv_len = query.shape[2], key.shape[2]
    of_offsets = not (cu_seq_lens_q is None is cu_seq_lens_k)
    packed = of_offsets or seq_idx is not None
    if not torch.compiler.is_compiling():
        call = hf_calls.current()
        if call is not None and not call.judged:
            call.look(attention_mask, q_len, kv_len, packed)
    if (
        isinstance(attention_mask, AttentionMask | GraphMask) and attention_mask.is_step
        and not (dropout or torch.is_grad_enabled() or attention_mask.taken or packed)
        and position_bias is indices is block_indices is None
        and attention_mask.sizes == (query.shape[0], 1, q_len, kv_len)
    ):  # fmt: skip
        return hf_attention.decode_step(query, key, value, attention_mask, softmax), None
    mask, score = _as_mask_and_score(attention_mask, (*query.shape[:3], kv_len))
    layout = attention_mask.over_ranks if isinstance(attention_mask, AttentionMask) else None
    if layout is not None:
        _check_over_ranks(layout, attention_mask, kwargs.get("position_ids"))
    offset = kv_len - q_len if layout is None and not of_offsets else 0
    if attention_mask is None:  # a mask that is given says it all
        causal_too = getattr(module, "is_causal", False) if is_causal is None else is_causal
        if causal_too and q_len > 1:
            mask = causal(offset)
    # Over ranks the window is this layer's: one mask may be given to all layers.
    if sliding_window is not None and (attention_mask is None or layout is not None):
        mask = intersection(mask, Not(causal(offset - sliding_window)))
    if of_offsets:
        aligned = attention_mask is None
        mask = _in_documents(mask, aligned, query, key, cu_seq_lens_q, cu_seq_lens_k)
    if seq_idx is not None:
        mask = intersection(mask, _sequences(seq_idx, query.shape[0], q_len, kv_len))
    if indices is not None:
        chosen = of_indices("indices", indices[:, None], (*query.shape[:3], kv_len), 1)
        mask = intersection(mask, chosen)
    if block_indices is not None:
        size = _block_size(module)
        sizes = (*query.shape[:3], kv_len)
        mask = intersection(mask, of_indices("block_indices", block_indices, sizes, size))
    score = composition(softmax.score, score)
    score = composition(score, None if position_bias is None else bias(position_bias))
    if type(mask) is causal and position_bias is None is layout:
        key_count = q_len + mask.offset
        if 0 < key_count < kv_len and not torch.compiler.is_compiling():
            key, value = key[:, :, :key_count], value[:, :, :key_count]  # a static cache is longer
    return softmax.run(
        api, query, key, value, score, mask, dropout=dropout, deterministic=bool(deterministic),
        layout=layout,
    ), None  # fmt: skip


def _block_size(module: torch.nn.Module) -> int:
    """Return the size of the blocks of keys that a model's indexer chooses."""
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if size is None:
        raise BackendRefused(
            "the model passes block_indices to its attention, but its module has no "
            'indexer.block_size to say how large a block is; use attn_implementation="eager"'
        )
    return size


def _as_mask_and_score(mask: Any, sizes: tuple[int, ...]) -> tuple[MaskFn | None, Score | None]:
    """Return an `attention_mask` as a mask and a score of a call of these sizes."""
    if mask is None:
        return None, None
    if isinstance(mask, AttentionMask | GraphMask):
        if not mask.taken and mask.sizes == (sizes[0], 1, *sizes[2:]):
            return mask.mask, None
        if isinstance(mask, GraphMask) or (mask.over_ranks is not None and not mask.taken):
            raise _does_not_fit(mask.sizes, sizes)
        mask = mask.square()
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        shown = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ArgumentError(
            "attention_mask must be 2-D padding given to the model, or 4-D (batch, heads, queries, "
            f"keys), bool or additive; got {shown}"
        )
    if any(mask_size not in (1, size) for mask_size, size in zip(mask.shape, sizes, strict=True)):
        raise _does_not_fit(mask.shape, sizes)
    if mask.dtype == torch.bool:
        return dense(mask), None
    if not mask.is_floating_point():
        raise ArgumentError(
            f"attention_mask of 4 dimensions must be bool (True keeps a pair) or floating (added "
            f"to the scores), got {mask.dtype}; write attention_mask.bool() for ones and zeros"
        )
    if mask.requires_grad:
        return None, bias(mask)
    keeps = kept(mask)  # as a number, the lowest one would swallow the rest of the row
    return dense(keeps), bias(mask.masked_fill(~keeps, 0))


def _does_not_fit(own: Any, sizes: tuple[int, ...]) -> ArgumentError:
    return ArgumentError(
        f"attention_mask is for (batch, heads, queries, keys) = {tuple(own)}, but the attention is "
        f"of {tuple(sizes)}; give a mask of these sizes, or, where the model itself changes its "
        'keys after the mask was made, use attn_implementation="eager"'
    )


def _in_documents(
    mask: MaskFn | None, aligned: bool, q: Tensor, k: Tensor, cu_q: Tensor | None,
    cu_k: Tensor | None,
) -> MaskFn | None:  # fmt: skip
    """Return the mask inside of packed documents, from the offsets of their starts,
    `(documents + 1,)`.

    - `aligned`: it is that of a document, whose last query is at its last key; else the row's.
    """
    cu_q, cu_k = (cu_k if cu_q is None else cu_q), (cu_q if cu_k is None else cu_k)
    sides = [
        Side(name, x.shape[2], q.device, cu, names=ArgumentNames("cu_seq_lens_{}")).checked()
        for name, x, cu in (("q", q, cu_q), ("k", k, cu_k))
    ]
    packing = pack(*sides)
    return packing.aligned().mask(mask) if aligned else intersection(mask, packing.mask(None))


def _sequences(ids: Tensor, batch: int, q_len: int, kv_len: int) -> MaskFn:
    """Return packed documents from each token's number; queries are the last of the keys."""
    if ids.dim() != 2 or ids.shape[0] not in (1, batch) or ids.shape[1] != kv_len or q_len > kv_len:
        raise ArgumentError(
            f"seq_idx must be (batch, keys), the document of every key, here {(batch, kv_len)} for "
            f"{q_len} queries, got {tuple(ids.shape)}; with a cache, it has to name the documents "
            "of what is in it as well"
        )
    if ids.shape[0] < batch:
        ids = ids[0]
    return document(ids) if q_len == kv_len else document(ids[..., -q_len:], ids)


def _check_over_ranks(layout: Layout, mask: AttentionMask, position_ids: Tensor | None) -> None:
    """Raise where a model counts its positions from 0 on every rank: its angles would be wrong."""
    if position_ids is None:
        raise BackendRefused(
            "the model does not tell its attention the position_ids of its tokens, so that headway "
            "cannot see whether they are those of the layout; pass them on to the attention "
            "function, or use a model that does"
        )
    compiling = torch.compiler.is_compiling()
    if not compiling and mask.looked_at is position_ids:
        return
    positions = layout.positions.to(position_ids.device)
    fits = position_ids.shape[-1] == layout.local
    if fits and compiling:
        torch._assert_async((position_ids == positions).all(), _OTHER_POSITIONS)
    elif not fits or not bool((position_ids == positions).all()):
        raise ArgumentError(_OTHER_POSITIONS)
    if not compiling:
        mask.looked_at = position_ids  # once, not in every layer


_OTHER_POSITIONS = (
    "position_ids are not those of the layout (they begin at 0 on every rank where a model counts "
    "them itself); call the model with position_ids=layout.positions[None]"
)


def _refuse(output_attentions: bool | None, others: dict[str, Any]) -> None:
    if output_attentions:
        raise BackendRefused(
            "output_attentions=True: the weights are never made; "
            'set attn_implementation="eager" for a model whose weights you need'
        )
    refused = [name for name in others if name in _REFUSED and others[name] is not None]
    if refused:
        raise BackendRefused(
            f"the model passes {', '.join(refused)} to its attention, which headway does not "
            'honour here; use attn_implementation="eager" or "sdpa" for it'
        )
