"""The small language that score and mask functions become: a straight line of pointwise ops.

Tracing (`tracing/trace.py`) produces a `Graph`, and every backend consumes it: it is evaluated with
torch on broadcast tiles (`evaluation/`), printed as kernel source, or bounded by intervals. It is
frozen, hashable, free of tensors and closures, and has one text form that `parse` reads back, so
the text alone can cross an operator boundary, key a cache, or be kept as a golden file:

    score(score f32, b i64, h i64, q_idx i64, kv_idx i64, t0 f32[1])
      %0 i64 = sub(kv_idx, q_idx)            # return score + slopes[h] * (kv_idx - q_idx)
      %1 f32 = gather(t0, h)
      %2 f32 = to(%0)
      %3 f32 = mul(%1, %2)
      %4 f32 = add(score, %3)
      return %4

Operands of an op share one dtype (tracing inserts `to`), so that no consumer has to know torch's
promotion rules. `gather(t, i, ...)` reads one number of the captured tensor `t`; with no index it
reads a 0-d tensor. `detach(x)` is x, and has no derivative. Everything else is a pure function of
numbers.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from .ops import apply, has_trait

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = frozenset({"f64", "f32", "bf16", "f16"})

Number = int | float | bool
Arg = str | Number  # a str names an input or a node ("%3"); a number is a constant

# In every graph's inputs the positions come first, after the score if there is one.
POSITIONS = ("b", "h", "q_idx", "kv_idx")

_QUOTIENTS = frozenset("div floordiv truncdiv".split())


@dataclass(frozen=True)
class Input:
    """An argument of a graph: a number (`ndim` None), or a captured tensor to gather from."""

    name: str
    dtype: str
    ndim: int | None = None

    def __str__(self) -> str:
        dims = "" if self.ndim is None else f"[{self.ndim}]"
        return f"{self.name} {self.dtype}{dims}"


@dataclass(frozen=True)
class Node:
    """One op; `line` is the user's source line, kept as a comment."""

    op: str
    args: tuple[Arg, ...]
    dtype: str
    line: str = ""


@dataclass(frozen=True)
class Graph:
    """A pointwise function of positions and captured values. See the module's docstring."""

    kind: str  # "score", "mask" or "joint"
    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Arg, ...]

    def __str__(self) -> str:
        return self.text

    def __hash__(self) -> int:
        return hash(self.text)  # a string remembers its hash

    @cached_property
    def text(self) -> str:
        return _text(self)

    @property
    def tensors(self) -> tuple[Input, ...]:
        """The captured tensors, in the order in which callers pass them."""
        return tuple(i for i in self.inputs if i.name[0] == "t")

    @cached_property
    def gathers(self) -> tuple[tuple[int, Node], ...]:
        """Index and node of every gather."""
        return tuple((n, node) for n, node in enumerate(self.nodes) if node.op == "gather")

    @cached_property
    def unbounded(self) -> bool:
        """Return whether a derivative in a joint graph may be infinite or NaN for a finite S.

        Captured tensors may hold anything, run-time numbers anything but NaN. Backends then skip
        the derivative at masked pairs, where 0 times it would be NaN.
        """
        magnitudes = _magnitudes(self)
        return not all(math.isfinite(_magnitude(a, magnitudes)) for a in self.outputs[1:])

    @property
    def observes(self) -> bool:
        """Return whether a score has a second output, a number whose mean under P is asked for."""
        return self.kind == "score" and len(self.outputs) == 2

    @cached_property
    def number_finite(self) -> bool:
        """Return whether the number that a score observes is finite, whatever S is."""
        of_number = Builder()
        of_number.nodes = list(self.nodes)
        pruned = of_number.finish(self.kind, self.inputs, self.outputs[1:])
        return not pruned.uses("score") and math.isfinite(
            _magnitude(self.outputs[1], _magnitudes(self))
        )

    @cached_property
    def adds(self) -> bool:
        """Return whether a score is S plus or minus one number that does not depend on S."""
        readers = [n for n, node in enumerate(self.nodes) if "score" in node.args]
        if len(readers) != 1 or self.outputs != (f"%{readers[0]}",):
            return False
        op, args = self.nodes[readers[0]].op, self.nodes[readers[0]].args
        return args.count("score") == 1 and (op == "add" or (op == "sub" and args[0] == "score"))

    def uses(self, name: str) -> bool:
        """Return whether any op or output reads the input `name`."""
        return name in self._names_read

    @cached_property
    def _names_read(self) -> frozenset[Arg]:
        return frozenset([a for node in self.nodes for a in node.args]) | frozenset(self.outputs)

    @cached_property
    def last_use(self) -> dict[Arg, int]:
        """The last node that reads a value."""
        return {a: n for n, node in enumerate(self.nodes) for a in node.args if isinstance(a, str)}


def _magnitudes(graph: Graph) -> dict[str, float]:
    """Return a bound of every value's magnitude: inf or NaN if the value may be infinite or NaN."""
    magnitudes: dict[str, float] = {}
    for item in graph.inputs:
        if item.ndim is None:  # numbers at run time may be infinite, but not NaN
            magnitudes[item.name] = math.inf if item.name[0] == "x" else _largest(item.dtype)
    for n, node in enumerate(graph.nodes):
        largest = _largest(node.dtype)
        magnitude = largest
        if node.dtype in FLOATS:
            magnitude = math.nan if node.op == "gather" else _magnitude_of(node, magnitudes)
        magnitudes[f"%{n}"] = math.inf if magnitude > largest else magnitude
    return magnitudes


def _largest(dtype: str) -> float:
    """Return the largest finite number of a dtype."""
    if dtype == "bool":
        return 1.0
    info = torch.finfo if dtype in FLOATS else torch.iinfo
    return float(info(DTYPES[dtype]).max)


def _magnitude(arg: Arg, magnitudes: dict[str, float]) -> float:
    return magnitudes[arg] if isinstance(arg, str) else abs(float(arg))


def _magnitude_of(node: Node, magnitudes: dict[str, float]) -> float:
    """Return a bound of the magnitude of an op on floats; NaN for an op without a rule here."""
    op, args = node.op, node.args[node.op == "where" :]
    operands = [_magnitude(a, magnitudes) for a in args]
    if any(map(math.isnan, operands)):
        return math.nan
    if has_trait(op, "unit"):
        return 1.0
    if has_trait(op, "keeps") or op in ("where", "to"):
        return max(operands)
    if op in ("sin", "cos"):
        return 1.0 if math.isfinite(operands[0]) else math.nan
    if op in ("add", "sub"):
        return sum(operands) if operands.count(math.inf) < 2 else math.nan
    if op == "mul":
        by_constant = any(not isinstance(a, str) and 0 < abs(a) < math.inf for a in args)
        return math.nan if math.inf in operands and not by_constant else math.prod(operands)
    if op in _QUOTIENTS:  # a run-time number is never 0
        if isinstance(args[1], str):
            return math.inf if args[1][0] == "x" and operands[0] < math.inf else math.nan
        return operands[0] / operands[1] if 0 < operands[1] < math.inf else math.nan
    if op in ("mod", "fmod"):
        by_constant = not isinstance(args[1], str) and operands[1] > 0 and operands[0] < math.inf
        return operands[1] if by_constant else math.nan
    return math.nan


def _text(graph: Graph) -> str:
    head = f"{graph.kind}({', '.join(map(str, graph.inputs))})"
    lines, source_line = [head], ""
    for n, node in enumerate(graph.nodes):
        line = f"  %{n} {node.dtype} = {node.op}({', '.join(map(_arg_text, node.args))})"
        if node.line != source_line:  # a bare "#": nodes from here on have no source line
            line = f"{line:<44}# {node.line}".rstrip()
            source_line = node.line
        lines.append(line)
    lines.append(f"  return {', '.join(map(_arg_text, graph.outputs))}")
    return "\n".join(lines)


def _arg_text(arg: Arg) -> str:
    return arg if isinstance(arg, str) else repr(arg)


def _parse_arg(text: str) -> Arg:
    if text in ("True", "False"):
        return text == "True"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    try:
        return float(text)  # repr of a float, inf and nan included
    except ValueError:
        return text


@lru_cache(maxsize=4096)
def parse(text: str) -> Graph:
    """Read the text form back; `parse(graph.text).text == graph.text`."""
    head, *body = text.split("\n")
    match = re.fullmatch(r"(\w+)\((.*)\)", head)
    if match is None:
        raise ValueError(f"not the text of a graph: {head!r}")
    kind, inputs = match[1], []
    for item in filter(None, match[2].split(", ")):
        name, dtype, ndim = re.fullmatch(r"(\w+) (\w+)(?:\[(\d+)\])?", item).groups()  # type: ignore[union-attr]
        inputs.append(Input(name, dtype, None if ndim is None else int(ndim)))
    nodes, outputs, source_line = [], (), ""
    for line in body:
        code, mark, comment = line.partition("#")
        source_line = comment.strip() if mark else source_line
        if code.startswith("  return "):
            outputs = tuple(map(_parse_arg, filter(None, code[9:].strip().split(", "))))
            continue
        dtype, op, args = re.fullmatch(r"  %\d+ (\w+) = (\w+)\((.*)\)\s*", code).groups()  # type: ignore[union-attr]
        values = tuple(map(_parse_arg, filter(None, args.split(", "))))
        nodes.append(Node(op, values, dtype, source_line))
    return Graph(kind, tuple(inputs), tuple(nodes), outputs)


class Builder:
    """A list of nodes under construction: equal nodes are shared, constants and no-ops folded."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._args_by_key: dict[tuple, Arg] = {}

    def emit(self, op: str, args: tuple[Arg, ...], dtype: str, line: str = "") -> Arg:
        simplified = _simplify(op, args, dtype, self.product)
        if simplified is not None:
            return simplified
        if op == "detach" and self._op(args[0]) == "detach":
            return args[0]
        if op == "pow" and not isinstance(args[1], str) and args[1] == 2:
            op, args = "mul", (args[0], args[0])
        # repr tells 1 from 1.0 and True, and -0.0 from 0.0, which compare equal.
        key = (op, tuple(map(repr, args)), dtype)
        if key not in self._args_by_key:
            self._args_by_key[key] = f"%{len(self.nodes)}"
            self.nodes.append(Node(op, args, dtype, line))
        return self._args_by_key[key]

    def dtype(self, arg: Arg) -> str | None:
        return self.nodes[int(arg[1:])].dtype if isinstance(arg, str) and arg[0] == "%" else None

    def _op(self, arg: Arg) -> str:
        return self.nodes[int(arg[1:])].op if isinstance(arg, str) and arg[0] == "%" else ""

    def product(self, arg: Arg) -> tuple[Arg, ...]:
        """Return the factors of a product; an empty tuple for anything else."""
        return self.nodes[int(str(arg)[1:])].args if self._op(arg) == "mul" else ()

    def finish(self, kind: str, inputs: tuple[Input, ...], outputs: tuple[Arg, ...]) -> Graph:
        """Drop nodes that no output needs and number the rest."""
        live: set[str] = {a for a in outputs if isinstance(a, str)}
        for n in reversed(range(len(self.nodes))):
            if f"%{n}" in live:
                live.update(a for a in self.nodes[n].args if isinstance(a, str))
        names: dict[Arg, str] = {}
        nodes = []
        for n, node in enumerate(self.nodes):
            if f"%{n}" in live:
                names[f"%{n}"] = f"%{len(nodes)}"
                args = tuple(names.get(a, a) if isinstance(a, str) else a for a in node.args)
                nodes.append(Node(node.op, args, node.dtype, node.line))
        renamed = tuple(names.get(a, a) if isinstance(a, str) else a for a in outputs)
        return Graph(kind, inputs, tuple(nodes), renamed)


def _simplify(
    op: str, args: tuple[Arg, ...], dtype: str, product: Callable[[Arg], tuple[Arg, ...]]
) -> Arg | None:
    """Return the value of a constant op or the operand that an op returns; None otherwise."""
    is_number = [not isinstance(a, str) for a in args]
    if op != "gather" and all(is_number):
        operands = [
            torch.tensor(a, dtype=torch.float64 if isinstance(a, float) else None, device="cpu")
            for a in args
        ]
        value = apply(op, tuple(operands), DTYPES[dtype])
        return value.to(DTYPES[dtype]).item()
    if op == "tangent" and (is_number[1] or (is_number[2] and args[2] == 0)):
        return args[0]
    if op == "where" and is_number[0]:
        return args[1] if args[0] else args[2]
    if len(args) == 2:
        a, b = args
        if op == "mul" and is_number[1] and b == 1:
            return a
        if op == "mul" and is_number[0] and a == 1:
            return b
        if op == "div" and is_number[1] and b == 1 and dtype in FLOATS:
            return a
        if op in ("add", "sub") and is_number[1] and b == 0:
            return a
        if op == "add" and is_number[0] and a == 0:
            return b
        if (
            op == "div"
            and isinstance(b, str)
            and b[0] == "x"
            and (factors := product(a))
            and b in factors
        ):
            # (x0 * y) / x0, which is common in derivatives
            return factors[1] if factors[0] == b else factors[0]
        if op == "and" and dtype == "bool" and True in (a, b):
            return b if a is True else a
        if op == "or" and dtype == "bool" and False in (a, b):
            return b if a is False else a
    return None
