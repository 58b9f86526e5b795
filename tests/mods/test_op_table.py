"""Every op of the table: value and derivative against PyTorch's own in float64, edges included."""

import math

import pytest
import torch
from torch import Tensor

import headway as hw
from headway.mods import ops
from headway.mods.evaluation.derivative import joint
from headway.mods.evaluation.evaluate import evaluate
from headway.mods.ops import OPS
from headway.mods.tracing.trace import trace

EDGES = torch.tensor([
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 7.0, 1 - 2**-53, 1 + 2**-52, 2**-1074,
    -(2**-1040), 1e-200, 1e308, -1e308, 709.0, 711.0, math.inf, -math.inf, math.nan,
], dtype=torch.float64)  # fmt: skip
INTEGERS = torch.tensor([0, 1, -1, 2, 7, -7, 63, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63)])
# As users spell them; `copysign(x, 0.0)` and others take numbers as well.
FLOAT_OPS = {
    name for name, op in OPS.items()
    if op.aten and op.floats is not None and name not in ops.COMPARISONS | {"not", "isnan", "isinf"}
}  # fmt: skip
SPECIAL = sorted(name for name in FLOAT_OPS if "special." in str(OPS[name].floats))


def function(name: str):
    """Return the op as PyTorch's own function of one or two numbers."""
    return getattr(torch.ops.aten, OPS[name].aten[0])


def numbers(count: int) -> Tensor:
    spread = 10 ** torch.empty(count, dtype=torch.float64).uniform_(-3, 3)
    return torch.cat([EDGES, torch.randn(count, dtype=torch.float64) * spread])


def wrong(name: str, count: int = 200) -> float:
    """Return how far value and derivatives are from PyTorch's, relative to their size."""
    fn, x, read = function(name), numbers(count), None
    operands = [x.requires_grad_()]
    score = lambda s, b, h, i, j: fn(s) if name != "signbit" else fn(s).double()
    if len(OPS[name].operands) == 2:
        pairs = torch.cartesian_prod(x[:60].detach(), x[:60].detach()).unbind(1)
        operands = [y.clone().requires_grad_() for y in pairs]
        table = torch.zeros(1, dtype=torch.float64)
        score = lambda s, b, h, i, j: fn(s, table[j])
        read = lambda n, table, indices: operands[1].detach()
    graph = trace("score", score, torch.float64).graph
    values = dict.fromkeys(("b", "h", "q_idx", "kv_idx"), torch.zeros(()))
    values |= {"score": operands[0].detach(), "t0": x.detach()}
    right = fn(*operands)
    found = evaluate(joint(graph.text, tuple(n for n, _ in graph.gathers)), values, read)
    off = relative(found[0], right.detach().double(), 1e-290)
    for slope, operand in zip(found[1:], operands, strict=True):
        expected = torch.zeros_like(operand)
        if right.requires_grad:
            try:
                (expected,) = torch.autograd.grad(right.sum(), operand, retain_graph=True)
            except RuntimeError:  # "the derivative of floor_divide is not implemented"
                continue
        off = max(off, relative(slope, expected, 1e-3))
    return off


def relative(one: Tensor | float, other: Tensor, least: float) -> float:
    one = torch.as_tensor(one).double().expand_as(other)
    same = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs() / other.abs().clamp_min(least)
    return torch.where(same, 0.0, apart).nan_to_num(nan=math.inf).max().item()


@pytest.mark.parametrize("name", sorted(FLOAT_OPS))
def test_values_and_derivatives(name):
    assert wrong(name) < 1e-12


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("name", sorted(n for n, op in OPS.items() if op.ints and op.aten))
def test_integers_wrap_as_pytorchs(name, dtype):
    x = INTEGERS.to(dtype)
    operands = [x]
    if len(OPS[name].operands) == 2:
        operands = list(torch.cartesian_prod(x, x).unbind(1))
        if name in ("floordiv", "mod", "fmod"):  # the processor faults
            sound = (operands[1] != 0) & (operands[1] != -1)
            operands = [a[sound] for a in operands]
        if name in ("shl", "shr"):
            operands[1] = operands[1].clamp(0, 7)
    try:
        right = function(name)(*operands)
    except RuntimeError:
        pytest.skip("PyTorch has none of this dtype")
    found = ops.apply(name, tuple(operands), right.dtype)
    assert torch.equal(found, right)


MUTANTS = {
    "fmax": ("fmax", OPS["max"].value),  # shares the derivative where both are the same
    "copysign": ("copysign", lambda a, b, **out: torch.where(b < 0, -a.abs(), a.abs())),
    "atan": ("atan", lambda a, **out: torch.atan(a.detach()) + (a - a.detach())),
    "lgamma": ("digamma", torch.lgamma),
    "i0": ("i1", torch.special.i0),
    "hypot": ("hypot", lambda a, b, **out: (a * a + b * b).sqrt()),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_op_is_found(name, monkeypatch):
    op, value = MUTANTS[name]
    joint.cache_clear()
    monkeypatch.setitem(OPS, op, OPS[op]._replace(value=value))
    assert wrong(name) > 1e-3
    joint.cache_clear()


@pytest.mark.parametrize("name", SPECIAL)
def test_attention(name):
    """On the CPU, with scores inside of the op's domain."""
    fn, up = function(name), 1.0 if name == "acosh" else 0.0
    pair = len(OPS[name].operands) == 2
    table = torch.randn(7, dtype=torch.float64).requires_grad_()

    def score(s, b, h, i, j):
        x = s.sigmoid() * 0.9 + (0.05 + up)
        return 2 * (fn(x, table[j]) if pair else fn(x) + table[j]) * 1.0

    q, k, v = (torch.randn(1, 2, 7, 8, dtype=torch.float64).requires_grad_() for _ in range(3))
    right = score(q @ k.mT / math.sqrt(8), 0, 0, 0, torch.arange(7)).softmax(-1) @ v
    found = hw.attention(q, k, v, score)
    torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-11)
    leaves = q, k, v, table
    expected = torch.autograd.grad(right.sin().sum(), leaves, allow_unused=True)
    gradients = torch.autograd.grad(found.sin().sum(), leaves, allow_unused=True)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other)


@pytest.mark.parametrize("name", SPECIAL)
def test_block_masks(name):
    """A mask whose tiles are found by intervals, or pair by pair, is what PyTorch's op says."""
    fn, pair = function(name), len(OPS[name].operands) == 2

    def mask(b, h, i, j):
        x = (i - j) / 64.0
        return (fn(x, j / 9.0) if pair else fn(x)) > 0.3

    i, j = torch.arange(192)[:, None], torch.arange(192)
    tiles = hw.block_mask(mask, 1, 1, 192, 192, tile=64)
    q = torch.randn(1, 1, 192, 8, dtype=torch.float64)
    keep = mask(0, 0, i, j)
    right = (q @ q.mT / math.sqrt(8)).masked_fill(~keep, -math.inf).softmax(-1).nan_to_num(0) @ q
    torch.testing.assert_close(hw.attention(q, q, q, mask=tiles), right)
