"""The pair as PyTorch operators: schemas, fakes, FLOP formulas, and one autograd function.

The operators are opaque to compilers (`torch.library.define` / `impl`): what they do is decided by
the spec's text and the shapes. Autograd is one `torch.autograd.Function` above them, so that
`torch.func` and `torch.compile` see its `setup_context`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .backends import cpu, get
from .backends.base import Call
from .blocks import Tiles
from .errors import BackendRefused
from .flops import register_flops
from .types import (
    Captured,
    Coords,
    Forward,
    Spec,
    acc_dtype,
    constant_under_compile,
    in_dtype,
)

_INPUTS = (
    "str spec, Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? seed, Tensor[] tensors, "
    "SymInt[] ints, float[] floats, Tensor[] tiles, SymInt[] offsets, Tensor? q_pos, Tensor? kv_pos"
)
_library = torch.library.Library("headway", "DEF")
_library.define(f"forward({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"backward({_INPUTS}, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, bool[] needs) "
    "-> Tensor[]"
)


def _call(
    q, k, v, sink, seed, tensors, ints, floats, tiles, offsets, q_pos, kv_pos
) -> Call:  # fmt: skip
    return Call(
        q, k, v, sink, seed,
        Captured(list(tensors), list(ints), list(floats)),
        Tiles.unflatten(list(tiles)) if tiles else None,
        Coords(offsets[0], offsets[1], offsets[2], offsets[3], q_pos, kv_pos),
    )  # fmt: skip


def _forward(spec: str, *inputs: Any) -> Forward:
    parsed = Spec.parse(spec)
    return get(parsed.backend).forward(parsed, _call(*inputs))


def _backward(spec: str, *inputs: Any) -> list[Tensor]:
    parsed, call = Spec.parse(spec), _call(*inputs[:12])
    out, lse, dout, dlse, needs = inputs[12:]
    dq, dk, dv, dsink, captured = get(parsed.backend).backward(
        parsed, call, out, lse, dout, dlse, tuple(needs)
    )
    grads = [dq, dk, dv] + ([] if dsink is None else [dsink])
    return [g for g in (*grads, *captured) if g is not None]


# As operators they return what the fakes promise: tensors without gaps. (By themselves they do not:
# a model's transposed heads would be copied twice.)


def _forward_operator(spec: str, *inputs: Any) -> Forward:
    call = _call(*inputs)
    # An exported program calls the operator by itself: then it has to be differentiable itself.
    if torch.is_grad_enabled() and _learns([*call[:5], *call.captured.tensors]):
        return attention(Spec.parse(spec), call)
    return Forward(*[x.contiguous() for x in _forward(spec, *inputs)])


def _backward_operator(spec: str, *inputs: Any) -> list[Tensor]:
    return [g.contiguous() for g in _backward(spec, *inputs)]


def _forward_fake(spec: str, q, k, v, *rest: Any) -> Forward:
    parsed = Spec.parse(spec)
    b, hq, q_len, _ = q.shape
    acc = acc_dtype(q.dtype)
    return Forward(
        q.new_empty((b, hq, q_len, v.shape[3]), dtype=acc if parsed.partial else q.dtype),
        q.new_empty((b, hq, q_len), dtype=acc),
        q.new_empty((b, hq) if parsed.max_logit else (0,), dtype=acc),
        q.new_empty((b, hq, q_len) if parsed.row_max else (0,), dtype=acc),
    )


def _backward_fake(spec: str, q, k, v, sink, seed, tensors, *rest: Any) -> list[Tensor]:
    parsed, needs = Spec.parse(spec), rest[-1]
    acc = acc_dtype(q.dtype)
    dtype = acc if parsed.partial else q.dtype
    grads = [x.new_empty(x.shape, dtype=dtype) for x in (q, k, v)]
    grads += [] if sink is None else [q.new_empty(sink.shape, dtype=acc)]
    return grads + [
        q.new_empty(t.shape, dtype=acc)
        for t, need in zip(tensors[: parsed.score_tensors], needs, strict=True)
        if need
    ]


_library.impl("forward", _forward_operator, "CompositeExplicitAutograd")
_library.impl("backward", _backward_operator, "CompositeExplicitAutograd")
for _name in ("forward", "backward"):  # autograd is above them, or inside `_forward`
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("headway::forward", _forward_fake, lib=_library)
torch.library.register_fake("headway::backward", _backward_fake, lib=_library)


def _one_by_one(op: Any) -> Callable:
    """The rule of `torch.vmap`: the operator for every entry of the batch, with what belongs to it.

    Batches of q, k and v could be folded into one call; batches of captured tensors, sinks and
    seeds could not, nor the gradients of what is shared.
    """

    def rule(info, in_dims, *inputs):
        results = [op(*_entry(inputs, in_dims, n)) for n in range(info.batch_size)]
        stacked = [torch.stack(same) for same in zip(*results, strict=True)]
        return (stacked, [0] * len(stacked)) if op is _backward_op else (tuple(stacked), (0,) * 4)

    return rule


def _entry(x: Any, dim: Any, n: int) -> Any:
    if isinstance(x, list | tuple):
        return [_entry(item, at, n) for item, at in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, n)


_forward_op, _backward_op = torch.ops.headway.forward.default, torch.ops.headway.backward.default
torch.library.register_vmap("headway::forward", _one_by_one(_forward_op), lib=_library)
torch.library.register_vmap("headway::backward", _one_by_one(_backward_op), lib=_library)


class _NotTwice(torch.autograd.Function):
    """A gradient that refuses to be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad, *on):
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grad_outputs):
        raise BackendRefused(
            "attention has no second derivative (the gradients of a call were differentiated, "
            "which create_graph=True allows); where you need one, as for a gradient penalty, make "
            "that call with torch.nn.functional.scaled_dot_product_attention under "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


class _Attention(torch.autograd.Function):
    """Differentiable in q, k, v, sink, the tensors captured by the score, and through lse."""

    generate_vmap_rule = True

    # `*inputs` and no names: torch binds the arguments to forward's signature at every call, which
    # with names costs more than the call.
    @staticmethod
    def forward(*inputs):
        spec, ints, floats, offsets, counts, q, k, v, sink, seed, q_pos, kv_pos, *tensors = inputs
        captured, tiles = tensors[: counts[1]], tensors[counts[1] :]
        run = torch.ops.headway.forward if _watched(q, k, v, *tensors) else _forward
        return run(spec, q, k, v, sink, seed, captured, ints, floats, tiles, offsets, q_pos, kv_pos)

    @staticmethod
    def setup_context(ctx, inputs, output):
        spec, ints, floats, offsets, counts, *tensors = inputs
        out, lse, max_logit, row_max = output
        ctx.spec, ctx.ints, ctx.floats, ctx.offsets, ctx.counts = (
            spec,
            ints,
            floats,
            offsets,
            counts,
        )
        ctx.save_for_backward(out, lse, *tensors)
        ctx.mark_non_differentiable(max_logit, row_max)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *grad_outputs):  # pyrefly: ignore[bad-override]
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return _Attention.gradients(ctx, *grad_outputs)
        with torch.no_grad():
            grads = _Attention.gradients(ctx, *grad_outputs)
        # create_graph=True: a second derivative must not be dropped in silence.
        on = [x for x in (*grad_outputs, *ctx.saved_tensors) if x is not None and x.requires_grad]
        return tuple([None if g is None else _NotTwice.apply(g, *on) for g in grads])

    @staticmethod
    def gradients(ctx, *grad_outputs):
        """The gradients of every input of `forward`."""
        dout, dlse, _max_logit, _row_max = grad_outputs
        out, lse, q, k, v, sink, seed, q_pos, kv_pos, *tensors = ctx.saved_tensors
        of_score, count = ctx.counts
        captured, tiles = tensors[:count], tensors[count:]
        needs = [
            ctx.needs_input_grad[12 + n] and t.is_floating_point()
            for n, t in enumerate(captured[:of_score])
        ]
        if dout is None:
            dout = torch.zeros_like(out)
        run = _backward
        if _watched(q, k, v, dout, *tensors):
            run = torch.ops.headway.backward
            if not torch.compiler.is_compiling():
                register_flops()  # a counter may be there for the backward alone
        results = iter(
            run(
                ctx.spec, q, k, v, sink, seed, captured, ctx.ints, ctx.floats, tiles,
                ctx.offsets, q_pos, kv_pos, out, lse, dout, dlse, needs,
            )
        )  # fmt: skip
        dq, dk, dv = (in_dtype(next(results), x.dtype) for x in (q, k, v))
        dsink = None if sink is None else in_dtype(next(results), sink.dtype)
        dcaptured = [
            in_dtype(next(results), t.dtype) if need else None
            for need, t in zip(needs, captured, strict=False)
        ]
        rest = len(tensors) - len(dcaptured)
        nothing = (None,) * 5
        return (*nothing, dq, dk, dv, dsink, None, None, None, *dcaptured, *(None,) * rest)


class _Direct(torch.autograd.Function):
    """`_Attention` in the older style, which costs half as much per call; `torch.func` and
    compilers do not take it."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _Attention.forward(*inputs)
        _Attention.setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, *grad_outputs):  # pyrefly: ignore[bad-override]
        return _Attention.backward(ctx, *grad_outputs)


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def _watched(*tensors: Tensor | None) -> bool:
    """Whether something has to see the operators: a compiler, a mode, a transform, a tracer, a
    profiler, a subclass of Tensor. Where nothing has, they are skipped: a tenth of a millisecond
    counts where tensors are small."""
    return torch.compiler.is_compiling() or _seen(*tensors)


def _seen(*tensors: Tensor | None) -> bool:
    """`_watched`, less compilers."""
    return (
        _seen_by_modes()
        or tensors[0].is_meta  # type: ignore[union-attr]
        or not _PLAIN.issuperset(map(type, tensors))
    )


def _seen_by_modes() -> bool:
    """`_seen`, whatever the tensors."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0
        or torch._C._is_tracing()
        or torch.autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    )


def _distinct(inputs: list[Tensor | None]) -> list[Tensor | None]:
    """Each tensor once: `torch.compile` refuses an autograd function that gets one twice."""
    seen: list[Tensor | None] = []
    for x in inputs:
        again = x is not None and any(x is y for y in seen)
        seen.append(x.view_as(x) if again else x)
    return seen


def _learns(inputs: list[Tensor | None]) -> bool:
    return any(x is not None and x.requires_grad for x in inputs)


def save_ops() -> list[Any]:
    """The operators (ours, and PyTorch's in their place) whose results are worth keeping under
    selective activation checkpointing:

        policy = lambda: create_selective_checkpoint_contexts(headway.save_ops())
        checkpoint(block, x, use_reentrant=False, context_fn=policy)

    Attention then runs once, forward and backward, and the rest of the block twice.
    """
    native = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return [torch.ops.headway.forward.default, native]


def attention(spec: Spec, call: Call) -> Forward:
    """The pair under autograd."""
    q, k, v, sink, seed, captured, given, coords = call
    tensors, ints, floats = captured
    tiles = [] if given is None else given.flatten()
    *offsets, q_pos, kv_pos = coords
    inputs = [q, k, v, sink, seed, q_pos, kv_pos, *tensors, *tiles]
    learning = torch.is_grad_enabled() and _learns(inputs)
    watched = _watched(*inputs)
    if not learning and not watched:
        return get(spec.backend).forward(spec, call)
    compiling = torch.compiler.is_compiling()
    if not compiling:
        register_flops()
    elif _differentiated():
        raise BackendRefused(
            "torch.compile would lose the gradients of this call, which torch.func takes inside of "
            "what is compiled; use torch.autograd.grad there, or leave out fullgraph=True"
        )
    if not learning and forward_ad._current_level < 0:  # `_Attention` refuses forward mode by name
        results = torch.ops.headway.forward(
            spec.text, q, k, v, sink, seed, tensors, ints, floats, tiles, offsets, q_pos, kv_pos
        )
    else:
        counts = spec.score_tensors, len(tensors)
        if compiling:
            inputs = _distinct(inputs)
        function = _Attention if watched else _Direct
        results = function.apply(spec.text, ints, floats, offsets, counts, *inputs)
    return Forward(*results)


def _differentiated() -> bool:
    """Whether `torch.func` differentiates what is compiled."""
    if not torch._C._are_functorch_transforms_active():
        return False
    kinds = {layer.key() for layer in torch._C._functorch.get_interpreter_stack() or ()}
    return not kinds <= {torch._C._functorch.TransformType.Vmap}


constant_under_compile(_differentiated)


def output(spec: Spec, call: Call) -> Tensor:
    """`attention(spec, call).out`, by the backend's `native` where nobody watches for our
    operators. A compiler does not: PyTorch's it knows better."""
    q, k, v, _, _, (tensors, _, _), _, _ = call
    compiling = torch.compiler.is_compiling()
    if _opaque() if compiling else _seen(q, k, v, *tensors):
        return attention(spec, call).out
    out = get(spec.backend).native(spec, call, None if compiling else _refuse_twice)
    if out is None:
        return attention(spec, call).out
    if out.requires_grad and not compiling:
        register_flops()  # a counter may be there for the backward alone
    return out


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor | None:
    """`output` of a call without score, sink and dropout, causal or without a mask, on the CPU, by
    that backend's `plain`; None where that does not do it."""
    compiling = torch.compiler.is_compiling()
    if _opaque() if compiling else _seen_by_modes():
        return None
    out = cpu.plain(q, k, v, causal, scale, None if compiling else _refuse_twice)
    if not compiling and out is not None and out.requires_grad:
        register_flops()
    return out


def _opaque() -> bool:
    """Whether a compiler is to see our operators: in programs that are exported, and below vmap."""
    transformed = torch._C._are_functorch_transforms_active() and not _differentiated()
    return transformed or torch.compiler.is_exporting()


constant_under_compile(_opaque)


def _refuse_twice(grads: Any, grad_outputs: Any) -> Any:
    """A hook of the node of PyTorch's operator: what `_Attention.backward` does for ours."""
    if torch.is_grad_enabled():
        on = [x for x in grad_outputs if x is not None and x.requires_grad]
        return tuple([None if g is None else _NotTwice.apply(g, *on) for g in grads])
    return None
