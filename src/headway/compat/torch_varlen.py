"""`torch.nn.attention.varlen`: packed sequences, with PyTorch's signatures.

    from headway.compat.torch_varlen import varlen_attn

On every device and in every dtype. Beyond the original: a log-sum-exp with a gradient, the largest
logit of every head (`varlen_attn_with_stats`), and gradients with `seqused_k` and `block_table`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import flag_of
from ..packed import ArgumentNames
from .errors import CallError
from .flash_attend import Results, side_of
from .flash_pages import attend_rows
from .flash_parts import FlashOptions, check_axes, limits_of, number
from .flex import AuxRequest as AuxRequest

_PACKED = "(tokens, heads, width)"


class CallValueError(CallError, ValueError):
    """An error for calls that the original refuses with a `ValueError`."""


class VarlenOutput(NamedTuple):
    """Results of `varlen_attn_with_stats`.

    - `out`: `(tokens, hq, dv)`.
    - `lse`: `(hq, tokens)`, differentiable; -inf where a query sees nothing.
    - `max_logit`: `(hq,)`, the largest scaled logit over all sequences. It carries no gradient.
    """

    out: Tensor
    lse: Tensor
    max_logit: Tensor


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return attention inside of packed sequences, with PyTorch's signature.

    **Arguments:**

    - `query` `(total_q, hq, d)`, `key` `(total_k, hk, d)`, `value` `(total_k, hk, dv)`: sequence n
      has `query[cu_seq_q[n]:cu_seq_q[n + 1]]`, and keys likewise.
    - `cu_seq_q`, `cu_seq_k`: int `(sequences + 1,)`, from 0 to at most the totals.
    - `max_q`, `max_k`: the longest sequence. They are not needed, but checked on the CPU.
    - `return_aux`: an `AuxRequest`, Headway's or PyTorch's.
    - `scale`: the factor of the logits. None: `1 / sqrt(d)`.
    - `window_size`: `(left, right)` keys around the diagonal, which ends at the last query and key.
      -1 is no limit, so `(-1, 0)` is causal.
    - `enable_gqa`: must be True if `hq` differs from `hk`.
    - `seqused_k`: int `(sequences,)`, the number of valid keys per sequence.
    - `block_table`: int32 `(sequences, max_pages)`. Key and value are then pages,
      `(pages, page, hk, ·)`, and `seqused_k` or `cu_seq_k` has the number of keys.
    - `num_splits`: accepted without effect. Headway chooses how to cut the work.

    **Returns:** `(total_q, hq, dv)`; with `return_aux.lse` `(out, lse)`, lse `(hq, total_q)`,
    differentiable. Tokens after the last sequence get 0.

    **Raises:** `ValueError` for heads that do not fit, else `RuntimeError`; each is an
    `ArgumentError` as well.
    """
    want_lse = _wants_lse(return_aux)
    out, lse, _ = _attend(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, enable_gqa,
        seqused_k, block_table, num_splits, want_lse,
    )  # fmt: skip
    return (out, lse) if want_lse else out  # type: ignore[return-value]


def varlen_attn_out(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Write `varlen_attn` to `out`, of the result's shape and dtype, and return it. It has
    no gradient, as in the original: call it under `torch.no_grad()`."""
    inputs = query, key, value
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        raise CallError(
            "varlen_attn_out has no gradient, but an input requires grad; call it under "
            "torch.no_grad(), or call varlen_attn"
        )
    want_lse = _wants_lse(return_aux)
    result, lse, _ = _attend(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, enable_gqa,
        seqused_k, block_table, num_splits, want_lse,
    )  # fmt: skip
    if not isinstance(out, Tensor) or out.shape != result.shape or out.dtype != result.dtype:
        seen = f"{tuple(out.shape)} {out.dtype}" if isinstance(out, Tensor) else repr(out)
        raise CallError(f"out must be {tuple(result.shape)} {result.dtype}, got {seen}")
    out.copy_(result)
    return (out, lse) if want_lse else out  # type: ignore[return-value]


def varlen_attn_with_stats(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> VarlenOutput:
    """Return `varlen_attn`, the log-sum-exp, and the largest logit of every head."""
    out, lse, max_logit = _attend(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, enable_gqa,
        seqused_k, block_table, num_splits, True, True,
    )  # fmt: skip
    assert lse is not None
    assert max_logit is not None
    return VarlenOutput(out, lse, max_logit)


def _wants_lse(return_aux: Any) -> bool:
    if getattr(return_aux, "max_scores", False):
        raise CallError("max_scores: call varlen_attn_with_stats for the largest logits")
    return return_aux is not None and bool(return_aux.lse)


def _attend(
    query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any, scale: Any,
    window: Any, gqa: Any, used_k: Any, pages: Any, num_splits: Any,
    want_lse: bool, want_max_logit: bool = False,
) -> Results:  # fmt: skip
    check_axes("query", query, _PACKED)
    for name, x in (("key", key), ("value", value)):
        check_axes(name, x, _PACKED if pages is None else "(pages, page, heads, width)")
    hq, hk = query.shape[-2], key.shape[-2]
    if hq != hk and not flag_of("enable_gqa", gqa):
        raise CallValueError(
            f"query has {hq} heads and key {hk}; where several query heads share one of key and "
            "value, pass enable_gqa=True"
        )
    if hk == 0 or hq % hk:
        raise CallValueError(f"query's {hq} heads are no multiple of key's {hk}")
    if num_splits is not None:
        number("num_splits", num_splits, "See torch.nn.attention.varlen")
    if pages is not None and cu_k is None and used_k is None:
        raise CallError("block_table does not say how many keys there are: pass seqused_k")
    try:
        limits = limits_of(False, window)
    except CallError as error:
        raise CallValueError(str(error)) from None
    options = FlashOptions(scale, limits, want_lse=want_lse, want_max_logit=want_max_logit)
    q_side = side_of(
        "q", query, cu_q, None, max_q, ArgumentNames("cu_seq_{}", "seqused_{}", "max_{}")
    )
    return attend_rows(query, key, value, q_side, (cu_k, used_k, max_k), pages, options)
