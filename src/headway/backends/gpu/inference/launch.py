"""Run a call: allocate its results, launch the kernel, and reduce the largest logits."""

import math

import torch
from torch import Tensor

from ....types import Forward, Spec
from ...base import Call
from ..runtime.call_plan import empty_result
from .plan import plan_and_integers


def infer(spec: Spec, call: Call) -> Forward:
    """Launch the kernel for a call; `Backend.infer`."""
    q = _with_wide_rows(call.q)
    k, v = _with_contiguous_rows(call.k), _with_contiguous_rows(call.v)
    sink = None if call.sink is None else call.sink.contiguous()
    if not (q is call.q and k is call.k and v is call.v and sink is call.sink):
        call = call._replace(q=q, k=k, v=v, sink=sink)
    (b, hq, q_len, _), device = q.shape, q.device
    per_query = lambda: torch.empty((b, hq, q_len), dtype=torch.float32, device=device)
    dtype = spec.out_dtype(q.dtype)
    out = torch.empty((b, hq, q_len, v.shape[3]), dtype=dtype, device=device)
    lse = per_query()
    row_max = per_query() if spec.row_max else None
    query_logits = per_query() if spec.max_logit else None
    if b and hq and q_len:
        plan, integers = plan_and_integers(spec, call)
        plan.launch(call, integers, out, lse, row_max, query_logits)
    empty = empty_result(device)
    max_logit = empty if query_logits is None else _max_logit_of_rows(call, query_logits)
    return Forward(out, lse, max_logit, empty if row_max is None else row_max, empty)


def _max_logit_of_rows(call: Call, query_logits: Tensor) -> Tensor:
    """Return the largest logit of every row and head, without waiting for the GPU.

    - `query_logits`: the largest of every query.
    """
    kv = call.kv
    if kv is None or kv.cu_q is None:
        if not query_logits.shape[2]:
            return query_logits.new_full(query_logits.shape[:2], -math.inf)
        return query_logits.amax(-1)
    rows, hq, tokens = len(kv.lengths), *query_logits.shape[1:]
    token = torch.arange(tokens, device=query_logits.device)
    row = torch.searchsorted(kv.cu_q[1:].contiguous(), token, right=True, out_int32=False)
    max_logit = query_logits.new_full((rows + 1, hq), -math.inf)
    max_logit.scatter_reduce_(0, row[:, None].expand(-1, hq), query_logits[0].mT, "amax")
    return max_logit[:rows]


def _with_wide_rows(q: Tensor) -> Tensor:
    """Return q, or a copy, with contiguous rows that wide loads can read."""
    batch, head, row, column = q.stride()
    if column == 1 and not (batch | head | row) & 7 and not q.data_ptr() & 15:
        return q
    if q.shape[3] & 7:
        return torch.nn.functional.pad(q, (0, -q.shape[3] % 8))[..., : q.shape[3]]
    return q.clone(memory_format=torch.contiguous_format)


def _with_contiguous_rows(k: Tensor) -> Tensor:
    """Return k or v, or a copy with contiguous rows."""
    return k if k.stride(3) == 1 or k.shape[3] == 1 else k.contiguous()
