"""The named tuples that the backward kernels pass from function to function.

Triton takes a NamedTuple as it takes a tuple: field after field, in their order. A constexpr in one
is no constexpr afterwards, so constants stay arguments of their own.
"""

from typing import Any, NamedTuple

# -- what a kernel reads and writes ---------------------------------------------------------------


class Inputs(NamedTuple):
    """TMA descriptors."""

    q: Any  # in pieces (device/mma.py)
    k: Any  # in pieces
    v: Any
    dout: Any
    lse: Any  # in units of log 2
    neg_delta: Any  # -delta


class Sizes(NamedTuple):
    """The sizes of the problem, and how query heads share keys."""

    heads: Any  # query heads of a batch row
    group: Any  # query heads of one key head
    share: Any  # query heads that add to one dK and dV: all of a group, or one
    q_len: Any
    q_rows: Any  # q_len in whole blocks
    kv_len: Any


class ModArgs(NamedTuple):
    """What score and mask are computed from, besides q and k."""

    scale: Any  # of S
    rate: Any  # what dK and dQ are multiplied by: `scale`, times dT/dS if HOW.constant_dscore
    coords: Any
    bias_tables: Any  # for `relative_bias.begin`
    score: Any  # captured tensors and numbers of the score
    mask: Any  # captured tensors and numbers of the mask


class KeyLoads(NamedTuple):
    """What the producer loads once for a work tile."""

    k: Any  # descriptors, shared memory, ring
    v: Any
    b: Any
    h: Any  # head of the keys
    first_key: Any


class LoadContext(NamedTuple):
    """What the producer needs for all blocks of queries of a head."""

    inputs: Any  # Inputs
    smem: Any  # InputSmem
    rings: Any  # InputRings
    b: Any
    h: Any
    first_row: Any  # of the head, in lse and -delta
    keys: Any  # KeyLoads


class KeyGrads(NamedTuple):
    """Where dK and dV go: rounded, by TMA (descriptors), or in float32 (pointers). Either pair is
    None."""

    dk: Any  # in pieces
    dv: Any
    dk_float32: Any
    dv_float32: Any
    d_width: Any
    dv_width: Any


class ConsumerOutputs(NamedTuple):
    """What consumers write by themselves."""

    key_grads: Any  # KeyGrads
    captured_grads: Any  # of the tensors that the score captures
    bias_sums: Any  # for `relative_bias.begin`
    segment_dq: Any  # descriptor of dQ, where a CTA owns segments; else None


class ReduceOutputs(NamedTuple):
    """What the dQ reduce warps write."""

    dq_accum: Any  # in pieces
    dk: Any  # in pieces
    dv: Any
    segment_dq: Any
    segments: Any  # `segment_table.Segments.items`, where a CTA owns segments; else None
    zero_rows: Any  # descriptor of dQ-accum, where this kernel zeroes it; else None
    zeroed: Any


# -- shared memory and pipelines ------------------------------------------------------------------


class InputSmem(NamedTuple):
    """The shared memory of `Inputs`, stage by stage."""

    k: Any  # in pieces
    v: Any
    q: Any  # in pieces
    dout: Any
    lse: Any
    neg_delta: Any


class InputRings(NamedTuple):
    """The pipelines from the producer to the consumers."""

    k: Any
    v: Any
    q: Any  # and lse
    dout: Any  # and -delta


class Smem(NamedTuple):
    """All shared memory of bwd/kernel.py."""

    inputs: Any  # InputSmem
    ds: Any  # dS of both consumers, stage by stage
    dq: Any  # pieces of dQ-accum tiles, for each consumer
    work: Any  # work tiles


class Rings(NamedTuple):
    """All pipelines of bwd/kernel.py."""

    inputs: Any  # InputRings
    ds: Any  # from both consumers to both
    dq: Any  # of each consumer: from it to its reduce warp, piece by piece
    work: Any  # from the producer to all others


class WideSmem(NamedTuple):
    """All shared memory of bwd/wide.py."""

    inputs: Any  # InputSmem
    p: Any  # P, and dS in the same place


class WideRings(NamedTuple):
    """All pipelines of bwd/wide.py."""

    inputs: Any  # InputRings
    p: Any  # from the consumer of dV to that of dK
    ds: Any  # from the consumer of dK to that of dQ


class Cursors(NamedTuple):
    """Where a consumer stands in its pipelines."""

    q: Any
    dout: Any
    dq: Any


class LoadCursors(NamedTuple):
    """Where the producer stands in its pipelines."""

    kv: Any
    q: Any
    dout: Any


# -- work tiles -----------------------------------------------------------------------------------


class WorkTile(NamedTuple):
    """128 keys of a head (bwd/wide.py: 64)."""

    tile_col: Any  # column of the block mask's tiles; -1: no more work
    n_block: Any  # which work tile of its head
    first_key: Any
    h: Any  # the first of `Sizes.share` query heads
    b: Any


class TileKeys(NamedTuple):
    """The part of a `WorkTile` that says where its dK and dV go."""

    first_key: Any
    h: Any
    b: Any


class SegmentVisits(NamedTuple):
    """Which visits of a work tile are the first and the last of a block of queries."""

    first_bits: Any  # a bit for each block of the segment
    last_bits: Any
    first_block: Any  # of the segment


class SegmentHeader(NamedTuple):
    """What `segment_table.Segments.items` begins with."""

    total: Any  # segments of all heads
    equal_heads: Any  # heads with the same mask, and so the same segments
    span: Any  # blocks of queries of the longest segment


class SegmentItem(NamedTuple):
    """What follows it for each segment: consecutive tile columns, whose queries no other column
    visits."""

    first_tile: Any  # which work tile, of all of the mask's heads
    tiles: Any  # work tiles
    first_block: Any  # of queries


class Segment(NamedTuple):
    """What a CTA owns: a segment, for one of the equal heads."""

    item: Any  # SegmentItem
    nth_head: Any


class SegmentTile(NamedTuple):
    """A work tile of a segment."""

    tile: Any  # WorkTile
    index: Any  # which work tile, of all of the mask's heads
    first_block: Any  # of the segment's queries


class SegmentContext(NamedTuple):
    """What a consumer needs to write dQ of its segment."""

    dq: Any  # descriptor
    visits: Any  # SegmentVisits
    rate: Any


# -- a block of queries ---------------------------------------------------------------------------


class Head(NamedTuple):
    """A query head, and its batch row."""

    h: Any
    b: Any


class PairContext(NamedTuple):
    """What P is computed from, besides S and lse: of the pairs of a work tile and a head."""

    head: Any  # Head
    kv_idx: Any  # positions of the keys
    live: Any  # which keys are there
    hoisted: Any  # `hoisted.Rows` of the keys
    mods: Any  # ModArgs
    q_len: Any


class QBlockContext(NamedTuple):
    """What is the same for all blocks of queries of a work tile and a head, in bwd/kernel.py."""

    smem: Any  # Smem
    rings: Any  # Rings
    dq_ring: Any  # of this consumer
    pairs: Any  # PairContext
    captured_grads: Any
    bias_sums: Any
    share: Any  # for `common.opaque_zero`
    segment: Any  # SegmentContext


class ReduceContext(NamedTuple):
    """What a dQ reduce warp needs for all blocks of queries of a work tile and a head."""

    dq_accum: Any  # descriptors, in pieces
    dq_smem: Any  # of one consumer, in pieces
    rings: Any  # of that consumer, piece by piece
    consumer: Any
    first_row: Any  # of the head, in dQ-accum
    semaphore: Any
    tile: Any  # WorkTile
    step: Any  # queries of a tile of the block mask


class SegmentReduceContext(NamedTuple):
    """The same, where a CTA owns segments."""

    dq_accum: Any  # descriptor
    dq: Any  # descriptor
    dq_smem: Any
    ring: Any
    consumer: Any
    first_row: Any  # of the segment, in dQ-accum, less its first block's
    visits: Any  # SegmentVisits
    head: Any  # Head


class MainloopState(NamedTuple):
    """What bwd/kernel.py's main loop carries from block to block."""

    s: Any  # S of this block
    dq: Any  # the last piece of dQ of the block before, which is still to be stored
    visit: Any  # what that block's visit was (bwd/segments.py)
    dk: Any  # accumulator, in pieces
    dv: Any  # accumulator
    q_at: Any
    dout_at: Any
    dq_at: Any


class PipelinedState(NamedTuple):
    """What the software-pipelined main loop (bwd/mainloop.py) carries."""

    ds: Any  # dS of the block before, as a left operand
    begun: Any  # 1 if there was one
    dk: Any  # accumulator, in pieces, without that block's
    dv: Any  # accumulator
    q_at: Any
    dout_at: Any
    dq_at: Any


class WideContext(NamedTuple):
    """What is the same for all blocks of queries of a head, in bwd/wide.py."""

    smem: Any  # WideSmem
    rings: Any  # WideRings
    pairs: Any  # PairContext
    share: Any
    captured_grads: Any
    bias_sums: Any


class WideReduceContext(NamedTuple):
    """What the consumer of dQ needs for all blocks of queries of a head, in bwd/wide_dq.py."""

    dq_accum: Any  # pointer
    smem: Any  # WideSmem
    rings: Any  # WideRings
    first_row: Any  # of the head, in dQ-accum
    share: Any
    semaphore: Any
    tile: Any  # WorkTile
    step: Any  # queries of a tile of the block mask


class WideState(NamedTuple):
    """What the consumers of dV and dK carry from block to block, in bwd/wide.py."""

    product: Any  # S or dP of this block
    acc: Any  # dV or dK, its two halves of the columns
    q_at: Any
    dout_at: Any
    p_at: Any
