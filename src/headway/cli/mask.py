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

from ..blocks.picture import PANELS, Picture, of_block_mask, of_score
from ..errors import ArgumentError
from ..mods.base import Mod
from .options import check_positive


def _block_table(table: torch.Tensor, block: Any) -> headway.Mask:
    """Make a block table of zeros and ones, since an expression has no True."""
    if isinstance(table, torch.Tensor) and bool(((table == 0) | (table == 1)).all()):
        table = table.bool()
    return headway.block_table(table, block)


MASKS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (
    headway.causal, headway.sliding_window, headway.dilated, headway.strided, headway.chunked,
    headway.block_causal, headway.prefix, headway.document, headway.spans, headway.padding,
    headway.global_tokens, headway.neighborhood, headway.tiled, headway.tree,
)} | {"block_table": _block_table}  # fmt: skip
SCORES: dict[str, Callable[..., Any]] = {f.__name__: f for f in (
    headway.alibi, headway.softcap, headway.relative_bias, headway.t5_bias, headway.window_bias,
    headway.bias, headway.log_sigmoid,
)}  # fmt: skip
for _function in (headway.document.from_lengths, headway.document.from_cu_seqlens):
    MASKS[f"document.{_function.__name__}"] = _function
Operator = Callable[[Any, Any], Any]
JOINTS: dict[type[ast.operator], Operator] = {
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.RShift: operator.rshift,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], Operator] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
}  # fmt: skip
_EXAMPLE = 'for example "causal() & sliding_window(64) | prefix(16)"'
LONGEST_LIST = 1 << 24
FEW = 4  # batches and heads drawn in the terminal
MOST_CELLS, MOST_SHAPES = 1024, 128  # along a side of an image, and of one made of shapes


@dataclass(frozen=True)
class Arguments:
    """Draw a mask or a score. Rows are queries, columns are keys, and a cell is a tile: full,
    partial or empty. A score is drawn as the numbers that it returns for logits of 0.

    Masks: causal(offset=0), sliding_window(w), dilated(w, step), strided(n), chunked(n),
    block_causal(n), prefix(n), document(ids), document.from_lengths(lengths),
    document.from_cu_seqlens(ends), spans(ids), padding(lengths), global_tokens(n),
    neighborhood(shape, kernel), tiled(mask, shape, tile), tree(parents, start=0),
    block_table(table, block). Write ids, lengths, parents and tables as lists of numbers, and
    shapes in parentheses.
    Scores: alibi(heads), softcap(c), relative_bias(table), t5_bias(table), bias(table),
    window_bias(table, shape), log_sigmoid(bias).
    If batches or heads differ, each is drawn. For example:

      headway mask "causal() & sliding_window(64) | prefix(16)"
      headway mask "causal() & document.from_lengths([200, 312])"
      headway mask "tiled(neighborhood((64, 64), (9, 9)), (64, 64), (8, 16))" --length 4096
      headway mask "causal() & padding([300, 512])" --out mask.svg
      headway mask "causal()" --score "alibi(8) >> softcap(30)" --out scores.png
      headway mask "causal() & sliding_window(4096)" --length 1000000 --tile 128 --out mask.html
    """

    expression: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EXPRESSION")]
    """The library's masks, joined by & | ~ and parentheses; or its scores, joined by >>."""
    score: str | None = None
    """Draw this score for the pairs that are not masked out."""
    length: int = 512
    """Number of queries and of keys."""
    tile: int = 32
    """Queries and keys per tile. A tile is one cell of the drawing."""
    out: Annotated[
        tuple[Path, ...],
        tyro.conf.arg(metavar="FILE [FILE ...]", help_behavior_hint="(default: none)"),
    ] = ()
    """Also write the drawing to files: .svg; .png or .pdf, which need matplotlib; or .html, a page
    of a mask that zooms to a tile."""


def main(arguments: list[str]) -> int:
    """Run `headway mask`; return exit status 0."""
    options = tyro.cli(Arguments, args=arguments, prog="headway mask")
    check_positive(options, "length", "tile")
    mod = parse(options.expression)
    mask: Any = mod if isinstance(mod, headway.Mask) else None
    score = None if mask is not None else mod
    if options.score is not None:
        score = parse(options.score)
        if mask is None or not isinstance(score, headway.Score):
            raise ArgumentError("--score takes a score, and goes with a mask: causal() --score ...")
    for path in options.out:
        if path.suffix.lower() not in (".svg", ".png", ".pdf", ".html", ".htm"):
            raise ArgumentError(f"--out {path}: its name must end in .svg, .png, .pdf or .html")
        if score is not None and _is_page(path):
            raise ArgumentError(f"--out {path} is of a mask alone; a score has .svg, .png and .pdf")
    sizes = *_groups(mask, score), options.length, options.length
    console = Console(highlight=False)
    blocks = None
    if score is None:
        blocks = headway.block_mask(mask, *sizes, tile=options.tile)
        draw = lambda most, panels: of_block_mask(blocks, most, panels)
    else:
        for part in (score, mask):
            if part is not None:
                part.check_sizes(*sizes)
        draw = lambda most, panels: of_score(score, mask, sizes, most, panels)
    for path in options.out:  # before anything is printed: whoever reads that may stop reading
        if blocks is not None and _is_page(path):
            blocks.save_report(path)
        else:
            draw(MOST_SHAPES if path.suffix.lower() == ".svg" else MOST_CELLS, PANELS).save(path)
    picture = draw(32, FEW)
    if blocks is not None:
        _print_mask(console, mask, blocks, picture)
    else:
        _print_score(console, picture)
    for path in options.out:
        console.print(f"wrote {path}", soft_wrap=True)
    return 0


def _is_page(path: Path) -> bool:
    return path.suffix.lower() in (".html", ".htm")


def _print_mask(console: Console, mask: Any, blocks: headway.BlockMask, picture: Picture) -> None:
    full, partial, empty = blocks.counts()
    console.print(Text(str(mask)))
    console.print(Text(picture.text()), no_wrap=True, crop=False)
    _more(console, blocks.shape[0] * blocks.shape[1])
    counts = f"██ full {full}  ▒▒ partial {partial}  ·· empty {empty}"
    pairs = f"{blocks.tile[0]} x {blocks.tile[1]} pairs"
    skipped = f"{blocks.sparsity():.1%} of the tiles are skipped"
    console.print(f"{counts}   of {pairs}; {skipped}", soft_wrap=True)


def _print_score(console: Console, picture: Picture) -> None:
    console.print(Text(picture.title))
    console.print(Text(picture.text()), no_wrap=True, crop=False)
    _more(console, picture.groups)
    console.print(Text("  ".join(f"{text} {meaning}" for text, meaning in picture.key)))


def _more(console: Console, groups: int) -> None:
    if groups > FEW:
        console.print(f"and {groups - FEW} more; --out draws up to {PANELS}")


def _groups(*mods: Any) -> tuple[int, int]:
    """Return the batches and heads of the tensors in a mask and a score."""
    b, h = 1, 1
    for mod in mods:
        if isinstance(mod, Mod):
            of_b, of_h = _of_tensors(mod)
            parts = [getattr(mod, name) for name in mod.fields]
            inner = _groups(*parts)
            b, h = max(b, of_b, inner[0]), max(h, of_h, inner[1])
    return b, h


def _of_tensors(mod: Mod) -> tuple[int, int]:
    match mod:
        case headway.document() | headway.spans():
            ids = [x for x in (mod.ids, mod.kv_ids) if x is not None and x.dim() == 2]
            return max([len(x) for x in ids], default=1), 1
        case headway.padding():
            return len(mod.lengths), 1
        case headway.prefix() if isinstance(mod.length, torch.Tensor):
            return len(mod.length), 1
        case headway.tree():
            return (len(mod._ancestors) if mod._ancestors.dim() == 3 else 1), 1
        case headway.block_table() | headway.bias():
            table = mod.tensor if isinstance(mod, headway.bias) else mod.table
            b, h, *_ = (1,) * (4 - table.dim()) + tuple(table.shape)
            return b, h
        case headway.alibi():
            return 1, len(mod.slopes)
        case headway.relative_bias():
            return 1, len(mod.table)
        case headway.t5_bias() | headway.window_bias():
            return 1, mod.table.shape[1]
        case headway.log_sigmoid() if isinstance(mod.bias, torch.Tensor) and mod.bias.dim():
            return 1, len(mod.bias)
    return 1, 1


def parse(expression: str) -> Any:
    """Return the mask or score of an expression: read, never run. Raises ArgumentError."""
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        reason = f"is not an expression: {getattr(error, 'msg', error)}"
        raise ArgumentError(f"{expression!r} {reason}; {_EXAMPLE}") from error
    return _mod(tree.body)


def _mod(node: ast.expr) -> Any:
    match node:
        case ast.BinOp(left, ast.BitAnd() | ast.BitOr() | ast.RShift() as joint, right):
            left_mod, right_mod = _mod(left), _mod(right)
            kind = headway.Score if isinstance(joint, ast.RShift) else headway.Mask
            if not isinstance(left_mod, kind) and not isinstance(right_mod, kind):
                raise ArgumentError(f"{ast.unparse(node)}: & and | join masks, >> joins scores")
            return JOINTS[type(joint)](left_mod, right_mod)
        case ast.UnaryOp(ast.Invert(), operand):
            inner = _mod(operand)
            if isinstance(inner, headway.Score):
                raise ArgumentError(f"~ is of masks, but {inner!r} is a score")
            return ~inner
        case ast.Call(function, positional, keywords) if ast.unparse(function) in MASKS | SCORES:
            name = ast.unparse(function)
            values = [_argument(item, name) for item in positional]
            named = {item.arg or "**": _argument(item.value, name) for item in keywords}
            try:
                return (MASKS | SCORES)[name](*values, **named)
            except TypeError as error:
                raise ArgumentError(f"{ast.unparse(node)}: {error}") from error
        case ast.Name(name) if name in MASKS | SCORES:
            raise ArgumentError(f"{name} is a function: write {name}()")
    raise ArgumentError(
        f"{ast.unparse(node)!r} is neither a mask nor a score; there are "
        f"{', '.join(MASKS)}, joined by & | ~; and {', '.join(SCORES)}, joined by >>; {_EXAMPLE}"
    )


def _argument(node: ast.expr, of: str) -> Any:
    match node:
        case ast.Call() | ast.BinOp(op=ast.BitAnd() | ast.BitOr()) | ast.UnaryOp(op=ast.Invert()):
            return _mod(node)  # of a mask that takes one
        case ast.Tuple(items):
            return tuple(_number_or_list(item) for item in items)
    value = _number_or_list(node)
    try:
        if not isinstance(value, list):
            return value
        table = torch.tensor(value, device="cpu")
        return table.float() if of in SCORES else table
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"{ast.unparse(node)} is not a list of numbers") from error


def _number_or_list(node: ast.expr) -> Any:
    """Return a number, or a list of them, with + - and *: [0]*200 + [1]*312."""
    match node:
        case ast.Constant(int(value) | float(value)) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(ast.USub(), operand):
            return _apply(operator.mul, -1, _number_or_list(operand), node)
        case ast.List(items):
            return [_number_or_list(item) for item in items]
        case ast.BinOp(left, operation, right) if type(operation) in OPERATORS:
            a, b = _number_or_list(left), _number_or_list(right)
            return _apply(OPERATORS[type(operation)], a, b, node)
    raise ArgumentError(
        f"{ast.unparse(node)!r} is neither a number nor a list such as [0]*200 + [1]*312"
    )


def _apply(operation: Operator, a: Any, b: Any, node: ast.expr) -> Any:
    lists = [x for x in (a, b) if isinstance(x, list)]
    if operation is operator.mul and len(lists) == 1:
        times = b if lists[0] is a else a
        if not isinstance(times, int):
            raise ArgumentError(f"{ast.unparse(node)} repeats a list {times!r} times")
        size = len(lists[0]) * times
        if size > LONGEST_LIST:
            raise ArgumentError(f"{ast.unparse(node)} is a list of {size} numbers: too long")
        if size < 0:
            raise ArgumentError(f"{ast.unparse(node)} repeats a list a negative number of times")
    try:
        return operation(a, b)
    except TypeError as error:
        raise ArgumentError(f"{ast.unparse(node)} mixes lists and numbers") from error
