"""Attention of a layer of transformers: its softmax, steps over a cache, continuous batching."""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import inference
from ..arguments import scale_of
from ..autograd import cpu_native_step
from ..errors import ArgumentError, BackendRefused
from ..mods import Score, causal
from ..mods import softcap as capped
from ..mods.base import Both, MaskFn, Not, ScoreFn
from ..run import watch, watchers
from ..stability import MaxLogit
from ..types import KV, Request
from .hf_mask import AttentionMask, GraphMask


class LayerSoftmax(NamedTuple):
    """The softmax of a layer: scale, softcap and sink; and its record of logits."""

    module: torch.nn.Module
    scale: float | None
    softcap: float | None
    sink: Tensor | None

    @property
    def score(self) -> Score | None:
        """The softcap as a score."""
        return None if self.softcap is None else capped(self.softcap)

    @property
    def record(self) -> MaxLogit | None:
        """The record that `QKClip` gave the attention, where it is recording."""
        record = getattr(self.module, "max_logit", None)
        return record if isinstance(record, MaxLogit) and record.recording else None

    def run(
        self, functions: Any, q: Tensor, k: Tensor, v: Tensor, score: ScoreFn | None,
        mask: MaskFn | None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Return attention by `headway.api` or `headway.inference`, `(b, l, hq, dv)`; record."""
        sink, record = self.sink, self.record
        by_query = sink is not None and sink.dim() > 1
        options |= {"scale": self.scale, "sink": None if by_query else sink}
        if record is None and not by_query:
            out = functions.attention(q, k, v, score, mask, **options)
            return out.transpose(1, 2).contiguous()
        out, lse, max_logit = functions.attention_with_stats(q, k, v, score, mask, **options)
        if record is not None:
            record(max_logit)
        if by_query:
            if sink.shape != (*lse.shape, 1):  # type: ignore[union-attr]
                raise ArgumentError(
                    f"sinks must be (heads,) or, one per query, {(*lse.shape, 1)}, got "
                    f"{tuple(sink.shape)}"  # type: ignore[union-attr]
                )
            # One more key of value 0: its share of the softmax is lost.
            out = out * (lse[..., None] - sink).sigmoid().to(out.dtype)
        return out.transpose(1, 2).contiguous()


def decode_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask | GraphMask,
    softmax: LayerSoftmax,
) -> Tensor:
    """Few new tokens over a cache: nothing depends on its length, and the device is not read."""
    if isinstance(mask, AttentionMask) and mask.near is not None:
        out = _cpu_native_step(query, key, value, mask, softmax)
        if out is not None:
            if watchers:
                watch(Request(query, key, value, keys=KV(mask.step[1])))
            return out.transpose(1, 2).contiguous()
    assert mask.step is not None
    keeps, lengths = mask.step
    return softmax.run(inference, query, key, value, softmax.score, keeps, lengths=lengths)


def _cpu_native_step(
    query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, softmax: LayerSoftmax
) -> Tensor | None:
    """Compute one new token a row on the CPU by PyTorch alone: Python takes the longest about it.
    None for a call that is more than a softmax."""
    plain = softmax.softcap is None and softmax.sink is None and softmax.record is None
    if mask.near is None or not plain or not query.is_cpu or torch.is_autocast_enabled("cpu"):
        return None
    scale = None if softmax.scale is None else scale_of(softmax.scale)
    keys, added = mask.near[0], mask.bias(query.dtype)
    if keys < key.shape[2]:
        key, value = key[:, :, :keys], value[:, :, :keys]
    return cpu_native_step(query, key, value, scale, added)


def continuous_batch(
    query: Tensor, key: Tensor, value: Tensor, cache: Any, arguments: dict[str, Any],
    cu_q: Tensor | None, window: int | None, softmax: LayerSoftmax,
) -> Tensor:  # fmt: skip
    """Compute transformers' continuous batching: packed requests of different lengths, each causal.

    The cache gives all their keys, packed too: a key is a page of one. Since transformers 5.24 the
    model has asked it for them, and `cache` is None."""
    if arguments.get("block_table") is not None or cu_q is None:
        raise BackendRefused(
            "a cache of continuous batching that comes with a block_table, which is for flash-attn "
            "alone; set max_blocks_per_request=0 in its ContinuousBatchingConfig"
        )
    if cache is not None:
        if "kwargs" not in inspect.signature(cache.update).parameters:
            import transformers

            raise BackendRefused(
                "continuous batching by attn_implementation needs transformers 5.24 or newer, got "
                f'{transformers.__version__}; upgrade it, or set "sdpa" for continuous batching'
            )
        layer = softmax.module.layer_idx
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=layer, kwargs=arguments
        )
    cu_k = arguments["cu_seq_lens_k"]
    key_idx = torch.arange(int(arguments["max_length_k"]), device=key.device)
    table = (cu_k[:-1, None] + key_idx).clamp(max=key.shape[2] - 1).to(torch.int32)
    k, v = (x[0].transpose(0, 1)[:, :, None] for x in (key, value))
    out = inference.attention(
        query, k, v, softmax.score,
        causal() if window is None else Both(causal(), Not(causal(-window))),
        lengths=cu_k.diff().to(torch.int32), page_table=table, cu_q=cu_q.to(torch.int32),
        max_q=int(arguments["max_length_q"]), scale=softmax.scale, sink=softmax.sink,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous()
