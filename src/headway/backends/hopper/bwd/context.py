"""The named tuples that the backward kernels pass from function to function.

Triton takes a NamedTuple as it takes a tuple: field after field, in their order. A constexpr in one
is no constexpr afterwards, so constants stay arguments of their own.
"""

from typing import Any, NamedTuple

# -- what a kernel reads and writes ---------------------------------------------------------------


class InputDescriptors(NamedTuple):
    """The TMA descriptors of what the kernels read."""

    q: Any  # in pieces (device/mma.py)
    k: Any  # in pieces
    v: Any
    dout: Any
    lse: Any  # in units of log 2
    neg_delta: Any  # -delta
    neg_dentropy: Any  # -dentropy log 2, which dP has times log2(P); or None


class BwdSizes(NamedTuple):
    """The sizes of the problem, and how query heads share keys."""

    heads: Any  # query heads of a batch row
    group: Any  # query heads of one key head
    share: Any  # query heads that add to one dK and dV: all of a group, or one
    q_len: Any
    q_rows: Any  # q_len in whole blocks
    kv_len: Any


class BwdModArgs(NamedTuple):
    """The operands of score and mask besides q and k."""

    scale: Any  # of S
    rate: Any  # what dK and dQ are multiplied by: `scale`, times dT/dS if CONFIG.constant_dscore
    coords: Any
    dropout: Any  # `DropoutArgs` of device/dropout.py, or None
    bias_tables: Any  # for `relative_bias.begin`
    score_args: Any  # captured tensors and numbers of the score
    mask_args: Any  # captured tensors and numbers of the mask


class KeyLoads(NamedTuple):
    """The loads that the producer makes once for a work tile."""

    k: Any  # descriptors, shared memory, ring
    v: Any
    b: Any
    h: Any  # head of the keys
    first_key: Any


class LoadContext(NamedTuple):
    """The operands of the producer for all blocks of queries of a head."""

    inputs: Any  # InputDescriptors
    smem: Any  # InputSmem
    rings: Any  # InputRings
    b: Any
    h: Any
    first_row: Any  # of the head, in lse and -delta
    keys: Any  # KeyLoads


class KeyGradOutputs(NamedTuple):
    """The outputs for dK and dV: rounded, by TMA (descriptors), or in float32 (pointers). Either
    pair is None."""

    dk: Any  # in pieces
    dv: Any
    dk_float32: Any
    dv_float32: Any
    d_width: Any
    dv_width: Any


class ConsumerOutputs(NamedTuple):
    """The outputs that consumers write by themselves."""

    key_grads: Any  # KeyGradOutputs
    captured_grads: Any  # of the tensors that the score captures
    bias_sums: Any  # for `relative_bias.begin`
    segment_dq: Any  # descriptor of dQ, where a CTA owns segments; else None


class ReduceOutputs(NamedTuple):
    """The outputs that the dQ reduce warps write."""

    dq_accum: Any  # in pieces
    dk: Any  # in pieces
    dv: Any
    segment_dq: Any
    segments: Any  # `segment_table.Segments.items`, where a CTA owns segments; else None
    zero_rows: Any  # descriptor of dQ-accum, where this kernel zeroes it; else None
    zeroed_blocks: Any  # counters, see `dq_zero.write_zeros`


# -- shared memory and pipelines ------------------------------------------------------------------


class InputSmem(NamedTuple):
    """The shared memory of what `InputDescriptors` describe, stage by stage."""

    k: Any  # in pieces
    v: Any
    q: Any  # in pieces
    dout: Any
    lse: Any
    neg_delta: Any
    neg_dentropy: Any


class InputRings(NamedTuple):
    """The pipelines from the producer to the consumers."""

    k: Any
    v: Any
    q: Any  # and lse
    dout: Any  # and -delta, -dentropy log 2


class BwdSmem(NamedTuple):
    """The shared memory of bwd/kernel.py."""

    inputs: Any  # InputSmem
    ds: Any  # dS of both consumers, stage by stage
    dq: Any  # pieces of dQ-accum tiles, for each consumer
    work: Any  # work tiles


class BwdRings(NamedTuple):
    """The pipelines of bwd/kernel.py."""

    inputs: Any  # InputRings
    ds: Any  # from both consumers to both
    dq: Any  # of each consumer: from it to its reduce warp, piece by piece
    work: Any  # from the producer to all others


class WideSmem(NamedTuple):
    """The shared memory of bwd/wide.py."""

    inputs: Any  # InputSmem
    p: Any  # P, and dS in the same place


class WideRings(NamedTuple):
    """The pipelines of bwd/wide.py."""

    inputs: Any  # InputRings
    p: Any  # from the consumer of dV to that of dK
    ds: Any  # from the consumer of dK to that of dQ


class Cursors(NamedTuple):
    """The cursors of a consumer in its pipelines."""

    q: Any
    dout: Any
    dq: Any


class LoadCursors(NamedTuple):
    """The cursors of the producer in its pipelines."""

    kv: Any
    q: Any
    dout: Any


# -- work tiles -----------------------------------------------------------------------------------


class KeyTile(NamedTuple):
    """A work tile of the backward: 128 keys of a head (bwd/wide.py: 64)."""

    tile_col: Any  # column of the block mask's tiles; -1: no more work
    tile_in_head: Any  # its number among the tiles of its head
    first_key: Any
    h: Any  # the first of `BwdSizes.share` query heads
    b: Any


class KeyLocation(NamedTuple):
    """The part of a `KeyTile` that says where its dK and dV go."""

    first_key: Any
    h: Any
    b: Any


class SegmentVisits(NamedTuple):
    """The visits of a work tile that are the first and the last of a block of queries."""

    first_bits: Any  # a bit for each block of the segment
    last_bits: Any
    first_block: Any  # of the segment


class SegmentHeader(NamedTuple):
    """The header of `segment_table.Segments.items`."""

    total: Any  # segments of all heads
    equal_heads: Any  # heads with the same mask, and so the same segments
    span: Any  # blocks of queries of the longest segment


class SegmentItem(NamedTuple):
    """A segment in `segment_table.Segments.items`: consecutive tile columns, whose queries no other
    column visits."""

    first_tile: Any  # which work tile, of all of the mask's heads
    tiles: Any  # work tiles
    first_block: Any  # of queries


class HeadSegment(NamedTuple):
    """A segment, for one of the equal heads, that a CTA owns."""

    item: Any  # SegmentItem
    nth_head: Any


class SegmentTile(NamedTuple):
    """A work tile of a segment."""

    tile: Any  # KeyTile
    index: Any  # which work tile, of all of the mask's heads
    first_block: Any  # of the segment's queries


class SegmentContext(NamedTuple):
    """The operands of a consumer that writes dQ of its segment."""

    dq: Any  # descriptor
    visits: Any  # SegmentVisits
    rate: Any


# -- a block of queries ---------------------------------------------------------------------------


class QueryHead(NamedTuple):
    """A query head, and its batch row."""

    h: Any
    b: Any


class PairContext(NamedTuple):
    """The operands of P besides S and lse, of the pairs of a work tile and a head."""

    head: Any  # QueryHead
    kv_idx: Any  # positions of the keys
    first_kv: Any  # `first_position` of the keys
    live: Any  # which keys are there
    hoisted: Any  # `hoisted.HoistedRows` of the keys
    mods: Any  # BwdModArgs
    q_len: Any


class QBlockContext(NamedTuple):
    """The operands that all blocks of queries of a work tile and a head share, in bwd/kernel.py."""

    smem: Any  # BwdSmem
    rings: Any  # BwdRings
    dq_ring: Any  # of this consumer
    pairs: Any  # PairContext
    captured_grads: Any
    bias_sums: Any
    share: Any  # for `common.opaque_zero`
    segment: Any  # SegmentContext


class ReduceContext(NamedTuple):
    """The operands of a dQ reduce warp for all blocks of queries of a work tile and a head."""

    dq_accum: Any  # descriptors, in pieces
    dq_smem: Any  # of one consumer, in pieces
    rings: Any  # of that consumer, piece by piece
    consumer: Any
    first_row: Any  # of the head, in dQ-accum
    semaphore: Any
    tile: Any  # KeyTile
    step: Any  # queries of a tile of the block mask


class SegmentReduceContext(NamedTuple):
    """The operands of a dQ reduce warp where a CTA owns segments."""

    dq_accum: Any  # descriptor
    dq: Any  # descriptor
    dq_smem: Any
    ring: Any
    consumer: Any
    first_row: Any  # of the segment, in dQ-accum, less its first block's
    visits: Any  # SegmentVisits
    head: Any  # QueryHead


class MainloopState(NamedTuple):
    """The state that bwd/kernel.py's main loop carries from block to block."""

    s: Any  # S of this block
    dq: Any  # the last piece of dQ of the block before, which is still to be stored
    visit: Any  # the kind of that block's visit (bwd/segments.py)
    dk: Any  # accumulator, in pieces
    dv: Any  # accumulator
    q_at: Any
    dout_at: Any
    dq_at: Any


class PipelinedState(NamedTuple):
    """The state that the software-pipelined main loop (bwd/mainloop.py) carries."""

    ds: Any  # dS of the block before, as a left operand
    has_previous: Any  # 1 if there was one
    dk: Any  # accumulator, in pieces, without that block's
    dv: Any  # accumulator
    q_at: Any
    dout_at: Any
    dq_at: Any


class WideContext(NamedTuple):
    """The operands that all blocks of queries of a head share, in bwd/wide.py."""

    smem: Any  # WideSmem
    rings: Any  # WideRings
    pairs: Any  # PairContext
    dropout: Any  # as in `BwdModArgs`
    share: Any
    captured_grads: Any
    bias_sums: Any


class WideReduceContext(NamedTuple):
    """The operands of the consumer of dQ for all blocks of queries of a head, in bwd/wide_dq.py."""

    dq_accum: Any  # pointer
    smem: Any  # WideSmem
    rings: Any  # WideRings
    first_row: Any  # of the head, in dQ-accum
    share: Any
    semaphore: Any
    tile: Any  # KeyTile
    step: Any  # queries of a tile of the block mask


class WideState(NamedTuple):
    """The state that the consumers of dV and dK carry from block to block, in bwd/wide.py."""

    product: Any  # S or dP of this block
    acc: Any  # dV or dK, its two halves of the columns
    q_at: Any
    dout_at: Any
    p_at: Any
