"""Launch the kernels of a call: allocate what they write, and put results together."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...memory_order import new_in_order_of
from ...types import Forward, Grads, Spec, in_dtype
from ..base import Call
from ..gpu import captured_grads, inference, outputs
from ..gpu.preprocess import run_preprocess
from ..gpu.runtime import parallel_compile
from .bwd.plan import BackwardPlan
from .fwd.plan import ForwardPlan
from .launch_plan import plan_for
from .tma import aligned, strides_fit


def forward(spec: Spec, call: Call) -> Forward:
    """Run one kernel, and for the largest logit take the maximum over its work tiles. Where the
    kernel of inference suits, run that."""
    if inference.suits(spec, call):
        return inference.infer(spec, call)
    q, k, v = matrices = aligned(call.q, call.k, call.v)
    b, hq, q_len, _ = q.shape
    new = lambda *shape, dtype=torch.float32: torch.empty(*shape, dtype=dtype, device=q.device)
    out = _memory_for_out(call, q, (b, hq, q_len, v.shape[3]), spec.out_dtype(q.dtype))
    lse = outputs.memory_for(call, 1, (b, hq, q_len))
    row_max = new(b, hq, q_len) if spec.row_max else None
    entropy = new(b, hq, q_len) if spec.entropy else None
    max_logit = None
    if lse.numel() and k.shape[2]:
        plan = plan_for(ForwardPlan, spec, call, (), *matrices)
        if plan.uncompiled:
            parallel_compile.compile_training(plan, spec, call, forward, backward)
        max_logit = new(b, hq, plan.max_logit_parts) if spec.max_logit else None
        plan.launch(call, *plan.tma_readable(matrices), out, lse, row_max, max_logit, entropy)
    else:
        out.zero_()
        lse.copy_(lse.new_full((), -math.inf) if call.sink is None else call.sink.float()[:, None])
        if row_max is not None:
            row_max.fill_(-math.inf)
        if entropy is not None:
            entropy.zero_()
    return outputs.of_forward(spec, out, lse, row_max, max_logit, entropy)


def _memory_for_out(call: Call, q: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory for out, in the memory order of q where TMA can write that; else contiguous.

    Its strides follow from q's, by which plans differ.
    """
    if dtype == q.dtype and not q.is_contiguous():
        out = new_in_order_of(q, shape, dtype)
        if strides_fit(out):
            return out
    return outputs.memory_for(call, 0, shape, dtype)


def backward(
    spec: Spec, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    needs: tuple[bool, ...], dentropy: Tensor | None = None,
) -> Grads:  # fmt: skip
    """Run one kernel for all gradients. Before it runs the preprocess of the rows of out and dout;
    after it, unless CTAs own whole segments, one that puts dq in order."""
    if spec.entropy and dentropy is None:
        spec = spec.replace(entropy=False)
    q, k, _, dout = matrices = aligned(call.q, call.k, call.v, dout)
    _, dtype = spec.grad_dtypes(q.dtype)
    captured = captured_grads.zeros(call.captured.tensors, needs, q.device) if needs else []
    if not lse.numel() or not k.shape[2]:
        return outputs.of_no_pairs(spec, call, out, lse, dout, dlse, dentropy, captured)

    wanted = captured_grads.wanted(spec.score, needs) if needs else ()
    if call.prepared is None:
        plan = _backward_plan(spec, call, wanted, matrices)
        if plan.uncompiled:
            parallel_compile.compile_backward(
                plan, lambda: backward(spec, call, out, lse, dout, dlse, needs, dentropy)
            )
        workspace = run_preprocess(plan.workspace, out, dout, dlse, lse, dentropy)
    else:
        plan, workspace = call.prepared
    dk, dv = plan.new_key_grads(call)
    sums = plan.exact_sums.begin(captured)
    grads = captured_grads.by_gather(plan.codegen_spec, sums) if wanted else ()
    dq = plan.launch(call, *plan.tma_readable(matrices), workspace, dk, dv, grads)
    plan.exact_sums.write(sums, captured)
    if plan.heads > plan.hk:
        dk, dv = (x.unflatten(1, (plan.hk, -1)).sum(2) for x in (dk, dv))
    if not plan.exact:
        dk = outputs.first_columns(in_dtype(dk, dtype), plan.d)
        dv = outputs.first_columns(in_dtype(dv, dtype), plan.dv)
        dq = outputs.first_columns(dq, plan.d)
    dsink = None
    if call.sink is not None:
        neg_delta = plan.workspace.split(workspace)[0][..., : plan.q_len]
        dsink = captured_grads.of_sink(call.sink, lse, -neg_delta, dentropy)
    return Grads(dq, dk, dv, dsink, captured)


def prepare(
    spec: Spec, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[BackwardPlan, Tensor] | None:  # fmt: skip
    """Return the plan, and the workspace after the preprocess; None where kernels are not compiled
    yet, or `aligned` would copy the keys."""
    matrices = (call.q, call.k, call.v, dout)
    if not (lse.numel() and call.k.shape[2]) or any(x.data_ptr() % 16 for x in matrices):
        return None
    wanted = captured_grads.wanted(spec.score, needs) if needs else ()
    plan = _backward_plan(spec, call, wanted, matrices)
    if plan.uncompiled:
        return None
    return plan, run_preprocess(plan.workspace, out, dout, dlse, lse)


def _backward_plan(
    spec: Spec, call: Call, wanted: tuple[int, ...], matrices: Sequence[Tensor]
) -> BackwardPlan:  # fmt: skip
    plan = plan_for(BackwardPlan, spec, call, wanted, *matrices)
    return plan.with_segments(spec, call, wanted, matrices)
