"""Forward, backward and inference as PyTorch operators: schemas, fakes and rules of vmap.

They are opaque to compilers (`torch.library.define` / `impl`): the spec's text and the shapes
determine what they do. The gradient is above them, in `autograd`, which completes
`headway::forward`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

from .backends import get
from .backends.base import Call
from .blocks import Tiles, check_tiles
from .dropout import draw_seed, seed_not_saved
from .memory_order import exactly_in_order_of, new_in_order_of
from .types import KV, NAMESPACE, Captured, Coords, Forward, Spec, acc_dtype

_INPUTS = (
    "str spec, Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? seed, Tensor[] tensors, "
    "SymInt[] ints, float[] floats, Tensor[] tiles, SymInt[] offsets, Tensor? q_pos, Tensor? kv_pos"
)
_CACHE = (
    "Tensor lengths, Tensor? page_table, Tensor? cu_q, SymInt max_q, Tensor? k_scale, "
    "Tensor? v_scale"
)
library = torch.library.Library(NAMESPACE, "DEF")
library.define(f"forward({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)")
library.define(
    f"backward({_INPUTS}, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, bool[] needs) "
    "-> Tensor[]"
)
library.define(f"infer({_INPUTS}, {_CACHE}) -> (Tensor, Tensor, Tensor, Tensor)")
library.define("draw_seed(Device device) -> Tensor")


def call_of(
    q, k, v, sink, seed, tensors, ints, floats, tiles, offsets, q_pos, kv_pos
) -> Call:  # fmt: skip
    """Return the call of the operators' inputs after the spec."""
    return Call(
        q, k, v, sink, seed,
        Captured(list(tensors), list(ints), list(floats)),
        Tiles.unflatten(list(tiles)) if tiles else None,
        Coords(
            offsets[0], offsets[1], offsets[2], offsets[3], q_pos, kv_pos,
            offsets[4] if len(offsets) > 4 else 0,  # callers of an operator may leave it out
        ),
    )  # fmt: skip


def flat(call: Call) -> tuple:
    """Return the inputs of the operators after the spec, which `call_of` takes."""
    tiles = [] if call.tiles is None else call.tiles.flatten()
    coords = call.coords
    offsets = [coords.b, coords.h, coords.q, coords.kv, coords.straight_below]
    return (
        call.q, call.k, call.v, call.sink, call.seed, *call.captured, tiles, offsets,
        coords.q_pos, coords.kv_pos,
    )  # fmt: skip


def flat_kv(call: Call) -> tuple:
    """Return the inputs of `headway::infer` after the spec: those of `flat`, then the cache."""
    assert call.kv is not None
    return *flat(call), *call.kv


def infer(spec: str, *inputs: Any) -> Forward:
    """Run `headway::infer` without the dispatcher."""
    count = len(KV._fields)
    parsed, call = Spec.parse(spec), call_of(*inputs[:-count])
    if call.tiles is not None:
        check_tiles(call.tiles)
    return get(parsed.backend).infer(parsed, call._replace(kv=KV(*inputs[-count:])))


def forward(spec: str, *inputs: Any) -> Forward:
    """Run `headway::forward` without the dispatcher."""
    parsed, call = Spec.parse(spec), call_of(*inputs)
    if call.tiles is not None:
        check_tiles(call.tiles)
    return get(parsed.backend).forward(parsed, call)


def backward(spec: str, *inputs: Any) -> list[Tensor]:
    """Run `headway::backward` without the dispatcher."""
    parsed, call = Spec.parse(spec), call_of(*inputs[:12])
    out, lse, dout, dlse, needs = inputs[12:]
    grads = get(parsed.backend).backward(parsed, call, out, lse, dout, dlse, tuple(needs))
    return [g for g in (*grads[:4], *grads.captured) if g is not None]


def _draw_seed(device: torch.device) -> Tensor:
    """Draw a seed in a compiled program, and mark it as one to save: the backward needs it, and
    under a memory budget PyTorch's partitioner would draw another."""
    meta = traceback.current_meta  # what the nodes that are traced here are marked with
    if (meta.get("custom") or {}).get("_region_activation_memory_budget") == 0:
        raise seed_not_saved("torch.autograd.graph.region_activation_memory_budget")
    previous = {name: meta[name] for name in ("recompute",) if name in meta}
    meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        return draw_seed(device)
    finally:
        del meta["recompute"]
        meta.update(previous)


library.impl("draw_seed", _draw_seed, "CompositeImplicitAutograd")


# The operators return out in the memory order of q and contiguous tensors, as their fakes promise.
# The functions above need not: they would copy a model's transposed heads a second time.


def as_promised(q: Tensor, results: Forward) -> Forward:
    """Return the results of a forward with the strides of its fake."""
    out, *stats = results
    return Forward(exactly_in_order_of(q, out), *[x.contiguous() for x in stats])


def _backward_operator(spec: str, *inputs: Any) -> list[Tensor]:
    return [g.contiguous() for g in backward(spec, *inputs)]


def _infer_operator(spec: str, q: Tensor, *inputs: Any) -> Forward:
    return as_promised(q, infer(spec, q, *inputs))


def results_like(spec: str, q: Tensor, v: Tensor, rows: int) -> Forward:
    """Return empty results of a forward; `rows` is the batch size of max_logit."""
    parsed = Spec.parse(spec)
    b, hq, q_len, _ = q.shape
    acc = acc_dtype(q.dtype)
    return Forward(
        new_in_order_of(q, (b, hq, q_len, v.shape[3]), parsed.out_dtype(q.dtype)),
        q.new_empty((b, hq, q_len), dtype=acc),
        q.new_empty((rows, hq) if parsed.max_logit else (0,), dtype=acc),
        q.new_empty((b, hq, q_len) if parsed.row_max else (0,), dtype=acc),
    )


def grads_like(spec: str, q, k, v, sink, tensors, needs) -> list[Tensor]:
    """Return empty results of a backward."""
    parsed = Spec.parse(spec)
    acc = acc_dtype(q.dtype)
    dtype = acc if parsed.partial else q.dtype
    grads = [x.new_empty(x.shape, dtype=dtype) for x in (q, k, v)]
    grads += [] if sink is None else [q.new_empty(sink.shape, dtype=acc)]
    return grads + [
        q.new_empty(t.shape, dtype=acc)
        for t, need in zip(tensors[: parsed.score_tensors], needs, strict=True)
        if need
    ]


def _infer_fake(spec: str, q, k, v, *rest: Any) -> Forward:
    return results_like(spec, q, v, rest[-len(KV._fields)].shape[0])


def _forward_fake(spec: str, q, k, v, *rest: Any) -> Forward:
    return results_like(spec, q, v, q.shape[0])


def _backward_fake(spec: str, q, k, v, sink, seed, tensors, *rest: Any) -> list[Tensor]:
    return grads_like(spec, q, k, v, sink, tensors, rest[-1])


library.impl("backward", _backward_operator, "CompositeExplicitAutograd")
library.impl("infer", _infer_operator, "CompositeExplicitAutograd")
for _name in ("forward", "backward", "infer"):  # autograd is above them, or inside `_forward`
    library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake(f"{NAMESPACE}::forward", _forward_fake, lib=library)
torch.library.register_fake(f"{NAMESPACE}::backward", _backward_fake, lib=library)
torch.library.register_fake(f"{NAMESPACE}::infer", _infer_fake, lib=library)


def _one_by_one(op: Any) -> Callable:
    """Return the rule of `torch.vmap`: it calls the operator for every entry of the batch.

    A batch of q, k and v could be folded into one call. Batches of captured tensors, sinks and
    seeds could not, nor could the gradients of shared tensors.
    """

    def rule(info, in_dims, *inputs):
        results = [op(*_entry(inputs, in_dims, n)) for n in range(info.batch_size)]
        stacked = [torch.stack(same) for same in zip(*results, strict=True)]
        return (stacked, [0] * len(stacked)) if op is _backward_op else (tuple(stacked), (0,) * 4)

    return rule


def _entry(x: Any, dim: Any, n: int) -> Any:
    if isinstance(x, list | tuple):
        return [_entry(item, item_dim, n) for item, item_dim in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, n)


_ours = getattr(torch.ops, NAMESPACE)
forward_op, backward_op, infer_op = _ours.forward, _ours.backward, _ours.infer
_forward_op, _backward_op = forward_op.default, backward_op.default
draw_seed_op = _ours.draw_seed
torch.library.register_vmap(f"{NAMESPACE}::forward", _one_by_one(_forward_op), lib=library)
torch.library.register_vmap(f"{NAMESPACE}::backward", _one_by_one(_backward_op), lib=library)
