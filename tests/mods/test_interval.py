"""Every interval rule, against the op itself on numbers inside the bounds."""

import pytest
import torch
from torch import Tensor

from headway.mods.bounds import rules
from headway.mods.bounds.rules import Bounds
from headway.mods.graph import DTYPES, FLOATS, Graph, Input, Node
from headway.mods.ops import COMPARISONS, OPS, apply

BOXES, POINTS = 400, 40
ON_BOOL = {"and", "or", "xor", "not", "eq", "ne"}
INTS_ONLY = {"invert", "shl", "shr", "and", "or", "xor"}
FLOATS_ONLY = {op for op, of in OPS.items() if of.ints is None} - {*INTS_ONLY, "detach", "pow"}
OPERANDS = {"where": "bxx", "to": "x"} | {op: "x" * len(of.operands) for op, of in OPS.items()}


def cases():
    for op in [*OPS, "where", "to"]:
        for dtype in ("i64", "i32", "u8", "f32", "f16", "bf16", "f64", "bool"):
            if dtype == "bool" and op not in (*ON_BOOL, "where", "to"):
                continue
            if (dtype in FLOATS and op in INTS_ONLY) or (dtype not in FLOATS and op in FLOATS_ONLY):
                continue
            if dtype == "u8" and op in ("neg", "abs", "sign"):
                continue
            results = [dtype]
            if op in COMPARISONS or op in ("isnan", "isinf", "signbit", "not"):
                results = ["bool"]
            elif op == "to":
                results = ["i64", "u8", "f32", "f16", "bool"]
            for result in results:
                yield pytest.param(op, dtype, result, id=f"{op}-{dtype}-{result}")


def numbers(dtype: str, *shape: int) -> Tensor:
    """Of all sizes, and the special ones."""
    of = DTYPES[dtype]
    if dtype == "bool":
        return torch.rand(shape) < 0.5
    if dtype in FLOATS:
        values = torch.randn(shape, dtype=torch.float64) * 10 ** torch.randint(-3, 4, shape)
        special = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 1e30])
    else:
        values = (torch.randn(shape) * 10 ** torch.randint(0, 5, shape)).long()
        info = torch.iinfo(of)
        special = torch.tensor([0, 1, -1, 2, info.max, info.min, info.max - 1, 64])
    values = values.to(special.dtype) if dtype not in FLOATS else values
    picked = special[torch.randint(0, 8, shape)]
    return torch.where(torch.rand(shape) < 0.15, picked, values.to(picked.dtype)).to(of)


def boxes(dtype: str) -> tuple[Bounds, Tensor]:
    """Bounds `(BOXES,)`, and numbers inside them `(BOXES, POINTS)`."""
    near = torch.rand(BOXES, 1) < 0.5  # half of the boxes are narrow
    inside = numbers(dtype, BOXES, POINTS)
    if dtype != "bool":
        first = inside[:, :1].expand_as(inside)
        step = torch.randint(0, 4, inside.shape).to(inside.dtype)
        info = torch.iinfo(inside.dtype) if dtype not in FLOATS else None
        fits = (first < info.max - 4) if info else first == first
        inside = torch.where(near & fits, first + step, inside)
        few = torch.rand(BOXES, 1) < 0.2  # and some are one number
        inside = torch.where(few, first, inside)
    lo, hi = inside.amin(1), inside.amax(1)  # NaN where any is
    if dtype not in FLOATS and dtype != "bool":
        lo, hi = lo.long(), hi.long()
    return Bounds(lo, hi), inside


@pytest.mark.parametrize(("op", "dtype", "result"), list(cases()))
def test_no_value_leaves_its_bounds(op, dtype, result):
    operands = ["bool" if x == "b" else dtype for x in OPERANDS[op]]
    drawn = [boxes(d) for d in operands]
    if op in ("floordiv", "truncdiv", "mod", "fmod") and dtype not in FLOATS:
        # The processor faults on a division by 0, and of the least number by -1.
        inside = drawn[1][1].clone()
        inside[(inside == 0) | (inside == -1)] = 3
        drawn[1] = Bounds(inside.amin(1).long(), inside.amax(1).long()), inside
    if op in ("shl", "shr", "pow") and dtype not in FLOATS:
        inside = (torch.randint(0, 6, (BOXES, 1)) + torch.randint(0, 2, (BOXES, POINTS))).to(
            DTYPES[dtype]
        )
        inside[: BOXES // 2] = inside[: BOXES // 2, :1]
        drawn[1] = Bounds(inside.amin(1).long(), inside.amax(1).long()), inside
    names = [f"v{n}" for n in range(len(operands))]
    node = Node(op, tuple(names), result)
    graph = Graph("mask", tuple(map(Input, names, operands)), (node,), ("%0",))
    lo, hi = rules.node_bounds(graph, node, [b for b, _ in drawn])
    value = apply(op, tuple(v for _, v in drawn), DTYPES[result])
    lo, hi = (torch.as_tensor(x).expand(BOXES)[:, None] for x in (lo, hi))
    if result in FLOATS:
        anything = lo.isnan() | hi.isnan()
        assert torch.equal(lo.isnan(), hi.isnan())
        assert (anything | ((value >= lo) & (value <= hi))).all()
    elif result == "bool":
        assert (value | ~lo).all()
        assert (~value | hi).all()
    else:
        assert ((value.long() >= lo) & (value.long() <= hi)).all()


def test_a_square_is_not_negative():
    node = Node("mul", ("v0", "v0"), "i64")
    graph = Graph("mask", (Input("v0", "i64"),), (node,), ("%0",))
    box = Bounds(torch.tensor([-3, 2, -5]), torch.tensor([4, 6, -1]))
    lo, hi = rules.node_bounds(graph, node, [box, box])
    assert lo.tolist() == [0, 4, 1]
    assert hi.tolist() == [16, 36, 25]


def test_mod_is_exact_within_one_period():
    node = Node("mod", ("v0", "v1"), "i64")
    graph = Graph("mask", (Input("v0", "i64"), Input("v1", "i64")), (node,), ("%0",))
    box = Bounds(torch.tensor([10, 14, -7]), torch.tensor([13, 17, -6]))
    period = Bounds(torch.tensor(8), torch.tensor(8))
    lo, hi = rules.node_bounds(graph, node, [box, period])
    assert (lo.tolist(), hi.tolist()) == ([2, 0, 1], [5, 7, 2])
