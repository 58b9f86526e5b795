"""The probabilities of attention, to look at: the one place that makes the square of pairs."""

from collections.abc import Sequence
from typing import Any, Never

import torch
from torch import Tensor

from ..arguments import check_tensors, count_of
from ..backends import reference
from ..blocks import BlockMask
from ..errors import ArgumentError, CapturedIndexError
from ..keywords import unknown_keywords
from ..mods.base import MaskFn, ScoreFn
from ..resolve import prepare
from ..run import with_place
from ..sharded import any_sharded
from ..types import Coords, acc_dtype, as_int


def attention_weights(
    q: Tensor,  # (b, hq, q_len, d)
    k: Tensor,  # (b, hk, kv_len, d)
    score: ScoreFn | None = None,
    mask: MaskFn | BlockMask | None = None,
    *,
    scale: float | None = None,
    sink: Tensor | None = None,  # (hq,)
    heads: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
    limit: int = 1 << 26,
    **unknown: Never,
) -> Tensor:
    """Return softmax(score(scale · q kᵀ) where mask): the weights of the values in `attention`.

    Use it to look at weights, not to train: nothing else in Headway materializes all pairs. It
    computes the definition in float64, one head at a time. A row sums to 1 minus the sink's share.
    The row of a query that attends to no key is 0.

    **Arguments:** as `attention`, without dropout, and

    - `heads`, `queries`: which of them to return, such as `heads=[3], queries=range(900, 1000)`.
      None returns all, and negative numbers count from the end. Score and mask still see the
      numbers of the whole call.
    - `limit`: the most numbers that the result may have. The default is 67 million, 256 MiB.

    **Returns:** `(b, heads, queries, kv_len)`, float32 (float64 for float64 inputs). It has no
    gradient. For a loss on weights, differentiate `attention(q, k, eye, ...)` with
    `eye = torch.eye(kv_len).expand(b, hk, -1, -1)`.

    **Raises:** `ArgumentError` beyond the limit, and as `attention`.

        weights = headway.attention_weights(q, k, mask=headway.causal(), heads=[0])
        matplotlib.pyplot.imshow(weights[0, 0])
    """
    if unknown:
        raise unknown_keywords(attention_weights, unknown)
    if torch.compiler.is_compiling():
        raise ArgumentError(
            "attention_weights is for looking and is not compiled; call it outside of what "
            "torch.compile(fullgraph=True) traces"
        )
    if any_sharded(q, k, k):
        raise ArgumentError(
            "attention_weights takes no sharded DTensor; give it q.full_tensor() and "
            "k.full_tensor(), or a rank's own part"
        )
    check_tensors(q, k, k)
    (b, hq, q_len, _), (hk, kv_len) = q.shape, k.shape[1:3]
    of_heads = _numbers("heads", heads, hq)
    query_rows = _numbers("queries", queries, q_len)
    numbers = b * len(of_heads) * len(query_rows) * kv_len
    if numbers > count_of("limit", limit):
        raise ArgumentError(
            f"the weights of {b} batch rows, {len(of_heads)} heads, {len(query_rows)} queries and "
            f"{kv_len} keys are {numbers} numbers, more than limit={limit}; look at a part, such "
            "as heads=[0], queries=range(256), and q[:1], k[:1] of the batch; or give a larger "
            "limit"
        )
    with torch.no_grad():
        spec, call = prepare(q, k, k, score, mask, scale, sink, backend="reference")
        weights = q.new_empty(
            b, len(of_heads), len(query_rows), kv_len, dtype=acc_dtype(call.q.dtype)
        )
        q_pos = torch.tensor(query_rows, dtype=torch.int64, device=q.device)
        for row in range(b):
            for n, h in enumerate(of_heads):
                of_k = call.k[row : row + 1, h // (hq // hk)][:, None]
                one = call.replace(
                    q=call.q[row : row + 1, h : h + 1].index_select(2, q_pos), k=of_k, v=of_k,
                    sink=None if sink is None else sink[h : h + 1],
                    coords=Coords(b=row, h=h, q_pos=q_pos),
                )  # fmt: skip
                try:
                    _, t, *_ = reference.scores(spec, one)
                except CapturedIndexError as error:
                    raise with_place(error, score, mask) from None
                weights[row, n] = reference.softmax(t, one.sink)[0][0, 0]
    return weights


def _numbers(name: str, requested: Any, size: int) -> list[int]:
    """The numbers that are asked for, each below `size`; all of them if None."""
    if requested is None:
        return list(range(size))
    if isinstance(requested, Tensor) and requested.dim() == 1:
        requested = requested.tolist()
    if not hasattr(requested, "__iter__") or isinstance(requested, str | Tensor):
        raise ArgumentError(
            f"{name}={requested!r} must be integers, such as range(4) or [0, 3]; None is all"
        )
    numbers = []
    for item in requested:
        n = as_int(item)
        if n is None or not -size <= n < size:
            raise ArgumentError(f"{name}: {item!r} must be an integer from {-size} to {size - 1}")
        numbers.append(n % size)
    return numbers
