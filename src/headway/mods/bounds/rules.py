"""Interval rules: from bounds of an op's operands to bounds of its result.

A rule may be loose but never wrong:

- an op without a rule, a division by what may be zero, or an integer that may leave its dtype's
  range (and then wraps) may be anything its dtype can hold;
- a float that may be NaN has NaN for its bounds, and a comparison with NaN bounds is unknown;
- float bounds are computed in the op's own dtype by the op itself: rounding keeps order. Where an
  implementation may not (exp, tanh, ...), the bounds are widened by 16 units of rounding.

(Moore, Kearfott & Cloud 2009, Introduction to Interval Analysis, chapters 2 and 5)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..graph import DTYPES, FLOATS, Graph, Node, Number, apply


class Bounds(NamedTuple):
    """The least and the greatest that a value can be: tensors, or numbers for a constant.

    Integers of any width are held as int64.
    """

    lo: Any
    hi: Any


def anything(dtype: str) -> Bounds:
    """Bounds of what is not known at all."""
    if dtype in FLOATS:
        return Bounds(torch.nan, torch.nan)
    if dtype == "bool":
        return Bounds(False, True)
    return Bounds(torch.iinfo(DTYPES[dtype]).min, torch.iinfo(DTYPES[dtype]).max)


def node_bounds(graph: Graph, node: Node, args: list[Bounds], fits: bool = False) -> Bounds:
    """Bounds of what an op makes of its operands.

    `fits`: an integer that is known to stay in its dtype's range, bounds included.
    """
    rule = rule_of(graph, node)
    bounds = _by_points(node, args) if rule is None else rule(node, *args)
    if node.dtype in FLOATS:
        bad = _is_nan(bounds.lo) | _is_nan(bounds.hi)
        return Bounds(_where(bad, torch.nan, bounds.lo), _where(bad, torch.nan, bounds.hi))
    if node.dtype == "bool" or fits:
        return bounds
    bad = _may_leave_int64(node, args)
    low, high = anything(node.dtype)
    if node.dtype != "i64":
        bad = bad | (bounds.lo < low) | (bounds.hi > high)
    return _unless(bad, bounds, node.dtype)


def _may_leave_int64(node: Node, args: list[Bounds]) -> Tensor | bool:
    """Where the result of an op, or what its rule computes on the way, may be no int64."""
    bad = False
    if node.op in _GROWING:
        for x in args:
            bad = bad | (x.lo < -HUGE) | (x.hi > HUGE)
    if node.op == "mul":
        for x in args[0]:
            for y in args[1]:
                bad = bad | ((_tensor(x, torch.float64) * y).abs() >= HUGE)
    return bad


def _by_points(node: Node, args: list[Bounds]) -> Bounds:
    """For an op without a rule: itself where every operand is known exactly, else anything."""
    exact = _all(*((a.lo == a.hi) for a in args))
    value = apply(node.op, tuple(a.lo for a in args), DTYPES[node.dtype])
    if node.dtype not in FLOATS and node.dtype != "bool":
        value = value.long()
    low, high = anything(node.dtype)
    return Bounds(_where(exact, value, low), _where(exact, value, high))


# -- rules ----------------------------------------------------------------------------------------

Rule = Callable[..., Bounds]

HUGE = 1 << 62  # integers beyond it might leave int64 in the next op
_GROWING = frozenset("add sub mul neg abs floordiv truncdiv mod fmod".split())  # these, of ints


def rule_of(graph: Graph, node: Node) -> Rule | None:
    """The rule of an op for the dtype that it computes in, if there is one."""
    dtype = operand_dtype(graph, node)
    kind = "float" if dtype in FLOATS else "bool" if dtype == "bool" else "int"
    return _RULES.get((node.op, kind)) or _RULES.get((node.op, "any"))


def operand_dtype(graph: Graph, node: Node) -> str:
    """The dtype that an op computes in: of its first operand that is not a constant."""
    args = node.args[1:] if node.op == "where" else node.args
    for arg in args:
        if isinstance(arg, str):
            if arg[0] == "%":
                return graph.nodes[int(arg[1:])].dtype
            return next(i.dtype for i in graph.inputs if i.name == arg)
    return node.dtype


def _tensor(x: Tensor | Number, dtype: torch.dtype | None = None) -> Tensor:
    """As a tensor; numbers are on the CPU, whatever the caller's default device and dtype are."""
    if isinstance(x, Tensor):
        return x if dtype is None else x.to(dtype)
    if dtype is None and isinstance(x, float):
        dtype = torch.float32
    return torch.tensor(x, dtype=dtype, device="cpu")


def _where(cond: Any, a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """`torch.where` that keeps the dtype of the operand that is a tensor."""
    like = next((x for x in (a, b) if isinstance(x, Tensor)), None)
    if like is None:
        return torch.where(cond, _tensor(a), _tensor(b))
    a, b = (x if isinstance(x, Tensor) else like.new_full((), x) for x in (a, b))
    return torch.where(cond, a, b)


def _all(*conditions: Tensor | bool) -> Tensor:
    result = conditions[0]
    for cond in conditions[1:]:
        result = result & cond
    return _tensor(result)


def _is_nan(x: Tensor | Number) -> Tensor:
    return _tensor(x != x)


def _span(*values: Tensor) -> Bounds:
    """The least and the greatest of some values."""
    lo = hi = values[0]
    for value in values[1:]:
        lo, hi = torch.minimum(lo, value), torch.maximum(hi, value)
    return Bounds(lo, hi)


def _unless(bad: Tensor | bool, bounds: Bounds, dtype: str) -> Bounds:
    """The bounds, but of anything where `bad`."""
    if bad is False:
        return bounds
    low, high = anything(dtype)
    bad = _tensor(bad)
    return Bounds(_where(bad, low, bounds.lo), _where(bad, high, bounds.hi))


def _add_int(node: Node, a: Bounds, b: Bounds) -> Bounds:
    return Bounds(a.lo + b.lo, a.hi + b.hi)


def _sub_int(node: Node, a: Bounds, b: Bounds) -> Bounds:
    return Bounds(a.lo - b.hi, a.hi - b.lo)


def _mul_int(node: Node, a: Bounds, b: Bounds) -> Bounds:
    values = _span(*(_tensor(x) * y for x in a for y in b))
    if node.args[0] == node.args[1]:  # a square: what it multiplies has one sign at a time
        lo = torch.where((a.lo <= 0) & (a.hi >= 0), 0, values.lo.clamp_min(0))
        values = Bounds(lo, values.hi)
    return values


def _neg(node: Node, a: Bounds) -> Bounds:
    return Bounds(-a.hi, -a.lo)


def _invert_int(node: Node, a: Bounds) -> Bounds:
    return Bounds(-1 - a.hi, -1 - a.lo)


def _abs(node: Node, a: Bounds) -> Bounds:
    return Bounds(torch.maximum(a.lo, -a.hi).clamp_min(0), torch.maximum(-a.lo, a.hi))


def _quotients(op: str, a: Bounds, b: Bounds) -> Bounds:
    """`a / b` for b of one sign (elsewhere meaningless): monotone in each, so at the corners."""
    mode = {"floordiv": "floor", "truncdiv": "trunc"}[op]
    corners = []
    for divisor in b:
        divisor = _tensor(divisor)
        divisor = torch.where(divisor == 0, 1, divisor)
        # The processor faults on the least int64 divided by -1.
        values = [_tensor(x).clamp(-HUGE, HUGE) for x in a]
        corners += [torch.div(x, divisor, rounding_mode=mode) for x in values]
    return _span(*corners)


def _may_be_zero(b: Bounds) -> Tensor | bool:
    return (b.lo <= 0) & (b.hi >= 0)


def _divide_int(node: Node, a: Bounds, b: Bounds) -> Bounds:
    return _unless(_may_be_zero(b), _quotients(node.op, a, b), "i64")


def _mod_int(node: Node, a: Bounds, b: Bounds) -> Bounds:
    # Within [b.lo + 1, 0] or [0, b.hi - 1]; and where a // b is one number q, it is a - q b.
    quotient = _quotients("floordiv", a, b)
    one = _all(b.lo == b.hi, quotient.lo == quotient.hi)
    positive = _tensor(b.lo > 0)
    lo = _where(positive, 0, _tensor(b.lo) + 1)
    hi = _where(positive, _tensor(b.hi) - 1, 0)
    lo = torch.where(one, a.lo - quotient.lo * b.lo, lo)
    hi = torch.where(one, a.hi - quotient.lo * b.lo, hi)
    return _unless(_may_be_zero(b), Bounds(lo, hi), "i64")


def _fmod_int(node: Node, a: Bounds, b: Bounds) -> Bounds:
    # The sign of a, and smaller than b; where a / b truncates to one number q, it is a - q b.
    quotient = _quotients("truncdiv", a, b)
    one = _all(b.lo == b.hi, quotient.lo == quotient.hi)
    most = torch.maximum(_tensor(b.lo).abs(), _tensor(b.hi).abs()) - 1
    lo = torch.where(one, a.lo - quotient.lo * b.lo, torch.where(a.lo >= 0, 0, -most))
    hi = torch.where(one, a.hi - quotient.lo * b.lo, torch.where(a.hi <= 0, 0, most))
    return _unless(_may_be_zero(b), Bounds(lo, hi), "i64")


def _shift_right(node: Node, a: Bounds, b: Bounds) -> Bounds:
    steps = _tensor(b.lo)
    known = _all(b.lo == b.hi, steps >= 0, steps < 8 * DTYPES[node.dtype].itemsize)
    steps = torch.where(known, steps, 0)
    return _unless(~known, Bounds(a.lo >> steps, a.hi >> steps), node.dtype)


def _finite(*operands: Bounds) -> Tensor:
    return _all(*((x - x == 0) for bounds in operands for x in bounds))


def _float(node: Node, a: Bounds, b: Bounds) -> Bounds:
    """+ - * / of floats: monotone in each operand, so at the corners; inf may make a NaN."""
    known = _finite(a, b)
    if node.op == "div":
        known = known & ~_tensor(_may_be_zero(b))
    dtype = DTYPES[node.dtype]
    values = _span(*(apply(node.op, (x, y), dtype) for x in a for y in b))
    if node.op == "mul" and node.args[0] == node.args[1]:
        lo = torch.where((a.lo <= 0) & (a.hi >= 0), 0, values.lo.clamp_min(0))
        values = Bounds(lo.to(dtype), values.hi)
    return Bounds(_where(known, values.lo, torch.nan), _where(known, values.hi, torch.nan))


def _rising(node: Node, *args: Bounds) -> Bounds:
    """An op that never falls when an operand rises."""
    dtype = DTYPES[node.dtype]
    return Bounds(*(apply(node.op, tuple(a[end] for a in args), dtype) for end in (0, 1)))


def _widened(bounds: Bounds) -> Bounds:
    info = torch.finfo(bounds.lo.dtype)  # type: ignore[union-attr]
    lo, hi = bounds
    return Bounds(
        lo - lo.abs() * (16 * info.eps) - info.tiny,  # type: ignore[union-attr]
        hi + hi.abs() * (16 * info.eps) + info.tiny,  # type: ignore[union-attr]
    )


def _rising_about(node: Node, a: Bounds) -> Bounds:
    return _widened(_rising(node, a))


def _falling_about(node: Node, a: Bounds) -> Bounds:
    """1/x and 1/sqrt(x), which fall where x > 0."""
    lo, hi = _widened(Bounds(*_rising(node, a)[::-1]))
    positive = _tensor(a.lo > 0)
    return Bounds(_where(positive, lo, torch.nan), _where(positive, hi, torch.nan))


def _wave(node: Node, a: Bounds) -> Bounds:
    one = torch.ones((), dtype=DTYPES[node.dtype], device="cpu")
    known = _finite(a)
    return Bounds(_where(known, -one, torch.nan), _where(known, one, torch.nan))


def _sign_float(node: Node, a: Bounds) -> Bounds:
    lo, hi = _rising(node, a)
    nan = _is_nan(a.lo) | _is_nan(a.hi)  # of which torch's sign is 0
    return Bounds(_where(nan, -1.0, lo), _where(nan, 1.0, hi))


def _isnan(node: Node, a: Bounds) -> Bounds:
    maybe = _is_nan(a.lo) | _is_nan(a.hi)
    return Bounds(torch.zeros_like(maybe), maybe)


def _isinf(node: Node, a: Bounds) -> Bounds:
    same = _tensor((a.lo == a.hi) & ~_finite(a))
    return Bounds(same, ~_finite(a))


def _less(node: Node, a: Bounds, b: Bounds) -> Bounds:
    """lt, le, gt, ge. Written so that NaN bounds give (False, True)."""
    if node.op in ("gt", "ge"):
        a, b = b, a
    if node.op in ("lt", "gt"):
        always, never = a.hi < b.lo, a.lo >= b.hi
    else:
        always, never = a.hi <= b.lo, a.lo > b.hi
    return Bounds(_tensor(always), ~_tensor(never))


def _equal(node: Node, a: Bounds, b: Bounds) -> Bounds:
    never = _tensor((a.hi < b.lo) | (a.lo > b.hi))
    maybe = ~never
    # Two single numbers that do not miss each other. So put, most operands here are small.
    always = maybe & (a.lo == a.hi) & (b.lo == b.hi)
    return Bounds(always, maybe) if node.op == "eq" else Bounds(never, ~always)


def _not(node: Node, a: Bounds) -> Bounds:
    lo, hi = _nonzero(a)
    return Bounds(~hi, ~lo)


def _nonzero(a: Bounds) -> Bounds:
    if isinstance(a.lo, Tensor) and a.lo.dtype == torch.bool:
        return a
    return _equal(Node("ne", (), "bool"), a, Bounds(0, 0))


def _xor_bool(node: Node, a: Bounds, b: Bounds) -> Bounds:
    known = _all(a.lo == a.hi, b.lo == b.hi)
    value = a.lo ^ b.lo
    return Bounds(known & value, ~known | value)


def _select(node: Node, cond: Bounds, a: Bounds, b: Bounds) -> Bounds:
    dtype = DTYPES[node.dtype]
    if node.dtype not in FLOATS and node.dtype != "bool":
        dtype = torch.int64
    always, maybe = (_tensor(x) for x in cond)
    ends = []
    for end, least in ((0, torch.minimum), (1, torch.maximum)):
        x, y = (_tensor(v[end], dtype) for v in (a, b))
        either = torch.logical_and(x, y) if end == 0 else torch.logical_or(x, y)
        both = either if dtype == torch.bool else least(x, y)
        ends.append(torch.where(always, x, torch.where(maybe, both, y)))
    return Bounds(*ends)


def _convert(node: Node, a: Bounds) -> Bounds:
    dtype = DTYPES[node.dtype]
    lo, hi = (_tensor(x) for x in a)
    if node.dtype == "bool":
        return _nonzero(Bounds(lo, hi))
    if dtype.is_floating_point:
        return Bounds(lo.to(dtype), hi.to(dtype))
    if lo.is_floating_point():  # towards zero; what an int cannot hold is undefined
        fits = (lo > -HUGE) & (hi < HUGE)
        low, high = anything(node.dtype)
        zero = torch.zeros((), dtype=lo.dtype, device="cpu")
        lo, hi = (torch.where(fits, x, zero).to(torch.int64) for x in (lo, hi))
        return Bounds(_where(fits, lo, low), _where(fits, hi, high))
    return Bounds(lo.to(torch.int64), hi.to(torch.int64))


_RULES: dict[tuple[str, str], Rule] = {
    ("add", "int"): _add_int,
    ("sub", "int"): _sub_int,
    ("mul", "int"): _mul_int,
    ("neg", "int"): _neg,
    ("invert", "int"): _invert_int,
    ("floordiv", "int"): _divide_int,
    ("truncdiv", "int"): _divide_int,
    ("mod", "int"): _mod_int,
    ("fmod", "int"): _fmod_int,
    ("shr", "int"): _shift_right,
    ("sign", "int"): _rising,
    ("sign", "float"): _sign_float,
    ("isnan", "float"): _isnan,
    ("isinf", "float"): _isinf,
    ("reciprocal", "float"): _falling_about,
    ("rsqrt", "float"): _falling_about,
    ("and", "bool"): _rising,
    ("or", "bool"): _rising,
    ("xor", "bool"): _xor_bool,
    ("neg", "float"): _neg,
    ("abs", "int"): _abs,
    ("abs", "float"): _abs,
    ("max", "int"): _rising,
    ("max", "float"): _rising,
    ("min", "int"): _rising,
    ("min", "float"): _rising,
    ("eq", "any"): _equal,
    ("ne", "any"): _equal,
    ("not", "any"): _not,
    ("where", "any"): _select,
    ("to", "any"): _convert,
}
_RULES |= {(op, "any"): _less for op in ("lt", "le", "gt", "ge")}
_RULES |= {(op, "float"): _float for op in ("add", "sub", "mul", "div")}
_RULES |= {(op, "float"): _wave for op in ("sin", "cos")}
_RULES |= {(op, kind): _rising for op in ("floor", "ceil", "round", "trunc")
           for kind in ("int", "float")}  # fmt: skip
_RULES |= {(op, "float"): _rising_about
           for op in "exp exp2 expm1 log log2 log1p sqrt tanh sigmoid erf".split()}  # fmt: skip
