"""Affine scores: which are, and how exact they stay far from 0."""

from dataclasses import replace
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import headway as hw
from headway.backends.gpu.codegen import emit
from headway.backends.gpu.codegen.affine import distance_sign
from headway.backends.gpu.runtime import call_plan
from headway.backends.hopper.config import FwdKernelConfig
from headway.mods.graph import parse
from headway.resolve import prepare
from tools import simulator

from .test_simulated import simulated  # noqa: F401  (a fixture)

HEADS, KEYS = 4, 1 << 20
SLOPES = torch.rand(HEADS) - 0.3
BIAS = torch.randn(HEADS, 64)
CAP = hw.softcap(30.0)

# name: the score from its tensors; whether it is affine; how large what multiplies positions is.
SCORES = {
    "alibi": (lambda t, u: hw.alibi(t), True),
    "steep": (lambda t, u: lambda s, b, h, i, j: s * 1.1 + 0.01 * (j - i), True),
    "floats": (lambda t, u: lambda s, b, h, i, j: (j.float() - i.float() + 3) * t[h] + s, True),
    "halved": (lambda t, u: lambda s, b, h, i, j: (t[h] * (2 * i - 2 * j) - s) / 2, True),
    "both": (lambda t, u: lambda s, b, h, i, j: t[0] * s - t[h] * (i - j - 5).abs() + 0.1 * (j - i),
             True),
    "tables": (lambda t, u: lambda s, b, h, i, j: s + u[h, i % 64] - 2 * u[h, j % 64], True),
    "heads": (lambda t, u: lambda s, b, h, i, j: s * t[h], True),
    "softcap": (lambda t, u: CAP, False),
    "relative": (lambda t, u: lambda s, b, h, i, j: s + u[h, (j - i) % 64], False),
    "product": (lambda t, u: lambda s, b, h, i, j: s * (j - i), False),
    "square": (lambda t, u: lambda s, b, h, i, j: s - t[h] * (j - i) ** 2, False),
    "two": (lambda t, u: lambda s, b, h, i, j: s - (j - i).abs() - (j - 3).abs(), False),
}  # fmt: skip
STRAIGHT = ("steep", "floats", "halved")
READ = ("alibi", "floats", "halved", "both", "tables", "heads")  # those that read a tensor


def functions(score, side=0):
    """The generated module, and what its functions are given."""
    q = torch.zeros(1, HEADS, 8, 16, dtype=torch.bfloat16)
    spec, call = prepare(q, q, q, score, None, backend="hopper")
    text = emit.CodegenSpec(
        spec.score, None, wide_offsets=(False,) * 9, affine=True, hoist=True, distance_sign=side
    )
    tensors = call_plan._with_sizes(call.captured.tensors)
    numbers = (*call.captured.ints, *call.captured.floats)
    return simulator._functions(text), (simulator._argument(tensors), numbers)


@pytest.mark.parametrize(("mask", "found"), [
    (hw.causal(), 1), (hw.causal() & hw.sliding_window(9), 1), (hw.causal() | hw.prefix(3), 0),
    (lambda b, h, i, j: j < i - 4, 1), (lambda b, h, i, j: j <= i + 1, 0),
    (lambda b, h, i, j: 2 * j > 2 * i - 0, -1), (lambda b, h, i, j: j <= 2 * i, 0),
    (lambda b, h, i, j: (j <= i + h) & (i >= 5), 0), (lambda b, h, i, j: ~(j <= i), 0),
    (lambda b, h, i, j: j - i <= i * j, 0), (lambda b, h, i, j: j - i <= b, 0),
])  # fmt: skip
def test_side(mask, found):
    q = torch.zeros(1, HEADS, 8, 16, dtype=torch.bfloat16)
    spec, call = prepare(q, q, q, None, mask, backend="hopper")
    assert distance_sign(parse(spec.mask), call.captured.ints) == found


@pytest.mark.parametrize(
    ("name", "on"), [(name, 0) for name in SCORES] + [("alibi", 1), ("alibi", -1), ("both", 1)]
)
def test_as_exact_as_the_definition(name, on, simulated):  # noqa: F811
    """T of tiles near and far from the diagonal, near 0 and near a million, for both kernels: off by
    a few roundings of what is added up, of which distances are at most a tile more. `on`: of which
    side pairs are, where an absolute distance is straight if it is that of query and key."""
    make, affine = SCORES[name]
    module, captured = functions(make(SLOPES, BIAS), on)
    assert hasattr(module, "affine") == affine
    if not affine:
        return
    assert module.has_abs == (name == "both" or (name == "alibi" and not on)) or name not in READ
    known = {x: getattr(module, x, None) for x in ("score_shared", "score_of_q", "score_of_kv")}
    assert (known["score_shared"] is not None) == any(x in name for x in READ)
    rising = (module.constant_gain or 0.0) > 1e-6
    config = FwdKernelConfig(
        block=128, stages=2, subtiles=1, index_type=torch.int32, affine=module.affine,
        has_abs=module.has_abs, abs_only=module.abs_only, monotone=rising, **known,
    )  # fmt: skip
    assert module.slope_only == (name in STRAIGHT or (name == "alibi" and on != 0))
    hoisted = simulator.LOADED.hoisted
    exact = make(SLOPES.double(), BIAS.double())
    scale, h = 0.125, 2
    for firsts in ((0, 0), (KEYS - 64, KEYS - 100), (KEYS - 64, 0), (320, KEYS - 128)):
        first_q, first_kv = torch.tensor(firsts, dtype=torch.int32)
        for queries in (True, False):
            s = 8 * torch.randn(64, 128)
            rows, cols = torch.arange(64, dtype=torch.int32), torch.arange(128, dtype=torch.int32)
            q, kv = (
                (first_q + rows, first_kv + cols) if queries else (first_q + cols, first_kv + rows)
            )
            row, column = (q, kv) if queries else (kv, q)
            of_rows = hoisted.hoist_rows(0, h, row, captured, (), queries, config)
            of_columns = hoisted.hoist_columns(
                0, h, column, of_rows, captured, (), queries, False, config
            )
            given = hoisted.affine_operands(captured, of_rows, of_columns, queries, 128, config)
            i, j = (q[:, None], kv[None, :]) if queries else (q[None, :], kv[:, None])
            i, j = i.long(), j.long()
            want = exact(s.double() * scale, 0, h, i, j)
            size = s.abs().double() * scale + 1.4 * ((i - j).abs() + 128) + 3 * BIAS.abs().max()
            counts = (i - j) * on >= 0
            # By instructions alone; and by a WGMMA, but for the first block of a work tile.
            ways = [(False, False)]
            if queries and module.slope_only and rising:
                ways += [(True, False), (True, True)]
            for product, in_s in ways:
                config = replace(config, slope_mma=product)
                at = 0, h, q, kv
                if queries:
                    added = of_rank = torch.zeros(())
                    if product:
                        added, of_rank = of_a_rank(scale, h, q, first_q, captured, of_rows, config)
                    t, unit, by_row = simulator.LOADED.affine_score.affine_scores(
                        s + added * in_s, scale, *at, first_q, first_kv, given, in_s, config
                    )
                    by_row = torch.as_tensor(by_row).double() + of_rank.double()
                    t = t.double() * unit + by_row[..., None]
                else:
                    less = torch.zeros(128)
                    t = simulator.LOADED.affine_score.affine_exponent(
                        s, scale, less, *at, first_q, given, config
                    )
                made = t.double() / 1.4426950408889634
                off = ((made - want).abs() / size * counts).max()
                assert off < 4 * 2**-24, (name, first_q, first_kv, product, in_s)


@pytest.mark.parametrize(("score", "gain"), [
    (lambda s, b, h, i, j: 2 * s - s / 4 + h, 1.75), (lambda s, b, h, i, j: j - s, -1.0),
    (lambda s, b, h, i, j: s * SLOPES[h], None), (lambda s, b, h, i, j: s * 1e200 * 1e200, None),
])  # fmt: skip
def test_a_gain_of_known_numbers(score, gain, simulated):  # noqa: F811
    assert functions(score)[0].constant_gain == gain


def of_a_rank(scale, h, q, first_q, captured, of_rows, config):
    """What tensor cores add to S, and what is added for its rows when a work tile ends."""
    kernel = simulator.LOADED.affine_score
    given = simulator.LOADED.hoisted.affine_operands(
        captured, of_rows, simulator.LOADED.hoisted.HoistedColumns((), ()), True, 128, config
    )
    a, by_row = kernel.slope_lhs(scale, 0, h, q, first_q, given, 128, config)
    with mock.patch.multiple(simulator.here, create=True, all=[], name="0"):
        c = kernel.slope_rhs(128)
    assert a.dtype == c.dtype == torch.bfloat16
    return a.float() @ c.x.float().T, by_row
