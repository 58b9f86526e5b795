"""Tiles: how many queries and keys a program holds, with how many warps and pipeline stages.

Best first, measured on an H200; a card with less shared memory takes the first row that fits, and
so does a score that needs some for itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...types import Spec
from ..base import Call, graphs
from ..gpu.codegen.function import float_gathers


@dataclass(frozen=True)
class Config:
    """Queries and keys of a tile; warps; stages of the loop's pipeline; and in what steps those
    tiles of a block mask are visited that are kept in part: a mask takes registers (0: as others).
    """

    m: int
    n: int
    warps: int
    stages: int
    edge: int = 0


# Rows by (kernel, bits of the numbers that are multiplied, width up to). 19 bits are tf32; 32 no
# tensor cores multiply.
_TABLE: dict[tuple[str, int, int], tuple[Config, ...]] = {
    ("forward", 16, 64): (Config(128, 64, 4, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 2),
                          Config(64, 32, 4, 1)),
    ("forward", 16, 128): (Config(128, 128, 8, 3), Config(128, 64, 8, 3), Config(64, 64, 4, 2),
                           Config(64, 32, 4, 1)),
    ("forward", 16, 192): (Config(128, 128, 8, 2), Config(128, 64, 8, 3), Config(64, 64, 4, 2),
                           Config(64, 32, 4, 1)),
    ("forward", 16, 256): (Config(128, 64, 8, 2), Config(64, 32, 4, 3), Config(64, 32, 4, 1)),
    ("forward", 16, 512): (Config(64, 32, 8, 2), Config(32, 32, 4, 1), Config(16, 16, 4, 1)),
    ("forward", 19, 64): (Config(64, 64, 4, 2), Config(64, 64, 8, 2), Config(32, 32, 4, 2),
                          Config(16, 16, 4, 1)),
    ("forward", 19, 128): (Config(64, 32, 8, 2), Config(32, 32, 4, 2), Config(16, 16, 4, 1)),
    ("forward", 19, 256): (Config(16, 16, 4, 2), Config(16, 16, 4, 1)),
    ("forward", 19, 512): (Config(16, 16, 4, 1),),
    ("forward", 32, 64): (Config(64, 64, 8, 2), Config(64, 32, 4, 2), Config(32, 32, 4, 2),
                          Config(16, 16, 4, 1)),
    ("forward", 32, 128): (Config(64, 32, 4, 2), Config(64, 32, 8, 2), Config(32, 32, 4, 2),
                           Config(16, 16, 4, 1)),
    ("forward", 32, 256): (Config(16, 16, 4, 2), Config(16, 16, 4, 1)),
    ("forward", 32, 512): (Config(16, 16, 4, 1),),
    ("backward_q", 16, 64): (Config(64, 64, 4, 3), Config(64, 64, 4, 2), Config(64, 32, 4, 1)),
    ("backward_q", 16, 128): (Config(128, 64, 8, 3), Config(64, 64, 4, 2), Config(64, 32, 4, 1)),
    ("backward_q", 16, 192): (Config(128, 64, 8, 2), Config(64, 64, 4, 2), Config(64, 32, 4, 1),
                              Config(32, 32, 4, 1)),
    ("backward_q", 16, 256): (Config(128, 32, 8, 3), Config(128, 32, 8, 2), Config(64, 32, 4, 3),
                              Config(64, 32, 4, 1), Config(32, 32, 4, 1)),
    ("backward_q", 16, 512): (Config(32, 32, 8, 1), Config(16, 16, 4, 1)),
    ("backward_q", 19, 64): (Config(32, 32, 4, 2), Config(16, 16, 4, 1)),
    ("backward_q", 19, 128): (Config(64, 32, 8, 2), Config(32, 32, 4, 1), Config(16, 16, 4, 1)),
    ("backward_q", 19, 256): (Config(16, 16, 4, 1),),
    ("backward_q", 19, 512): (Config(16, 16, 4, 1),),
    ("backward_q", 32, 64): (Config(32, 32, 4, 2), Config(16, 16, 4, 1)),
    ("backward_q", 32, 128): (Config(64, 64, 8, 2), Config(64, 32, 8, 2), Config(32, 32, 4, 1),
                              Config(16, 16, 4, 1)),
    ("backward_q", 32, 256): (Config(16, 16, 4, 1),),
    ("backward_q", 32, 512): (Config(16, 16, 4, 1),),
    ("backward_kv", 16, 64): (Config(64, 64, 4, 3), Config(64, 64, 4, 2), Config(32, 64, 4, 1)),
    ("backward_kv", 16, 128): (Config(64, 64, 4, 2), Config(32, 64, 4, 3), Config(32, 64, 4, 1)),
    ("backward_kv", 16, 192): (Config(32, 128, 8, 3), Config(32, 128, 8, 2), Config(32, 64, 4, 2),
                               Config(32, 32, 4, 1)),
    ("backward_kv", 16, 256): (Config(32, 64, 8, 3), Config(32, 32, 4, 2), Config(16, 32, 4, 1)),
    ("backward_kv", 16, 512): (Config(32, 32, 8, 1), Config(16, 16, 4, 1)),
    ("backward_kv", 19, 64): (Config(32, 32, 4, 2), Config(16, 16, 4, 1)),
    ("backward_kv", 19, 128): (Config(32, 32, 4, 1), Config(16, 16, 4, 1)),
    ("backward_kv", 19, 256): (Config(16, 16, 4, 1),),
    ("backward_kv", 19, 512): (Config(16, 16, 4, 1),),
    ("backward_kv", 32, 64): (Config(32, 32, 4, 2), Config(16, 16, 4, 1)),
    ("backward_kv", 32, 128): (Config(32, 32, 4, 2), Config(32, 32, 8, 2), Config(32, 32, 4, 1),
                               Config(16, 16, 4, 1)),
    ("backward_kv", 32, 256): (Config(16, 16, 4, 1),),
    ("backward_kv", 32, 512): (Config(16, 16, 4, 1),),
    ("backward_k", 16, 256): (Config(32, 128, 8, 3), Config(32, 128, 8, 2), Config(32, 64, 4, 2),
                              Config(32, 32, 4, 1)),
    ("backward_v", 16, 256): (Config(64, 128, 8, 2), Config(32, 128, 8, 2), Config(32, 64, 4, 2),
                              Config(32, 32, 4, 1)),
    ("backward", 16, 64): (Config(64, 128, 8, 2), Config(64, 64, 4, 2), Config(32, 64, 4, 1)),
    ("backward", 16, 128): (Config(32, 128, 8, 2), Config(32, 64, 4, 2), Config(32, 64, 4, 1)),
    ("backward", 16, 192): (Config(32, 64, 8, 2), Config(32, 64, 4, 2), Config(32, 32, 4, 1)),
    ("backward", 16, 256): (Config(32, 64, 8, 2), Config(32, 32, 4, 2), Config(16, 32, 4, 1)),
    ("backward", 16, 512): (Config(32, 32, 8, 1), Config(16, 16, 4, 1)),
    ("backward", 19, 64): (Config(32, 32, 4, 2), Config(16, 16, 4, 1)),
    ("backward", 19, 128): (Config(32, 32, 4, 1), Config(16, 16, 4, 1)),
    ("backward", 19, 256): (Config(16, 16, 4, 1),),
    ("backward", 19, 512): (Config(16, 16, 4, 1),),
    ("backward", 32, 64): (Config(32, 32, 4, 2), Config(16, 16, 4, 1)),
    ("backward", 32, 128): (Config(32, 32, 4, 1), Config(16, 16, 4, 1)),
    ("backward", 32, 256): (Config(16, 16, 4, 1),),
    ("backward", 32, 512): (Config(16, 16, 4, 1),),
}  # fmt: skip
# For these kinds of calls others go first. Under a mask small tiles waste less of its edges; with a
# score function they leave registers for its values.
_KINDS: dict[tuple[str, int, int, str], Config] = {
    ("forward", 16, 64, "masked"): Config(64, 64, 4, 3),
    ("forward", 16, 128, "masked"): Config(64, 64, 4, 3),
    ("forward", 16, 192, "masked"): Config(64, 64, 4, 2),
    ("backward_q", 16, 128, "masked"): Config(64, 64, 4, 2),
    ("backward_kv", 16, 128, "masked"): Config(64, 64, 4, 2, 32),
    ("backward_kv", 16, 128, "reading"): Config(32, 64, 4, 3),
    ("forward", 16, 128, "score"): Config(64, 64, 4, 3),
    ("backward_q", 16, 128, "score"): Config(64, 64, 4, 2),
    ("backward_q", 16, 128, "learned"): Config(128, 64, 8, 3),
    ("backward_kv", 16, 128, "score"): Config(32, 64, 4, 3),
    ("forward", 16, 128, "biased"): Config(128, 64, 8, 3),
    ("forward", 32, 128, "score"): Config(64, 32, 4, 2),
}
LEARNED = "learned"  # of a backward whose dq's kernel makes gradients for the score too
# What a kind takes that has no row of its own.
_LIKE = {LEARNED: ("biased", "score"), "biased": ("score",), "reading": ("masked",)}
WIDEST = 512

# Widths, by bits of a number, whose backward takes one pass (kernel "backward") and not several.
_ONE_PASS: dict[int, tuple[int, ...]] = {}
# Rows of the table whose dk and dv come from a kernel each. Both of 64 keys, 256 wide, take the
# registers of 8 warps, and a product of 64 rows occupies 4 of them: the others did it once more.
_APART: dict[int, tuple[int, ...]] = {16: (256,)}


def one_pass(bits: int, d: int, dv: int, kind: str, saved: Mapping[str, Any]) -> bool:
    """Whether dq, dk and dv come from one kernel (five products, dq summed in any order)."""
    known = saved.get(key("one pass", bits, d, dv, kind))
    return max(d, dv) in _ONE_PASS.get(bits, ()) if known is None else known


def passes(bits: int, d: int, dv: int) -> tuple[str, ...]:
    """The kernels of a backward that takes several, in their order."""
    if _row("forward", bits, d, dv) in _APART.get(bits, ()):
        return "backward_q", "backward_k", "backward_v"
    return "backward_q", "backward_kv"


def kind_of(spec: Spec, call: Call) -> str:
    """The kind of a call, of those that want other tiles: "plain"; "masked", "reading" where the
    mask reads tensors (documents: short lines, and more registers); "score", "biased" where it
    reads a number for every pair."""
    score, _ = graphs(spec)
    if score is not None:
        biased = any(float_gathers(score, how) for how in ("diagonals", "pairs"))
        return "biased" if biased else "score"
    if spec.mask is None:
        return "plain"
    return "reading" if len(call.captured.tensors) > spec.score_tensors else "masked"


def key(kernel: str, bits: int, d: int, dv: int, kind: str) -> str:
    """What the tiles of a kernel are saved under."""
    return f"{kernel}, {bits} bits, {_row('forward', bits, d, dv)}, {kind}"


def _row(kernel: str, bits: int, d: int, dv: int) -> int:
    """The width of the table's row."""
    most = max(sum(pieces(d)), sum(pieces(dv)))
    return min(w for k, b, w in _TABLE if (k, b) == (kernel, bits) and w >= most)


def configs(
    kernel: str, bits: int, d: int, dv: int, kind: str, saved: Mapping[str, Any]
) -> tuple[Config, ...]:
    """The tiles for a kernel ("forward", one of `passes`, "backward"), best first.

    - `bits`: of the numbers that are multiplied: 16, 32, or 19 (tf32).
    - `d`, `dv`: widths; for those between two of the table, the larger.
    - `kind`: from `kind_of`, or `LEARNED`.
    - `saved`: what `headway tune` found on this card, which goes first.
    """
    width = _row(kernel, bits, d, dv)
    rows = _TABLE[kernel, bits, width]
    if kind in ("score", "biased", LEARNED) and width >= 128 and len(rows) > 1:
        rows = rows[1:]  # the largest tiles would spill hundreds of bytes
    kinds = (kind, *_LIKE.get(kind, ()))
    better = (_KINDS.get((kernel, bits, width, k)) for k in kinds)
    known = (saved.get(key(kernel, bits, d, dv, k)) for k in kinds)
    first = next((how for how in (*known, *better) if how is not None), None)
    return rows if first is None else (first, *rows)


def pieces(width: int) -> tuple[int, int]:
    """The powers of two, 16 or more, that hold a row: one, or two where that is less.

    192 is 128 + 64 and not 256; 80 is 64 + 16; 120 is 128 + 0.
    """
    whole = max(16, 1 << (width - 1).bit_length()) if width else 16
    half = whole // 2
    rest = max(16, 1 << (width - half - 1).bit_length()) if width > half else 16
    return (half, rest) if half >= 16 and half + rest < whole else (whole, 0)
