"""Tile shapes by head dimension, named barriers, and the configurations that kernels are compiled
with.

A row of a table fits 227 KB of shared memory and the registers of a warpgroup, as compiling it has
shown. The tables buy what the comments of their columns say: between 0.97 and 1.0 of the time for a
column, up to 0.7 for tiles of one consumer (H200).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Self

from ..gpu.counters import FIRST_FLAG as FIRST_FLAG
from ..gpu.counters import FLAGS as FLAGS

WARPGROUP = 4  # warps that issue a WGMMA together: a consumer
ONE_WARP = 1  # producers, schedulers, reduce warps

# Registers of a thread. A kernel's threads all start with as many; once its partitions run, those
# of one warp keep `MIN_REGISTERS`, and the consumers share what these give away.
REGISTERS_PER_SM = 65536
MIN_REGISTERS = 24
BWD_START_REGISTERS = 168  # bwd/kernel.py: two consumers
BWD_CONSUMER_REGISTERS = 240
WIDE_START_REGISTERS = 128  # bwd/wide.py: three; the consumer of dV has what the others leave
WIDE_DK_REGISTERS = 208
WIDE_DQ_REGISTERS = 72

DO_STAGES = 2  # blocks of dout in shared memory, in the backward
# `--register-usage-level` of ptxas: 0 to 3 make the same code, 4 and 5 (the default), and 6 to 10.
# Nothing but a clock tells which is faster.
LOW_USAGE, DEFAULT_USAGE, HIGH_USAGE = 0, 5, 6


# -- tile shapes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FwdTileShape:
    """A tile shape of the forward (fwd/kernel.py). A plan takes the first row of FWD_TILE_SHAPES
    that fits the head dimensions and suits the call (`ForwardPlan.suits`). Times are of an H200.
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

    # Consumer warpgroups, of 64 queries each: three for long tile rows
    # (`ForwardPlan.wants_three_consumers`).
    consumers: int = 2

    # CTAs of a multiprocessor; each may have 228 KB / `ctas` less 1 KB of shared memory. Several of
    # one consumer, for short tile rows (`ForwardPlan.wants_one_consumer`): they share an
    # instruction cache, which their code does not fit twice.
    ctas: int = 1

    # Of ptxas.
    register_usage_level: int = DEFAULT_USAGE

    @property
    def registers(self) -> tuple[int, int]:
        """Return the registers of a thread: at the start, and of a consumer's thread afterwards.

        Producer and scheduler together count as one more warpgroup, which keeps `MIN_REGISTERS`.
        Registers come in eights."""
        warpgroups = self.consumers + 1
        at_start = REGISTERS_PER_SM // (128 * warpgroups * self.ctas) // 8 * 8
        of_consumer = (at_start * warpgroups - MIN_REGISTERS) // self.consumers // 8 * 8
        return at_start, of_consumer


FWD_TILE_SHAPES = (
    FwdTileShape(
        (64,), (64,), stages=3, v_stages=3, first_block_in_loop=True, consumers=3,
        register_usage_level=LOW_USAGE,
    ),
    FwdTileShape(
        (64,), (64,), block=64, stages=3, v_stages=3, consumers=1, ctas=3,
        register_usage_level=LOW_USAGE,
    ),
    FwdTileShape((64,), (64,), stages=3, v_stages=3, slope_mma=True),
    FwdTileShape((64,), (64,), stages=3, v_stages=3),
    FwdTileShape((64, 32), (64, 32)),
    FwdTileShape(
        (128,), (128,), block=64, v_stages=3, q_stages=1, q_in_registers=True, consumers=1, ctas=2,
        register_usage_level=HIGH_USAGE,
    ),
    FwdTileShape(
        (128,), (128,), v_stages=3, q_stages=1, q_in_registers=True, named_barriers=True,
        stream_k_gain=0, register_usage_level=HIGH_USAGE,
    ),
    FwdTileShape(
        (128,), (128,), out_columns=64, slope_mma=True, named_barriers=True,
        register_usage_level=LOW_USAGE,
    ),
    FwdTileShape((128,), (128,), named_barriers=True, register_usage_level=LOW_USAGE),
    FwdTileShape((128,), (128,), register_usage_level=LOW_USAGE),
    FwdTileShape((128, 64), (128,), q_stages=1, early_q_release=True, out_columns=64),
    FwdTileShape((256,), (256,), block=64, q_stages=1, out_columns=128),
)  # fmt: skip


@dataclass(frozen=True)
class BwdTileShape:
    """A tile shape of the backward. Of the rows that `BackwardPlan` wants, it takes the first one
    of BWD_TILE_SHAPES that fits the head dimensions. Times are of an H200."""

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


BWD_TILE_SHAPES = (
    BwdTileShape(
        (64,), (64,), block=128, pipelined=True, named_barriers=True, register_usage_level=LOW_USAGE
    ),
    BwdTileShape((64,), (64,), named_barriers=True, register_usage_level=LOW_USAGE),
    BwdTileShape((128,), (128,), pipelined=True, register_usage_level=LOW_USAGE),
    BwdTileShape((128,), (128,), named_barriers=True, register_usage_level=LOW_USAGE),
    BwdTileShape((128, 64), (128,), stages=2, named_barriers=True),
    BwdTileShape((256,), (256,), stages=2, keys=64),
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
        """Return PTX for the barrier whose id is `$1`, if `$2`; `kind`: bar.sync or bar.arrive."""
        meet = f"@p {kind} $1, {self.threads};"
        return f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; {meet} mov.u32 $0, $1; }}"


# -- what a kernel is compiled for ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """The configuration that a kernel is compiled for, besides score and mask; `CONFIG` in device
    code."""

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

    # Release the blocks of the side that moves by named barriers.
    named_barriers: bool = False

    # Consumer warpgroups, of 64 queries or keys each; and the one that this is compiled for.
    consumers: int = 2
    consumer: int = 0

    # Keys come in whole blocks; backward: in whole tiles of the block mask.
    even_kv: bool = True

    # A few hundred bytes of shared memory are left for conversions of layouts.
    scarce_smem: bool = False

    # Dropout by words of several pairs (device/dropout.py): sixteens begin at multiples of 16.
    in_sixteens: bool = False

    # Relative-bias tables that the score reads (device/relative_bias.py).
    relative_biases: int = 0

    # An affine score (device/affine_score.py): its generated function; whether it has an absolute
    # value; whether it has nothing else beside S; and whether it grows with S, by a factor known to
    # be well above 0.
    affine: Any = None
    has_abs: bool = False
    abs_only: bool = False
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

    def for_consumer(self, consumer: int) -> Self:
        """Return the configuration of one consumer, which is compiled apart from the others."""
        return replace(self, consumer=consumer)

    def _barriers(self, first: int) -> "NamedBarriers | None":
        """Return the named barriers of a ring, from an id on; None if it has mbarriers."""
        return NamedBarriers(first, 128 * self.consumers + 32) if self.named_barriers else None


@dataclass(frozen=True, kw_only=True)
class FwdKernelConfig(KernelConfig):
    """The configuration of the forward kernel; fields without a comment are those of
    `FwdTileShape`."""

    v_stages: int = 2
    q_stages: int = 1
    early_q_release: bool = False
    q_in_registers: bool = False
    first_block_in_loop: bool = False
    slope_mma: bool = False

    # Registers of a consumer's thread.
    registers: int = 240

    # scale > 0.
    positive_scale: bool = True

    # The last work tiles are shared out (fwd/stream_k.py).
    stream_k: bool = False

    # What each consumer sees of the left and of the right half of the KV block that a work tile
    # visits first, then of other partial ones (fwd/half_blocks.py). Empty: not known.
    half_blocks: tuple[tuple[int, int], ...] = ()

    # Keep row maxima of S, where T is not S.
    track_max: bool = False

    def k_barriers(self) -> "NamedBarriers | None":
        """Return the named barriers of the ring of K; None if it has mbarriers."""
        return self._barriers(NamedBarrierId.PING_PONG - self.stages)

    def v_barriers(self) -> "NamedBarriers | None":
        """Return the named barriers of the ring of V; None if it has mbarriers."""
        return self._barriers(NamedBarrierId.PING_PONG - self.stages - self.v_stages)

    def ping_pong_ptx(self, kind: str, consumer: int) -> str:
        """Return PTX for the barrier of a consumer's turn, where it meets the consumer before."""
        return f"{kind} {NamedBarrierId.PING_PONG + consumer}, 256; mov.u32 $0, $1;"


@dataclass(frozen=True, kw_only=True)
class BwdKernelConfig(KernelConfig):
    """The configuration of the backward kernels."""

    # As in `BwdTileShape`.
    pipelined: bool = False

    # Issue dP after P is computed, which then has more registers.
    dp_after_p: bool = False

    # dT / dS is one known number, as it is without a score.
    constant_dscore: bool = False

    # The derivative of the score may be infinite where P is 0.
    unbounded_dscore: bool = False

    # Add to dP what the entropy has of its gradient.
    entropy: bool = False

    # The score may be NaN for queries past the end, which the last block has.
    score_past_end: bool = False

    # Visit blocks in ascending order, and let CTAs add to dQ in turn (bwd/dq_semaphore.py).
    deterministic: bool = False

    # A CTA takes all work tiles of a segment, and so owns its dQ (bwd/segments.py).
    owns_segment: bool = False

    # Which of the gathers that want a gradient are relative biases.
    bias_grads: tuple[int, ...] = ()

    # WIDTH of the exact sums of their distances (gpu/device/exact_sums.py); 0: float32 sums.
    exact_width: int = 0

    def q_barriers(self) -> "NamedBarriers | None":
        """Return the named barriers of the ring of Q; None if it has mbarriers."""
        return self._barriers(NamedBarrierId.PING_PONG - self.stages)

    def do_barriers(self) -> "NamedBarriers | None":
        """Return the named barriers of the ring of dO; None if it has mbarriers."""
        return self._barriers(NamedBarrierId.PING_PONG - self.stages - DO_STAGES)


def ptxas_options(registers: int, level: int) -> dict[str, Any]:
    """Return Triton's options for a kernel: warps of its first partition, registers that every
    thread starts with, and ptxas's register usage level."""
    options = f"--register-usage-level={level}"
    return {"num_warps": WARPGROUP, "maxnreg": registers, "ptx_options": options}


def first_fit(shapes: Iterable, d: int, dv: int) -> Any:
    """Return the first tile shape whose pieces hold these head dimensions, or None."""
    return next((shape for shape in shapes if sum(shape.d) >= d and sum(shape.dv) >= dv), None)


def head_swizzle(heads: int, group: int, tiles: int, processors: int) -> int:
    """Return how many heads the scheduler interleaves, for L2.

    Each head gives its longest work tile, then each its next. As many heads are interleaved as run
    at the same time anyway, so that short tiles come last and heads add to dQ in different places.
    The number divides `heads`, and has whole groups that share keys.

    - `group`: query heads that share keys; `tiles`: of a head; `processors`: of the GPU.
    """
    counts = [n for n in range(group, heads + 1, group) if heads % n == 0]
    return max((n for n in counts if n * tiles <= processors), default=group)
