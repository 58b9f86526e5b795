"""Widths and blocks: what the kernels are compiled for.

Each is what fits 227 KB of shared memory and the registers of a warpgroup, found by compiling.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

REGISTERS_PER_SM = 65536  # of a multiprocessor
MIN_REGISTERS = 24  # of a thread
# How many the assembler may spend, by its `--register-usage-level`: 0 to 3 make the same code, 4
# and 5 (what it takes by itself), and 6 to 10. Which is faster nothing but a clock has told.
LOW_USAGE, DEFAULT_USAGE, HIGH_USAGE = 0, 5, 6
# PTX has 16 barriers that have numbers. Triton counts its own from 0, and these are the last ones:
FIRST_PING_PONG = 13  # of the turns of up to three consumers; below, those of numbered channels
TILE = (128, 128)  # of the block masks built here; given ones must be multiples of it


@dataclass(frozen=True)
class Forward:
    """- `d`, `dv`: widths of the pieces of a row of q and k, and of v.
    - `block`: keys of a block; `stages`: blocks of keys in shared memory; `values`: of values,
      whose place is free later.
    - `queries`: ranks whose queries are in shared memory.
    - `early`: each consumer gives back the one place for its queries with the last product of a
      rank that reads it, and the last product of all does not wait for the next queries. (Timed on
      an H200: MLA takes 0.97 of the time; 256 wide 1.01.)
    - `out`: columns of out that pass through shared memory at a time; 0: all.
    - `held`: queries are multiplied from registers.
    - `slanted`: a score that is a straight line in the keys is added by a product
      (device/affine_score.py), for
      which there is shared memory if out passes through less. (Timed on an H200: 128 wide, ALiBi
      takes 0.975 of the time, 1.1 score + 0.01 (kv_idx - q_idx) 0.97; 64 wide 0.97.)
    - `numbered`: keys and values come through numbered channels (device/pipeline.py; on an H200:
      128 wide, 8k full takes 0.984 of the time, ALiBi 0.992, a window without a score 1.013; 64,
      192 and 256 wide full 1.02 to 1.04.)
    - `merged`: the first block of a rank is computed in the loop over partial ones, not before it:
      a third less code, which three copies of it want, and more registers. Not with `held`.
    - `worth`: of the time, which sharing out the last ranks is to save (stream_k.py): a kernel that
      can is slower elsewhere. (Timed on an H200: 64 wide 1.05 of the time, MLA 1.014, 256 wide
      1.007; 128 wide, with queries in registers, is not.)
    - `consumers`: of 64 queries each; `ctas`: of a multiprocessor, each of which may take 228 KB
      over `ctas`, less 1 KB. Three consumers are for long
      lines; several CTAs of one, for short ones (`ForwardPlan.suits`): they run the same
      instructions, which do not fit the instruction cache twice.
    - `level`: of the assembler.
    """

    d: tuple[int, ...]
    dv: tuple[int, ...]
    block: int = 128
    stages: int = 2
    v_stages: int = 2
    q_stages: int = 2
    early_q_release: bool = False
    out_columns: int = 0
    q_in_registers: bool = False
    slope_mma: bool = False
    named_barriers: bool = False
    first_block_in_loop: bool = False
    stream_k_gain: float = 1 / 16
    consumers: int = 2
    ctas: int = 1
    register_usage_level: int = DEFAULT_USAGE

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread: what all start with, and what a consumer's has when loader and scheduler,
        which together count as one more, have given away all but `MIN_REGISTERS`. They come in
        eights."""
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
    """- `d`, `dv`: widths of the pieces of a row of q and k, and of v.
    - `block`: queries of a block; `stages`: of these, in shared memory.
    - `keys`: of a CTA: 128 for two consumers that make all gradients of their half
      (bwd/kernel.py), 64 for a consumer per gradient (bwd/wide.py).
    - `lagged`: dk and dq of a block are computed with S of the next (bwd/mainloop.py),
      where that was found to be faster (`BackwardPlan`).
    - `numbered`: queries and dout come through numbered channels (device/pipeline.py). (Timed on
      an H200: it takes 0.98 to 1.00 of the time, least where lines are short.)
    - `level`: of the assembler.
    """

    d: tuple[int, ...]
    dv: tuple[int]
    block: int = 64
    stages: int = 3
    keys: int = 128
    pipelined: bool = False
    named_barriers: bool = False
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


@dataclass(frozen=True)
class NamedBarriers:
    """The barriers of a numbered channel (device/pipeline.py), one for each stage: the first one's
    number, and how many threads, of all readers and the writer, meet at each."""

    first: int
    threads: int

    def ptx(self, kind: str) -> str:
        """For the barrier of number $1, if $2."""
        meet = f"@p {kind} $1, {self.threads};"
        return f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; {meet} mov.u32 $0, $1; }}"


@dataclass(frozen=True)
class How:
    """What a kernel is compiled for, besides its score and mask."""

    block: int  # rows of a block on the other side
    stages: int
    subtiles: int  # tiles of a CTA in a line of the block mask
    index_type: Any  # type of positions: gl.int32 or gl.int64
    positive_scale: bool = True  # forward: scale > 0
    v_stages: int = 2  # stages of values, or of dout
    stream_k: bool = False  # forward: the last ranks are shared out (stream_k.py)
    q_stages: int = 1  # forward: ranks whose queries are in shared memory
    early_q_release: bool = (
        False  # forward: their place is given back with the last product that reads it
    )
    q_in_registers: bool = False  # forward: queries are multiplied from registers
    named_barriers: bool = False  # the loader's channels of blocks are
    first_block_in_loop: bool = (
        False  # forward: the first block of a rank is computed among partial ones
    )
    consumers: int = 2  # warpgroups, of 64 queries or keys each
    registers: int = 240  # forward: of a consumer's thread
    even_kv: bool = True  # keys come in whole blocks; backward: in whole tiles
    dp_after_p: bool = False  # backward: dP after P, which then has more registers
    constant_dscore: bool = (
        False  # backward: T grows with S by one known number, as it does without a score
    )
    unbounded_dscore: bool = False  # backward: a derivative may be infinite where P is 0
    scarce_smem: bool = False  # there are but a few hundred bytes of shared memory left
    deterministic: bool = False  # backward: blocks in ascending order, and CTAs add to dq in turn
    pipelined: bool = False  # backward: dk and dq of a block with S of the next
    owns_segment: bool = False  # backward: CTAs take whole islands (bwd/segments.py)
    # Forward: what each consumer sees of the left and the right half of the block that a rank
    # visits first, then of other partial ones: 0 nothing, 1 something, 2 all
    # (fwd/half_block_table.py).
    half_blocks: tuple[tuple[int, int], ...] = ()
    consumer: int = 0  # which one this is compiled for
    track_max: bool = False  # keep the largest S, where T is another
    relative_biases: int = 0  # gathers along diagonals (device/relative_bias.py)
    bias_grads: tuple[int, ...] = ()  # of those that want a gradient, these are such
    affine: Any = None  # the generated function of an affine score (gpu/codegen/affine.py)
    has_abs: bool = False  # it has an absolute value
    abs_only: bool = False  # and nothing else beside S
    slope_mma: bool = False  # forward: what is added for a column, a product adds
    monotone: bool = False  # it grows with S, by a factor known to be well above 0
    # The generated functions of a mask that is taken apart (gpu/codegen/hoist.py).
    mask_shared: Any = None
    mask_of_q: Any = None
    mask_of_kv: Any = None
    mask_steps: Any = None
    mask_pairs: Any = None
    # And those of a score that is linear in S.
    score_shared: Any = None
    score_of_q: Any = None
    score_of_kv: Any = None

    def for_consumer(self, consumer: int) -> "How":
        """For one consumer."""
        return replace(self, consumer=consumer)

    def k_barriers(self) -> "NamedBarriers | None":
        """Of the loader's channel of keys, or of the backward's queries."""
        return self._barriers(0, self.stages)

    def v_barriers(self) -> "NamedBarriers | None":
        """Of the loader's channel of values, or of dout."""
        return self._barriers(self.stages, self.v_stages)

    q_barriers, do_barriers = k_barriers, v_barriers

    def _barriers(self, others: int, stages: int) -> "NamedBarriers | None":
        """Those before the turns' and so many others, if the loader's channels are numbered."""
        first = FIRST_PING_PONG - others - stages
        return NamedBarriers(first, 128 * self.consumers + 32) if self.named_barriers else None

    def ping_pong_ptx(self, kind: str, consumer: int) -> str:
        """PTX for the barrier of a consumer's turn, of its threads and those of the one before."""
        return f"{kind} {FIRST_PING_PONG + consumer}, 256; mov.u32 $0, $1;"


def ptxas_options(registers: int, level: int) -> dict[str, Any]:
    """Triton's options for a kernel: warps of its first partition, the registers that every thread
    starts with, and the assembler's level."""
    options = f"--register-usage-level={level}"
    return {"num_warps": 4, "maxnreg": registers, "ptx_options": options}


def first_fit(table: Iterable, d: int, dv: int) -> Any:
    """The first row whose pieces hold these widths; None where there is none."""
    return next((row for row in table if sum(row.d) >= d and sum(row.dv) >= dv), None)


def head_swizzle(heads: int, group: int, ranks: int, processors: int) -> int:
    """How many heads take turns in the order of work, each giving its longest rank, then each its
    next: those that run at the same time anyway, so that short ranks come last and heads add to dq
    in different places. A divisor of `heads`, and whole groups that share keys.

    - `ranks`: of a head; `processors`: of the GPU.
    """
    fit = [n for n in range(group, heads + 1, group) if heads % n == 0 and n * ranks <= processors]
    return max(fit, default=group)
