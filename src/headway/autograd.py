"""The pair of forward and backward under autograd.

Where something observes the operators (a compiler, a mode, a transform, a tracer, a profiler, a
subclass of Tensor), a call is `headway::forward`, whose kernel for autograd is `_Attention`.
Otherwise `_Attention` calls the backend (`_Direct`), which saves a tenth of a millisecond a call.
Over ranks it runs a pair of operators (`Operators`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling, is_exporting

from .backends import cpu, get
from .backends.base import Call, CallSignature
from .blocks import Tiles
from .errors import BackendRefused
from .memory_order import in_order_of
from .operators import (
    HESSIAN,
    MATH,
    as_promised,
    backward,
    backward_op,
    flat,
    flat_kv,
    forward,
    forward_op,
    infer_op,
    library,
    once_differentiable,
    refuse_create_graph,
    refuse_create_graph_in_program,
    refuse_second_derivative,
    register_flops,
    warn_traced,
)
from .surroundings import (
    apply_at_one_level,
    are_plain,
    below_autograd,
    differentiated_in_compile,
    has_tangent,
    in_forward_mode,
    is_older_batched,
    is_wrapped,
    operators_are_changed,
    requires_grad,
    rows_of_batch,
    transforms,
    under_vmap,
)
from .types import (
    NAMESPACE,
    Captured,
    Coords,
    Forward,
    Spec,
    constant_under_compile,
    in_dtype,
)


def _forward_operator(spec: str, *inputs: Any) -> Forward:
    """Run `headway::forward`."""
    return Forward(*as_promised(inputs[0], *forward(spec, *inputs)))


def _forward_below_autograd(spec: str, *inputs: Any) -> Forward:
    """Run `headway::forward` below autograd."""
    with below_autograd():
        return forward_op(spec, *inputs)


def _forward_under_autograd(spec: str, *inputs: Any) -> Forward:
    """Run `headway::forward` with its gradients, at one level of `torch.func`'s transforms."""
    # AOTInductor passes None for an empty list.
    captured, ints, floats, tiles = inputs[_TENSORS:_OFFSETS]
    lists: Any = captured or [], ints or [], floats or [], tiles or []
    inputs = *inputs[:_TENSORS], *lists, *inputs[_OFFSETS:]
    if torch.is_grad_enabled() and _any_learns([*inputs[:_SEED], *lists[0]]):
        parsed, q = Spec.parse(spec), inputs[0]
        runner, tensors = _operators(ON_ONE_DEVICE, parsed, *inputs)
        register_flops()
        copy_unsavable(tensors)
        out, *stats = as_forward(*apply_at_one_level(_Attention, runner, *tensors))
        results = in_dtype(out, parsed.out_dtype(q.dtype)), *stats
        # What observes operators had this one run below, with strides as promised.
        return Forward(*(results if needs_operators(*tensors) else as_promised(q, *results)))
    with below_autograd():
        return forward_op(spec, *inputs)


library.impl("forward", _forward_operator, "CompositeExplicitAutograd")
library.impl("forward", _forward_under_autograd, "Autograd")


class _Attention(torch.autograd.Function):
    """Differentiable in q, k, v, sink, the tensors captured by the score, and through lse and the
    entropy, if asked for. The results without a gradient come behind these.

    The first input is what runs the call, `Operators` or `_Direct`. The others are tensors or
    None: q, k, v, sink, seed, two that say where queries and keys are, what score and mask capture,
    and the tiles.
    """

    generate_vmap_rule = True

    # `*inputs` and no names: torch binds the arguments to forward's signature at every call, which
    # with names costs more than the call.
    @staticmethod
    def forward(*inputs):
        runner, *tensors = inputs
        exact_out, lse, max_logit, row_max, entropy, *number = runner.forward(*tensors)
        same = exact_out.dtype == runner.out_dtype
        exact_out = in_order_of(tensors[0], exact_out)
        out = exact_out if same else exact_out.to(runner.out_dtype)
        if type(runner) is _Direct:  # what passes through autograd costs time
            runner.others[:] = exact_out, max_logit, row_max, entropy
            return (out, lse, entropy) if runner.entropy else (out, lse)
        exact_out = out.new_empty(0) if same else exact_out
        return out, lse, entropy, max_logit, row_max, *number, exact_out

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.runner, *tensors = inputs
        out, lse, *others = output
        direct, asked = type(ctx.runner) is _Direct, ctx.runner.entropy
        # The backward takes the exact out where the backend returns one (`resolve`).
        exact_out = ctx.runner.others[0] if direct else others[-1]
        exact_out = exact_out if exact_out.dtype != out.dtype else out
        number = () if direct else others[3:-1]  # of a call over ranks
        ctx.count = len(tensors)
        ctx.save_for_backward(*tensors, exact_out, lse, *number, *others[:asked])
        ctx.mark_non_differentiable(*others[asked:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *grad_outputs):  # pyrefly: ignore[bad-override]
        return differentiate_once(ctx, *grad_outputs[: 2 + ctx.runner.entropy])

    @staticmethod
    def gradients(ctx, dout, dlse, dentropy=None):
        """Return the gradients of every input of `forward`."""
        runner, saved, count = ctx.runner, ctx.saved_tensors, ctx.count
        tensors, (out, lse, *others) = saved[:count], saved[count:]
        last = _CAPTURED + runner.score_tensors
        learned = zip(ctx.needs_input_grad[1 + _CAPTURED :], tensors[_CAPTURED:last], strict=False)
        needs = tuple([need and t.is_floating_point() for need, t in learned])
        if dout is None:
            dout = torch.zeros_like(out, dtype=runner.out_dtype)
        if dentropy is None:
            number, of_entropy = others[: len(others) - runner.entropy], ()
        else:  # dT = −P (log P + H): the part of H is one of lse
            (entropy,), number, of_entropy = others, (), (dentropy,)
            dlse = -dentropy * entropy if dlse is None else dlse - dentropy * entropy
        results = runner.backward(tensors, dout, *number, out, lse, dout, dlse, needs, *of_entropy)
        grads: list[Tensor | None] = [None] * count
        remaining = iter(results)
        for n, x in enumerate(tensors[:last]):
            if needs[n - _CAPTURED] if n >= _CAPTURED else n < _SEED and x is not None:
                grads[n] = in_dtype(next(remaining), x.dtype)
        return None, *grads


_TENSORS, _OFFSETS = 5, 9  # the operators' inputs: where lists begin, and the one of offsets
_SEED, _CAPTURED = 4, 7  # where tensors without a gradient begin, and the captured ones


def _refuse_tangents(what: str, *tensors: Tensor | None) -> None:
    """Refuse tensors that have a tangent, which the call would drop; in a compiled program, where
    transforms may hide tangents, any."""
    if not in_forward_mode():
        return
    if not is_compiling() and not any(x is not None and has_tangent(x) for x in tensors):
        return
    raise BackendRefused(
        f"{what} has no derivative in forward mode (an input has a tangent, as torch.func.jvp, "
        "jacfwd and linearize or torch.autograd.forward_ad give one); use reverse mode: "
        f"torch.func.vjp, grad and jacrev, or backward(); where it must be forward mode, {MATH}"
    )


class Pair(NamedTuple):
    """Forward and backward as operators, and the functions that these run."""

    forward_op: Any
    backward_op: Any
    forward: Callable
    backward: Callable


ON_ONE_DEVICE = Pair(_forward_below_autograd, backward_op, forward, backward)


class Operators(NamedTuple):
    """A pair of operators, and what one call passes to it beside its tensors."""

    pair: Pair
    spec: str
    out_dtype: torch.dtype
    entropy: bool
    score_tensors: int
    captured: int  # number of tensors
    ints: list
    floats: list
    offsets: list

    def forward(self, *tensors):
        run = self.pair.forward_op if needs_operators(*tensors) else self.pair.forward
        return run(self.spec, *self._operands(*tensors))

    def backward(self, tensors, dout, *saved):
        run = self.pair.backward_op if needs_operators(dout, *tensors) else self.pair.backward
        if run is self.pair.backward_op and not is_compiling():
            register_flops()  # a counter may be there for the backward alone
        return run(self.spec, *self._operands(*tensors), *saved)

    def _operands(self, q, k, v, sink, seed, of_queries, of_keys, *tensors):
        captured, tiles = tensors[: self.captured], tensors[self.captured :]
        return (
            q, k, v, sink, seed, captured, self.ints, self.floats, tiles, self.offsets, of_queries,
            of_keys,
        )  # fmt: skip


def operators_of(
    pair: Pair, spec: Spec, q: Tensor, captured: int, ints: list, floats: list, offsets: list
) -> Operators:
    """Return what runs a pair of operators for a call of this spec."""
    return Operators(
        pair, spec.text, spec.result_dtype(q.dtype), spec.entropy, spec.score_tensors, captured,
        ints, floats, offsets,
    )  # fmt: skip


class _Direct(NamedTuple):
    """The backend of a call that nothing observes, and what the call has beside its tensors."""

    spec: Spec
    out_dtype: torch.dtype
    score_tensors: int
    ints: list
    floats: list
    tiles: Tiles | None
    coords: Coords  # without positions, which autograd saves
    signature: CallSignature | None
    others: list[Tensor]  # the exact out and the results behind lse, for a moment

    @property
    def entropy(self) -> bool:
        return self.spec.entropy

    def forward(self, *tensors):
        return get(self.spec.backend).forward(self.spec, self._call(*tensors))

    def backward(self, tensors, dout, *saved):
        call = self._call(*tensors)
        if needs_operators(dout, *tensors):
            register_flops()  # a counter may be there for the backward alone
            return backward_op(self.spec.text, *flat(call), *saved)
        grads = get(self.spec.backend).backward(self.spec, call, *saved)
        return [g for g in (*grads[:4], *grads.captured) if g is not None]

    def _call(self, q, k, v, sink, seed, q_pos, kv_pos, *captured):
        coords = self.coords
        if q_pos is not None or kv_pos is not None:
            coords = coords._replace(q_pos=q_pos, kv_pos=kv_pos)
        tensors = Captured(list(captured), self.ints, self.floats)
        return Call(q, k, v, sink, seed, tensors, self.tiles, coords, self.signature)


# `Function.apply` without its work for transforms, which direct calls never meet.
_apply_direct = super(torch.autograd.Function, _Attention).apply  # type: ignore[misc]


def differentiate_once(ctx: Any, *grad_outputs: Tensor | None) -> tuple:
    """Return the gradients of a call, which refuse to be differentiated. (What Dynamo has traced,
    PyTorch does not differentiate twice.)"""
    if is_dynamo_compiling():
        refuse_create_graph_in_program()
        return _Attention.gradients(ctx, *grad_outputs)
    if in_forward_mode():
        saved = *grad_outputs, *ctx.saved_tensors
        if any(x is not None and has_tangent(x) for x in saved):
            refuse_second_derivative(HESSIAN)
    if any([x is not None and is_older_batched(x) for x in grad_outputs]):  # noqa: C419
        return _gradients_one_by_one(ctx, *grad_outputs)
    if not torch.is_grad_enabled() or transforms():  # the operator refuses, at every level
        return _Attention.gradients(ctx, *grad_outputs)
    with torch.no_grad():
        grads = _Attention.gradients(ctx, *grad_outputs)
    # create_graph=True: a second derivative must not be dropped in silence.
    return once_differentiable(grads, *grad_outputs, *ctx.saved_tensors)


def _gradients_one_by_one(ctx: Any, *grad_outputs: Tensor | None) -> tuple:
    """Return the gradients for a batch of gradients of the results, one after another.

    `is_grads_batched=True` and `jacobian(vectorize=True)` give such batches by a `vmap` older than
    `torch.func`'s, which has no rule for functions other than PyTorch's.
    """
    level, rows = rows_of_batch(grad_outputs)
    grads_of_rows = [differentiate_once(ctx, *row) for row in rows]
    return tuple([
        None if grads[0] is None else torch._add_batch_dim(torch.stack(grads), 0, level)
        for grads in zip(*grads_of_rows, strict=True)
    ])  # fmt: skip


_profiled = torch.autograd._profiler_enabled  # every call asks it, so it is looked up once


def needs_operators(*tensors: Tensor | None) -> bool:
    """Return whether a compiler, a mode, a transform, a tracer, a profiler or a subclass of Tensor
    observes the operators. Otherwise the backend is called directly, which saves a tenth of a
    millisecond."""
    return is_compiling() or _observed(*tensors)


def _observed(*tensors: Tensor | None) -> bool:
    """Return `needs_operators` for calls outside of compilers."""
    return (
        operators_are_changed()
        or _profiled()
        or tensors[0].is_meta  # type: ignore[union-attr]
        or not are_plain(*tensors)
    )


def _call_observed(call: Call) -> bool:
    """Return `_observed` of a call. A call with a signature has plain tensors."""
    if call.signature is not None and (call.seed is None or type(call.seed) is Tensor):
        return operators_are_changed() or _profiled()
    tiles = () if call.tiles is None else call.tiles.flatten()
    return _observed(*_inputs(call), call.coords.q_pos, call.coords.kv_pos, *tiles)


def _inputs(call: Call) -> list[Tensor | None]:
    """Return the tensors of a call less its positions and tiles."""
    return [call.q, call.k, call.v, call.sink, call.seed, *call.captured.tensors]


def _without_repeats(inputs: list[Tensor | None]) -> list[Tensor | None]:
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


def gradients(
    spec: Spec, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    needs: tuple[bool, ...], dentropy: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Run the backward alone. Its results refuse to be differentiated."""
    inputs = [*_inputs(call), out, lse, dout, dlse, dentropy]
    if is_compiling() or _call_observed(call) or _observed(out, lse, dout, dlse, dentropy):
        _refuse_tangents("attention_backward", *inputs)
        if not is_compiling():
            register_flops()
        run = backward_op
    else:
        run = backward
    with torch.no_grad():
        grads = run(spec.text, *flat(call), out, lse, dout, dlse, needs, dentropy)
    if is_compiling() or not (torch.is_grad_enabled() and _any_learns(inputs)):
        return grads
    return list(once_differentiable(grads, *inputs))  # type: ignore[arg-type]


def infer(spec: Spec, call: Call) -> Forward:
    """Run `attention` over the cache `call.kv`. It has no gradient."""
    if is_compiling() or _call_observed(call):
        scales = () if call.kv is None else (call.kv.k_scale, call.kv.v_scale)
        _refuse_tangents("inference", *_inputs(call), *scales)
        if not is_compiling():
            warn_traced()
        return Forward(*infer_op(spec.text, *flat_kv(call)))
    return _run_backend(get(spec.backend).infer, spec, call)


def _run_backend(run: Callable[[Spec, Call], Forward], spec: Spec, call: Call) -> Forward:
    """Return the results of a backend, with out in the memory order of q."""
    results = run(spec, call)
    if results.out.stride() == call.q.stride():
        return results
    return results._replace(out=in_order_of(call.q, results.out))


def _attention_direct(spec: Spec, call: Call) -> Forward:
    """Run `attention` where nothing observes the operators."""
    q, k, v, sink, signature = call.q, call.k, call.v, call.sink, call.signature
    captured, coords = call.captured, call.coords
    score_tensors = captured.tensors[: spec.score_tensors]
    trained = (
        signature.trained if signature is not None else _any_learns([q, k, v, sink, *score_tensors])
    )
    if not (trained and torch.is_grad_enabled()):
        return _run_backend(get(spec.backend).forward, spec, call)
    if any(map(is_wrapped, (q, k, v, *score_tensors))):  # by a transform that has ended
        return _attention_by_operators(spec, call)
    register_flops()
    inputs = [q, k, v, sink, call.seed, coords.q_pos, coords.kv_pos, *captured.tensors]
    if copy_unsavable(inputs):
        signature = None
    if signature is None:  # positions are saved by autograd, not kept alive here
        coords = coords._replace(q_pos=None, kv_pos=None)
    runner = _Direct(
        spec, spec.result_dtype(q.dtype), len(score_tensors), captured.ints, captured.floats,
        call.tiles, coords, signature, [],
    )  # fmt: skip
    out, lse, *with_grad = _apply_direct(runner, *inputs)
    _, max_logit, row_max, entropy = runner.others
    runner.others.clear()
    return Forward(out, lse, max_logit, row_max, with_grad[0] if with_grad else entropy)


def _attention_by_operators(spec: Spec, call: Call) -> Forward:
    """Run `attention` where something observes the operators."""
    if not is_compiling():
        warn_traced()
        register_flops()
    elif is_exporting() and differentiated_in_compile():
        raise BackendRefused(
            "the gradients that torch.func takes of attention inside of an exported program would "
            "be lost; use torch.autograd.grad there, or differentiate the program that you load"
        )
    if is_dynamo_compiling():
        refuse_create_graph_in_program()
    out, *stats = forward_op(spec.text, *flat(call))
    return Forward(in_dtype(in_order_of(call.q, out), spec.result_dtype(call.q.dtype)), *stats)


def run_over_ranks(pair: Pair, spec: Spec, *operands: Any) -> Forward:
    """Run a pair of operators over ranks, given their operands after the spec, under autograd."""
    runner, inputs = _operators(pair, spec, *operands)
    trained = torch.is_grad_enabled() and _any_learns(inputs)
    _refuse_tangents("attention over ranks (layout=)", *inputs)
    if not is_compiling():
        register_flops()
    elif differentiated_in_compile():
        raise BackendRefused(
            "the gradients that torch.func takes of attention over ranks would be lost; use "
            "torch.autograd.grad there, or leave out fullgraph=True"
        )
    if not trained:
        out, *stats = runner.forward(*inputs)
        return Forward(in_dtype(in_order_of(operands[0], out), runner.out_dtype), *stats[:4])
    if is_compiling():
        inputs = _without_repeats(inputs)
    else:
        copy_unsavable(inputs)
    return as_forward(*_Attention.apply(runner, *inputs))


def _operators(
    pair: Pair, spec: Spec, q, k, v, sink, seed, captured, ints, floats, tiles, offsets, *where: Any
) -> tuple[Operators, list[Tensor | None]]:
    """Return what runs a pair of operators, and its tensors, from the operands after the spec."""
    runner = operators_of(pair, spec, q, len(captured), ints, floats, offsets)
    return runner, [q, k, v, sink, seed, *where, *captured, *tiles]


def as_forward(out, lse, entropy, max_logit, row_max, *others) -> Forward:
    """Return the results of `_Attention` in the order of a backend's."""
    return Forward(out, lse, max_logit, row_max, entropy)


def copy_unsavable(inputs: list[Tensor | None]) -> bool:
    """Replace the inputs of a call that were made in inference mode by copies, since autograd does
    not save them. Return whether there were any. (PyTorch refuses q, k and v that were made there.)
    """
    copied = False
    for n, x in enumerate(inputs):
        if n >= 3 and x is not None and x.is_inference():
            inputs[n], copied = x.clone(), True
    return copied


for _fact in (differentiated_in_compile, in_forward_mode, under_vmap):
    constant_under_compile(_fact)


def attention_out(spec: Spec, call: Call) -> Tensor:
    """Return `attention(spec, call).out`, by the backend's `native` where nothing observes our
    operators. A compiler gets it where nothing is trained: it knows it better than ours."""
    compiling = is_compiling()
    if _compiler_needs_operators() if compiling else _call_observed(call):
        return _attention_by_operators(spec, call).out
    out = get(spec.backend).native(spec, call, None if compiling else refuse_create_graph)
    if out is None:
        return (_attention_by_operators if compiling else _attention_direct)(spec, call).out
    if out.requires_grad and not compiling:
        register_flops()  # a counter may be there for the backward alone
    return out


def cpu_native(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, compiling: bool
) -> Tensor | None:  # fmt: skip
    """Return `attention_out` of a call on the CPU that is causal or has no mask, without score,
    sink and dropout, by PyTorch's own operator; None where `cpu.plain` refuses it."""
    if _compiler_needs_operators() if compiling else operators_are_changed() or _profiled():
        return None
    out = cpu.plain(q, k, v, causal, scale, None if compiling else refuse_create_graph)
    if not compiling and out is not None and out.requires_grad:
        register_flops()
    return out


def cpu_native_step(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, bias: Tensor | None
) -> Tensor | None:
    """Return `cpu_native` of one query per row, outside of compilers and without gradients, with
    `bias` `(b, 1, 1, kv_len)` of 0 and -inf added to the scores; None also for shapes that do not
    fit together."""
    if operators_are_changed() or _profiled() or not type(q) is type(k) is type(v) is Tensor:
        return None
    (b, hq, q_len, d), kv = q.shape, k.shape
    if not (kv == v.shape and kv[0] == b and kv[3] == d and q_len == 1 and hq % (kv[1] or 1) == 0):
        return None
    if bias is not None and (bias.shape != (b, 1, 1, kv[2]) or bias.dtype != q.dtype):
        return None
    if not (q.is_cpu and k.is_cpu and v.is_cpu and q.dtype == k.dtype == v.dtype):
        return None
    return cpu.plain(q, k, v, False, scale, refuse_create_graph, bias)


def _compiler_needs_operators() -> bool:
    """Return whether a compiler has to see our operators: in exported programs, and below
    transforms."""
    return transforms() or in_forward_mode() or is_exporting()


constant_under_compile(_compiler_needs_operators)
