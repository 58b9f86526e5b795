"""`torch.nn.functional.scaled_dot_product_attention`: its signature and its corner cases.

    from headway.compat.torch_sdpa import scaled_dot_product_attention

Beyond the original, on every device: `attn_mask` together with `is_causal` (both apply), 1-D masks,
and gradients of float masks without all scores in memory.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..api import attention
from ..errors import ArgumentError
from ..mods import Mask, Score, bias, causal, dense
from ..packed import any_jagged
from ..types import as_real
from .errors import CallError, CallTypeError, as_call_error


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return softmax(scale · query keyᵀ + attn_mask) value, as PyTorch defines it.

    **Arguments:**

    - `query` `(..., hq, l, e)`, `key` `(..., hk, s, e)`, `value` `(..., hv, s, ev)`: at least 2-D,
      of one dtype and device; leading dimensions broadcast. Or nested tensors
      (`layout=torch.jagged`), `(b, heads, ragged length, width)`, which take no `attn_mask`.
    - `attn_mask`: bool (True: the query attends to the key) or float (added, and differentiable),
      broadcastable to `(..., hq, l, s)`. Or `torch.nn.attention.bias.causal_upper_left` /
      `causal_lower_right`.
    - `dropout_p`: always applied, as in the original: pass 0.0 in evaluation.
    - `is_causal`: query i attends to keys 0 to i, aligned top-left for any lengths. If you pass
      `attn_mask` too, both apply.
    - `scale`: the factor of the logits. None: `1/sqrt(e)`.
    - `enable_gqa`: query head h reads key head `h // (hq // hk)` and value head `h // (hq // hv)`.

    **Returns:** `(..., hq, l, ev)`. A query that attends to no key gets 0, and finite gradients.

    **Raises:** the types of the original: `RuntimeError` for shapes, dtypes and probabilities,
    `TypeError` for arguments of another type, `ValueError` for a `CausalBias` with `is_causal`.
    Each is an `ArgumentError` as well.
    """
    corner = type(attn_mask).__name__ == "CausalBias"
    tensors = (query, key, value, None if corner else attn_mask)
    jagged = type(query) is not Tensor and any_jagged(query, key, value)
    if jagged and not torch._C._len_torch_function_stack():
        return _nested(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if has_torch_function(tensors):  # a subclass of Tensor, or a mode, has its say
        return handle_torch_function(
            scaled_dot_product_attention, tensors, query, key, value, attn_mask=attn_mask,
            dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
    _check(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    scale = _number(scale)
    q, k, v, leading = _four_dimensional(query, key, value, enable_gqa)
    score: Score | None = None
    mask: Mask | None = causal() if is_causal else None
    if corner:
        mask = _corner(attn_mask, is_causal, (q.shape[2], k.shape[2]))
    elif attn_mask is not None:
        score_shape = (*(q.shape[:2] if leading is None else leading), q.shape[2], k.shape[2])
        attn_mask = _aligned(attn_mask, score_shape)
        if attn_mask.dtype != torch.bool:
            score = bias(attn_mask)
        else:
            mask = dense(attn_mask) if mask is None else mask & dense(attn_mask)
    out = as_call_error(attention, q, k, v, score, mask, scale=scale, dropout=dropout_p)
    return out if leading is None else out.reshape(*leading, *out.shape[2:])


@torch.jit.ignore  # TorchScript calls it in Python
def _in_python(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )


def _scripted(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute what TorchScript compiles in place of ours: an ignored function has no defaults."""
    return _in_python(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


scaled_dot_product_attention.__prepare_scriptable__ = lambda: _scripted  # type: ignore[attr-defined]


def _nested(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any,
    enable_gqa: Any,
) -> Tensor:  # fmt: skip
    """Return the attention of nested tensors, `(batch, heads, ragged length, width)`."""
    _check_options(dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None:
        raise CallError(
            "attn_mask is not taken with nested tensors; write it as mask= or score= of "
            "headway.attention, whose positions count from the start of each sequence"
        )
    heads = [x.shape[1] if isinstance(x, Tensor) and x.dim() == 4 else 0 for x in (q, k, v)]
    if len(set(heads)) > 1 and not enable_gqa:
        raise CallError(
            f"the numbers of heads differ: query {heads[0]}, key {heads[1]}, value {heads[2]}; "
            "where several query heads share one of key and value, pass enable_gqa=True"
        )
    mask = causal() if is_causal else None
    options = {"mask": mask, "scale": _number(scale), "dropout": dropout_p}
    return as_call_error(attention, q, k, v, **options)


def _number(scale: Any) -> Any:
    """Return a scale that is a tensor or a boolean as Python's number."""
    if isinstance(scale, Tensor):
        return scale.item()
    return float(scale) if isinstance(scale, bool) else scale


@contextmanager
def use_for_sdpa() -> Iterator[None]:
    """Reroute PyTorch's function to Headway's inside a `with`, for code that you cannot edit.

    In every module that holds `torch.nn.functional.scaled_dot_product_attention`, under any name,
    it is replaced in all threads, also in modules imported meanwhile, and restored afterwards.

    It does not reach copies that objects and closures hold, nor C++ code that does not call the
    function (`nn.TransformerEncoderLayer` in evaluation). What `torch.jit.script` compiles inside
    keeps calling Headway, in Python, and cannot be saved.
    """
    original = torch.nn.functional.scaled_dot_product_attention
    if not _inside:
        ours = {(id(names), name) for names, name in _holders(scaled_dot_product_attention)}
        held = _holders(original)
        _rerouted[:] = [(original, held, ours)]
        for names, name in held:
            names[name] = scaled_dot_product_attention
    _inside.append(None)
    try:
        yield
    finally:
        _inside.pop()
        if not _inside:  # the last one out, whichever it is
            original, held, ours = _rerouted.pop()
            for names, name in held + _holders(scaled_dot_product_attention):
                if (id(names), name) not in ours:
                    names[name] = original


_inside: list[None] = []  # one entry for each `with` that has begun and not ended
_rerouted: list[tuple[Any, list[tuple[dict[str, Any], str]], set[tuple[int, str]]]] = []


class _Activated:
    """A reroute that PyTorch holds while it is active, and removes."""

    def __init__(self) -> None:
        self.reroute = use_for_sdpa()
        self.reroute.__enter__()

    def remove(self) -> None:
        self.reroute.__exit__(None, None, None)


def register(name: str = "headway") -> None:
    """Make `torch.nn.attention.activate_flash_attention_impl(name)` reroute PyTorch's function.

    Every call then runs Headway, as inside `use_for_sdpa`, until
    `torch.nn.attention.restore_flash_attention_impl()`. PyTorch's `varlen_attn` keeps its own
    kernels: see `headway.compat.torch_varlen`.

    **Raises:** `ImportError` where PyTorch has no such registry.
    """
    from torch.nn.attention import register_flash_attention_impl

    register_flash_attention_impl(name, register_fn=_Activated)


def _holders(function: Any) -> list[tuple[dict[str, Any], str]]:
    """Return the dictionaries of modules, and the names in them, that hold a function."""
    every = [vars(m) for m in list(sys.modules.values()) if hasattr(m, "__dict__")]
    return [(names, name) for names in every for name, x in list(names.items()) if x is function]


# -- shapes ---------------------------------------------------------------------------------------


def _four_dimensional(
    q: Tensor, k: Tensor, v: Tensor, gqa: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...] | None]:
    """Return the tensors as (b, heads, length, width), and what precedes the result's length if
    they were not."""
    dims = max(q.dim(), k.dim(), v.dim())
    hq, hk, hv = (x.shape[-3] if x.dim() > 2 else 1 for x in (q, k, v))
    h = hq if gqa else max(hq, hk, hv)
    if gqa and h and any(n == 0 or h % n for n in (hk, hv)):
        raise CallError(
            "Number of heads in key and value must divide the number of heads in query: "
            f"query {hq}, key {hk}, value {hv}"
        )
    if not gqa and any(n not in (1, h) for n in (hq, hk, hv)):
        raise CallError(
            f"the numbers of heads differ: query {hq}, key {hk}, value {hv}; where several query "
            "heads share one of key and value, pass enable_gqa=True"
        )
    if h == 0:  # nothing to compute, but a head of keys there has to be
        k, v = (torch.cat([x, x.new_zeros(*x.shape[:-3], 1, *x.shape[-2:])], -3) for x in (k, v))
        hk = hv = 1
    matching = q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0]
    if matching and hq == h and hk == hv:
        return q, k, v, None
    try:
        batch = tuple(torch.broadcast_shapes(*[x.shape[:-3] for x in (q, k, v)]))
    except RuntimeError as error:
        shapes = f"query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}"
        raise CallError(f"leading dimensions do not broadcast: {shapes}") from error
    size = math.prod(batch)
    q, k, v = (
        x.expand(*batch, n, *x.shape[-2:]).reshape(size, n, *x.shape[-2:])
        for x, n in ((q, h), (k, hk), (v, hv))
    )
    shared = math.lcm(hk, hv)  # fewest heads that key and value can have in common
    k, v = (x.repeat_interleave(shared // x.shape[1], 1) for x in (k, v))
    return q, k, v, ((*batch, h) if dims > 3 else (h,) if dims == 3 else ())


def _aligned(mask: Tensor, scores: tuple[int, ...]) -> Tensor:
    """Return a mask that broadcasts to (..., h, l, s) as one of at most 4 dimensions."""
    extra = max(mask.dim() - len(scores), 0)
    sizes = zip(reversed(mask.shape), reversed(scores), strict=False)
    if any(n not in (1, size) for n, size in sizes) or any(n != 1 for n in mask.shape[:extra]):
        raise CallError(
            f"attn_mask {tuple(mask.shape)} does not broadcast to {scores}, the shape of the scores"
        )
    if mask.dim() <= 4 and len(scores) <= 4:
        return mask
    inner = mask.shape[max(mask.dim() - 3, 0) :]
    batch = scores[:-3] if math.prod(mask.shape[:-3]) > 1 else [1] * len(scores[:-3])
    return mask.reshape(mask.shape[extra:]).expand(*batch, *inner).reshape(-1, *inner)


def _corner(mask: Any, is_causal: bool, lengths: tuple[int, int]) -> Mask:
    """Return the mask that a `torch.nn.attention.bias.CausalBias` stands for."""
    if is_causal:
        raise ArgumentError(
            "CausalBias should not be used with causal=True: attn_mask says it, drop is_causal"
        )
    if mask.variant.name == "UPPER_LEFT":
        return causal()
    if (mask.seq_len_q, mask.seq_len_kv) != lengths:
        raise CallError(
            f"attn_mask is causal_lower_right({mask.seq_len_q}, {mask.seq_len_kv}), but query and "
            f"key have lengths {lengths}"
        )
    return causal(mask.seq_len_kv - mask.seq_len_q)


# -- checks ---------------------------------------------------------------------------------------


def _constant(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 0 and not x.requires_grad


def _check(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any,
    enable_gqa: Any,
) -> None:  # fmt: skip
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(x, Tensor) and not (x is None and name == "attn_mask"):
            raise CallTypeError(f"argument {name!r} must be Tensor, not {type(x).__name__}")
    _check_options(dropout_p, is_causal, scale, enable_gqa)
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        raise CallError(
            "Expected query, key, and value to all be at least 2 dimensional, but got query.dim: "
            f"{query.dim()} key.dim: {key.dim()} and value.dim: {value.dim()}"
        )
    if query.is_nested or key.is_nested or value.is_nested:
        raise CallError(
            "query, key and value must all be nested tensors of layout torch.jagged, or all dense; "
            "for packed sequences see headway.varlen_attention or headway.document"
        )
    if attn_mask is None or torch.is_autocast_enabled(query.device.type):
        return
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise CallError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
            f"attn_mask.dtype: {attn_mask.dtype} and query.dtype: {query.dtype}"
        )


def _check_options(dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any) -> None:
    for name, x in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(x, bool):
            raise CallTypeError(f"argument {name!r} must be bool, not {type(x).__name__}")
    for name, x in (("dropout_p", dropout_p), ("scale", scale)):
        number = isinstance(x, bool) or as_real(x) is not None
        if not number and not (name == "scale" and (x is None or _constant(x))):
            raise CallTypeError(f"argument {name!r} must be a number, not {type(x).__name__}")
    if not 0 <= dropout_p <= 1:
        raise CallError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
