"""Forward, backward, tangent and inference as PyTorch operators: schemas, fakes, rules of vmap,
formulas of their flops, and gradients that refuse to be differentiated.

They are opaque to compilers (`torch.library.define` / `impl`): the spec's text and the shapes
determine what they do. The gradient is above them, in `autograd`, which completes
`headway::forward`.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Never

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.compiler import is_compiling
from torch.fx import traceback
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy

from .backends import get
from .backends.base import Call
from .blocks import Tiles, cached_build, check_tiles, superset_tiles
from .dropout import draw_seed, seed_not_saved
from .errors import BackendRefused
from .memory_order import exactly_in_order_of, new_in_order_of
from .mods.graph import parse
from .surroundings import apply_at_one_level, below_autograd, capturing
from .types import (
    KV,
    NAMESPACE,
    REPLICATED_KV,
    Captured,
    Coords,
    Dual,
    Forward,
    Spec,
    Tangents,
    acc_dtype,
    constant_under_compile,
    refuse_under_compile,
)

_INPUTS = (
    "str spec, Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? seed, Tensor[] tensors, "
    "SymInt[] ints, float[] floats, Tensor[] tiles, SymInt[] offsets, Tensor? q_pos, Tensor? kv_pos"
)
_CACHE = (
    "Tensor lengths, Tensor? page_table, Tensor? cu_q, SymInt max_q, Tensor? k_scale, "
    "Tensor? v_scale"
)
library = torch.library.Library(NAMESPACE, "DEF")
library.define(f"forward({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
library.define(
    f"backward({_INPUTS}, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, bool[] needs, "
    "Tensor? dentropy=None) -> Tensor[]"
)
library.define(f"infer({_INPUTS}, {_CACHE}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
library.define(
    f"tangent({_INPUTS}, Tensor?[] along) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
library.define("only_of_primal(Tensor dout, Tensor[] of_tangents, bool wait) -> Tensor")
library.define("draw_seed(Device device) -> Tensor")
library.define(
    "dense_tiles(str mask, Tensor[] tensors, SymInt[] ints, float[] floats, SymInt[] shape, "
    "SymInt[] tile, Device device) -> Tensor"
)


def call_of(
    q, k, v, sink, seed, tensors, ints, floats, tiles, offsets, q_pos, kv_pos
) -> Call:  # fmt: skip
    """Return the call of the operators' inputs after the spec. (AOTInductor passes None for an
    empty list, whatever the schema says.)"""
    return Call(
        q, k, v, sink, seed,
        Captured(list(tensors or ()), list(ints or ()), list(floats or ())),
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
    out, lse, dout, dlse, needs, *dentropy = inputs[12:]
    grads = get(parsed.backend).backward(
        parsed, call, out, lse, dout, dlse, tuple(needs), *dentropy
    )
    return [g for g in (*grads[:4], *grads.captured) if g is not None]


def tangent(spec: str, *inputs: Any) -> Dual:
    """Run `headway::tangent` without the dispatcher."""
    parsed, call = Spec.parse(spec), call_of(*inputs[:-1])
    q, k, v, sink, *captured = inputs[-1]
    if call.tiles is not None:
        check_tiles(call.tiles)
    along = Tangents(q, k, v, sink, tuple(captured))
    return get(parsed.backend).tangent(parsed, call, along)


def _dense_tiles(mask, tensors, ints, floats, shape, tile, device) -> Tensor:
    """Return `BlockMask.to_dense()` of a mask's graph. While a CUDA graph is captured, live tiles
    are partial, whatever tensors hold."""
    b, h, q_len, kv_len = shape
    build = superset_tiles if capturing(device) else cached_build
    captured = Captured(tensors or [], ints or [], floats or [])
    tiles, _, _ = build(parse(mask), captured, (b, h, q_len, kv_len), tuple(tile), device)
    rows, cols = -(-q_len // tile[0]), -(-kv_len // tile[1])
    return tiles.dense(cols).view(b, h, rows, cols)


def only_of_primal(dout: Tensor, of_tangents: list[Tensor], wait: bool) -> Tensor:
    """Return dout, the gradient of out, where the gradients of the tangents are all 0.

    Compilers differentiate every result of a program, asked for or not, so only the values say that
    nobody asked. Without `wait` a GPU checks them later, and the process ends with the message.

    **Raises:** `BackendRefused` where the tangents themselves are differentiated.
    """
    for grad in of_tangents:
        if grad.is_cuda and not wait:
            torch._assert_async((grad == 0).all(), TANGENT_DIFFERENTIATED)
        elif bool((grad != 0).any()):
            raise BackendRefused(TANGENT_DIFFERENTIATED)
    return dout.clone()


MATH = (
    "make that call with torch.nn.functional.scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)
TANGENT_DIFFERENTIATED = (
    "the tangent of attention has no gradient (a loss depends on what torch.func.jvp returned "
    f"second): detach() the tangent before the loss, or, where you need its gradient, {MATH}"
)


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
library.impl("dense_tiles", _dense_tiles, "CompositeExplicitAutograd")


# The operators return out in the memory order of q and contiguous tensors, as their fakes promise.
# The functions above need not: they would copy a model's transposed heads a second time.


def as_promised(q: Tensor, out: Tensor, *stats: Tensor) -> list[Tensor]:
    """Return the results of a forward with the strides of its fake.

    Backends may share one empty tensor for all that was not asked for. Results of an operator may
    not share memory.
    """
    contiguous = [x.contiguous() if x.numel() else torch.empty_like(x) for x in stats]
    return [exactly_in_order_of(q, out), *contiguous]


def _backward_operator(spec: str, *inputs: Any) -> list[Tensor]:
    return [g.contiguous() for g in backward(spec, *inputs)]


def _tangent_operator(spec: str, q: Tensor, *inputs: Any) -> Dual:
    dual = tangent(spec, q, *inputs)
    primal, tangents = dual[:-3], dual[-3:]
    return Dual(*as_promised(q, *primal), *as_promised(q, *tangents))  # type: ignore[arg-type]


def _infer_operator(spec: str, q: Tensor, *inputs: Any) -> Forward:
    return Forward(*as_promised(q, *infer(spec, q, *inputs)))


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
        q.new_empty((b, hq, q_len) if parsed.entropy else (0,), dtype=acc),
    )


def grads_like(spec: str, q, k, v, sink, tensors, needs) -> list[Tensor]:
    """Return empty results of a backward."""
    parsed = Spec.parse(spec)
    acc = acc_dtype(q.dtype)
    q_dtype, kv_dtype = parsed.grad_dtypes(q.dtype)
    dtypes = (q, q_dtype), (k, kv_dtype), (v, kv_dtype)
    grads = [x.new_empty(x.shape, dtype=dtype) for x, dtype in dtypes]
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
    return grads_like(spec, q, k, v, sink, tensors, rest[10])


def _tangent_fake(spec: str, q, k, v, *rest: Any) -> Dual:
    primal, dtype = results_like(spec, q, v, q.shape[0]), Spec.parse(spec).result_dtype(q.dtype)
    out_tangent = new_in_order_of(q, primal.out.shape, dtype)
    return Dual(
        *primal, out_tangent, torch.empty_like(primal.lse), torch.empty_like(primal.entropy)
    )


def _dense_tiles_fake(mask, tensors, ints, floats, shape, tile, device) -> Tensor:
    b, h, q_len, kv_len = shape
    grid = -(-q_len // tile[0]), -(-kv_len // tile[1])
    return torch.empty((b, h, *grid), dtype=torch.uint8, device=device)


library.impl("backward", _backward_operator, "CompositeExplicitAutograd")
library.impl("tangent", _tangent_operator, "CompositeExplicitAutograd")
library.impl("only_of_primal", only_of_primal, "CompositeExplicitAutograd")
library.impl("infer", _infer_operator, "CompositeExplicitAutograd")
for _name in ("infer", "tangent"):  # autograd is above
    library.impl(_name, torch.library.fallthrough_kernel, "Autograd")


def register_fake(name: str, fake: Callable) -> None:
    """Register the fake of an operator. All do it from this file: PyTorch looks through all modules
    when it meets a file for the first time, which takes 2 ms of `import headway`."""
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)


register_fake("forward", _forward_fake)
register_fake("backward", _backward_fake)
register_fake("infer", _infer_fake)
register_fake("tangent", _tangent_fake)
register_fake("only_of_primal", lambda dout, *_: torch.empty_like(dout))
register_fake("dense_tiles", _dense_tiles_fake)


def _one_by_one(op: Any) -> Callable:
    """Return the rule of `torch.vmap`: it calls the operator for every entry of the batch.

    A batch of q, k and v could be folded into one call. Batches of captured tensors, sinks and
    seeds could not, nor could the gradients of shared tensors.
    """

    def rule(info, in_dims, *inputs):
        count = info.batch_size  # of none, the results have their shapes still
        results = [op(*_entry(inputs, in_dims, n)) for n in range(max(count, 1))]
        stacked = [torch.stack(same)[:count] for same in zip(*results, strict=True)]
        if op is _backward_op:
            return stacked, [0] * len(stacked)
        return tuple(stacked), (0,) * len(stacked)

    return rule


def _of_batch(in_dims: Any, dout: Tensor, of_tangents: list[Tensor], wait: bool) -> Any:
    return only_of_primal_op(dout, of_tangents, wait), in_dims[0]


def _entry(x: Any, dim: Any, n: int) -> Any:
    if isinstance(x, list | tuple):
        return [_entry(item, item_dim, n) for item, item_dim in zip(x, dim, strict=True)]
    if dim is None or x.shape[dim] == 0:
        return x if dim is None else x.sum(dim, dtype=x.dtype)
    return x.select(dim, n)


_ours = getattr(torch.ops, NAMESPACE)
forward_op, backward_op, infer_op = _ours.forward, _ours.backward, _ours.infer
_backward_op = backward_op.default
draw_seed_op, tangent_op, only_of_primal_op = _ours.draw_seed, _ours.tangent, _ours.only_of_primal
for _name in ("forward", "backward", "infer", "tangent"):
    _rule = _one_by_one(getattr(_ours, _name).default)
    torch.library.register_vmap(f"{NAMESPACE}::{_name}", _rule, lib=library)
torch.library.register_vmap(
    f"{NAMESPACE}::only_of_primal", lambda info, in_dims, *inputs: _of_batch(in_dims, *inputs),
    lib=library,
)  # fmt: skip


def warn_traced() -> None:
    """Warn under `torch.jit.trace`, whose graph holds operators and nothing else."""
    if torch._C._is_tracing():
        warnings.warn(
            "torch.jit.trace keeps the score and the mask of this call, what they capture, and "
            "all that was worked out from lengths as constants: the traced function may be wrong "
            "for other inputs. Use torch.export or torch.compile",
            torch.jit.TracerWarning,
            stacklevel=4,
        )


# -- formulas for `torch.utils.flop_counter.FlopCounterMode` ---------------------------------------
# They count every pair, as PyTorch does for its own attention: shapes do not say what a mask skips.


def _forward_flops(q, k, v, *args, **kwargs) -> int:
    b, h, q_len, d = q
    return 2 * b * h * q_len * k[2] * (d + v[3])


def _backward_flops(q, k, v, *args, **kwargs) -> int:
    b, h, q_len, d = q  # S, dq, dk: width d; dP, dv: width dv
    return 2 * b * h * q_len * k[2] * (3 * d + 2 * v[3])


def _tangent_flops(
    q, k, v, sink, seed, tensors, ints, floats, tiles, offsets, q_pos, kv_pos, along
) -> int:
    b, h, q_len, d = q  # S', for q' and for k'; out' from T', and from v'
    q_moves, k_moves, v_moves = (x is not None for x in along[:3])
    products = (q_moves + k_moves) * d + (1 + v_moves) * v[3]
    return _forward_flops(q, k, v) + 2 * b * h * q_len * k[2] * products


def _over_ranks(work):
    """Return the formula for this rank's queries and all keys, whose number is that of a table of
    shards, or the length of k."""

    def formula(spec, q, k, *given, **kwargs) -> int:
        table = given[-1 - _AFTER[work]]
        length = int(table[:, 2].max()) if len(table) else 0
        exchange = Spec.parse(spec).exchange
        if exchange is not None and exchange.plan == REPLICATED_KV:
            length = k.shape[2]
        return work(q.shape, (*k.shape[:2], length), given[0].shape)

    return formula


# Arguments of an operator over ranks behind its table of the keys.
_AFTER = {_forward_flops: 0, _backward_flops: 6}


def register_flops() -> None:
    """Register formulas of our operators, and of PyTorch's that may run in their place, once
    `FlopCounterMode` is imported: its import loads Triton."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return
    if _ours.forward in counter.flop_registry:
        return
    raw = {
        _ours.cp_forward: _over_ranks(_forward_flops),
        _ours.cp_backward: _over_ranks(_backward_flops),
    }
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    formulas = {
        _ours.forward: lambda spec, *args, **kwargs: _forward_flops(*args),
        _ours.backward: lambda spec, *args, **kwargs: _backward_flops(*args),
        _ours.tangent: lambda spec, *args, **kwargs: _tangent_flops(*args),
        getattr(torch.ops.aten, kernel): _forward_flops,
        getattr(torch.ops.aten, f"{kernel}_backward"): lambda dout, *args, **kwargs: (
            _backward_flops(*args)
        ),
    }
    for op, formula in formulas.items():
        if op not in counter.flop_registry:
            counter.register_flop_formula(op)(formula)
    for op, formula in raw.items():
        if op not in counter.flop_registry:
            counter.register_flop_formula(op, get_raw=True)(formula)
    for mode in _get_current_dispatch_mode_stack():  # modes copy the registry when they are made
        if isinstance(active := getattr(mode, "counter", None), counter.FlopCounterMode):
            active.flop_registry.update({op: counter.flop_registry[op] for op in (*formulas, *raw)})


# -- attention has no second derivative -----------------------------------------------------------

IN_PROGRAM = "create_graph=True in a compiled program, which would drop it"
HESSIAN = "a backward in forward mode, as torch.func.hessian makes one"


def refuse_second_derivative(what: str) -> Never:
    """Raise the error of a second derivative; `what` was differentiated again."""
    raise BackendRefused(_second_derivative(what))


def _second_derivative(what: str) -> str:
    return (
        f"attention has no second derivative ({what}); if you need one, as for a gradient "
        f"penalty, {MATH}"
    )


class _OnceDifferentiable(torch.autograd.Function):
    """A gradient that refuses to be differentiated."""

    @staticmethod
    def forward(grad, *differentiable):
        with below_autograd():
            return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grad_outputs):
        refuse_second_derivative(
            "you differentiated the gradients of a call, as create_graph=True allows"
            if not is_compiling()
            else "torch.compile differentiates what torch.func.grad returns wherever an input "
            "requires grad; detach() your parameters, or call under torch.no_grad()"
        )

    @staticmethod
    def jvp(ctx, *tangents):
        refuse_second_derivative(HESSIAN)


def once_differentiable(grads: Sequence[Tensor | None], *inputs: Tensor | None) -> tuple:
    """Return gradients that refuse to be differentiated with respect to any of `inputs`."""
    differentiable = [x for x in inputs if x is not None and x.requires_grad]
    return tuple([
        None if g is None else apply_at_one_level(_OnceDifferentiable, g, *differentiable)
        for g in grads
    ])  # fmt: skip


def refuse_create_graph_in_program() -> None:
    """Refuse the program that Dynamo traces if it takes gradients of attention with
    `create_graph=True`. (With `trace_autograd_ops`, `torch.autograd.grad` is in the graph.)"""
    from torch._dynamo import config
    from torch._dynamo.symbolic_convert import tls

    if not getattr(config, "trace_autograd_ops", False):
        return

    def check(program: torch.fx.GraphModule) -> None:
        reached: set[torch.fx.Node] = set()  # from a call, or from a body that may hold one
        for node in program.graph.nodes:
            calls = node.target is forward_op or isinstance(node.target, HigherOrderOperator)
            if not calls and reached.isdisjoint(node.all_input_nodes):
                continue
            reached.add(node)
            if node.target is torch.autograd.grad and (
                node.kwargs.get("create_graph") or any(node.args[4:5])
            ):
                refuse_under_compile(BackendRefused, _second_derivative(IN_PROGRAM))

    tls.current_tx.output.add_graph_finalizer(check)


constant_under_compile(refuse_create_graph_in_program)


def once_differentiable_kernel(op: Any) -> Callable:
    """Return the kernel of a backward's operator for autograd: its results refuse to be
    differentiated."""

    def kernel(spec: str, *inputs: Any) -> list[Tensor]:
        with below_autograd():
            grads = op(spec, *inputs)
        if not torch.is_grad_enabled():
            return grads
        flat_inputs = chain.from_iterable(x if isinstance(x, list) else [x] for x in inputs)
        return list(once_differentiable(grads, *[x for x in flat_inputs if isinstance(x, Tensor)]))

    return kernel


library.impl("backward", once_differentiable_kernel(backward_op), "Autograd")


def refuse_create_graph(grads: Any, grad_outputs: Any) -> Any:
    """Return `once_differentiable` gradients where a graph of the backward is made, as a hook of
    PyTorch's operator."""
    return once_differentiable(grads, *grad_outputs) if torch.is_grad_enabled() else None
