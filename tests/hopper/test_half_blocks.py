"""Half-block coverage: held against the pairs themselves, and in the kernels."""

from importlib.util import find_spec
from unittest import mock

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import headway as hw
from blocks.dense import dense_mask
from headway.backends import hopper, reference
from headway.backends.base import graphs, split
from headway.backends.gpu.runtime.call_plan import TileSchedule
from headway.backends.hopper.fwd import plan
from headway.backends.hopper.fwd.half_block_table import EMPTY, FULL, MIXED, half_block_table
from headway.backends.hopper.fwd.tile_table import tile_table
from headway.blocks import cached_build
from headway.resolve import prepare
from headway.types import Coords
from tools import simulator
from tools.emulator.launch import emulating

TILE = (128, 128)
LEFT, RIGHT, WHOLE = (MIXED, EMPTY), (FULL, MIXED), (FULL, FULL)  # of a block on the diagonal
MASKS = {
    "causal": hw.causal(),
    "window": hw.causal() & hw.sliding_window(256),
    "unaligned": hw.causal() & hw.sliding_window(200),
    "both_ways": hw.sliding_window(128),
    "prefix": hw.causal() | hw.prefix(200),
    "global": (hw.causal() & hw.sliding_window(128)) | hw.global_tokens(64),
    "by_head": lambda b, h, i, j: (i >= j) & (i - j < 128 * (h + 1)),
    "by_row": lambda b, h, i, j: (i >= j) & ((b == 0) | (j >= 64)),
    "strided": lambda b, h, i, j: (i - j) % 3 == 0,
    "shifted": lambda b, h, i, j: i >= j + 64,
    "nothing": lambda b, h, i, j: (i >= j) & (i < 300),
    "far": lambda b, h, i, j: (i - j) // 64 == 2,
}
SHAPES = [(640, 640), (333, 512), (64, 128), (700, 256), (129, 640)]


def found(mask, q_len, kv_len):
    """Coverage; kept pairs `(b, h, q_len, kv_len)`; of each work tile its batch row, head, tile row,
    and the first key of the block that it visits first."""
    q, k = (torch.zeros(2, 2, n, 128).bfloat16() for n in (q_len, kv_len))
    spec, call = prepare(q, k, k, None, mask, backend="cpu")
    graph, captured = graphs(spec)[1], split(spec, call.captured)[1]
    shape = 2, 2, q_len, kv_len
    made = half_block_table(graph, captured, shape, TILE, call.coords)
    tiles, b, h = cached_build(graph, captured, shape, TILE, torch.device("cpu"), call.coords)
    rows = -(-q_len // 128)
    schedule = TileSchedule(
        tiles.rows_full, tiles.rows_partial, tiles.row_order, b, h, rows, 128, 128, 1
    )
    work = [(x[3], x[2], x[0], x[4]) for x in tile_table(schedule, 1, kv_len, 128, 128).tolist()]
    kept = dense_mask(graph, captured, (b, h, q_len, kv_len))
    return made or ((MIXED, MIXED),) * 4, kept, work


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MASKS)
def test_what_is_said_holds_for_every_pair(name, shape):
    said, kept, work = found(MASKS[name], *shape)
    for b, h, row, first in work:
        for block in range(0, shape[1], 128):
            tile = kept[b, h, 128 * row : 128 * (row + 1), block : block + 128]
            if block != first and (tile.all() or not tile.any()):
                continue
            for consumer in (0, 1):
                for half in (0, 1):
                    part = tile[64 * consumer :][:64, 64 * half :][:, :64]
                    is_said = said[(0 if block == first else 2) + consumer][half]
                    assert is_said != EMPTY or not part.any()
                    assert is_said != FULL or part.all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("causal", (LEFT, RIGHT, WHOLE, WHOLE)),
        ("window", (LEFT, RIGHT, (MIXED, FULL), (EMPTY, MIXED))),
        ("unaligned", (LEFT, RIGHT, (MIXED, MIXED), (MIXED, MIXED))),
        ("by_head", (LEFT, RIGHT, (MIXED, FULL), (EMPTY, MIXED))),
    ],
)
def test_what_is_said(name, expected):
    assert found(MASKS[name], 640, 640)[0] == expected


def coverage_of(mask, length=640, kv_len=None):
    """What a call is compiled for, at lengths for which a work tile is of two consumers."""
    q, k = (torch.zeros(1, 2, n, 128).bfloat16() for n in (length, kv_len or length))
    spec, call = prepare(q, k, k, None, mask, backend="hopper")
    return plan.ForwardPlan(spec, call, (), (q, k, k)).kernel.options["CONFIG"].half_blocks


@pytest.fixture
def simulated():
    with simulator.simulating():
        yield


@pytest.mark.usefixtures("simulated")
def test_who_is_compiled_for_it():
    """Not for masks that another call of the kind may have otherwise, or whose keys end in a block."""
    ids = torch.arange(640) // 100
    kept = ids[:, None] >= ids
    assert coverage_of(hw.causal())[:2] == (LEFT, RIGHT)
    assert coverage_of(hw.causal(), 600, 640)[0] == LEFT
    assert coverage_of(hw.causal(), 640, 600) == ()
    assert coverage_of(lambda b, h, i, j: kept[i, j]) == ()
    assert coverage_of(lambda b, h, i, j: (i - j) % 3 == 0) == ()
    given = hw.block_mask(hw.causal(), 1, 1, 640, 640)
    assert coverage_of(given) == ()


CALLS = {
    "causal": (128, 128, None, hw.causal()),
    "window": (128, 128, None, MASKS["window"]),
    "f16": (96, 80, None, MASKS["both_ways"]),
    "mla": (192, 128, None, MASKS["window"]),
    "softcap": (128, 128, hw.softcap(20.0), MASKS["window"]),
    "alibi": (64, 64, hw.alibi(2), MASKS["window"]),
}


def errors(name, stats):
    """The largest error of everything that a forward makes, over the largest number."""
    d, dv, score, mask = CALLS[name]
    torch.manual_seed(0)
    dtype = torch.float16 if name == "f16" else torch.bfloat16
    q, k, v = (torch.randn(1, 2, 640, w).to(dtype) for w in (d, d, dv))
    with torch.no_grad():
        run = hw.attention_with_stats if stats else hw.attention
        made = [run(q, k, v, score, mask, backend=b) for b in ("reference", "hopper")]
    made = [tuple(x) if stats else (x,) for x in made]
    return [
        ((x.double() - true.double()).abs().max() / true.abs().max()).item()
        for true, x in zip(*made, strict=True)
    ]


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("name", CALLS)
def test_simulated(name):
    for stats in (True, False):
        assert max(errors(name, stats)) < 8e-3


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("far", [0, 2**33])
@pytest.mark.parametrize("shift", [0, 64, 100])
def test_a_shard(shift, far):
    """Queries and keys that stand somewhere in the whole: another coverage, or none."""
    q, k, v = (torch.randn(1, 2, n, 128).bfloat16() for n in (384, 640, 640))
    place = {"keys": Coords(q=far + 1280 + shift, kv=far + 1024)}
    made, true = (
        run(*prepare(q, k, v, None, MASKS["window"], backend=backend, **place))
        for run, backend in ((hopper.forward, "hopper"), (reference.forward, "reference"))
    )
    assert (made.out - true.out).abs().max() < 0.02
    assert (made.lse - true.lse).abs().max() < 1e-3


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    "wrong",
    [(LEFT, LEFT, WHOLE, WHOLE), (WHOLE, RIGHT, WHOLE, WHOLE), (LEFT, (MIXED, FULL), WHOLE, WHOLE)],
)
def test_what_is_wrong_is_found(wrong):
    with mock.patch.object(plan, "half_block_table", return_value=wrong):
        assert not max(errors("causal", True)) < 8e-3


@pytest.mark.parametrize("name", ["window", "mla", "alibi"])
def test_emulated(name):
    with emulating("sm_90", hopper):
        assert max(errors(name, False)) < 8e-3
