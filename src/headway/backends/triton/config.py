"""Tile sizes: the queries and keys of a program's block, its warps and its pipeline stages.

Rows are in the order of speed on an H200. A card with less shared memory takes the first row that
fits, and so does a score that needs shared memory itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...types import Spec
from ..base import Call, graphs
from ..gpu.codegen.dependence import float_gathers
from ..gpu.widths import pieces as pieces


@dataclass(frozen=True)
class Config:
    """The sizes of a kernel."""

    m: int  # queries of a block
    n: int  # keys of a block
    warps: int
    stages: int  # of the pipeline of loads
    edge: int = (
        0  # block in which partial tiles are visited, since a mask takes registers; 0: as m, n
    )


# Rows by (kernel, bits of the factors, largest width). 19 bits are tf32, 32 are without tensor
# cores.
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
# For these kinds of calls other sizes go first. Under a mask small blocks waste less at its edges;
# with a score function they leave registers for its values.
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
LEARNED = "learned"  # a backward whose kernel of dq makes gradients of captured tensors too
# The kinds whose rows a kind takes that has none.
_LIKE = {LEARNED: ("biased", "score"), "biased": ("score",), "reading": ("masked",)}
WIDEST = 512

# Widths, by bits of a factor, whose backward is one kernel ("backward") and not several.
_ONE_PASS: dict[int, tuple[int, ...]] = {}
# Widths whose dk and dv come from a kernel each. Both accumulators of 64 keys, 256 wide, take the
# registers of 8 warps; a product of 64 rows occupies 4 of them, and the others repeated it.
_APART: dict[int, tuple[int, ...]] = {16: (256,)}


def one_pass(bits: int, d: int, dv: int, kind: str, saved: Mapping[str, Any]) -> bool:
    """Whether dq, dk and dv come from one kernel (five products; dq is summed in any order)."""
    known = saved.get(key("one pass", bits, d, dv, kind))
    return max(d, dv) in _ONE_PASS.get(bits, ()) if known is None else known


def passes(bits: int, d: int, dv: int) -> tuple[str, ...]:
    """The kernels of a backward of several, in order."""
    if _row("forward", bits, d, dv) in _APART.get(bits, ()):
        return "backward_q", "backward_k", "backward_v"
    return "backward_q", "backward_kv"


def kind_of(spec: Spec, call: Call) -> str:
    """The kind of a call, by which tile sizes differ: "plain"; "masked"; "reading" if the mask
    reads tensors (documents: short rows, and more registers); "score"; "biased" if the score reads
    a number for every pair."""
    score, _ = graphs(spec)
    if score is not None:
        biased = any(float_gathers(score, how) for how in ("diagonals", "pairs"))
        return "biased" if biased else "score"
    if spec.mask is None:
        return "plain"
    return "reading" if len(call.captured.tensors) > spec.score_tensors else "masked"


def key(kernel: str, bits: int, d: int, dv: int, kind: str) -> str:
    """The key under which tile sizes are saved."""
    return f"{kernel}, {bits} bits, {_row('forward', bits, d, dv)}, {kind}"


def _row(kernel: str, bits: int, d: int, dv: int) -> int:
    """The width of the row of the table."""
    most = max(sum(pieces(d)), sum(pieces(dv)))
    return min(w for k, b, w in _TABLE if (k, b) == (kernel, bits) and w >= most)


def configs(
    kernel: str, bits: int, d: int, dv: int, kind: str, saved: Mapping[str, Any]
) -> tuple[Config, ...]:
    """The tile sizes for a kernel ("forward", one of `passes`, "backward"), best first.

    - `bits`: of the factors: 16, 32, or 19 (tf32).
    - `d`, `dv`: widths; between two of the table, the larger row holds.
    - `kind`: from `kind_of`, or `LEARNED`.
    - `saved`: what `headway tune` found on this card; it goes first.
    """
    width = _row(kernel, bits, d, dv)
    rows = _TABLE[kernel, bits, width]
    if kind in ("score", "biased", LEARNED) and width >= 128 and len(rows) > 1:
        rows = rows[1:]  # the largest blocks would spill hundreds of bytes
    kinds = (kind, *_LIKE.get(kind, ()))
    better = (_KINDS.get((kernel, bits, width, k)) for k in kinds)
    known = (saved.get(key(kernel, bits, d, dv, k)) for k in kinds)
    first = next((how for how in (*known, *better) if how is not None), None)
    return rows if first is None else (first, *rows)
