"""Scores that read a tensor by relative position, through the simulator, which runs their assembly."""

from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import headway as hw
from headway.backends import hopper, reference
from headway.backends.hopper.bwd.plan import BackwardPlan
from headway.backends.hopper.fwd.plan import ForwardPlan
from headway.backends.hopper.launch_plan import plan_for
from headway.resolve import prepare
from headway.types import Coords

from .test_simulated import simulated  # noqa: F401  (a fixture)

B, H, Q, KV = 2, 2, 70, 200
FEW = torch.randn(H, 33)  # most distances are beyond its ends
MANY = torch.randn(H, 2 * KV + 1)
OF_BATCH = torch.randn(B, 64)
BUCKETS = torch.randn(32, H)

# name: the score of a table, the table, its mask, tables, whether the batch row and the head matter.
SCORES = {
    "clamped": (hw.relative_bias, FEW, hw.causal(), [(False, True)]),
    "through_a_function": (
        lambda t: hw.relative_bias(t) >> hw.softcap(3.0), MANY, None, [(False, True)],
    ),
    "of_buckets": (
        lambda t: hw.t5_bias(t, max_distance=60), BUCKETS, hw.sliding_window(90), [(False, True)],
    ),
    "two": (
        lambda t: lambda s, b, h, i, j: s * t[b, (i - j) % 64] + t[0, (j - i).clamp(-9, 9) + 9],
        OF_BATCH, None, [(True, False), (False, False)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_right(name, simulated):  # noqa: F811
    """Lengths that end inside of tiles, and a first query that is not position 0."""
    score, table, mask, tables = SCORES[name]
    torch.manual_seed(0)
    shapes = (H, Q, 64), (1, KV, 64), (1, KV, 64)
    q, k, v = (torch.randn(B, *s).bfloat16().requires_grad_() for s in shapes)
    table = table.clone().requires_grad_()
    dout = torch.randn(B, H, Q, 64).bfloat16()
    made = {}
    for backend in ("hopper", "reference"):
        out = hw.attention(q, k, v, score(table), mask, backend=backend)
        made[backend] = out, *torch.autograd.grad(out, (q, k, v, table), dout)
    for x, y in zip(*made.values(), strict=True):
        assert (x.double() - y.double()).norm() <= 4e-3 * y.double().norm()
    spec, call = prepare(q, k, v, score(table), mask, backend="hopper")
    assert plan_for(ForwardPlan, spec, call, (), q, k, v).bias_tables.depends == tables
    plan = plan_for(BackwardPlan, spec, call, (), q, k, v, dout)
    assert plan.bias_tables.depends == tables
    assert not plan.gathers_per_pair


def test_a_part_of_a_whole(simulated):  # noqa: F811
    """Where the tensors stand elsewhere, distances are others; where positions do not follow one
    another, diagonals of a tile are nothing in particular, and pairs are read one by one."""
    torch.manual_seed(0)
    q, k = torch.randn(1, H, 40, 64).bfloat16(), torch.randn(1, H, 140, 64).bfloat16()
    part = lambda name, at: prepare(q, k, k, hw.relative_bias(MANY), backend=name, keys=at)
    q.requires_grad_()  # the kernels of training
    made = []
    for backend in (hopper, reference):
        with torch.no_grad():
            made.append(backend.forward(*part(backend.name, Coords(q=90, kv=70))).out.double())
    assert (made[0] - made[1]).norm() <= 4e-3 * made[1].norm()
    spec, call = part("hopper", Coords(kv_pos=torch.arange(140).flip(0)))
    plan = plan_for(ForwardPlan, spec, call, (), q, k, k)
    assert plan.bias_tables.depends == []
    assert plan.gathers_per_pair
