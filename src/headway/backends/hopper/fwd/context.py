"""The named tuples that the partitions of the forward kernel share and that a consumer carries."""

from typing import Any, NamedTuple

from ..device.gluon_compat import gl

# -- of the CTA -----------------------------------------------------------------------------------


class FwdSmem(NamedTuple):
    """The shared memory of a CTA; matrices in pieces (device/mma.py)."""

    work: Any  # fields of work tiles (device/work_tile.py)
    q: Any
    k: Any
    v: Any
    out: Any  # () where out leaves in float32, straight from registers
    slope: Any  # c of device/affine_score.py, or ()


class FwdRings(NamedTuple):
    """The pipelines between the partitions (device/pipeline.py)."""

    work: Any  # scheduler -> producer and consumers
    q: Any  # producer -> consumers: one ring for all; if CONFIG.early_q_release, one for each
    k: Any  # producer -> consumers
    v: Any
    next_tile: Any  # producer -> scheduler: fetch the next work tile


class FwdSizes(NamedTuple):
    """The sizes of the call."""

    heads: Any
    group: Any  # query heads of a key head
    q_len: Any
    kv_len: Any
    dv: Any


class FwdModArgs(NamedTuple):
    """The operands of scores and masks besides q and k."""

    scale: Any
    coords: Any  # `Coords` of gpu/runtime/call_plan.py
    dropout: Any  # `DropoutArgs` of device/dropout.py, or None
    bias_tables: Any  # device/relative_bias.py
    score_args: Any  # what the score captures: tensors, numbers
    mask_args: Any  # likewise the mask


class FwdOutputs(NamedTuple):
    """The tensors of the epilogue; all but lse may be None."""

    out: Any  # descriptors of pieces; None where `wide_out` is given
    wide_out: Any  # float32
    lse: Any
    row_max: Any
    max_logit: Any  # one for every consumer's part of every work tile
    entropy: Any
    sink: Any  # read: one logit per head
    partials: Any  # stream-K: memory for parts of work tiles
    counter: Any  # its flags stand behind the counter of tickets


class StreamKArgs(NamedTuple):
    """The numbers of `stream_k.StreamKShares` that the scheduler reads."""

    whole_tiles: Any  # computed by one CTA each; tickets behind them are shares
    share_blocks: Any  # KV blocks of a share
    shared_blocks: Any  # KV blocks of all shares


# -- of a consumer --------------------------------------------------------------------------------


class SoftmaxState(NamedTuple):
    """The state that a consumer carries from block to block. Row vectors are laid out as rows of
    S."""

    acc: Any  # O, in pieces; a WGMMA may be in flight
    m: Any  # row maxima of T over log 2
    l: Any  # row sums of exp2(T / log 2 - m)
    moment: Any  # (row sums of x exp2(x), x = T / log 2 - m,) for the entropy, or ()
    max_s: Any  # row maxima of S, if CONFIG.track_max
    p: Any  # P of the block before, the left operand of the next WGMMA
    k_at: Any  # cursors
    v_at: Any
    is_first: Any  # 1 before the first block of a work tile, where that is computed in the loop
    blocks_left: Any  # if CONFIG.early_q_release


class WgmmaOperands(NamedTuple):
    """The operands of the WGMMAs of a work tile."""

    q: Any  # this consumer's rows, in pieces: shared memory, or registers if CONFIG.q_in_registers
    k: Any  # shared memory of all stages
    v: Any
    k_ring: Any
    v_ring: Any
    q_ring: Any
    q_at: Any
    slope: Any  # (a, c) of device/affine_score.py, or ()


class TileContext(NamedTuple):
    """A work tile as scores and masks see it: the rows of one consumer."""

    kv_len: Any
    mods: Any  # `FwdModArgs`
    b: Any  # batch row and head, as scores and masks see them
    h: Any
    q_idx: Any  # positions of this consumer's queries
    batch: Any  # batch row of the tensors
    rows: Any  # `HoistedRows` of device/hoisted.py
    first_q: Any  # position of this consumer's first query (`first_position` of device/mma.py)


class PreviousTile(NamedTuple):
    """The work tile before, whose output is stored after this one has begun."""

    work_at: Any  # cursor of its fields
    rows: Any  # this consumer's rows of a tile
    row_log2: Any  # what the slope adds to m, if CONFIG.slope_mma
    dropout: Any  # as in `FwdModArgs`
    smem: Any
    rings: Any
    outputs: Any
    sizes: Any
    schedule: Any


# -- the work-tile table --------------------------------------------------------------------------


class TableEntry(NamedTuple):
    """A row of the work-tile table (fwd/tile_table.py): a work tile under a block mask. `KVRuns` of
    device/work_tile.py follow, from TABLE_RUNS on."""

    tile_in_head: Any  # its number among the tiles of its head
    first_row: Any
    head: Any  # of the mask
    batch: Any
    first_block: Any  # first row of the KV block that is visited first
    blocks: Any  # KV blocks that are visited


TABLE_FIELDS = gl.constexpr(len(TableEntry._fields))
TABLE_RUNS = gl.constexpr(8)  # 32 bytes: two runs of four columns, aligned to be read at once
TABLE_COLUMNS = gl.constexpr(16)
