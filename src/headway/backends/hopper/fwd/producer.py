"""The forward's producer warp: it loads Q, K and V of each work tile by TMA, and asks the scheduler
for the next tile a little before it is done with a long one."""

from typing import Any, NamedTuple

from ..device.gluon_compat import gl, gluon
from ..device.mma import ROWS, produce_rows
from ..device.pipeline import advance, consumer_release, consumer_wait, first_stage, producer_commit
from ..device.work_tile import (
    ONE_WARP,
    WORK_STAGES,
    count_blocks,
    fetched_early,
    read_fwd_tile,
    read_kv_runs,
    read_work,
    visit_kv_blocks,
)


class TileLoads(NamedTuple):
    """The loads of a work tile. `q`, `k`, `v`: descriptors, shared memory and ring, or rings."""

    q: Any
    k: Any
    v: Any
    batch: Any
    head: Any
    first_row: Any
    kv_head: Any
    next_ring: Any


class LoadState(NamedTuple):
    """The progress of the producer."""

    k_at: Any  # cursors
    v_at: Any
    countdown: Any  # at 1, ask for the next work tile
    q_at: Any
    is_first: Any  # block of the tile


@gluon.jit
def produce(q, k, v, smem, rings, sizes, schedule, CONFIG: gl.constexpr):
    """Load what each work tile needs; `q`, `k`, `v`: descriptors of pieces."""
    consumer_release(rings.work, first_stage())  # the first sentinel tile
    work_at = advance(first_stage(), WORK_STAGES)
    q_at = first_stage()
    q_target, k_target, v_target = (q, smem.q, rings.q), (k, smem.k, rings.k), (v, smem.v, rings.v)
    # The first sentinel tile multiplies P V once, the last one Q Kᵀ.
    kv_at = (
        first_stage(),
        produce_rows(first_stage(), v_target, 0, 0, 0, 1, CONFIG.v_stages, CONFIG.v_barriers()),
    )
    consumer_wait(rings.work, work_at)
    (tile_in_head,) = read_work(smem.work, work_at, 0, 1, ONE_WARP)
    while tile_in_head >= 0:
        tile = read_fwd_tile(smem.work, work_at, ONE_WARP)
        early = fetched_early(tile.packed_blocks)
        countdown = gl.where(early, 0, gl.maximum(count_blocks(tile.packed_blocks) - 1, 1))
        runs = read_kv_runs(smem.work, work_at, schedule, ONE_WARP)
        consumer_release(rings.work, work_at)
        work_at = advance(work_at, WORK_STAGES)
        if not CONFIG.early_q_release:
            q_at = load_queries(q_at, q_target, tile.batch, tile.head, tile.first_row, CONFIG)
        loads = TileLoads(
            q_target,
            k_target,
            v_target,
            tile.batch,
            tile.head,
            tile.first_row,
            tile.kv_head,
            rings.next_tile,
        )
        state = LoadState(kv_at[0], kv_at[1], countdown, q_at, gl.to_tensor(True))
        state = visit_kv_blocks(
            state, loads, schedule, tile.first_block, runs, sizes.kv_len, True,
            load_block, None, None, CONFIG,
        )  # fmt: skip
        kv_at = (state.k_at, state.v_at)
        q_at = state.q_at
        consumer_wait(rings.work, work_at)
        (tile_in_head,) = read_work(smem.work, work_at, 0, 1, ONE_WARP)
    load_queries(q_at, q_target, 0, 0, sizes.q_len, CONFIG)
    produce_rows(kv_at[0], k_target, 0, 0, 0, 1, CONFIG.stages, CONFIG.k_barriers())


@gluon.jit
def load_block(
    state, loads, n, PARTIAL: gl.constexpr,
    SCORE: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Load the keys and values from row n on. With one buffer for Q, K of the first block is loaded
    before the buffer is free, so Q comes second."""
    k_at, v_at, countdown, q_at, is_first = state
    producer_commit(loads.next_ring, first_stage(), countdown == 1)
    k_at = produce_rows(
        k_at, loads.k, loads.batch, loads.kv_head, n, 1, CONFIG.stages, CONFIG.k_barriers()
    )
    if CONFIG.early_q_release:  # noqa: SIM102  (known when this is compiled)
        if is_first:
            q_at = load_queries(q_at, loads.q, loads.batch, loads.head, loads.first_row, CONFIG)
    v_at = produce_rows(
        v_at, loads.v, loads.batch, loads.kv_head, n, 1, CONFIG.v_stages, CONFIG.v_barriers()
    )
    return LoadState(k_at, v_at, countdown - 1, q_at, gl.to_tensor(False))


@gluon.jit
def load_queries(q_at, q_target, b, h, first_row, CONFIG: gl.constexpr):
    """Load the queries of a work tile: for all consumers at once; or, where each has a ring, for
    each as it releases its rows."""
    q, q_smem, rings = q_target
    COUNT: gl.constexpr = len(rings)
    EACH: gl.constexpr = CONFIG.consumers // COUNT
    for n in gl.static_range(COUNT):
        target = (q, q_smem, rings[n])
        row = first_row + n * EACH * ROWS
        produce_rows(q_at, target, b, h, row, EACH, CONFIG.q_stages, FIRST=n * EACH)
    return advance(q_at, CONFIG.q_stages)
