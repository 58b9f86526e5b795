"""From a call to kernel launches: the kernels' arguments, and their memory."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...mods.evaluation.derivative import joint
from ...mods.graph import parse
from ...types import Captured, Dual, Forward, Grads, Spec, Tangents
from ..base import Call, observes
from ..gpu import captured_grads, inference, outputs
from ..gpu.runtime import parallel_compile
from .kernel_backward import backward_kv, backward_q
from .kernel_forward import forward as forward_kernel
from .kernel_tangent import tangent as tangent_kernel
from .plan import Launcher, Plan, planned, planned_along


def forward(spec: Spec, call: Call) -> Forward:
    """Run the forward kernel, or the kernel of inference where it suits."""
    if inference.suits(spec, call):
        return inference.infer(spec, call)
    dv = call.v.shape[3]
    q, k, v = _aligned_rows(call.q), _aligned_rows(call.k), _aligned_rows(call.v)
    b, hq, q_len, _ = q.shape
    empty = partial(torch.empty, dtype=torch.float32, device=q.device)
    out = outputs.memory_for(call, 0, (b, hq, q_len, v.shape[3]), spec.out_dtype(q.dtype))
    lse = outputs.memory_for(call, 1, (b, hq, q_len))
    row_max = empty(b, hq, q_len) if spec.row_max else None
    entropy = empty(b, hq, q_len) if spec.entropy else None
    max_logits = None
    if lse.numel():
        plan = planned(spec, call, (), q, k, v)
        if plan.uncompiled:
            parallel_compile.compile_training(plan, spec, call, forward, backward)
        launcher = _forward_launcher(plan)
        sink = _contiguous(call.sink)
        (k_transposed,) = transposed(plan, k)
        k = k if k_transposed is None else k_transposed

        def arguments(slots: int) -> tuple:
            max_logits = empty(b, hq, slots) if spec.max_logit else None
            return q, k, v, out, lse, row_max, entropy, max_logits, sink

        *_, max_logits, _ = launcher(call, arguments)
    out = outputs.first_columns(out, dv)
    return outputs.of_forward(spec, out, lse, row_max, max_logits, entropy)


def backward(
    spec: Spec, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    needs: tuple[bool, ...], dentropy: Tensor | None = None,
) -> Grads:  # fmt: skip
    """Run one kernel for dq and the gradients of captured tensors, and one or two for dk and dv."""
    d, dv_width = call.q.shape[3], call.v.shape[3]
    q, k, v, out, dout = map(_aligned_rows, (call.q, call.k, call.v, out, dout))
    lse = lse.contiguous()
    b, hq, kv_len = *q.shape[:2], k.shape[2]
    dq_dtype, dkv_dtype = spec.grad_dtypes(q.dtype)
    captured = captured_grads.zeros(call.captured.tensors, needs, q.device) if needs else []
    of_sinks = None if observes(spec) else dentropy  # of a sink nothing is observed
    if not lse.numel() or not kv_len:
        return outputs.of_no_pairs(spec, call, out, lse, dout, dlse, of_sinks, captured)

    wanted = captured_grads.wanted(spec.score, needs) if needs else ()
    plan = planned(spec, call, wanted, q, k, v, dout)
    if plan.uncompiled:
        parallel_compile.compile_backward(
            plan, lambda: backward(spec, call, out, lse, dout, dlse, needs, dentropy)
        )
    empty = partial(torch.empty, dtype=dq_dtype, device=q.device)
    # Query heads that share a key head run in parallel, and their results are summed here.
    grouped = hq != k.shape[1]
    head_dtype = torch.float32 if grouped else dkv_dtype
    dk, dv = (empty(b, hq, kv_len, x.shape[3], dtype=head_dtype) for x in (k, v))
    dq, workspace = empty(*q.shape), empty(plan.workspace.size, dtype=torch.float32)
    sums = plan.exact_sums.begin(captured)
    grads = captured_grads.by_gather(plan.codegen_spec, sums) if wanted else ()
    of_workspace = workspace, None if dentropy is None else _padded(dentropy, plan.workspace.rows)
    rows = out.contiguous(), lse, _contiguous(dlse)
    q_arguments = q, k, v, dout, *transposed(plan, k, v), *of_workspace, *rows, dq, *grads
    variant = dentropy is None, out.dtype, dlse is None
    _backward_q_launcher(plan)(call, lambda slots: q_arguments, variant)
    plan.exact_sums.write(sums, captured)
    matrices = q, k, v, dout, *transposed(plan, q, dout), *of_workspace
    kv_grads = {"backward_kv": (dk, dv), "backward_k": (dk, None), "backward_v": (None, dv)}
    for name in plan.passes[1:]:
        arguments = *matrices, *kv_grads[name]
        LAUNCHERS[name](plan)(call, lambda slots, arguments=arguments: arguments, variant[0])
    dsink = None
    if call.sink is not None:
        delta = plan.workspace.split(workspace)[0][..., : plan.q_len]
        dsink = captured_grads.of_sink(call.sink, lse, delta, of_sinks)
    if grouped:
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2).to(dkv_dtype) for x in (dk, dv))
    widths = (dq, d), (dk, d), (dv, dv_width)
    return Grads(*[outputs.first_columns(*pair) for pair in widths], dsink, captured)


def tangent(spec: Spec, call: Call, along: Tangents) -> Dual:
    """Run one kernel for the forward and its tangent."""
    q, k, v = map(_aligned_rows, (call.q, call.k, call.v))
    moving = [None if x is None else _aligned_rows(x) for x in along[:3]]
    empty = partial(torch.empty, dtype=torch.float32, device=q.device)
    rows = q.shape[:3]
    out = empty(*rows, v.shape[3], dtype=spec.out_dtype(q.dtype))
    out_tangent = empty(*rows, v.shape[3], dtype=spec.result_dtype(q.dtype))
    lse, lse_tangent = empty(*rows), empty(*rows)
    row_max, max_logits = empty(*rows) if spec.row_max else None, None
    entropies = (empty(*rows), empty(*rows)) if spec.entropy else (None, None)
    if lse.numel():
        wider = _with_tables(spec, call, along)
        plan = planned_along(*wider, along.moving, q, k, v, *moving)
        if plan.uncompiled:
            both = lambda spec, call: tangent(spec, call, along)
            parallel_compile.compile_training(plan, spec, call, both, backward)
        q_tangent, k_tangent, v_tangent = moving
        k_transposed, k_tangent_transposed = transposed(plan, k, k_tangent)
        matrices = (
            q, k if k_transposed is None else k_transposed, v,
            q_tangent, k_tangent if k_tangent_transposed is None else k_tangent_transposed,
            v_tangent, out, lse, out_tangent, lse_tangent, row_max, *entropies,
        )  # fmt: skip
        sinks = _contiguous(call.sink), _contiguous(along.sink)

        def arguments(slots: int) -> tuple:
            max_logits = empty(*rows[:2], slots) if spec.max_logit else None
            return *matrices, max_logits, *sinks

        launcher = _tangent_launcher(plan)
        *_, max_logits, _, _ = launcher(wider[1], arguments, along.sink is None)
    dv = call.v.shape[3]
    out, out_tangent = (outputs.first_columns(x, dv) for x in (out, out_tangent))
    primal = outputs.of_forward(spec, out, lse, row_max, max_logits, entropies[0])
    entropy_tangent = primal.entropy if entropies[1] is None else entropies[1]
    return Dual(*primal, out_tangent, lse_tangent, entropy_tangent)


def _with_tables(spec: Spec, call: Call, along: Tangents) -> tuple[Spec, Call]:
    """Return the call with the tangents of the score's tensors captured after these."""
    tables = [x for x in along.captured if x is not None]
    if not tables:
        return spec, call
    (tensors, ints, floats), count = call.captured, spec.score_tensors
    captured = Captured([*tensors[:count], *tables, *tensors[count:]], ints, floats)
    return replace(spec, score_tensors=count + len(tables)), call.replace(captured=captured)


def _forward_launcher(plan: Plan) -> Launcher:
    return plan.launchers.get("forward") or plan.launcher(
        "forward",
        forward_kernel,
        SCORE=plan.function("score"),
        NUMBER=plan.function("number"),
        NUMBER_FINITE=observes(plan.spec) and parse(plan.spec.score).number_finite,
    )


def _tangent_launcher(plan: Plan) -> Launcher:
    return plan.launchers.get("tangent") or plan.launcher(
        "tangent", tangent_kernel, SCORE=plan.function("score_tangent"),
        NUMBER=plan.function("number_tangent"), CAPTURED_MOVE=plan.codegen_spec.moving != (),
    )  # fmt: skip


def _backward_q_launcher(plan: Plan) -> Launcher:
    return plan.launchers.get("backward_q") or plan.launcher(
        "backward_q", backward_q, SCATTER=plan.function("scatter"), **_derivative_constants(plan)
    )


def _backward_kv_launcher(name: str, plan: Plan) -> Launcher:
    return plan.launchers.get(name) or plan.launcher(
        name, backward_kv, **_derivative_constants(plan)
    )


LAUNCHERS: dict[str, Callable[[Plan], Launcher]] = {
    "forward": _forward_launcher,
    "backward_q": _backward_q_launcher,
    **{
        name: partial(_backward_kv_launcher, name)
        for name in ("backward_kv", "backward_k", "backward_v")
    },
}


def _derivative_constants(plan: Plan) -> dict[str, Any]:
    score = plan.codegen_spec.score
    return {
        "DERIVATIVE": plan.function("derivative"),
        "NUMBER": plan.function("number_derivative"),
        "UNBOUNDED": score is not None and joint(score, plan.codegen_spec.wanted).unbounded,
    }


def _aligned_rows(x: Tensor) -> Tensor:
    """Return x, or a copy, with contiguous rows of a multiple of 8 numbers, padded by 0, each at a
    multiple of 16 bytes.

    Narrower loads cannot be pipelined. The ptxas of CUDA 12.8 (Triton 3.6 and 3.7) miscompiles a
    kernel without pipelined loads for Hopper: its tiles of k and v have the same address in every
    iteration, and values that it hoists out of the loop get lost.
    """
    batch, head, row, column = x.stride()
    width = x.shape[3]
    if not width:
        return x
    if column == 1 and not (batch | head | row | width) & 7 and not x.data_ptr() & 15:
        return x
    if width & 7:
        return torch.nn.functional.pad(x, (0, -width % 8))
    return x.clone(memory_format=torch.contiguous_format)


def transposed(plan: Plan, *matrices: Tensor | None) -> list[Tensor | None]:
    """Return copies with contiguous columns, padded to a multiple of 16 rows; None where products
    use tensor cores and need no copies.

    Without tensor cores neighbouring threads multiply by neighbouring columns of a right factor. In
    `tile.outer` those are rows of a matrix, a multiple of 128 bytes apart: all in the same banks of
    shared memory, and Triton does not pad a factor of such a product.
    """
    return [_transpose(x) if plan.transposes and x is not None else None for x in matrices]


def _transpose(x: Tensor) -> Tensor:
    b, h, length, width = x.shape
    columns = x.new_empty(b, h, width, -(-length // 16) * 16)
    return columns[..., :length].mT.copy_(x)


def _padded(x: Tensor, rows: int) -> Tensor:
    """Return numbers of rows `(b, h, rows or fewer)`, contiguous, padded by 0 to so many rows."""
    return torch.nn.functional.pad(x, (0, rows - x.shape[2])).contiguous()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
