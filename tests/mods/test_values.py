"""Masks and scores as values: they print, compare, hash and combine."""

import dataclasses
import itertools

import pytest
import torch

import headway as hw
import oracle
from headway import causal, global_tokens, prefix, sliding_window, softcap
from headway.mods import lower_mod
from headway.mods.evaluation.pointwise import Positions, mask_at
from headway.mods.library.constants import to_device_cached


def odd(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx) % 2 == 1


def half(score, b, h, q_idx, kv_idx):
    return score / 2


PRINTED = {
    "causal()": causal(0),
    "causal(3)": causal(3),
    "causal(-2)": causal(-2),
    "sliding_window(64)": sliding_window(64),
    "causal() & sliding_window(64)": causal() & sliding_window(64),
    "causal() & sliding_window(64) | prefix(3)": causal() & sliding_window(64) | prefix(3),
    "(causal() | prefix(3)) & sliding_window(64)": (causal() | prefix(3)) & sliding_window(64),
    "causal() & (sliding_window(4) | global_tokens(2))": causal()
    & (sliding_window(4) | global_tokens(2)),
    "causal() & chunked(64)": causal() & hw.chunked(64),
    "block_causal(4) | ~chunked(2)": hw.block_causal(4) | ~hw.chunked(2),
    "log_sigmoid()": hw.log_sigmoid(),
    "softcap(5.0) >> log_sigmoid(-7.5)": softcap(5) >> hw.log_sigmoid(-7.5),
    "~causal()": ~causal(),
    "~(causal() & prefix(3))": ~(causal() & prefix(3)),
    "~causal() | prefix(3)": ~causal() | prefix(3),
    "softcap(30.0)": softcap(30),
    "softcap(30.0) >> softcap(2.5)": softcap(30) >> softcap(2.5),
    "causal() & odd": causal() & odd,
    "odd | causal()": odd | causal(),
    "softcap(3.0) >> half": softcap(3) >> half,
    "half >> softcap(3.0)": half >> softcap(3),
}


@pytest.mark.parametrize("text", PRINTED)
def test_printed_as_written(text):
    assert repr(PRINTED[text]) == text
    names = {n: getattr(hw, n) for n in dir(hw)} | {"odd": odd, "half": half}
    assert eval(text, names) == PRINTED[text]


def test_tensors_print_their_dtype_and_shape():
    assert repr(hw.document(torch.zeros(2, 7, dtype=torch.int32))) == "document(i32[2, 7])"
    assert repr(causal() | hw.spans(torch.zeros(7).long())) == "causal() | spans(i64[7])"
    assert repr(hw.window_bias(torch.zeros(169, 4), (7, 7))) == "window_bias(f32[169, 4], (7, 7))"
    assert repr(hw.relative_bias(torch.zeros(4, 9))) == "relative_bias(f32[4, 9])"
    assert repr(hw.bias(torch.zeros(4, 1, 1)) >> softcap(2)) == "bias(f32[4, 1, 1]) >> softcap(2.0)"


def test_equal_by_value():
    assert causal() == causal(0) != causal(1)
    assert sliding_window(3) != prefix(3)
    assert causal() & prefix(3) == causal() & prefix(3) != prefix(3) & causal()
    assert causal() != "causal()"
    assert len({causal(), causal(0), causal(1), softcap(2), softcap(2.0), ~causal()}) == 4


def test_tensors_are_equal_by_identity():
    ids, twin = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    assert hw.document(ids) == hw.document(ids) != hw.document(twin)
    assert hash(hw.document(ids)) == hash(hw.document(ids))


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        causal().offset = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        softcap(3).cap = 4


# -- algebra ----------------------------------------------------------------------------------------

AT = oracle.grid(1, 2, 11, 13)


def kept(mask) -> torch.Tensor:
    graph, captured = lower_mod("mask", mask, torch.float32)
    return mask_at(graph, captured, Positions(*AT)).expand(1, 2, 11, 13)


ATOMS = [causal(1), sliding_window(3), prefix(4), odd]


@pytest.mark.parametrize(("a", "b"), itertools.permutations(ATOMS, 2))
def test_and_or_not(a, b):
    if not isinstance(a, hw.Mask) and not isinstance(b, hw.Mask):
        pytest.skip("two plain functions have no &")
    assert torch.equal(kept(a & b), kept(a) & kept(b))
    assert torch.equal(kept(a | b), kept(a) | kept(b))
    assert torch.equal(kept(~(a & b)), ~(kept(a) & kept(b)))
    assert torch.equal(kept(~(a | b)), kept(~hw.Mask.__or__(prefix(0), a) & ~(prefix(0) | b)))


def test_scores_apply_in_order():
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3))
    add = lambda s, b, h, i, j: s + 1.5 * (j % 2)
    for first, then, formula in (
        (softcap(1.0), add, lambda s, b, h, i, j: torch.tanh(s) + 1.5 * (j % 2)),
        (add, softcap(1.0), lambda s, b, h, i, j: torch.tanh(s + 1.5 * (j % 2))),
    ):
        right = oracle.attention(q, k, v, formula).out
        torch.testing.assert_close(hw.attention(q, k, v, first >> then), right)


def test_values_may_be_called():
    """They are functions of the same signature, on tensors that broadcast."""
    assert torch.equal(causal()(*AT), (AT[3] <= AT[2]))
    s = torch.randn(1, 2, 11, 13)
    torch.testing.assert_close(softcap(2.0)(s, *AT), 2 * torch.tanh(s / 2))
    table = torch.randn(2, 7)
    right = s + table[AT[1], (AT[3] - AT[2]).clamp(-3, 3) + 3]
    torch.testing.assert_close(hw.relative_bias(table)(s, *AT), right)
    slopes = torch.rand(2)
    right = s - slopes[AT[1]] * (AT[2] - AT[3]).abs()
    torch.testing.assert_close(hw.alibi(slopes)(s, *AT), right)


@pytest.mark.parametrize(
    ("heads", "powers"),
    [
        (1, [-8]),
        (2, [-4, -8]),
        (8, [-1, -2, -3, -4, -5, -6, -7, -8]),
        (3, [-4, -8, -2]),
        (6, [-2, -4, -6, -8, -1, -3]),
        (12, [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5]),
    ],
)
def test_alibi_slopes(heads, powers):
    """The paper's sequence, and its rule where the number of heads is no power of two."""
    torch.testing.assert_close(hw.alibi(heads).slopes, 2.0 ** torch.tensor(powers))


def test_what_the_library_made_goes_to_the_device_of_q_once():
    meta, score = torch.device("meta"), hw.alibi(4)
    assert to_device_cached(score.slopes, torch.device("cpu")) is score.slopes
    assert to_device_cached(score.slopes, meta).device == meta
    assert to_device_cached(score.slopes, meta) is to_device_cached(score.slopes, meta)
    given = torch.rand(4)
    assert to_device_cached(hw.alibi(given).slopes, meta) is given  # the user's: refused later
