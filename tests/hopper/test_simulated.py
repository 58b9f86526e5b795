"""The kernels' logic and the host's, on the CPU: the shared table through the simulator."""

import itertools
import threading
import time
from dataclasses import replace
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import headway as hw
import ragged
from cases import BY_NAME, Case, problem
from checks import check, compare, run, yardstick
from flash_rounding import farther_than_flash
from headway import autograd
from headway.backends import first_use, hopper, reference
from headway.backends.gpu.runtime import call_plan as plans
from headway.backends.hopper import launch_plan
from headway.backends.hopper.bwd import plan as plan_backward
from headway.backends.hopper.config import BWD_TILE_SHAPES, FWD_TILE_SHAPES
from headway.backends.hopper.fwd import plan as plan_forward
from headway.backends.hopper.fwd import stream_k, tile_table
from headway.backends.hopper.fwd.plan import ForwardPlan
from headway.blocks import TILE
from headway.errors import BackendRefused
from headway.resolve import prepare
from headway.types import Coords
from learned import SMALL, errors
from long import long, long_unless
from positions import scattered
from tools import simulator

# Each for a part of its own: tails and no keys at all, pieces of a width, groups of heads, runs of
# full and partial tiles, masks of their own per head, each way to add up a gradient, strides that
# the copy engine cannot take, statistics, sinks. `long/hopper.py` runs the whole table.
CASES = (
    "length_1", "lengths_1_257_causal", "width_100_100", "heads_6_3_score",
    "layout_expanded", "layout_transposed", "scale_-0.5_score", "mask_nothing", "mask_by_batch_sink", "score_bias_rows",
    "score_bias_keys_masked", "score_undefined", "score_ends", "score_added", "score_walls", "score_cancelled_masked", "std_5_long_sink",
    "dropout_0.1_all", "dropout_long",
)  # fmt: skip


@pytest.fixture(autouse=True)
def simulated():
    with simulator.simulating():
        yield


PIPELINED = [name for name in CASES if "causal" in name or "heads" in name or "mask" in name]
WAYS = ("at once", "pipelined", "segments")


def choose(monkeypatch, way: str) -> None:
    """Whether the main loop is software-pipelined, as where tile columns are long, or CTAs own
    segments, as where these are short and many."""
    monkeypatch.setattr(
        launch_plan.HopperPlan,
        "is_long",
        lambda self, length=0: way == "pipelined" and not self.gathers_per_pair,
    )
    monkeypatch.setattr(plan_backward, "SEGMENT_IDLE", 1e9 if way == "segments" else -1e9)


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for way in WAYS for name in CASES if way != "pipelined" or name in PIPELINED],
)
def test_table(name, way, monkeypatch):
    choose(monkeypatch, way)
    dtype = torch.float16 if name == "length_1" else torch.bfloat16
    case = BY_NAME[name]
    assert compare(case, dtype, run(problem(case, dtype), "hopper", True), True) == []


# Rows without keys, sinks, T of -inf, what is undefined at masked pairs and past the end, dropout;
# P computed twice.
ENTROPY = (
    ("length_1", "pipelined", {}), ("mask_by_batch_sink", "pipelined", {}),
    ("mask_by_batch_sink", "segments", {}), ("mask_nothing", "at once", {}),
    ("heads_6_3_score", "at once", {}), ("score_walls", "at once", {}),
    ("score_undefined", "at once", {}), ("score_ends", "at once", {}),
    ("dropout_0.1_all", "at once", {}),
    ("heads_8_2", "at once", {"d": 256, "dv": 256, "hq": 2, "hk": 1}),
    long("dropout_long", "segments", {}), long("score_bias_rows", "at once", {}),
    long("std_5_long_sink", "at once", {}), long("layout_expanded", "at once", {}),
    long("scale_-0.5_score", "at once", {}), long("score_cancelled_masked", "at once", {}),
    long("long_causal_window", "at once", {"q_len": 320, "kv_len": 640}),
    long("mask_by_batch_sink", "at once", {"d": 192, "dv": 128}),
    long("heads_6_3_score", "at once", {"d": 256, "dv": 256}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "way", "changes"), ENTROPY)
def test_entropy(name, way, changes, monkeypatch):
    choose(monkeypatch, way)
    case = replace(BY_NAME[name], entropy=True, **changes)
    assert (
        compare(case, torch.bfloat16, run(problem(case, torch.bfloat16), "hopper", True), True)
        == []
    )


@pytest.mark.parametrize("form", ragged.FORMS)
@pytest.mark.parametrize("name", ["lengths_1_257_causal", "score_bias_rows"])
def test_packed(name, form, monkeypatch):
    choose(monkeypatch, "at once")
    case = replace(BY_NAME[name], b=2, hq=2, hk=1)
    assert ragged.wrong(case, torch.bfloat16, "hopper", form) == []


@pytest.mark.parametrize(
    ("order", "written"), [((0, 2, 1, 3), True), ((2, 0, 1, 3), True), ((0, 1, 3, 2), False)]
)
def test_out_is_written_in_the_memory_order_of_q(order, written):
    """Where its rows stay whole; `autograd` copies the rest."""
    in_memory = torch.randn([(2, 4, 130, 64)[n] for n in order], dtype=torch.bfloat16)
    q = in_memory.permute([order.index(n) for n in range(4)])
    spec, call = prepare(q, q, q, None, hw.causal(), backend="hopper")
    out = hopper.forward(spec, call).out
    assert (out.stride() == q.stride()) == written
    exact = reference.forward(*prepare(*[q.double()] * 3, None, hw.causal(), backend="reference"))
    assert (out - exact.out).abs().max() < 0.02


PREPARED = itertools.product(["long_causal", "heads_6_3_score", "width_100_100"], WAYS)


@pytest.mark.parametrize(
    ("name", "way"),
    long_unless(
        [
            ("long_causal", "pipelined"),
            ("heads_6_3_score", "segments"),
            ("width_100_100", "at once"),
        ],
        PREPARED,
    ),
)
def test_prepared_in_given_memory(name, way, monkeypatch):
    """What a call over ranks asks for: results in memory that the caller gives, and a backward that
    begins before anything is in its keys. The same bits."""
    choose(monkeypatch, way)
    p = problem(BY_NAME[name], torch.bfloat16)
    spec, call = prepare(p.q.detach(), p.k.detach(), p.v.detach(), p.score(), p.mask())
    spec, call = spec.replace(backend="hopper", exact_kv=True), call._replace(signature=None)
    nan = lambda x: torch.full_like(x, float("nan"))
    out, lse, *_ = hopper.forward(spec, call)
    into = nan(out), nan(lse)
    found = hopper.forward(spec, call._replace(into=into))
    assert found.out is into[0]
    assert found.lse is into[1]
    assert torch.equal(found.out, out)
    assert torch.equal(found.lse, lse)
    given = out, lse, p.dout, None, ()
    right = hopper.backward(spec, call, *given)
    k, v = nan(call.k), nan(call.v)
    later = call._replace(k=k, v=v)
    prepared = hopper.prepare(spec, later, *given)
    assert prepared is not None
    k.copy_(call.k)
    v.copy_(call.v)
    into = tuple([nan(x) for x in right[:3]])
    got = hopper.backward(spec, later._replace(prepared=prepared, into=into), *given)
    for x, y, memory in zip(got[:3], right[:3], into, strict=True):
        assert torch.equal(x, y)
        # Rows of 200 bytes have spare columns in TMA's memory; heads that a score tells apart, sums.
        assert x is memory or name != "long_causal"


@pytest.mark.parametrize("name", ["mask_nothing", "mask_by_batch_sink", "long_checker"])
def test_early_queries(name):
    """Their one place is given back with a rank's last block, however many it has."""
    case = replace(BY_NAME[name], d=192, dv=128)
    made = run(problem(case, torch.bfloat16), "hopper", True)
    assert compare(case, torch.bfloat16, made, True) == []


@pytest.mark.parametrize(("d", "dv"), [(192, 128), (8, 150)])
def test_forward_widths(d, dv):
    """Pieces of a width, and out in the place of the queries."""
    case = Case("pieces", b=1, hq=2, hk=1, q_len=70, kv_len=270, d=d, dv=dv, mask="causal_end")
    given = problem(case, torch.bfloat16)
    q, k, v = (x.detach() for x in (given.q, given.k, given.v))
    made = hw.attention_with_stats(q, k, v, None, given.mask(), backend="hopper")
    assert far(case, made._asdict()) == []


@pytest.mark.parametrize(
    ("name", "d", "dv"),
    [("mask_by_batch_sink", 192, 128), ("heads_8_2", 192, 100), ("heads_6_3_score", 256, 256),
     ("score_bias_rows", 200, 256)],
)  # fmt: skip
def test_backward_widths(name, d, dv):
    """A row in two pieces; a consumer per gradient, with and without gradients of the score."""
    case = replace(BY_NAME[name], d=d, dv=dv)
    assert (
        compare(case, torch.bfloat16, run(problem(case, torch.bfloat16), "hopper", True), True)
        == []
    )


SCATTERED = {
    "one order": ("mask_by_batch_sink", "at once", {}),
    "pipelined": ("mask_by_batch_sink", "pipelined", {}),
    "segments": ("mask_by_batch_sink", "segments", {}),
    "192": ("mask_by_batch_sink", "at once", {"d": 192, "dv": 128}),
    "256": ("score_relative_masked", "at once", {"d": 256, "dv": 256}),
    "rows": ("score_bias_rows", "at once", {}),
    "many blocks": ("long_causal_document", "at once", {"b": 1, "hq": 2, "hk": 1}),
}


@pytest.mark.parametrize("what", SCATTERED)
def test_positions_one_by_one(what, monkeypatch):
    """In any order, and but for the first of these another one in every row of the batch."""
    name, way, changes = SCATTERED[what]
    choose(monkeypatch, way)
    case = replace(BY_NAME[name], **changes)
    made = scattered(case, torch.bfloat16, "hopper", what != "one order")
    assert compare(case, torch.bfloat16, made, True) == []


IN_TILES = {
    "causal": ("long_causal", "pipelined", {}),
    "late": ("long_700_300_late", "at once", {}),
    "window": ("long_causal_window", "at once", {}),
    "prefix": ("long_prefix", "segments", {}),
    "documents": ("long_causal_document", "at once", {}),
    "by head": ("long_by_head", "at once", {}),
    "score": ("long_score_alibi_softcap", "at once", {}),
    "alibi": ("std_5_long", "at once", {}),
    "pairs": ("long_score_bias_square", "at once", {}),
    "dense": ("long_dense", "at once", {}),
    "192": ("long_causal", "pipelined", {"d": 192, "dv": 128}),
    "256": ("long_causal_window", "at once", {"d": 256, "dv": 256}),
}


def test_blocks_lie_within_tiles():
    """In which positions are straight, where kernels read the first of a block alone."""
    assert all(TILE[0] % row.block == 0 for row in (*FWD_TILE_SHAPES, *BWD_TILE_SHAPES))


@pytest.mark.parametrize(
    "what", long_unless(("causal", "prefix", "by head", "score", "pairs", "192", "256"), IN_TILES)
)
def test_positions_in_tiles(what, monkeypatch):
    """Tiles in any order, in which kernels count positions from the first."""
    name, way, changes = IN_TILES[what]
    choose(monkeypatch, way)
    case = replace(BY_NAME[name], **changes)
    made = scattered(case, torch.bfloat16, "hopper", case.b > 1, 128)
    assert compare(case, torch.bfloat16, made, True) == []


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0)])
def test_positions_of_nothing(q_len, kv_len):
    q, k, v = (
        torch.randn(2, 2, n, 64).bfloat16().requires_grad_() for n in (q_len, kv_len, kv_len)
    )
    at = Coords(q_pos=torch.arange(q_len).expand(2, -1), kv_pos=torch.arange(kv_len))
    out, lse, *_ = autograd.attention(
        *prepare(q, k, v, hw.alibi(2), hw.causal(), backend="hopper", keys=at)
    )
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_positions_one_by_one_in_turn():
    case = BY_NAME["mask_by_batch_sink"]
    made = scattered(case, torch.bfloat16, "hopper", True, deterministic=True)
    assert compare(case, torch.bfloat16, made, True) == []


def far(case: Case, made: dict, stats: bool = True) -> list[str]:
    """What is farther from the exact results than it may be."""
    exact, tolerance, *_ = yardstick(case, torch.bfloat16)[stats]
    off = {name: (x.double() - exact[name]).abs().max().item() for name, x in made.items()}
    return [name for name, x in off.items() if not x <= tolerance[name]]


def test_first_use():
    """The small case comes out right, well below what is called wrong; and a broken kernel not."""
    cpu = torch.device("cpu")
    with mock.patch.object(first_use, "_TOLERANCE", first_use._TOLERANCE / 2):
        assert first_use.differences(hopper, reference, cpu) == []
    forward = simulator.LOADED.forward
    with mock.patch.object(forward, "scale_rows", lambda acc, factor: acc):  # no rescaling
        (said, *_) = first_use.differences(hopper, reference, cpu)
    assert said.startswith("out is off by")


def test_given_block_mask():
    check(BY_NAME["mask_causal_document"], "hopper", torch.bfloat16, tile=(256, 384))


def test_float32_partials():
    """out, dk and dv unrounded, as a ring needs them."""
    case = BY_NAME["heads_8_2"]
    given = problem(case, torch.bfloat16)
    spec, call = prepare(
        given.q, given.k, given.v, None, given.mask(), sink=given.sink, backend="hopper",
        partial=True,
    )  # fmt: skip
    with torch.no_grad():
        out, lse, *_ = hopper.forward(spec, call)
        grads = hopper.backward(spec, call, out, lse, given.dout, None, ())
    made = {"out": out, "grad q": grads.q, "grad k": grads.k, "grad v": grads.v}
    assert all(x.dtype == torch.float32 for x in made.values())
    assert far(case, made, stats=False) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", SMALL, ids=str)
def test_learned_numbers_are_no_worse_than_with_float32_out(how, dtype):
    half, wide = errors(how, dtype, "hopper")
    assert half <= 2 * wide


def test_gradients_are_as_exact_as_flash_kernels():
    assert farther_than_flash(torch.bfloat16, "hopper", seed=2) == {}


def test_the_counter_of_a_stream_is_left_at_zero():
    """Of more ranks than CTAs, and of fewer: the next launch starts from where this one ends."""
    counter = torch.zeros(1, dtype=torch.int32)
    with mock.patch.object(plan_forward, "zeroed_counter", return_value=counter):
        for length in (70, 300, 300):
            q = torch.randn(1, 2, length, 64).bfloat16()
            made = hw.attention(q, q, q, mask=hw.causal(), backend="hopper")
            true = hw.attention(q, q, q, mask=hw.causal(), backend="reference")
            assert (made.float() - true.float()).abs().max() < 0.05
            assert counter.item() == 0


SHARED = [
    (16, 16, 2, 1, (100, 700)),  # one rank, of which every CTA has a part
    (16, 16, 2, 4, (128, 1100)),  # one rank of each CTA, and one for all
    (64, 64, 3, 5, (200, 900)),
    (192, 128, 2, 4, (256, 400)),
]


@pytest.mark.parametrize(
    ("d", "dv", "consumers", "heads", "lengths", "abreast"),
    long_unless(
        [(*SHARED[n], n > 1) for n in range(4)],
        [(*row, abreast) for row in SHARED for abreast in (False, True)],
    ),
)
def test_shared_ranks(d, dv, consumers, heads, lengths, abreast, monkeypatch):
    """The last ranks in shares of a few blocks: out, lse and the largest logits, with a score that
    has a gradient or none, and a sink, whatever stood in the memory for parts before."""
    monkeypatch.setattr(simulator.Kernel, "abreast", abreast)
    monkeypatch.setattr(stream_k, "MIN_SAVED_BLOCKS", 1)
    suits = mock.patch.object(
        ForwardPlan, "suits", lambda _, how: how.consumers == consumers and not how.slope_mma
    )
    parts = torch.full((100_000,), torch.nan)
    poisoned = mock.patch.object(ForwardPlan, "new_partials", lambda plan: parts[: plan.partials])
    counter = torch.zeros(512, dtype=torch.int32)
    kept = mock.patch.object(plan_forward, "zeroed_counter", return_value=counter)
    q, k, v = (
        torch.randn(1, heads, n, w).bfloat16()
        for n, w in zip(lengths[:1] + lengths[1:] * 2, (d, d, dv), strict=True)
    )
    for score in (None, hw.softcap(3.0)):
        call = {"score": score, "sink": torch.randn(heads), "entropy": score is not None}
        with suits, kept, poisoned:
            made = hw.attention_with_stats(q, k, v, **call, backend="hopper")
        assert not parts[0].isnan()  # a part was written down
        parts.fill_(torch.nan)
        true = hw.attention_with_stats(
            *(x.double() for x in (q, k, v)), **call, backend="reference"
        )
        assert counter.count_nonzero() == 0
        assert (made.out - true.out).abs().max() < 0.02
        assert (made.lse - true.lse).abs().max() < 1e-3
        assert (made.max_logit - true.max_logit).abs().max() < 1e-3
        if score is not None:
            assert (made.entropy - true.entropy).abs().max() < 1e-5


def straight_line_errors(d: int, dtype: torch.dtype, name: str) -> list[float]:
    """Of out and of the gradients of q, k and v, where the score is a straight line in the keys and
    nobody asks for statistics; of a steep one with a sink."""
    slopes = torch.tensor([0.5, -0.3])
    masks = {"alibi": hw.causal(), "steep": None, "window": hw.causal() & hw.sliding_window(260)}
    steep = lambda s, b, h, i, j: 1.1 * s + 0.02 * (j - i) + 0.5
    score = steep if name == "steep" else hw.alibi(slopes)
    sink = torch.tensor([3.0, -1.0]) if name == "steep" else None
    q, k, v = (torch.randn(2, h, n, d).to(dtype) for h, n in ((2, 300), (1, 470), (1, 470)))
    dout = torch.randn(2, 2, 300, d).to(dtype)

    def made(backend, dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        out = hw.attention(*leaves, score, masks[name], sink=sink, backend=backend)
        return out, *torch.autograd.grad(out, leaves, dout.to(dtype))

    right, near = made("reference", torch.float64), made("hopper", dtype)
    return [((a - b).norm() / b.norm()).item() for a, b in zip(near, right, strict=True)]


@pytest.fixture
def issued(simulated, monkeypatch):
    """As many numbers as products that add a straight line were issued."""
    forward, found = simulator.LOADED.forward, []
    wgmma_slope = forward.wgmma_slope
    monkeypatch.setattr(forward, "wgmma_slope", lambda *args: found.append(1) or wgmma_slope(*args))
    return found


LINES = [
    (128, torch.bfloat16, "alibi"), (128, torch.bfloat16, "steep"), (128, torch.bfloat16, "window"),
    (64, torch.float16, "alibi"), (64, torch.float16, "steep"), (64, torch.float16, "window"),
]  # fmt: skip


@pytest.mark.parametrize(("d", "dtype", "name"), long_unless(LINES[1:4], LINES))
def test_a_product_adds_a_straight_line(d, dtype, name, issued):
    assert max(straight_line_errors(d, dtype, name)) < 8e-3
    assert issued


def test_the_maxima_of_rows_under_a_straight_line(issued):
    """With what is told to them when a rank ends, which has a bias for every query too; far from
    position 0."""
    q, k, v = (torch.randn(1, 2, n, 64).bfloat16() for n in (150, 400, 400))
    bias = 5 * torch.randn(2, 5000)
    score = lambda s, b, h, i, j: 0.7 * s + bias[h, i] - 0.1 * (h + 1) * (i - j) + 2
    place = {"row_max": True, "keys": Coords(q=4000, kv=3800)}
    made = hopper.forward(*prepare(q, k, v, score, hw.causal(), backend="hopper", **place))
    true = reference.forward(
        *prepare(
            q.double(), k.double(), v.double(), score, hw.causal(), backend="reference", **place
        )
    )
    assert (made.out - true.out).abs().max() < 0.02
    assert (made.lse - true.lse).abs().max() < 1e-3
    assert (made.row_max - true.row_max).abs().max() < 1e-3
    assert issued


@pytest.mark.parametrize(("d", "dv", "way"), [
    (64, 64, "segments"), (128, 128, "segments"), (128, 128, "at once"), (192, 128, "at once"),
    (256, 256, "at once"),
])  # fmt: skip
@pytest.mark.parametrize("gain", [-0.7, 2.5])
def test_a_known_gain(d, dv, way, gain, monkeypatch):
    """It multiplies dk and dq when they are written, and no pair; a bias beside it learns."""
    choose(monkeypatch, way)
    learned = torch.randn(2, 300)
    score = lambda s, b, h, i, j, bias: (s - 0.5 * s) * (2 * gain) + bias[h, j]
    q, k, v, dout = (torch.randn(1, 2, n, w).bfloat16() for n, w in
                     ((200, d), (300, d), (300, dv), (200, dv)))  # fmt: skip

    def made(backend, dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        bias = learned.to(torch.promote_types(dtype, torch.float32), copy=True).requires_grad_()
        out = hw.attention(*leaves, lambda *args: score(*args, bias), backend=backend)
        return torch.autograd.grad(out, (*leaves, bias), dout.to(dtype))

    right, near = made("reference", torch.float64), made("hopper", torch.bfloat16)
    for a, b in zip(near, right, strict=True):
        assert (a - b).norm() / b.norm() < 8e-3


def test_whose_largest_logits_are_asked_for_no_product_adds_to():
    """They are of S, which no register would have."""
    q = torch.randn(1, 1, 200, 64).bfloat16()
    with mock.patch.object(simulator.LOADED.forward, "wgmma_slope", side_effect=AssertionError):
        made = hw.attention_with_stats(q, q, q, hw.alibi(1), hw.causal(), backend="hopper")
    true = hw.attention_with_stats(*[q.double()] * 3, hw.alibi(1), hw.causal(), backend="reference")
    assert (made.max_logit - true.max_logit).abs().max() < 1e-3


@pytest.mark.parametrize(("d", "dv", "length"), [(16, 16, 1300), (192, 128, 800)])
def test_the_shortest_lines_are_dealt_last(d, dv, length, monkeypatch):
    """Of all heads and batch rows, after the longer ones of groups of heads."""
    choose(monkeypatch, "pipelined")
    monkeypatch.setattr(
        plan_forward.ForwardPlan, "head_swizzle", lambda self, heads, *_: heads // 2
    )
    told = []
    table = tile_table.tile_table
    monkeypatch.setattr(
        tile_table, "tile_table", lambda *args: told.append(table(*args)) or told[-1]
    )
    q, k, v = (torch.randn(2, 4, length, w).bfloat16() for w in (d, d, dv))
    made = hw.attention_with_stats(q, k, v, mask=hw.causal(), backend="hopper")
    true = hw.attention_with_stats(
        *(x.double() for x in (q, k, v)), mask=hw.causal(), backend="reference"
    )
    assert len(told[0]) > 6
    assert (made.out - true.out).abs().max() < 0.02
    assert (made.lse - true.lse).abs().max() < 1e-3


@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_many_short_ranks(consumers):
    """Taken ahead but for the last ones; with one, two and three consumers."""
    table = tuple(replace(row, consumers=consumers) for row in plan_forward.FWD_TILE_SHAPES)
    by_head = hw.causal() & (lambda b, h, i, j: i - j < 50 * (h + 1))
    q, k, v = (torch.randn(4, 2, 384, 16).bfloat16() for _ in range(3))
    all_suit = mock.patch.object(ForwardPlan, "suits", return_value=True)
    with mock.patch.object(plan_forward, "FWD_TILE_SHAPES", table), all_suit:
        for mask in (None, by_head):
            made = hw.attention(q, k, v, mask=mask, backend="hopper")
            true = hw.attention(q, k, v, mask=mask, backend="reference")
            assert (made.float() - true.float()).abs().max() < 0.05


# In each a tile column visits blocks in an order of its own; columns that visit nothing; masks per head;
# tiles of several CTAs; a dQ tile of each consumer, by queries and by columns, and in two pieces; a
# consumer per gradient.
HOLES = torch.arange(5)[:, None] + torch.arange(5) % 3 != 1
IN_TURN = {
    "none": ((64, 64, 2, 1), lambda: None),
    "document": ((128, 64, 2, 2), lambda: hw.document(torch.arange(520) ** 2 // 60000)),
    "window": ((192, 128, 1, 1), lambda: hw.causal() & hw.sliding_window(200)),
    "by_head": ((64, 64, 2, 1), lambda: lambda b, h, i, j: (i >= j) & (i - j < 150 * (h + 1))),
    "holes": (
        (64, 64, 2, 1),
        lambda: lambda b, h, i, j: HOLES[i // 128, j // 128] & (j < 380),
    ),
    "tiles": (
        (256, 256, 1, 1),
        lambda: hw.block_mask(hw.causal(), 1, 1, 520, 520, tile=(256, 384)),
    ),
}


ONE_LENGTH = [(name, (512, 520)[n % 2]) for n, name in enumerate(IN_TURN)]


@pytest.mark.parametrize(
    ("name", "length"), long_unless(ONE_LENGTH, itertools.product(IN_TURN, (512, 520)))
)
def test_a_first_block_among_partial_ones(name, length):
    """What follows is the same, bit by bit, whether the first block of a rank has code of its own
    or not: lines of full tiles alone, of partial ones alone, and with nothing to see."""
    mask = IN_TURN[name][1]()
    q, k, v = (torch.randn(2, 2, length, 64).bfloat16() for _ in range(3))
    if name == "tiles":
        mask = hw.block_mask(hw.causal(), 1, 1, length, length, tile=(384, 256))
    if name == "document":
        mask = hw.document(torch.arange(length) ** 2 // 60000)
    made, suits = [], mock.patch.object(ForwardPlan, "suits", return_value=True)
    for merged in (False, True):
        plans.clear()
        row = replace(plan_forward.FWD_TILE_SHAPES[0], first_block_in_loop=merged)
        with mock.patch.object(plan_forward, "FWD_TILE_SHAPES", (row,)), suits:
            made += [hw.attention_with_stats(q, k, v, None, mask, backend="hopper")]
    assert all(map(torch.equal, made[0], made[1]))
    true = hw.attention(q, k, v, None, mask, backend="reference")
    assert (made[1].out.float() - true.float()).abs().max() < 0.05


ONE_WAY = {
    "none": "at once", "document": "at once", "window": "pipelined", "by_head": "pipelined",
    "holes": "pipelined", "tiles": "at once",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "way"),
    long_unless(ONE_WAY.items(), itertools.product(IN_TURN, ("at once", "pipelined"))),
)
def test_in_turn(name, way, monkeypatch):
    """CTAs one after the other and all at once, the last one first, give the same bits: each adds
    when as many have as come before it, and waits for none that comes after it."""
    choose(monkeypatch, way)
    (d, dv, hq, hk), mask = IN_TURN[name]
    torch.manual_seed(0)
    shapes = (hq, d), (hk, d), (hk, dv), (hq, dv)
    q, k, v, dout = (torch.randn(1, h, 520, w).bfloat16() for h, w in shapes)
    spec, call = prepare(q, k, v, None, mask(), sink=torch.randn(hq), backend="hopper",
                         partial=True, deterministic=True)  # fmt: skip
    tickets, wait = [], simulator.LOADED.dq_reduce.semaphore_wait

    def exactly(counter, ticket):
        wait(counter, ticket)
        assert ticket in (-1, counter.flat[counter.index()])
        tickets.append(ticket)

    def made(spec, abreast):
        with mock.patch.object(simulator.Kernel, "abreast", abreast):
            return hopper.backward(spec, call, out, lse, dout, None, ())[:4]

    with (
        torch.no_grad(),
        mock.patch.object(simulator.LOADED.dq_reduce, "semaphore_wait", exactly),
        mock.patch.object(simulator.LOADED.wide_dq, "semaphore_wait", exactly),
    ):
        out, lse, *_ = hopper.forward(spec, call)
        one, other = made(spec, False), made(spec, True)
        assert max(tickets) > 0
        plain = made(replace(spec, deterministic=False), name == "none")
    assert all(map(torch.equal, one, other))
    if name == "none":  # it does make a difference
        assert not torch.equal(one[0], plain[0])
    assert all((x - y).norm() <= 1e-6 * y.norm() for x, y in zip(one, plain, strict=True))


# Every block is visited once, or by all columns; some by none, and some by columns far apart; a column
# of several work tiles; query heads that share keys, and those that share none since masks differ.
SEGMENTS = {
    "one_column": ((64, 64, 4, 2), 100, lambda: None),
    "none": ((128, 128, 2, 1), 520, lambda: None),
    "causal": ((72, 100, 2, 2), 333, lambda: hw.causal()),
    "window": ((64, 64, 2, 1), 520, lambda: hw.causal() & hw.sliding_window(200)),
    "by_head": ((64, 64, 2, 1), 520, IN_TURN["by_head"][1]),
    "holes": ((128, 128, 2, 1), 520, IN_TURN["holes"][1]),
    "unseen": ((64, 64, 2, 1), 520, lambda: lambda b, h, i, j: (i >= 256) & (i < 400) & (i >= j)),
    "tiles": ((128, 64, 2, 1), 520, IN_TURN["tiles"][1]),
    # Several segments of a head, for each batch row, of different lengths; and columns of none.
    "packed": ((128, 128, 4, 2), 520, lambda: hw.causal() & hw.document(PACKED)),
    "blocks": ((64, 64, 2, 1), 520, lambda: lambda b, h, i, j: (i // 128 == j // 128) & (j != h)),
    "padded": ((64, 64, 2, 2), 520, lambda: hw.document(PACKED[1]) & hw.padding(PADDED)),
}
PACKED = torch.stack([torch.arange(520) // 128, torch.arange(520) // 256 * 2])
PADDED = torch.tensor([520, 300])


@pytest.mark.parametrize(
    "name",
    long_unless(("one_column", "window", "holes", "unseen", "tiles", "packed", "padded"), SEGMENTS),
)
def test_owned_segments(name, monkeypatch):
    """CTAs that own segments, one after the other and at once, make the same bits of all
    gradients; those of keys and values are what they are otherwise, and so is dq, but for the order
    of its sum."""
    (d, dv, hq, hk), length, mask = SEGMENTS[name]
    torch.manual_seed(0)
    shapes = (hq, d), (hk, d), (hk, dv), (hq, dv)
    q, k, v, dout = (torch.randn(2, h, length, w).bfloat16() for h, w in shapes)
    spec, call = prepare(q, k, v, None, mask(), backend="hopper", deterministic=True)
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, **options: empty(*size, **options).fill_(-1e4)
    )

    def made(way, abreast=False):
        choose(monkeypatch, way)
        plans.clear()
        in_turn = replace(spec, deterministic=way == "segments")
        with mock.patch.object(simulator.Kernel, "abreast", abreast):
            return hopper.backward(in_turn, call, out, lse, dout, None, ())[:3]

    with torch.no_grad():
        out, lse, *_ = hopper.forward(spec, call)
        plain, one, other = made("at once"), made("segments"), made("segments", abreast=True)
    assert all(map(torch.equal, one, other))
    assert all(map(torch.equal, one[1:], plain[1:]))
    off = (one[0].float() - plain[0].float()).abs()
    assert (off <= 0.01 * plain[0].float().abs() + 1e-6 * plain[0].float().norm()).all()


@pytest.mark.parametrize("name", ["tma_store_wait_visible", "from_accum_order", "mbarrier"])
def test_broken_segments_are_found(name, monkeypatch):
    """Parts that are read before they have landed, out of order, or not at all."""
    choose(monkeypatch, "segments")
    at_once = mock.Mock(wraps=simulator.mbarrier, expect=lambda bar, bytes, pred: bar.it.arrive())
    by = {
        "tma_store_wait_visible": lambda: None,
        "from_accum_order": lambda x: x.view(64, -1),
        "mbarrier": at_once,
    }
    q = torch.randn(1, 3, 300, 64).bfloat16().requires_grad_()
    found = {}
    for backend in ("reference", "hopper"):
        with (
            mock.patch.object(simulator.LOADED.segments, name, by[name]),
            mock.patch.object(simulator, "PATIENCE", 0.3),
        ):
            try:
                out = hw.attention(q, q, q, mask=hw.causal(), backend=backend)
                (found[backend],) = torch.autograd.grad(out.sum(), q)
            except simulator.Wrong:
                return
    assert not ((found["hopper"] - found["reference"]).abs() <= 0.1).all()  # NaN is not either


@pytest.mark.parametrize("waits", [True, False])
def test_reduce_warps_wait_for_zeros(waits, monkeypatch):
    """Of a memory that is anything but zeros until TMA, slow here, has made it so; where they do not
    wait, after a reduce warp has ended."""
    modules = ("backward", "dq_zero", "dq_reduce")
    backward, dq_zero, dq_reduce = (getattr(simulator.LOADED, n) for n in modules)
    landed, wait, add, empty = (
        dq_zero.tma_store_wait_visible,
        dq_reduce.wait_for_zeros,
        backward.reduce_dq,
        torch.empty,
    )
    ended = threading.Event()
    slow = (lambda: time.sleep(0.05)) if waits else (lambda: ended.wait(20))
    monkeypatch.setattr(dq_zero, "tma_store_wait_visible", lambda: (slow(), landed()))
    monkeypatch.setattr(
        dq_reduce, "tma_store_wait", lambda _: landed()
    )  # what is added lands at once
    monkeypatch.setattr(dq_reduce, "wait_for_zeros", wait if waits else lambda *_: None)
    monkeypatch.setattr(backward, "reduce_dq", lambda *given: (add(*given), ended.set()))
    monkeypatch.setattr(torch, "empty", lambda *size, **o: empty(*size, **o).fill_(-1e4))
    choose(monkeypatch, "at once")
    plans.clear()
    q = (
        torch.randn(2, 1, 130, 64).bfloat16().requires_grad_()
    )  # four work tiles: the ring holds no more
    mask = hw.causal() & hw.document(torch.arange(260).view(2, 130) // 70)  # for each batch row
    made = [
        torch.autograd.grad(hw.attention(q, q, q, mask=mask, backend=backend).sum(), q)[0]
        for backend in ("reference", "hopper")
    ]
    assert bool(((made[1] - made[0]).abs() <= 0.1).all()) == waits


def test_a_ticket_that_never_comes_is_found():
    q = torch.randn(1, 1, 300, 64).bfloat16().requires_grad_()
    out = hw.attention(q, q, q, backend="hopper", deterministic=True)
    dq_reduce, ticket_of = simulator.LOADED.dq_reduce, simulator.LOADED.dq_reduce.ticket_of
    later = lambda *given: 2 - ticket_of(*given)
    with (
        mock.patch.object(dq_reduce, "ticket_of", later),
        mock.patch.object(simulator, "LOOKS", 300),
        pytest.raises(simulator.Wrong, match=r"no CTA before it|another partition"),
    ):
        out.sum().backward()


def test_a_broken_kernel_is_found():
    """The simulator is worth something: without the fence, the release or the right phase it fails."""
    forward, out = simulator.LOADED.forward, simulator.LOADED.epilogue
    broken = {
        "fence_async_shared": (out, lambda: None),
        "consumer_release": (forward, lambda ring, at, *others: None),
        "advance": (forward, lambda at, stages: at),
    }
    # A trained sink asks for an out in float32, which no fence guards.
    case = replace(BY_NAME["long_700_half"], sink=False)
    for name, (where, by) in broken.items():
        with (
            mock.patch.object(where, name, by),
            mock.patch.object(simulator, "PATIENCE", 0.3),
        ):
            try:  # by chance, partitions out of step may get through: with wrong numbers
                made = run(problem(case, torch.bfloat16), "hopper", True)
            except simulator.Wrong:
                continue
            assert compare(case, torch.bfloat16, made, True), f"{name} made no difference"


def test_refusals():
    q = torch.zeros(1, 2, 130, 64, dtype=torch.bfloat16)
    wide, latent = (torch.zeros(1, 2, 130, n, dtype=torch.bfloat16) for n in (264, 192))
    mask = hw.block_mask(hw.causal(), 1, 1, 130, 130, tile=(64, 64))
    for match, tensors, options in (
        ("bfloat16 or float16", (q.float(),), {}),
        ("at most 256", (wide,), {}),
        (r"tile=\(128, 128\)", (q,), {"mask": mask}),
    ):
        with pytest.raises(BackendRefused, match=match):
            hw.attention(*tensors * 3, backend="hopper", **options)
    with pytest.raises(BackendRefused, match="dropout at widths d = 192, dv = 64"):
        hw.attention(latent, latent, q, dropout=0.1, backend="hopper")
