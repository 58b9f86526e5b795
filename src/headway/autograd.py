"""The pair of forward and backward under autograd.

Where something observes the operators (a compiler, a mode, a transform, a tracer, a profiler, a
subclass of Tensor), `_Attention` runs them, so that `torch.func` and `torch.compile` see its
`setup_context`. Otherwise `_Direct` calls the backend, which saves a tenth of a millisecond a call.
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
from .surroundings import has_tangent, is_wrapped, requires_grad, transforms
from .types import (
    NAMESPACE,
    Captured,
    Forward,
    Spec,
    constant_under_compile,
    in_dtype,
)


def _forward_operator(spec: str, *inputs: Any) -> Forward:
    """Run `headway::forward`, with gradients where an exported program calls it by itself."""
    call = call_of(*inputs)
    if torch.is_grad_enabled() and _any_learns(_inputs(call)):
        parsed = Spec.parse(spec)
        out, *stats = attention(parsed, call)
        return Forward(in_dtype(out, parsed.out_dtype(call.q.dtype)), *stats)
    return Forward(*[x.contiguous() for x in forward(spec, *inputs)])


library.impl("forward", _forward_operator, "CompositeExplicitAutograd")


class _OnceDifferentiable(torch.autograd.Function):
    """A gradient that refuses to be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad, *differentiable):
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
        run = forward_op if needs_operators(q, k, v, *tensors) else forward
        exact_out, *stats = run(
            spec, q, k, v, sink, seed, captured, ints, floats, tiles, offsets, q_pos, kv_pos
        )
        out = _round_out(counts[2], exact_out, q)
        return out, *stats, out.new_empty(0) if out is exact_out else exact_out

    @staticmethod
    def setup_context(ctx, inputs, output):
        spec, ints, floats, offsets, counts, *tensors = inputs
        out, lse, max_logit, row_max, exact_out = output
        if exact_out.dtype != out.dtype:  # the backward takes the exact one
            out = exact_out
        ctx.spec, ctx.ints, ctx.floats = spec, ints, floats
        ctx.offsets, ctx.counts = offsets, counts
        ctx.save_for_backward(out, lse, *tensors)
        ctx.mark_non_differentiable(max_logit, row_max, exact_out)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *grad_outputs):  # pyrefly: ignore[bad-override]
        return differentiate_once(ctx, _Attention.gradients, *grad_outputs)

    @staticmethod
    def gradients(ctx, dout, dlse, *_):
        """Return the gradients of every input of `forward`."""
        out, lse, q, k, v, sink, seed, q_pos, kv_pos, *tensors = ctx.saved_tensors
        score_tensors, captured_tensors, exact_out = ctx.counts
        captured, tiles = tensors[:captured_tensors], tensors[captured_tensors:]
        needs = [
            ctx.needs_input_grad[12 + n] and t.is_floating_point()
            for n, t in enumerate(captured[:score_tensors])
        ]
        if dout is None:
            dout = torch.zeros_like(_round_out(exact_out, out, q))
        run = backward_op if needs_operators(q, k, v, dout, *tensors) else backward
        if run is not backward and not is_compiling():
            register_flops()  # a counter may be there for the backward alone
        results = run(
            ctx.spec, q, k, v, sink, seed, captured, ctx.ints, ctx.floats, tiles,
            ctx.offsets, q_pos, kv_pos, out, lse, dout, dlse, needs,
        )  # fmt: skip
        grads = grads_of_inputs(results, q, k, v, sink, captured, needs)
        return (*(None,) * 5, *grads[:4], None, None, None, *grads[4:], *(None,) * len(tiles))


class _Dual(_Attention):
    """`_Attention` under forward-mode AD, which refuses inputs that have a tangent. (It is a class
    of its own because Dynamo refuses functions that have a `jvp`.)"""

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
    """Refuse inputs that have a tangent, which the call would drop."""
    if any(x is not None and has_tangent(x) for x in inputs):
        _refuse_forward_mode("an input of the call")


class _DirectCall:
    """A call that `_Direct` is given as one argument, of which autograd sees the tensors alone, and
    its results that carry no gradient."""

    __slots__ = ("call", "max_logit", "row_max", "spec")
    max_logit: Tensor
    row_max: Tensor

    def __init__(self, spec: Spec, call: Call) -> None:
        self.spec, self.call = spec, call


class _Direct(torch.autograd.Function):
    """`_Attention` where nothing observes the operators: it takes the call as it is. `torch.func`
    and compilers do not accept a function of this older style."""

    @staticmethod
    def forward(ctx, run, *learned):
        spec, call = run.spec, run.call
        captured, coords, signature = call.captured, call.coords, call.signature
        exact_out, lse, run.max_logit, run.row_max = get(spec.backend).forward(spec, call)
        out = _round_out(spec.exact_out, exact_out, call.q)
        ctx.save_for_backward(
            exact_out, lse, call.q, call.k, call.v, call.sink, call.seed, coords.q_pos,
            coords.kv_pos, *captured.tensors,
        )  # fmt: skip
        if signature is None:  # positions are saved above, not kept alive here
            coords = coords._replace(q_pos=None, kv_pos=None)
        ctx.rest = spec, captured.ints, captured.floats, call.tiles, coords, signature
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, *grad_outputs):  # pyrefly: ignore[bad-override]
        return differentiate_once(ctx, _Direct.gradients, *grad_outputs)

    @staticmethod
    def gradients(ctx, dout, dlse):
        """Return the gradients of every input of `forward`."""
        out, lse, q, k, v, sink, seed, q_pos, kv_pos, *tensors = ctx.saved_tensors
        spec, ints, floats, tiles, coords, signature = ctx.rest
        if signature is None:
            coords = coords._replace(q_pos=q_pos, kv_pos=kv_pos)
        captured = Captured(tensors, ints, floats)
        call = Call(q, k, v, sink, seed, captured, tiles, coords, signature)
        needs = ctx.needs_input_grad[5:]
        if dout is None:
            dout = torch.zeros_like(_round_out(spec.exact_out, out, q))
        if needs_operators(q, k, v, dout, *tensors):
            register_flops()  # a counter may be there for the backward alone
            results = backward_op(spec.text, *flat(call), out, lse, dout, dlse, needs)
            return None, *grads_of_inputs(results, q, k, v, sink, tensors[: len(needs)], needs)
        dq, dk, dv, dsink, dcaptured = get(spec.backend).backward(
            spec, call, out, lse, dout, dlse, needs
        )
        pairs = zip((dq, dk, dv, dsink, *dcaptured), (q, k, v, sink, *tensors), strict=False)
        return None, *[g if g is None else in_dtype(g, x.dtype) for g, x in pairs]


def _round_out(exact: bool, out: Tensor, q: Tensor) -> Tensor:
    """Return out in the dtype of q. Where a captured tensor is trained, the backend returns an
    exact out for 16-bit inputs: the gradient of the tensor adds up delta's error in all rows, and
    rounding out is that error."""
    return in_dtype(out, q.dtype) if exact else out


# `Function.apply` without its work for transforms, which `_Direct` never meets.
_direct = super(torch.autograd.Function, _Direct).apply  # type: ignore[misc]


def differentiate_once(
    ctx: Any, gradients: Callable[..., tuple], *grad_outputs: Tensor | None
) -> tuple:
    """Return the gradients of a call, which refuse to be differentiated."""
    if is_compiling():
        return gradients(ctx, *grad_outputs)
    if any(x is not None and has_tangent(x) for x in grad_outputs):
        _refuse_forward_mode("the gradient of a result")
    if any(map(_is_batched, grad_outputs)):
        return _gradients_one_by_one(ctx, gradients, *grad_outputs)
    if not torch.is_grad_enabled():
        return gradients(ctx, *grad_outputs)
    with torch.no_grad():
        grads = gradients(ctx, *grad_outputs)
    # create_graph=True: a second derivative must not be dropped in silence.
    return _once_differentiable(grads, *grad_outputs, *ctx.saved_tensors)


def _is_batched(x: Tensor | None) -> bool:
    return x is not None and torch._C._functorch.is_legacy_batchedtensor(x)


def _gradients_one_by_one(
    ctx: Any, gradients: Callable[..., tuple], *grad_outputs: Tensor | None
) -> tuple:
    """Return the gradients for a batch of gradients of the results, one after another.

    `is_grads_batched=True` and `jacobian(vectorize=True)` give such batches by a `vmap` older than
    `torch.func`'s, which has no rule for functions other than PyTorch's.
    """
    level = next(_batch_level(x) for x in grad_outputs if x is not None and _is_batched(x))
    size = max(_unbatched(x, level, 1).shape[0] for x in grad_outputs if x is not None)
    rows = [[None] * size if x is None else _unbatched(x, level, size) for x in grad_outputs]
    grads_of_rows = [differentiate_once(ctx, gradients, *row) for row in zip(*rows, strict=True)]
    return tuple([
        None if grads[0] is None else torch._add_batch_dim(torch.stack(grads), 0, level)
        for grads in zip(*grads_of_rows, strict=True)
    ])  # fmt: skip


def _unbatched(x: Tensor, level: int, size: int) -> Tensor:
    """Return x with the batch of this nesting level as its first dimension, expanded to `size` if
    there is none."""
    return torch._remove_batch_dim(x, level, size, 0)


def _batch_level(x: Tensor) -> int:
    """Return the nesting level at which x is batched, found by trying: at any other, `_unbatched`
    expands to whatever size it is given. (A device's thread does not know the level of its caller.)
    """
    return next(n for n in range(1, 65) if len(_unbatched(x, n, 2)) == len(_unbatched(x, n, 3)))


def _once_differentiable(grads: Sequence[Tensor | None], *inputs: Tensor | None) -> tuple:
    """Return gradients that refuse to be differentiated with respect to any of `inputs`."""
    differentiable = [x for x in inputs if x is not None and x.requires_grad]
    return tuple([
        None if g is None else _OnceDifferentiable.apply(g, *differentiable) for g in grads
    ])  # fmt: skip


def grads_of_inputs(
    results: Sequence[Tensor], q, k, v, sink, captured, needs
) -> list[Tensor | None]:
    """Return the operator's gradients as those of q, k, v, sink and all captured tensors, None for
    those that need none."""
    remaining = iter(results)
    grads = [None if x is None else in_dtype(next(remaining), x.dtype) for x in (q, k, v, sink)]
    for need, t in zip(needs, captured, strict=False):
        grads.append(in_dtype(next(remaining), t.dtype) if need else None)
    return grads + [None] * (len(captured) - len(needs))


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


# Every call asks these, so they are looked up once.
_modes = torch._C._len_torch_dispatch_stack
_tracing, _profiled = torch._C._is_tracing, torch.autograd._profiler_enabled
_included, _PRE_DISPATCH = (
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch
)  # fmt: skip


def needs_operators(*tensors: Tensor | None) -> bool:
    """Return whether a compiler, a mode, a transform, a tracer, a profiler or a subclass of Tensor
    observes the operators. Otherwise the backend is called directly, which saves a tenth of a
    millisecond."""
    return is_compiling() or _observed(*tensors)


def _observed(*tensors: Tensor | None) -> bool:
    """Return `needs_operators` for calls outside of compilers."""
    return (
        _observed_by_modes()
        or tensors[0].is_meta  # type: ignore[union-attr]
        or not _PLAIN.issuperset(map(type, tensors))
    )


def _call_observed(call: Call) -> bool:
    """Return `_observed` of a call. A call with a signature has plain tensors."""
    if call.signature is not None and (call.seed is None or type(call.seed) is Tensor):
        return _observed_by_modes()
    tiles = () if call.tiles is None else call.tiles.flatten()
    return _observed(*_inputs(call), call.coords.q_pos, call.coords.kv_pos, *tiles)


def _inputs(call: Call) -> list[Tensor | None]:
    """Return the tensors of a call less its positions and tiles."""
    return [call.q, call.k, call.v, call.sink, call.seed, *call.captured.tensors]


def _observed_by_modes() -> bool:
    """Return `_observed` for plain tensors."""
    return (
        _modes() > 0
        or transforms()
        or _included(_PRE_DISPATCH)
        or _tracing()
        or _profiled()
        or forward_ad._current_level >= 0
    )


def without_repeats(inputs: list[Tensor | None]) -> list[Tensor | None]:
    """Return the inputs with views in place of repeated tensors: `torch.compile` refuses an
    autograd function that gets a tensor twice."""
    distinct: list[Tensor | None] = []
    for x in inputs:
        repeated = x is not None and any(x is y for y in distinct)
        distinct.append(x.view_as(x) if repeated else x)
    return distinct


def _any_learns(inputs: list[Tensor | None]) -> bool:
    return any(x is not None and requires_grad(x) for x in inputs)


def save_ops() -> list[Any]:
    """Return the operators (ours, and PyTorch's in their place) whose results are worth saving
    under selective activation checkpointing:

        policy = lambda: create_selective_checkpoint_contexts(headway.save_ops())
        checkpoint(block, x, use_reentrant=False, context_fn=policy)

    Attention then runs once, forward and backward, and the rest of the block twice.
    """
    native = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    over_ranks = getattr(torch.ops, NAMESPACE).cp_forward.default  # see `distributed.context`
    return [forward_op.default, over_ranks, native]


def attention(spec: Spec, call: Call) -> Forward:
    """Run the pair of forward and backward under autograd."""
    by_operators = is_compiling() or _call_observed(call)
    return (_attention_by_operators if by_operators else _attention_direct)(spec, call)


def infer(spec: Spec, call: Call) -> Forward:
    """Run `attention` over the cache `call.kv`. It has no gradient."""
    if is_compiling() or _call_observed(call):
        if not is_compiling():
            scales = () if call.kv is None else (call.kv.k_scale, call.kv.v_scale)
            refuse_tangents(call.q, call.k, call.v, call.sink, *scales, *call.captured.tensors)
            warn_traced()
        return Forward(*infer_op(spec.text, *flat_kv(call)))
    return get(spec.backend).infer(spec, call)


def _attention_direct(spec: Spec, call: Call) -> Forward:
    """Run `attention` where nothing observes the operators."""
    q, k, v, sink, signature = call.q, call.k, call.v, call.sink, call.signature
    score_tensors = call.captured.tensors[: spec.score_tensors]
    trained = (
        signature.trained if signature is not None else _any_learns([q, k, v, sink, *score_tensors])
    )
    if not (trained and torch.is_grad_enabled()):
        return get(spec.backend).forward(spec, call)
    if any(map(is_wrapped, (q, k, v, *score_tensors))):  # by a transform that has ended
        return _attention_by_operators(spec, call)
    register_flops()
    run = _DirectCall(spec, _savable_call(call))
    score_tensors = run.call.captured.tensors[: spec.score_tensors]
    out, lse = _direct(run, q, k, v, run.call.sink, *score_tensors)
    return Forward(out, lse, run.max_logit, run.row_max)


def _attention_by_operators(spec: Spec, call: Call) -> Forward:
    """Run `attention` where something observes the operators."""
    operator_inputs = flat(call)
    q, k, v, sink, seed, tensors, ints, floats, tiles, offsets, q_pos, kv_pos = operator_inputs
    inputs = [q, k, v, sink, seed, q_pos, kv_pos, *tensors, *tiles]
    trained = torch.is_grad_enabled() and _any_learns(inputs)
    compiling = is_compiling()
    if not compiling:
        refuse_tangents(*inputs)
        warn_traced()
        register_flops()
    elif _differentiated_in_compile():
        raise BackendRefused(
            "torch.compile would lose the gradients of this call, which torch.func takes inside of "
            "what is compiled; use torch.autograd.grad there, or leave out fullgraph=True"
        )
    if not trained and (not compiling or forward_ad._current_level < 0):
        out, *stats = forward_op(spec.text, *operator_inputs)
        results = _round_out(spec.exact_out, out, q), *stats
    else:
        counts = spec.score_tensors, len(tensors), spec.exact_out
        if compiling:
            inputs = without_repeats(inputs)
        else:
            inputs[3:] = map(savable, inputs[3:])
        dual = compiling and forward_ad._current_level >= 0
        function = _Dual if dual else _Attention
        *results, _ = function.apply(spec.text, ints, floats, offsets, counts, *inputs)
    return Forward(*results)


def warn_traced() -> None:
    """Warn under `torch.jit.trace`, whose graph holds operators and nothing else."""
    if _tracing():
        warnings.warn(
            "torch.jit.trace keeps the score and the mask of this call, what they capture, and "
            "all that was worked out from lengths as constants: the traced function may be wrong "
            "for other inputs. Use torch.export or torch.compile",
            torch.jit.TracerWarning,
            stacklevel=4,
        )


def savable(x: Any) -> Any:
    """Return a tensor that autograd may save: a copy, if it was made in inference mode. (PyTorch
    refuses q, k and v that were made there.)"""
    return x.clone() if x is not None and x.is_inference() else x


def _savable_call(call: Call) -> Call:
    """Return the call with tensors that autograd may save."""
    captured, coords = call.captured, call.coords
    tensors = call.sink, call.seed, coords.q_pos, coords.kv_pos, *captured.tensors
    if not any(x is not None and x.is_inference() for x in tensors):
        return call
    sink, seed, q_pos, kv_pos, *tensors = map(savable, tensors)
    coords = coords._replace(q_pos=q_pos, kv_pos=kv_pos)
    captured = captured._replace(tensors=tensors)
    return call.replace(sink=sink, seed=seed, captured=captured, coords=coords)


def _differentiated_in_compile() -> bool:
    """Return whether `torch.func` differentiates inside of the compiled function."""
    if not transforms():
        return False
    kinds = {layer.key() for layer in torch._C._functorch.get_interpreter_stack() or ()}
    return not kinds <= {torch._C._functorch.TransformType.Vmap}


constant_under_compile(_differentiated_in_compile)


def attention_out(spec: Spec, call: Call) -> Tensor:
    """Return `attention(spec, call).out`, by the backend's `native` where nothing observes our
    operators. A compiler gets it too: it knows PyTorch's operators better than ours."""
    compiling = is_compiling()
    if _compiler_needs_operators() if compiling else _call_observed(call):
        return _attention_by_operators(spec, call).out
    out = get(spec.backend).native(spec, call, None if compiling else _refuse_second_derivative)
    if out is None:
        return (_attention_by_operators if compiling else _attention_direct)(spec, call).out
    if out.requires_grad and not compiling:
        register_flops()  # a counter may be there for the backward alone
    return out


def cpu_native(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor | None:
    """Return `attention_out` of a call on the CPU that is causal or has no mask, without score,
    sink and dropout, by PyTorch's own operator; None where `cpu.plain` refuses it."""
    compiling = is_compiling()
    if _compiler_needs_operators() if compiling else _observed_by_modes():
        return None
    out = cpu.plain(q, k, v, causal, scale, None if compiling else _refuse_second_derivative)
    if not compiling and out is not None and out.requires_grad:
        register_flops()
    return out


def cpu_native_step(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, bias: Tensor | None
) -> Tensor | None:
    """Return `cpu_native` of one query per row, outside of compilers and without gradients, with
    `bias` `(b, 1, 1, kv_len)` of 0 and -inf added to the scores; None also for shapes that do not
    fit together."""
    if _observed_by_modes() or not type(q) is type(k) is type(v) is Tensor:
        return None
    (b, hq, q_len, d), kv = q.shape, k.shape
    if not (kv == v.shape and kv[0] == b and kv[3] == d and q_len == 1 and hq % (kv[1] or 1) == 0):
        return None
    if bias is not None and (bias.shape != (b, 1, 1, kv[2]) or bias.dtype != q.dtype):
        return None
    if not (q.is_cpu and k.is_cpu and v.is_cpu and q.dtype == k.dtype == v.dtype):
        return None
    return cpu.plain(q, k, v, False, scale, _refuse_second_derivative, bias)


def _compiler_needs_operators() -> bool:
    """Return whether a compiler has to see our operators: in exported programs, and below vmap."""
    transformed = transforms() and not _differentiated_in_compile()
    return transformed or torch.compiler.is_exporting()


constant_under_compile(_compiler_needs_operators)


def _refuse_second_derivative(grads: Any, grad_outputs: Any) -> Any:
    """Refuse second derivatives, as a hook of PyTorch's operator: see `_Attention.backward`."""
    return _once_differentiable(grads, *grad_outputs) if torch.is_grad_enabled() else None
