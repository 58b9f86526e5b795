"""`headway mask`."""

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.text import Text

import headway

from ..errors import ArgumentError

MASKS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        headway.causal,
        headway.sliding_window,
        headway.dilated,
        headway.strided,
        headway.prefix,
        headway.document,
        headway.padding,
        headway.global_tokens,
        headway.neighborhood,
        headway.tiled,
    )
}
# Also those that a mask is made by.
MASKS |= {
    f"document.{f.__name__}": f
    for f in (headway.document.from_lengths, headway.document.from_cu_seqlens)
}
Operator = Callable[[Any, Any], Any]
OPERATORS: dict[type[ast.operator], Operator] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
LONGEST_LIST = 1 << 24


@dataclass(frozen=True)
class Arguments:
    """Draw a mask: down the queries, across the keys, a tile full, partly kept, or empty.

    Masks: causal(offset=0), sliding_window(w), dilated(w, step), strided(n), prefix(n),
    document(ids), document.from_lengths(lengths), document.from_cu_seqlens(ends), padding(lengths),
    global_tokens(n), neighborhood(shape, kernel), tiled(mask, shape, tile), with ids and lengths as
    lists of numbers, and shapes in parentheses.
    For example:

      headway mask "causal() & sliding_window(64) | prefix(16)"
      headway mask "causal() & document.from_lengths([200, 312])"
      headway mask "tiled(neighborhood((64, 64), (9, 9)), (64, 64), (8, 16))" --length 4096
      headway mask "causal() & sliding_window(4096)" --length 16384 --tile 128 --png mask.png
    """

    expression: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EXPRESSION")]
    """The library's masks, joined by & | ~ and parentheses."""
    length: int = 512
    """Queries, and keys."""
    tile: int = 32
    """Queries, and keys, in a tile: one cell of the drawing."""
    png: Path | None = None
    """Also write the drawing to this file, for a page (.png, .svg or .pdf)."""


def main(arguments: list[str]) -> int:
    """Exit status 0."""
    asked = tyro.cli(Arguments, args=arguments, prog="headway mask")
    for name, number in (("--length", asked.length), ("--tile", asked.tile)):
        if number < 1:
            raise ArgumentError(f"{name} {number} must be an integer, 1 or more")
    mask = parse(asked.expression)
    blocks = headway.block_mask(
        mask, 1, 1, asked.length, asked.length, tile=(asked.tile, asked.tile)
    )
    full, partial, empty = blocks.counts()
    console = Console(highlight=False)
    console.print(Text(str(mask)))
    console.print(Text(blocks.picture()), no_wrap=True, crop=False)
    console.print(
        f"██ full {full}  ▒▒ partial {partial}  ·· empty {empty}   of {asked.tile} x {asked.tile} "
        f"pairs; {blocks.sparsity():.1%} of the tiles are skipped",
        soft_wrap=True,
    )
    if asked.png is not None:
        blocks.save_picture(asked.png)
        console.print(f"wrote {asked.png}", soft_wrap=True)
    return 0


def parse(expression: str) -> headway.Mask:
    """The mask that an expression names. It is read, never run: only the library's masks, & | ~,
    numbers and lists of numbers have a meaning here. Raises ArgumentError."""
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        reason = getattr(error, "msg", error)
        raise ArgumentError(
            f"{expression!r} is not an expression: {reason}; {_example()}"
        ) from error
    return _mask(tree.body)


def _mask(node: ast.expr) -> headway.Mask:
    match node:
        case ast.BinOp(left, ast.BitAnd(), right):
            return _mask(left) & _mask(right)
        case ast.BinOp(left, ast.BitOr(), right):
            return _mask(left) | _mask(right)
        case ast.UnaryOp(ast.Invert(), operand):
            return ~_mask(operand)
        case ast.Call(function, positional, keywords) if ast.unparse(function) in MASKS:
            name = ast.unparse(function)
            given = [_argument(item) for item in positional]
            named = {item.arg or "**": _argument(item.value) for item in keywords}
            try:
                return MASKS[name](*given, **named)
            except TypeError as error:
                raise ArgumentError(f"{ast.unparse(node)}: {error}") from error
        case ast.Name(name) if name in MASKS:
            raise ArgumentError(f"{name} is a function: write {name}()")
    raise ArgumentError(
        f"{ast.unparse(node)!r} is not a mask; there are {', '.join(MASKS)}, joined by & | ~; "
        + _example()
    )


def _argument(node: ast.expr) -> Any:
    match node:
        case ast.Call() | ast.BinOp(op=ast.BitAnd() | ast.BitOr()) | ast.UnaryOp(op=ast.Invert()):
            return _mask(node)  # of a mask that takes one
        case ast.Tuple(items):
            return tuple(_number_or_list(item) for item in items)
    value = _number_or_list(node)
    try:
        return torch.tensor(value, dtype=torch.int64) if isinstance(value, list) else value
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"{ast.unparse(node)} is not a list of integers") from error


def _number_or_list(node: ast.expr) -> Any:
    """An integer, or a list of them, with + - and *: [0]*200 + [1]*312."""
    match node:
        case ast.Constant(int(value)) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(ast.USub(), operand):
            return _apply(operator.mul, -1, _number_or_list(operand), node)
        case ast.List(items):
            return [_number_or_list(item) for item in items]
        case ast.BinOp(left, operation, right) if type(operation) in OPERATORS:
            a, b = _number_or_list(left), _number_or_list(right)
            return _apply(OPERATORS[type(operation)], a, b, node)
    raise ArgumentError(
        f"{ast.unparse(node)!r} is neither an integer nor a list such as [0]*200 + [1]*312"
    )


def _apply(operation: Operator, a: Any, b: Any, node: ast.expr) -> Any:
    lists = [x for x in (a, b) if isinstance(x, list)]
    if operation is operator.mul and len(lists) == 1:
        size = len(lists[0]) * (b if lists[0] is a else a)
        if size > LONGEST_LIST:
            raise ArgumentError(f"{ast.unparse(node)} is a list of {size} numbers: too long")
        if size < 0:
            raise ArgumentError(f"{ast.unparse(node)} repeats a list a negative number of times")
    try:
        return operation(a, b)
    except TypeError as error:
        raise ArgumentError(f"{ast.unparse(node)} mixes lists and numbers") from error


def _example() -> str:
    return 'for example "causal() & sliding_window(64) | prefix(16)"'
