"""Tile sizes: the queries and keys of a program's block, its warps and its pipeline stages.

Rows are in the order of speed on `MEASURED_ON`. A GPU with less shared memory takes the first row
that fits, and so does a score that needs shared memory itself. Sizes that `headway tune` found, on
the user's GPU or on one of its architecture, go before them (saved.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...types import Spec
from ..base import Call, graphs
from ..gpu.codegen.dependence import float_gathers
from ..gpu.widths import pieces as pieces


@dataclass(frozen=True)
class Tiling:
    """The block, the warps and the pipeline stages of a kernel."""

    m: int  # queries of a block
    n: int  # keys of a block
    warps: int
    stages: int  # of the pipeline of loads
    edge: int = 0  # block for partial tiles, where a mask takes registers; 0: as m, n


# The cards, by architecture, that the tables below were measured on. On others they compile and are
# right (the interpreter and the emulator of the tests); nobody has timed them.
MEASURED_ON = {"sm_90": "an H200"}

# Rows by (kernel, bits of the operands, largest width). 19 bits are tf32, 32 are without tensor
# cores.
_TABLE: dict[tuple[str, int, int], tuple[Tiling, ...]] = {
    ("forward", 16, 64): (Tiling(128, 64, 4, 3), Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2),
                          Tiling(64, 32, 4, 1)),
    ("forward", 16, 128): (Tiling(128, 128, 8, 3), Tiling(128, 64, 8, 3), Tiling(64, 64, 4, 2),
                           Tiling(64, 32, 4, 1)),
    ("forward", 16, 192): (Tiling(128, 128, 8, 2), Tiling(128, 64, 8, 3), Tiling(64, 64, 4, 2),
                           Tiling(64, 32, 4, 1)),
    ("forward", 16, 256): (Tiling(128, 64, 8, 2), Tiling(64, 32, 4, 3), Tiling(64, 32, 4, 1)),
    ("forward", 16, 512): (Tiling(64, 32, 8, 2), Tiling(32, 32, 4, 1), Tiling(16, 16, 4, 1)),
    ("forward", 19, 64): (Tiling(64, 64, 4, 2), Tiling(64, 64, 8, 2), Tiling(32, 32, 4, 2),
                          Tiling(16, 16, 4, 1)),
    ("forward", 19, 128): (Tiling(64, 32, 8, 2), Tiling(32, 32, 4, 2), Tiling(16, 16, 4, 1)),
    ("forward", 19, 256): (Tiling(16, 16, 4, 2), Tiling(16, 16, 4, 1)),
    ("forward", 19, 512): (Tiling(16, 16, 4, 1),),
    ("forward", 32, 64): (Tiling(64, 64, 8, 2), Tiling(64, 32, 4, 2), Tiling(32, 32, 4, 2),
                          Tiling(16, 16, 4, 1)),
    ("forward", 32, 128): (Tiling(64, 32, 4, 2), Tiling(64, 32, 8, 2), Tiling(32, 32, 4, 2),
                           Tiling(16, 16, 4, 1)),
    ("forward", 32, 256): (Tiling(16, 16, 4, 2), Tiling(16, 16, 4, 1)),
    ("forward", 32, 512): (Tiling(16, 16, 4, 1),),
    ("tangent", 16, 64): (Tiling(128, 64, 8, 3), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2),
                          Tiling(64, 16, 4, 1)),
    ("tangent", 16, 128): (Tiling(128, 32, 8, 3), Tiling(128, 32, 8, 2), Tiling(64, 32, 4, 2),
                           Tiling(64, 16, 4, 1)),
    ("tangent", 16, 192): (Tiling(128, 16, 8, 2), Tiling(64, 16, 4, 2), Tiling(32, 16, 4, 1)),
    ("tangent", 19, 64): (Tiling(64, 32, 4, 2), Tiling(16, 16, 4, 1)),
    ("tangent", 19, 128): (Tiling(32, 32, 4, 2), Tiling(16, 16, 4, 1)),
    ("tangent", 19, 192): (Tiling(16, 16, 4, 1),),
    ("tangent", 32, 64): (Tiling(32, 32, 8, 2), Tiling(16, 16, 4, 1)),
    ("tangent", 32, 128): (Tiling(32, 32, 8, 2), Tiling(16, 16, 4, 1)),
    ("tangent", 32, 192): (Tiling(16, 16, 4, 1),),
    ("backward_q", 16, 64): (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 1)),
    ("backward_q", 16, 128): (Tiling(128, 64, 8, 3), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 1)),
    ("backward_q", 16, 192): (Tiling(128, 64, 8, 2), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 1),
                              Tiling(32, 32, 4, 1)),
    ("backward_q", 16, 256): (Tiling(128, 32, 8, 3), Tiling(128, 32, 8, 2), Tiling(64, 32, 4, 3),
                              Tiling(64, 32, 4, 1), Tiling(32, 32, 4, 1)),
    ("backward_q", 16, 512): (Tiling(32, 32, 8, 1), Tiling(16, 16, 4, 1)),
    ("backward_q", 19, 64): (Tiling(32, 32, 4, 2), Tiling(16, 16, 4, 1)),
    ("backward_q", 19, 128): (Tiling(64, 32, 8, 2), Tiling(32, 32, 4, 1), Tiling(16, 16, 4, 1)),
    ("backward_q", 19, 256): (Tiling(16, 16, 4, 1),),
    ("backward_q", 19, 512): (Tiling(16, 16, 4, 1),),
    ("backward_q", 32, 64): (Tiling(32, 32, 4, 2), Tiling(16, 16, 4, 1)),
    ("backward_q", 32, 128): (Tiling(64, 64, 8, 2), Tiling(64, 32, 8, 2), Tiling(32, 32, 4, 1),
                              Tiling(16, 16, 4, 1)),
    ("backward_q", 32, 256): (Tiling(16, 16, 4, 1),),
    ("backward_q", 32, 512): (Tiling(16, 16, 4, 1),),
    ("backward_kv", 16, 64): (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 1)),
    ("backward_kv", 16, 128): (Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 3), Tiling(32, 64, 4, 1)),
    ("backward_kv", 16, 192): (Tiling(32, 128, 8, 3), Tiling(32, 128, 8, 2), Tiling(32, 64, 4, 2),
                               Tiling(32, 32, 4, 1)),
    ("backward_kv", 16, 256): (Tiling(32, 64, 8, 3), Tiling(32, 32, 4, 2), Tiling(16, 32, 4, 1)),
    ("backward_kv", 16, 512): (Tiling(32, 32, 8, 1), Tiling(16, 16, 4, 1)),
    ("backward_kv", 19, 64): (Tiling(32, 32, 4, 2), Tiling(16, 16, 4, 1)),
    ("backward_kv", 19, 128): (Tiling(32, 32, 4, 1), Tiling(16, 16, 4, 1)),
    ("backward_kv", 19, 256): (Tiling(16, 16, 4, 1),),
    ("backward_kv", 19, 512): (Tiling(16, 16, 4, 1),),
    ("backward_kv", 32, 64): (Tiling(32, 32, 4, 2), Tiling(16, 16, 4, 1)),
    ("backward_kv", 32, 128): (Tiling(32, 32, 4, 2), Tiling(32, 32, 8, 2), Tiling(32, 32, 4, 1),
                               Tiling(16, 16, 4, 1)),
    ("backward_kv", 32, 256): (Tiling(16, 16, 4, 1),),
    ("backward_kv", 32, 512): (Tiling(16, 16, 4, 1),),
    ("backward_k", 16, 256): (Tiling(32, 128, 8, 3), Tiling(32, 128, 8, 2), Tiling(32, 64, 4, 2),
                              Tiling(32, 32, 4, 1)),
    ("backward_v", 16, 256): (Tiling(64, 128, 8, 2), Tiling(32, 128, 8, 2), Tiling(32, 64, 4, 2),
                              Tiling(32, 32, 4, 1)),
}  # fmt: skip
# The tilings that go first for these kinds of calls. Under a mask small blocks waste less at its
# edges; with a score function they leave registers for its values.
_PREFERRED: dict[tuple[str, int, int, str], Tiling] = {
    ("forward", 16, 64, "masked"): Tiling(64, 64, 4, 3),
    ("forward", 16, 128, "masked"): Tiling(64, 64, 4, 3),
    ("forward", 16, 192, "masked"): Tiling(64, 64, 4, 2),
    ("backward_q", 16, 128, "masked"): Tiling(64, 64, 4, 2),
    ("backward_kv", 16, 128, "masked"): Tiling(64, 64, 4, 2, 32),
    ("backward_kv", 16, 128, "reading"): Tiling(32, 64, 4, 3),
    ("forward", 16, 128, "score"): Tiling(64, 64, 4, 3),
    ("backward_q", 16, 128, "score"): Tiling(64, 64, 4, 2),
    ("backward_q", 16, 128, "learned"): Tiling(128, 64, 8, 3),
    ("backward_kv", 16, 128, "score"): Tiling(32, 64, 4, 3),
    ("forward", 16, 128, "biased"): Tiling(128, 64, 8, 3),
    ("forward", 32, 128, "score"): Tiling(64, 32, 4, 2),
}
LEARNED = "learned"  # a backward whose kernel of dq makes gradients of captured tensors too
# The kinds whose sizes a kind takes if it has none.
_FALLBACKS = {LEARNED: ("biased", "score"), "biased": ("score",), "reading": ("masked",)}

# Widths with separate kernels for dk and dv. Both accumulators of 64 keys, 256 wide, take the
# registers of 8 warps; a product of 64 rows occupies 4 of them, and the others would repeat it.
_SPLIT_KV: dict[int, tuple[int, ...]] = {16: (256,)}


def passes(bits: int, d: int, dv: int) -> tuple[str, ...]:
    """Return the kernels of a backward of several, in order."""
    if _table_width("forward", bits, d, dv) in _SPLIT_KV.get(bits, ()):
        return "backward_q", "backward_k", "backward_v"
    return "backward_q", "backward_kv"


def call_kind(spec: Spec, call: Call) -> str:
    """Return the kind of a call, by which tile sizes differ.

    - "plain": neither a score nor a mask;
    - "masked"; "reading" if the mask reads tensors (documents: short rows, and more registers);
    - "score"; "biased" if the score reads a number for every pair.
    """
    score, _ = graphs(spec)
    if score is not None:
        biased = any(float_gathers(score, dependence) for dependence in ("diagonals", "pairs"))
        return "biased" if biased else "score"
    if spec.mask is None:
        return "plain"
    return "reading" if len(call.captured.tensors) > spec.score_tensors else "masked"


def saved_key(kernel: str, bits: int, d: int, dv: int, kind: str) -> str:
    """Return the key under which tile sizes are saved."""
    return f"{kernel}, {bits} bits, {_table_width('forward', bits, d, dv)}, {kind}"


def _table_width(kernel: str, bits: int, d: int, dv: int) -> int:
    """Return the smallest width of the table that holds both widths; of "tangent", that holds dv,
    the width of its two accumulators."""
    widest = max(sum(pieces(0 if kernel == "tangent" else d)), sum(pieces(dv)))
    return min(w for k, b, w in _TABLE if (k, b) == (kernel, bits) and w >= widest)


def tilings(
    kernel: str, bits: int, d: int, dv: int, kind: str, saved: Mapping[str, Any]
) -> tuple[Tiling, ...]:
    """Return the tile sizes for a kernel ("forward", "tangent", or one of `passes`), best first.

    - `bits`: of the operands: 16, 32, or 19 (tf32).
    - `d`, `dv`: widths; between two of the table, the larger row holds.
    - `kind`: from `call_kind`, or `LEARNED`.
    - `saved`: the sizes that `headway tune` found (saved.py); they go first.
    """
    width = _table_width(kernel, bits, d, dv)
    rows = _TABLE[kernel, bits, width]
    score = kind in ("score", "biased", LEARNED)
    if score and width >= 128 and len(rows) > 1 and kernel != "tangent":
        rows = rows[1:]  # the largest blocks would spill hundreds of bytes
    kinds = (kind, *_FALLBACKS.get(kind, ()))
    preferred = (_PREFERRED.get((kernel, bits, width, k)) for k in kinds)
    tuned = (saved.get(saved_key(kernel, bits, d, dv, k)) for k in kinds)
    first = next((tiling for tiling in (*tuned, *preferred) if tiling is not None), None)
    return rows if first is None else (first, *rows)
