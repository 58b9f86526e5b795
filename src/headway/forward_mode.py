"""Forward-mode derivatives of a call: its results, and how they move along tangents, in one pass.

`torch.func.jvp`, `linearize`, `jacfwd` and `forward_ad.dual_level` give inputs a tangent. Dual
numbers are taken apart here, above the autograd function (`_WithTangent`), which is differentiable
in the primal as a plain call is. Where a transform hides the tangents (vmap or grad inside of jvp),
PyTorch asks an autograd function for them (`_UnderTransforms`).

Dynamo drops the `jvp` of an autograd function in silence (pytorch/pytorch#192985). In a compiled
program, duals are taken apart in code that it traces, and the functions are calls in its graph.
"""

import sys
from collections.abc import Sequence
from typing import Any, Never

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from . import autograd
from .backends.base import Call
from .errors import ArgumentError, BackendRefused
from .operators import (
    MATH,
    TANGENT_DIFFERENTIATED,
    flat,
    only_of_primal_op,
    refuse_second_derivative,
    register_flops,
    tangent_op,
)
from .surroundings import (
    dispatch_modes,
    has_tangent,
    in_forward_mode,
    is_older_batched,
    requires_grad,
    under_vmap,
)
from .types import (
    Dual,
    Forward,
    Request,
    Spec,
    allow_in_graph,
    called_in_graph,
    constant_under_compile,
    in_dtype,
)

_SINK, _CAPTURED = 4, 7  # of an autograd function's tensors: the end of q, k, v and sink; captured


class _Runner:
    """A call's `Operators` as one object: transforms take apart what is a tuple."""

    def __init__(self, operators: Any) -> None:
        self.operators = operators

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operators, name)

    def tangent(self, tensors: Sequence[Tensor | None], along: Sequence[Tensor | None]) -> Dual:
        """Run `headway::tangent`."""
        return Dual(*tangent_op(self.spec, *self._operands(*tensors), list(along)))


def _refuse_tangent_gradient(what: str) -> Never:
    raise BackendRefused(TANGENT_DIFFERENTIATED if what == "backward" else (
        "attention has no second derivative (the tangent of a call has a tangent, as jvp of jvp "
        f"gives it one); where you need one, {MATH}"
    ))  # fmt: skip


class _WithTangent(torch.autograd.Function):
    """`autograd._Attention` and its tangent. It saves for the backward what that saves.

    `*inputs` are a `_Runner`, the tensors of `_Attention`, and the tangents of q, k, v, sink and
    what the score captures.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs):
        runner, *tensors = inputs
        count = len(tensors) - _SINK - runner.score_tensors
        dual = runner.tangent(tensors[:count], tensors[count:])
        same = dual.out.dtype == runner.out_dtype
        out = dual.out if same else dual.out.to(runner.out_dtype)
        others = dual.max_logit, dual.row_max, out.new_empty(0) if same else dual.out
        return out, dual.lse, dual.entropy, *dual[-3:], *others

    @staticmethod
    def setup_context(ctx, inputs, output):
        count = len(inputs) - _SINK - inputs[0].score_tensors
        autograd._Attention.setup_context(ctx, inputs[:count], (*output[:3], *output[6:]))

    @staticmethod
    def backward(ctx, dout, dlse, dentropy, *others):  # pyrefly: ignore[bad-override]
        of_tangents = [x for x in others[:3] if x is not None]
        if in_forward_mode() and not is_compiling():
            refuse_second_derivative("backward() in forward mode; leave the dual_level before it")
        if of_tangents:
            # Compilers, vmap and the hooks of FSDP give zeros for what nobody differentiates.
            if dout is None:
                dout = torch.zeros_like(ctx.saved_tensors[ctx.count], dtype=ctx.runner.out_dtype)
            traced = dispatch_modes() > 0
            dout = only_of_primal_op(dout, of_tangents, not traced)
        dentropy = dentropy if ctx.runner.entropy else None
        grads = autograd.differentiate_once(ctx, dout, dlse, dentropy)
        return *grads, *[None] * (_SINK + ctx.runner.score_tensors)

    @staticmethod
    def jvp(ctx, *tangents):
        _refuse_tangent_gradient("jvp")


class _TangentOnly(torch.autograd.Function):
    """The tangents of out, lse and entropy by themselves, of a call whose out is computed. Takes
    what `_WithTangent` takes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs):
        return tuple(_WithTangent.forward(*inputs)[3:6])

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        _refuse_tangent_gradient("backward")

    @staticmethod
    def jvp(ctx, *tangents):
        _refuse_tangent_gradient("jvp")


class _UnderTransforms(torch.autograd.Function):
    """`autograd._Attention` below transforms that hide tangents: it is asked for them."""

    generate_vmap_rule = True
    forward = autograd._Attention.forward

    @staticmethod
    def setup_context(ctx, inputs, output):
        autograd._Attention.setup_context(ctx, inputs, output)
        (_, *tensors), (out, lse, *others) = inputs, output
        exact_out = others[-1]
        entropy = others[: ctx.runner.entropy]
        ctx.others = [x.shape for x in others[len(entropy) :]]
        exact_out = exact_out if exact_out.dtype != out.dtype else out
        # The list of `save_for_backward`: vmap has one list of batch dimensions for both.
        ctx.save_for_forward(*tensors, exact_out, lse, *entropy)

    @staticmethod
    def backward(ctx, *grad_outputs):  # pyrefly: ignore[bad-override]
        return autograd._Attention.backward(ctx, *grad_outputs)

    @staticmethod
    def jvp(ctx, *tangents):
        runner, saved = ctx.runner, ctx.saved_tensors
        tangents = tangents[1:]  # less the runner's
        along = *tangents[:_SINK], *tangents[_CAPTURED : _CAPTURED + runner.score_tensors]
        results = _TangentOnly.apply(runner, *saved[: ctx.count], *along)[: 2 + runner.entropy]
        # A generated rule of vmap forgets which results have no derivative.
        return *results, *[saved[0].new_zeros(x) if under_vmap() else None for x in ctx.others]


def _runner(text: str, q: Tensor, *numbers: Any) -> _Runner:
    """Return what runs a call; `numbers` are that of its captured tensors, its ints, floats and
    offsets."""
    return _Runner(autograd.operators_of(autograd.ON_ONE_DEVICE, Spec.parse(text), q, *numbers))


@called_in_graph
def _with_tangent(text: str, numbers: tuple, *inputs: Any) -> tuple:
    """Return the results of `_WithTangent`, a call in the graph of a compiled program: `text` is
    the spec's."""
    return _WithTangent.apply(_runner(text, inputs[0], *numbers), *inputs)


def _refuse_older_batches(tensors: Sequence[Tensor | None]) -> None:
    """Refuse batches by a vmap older than `torch.func`'s, which has no rule for duals."""
    if not is_compiling() and any([x is not None and is_older_batched(x) for x in tensors]):  # noqa: C419
        raise BackendRefused(
            "attention takes no batch of tangents from torch.autograd.functional "
            "(strategy='forward-mode'); use torch.func.jacfwd. It has no second derivative, as "
            f"hessian is one; where you need one, {MATH}"
        )


def attention(spec: Spec, call: Call) -> Forward:
    """Run `autograd.attention` where forward mode is on."""
    inputs, numbers = _taken_apart(call)
    if is_compiling() and (reason := _why_not_compiled()):
        raise BackendRefused(reason)
    if under_vmap():
        return _under_transforms(spec, call, inputs, numbers)
    _refuse_older_batches(inputs)
    apart = [None if x is None else forward_ad.unpack_dual(x) for x in inputs]
    along = _of_differentiable([None if x is None else x.tangent for x in apart], spec)
    _refuse_older_batches(along)
    primal = [None if x is None else x.primal for x in apart]
    if any([t is not None for t in along]):  # noqa: C419
        dual = _run(spec, primal, along, numbers)
        out = forward_ad.make_dual(dual.out, dual.out_tangent)
        lse = forward_ad.make_dual(dual.lse, dual.lse_tangent)
        entropy = dual.entropy
        if spec.entropy:
            entropy = forward_ad.make_dual(entropy, dual.entropy_tangent)
        return Forward(out, lse, dual.max_logit, dual.row_max, entropy)
    if not is_compiling():
        return _under_transforms(spec, call, inputs, numbers)
    return autograd.attention(spec, call)


def _why_not_compiled() -> str:
    """Return why a compiled program would lose tangents of a call, which it sees at the innermost
    transform only; empty if it would not."""
    tracer = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx()
    if tracer.output.dual_level >= 0:
        return (
            "torch.compile loses the tangents of a dual_level around what it compiles: enter the "
            "dual_level inside, or call torch.func.jvp there"
        )
    kinds = [layer.key() for layer in torch._C._functorch.get_interpreter_stack() or ()]
    jvp = torch._C._functorch.TransformType.Jvp
    if kinds.count(jvp) > 1:
        return f"attention has no second derivative (jvp of jvp); where you need one, {MATH}"
    if kinds and kinds[-1] != jvp:
        return (
            "torch.compile does not see tangents below torch.vmap or torch.func.grad: call "
            "torch.vmap outside of torch.func.jvp, or leave out fullgraph=True; attention has no "
            "second derivative, as jvp of grad is one"
        )
    return ""


constant_under_compile(_why_not_compiled)


def attention_along(
    request: Request, spec: Spec, call: Call, tangents: dict[str | Tensor, Tensor]
) -> Dual:
    """Return the results of a call and their tangents. `tangents` has those of the request's
    inputs, by name or by the captured tensor."""
    inputs, numbers = _taken_apart(call)
    return _run(spec, inputs, _along(request, spec, call, tangents), numbers)


_NAMES = "q", "k", "v", "sink"


def _along(request: Request, spec: Spec, call: Call, tangents: Any) -> list[Tensor | None]:
    """Return the tangents of q, k, v, sink and what the score captures, checked.

    **Raises:** `ArgumentError` for a tangent that fits no input.
    """
    if not isinstance(tangents, dict):
        raise ArgumentError(
            f"tangents is of type {type(tangents).__name__}; it must be a dict from 'q', 'k', 'v', "
            "'sink' or a captured tensor to its tangent"
        )
    inputs = [call.q, call.k, call.v, call.sink, *call.captured.tensors]
    along: list[Tensor | None] = [None] * len(inputs)
    for key, tangent in tangents.items():
        if isinstance(key, str):
            places = [n for n, name in enumerate(_NAMES) if name == key and inputs[n] is not None]
        else:
            places = [n for n in range(len(_NAMES), len(inputs)) if inputs[n] is key]
        if not places:
            captured = [tuple(t.shape) for t in call.captured.tensors[: spec.score_tensors]]
            name = repr(key) if isinstance(key, str) else f"a tensor of shape {tuple(key.shape)}"
            raise ArgumentError(
                f"tangents has {name}, which the call does not read; its keys are 'q', 'k', 'v', "
                "'sink' if you pass one, and each tensor that the score captures, here of shapes "
                f"{captured}. A score of the library may capture a view of your tensor: then use "
                "torch.func.jvp"
            )
        x = getattr(request, key) if isinstance(key, str) else key
        name = key if isinstance(key, str) else "a captured tensor"
        for n in places:  # autocast has converted q, k and v
            along[n] = in_dtype(_checked(name, x, tangent), inputs[n].dtype)  # type: ignore[union-attr]
    return along[: len(_NAMES) + spec.score_tensors]  # a mask has no derivative


def _checked(name: str, x: Tensor, tangent: Any) -> Tensor:
    if not isinstance(tangent, Tensor):
        raise ArgumentError(
            f"the tangent of {name} is of type {type(tangent).__name__}, not a tensor; leave out "
            "what does not move"
        )
    if not x.is_floating_point():
        raise ArgumentError(f"{name} is {x.dtype}: integers have no tangent, leave it out")
    if (tangent.shape, tangent.dtype, tangent.device) != (x.shape, x.dtype, x.device):
        raise ArgumentError(
            f"the tangent of {name} is {tuple(tangent.shape)} {tangent.dtype} on {tangent.device}; "
            f"{name} is {tuple(x.shape)} {x.dtype} on {x.device}, and its tangent must be too"
        )
    return tangent


def _taken_apart(call: Call) -> tuple[list[Tensor | None], tuple]:
    """Return the tensors that an autograd function takes, and the number of those that score and
    mask capture, ints, floats and offsets."""
    q, k, v, sink, seed, captured, ints, floats, tiles, offsets, *where = flat(call)
    inputs = [q, k, v, sink, seed, *where, *captured, *tiles]
    return inputs, (len(captured), ints, floats, offsets)


def _of_differentiable(of_inputs: Sequence, spec: Spec) -> list:
    """Return the entries of q, k, v, sink and what the score captures."""
    return [*of_inputs[:_SINK], *of_inputs[_CAPTURED : _CAPTURED + spec.score_tensors]]


def _run(spec: Spec, inputs: list[Tensor | None], along: list, numbers: tuple) -> Dual:
    """Run a call and its tangent; `inputs` have no tangents of their own."""
    compiling, trained = is_compiling(), torch.is_grad_enabled()
    both = [x for x in (*inputs, *along) if x is not None]
    if in_forward_mode():
        if compiling and (reason := _why_not_compiled()):
            raise BackendRefused(reason)
        if any([has_tangent(x) for x in both]):  # noqa: C419
            _refuse_tangent_gradient("jvp")
    if not compiling:
        register_flops()
        trained = trained and any(map(requires_grad, both))
    if not trained:
        captured, ints, floats, offsets = numbers
        q, k, v, sink, seed, q_pos, kv_pos, *others = inputs
        out, *results = tangent_op(
            spec.text, q, k, v, sink, seed, others[:captured], ints, floats, others[captured:],
            offsets, q_pos, kv_pos, along,
        )  # fmt: skip
        return Dual(in_dtype(out, spec.result_dtype(q.dtype)), *results)  # type: ignore[union-attr]
    if compiling:
        allow_in_graph()
    else:
        autograd.copy_unsavable(inputs)
    out, lse, entropy, *tangents, max_logit, row_max, _ = _with_tangent(
        spec.text, numbers, *inputs, *along
    )
    return Dual(out, lse, max_logit, row_max, entropy, *tangents)


def _under_transforms(
    spec: Spec, call: Call, inputs: list[Tensor | None], numbers: tuple
) -> Forward:
    """Run `attention` where the innermost transform shows no tangents."""
    if not any(x is not None and has_tangent(x) for x in inputs):
        return autograd.attention(spec, call)
    register_flops()
    runner = _runner(spec.text, call.q, *numbers)
    return autograd.as_forward(*_UnderTransforms.apply(runner, *inputs))
