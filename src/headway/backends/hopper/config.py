"""Tile shapes: what the kernels are compiled for, by head dimension; and named barriers.

Each row is what fits 227 KB of shared memory and the registers of a warpgroup, found by compiling.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from ..gpu.counters import FIRST_FLAG as FIRST_FLAG
from ..gpu.counters import FLAGS as FLAGS

REGISTERS_PER_SM = 65536
MIN_REGISTERS = 24  # of a thread: what producer and scheduler keep
# `--register-usage-level` of ptxas: 0 to 3 make the same code, 4 and 5 (the default), and 6 to 10.
# Nothing but a clock tells which is faster.
LOW_USAGE, DEFAULT_USAGE, HIGH_USAGE = 0, 5, 6


# -- tile shapes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward:
    """A tile shape of the forward (fwd/kernel.py). The first row of FORWARD that fits the head
    dimensions and suits the call (`ForwardPlan.suits`) is taken. Times are of an H200.
    """

    # Head dimensions of q and k, and of v, in pieces (device/mma.py).
    d: tuple[int, ...]
    dv: tuple[int, ...]

    # Keys of a KV block.
    block: int = 128

    # Stages of K and of V in shared memory (a block of V is released later than one of K), and
    # work tiles whose Q is.
    stages: int = 2
    v_stages: int = 2
    q_stages: int = 2

    # Release Q with the last QKᵀ of a work tile, for the one buffer that there is; the last P V
    # then does not wait for the next Q. MLA takes 0.97 of the time; 256 wide 1.01.
    early_q_release: bool = False

    # Columns of out that pass through shared memory at a time; 0: all.
    out_columns: int = 0

    # Multiply Q from registers, so that shared memory is read for K and V alone.
    q_in_registers: bool = False

    # Let tensor cores add a score's straight line in the keys (device/affine_score.py), for which
    # there is shared memory if out passes through less. 128 wide, ALiBi takes 0.975 of the time,
    # 1.1 score + 0.01 (kv_idx - q_idx) 0.97; 64 wide 0.97.
    slope_mma: bool = False

    # Release K and V by named barriers (device/pipeline.py). 128 wide, 8k full takes 0.984 of the
    # time, ALiBi 0.992, a window without a score 1.013; 64, 192 and 256 wide full 1.02 to 1.04.
    named_barriers: bool = False

    # Compute the first block of a work tile in the loop over partial blocks, not before it: a third
    # less code, which three copies of it want, and more registers. Not with `q_in_registers`.
    first_block_in_loop: bool = False

    # Take stream-K (fwd/stream_k.py) only if it saves at least this fraction of the time: a kernel
    # that can is slower elsewhere. 64 wide takes 1.05 of the time, MLA 1.014, 256 wide 1.007; not
    # so 128 wide with Q in registers.
    stream_k_gain: float = 1 / 16

    # Consumer warpgroups, of 64 queries each: three for long tile rows (`ForwardPlan.in_threes`).
    consumers: int = 2

    # CTAs of a multiprocessor; each may have 228 KB / `ctas` less 1 KB of shared memory. Several of
    # one consumer, for short tile rows (`ForwardPlan.in_ones`): they share an instruction cache,
    # which their code does not fit twice.
    ctas: int = 1

    # Of ptxas.
    register_usage_level: int = DEFAULT_USAGE

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread: at the start, and of a consumer's once producer and scheduler,
        which together count as one more warpgroup, have given theirs away but `MIN_REGISTERS`.
        They come in eights."""
        each = REGISTERS_PER_SM // (128 * (self.consumers + 1) * self.ctas) // 8 * 8
        return each, (each * (self.consumers + 1) - MIN_REGISTERS) // self.consumers // 8 * 8


FORWARD = (
    Forward(
        (64,),
        (64,),
        stages=3,
        v_stages=3,
        first_block_in_loop=True,
        consumers=3,
        register_usage_level=LOW_USAGE,
    ),
    Forward(
        (64,),
        (64,),
        block=64,
        stages=3,
        v_stages=3,
        consumers=1,
        ctas=3,
        register_usage_level=LOW_USAGE,
    ),
    Forward((64,), (64,), stages=3, v_stages=3, slope_mma=True),
    Forward((64,), (64,), stages=3, v_stages=3),
    Forward((64, 32), (64, 32)),
    Forward(
        (128,),
        (128,),
        block=64,
        v_stages=3,
        q_stages=1,
        q_in_registers=True,
        consumers=1,
        ctas=2,
        register_usage_level=HIGH_USAGE,
    ),
    Forward(
        (128,),
        (128,),
        v_stages=3,
        q_stages=1,
        q_in_registers=True,
        named_barriers=True,
        stream_k_gain=0,
        register_usage_level=HIGH_USAGE,
    ),
    Forward(
        (128,),
        (128,),
        out_columns=64,
        slope_mma=True,
        named_barriers=True,
        register_usage_level=LOW_USAGE,
    ),
    Forward((128,), (128,), named_barriers=True, register_usage_level=LOW_USAGE),
    Forward((128,), (128,), register_usage_level=LOW_USAGE),
    Forward((128, 64), (128,), q_stages=1, early_q_release=True, out_columns=64),
    Forward((256,), (256,), block=64, q_stages=1, out_columns=128),
)


@dataclass(frozen=True)
class Backward:
    """A tile shape of the backward. The first row of BACKWARD that fits the head dimensions is
    taken, of those that `BackwardPlan` wants. Times are of an H200."""

    # Head dimensions of q and k, and of v, in pieces (device/mma.py).
    d: tuple[int, ...]
    dv: tuple[int]

    # Queries of a Q block.
    block: int = 64

    # Stages of Q in shared memory.
    stages: int = 3

    # Keys of a work tile: 128 for two consumers that compute all gradients of their half each
    # (bwd/kernel.py), 64 for one consumer per gradient (bwd/wide.py).
    keys: int = 128

    # Software pipelining: compute dK and dQ of a block with S of the next one (bwd/mainloop.py),
    # where that was found to be faster (`BackwardPlan`).
    pipelined: bool = False

    # Release Q and dO by named barriers (device/pipeline.py): 0.98 to 1.00 of the time, least where
    # columns are short.
    named_barriers: bool = False

    # Of ptxas.
    register_usage_level: int = DEFAULT_USAGE


BACKWARD = (
    Backward(
        (64,), (64,), block=128, pipelined=True, named_barriers=True, register_usage_level=LOW_USAGE
    ),
    Backward((64,), (64,), named_barriers=True, register_usage_level=LOW_USAGE),
    Backward((128,), (128,), pipelined=True, register_usage_level=LOW_USAGE),
    Backward((128,), (128,), named_barriers=True, register_usage_level=LOW_USAGE),
    Backward((128, 64), (128,), stages=2, named_barriers=True),
    Backward((256,), (256,), stages=2, keys=64),
)


# -- named barriers -------------------------------------------------------------------------------


class NamedBarrierId(IntEnum):
    """PTX has 16 named barriers, 0 to 15. Triton takes its own from 0 up, and these are the last:

    Triton's ... | stages of V (or dO) | stages of K (or Q) | ping-pong of up to three consumers
    """

    PING_PONG = 13  # of consumer 0; those of the others follow


@dataclass(frozen=True)
class NamedBarriers:
    """The named barriers of a ring (device/pipeline.py), one per stage.

    - `first`: the id of stage 0.
    - `threads`: of all consumers and the producer, which meet at each.
    """

    first: int
    threads: int

    def ptx(self, kind: str) -> str:
        """PTX for the barrier whose id is `$1`, if `$2`; `kind`: bar.sync or bar.arrive."""
        meet = f"@p {kind} $1, {self.threads};"
        return f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; {meet} mov.u32 $0, $1; }}"


# -- what a kernel is compiled for ----------------------------------------------------------------


@dataclass(frozen=True)
class How:
    """What a kernel is compiled for, besides its score and mask; `HOW` in device code."""

    # Rows of a block of the side that moves: keys in the forward, queries in the backward.
    block: int

    # Stages of K, or of Q in the backward.
    stages: int

    # Work tiles of one tile of the block mask.
    subtiles: int

    # Type of positions: gl.int32 or gl.int64.
    index_type: Any

    # Positions that are read follow one another within a block (`Coords.straight_below`).
    straight: bool = False

    # Forward: scale > 0.
    positive_scale: bool = True

    # Stages of V, or of dO in the backward.
    v_stages: int = 2

    # Forward: the last work tiles are shared out (fwd/stream_k.py).
    stream_k: bool = False

    # Forward, as in `Forward`.
    q_stages: int = 1
    early_q_release: bool = False
    q_in_registers: bool = False

    # Release the blocks of the side that moves by named barriers.
    named_barriers: bool = False

    # Forward, as in `Forward`.
    first_block_in_loop: bool = False

    # Consumer warpgroups, of 64 queries or keys each.
    consumers: int = 2

    # Forward: registers of a consumer's thread.
    registers: int = 240

    # Keys come in whole blocks; backward: in whole tiles of the block mask.
    even_kv: bool = True

    # Backward: issue dP after P is computed, which then has more registers.
    dp_after_p: bool = False

    # Backward: dT / dS is one known number, as it is without a score.
    constant_dscore: bool = False

    # Backward: the derivative of the score may be infinite where P is 0.
    unbounded_dscore: bool = False

    # Backward: the score may be NaN for queries past the end, which the last block has.
    score_past_end: bool = False

    # A few hundred bytes of shared memory are left for conversions of layouts.
    scarce_smem: bool = False

    # Backward: blocks in ascending order, and CTAs add to dQ in turn (bwd/dq_semaphore.py).
    deterministic: bool = False

    # Backward, as in `Backward`.
    pipelined: bool = False

    # Backward: a CTA takes all work tiles of a segment, and so owns its dQ (bwd/segments.py).
    owns_segment: bool = False

    # Forward: what each consumer sees of the left and of the right half of the KV block that a work
    # tile visits first, then of other partial ones (fwd/half_blocks.py). Empty: not known.
    half_blocks: tuple[tuple[int, int], ...] = ()

    # Which consumer this is compiled for.
    consumer: int = 0

    # Keep row maxima of S, where T is not S.
    track_max: bool = False

    # Relative-bias tables that the score reads (device/relative_bias.py).
    relative_biases: int = 0

    # Backward: which of the gathers that want a gradient are relative biases.
    bias_grads: tuple[int, ...] = ()

    # An affine score (device/affine_score.py): its generated function; whether it has an absolute
    # value; whether it has nothing else beside S; whether tensor cores add its slope; and whether
    # it grows with S, by a factor known to be well above 0.
    affine: Any = None
    has_abs: bool = False
    abs_only: bool = False
    slope_mma: bool = False
    monotone: bool = False

    # The generated functions of a mask with hoisted operands (device/hoisted.py).
    mask_shared: Any = None
    mask_of_q: Any = None
    mask_of_kv: Any = None
    mask_steps: Any = None
    mask_pairs: Any = None

    # And of an affine score.
    score_shared: Any = None
    score_of_q: Any = None
    score_of_kv: Any = None

    def for_consumer(self, consumer: int) -> "How":
        """The same for one consumer."""
        return replace(self, consumer=consumer)

    def k_barriers(self) -> "NamedBarriers | None":
        """Of the ring of K, or of Q in the backward; None if it has mbarriers."""
        return self._barriers(NamedBarrierId.PING_PONG - self.stages)

    def v_barriers(self) -> "NamedBarriers | None":
        """Of the ring of V, or of dO in the backward."""
        return self._barriers(NamedBarrierId.PING_PONG - self.stages - self.v_stages)

    q_barriers, do_barriers = k_barriers, v_barriers

    def _barriers(self, first: int) -> "NamedBarriers | None":
        return NamedBarriers(first, 128 * self.consumers + 32) if self.named_barriers else None

    def ping_pong_ptx(self, kind: str, consumer: int) -> str:
        """PTX for the barrier of a consumer's turn, where it meets the consumer before."""
        return f"{kind} {NamedBarrierId.PING_PONG + consumer}, 256; mov.u32 $0, $1;"


def ptxas_options(registers: int, level: int) -> dict[str, Any]:
    """Triton's options for a kernel: warps of its first partition, registers that every thread
    starts with, and ptxas's register usage level."""
    options = f"--register-usage-level={level}"
    return {"num_warps": 4, "maxnreg": registers, "ptx_options": options}


def first_fit(table: Iterable, d: int, dv: int) -> Any:
    """The first row whose pieces hold these head dimensions; None where there is none."""
    return next((row for row in table if sum(row.d) >= d and sum(row.dv) >= dv), None)


def head_swizzle(heads: int, group: int, tiles: int, processors: int) -> int:
    """How many heads the scheduler interleaves, for L2: each gives its longest work tile, then each
    its next. As many as run at the same time anyway, so that short tiles come last and heads add to
    dQ in different places. A divisor of `heads`, and whole groups that share keys.

    - `group`: query heads that share keys; `tiles`: of a head; `processors`: of the GPU.
    """
    fit = [n for n in range(group, heads + 1, group) if heads % n == 0 and n * tiles <= processors]
    return max(fit, default=group)
