"""Dropout in the kernels: the pairs that the definition keeps, whoever makes their words."""

from importlib.util import find_spec
from unittest import mock

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import headway as hw
import oracle
from headway.backends import hopper
from headway.resolve import prepare
from headway.types import Coords
from long import long
from tools import simulator
from tools.emulator.launch import emulating

SEED = 0x1234_5678_9ABC_DEF0 >> 2


def pattern(p, seed, q_len, kv_len, d, coords, mask=None, hq=2, way="forward"):
    """Which pairs of (b, hq, q_len, kv_len) are kept, as the kernels say: equal logits, and v, or
    dout, tells the pairs apart."""
    shape = 1, hq, q_len, kv_len
    kept = torch.zeros(shape, dtype=torch.bool)
    q, k = torch.zeros(1, hq, q_len, d).bfloat16(), torch.zeros(1, hq, kv_len, d).bfloat16()
    options = {"dropout": p, "seed": seed, "backend": "hopper", "keys": coords}
    for first in range(0, kv_len if way == "forward" else q_len, d):
        if way == "forward":
            v = torch.eye(kv_len)[:, first : first + d]
            v = torch.nn.functional.pad(v, (0, d - v.shape[1])).expand(1, hq, -1, -1).bfloat16()
            out = hopper.forward(*prepare(q, k, v, None, mask, **options)).out
            kept[..., first : first + d] = out[..., : kv_len - first] != 0
        else:
            dout = torch.eye(q_len)[:, first : first + d]
            dout = torch.nn.functional.pad(dout, (0, d - dout.shape[1]))
            dout = dout.expand(1, hq, -1, -1).contiguous().bfloat16()
            lse = torch.zeros(1, hq, q_len)
            spec, call = prepare(q, k, torch.zeros_like(k), None, mask, **options)
            dv = hopper.backward(spec, call, torch.zeros_like(dout), lse, dout, None, ()).v
            kept[:, :, first : first + d] = dv.mT[:, :, : q_len - first] != 0
    return kept


def expected(p, seed, q_len, kv_len, coords, mask=None, hq=2):
    q_pos, kv_pos = coords.positions(q_len, kv_len, torch.device("cpu"))
    at = (
        torch.tensor(coords.b), coords.h + torch.arange(hq)[:, None, None], q_pos[0][:, None],
        kv_pos[0][None, :],
    )  # fmt: skip
    kept = oracle.keep(p, seed, *at)
    if mask is not None:
        kept = kept & (q_pos[0][:, None] >= kv_pos[0][None, :])
    return kept.expand(1, hq, q_len, kv_len)


POSITIONS = {
    "whole": Coords(),
    "offsets": Coords(b=3, h=5, q=1008, kv=208),
    "far": Coords(b=2**20, h=2**10, q=2**31 - 64, kv=2**31 - 48),
    "queries not at a sixteen": Coords(b=3, h=5, q=1001, kv=208),
    "keys not at a sixteen": Coords(q=1008, kv=204),
    "straight": Coords(
        q_pos=torch.arange(384).view(3, 128)[[2, 0, 1]].flatten()[:130],
        kv_pos=torch.arange(512).view(4, 128)[[3, 1, 0, 2]].flatten()[:200],
        straight_below=512,
    ),
    "queries one by one": Coords(q_pos=torch.arange(400).flip(0)[:130]),
    "keys one by one": Coords(kv_pos=torch.arange(400).flip(0)[:200]),
}


@pytest.fixture
def simulated():
    with simulator.simulating():
        yield


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("where", POSITIONS)
def test_the_pairs_of_the_definition(where, way, simulated):
    at = POSITIONS[where]
    kept = pattern(0.6, SEED, 130, 200, 128, at, way=way)
    assert torch.equal(kept, expected(0.6, SEED, 130, 200, at))


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("p", [1e-12, 1e-9, 0.5, 31 / 32, 32 / 33, 1 - 2.0**-34, 1.0])
def test_rates_at_the_ends(p, way, simulated):
    """What is nearly 0 drops one pair of 2^15, what is nearly 1 keeps one. 31 / 32 is infinity in
    half precision, and what is above it NaN."""
    kept = pattern(p, SEED, 70, 90, 64, Coords(), hq=1, way=way)
    assert torch.equal(kept, expected(p, SEED, 70, 90, Coords(), hq=1))


def test_statistics_are_those_of_all_pairs(simulated):
    q, k, v = torch.randn(3, 1, 2, 200, 128).bfloat16()
    plain, dropped = (
        hw.attention_with_stats(q, k, v, None, hw.causal(), backend="hopper", dropout=p, seed=3)
        for p in (0.0, 0.4)
    )
    assert not torch.equal(plain.out, dropped.out)
    for one, other in zip(plain[1:], dropped[1:], strict=True):
        assert torch.equal(one, other)


PHILOX = simulator.LOADED.dropout._philox
MUTANTS = {
    "neighbouring words": (
        "_philox",
        lambda *given: (lambda a, b, c, d: (b, a, c, d))(*PHILOX(*given)),
    ),
    "words of halves": (
        "_philox",
        lambda *given: (lambda a, b, c, d: (c, d, a, b))(*PHILOX(*given)),
    ),
    "the next keys": ("_philox", lambda i, j, *given: PHILOX(i, j + 2, *given)),
    "the next query": ("_philox", lambda i, *given: PHILOX(i + 1, *given)),
    "keys for queries": ("_philox", lambda i, j, *given: PHILOX(j, i, *given)),
    "head for row": ("_philox", lambda i, j, h, b, *given: PHILOX(i, j, b, h, *given)),
    "halves exchanged": (
        "_philox",
        lambda *given: [w << 16 | w >> 16 & 0xFFFF for w in PHILOX(*given)],
    ),
    "a round less": ("ROUNDS", 6),
    "factors exchanged": ("MUL_0", simulator.LOADED.dropout.MUL_1),
}


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_draw_is_found(mutant, way, simulated):
    name, wrong = MUTANTS[mutant]
    at = Coords(b=1, h=4)
    with mock.patch.object(simulator.LOADED.dropout, name, wrong):
        kept = pattern(0.3, SEED, 70, 64, 64, at, hq=1, way=way)
    assert not torch.equal(kept, expected(0.3, SEED, 70, 64, at, hq=1))


@pytest.mark.parametrize(
    ("way", "d"),
    [("forward", 64), long("forward", 128), long("backward", 128), long("backward", 64)],
)
def test_compiled_kernels_keep_the_same_pairs(way, d):
    """The bits are where threads look for them: blocks of 64 and of 128 keys, and of 64 queries."""
    at = POSITIONS["offsets"]
    mask = hw.causal() if d == 64 else None
    with emulating("sm_90", hopper):
        kept = pattern(0.6, SEED, 64, 128, d, at, mask, hq=1, way=way)
    assert torch.equal(kept, expected(0.6, SEED, 64, 128, at, mask, hq=1))
