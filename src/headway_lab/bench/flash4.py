"""FlashAttention-4 as a contestant: which of its options a case is, and the call.

Its tensors are (b, length, heads, width), or (tokens, heads, width) where documents are packed.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headway.mods import causal, document, sliding_window, softcap
from headway.mods.base import Both

from .case import Case, Inputs, Unavailable


def prepare(case: Case, x: Inputs) -> Callable[[], Tensor]:
    """The call. It is called once, which compiles; `x` should lie in memory as `Inputs.by_rows`."""
    chosen = options(x)
    try:
        flash = importlib.import_module("flash_attn.cute.interface")
        call = _packed(flash, x, chosen) if "cu_seqlens_q" in chosen else _call(flash, x, chosen)
        call()
    except Exception as error:  # of its compiler too
        raise Unavailable.because(error) from error
    return call


def _call(flash: Any, x: Inputs, chosen: dict[str, Any]) -> Callable[[], Tensor]:
    def call() -> Tensor:
        out, _ = flash.flash_attn_func(*(t.transpose(1, 2) for t in (x.q, x.k, x.v)), **chosen)
        return out.transpose(1, 2)

    return call


def _packed(flash: Any, x: Inputs, chosen: dict[str, Any]) -> Callable[[], Tensor]:
    def call() -> Tensor:
        tokens = (t.transpose(1, 2).flatten(0, 1) for t in (x.q, x.k, x.v))
        out, _ = flash.flash_attn_varlen_func(*tokens, **chosen)
        return out.unflatten(0, (x.q.shape[0], -1)).transpose(1, 2)

    return call


def options(x: Inputs) -> dict[str, Any]:
    """Its arguments for a mask and a score. Raises `Unavailable` where it has none."""
    chosen: dict[str, Any] = {}
    if isinstance(x.score, softcap):
        chosen["softcap"] = x.score.cap
    elif x.score is not None:
        raise Unavailable("of the scores it has softcap only")
    for part in _parts(x.mask):
        if part == causal():
            chosen["causal"] = True
        elif isinstance(part, sliding_window) and "window_size" not in chosen:
            chosen["window_size"] = (part.window - 1, part.window - 1)
        elif isinstance(part, document) and "cu_seqlens_q" not in chosen:
            chosen |= _lengths(part, x.q.shape[0])
        else:
            raise Unavailable("of the masks it has causal, windows, documents and their &")
    if chosen.get("causal") and "window_size" in chosen:
        chosen["window_size"] = (chosen["window_size"][0], 0)
    return chosen


def _parts(mask: object) -> list[object]:
    """Of a chain of `&`."""
    if isinstance(mask, Both):
        return _parts(mask.first) + _parts(mask.second)
    return [] if mask is None else [mask]


def _lengths(documents: document, b: int) -> dict[str, Any]:
    """Where documents end, in rows laid one after the other."""
    ids = documents.ids
    if ids.dim() != 1 or documents.kv_ids is not None:
        raise Unavailable("its documents here are those of one row, the same for queries and keys")
    of_runs, lengths = torch.unique_consecutive(ids, return_counts=True)
    if len(of_runs) != len(ids.unique()):
        raise Unavailable("a document of its is in one piece")
    ends = torch.nn.functional.pad(lengths.repeat(b).cumsum(0), (1, 0)).int()
    names = {"cu_seqlens": ends, "max_seqlen": int(lengths.max())}
    return {f"{name}_{side}": value for name, value in names.items() for side in "qk"}
