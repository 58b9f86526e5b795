"""Bounds instead of numbers: what a mask's graph can be over a whole box of pairs at once.

For a box of query positions [i0, i1] and key positions [j0, j1] every value of the graph has bounds
`lo <= value <= hi`; of a boolean, `lo` says that it is True for every pair and `hi` that it is True
for some. Each op has a rule that turns bounds of its operands into bounds of its result, so that a
box is known to be all False (`not hi`), all True (`lo`) or neither, without a look at its pairs.

A rule may be loose but never wrong:

- an op without a rule, a division by what may be zero, or an integer that may leave its dtype's
  range (and then wraps) may be anything its dtype can hold;
- a float that may be NaN has NaN for its bounds, and a comparison with NaN bounds is unknown;
- float bounds are computed in the op's own dtype by the op itself: rounding keeps order. Where an
  implementation may not (exp, tanh, ...), the bounds are widened by 16 units of rounding.

Values that depend on the query's position only, or the key's only, need no rules: they cost one
number per position and are computed as they are (`split` says which they are; `blocks.quadtree`
does so). Rules are for the ops that mix the two, such as `kv_idx <= q_idx` itself.

(Moore, Kearfott & Cloud 2009, Introduction to Interval Analysis, chapters 2 and 5)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .graph import DTYPES, FLOATS, Builder, Graph, Node, Number, apply


class Bounds(NamedTuple):
    """The least and the greatest that a value can be: tensors, or numbers for a constant.

    Whole numbers of any width are held as int64.
    """

    lo: Any
    hi: Any


# -- what depends on what -------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """A graph cut where the query's position meets the key's.

    `fixed`, `rows` and `cols` name the values that the mixed part reads: those that depend on b and
    h at most, on q_idx too, and on kv_idx too. `mixed` numbers the nodes that depend on both, and
    with them `q_idx + n`, which bounds describe as well as numbers do.
    """

    fixed: tuple[str, ...]
    rows: tuple[str, ...]
    cols: tuple[str, ...]
    mixed: tuple[int, ...]


@lru_cache(maxsize=1024)
def split(graph: Graph) -> Split:
    """Which values of a mask's graph depend on which position."""
    axes: dict[str, frozenset[str]] = {i.name: frozenset() for i in graph.inputs}
    axes |= {"q_idx": frozenset({"q"}), "kv_idx": frozenset({"kv"})}
    for n, node in enumerate(graph.nodes):
        axes[f"%{n}"] = frozenset().union(*(axes[a] for a in node.args if isinstance(a, str)))
    mixed: set[int] = set()
    read: dict[str, None] = {}  # in order of their first use
    todo = [a for a in graph.outputs if isinstance(a, str)]
    while todo:
        name = todo.pop()
        if len(axes[name]) < 2 and not _is_shift(graph, name, axes):
            read[name] = None
        elif int(name[1:]) not in mixed:
            node = graph.nodes[int(name[1:])]
            mixed.add(int(name[1:]))
            operands = node.args[1:] if node.op == "gather" else node.args
            todo += [a for a in operands if isinstance(a, str)]
    kinds: dict[frozenset[str], list[str]] = {}
    for name in read:
        kinds.setdefault(axes[name], []).append(name)
    fixed, rows, cols = (tuple(kinds.get(frozenset(axis), ())) for axis in ((), ("q",), ("kv",)))
    return Split(fixed, rows, cols, tuple(sorted(mixed)))


def _is_shift(graph: Graph, name: str, axes: dict[str, frozenset[str]]) -> bool:
    """A position plus or minus what is fixed: exact by its rule, at no cost per position."""
    if name[0] != "%" or not axes[name]:
        return False
    node = graph.nodes[int(name[1:])]
    if node.op not in ("add", "sub") or node.dtype != "i64":
        return False
    moving = [a for a in node.args if isinstance(a, str) and axes[a]]
    return len(moving) == 1 and (moving[0][0] != "%" or _is_shift(graph, moving[0], axes))


@lru_cache(maxsize=1024)
def part(graph: Graph, names: tuple[str, ...]) -> Graph:
    """The graph of some of a graph's values."""
    builder = Builder()
    builder.nodes = list(graph.nodes)
    return builder.finish(graph.kind, graph.inputs, names)


def why_elements(graph: Graph) -> list[str]:
    """The ops that have no rule here, each with its source line; empty if all have one.

    Tiles whose verdict hangs on them are evaluated pair by pair: right, and slower.
    """
    found = {}
    for n in split(graph).mixed:
        node = graph.nodes[n]
        if node.op != "gather" and _rule(graph, node) is None:
            line = f" in `{node.line}`" if node.line else ""
            found[f"{node.op} of {_operand_dtype(graph, node)}{line}"] = None
    return list(found)


# -- evaluation -----------------------------------------------------------------------------------

GatherBounds = Callable[[int, list[Bounds]], Bounds]


def evaluate(graph: Graph, values: dict[str, Bounds], gather: GatherBounds) -> Bounds:
    """Bounds of the graph's one output over many boxes at once.

    **Arguments:**

    - `values`: of everything that `split` names, tensors that broadcast against each other.
    - `gather`: `(node number, bounds of the indices) -> bounds of the number read`.
    """
    env = dict(values)

    def operand(arg: str | Number) -> Bounds:
        return env[arg] if isinstance(arg, str) else Bounds(arg, arg)

    for n in split(graph).mixed:
        node = graph.nodes[n]
        if node.op == "gather":
            env[f"%{n}"] = gather(n, [operand(a) for a in node.args[1:]])
        else:
            env[f"%{n}"] = _node(graph, node, [operand(a) for a in node.args])
    return operand(graph.outputs[0])


def _node(graph: Graph, node: Node, args: list[Bounds]) -> Bounds:
    rule = _rule(graph, node)
    bounds = _by_points(node, args) if rule is None else rule(node, *args)
    if node.dtype in FLOATS:
        bad = _is_nan(bounds.lo) | _is_nan(bounds.hi)
        return Bounds(_where(bad, torch.nan, bounds.lo), _where(bad, torch.nan, bounds.hi))
    if node.dtype in ("bool", "i64"):
        return bounds
    low, high = anything(node.dtype)  # a narrow integer wraps where it leaves its range
    bad = (bounds.lo < low) | (bounds.hi > high)
    return Bounds(_where(bad, low, bounds.lo), _where(bad, high, bounds.hi))


def anything(dtype: str) -> Bounds:
    """Bounds of what is not known at all."""
    if dtype in FLOATS:
        return Bounds(torch.nan, torch.nan)
    if dtype == "bool":
        return Bounds(False, True)
    return Bounds(torch.iinfo(DTYPES[dtype]).min, torch.iinfo(DTYPES[dtype]).max)


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

_HUGE = 1 << 62  # whole numbers beyond it might leave int64 in the next op


def _rule(graph: Graph, node: Node) -> Rule | None:
    dtype = _operand_dtype(graph, node)
    kind = "float" if dtype in FLOATS else "bool" if dtype == "bool" else "int"
    return _RULES.get((node.op, kind)) or _RULES.get((node.op, "any"))


def _operand_dtype(graph: Graph, node: Node) -> str:
    """The dtype that an op computes in: of its first operand that is not a constant."""
    args = node.args[1:] if node.op == "where" else node.args
    for arg in args:
        if isinstance(arg, str):
            if arg[0] == "%":
                return graph.nodes[int(arg[1:])].dtype
            return next(i.dtype for i in graph.inputs if i.name == arg)
    return node.dtype


def _where(cond: Any, a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """`torch.where` that keeps the dtype of the operand that is a tensor."""
    like = next((x for x in (a, b) if isinstance(x, Tensor)), None)
    if like is None:
        return torch.where(cond, torch.tensor(a), torch.tensor(b))
    a, b = (x if isinstance(x, Tensor) else like.new_full((), x) for x in (a, b))
    return torch.where(cond, a, b)


def _all(*conditions: Tensor | bool) -> Tensor:
    result = conditions[0]
    for cond in conditions[1:]:
        result = result & cond
    return torch.as_tensor(result)


def _is_nan(x: Tensor | Number) -> Tensor:
    return torch.as_tensor(x != x)


def _span(*values: Tensor) -> Bounds:
    """The least and the greatest of some values."""
    lo = hi = values[0]
    for value in values[1:]:
        lo, hi = torch.minimum(lo, value), torch.maximum(hi, value)
    return Bounds(lo, hi)


def _safe(bounds: Bounds, *operands: Bounds, also: Tensor | bool = False) -> Bounds:
    """Whole numbers, or any of them where the op may have left int64."""
    bad = torch.as_tensor(also)
    for x in operands:
        bad = bad | (x.lo < -_HUGE) | (x.hi > _HUGE)
    low, high = anything("i64")
    return Bounds(_where(bad, low, bounds.lo), _where(bad, high, bounds.hi))


def _add_int(node: Node, a: Bounds, b: Bounds) -> Bounds:
    return _safe(Bounds(a.lo + b.lo, a.hi + b.hi), a, b)


def _sub_int(node: Node, a: Bounds, b: Bounds) -> Bounds:
    return _safe(Bounds(a.lo - b.hi, a.hi - b.lo), a, b)


def _mul_int(node: Node, a: Bounds, b: Bounds) -> Bounds:
    products = [(x, y) for x in a for y in b]
    sizes = [torch.as_tensor(x, dtype=torch.float64).abs() * y for x, y in products]
    too_big = _span(*(s.abs() for s in sizes)).hi >= _HUGE
    values = _span(*(torch.as_tensor(x) * y for x, y in products))
    if node.args[0] == node.args[1]:  # a square: what it multiplies has one sign at a time
        lo = torch.where((a.lo <= 0) & (a.hi >= 0), 0, values.lo.clamp_min(0))
        values = Bounds(lo, values.hi)
    return _safe(values, a, b, also=too_big)


def _neg_int(node: Node, a: Bounds) -> Bounds:
    return _safe(Bounds(-a.hi, -a.lo), a)


def _invert_int(node: Node, a: Bounds) -> Bounds:
    return Bounds(-1 - a.hi, -1 - a.lo)


def _abs(node: Node, a: Bounds) -> Bounds:
    lo = torch.maximum(a.lo, -a.hi).clamp_min(0)
    result = Bounds(lo, torch.maximum(-a.lo, a.hi))
    return result if node.dtype in FLOATS else _safe(result, a)


def _quotients(op: str, a: Bounds, b: Bounds) -> Bounds:
    """`a / b` for b of one sign (elsewhere meaningless): monotone in each, so at the corners."""
    mode = {"floordiv": "floor", "truncdiv": "trunc"}[op]
    corners = []
    for divisor in b:
        divisor = torch.as_tensor(divisor)
        divisor = torch.where(divisor == 0, 1, divisor)
        # The processor faults on the least int64 divided by -1.
        values = [torch.as_tensor(x).clamp(-_HUGE, _HUGE) for x in a]
        corners += [torch.div(x, divisor, rounding_mode=mode) for x in values]
    return _span(*corners)


def _may_be_zero(b: Bounds) -> Tensor:
    return torch.as_tensor((b.lo <= 0) & (b.hi >= 0))


def _divide_int(node: Node, a: Bounds, b: Bounds) -> Bounds:
    return _safe(_quotients(node.op, a, b), a, b, also=_may_be_zero(b))


def _mod_int(node: Node, a: Bounds, b: Bounds) -> Bounds:
    # Within [b.lo + 1, 0] or [0, b.hi - 1]; and where a // b is one number q, it is a - q b.
    quotient = _quotients("floordiv", a, b)
    one = _all(b.lo == b.hi, quotient.lo == quotient.hi)
    positive = b.lo > 0
    lo = _where(torch.as_tensor(positive), 0, torch.as_tensor(b.lo) + 1)
    hi = _where(torch.as_tensor(positive), torch.as_tensor(b.hi) - 1, 0)
    lo = torch.where(one, a.lo - quotient.lo * b.lo, lo)
    hi = torch.where(one, a.hi - quotient.lo * b.lo, hi)
    return _safe(Bounds(lo, hi), a, b, also=_may_be_zero(b))


def _fmod_int(node: Node, a: Bounds, b: Bounds) -> Bounds:
    # The sign of a, and smaller than b; where a / b truncates to one number q, it is a - q b.
    quotient = _quotients("truncdiv", a, b)
    one = _all(b.lo == b.hi, quotient.lo == quotient.hi)
    most = torch.maximum(torch.as_tensor(b.lo).abs(), torch.as_tensor(b.hi).abs()) - 1
    lo = torch.where(one, a.lo - quotient.lo * b.lo, torch.where(a.lo >= 0, 0, -most))
    hi = torch.where(one, a.hi - quotient.lo * b.lo, torch.where(a.hi <= 0, 0, most))
    return _safe(Bounds(lo, hi), a, b, also=_may_be_zero(b))


def _shift_right(node: Node, a: Bounds, b: Bounds) -> Bounds:
    steps = torch.as_tensor(b.lo)
    known = _all(b.lo == b.hi, steps >= 0, steps < 8 * DTYPES[node.dtype].itemsize)
    steps = torch.where(known, steps, 0)
    low, high = anything(node.dtype)
    return Bounds(_where(known, a.lo >> steps, low), _where(known, a.hi >> steps, high))


def _finite(*operands: Bounds) -> Tensor:
    return _all(*((x - x == 0) for bounds in operands for x in bounds))


def _float(node: Node, a: Bounds, b: Bounds) -> Bounds:
    """+ - * / of floats: monotone in each operand, so at the corners; inf may make a NaN."""
    known = _finite(a, b)
    if node.op == "div":
        known = known & ~_may_be_zero(b)
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
    positive = torch.as_tensor(a.lo > 0)
    return Bounds(_where(positive, lo, torch.nan), _where(positive, hi, torch.nan))


def _wave(node: Node, a: Bounds) -> Bounds:
    one = torch.ones((), dtype=DTYPES[node.dtype])
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
    same = torch.as_tensor((a.lo == a.hi) & ~_finite(a))
    return Bounds(same, ~_finite(a))


def _less(node: Node, a: Bounds, b: Bounds) -> Bounds:
    """lt, le, gt, ge. Written so that NaN bounds give (False, True)."""
    if node.op in ("gt", "ge"):
        a, b = b, a
    if node.op in ("lt", "gt"):
        always, never = a.hi < b.lo, a.lo >= b.hi
    else:
        always, never = a.hi <= b.lo, a.lo > b.hi
    return Bounds(torch.as_tensor(always), ~torch.as_tensor(never))


def _equal(node: Node, a: Bounds, b: Bounds) -> Bounds:
    always = torch.as_tensor((a.lo == b.hi) & (a.hi == b.lo))
    never = torch.as_tensor((a.hi < b.lo) | (a.lo > b.hi))
    return Bounds(always, ~never) if node.op == "eq" else Bounds(never, ~always)


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
    ends = []
    for end, least in ((0, torch.minimum), (1, torch.maximum)):
        x, y = (torch.as_tensor(v[end], dtype=dtype) for v in (a, b))
        either = torch.logical_and(x, y) if end == 0 else torch.logical_or(x, y)
        both = either if dtype == torch.bool else least(x, y)
        ends.append(torch.where(cond.lo, x, torch.where(cond.hi, both, y)))
    return Bounds(*ends)


def _convert(node: Node, a: Bounds) -> Bounds:
    dtype = DTYPES[node.dtype]
    lo, hi = (torch.as_tensor(x) for x in a)
    if node.dtype == "bool":
        return _nonzero(Bounds(lo, hi))
    if dtype.is_floating_point:
        return Bounds(lo.to(dtype), hi.to(dtype))
    if lo.is_floating_point():  # towards zero; what an int cannot hold is undefined
        fits = (lo > -_HUGE) & (hi < _HUGE)
        low, high = anything(node.dtype)
        zero = torch.zeros((), dtype=lo.dtype)
        lo, hi = (torch.where(fits, x, zero).to(torch.int64) for x in (lo, hi))
        return Bounds(_where(fits, lo, low), _where(fits, hi, high))
    return Bounds(lo.to(torch.int64), hi.to(torch.int64))


_RULES: dict[tuple[str, str], Rule] = {
    ("add", "int"): _add_int,
    ("sub", "int"): _sub_int,
    ("mul", "int"): _mul_int,
    ("neg", "int"): _neg_int,
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
    ("neg", "float"): lambda node, a: Bounds(-a.hi, -a.lo),
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
