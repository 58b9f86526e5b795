"""The pair under autograd.

Where something watches (a compiler, a mode, a transform, a tracer, a profiler, a subclass of
Tensor), it is a `torch.autograd.Function` above the operators, so that `torch.func` and
`torch.compile` see its `setup_context`. Where nothing does, it is one that is given the call as it
is, and calls the backend.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from .backends import cpu, get
from .backends.base import Call
from .errors import BackendRefused
from .flops import register_flops
from .operators import (
    backward,
    backward_op,
    call_of,
    flat,
    flat_kv,
    forward,
    forward_op,
    infer_op,
    library,
)
from .surroundings import has_tangent, is_wrapped, learns, transforms
from .types import (
    NAMESPACE,
    Captured,
    Forward,
    Spec,
    constant_under_compile,
    in_dtype,
)


def _forward_operator(spec: str, *inputs: Any) -> Forward:
    call = call_of(*inputs)
    # An exported program calls the operator by itself: then it has to be differentiable itself.
    if torch.is_grad_enabled() and _learns([*call[:5], *call.captured.tensors]):
        asked = Spec.parse(spec)
        out, *stats = attention(asked, call)
        return Forward(in_dtype(out, asked.out_dtype(call.q.dtype)), *stats)
    return Forward(*[x.contiguous() for x in forward(spec, *inputs)])


library.impl("forward", _forward_operator, "CompositeExplicitAutograd")


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
        run = forward_op if _watched(q, k, v, *tensors) else forward
        exact, *stats = run(
            spec, q, k, v, sink, seed, captured, ints, floats, tiles, offsets, q_pos, kv_pos
        )
        out = _rounded(counts[2], exact, q)
        return out, *stats, out.new_empty(0) if out is exact else exact

    @staticmethod
    def setup_context(ctx, inputs, output):
        spec, ints, floats, offsets, counts, *tensors = inputs
        out, lse, max_logit, row_max, exact = output
        if exact.dtype != out.dtype:  # what the backward is given
            out = exact
        ctx.spec, ctx.ints, ctx.floats, ctx.offsets, ctx.counts = (
            spec,
            ints,
            floats,
            offsets,
            counts,
        )
        ctx.save_for_backward(out, lse, *tensors)
        ctx.mark_non_differentiable(max_logit, row_max, exact)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *grad_outputs):  # pyrefly: ignore[bad-override]
        return _once(ctx, _Attention.gradients, *grad_outputs)

    @staticmethod
    def gradients(ctx, dout, dlse, *_):
        """The gradients of every input of `forward`."""
        out, lse, q, k, v, sink, seed, q_pos, kv_pos, *tensors = ctx.saved_tensors
        of_score, count, exact = ctx.counts
        captured, tiles = tensors[:count], tensors[count:]
        needs = [
            ctx.needs_input_grad[12 + n] and t.is_floating_point()
            for n, t in enumerate(captured[:of_score])
        ]
        if dout is None:
            dout = torch.zeros_like(_rounded(exact, out, q))
        run = backward_op if _watched(q, k, v, dout, *tensors) else backward
        if run is not backward and not is_compiling():
            register_flops()  # a counter may be there for the backward alone
        results = run(
            ctx.spec, q, k, v, sink, seed, captured, ctx.ints, ctx.floats, tiles,
            ctx.offsets, q_pos, kv_pos, out, lse, dout, dlse, needs,
        )  # fmt: skip
        grads = in_order(results, q, k, v, sink, captured, needs)
        return (*(None,) * 5, *grads[:4], None, None, None, *grads[4:], *(None,) * len(tiles))


class _Dual(_Attention):
    """`_Attention` where forward-mode AD is on: refused, if an input of the call has a tangent. (By
    itself, since Dynamo takes no function with a `jvp`.)"""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx, *tangents):
        _refuse_forward_mode("an input of the call")


def _refuse_forward_mode(what: str) -> None:
    raise BackendRefused(
        f"attention has no derivative in forward mode ({what} has a tangent, as torch.func.jvp, "
        "jacfwd, hessian and linearize or torch.autograd.forward_ad give one); use reverse mode: "
        "torch.func.vjp, grad and jacrev, or backward(); where it must be forward mode, make that "
        "call with torch.nn.functional.scaled_dot_product_attention under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
    )


def refuse_tangents(*inputs: Tensor | None) -> None:
    """For a call that drops tangents: refused, if one of its inputs has one."""
    if any(x is not None and has_tangent(x) for x in inputs):
        _refuse_forward_mode("an input of the call")


class _Run:
    """A call on its way through autograd, which is to see its tensors and nothing else; and what
    comes of it and carries no gradient."""

    __slots__ = ("call", "max_logit", "row_max", "spec")
    max_logit: Tensor
    row_max: Tensor

    def __init__(self, spec: Spec, call: Call) -> None:
        self.spec, self.call = spec, call


class _Direct(torch.autograd.Function):
    """`_Attention` where nobody watches: nothing is taken apart. `torch.func` and compilers do not
    take a function of this older style."""

    @staticmethod
    def forward(ctx, run, *learned):
        spec, (q, k, v, sink, seed, captured, tiles, at, signature, *_) = run.spec, run.call
        tensors, ints, floats = captured
        exact, lse, run.max_logit, run.row_max = get(spec.backend).forward(spec, run.call)
        out = _rounded(spec.exact_out, exact, q)
        ctx.save_for_backward(exact, lse, q, k, v, sink, seed, at[4], at[5], *tensors)
        if signature is None:
            at = at._replace(q_pos=None, kv_pos=None)
        ctx.rest = spec, ints, floats, tiles, at, signature
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, *grad_outputs):  # pyrefly: ignore[bad-override]
        return _once(ctx, _Direct.gradients, *grad_outputs)

    @staticmethod
    def gradients(ctx, dout, dlse):
        """The gradients of every input of `forward`."""
        out, lse, q, k, v, sink, seed, q_pos, kv_pos, *tensors = ctx.saved_tensors
        spec, ints, floats, tiles, at, signature = ctx.rest
        if signature is None:
            at = at._replace(q_pos=q_pos, kv_pos=kv_pos)
        call = Call(q, k, v, sink, seed, Captured(tensors, ints, floats), tiles, at, signature)
        needs = ctx.needs_input_grad[5:]
        if dout is None:
            dout = torch.zeros_like(_rounded(spec.exact_out, out, q))
        if _watched(q, k, v, dout, *tensors):
            register_flops()  # a counter may be there for the backward alone
            run = backward_op
            results = run(spec.text, *flat(call), out, lse, dout, dlse, needs)
            return None, *in_order(results, q, k, v, sink, tensors[: len(needs)], needs)
        dq, dk, dv, dsink, dcaptured = get(spec.backend).backward(
            spec, call, out, lse, dout, dlse, needs
        )
        pairs = zip((dq, dk, dv, dsink, *dcaptured), (q, k, v, sink, *tensors), strict=False)
        return None, *[g if g is None else in_dtype(g, x.dtype) for g, x in pairs]


def _rounded(exact: bool, out: Tensor, q: Tensor) -> Tensor:
    """out as the caller gets it. Where a captured tensor learns, narrow inputs have an exact out: a
    learned number adds up the errors of all rows, and that of delta is out's rounding."""
    return in_dtype(out, q.dtype) if exact else out


# `Function.apply`, less what it does for transforms, which are none of `_Direct`'s.
_direct = super(torch.autograd.Function, _Direct).apply  # type: ignore[misc]


def _once(ctx: Any, gradients: Callable[..., tuple], *grad_outputs: Tensor | None) -> tuple:
    """The gradients of a call, which may not be differentiated."""
    if is_compiling():
        return gradients(ctx, *grad_outputs)
    if any(x is not None and has_tangent(x) for x in grad_outputs):
        _refuse_forward_mode("the gradient of a result")
    if any(map(_is_batched, grad_outputs)):
        return _one_by_one(ctx, gradients, *grad_outputs)
    if not torch.is_grad_enabled():
        return gradients(ctx, *grad_outputs)
    with torch.no_grad():
        grads = gradients(ctx, *grad_outputs)
    # create_graph=True: a second derivative must not be dropped in silence.
    return _not_twice(grads, *grad_outputs, *ctx.saved_tensors)


def _is_batched(x: Tensor | None) -> bool:
    return x is not None and torch._C._functorch.is_legacy_batchedtensor(x)


def _one_by_one(ctx: Any, gradients: Callable[..., tuple], *grad_outputs: Tensor | None) -> tuple:
    """`_once` for several gradients of the results at once, as `is_grads_batched=True` and
    `jacobian(vectorize=True)` give them: by a `vmap` older than `torch.func`'s, which has no rule
    for what is not PyTorch's."""
    level = next(_level(x) for x in grad_outputs if x is not None and _is_batched(x))
    size = max(_apart(x, level, 1).shape[0] for x in grad_outputs if x is not None)
    apart = [[None] * size if x is None else _apart(x, level, size) for x in grad_outputs]
    found = [_once(ctx, gradients, *of) for of in zip(*apart, strict=True)]
    return tuple([
        None if grads[0] is None else torch._add_batch_dim(torch.stack(grads), 0, level)
        for grads in zip(*found, strict=True)
    ])  # fmt: skip


def _apart(x: Tensor, level: int, size: int) -> Tensor:
    """With what is batched at this nesting as its first dimension; of `size`, if nothing is."""
    return torch._remove_batch_dim(x, level, size, 0)


def _level(x: Tensor) -> int:
    """The nesting at which x is batched. It is asked by trying: where it is not, any size does.
    (The thread of a device does not know how deep its caller is.)"""
    return next(n for n in range(1, 65) if len(_apart(x, n, 2)) == len(_apart(x, n, 3)))


def _not_twice(grads: Sequence[Tensor | None], *of: Tensor | None) -> tuple:
    """Gradients that refuse to be differentiated, as functions of those of `of` that could be."""
    on = [x for x in of if x is not None and x.requires_grad]
    return tuple([None if g is None else _NotTwice.apply(g, *on) for g in grads])


def in_order(results: Sequence[Tensor], q, k, v, sink, captured, needs) -> list[Tensor | None]:
    """The operator's gradients as those of q, k, v, sink and all captured tensors."""
    each = iter(results)
    grads = [None if x is None else in_dtype(next(each), x.dtype) for x in (q, k, v, sink)]
    for need, t in zip(needs, captured, strict=False):
        grads.append(in_dtype(next(each), t.dtype) if need else None)
    return grads + [None] * (len(captured) - len(needs))


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


# Asked at every call, so looked up once.
_modes = torch._C._len_torch_dispatch_stack
_tracing, _profiled = torch._C._is_tracing, torch.autograd._profiler_enabled
_included, _PRE_DISPATCH = (
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch
)  # fmt: skip


def _watched(*tensors: Tensor | None) -> bool:
    """Whether something has to see the operators: a compiler, a mode, a transform, a tracer, a
    profiler, a subclass of Tensor. Where nothing has, they are skipped: a tenth of a millisecond
    counts where tensors are small."""
    return is_compiling() or _seen(*tensors)


def _seen(*tensors: Tensor | None) -> bool:
    """`_watched`, less compilers."""
    return (
        _seen_by_modes()
        or tensors[0].is_meta  # type: ignore[union-attr]
        or not _PLAIN.issuperset(map(type, tensors))
    )


def _call_seen(call: Call) -> bool:
    """`_seen`, of a call; those that are known have plain tensors."""
    if call.signature is not None and (call.seed is None or type(call.seed) is Tensor):
        return _seen_by_modes()
    q, k, v, sink, seed, (tensors, _, _), tiles, (_, _, _, _, q_pos, kv_pos, _), *_ = call
    given = () if tiles is None else tiles.flatten()
    return _seen(q, k, v, sink, seed, q_pos, kv_pos, *tensors, *given)


def _seen_by_modes() -> bool:
    """`_seen`, whatever the tensors."""
    return (
        _modes() > 0
        or transforms()
        or _included(_PRE_DISPATCH)
        or _tracing()
        or _profiled()
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
    return any(x is not None and learns(x) for x in inputs)


def save_ops() -> list[Any]:
    """The operators (ours, and PyTorch's in their place) whose results are worth keeping under
    selective activation checkpointing:

        policy = lambda: create_selective_checkpoint_contexts(headway.save_ops())
        checkpoint(block, x, use_reentrant=False, context_fn=policy)

    Attention then runs once, forward and backward, and the rest of the block twice.
    """
    native = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    over_ranks = getattr(torch.ops, NAMESPACE).cp_forward.default  # see `distributed.context`
    return [forward_op.default, over_ranks, native]


def attention(spec: Spec, call: Call) -> Forward:
    """The pair under autograd."""
    watched = is_compiling() or _call_seen(call)
    return (_watched_over if watched else _alone)(spec, call)


def infer(spec: Spec, call: Call) -> Forward:
    """`attention` over a cache, `call.kv`. Has no gradient."""
    if is_compiling() or _call_seen(call):
        if not is_compiling():
            scales = () if call.kv is None else (call.kv.k_scale, call.kv.v_scale)
            refuse_tangents(call.q, call.k, call.v, call.sink, *scales, *call.captured.tensors)
            warn_traced()
        return Forward(*infer_op(spec.text, *flat_kv(call)))
    return get(spec.backend).infer(spec, call)


def _alone(spec: Spec, call: Call) -> Forward:
    """`attention` where nobody watches."""
    q, k, v, sink, _, (tensors, _, _), _, _, signature, *_ = call
    learned = tensors[: spec.score_tensors]
    trained = signature.trained if signature is not None else _learns([q, k, v, sink, *learned])
    if not (trained and torch.is_grad_enabled()):
        return get(spec.backend).forward(spec, call)
    if any(map(is_wrapped, (q, k, v, *learned))):  # by a transform that has ended
        return _watched_over(spec, call)
    register_flops()
    run = _Run(spec, _savable_call(call))
    learned = run.call.captured.tensors[: spec.score_tensors]
    out, lse = _direct(run, q, k, v, run.call.sink, *learned)
    return Forward(out, lse, run.max_logit, run.row_max)


def _watched_over(spec: Spec, call: Call) -> Forward:
    """`attention` where something has to see the operators."""
    given = flat(call)
    q, k, v, sink, seed, tensors, ints, floats, tiles, offsets, q_pos, kv_pos = given
    inputs = [q, k, v, sink, seed, q_pos, kv_pos, *tensors, *tiles]
    learning = torch.is_grad_enabled() and _learns(inputs)
    compiling = is_compiling()
    if not compiling:
        refuse_tangents(*inputs)
        warn_traced()
        register_flops()
    elif _differentiated():
        raise BackendRefused(
            "torch.compile would lose the gradients of this call, which torch.func takes inside of "
            "what is compiled; use torch.autograd.grad there, or leave out fullgraph=True"
        )
    if not learning and (not compiling or forward_ad._current_level < 0):
        out, *stats = forward_op(spec.text, *given)
        results = _rounded(spec.exact_out, out, q), *stats
    else:
        counts = spec.score_tensors, len(tensors), spec.exact_out
        if compiling:
            inputs = _distinct(inputs)
        else:
            inputs[3:] = map(savable, inputs[3:])
        dual = compiling and forward_ad._current_level >= 0
        function = _Dual if dual else _Attention
        *results, _ = function.apply(spec.text, ints, floats, offsets, counts, *inputs)
    return Forward(*results)


def warn_traced() -> None:
    """For a call that `torch.jit.trace` sees: what is not an operator is not in its graph."""
    if _tracing():
        warnings.warn(
            "torch.jit.trace keeps the score and the mask of this call, what they capture, and "
            "all that was worked out from lengths as constants: the traced function may be wrong "
            "for other inputs. Use torch.export or torch.compile",
            torch.jit.TracerWarning,
            stacklevel=4,
        )


def savable(x: Any) -> Any:
    """A tensor that autograd may save: a copy of one made in inference mode. (PyTorch refuses q, k
    and v that were made there.)"""
    return x.clone() if x is not None and x.is_inference() else x


def _savable_call(call: Call) -> Call:
    """A call of `_Direct`, of tensors that may be saved."""
    _, _, _, sink, seed, (tensors, ints, floats), _, at, *_ = call
    given = sink, seed, at.q_pos, at.kv_pos, *tensors
    if not any(x is not None and x.is_inference() for x in given):
        return call
    sink, seed, q_pos, kv_pos, *tensors = map(savable, given)
    at = at._replace(q_pos=q_pos, kv_pos=kv_pos)
    return call.replace(sink=sink, seed=seed, captured=Captured(tensors, ints, floats), coords=at)


def _differentiated() -> bool:
    """Whether `torch.func` differentiates what is compiled."""
    if not transforms():
        return False
    kinds = {layer.key() for layer in torch._C._functorch.get_interpreter_stack() or ()}
    return not kinds <= {torch._C._functorch.TransformType.Vmap}


constant_under_compile(_differentiated)


def output(spec: Spec, call: Call) -> Tensor:
    """`attention(spec, call).out`, by the backend's `native` where nobody watches for our
    operators. A compiler does not: PyTorch's it knows better."""
    compiling = is_compiling()
    if _opaque() if compiling else _call_seen(call):
        return _watched_over(spec, call).out
    out = get(spec.backend).native(spec, call, None if compiling else _refuse_twice)
    if out is None:
        return (_watched_over if compiling else _alone)(spec, call).out
    if out.requires_grad and not compiling:
        register_flops()  # a counter may be there for the backward alone
    return out


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor | None:
    """`output` of a call without score, sink and dropout, causal or without a mask, on the CPU, by
    that backend's `plain`; None where that does not do it."""
    compiling = is_compiling()
    if _opaque() if compiling else _seen_by_modes():
        return None
    out = cpu.plain(q, k, v, causal, scale, None if compiling else _refuse_twice)
    if not compiling and out is not None and out.requires_grad:
        register_flops()
    return out


def plain_step(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, bias: Tensor | None
) -> Tensor | None:
    """`plain` of one query a row, outside of compilers and without gradients, to whose scores
    `bias` `(b, 1, 1, kv_len)` is added, 0 and -inf; None also for what does not fit together."""
    if _seen_by_modes() or not type(q) is type(k) is type(v) is Tensor:
        return None
    (b, hq, q_len, d), kv = q.shape, k.shape
    if not (kv == v.shape and kv[0] == b and kv[3] == d and q_len == 1 and hq % (kv[1] or 1) == 0):
        return None
    if bias is not None and (bias.shape != (b, 1, 1, kv[2]) or bias.dtype != q.dtype):
        return None
    if not (q.is_cpu and k.is_cpu and v.is_cpu and q.dtype == k.dtype == v.dtype):
        return None
    return cpu.plain(q, k, v, False, scale, _refuse_twice, bias)


def _opaque() -> bool:
    """Whether a compiler is to see our operators: in programs that are exported, and below vmap."""
    transformed = transforms() and not _differentiated()
    return transformed or torch.compiler.is_exporting()


constant_under_compile(_opaque)


def _refuse_twice(grads: Any, grad_outputs: Any) -> Any:
    """A hook of the node of PyTorch's operator: what `_Attention.backward` does for ours."""
    return _not_twice(grads, *grad_outputs) if torch.is_grad_enabled() else None
