"""From a call to a launch: what is allocated, and how results are put together."""

import math

import torch
from torch import Tensor

from ....types import Forward, Spec
from ...base import Call
from ..runtime.call_plan import empty_result
from .plan import planned


def infer(spec: Spec, call: Call) -> Forward:
    """One kernel; and for the largest logit, the maximum over the queries of a row."""
    q = _rows(call.q)
    k, v = (_columns(x) for x in call[1:3])
    sink = None if call.sink is None else call.sink.contiguous()
    call = call._replace(q=q, k=k, v=v, sink=sink)
    of_queries = lambda: torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    shape, dtype = (*q.shape[:3], v.shape[3]), spec.out_dtype(q.dtype)
    out, lse = torch.empty(shape, dtype=dtype, device=q.device), of_queries()
    row_max = of_queries() if spec.row_max else None
    top = of_queries() if spec.max_logit else None
    if lse.numel():
        plan, integers = planned(spec, call)
        plan.launch(call, integers, out, lse, row_max, top)
    none = empty_result(q.device)
    max_logit = none if top is None else _of_rows(call, top)
    return Forward(out, lse, max_logit, none if row_max is None else row_max)


def _of_rows(call: Call, top: Tensor) -> Tensor:
    """The largest logit of every row and head, of those of its queries. It waits for nothing."""
    kv = call.kv
    if kv is None or kv.cu_q is None:
        if not top.shape[2]:
            return top.new_full(top.shape[:2], -math.inf)
        return top.amax(-1)
    rows, hq, tokens = len(kv.lengths), *top.shape[1:]
    at = torch.arange(tokens, device=top.device)
    row = torch.searchsorted(kv.cu_q[1:].contiguous(), at, right=True, out_int32=False)
    found = top.new_full((rows + 1, hq), -math.inf)
    found.scatter_reduce_(0, row[:, None].expand(-1, hq), top[0].mT, "amax")
    return found[:rows]


def _rows(q: Tensor) -> Tensor:
    """q with contiguous rows that wide loads can read: itself, or a copy."""
    batch, head, row, one = q.stride()
    if one == 1 and not (batch | head | row) & 7 and not q.data_ptr() & 15:
        return q
    if q.shape[3] & 7:
        return torch.nn.functional.pad(q, (0, -q.shape[3] % 8))[..., : q.shape[3]]
    return q.clone(memory_format=torch.contiguous_format)


def _columns(x: Tensor) -> Tensor:
    """k or v with contiguous rows: itself, or, where columns are apart, a copy."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
