"""`Past`: where new queries are, and what is refused because it does not know."""

import re

import pytest
import torch
from torch import Tensor

import headway as hw
from headway.errors import ArgumentError
from headway.mods.base import Mod
from headway.nn import MLA, Attention, Past, Rotary
from headway.nn.past import _FROM_ZERO

WIDTH, HEADS, LENGTH, BEFORE = 48, 4, 21, 9


def make(kind: type, rotary: bool = True) -> torch.nn.Module:
    if kind is MLA:
        small = {"kv_lora_rank": 8, "nope_width": 8, "rope_width": 4, "value_width": 6}
        return MLA(WIDTH, HEADS, **small).double()
    return Attention(WIDTH, HEADS, 2, rotary=Rotary(12) if rotary else None).double()


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randn(2, length, WIDTH, dtype=torch.float64)


def after(module: torch.nn.Module, x: Tensor) -> Past:
    """A past that holds x."""
    past = Past()
    module(x, past=past)
    return past


@pytest.mark.parametrize("kind", [Attention, MLA])
@pytest.mark.parametrize("parts", [[1] * 21, [5, 1, 15], [20, 1], [1, 20]], ids=str)
def test_positions_follow_those_of_the_past(kind, parts):
    """Without angles: outputs and gradients of parts are those of the whole."""
    module, x, dout = make(kind), tokens(), tokens()
    mine, whole = (x.clone().requires_grad_() for _ in range(2))
    expected = module(whole, hw.causal())
    past, outs = Past(), []
    for part in mine.split(parts, dim=1):
        outs.append(module(part, hw.causal(past.length), past=past))
    out = torch.cat(outs, 1)
    torch.testing.assert_close(out, expected)
    out.backward(dout)
    learned = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    expected.backward(dout)
    torch.testing.assert_close(mine.grad, whole.grad)
    torch.testing.assert_close(learned, [p.grad for p in module.parameters()])


def test_given_angles_are_taken():
    module, x = make(Attention), tokens()
    past = after(module, x[:, :BEFORE])
    angles = module.rotary.angles(torch.arange(LENGTH - BEFORE))
    moved = module(x[:, BEFORE:], past=after(module, x[:, :BEFORE]))
    assert (module(x[:, BEFORE:], angles=angles, past=past) - moved).abs().max() > 1e-3


def test_a_compiled_step_takes_a_past():
    module, x = make(Attention), tokens()
    step = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    expected = module(x, hw.causal())
    past, outs = Past(), []
    with torch.no_grad():
        for part in x.split([5, 7, 9], dim=1):
            outs.append(step(part, hw.causal(past.length), past=past))
    torch.testing.assert_close(torch.cat(outs, 1), expected)


# -- what is refused -------------------------------------------------------------------------------

table = torch.randn(HEADS, 9, dtype=torch.float64)
REFUSED = {
    "causal()": (hw.causal(), "causal(past.length)"),
    "strictly causal": (hw.causal(-1), "causal(past.length - 1)"),
    "sliding_window": (hw.sliding_window(4), "causal(n + 3) & ~causal(n - 4)"),
    "a window as wide as the past": (hw.sliding_window(BEFORE), "causal(n + 8) & ~causal(n - 9)"),
    "dilated": (hw.dilated(2, 3), "function"),
    "strided": (hw.strided(4), "function"),
    "chunked": (hw.chunked(4), "function"),
    "block_causal": (hw.block_causal(4), "function"),
    "global_tokens": (hw.global_tokens(2), "function"),
    "neighborhood": (hw.neighborhood(LENGTH, 5), "function"),
    "tiled": (hw.tiled(hw.causal(), (3, 7), (1, 7)), "function"),
    "alibi": (hw.alibi(HEADS), "function"),
    "relative_bias": (hw.relative_bias(table), "function"),
    "t5_bias": (hw.t5_bias(torch.randn(8, HEADS), 12), "function"),
    "window_bias": (hw.window_bias(torch.randn(5 * 13, HEADS), (3, 7)), "function"),
}


@pytest.mark.parametrize("kind", [Attention, MLA])
@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("count", [1, LENGTH - BEFORE])
def test_values_that_know_of_no_past_are_refused(what, kind, count):
    """The message names them; what it says to write gives what the whole gives."""
    value, way = REFUSED[what]
    module, x = make(kind), tokens(BEFORE + count)
    argument = "mask" if isinstance(value, hw.Mask) else "score"
    past = after(module, x[:, :BEFORE])
    with pytest.raises(ArgumentError) as caught:
        module(x[:, BEFORE:], past=past, **{argument: value})
    message = str(caught.value)
    assert message.startswith(f"{value!r} takes the first of these queries for position 0")
    assert f"past holds {BEFORE} positions" in message
    assert past.length == BEFORE
    if way == "function":
        way = re.search(
            r"(lambda .*), with mod = (.*) and n = torch.tensor\(past.length\)", message
        )
        assert way[2] == repr(value)
        moved = eval(f"lambda mod, n: ({way[1]})")(value, torch.tensor(past.length))
    else:
        assert way in message
        names = {"causal": hw.causal, "past": past, "n": past.length}
        moved = eval(way, names)
    out = module(x[:, BEFORE:], past=past, **{argument: moved})
    torch.testing.assert_close(out, module(x, **{argument: value})[:, BEFORE:])


@pytest.mark.parametrize(
    "mask",
    [
        hw.causal() & hw.sliding_window(4),
        hw.causal(BEFORE) & hw.sliding_window(4),  # the window is not moved
        hw.causal() | hw.prefix(3),
        ~hw.causal(),
        hw.causal() & (lambda b, h, i, j: j != 3),
        hw.block_mask(hw.causal(), None, None, LENGTH - BEFORE, LENGTH),
    ],
    ids=str,
)
def test_refused_inside_combinations_and_block_masks(mask):
    module, x = make(Attention), tokens()
    past = after(module, x[:, :BEFORE])
    with pytest.raises(ArgumentError, match="takes the first of these queries for position 0"):
        module(x[:, BEFORE:], mask, past=past)
    with pytest.raises(ArgumentError, match=r"alibi\(.* takes the first"):
        module(x[:, BEFORE:], None, hw.softcap(3.0) >> hw.alibi(HEADS), past=past)


def test_the_window_of_the_message_works_at_every_length():
    """causal(n) & ~causal(n - 4), also where n - 4 is 0 or less."""
    module, x = make(Attention), tokens()
    whole = module(x, hw.causal() & hw.sliding_window(4))
    past, outs = Past(), []
    for part in x.split(1, dim=1):
        n = past.length
        outs.append(module(part, hw.causal(n) & ~hw.causal(n - 4), past=past))
    torch.testing.assert_close(torch.cat(outs, 1), whole)


def test_what_knows_the_past_or_no_query_is_taken():
    module, x = make(Attention), tokens()
    new, n = LENGTH - BEFORE, BEFORE
    lengths, ids = torch.tensor([17, 21]), torch.randint(3, (2, LENGTH))
    dense = torch.rand(2, 1, LENGTH, LENGTH) < 0.7
    bias = torch.randn(HEADS, LENGTH, LENGTH, dtype=torch.float64)
    function = lambda b, h, i, j: j <= i + n
    blocks = hw.block_mask(hw.causal(), None, None, LENGTH, LENGTH, tile=3)
    masks = [
        (hw.causal(n), hw.causal()),
        (function, hw.causal()),
        (hw.causal(n) & hw.padding(lengths), hw.causal() & hw.padding(lengths)),
        (hw.causal(n) | hw.prefix(12), hw.causal() | hw.prefix(12)),
        (hw.document(ids[:, n:], ids), hw.document(ids)),
        (hw.spans(ids[:, n:] - 1, ids - 1), hw.spans(ids - 1)),
        (hw.dense(dense[:, :, n:]), hw.dense(dense)),
        (hw.block_mask(hw.causal(n), None, None, new, LENGTH), hw.causal()),
        (blocks[:, :, n // 3 :], hw.causal()),
        (None, None),
    ]
    scores = [(hw.bias(bias[:, n:]), hw.bias(bias)), (hw.softcap(2.0), hw.softcap(2.0))]
    calls = [*[(m, None, w, None) for m, w in masks], *[(None, s, None, w) for s, w in scores]]
    for mask, score, whole_mask, whole_score in calls:
        past = after(module, x[:, :n])
        out = module(x[:, n:], mask, score, past=past)
        torch.testing.assert_close(out, module(x, whole_mask, whole_score)[:, n:])


def test_an_empty_past_takes_everything():
    module, x = make(Attention), tokens()
    for mask in (hw.causal(), hw.sliding_window(4), hw.strided(3)):
        assert torch.equal(module(x, mask, past=Past()), module(x, mask))


def test_a_call_that_fails_leaves_the_past_as_it_was():
    module, x = make(Attention), tokens()
    past = after(module, x[:, :BEFORE])
    keys = past.keys_values[0]
    for mask in (hw.causal(), "causal", hw.dense(torch.ones(3, 3) > 0)):
        with pytest.raises(ArgumentError):
            module(x[:, BEFORE:], mask, past=past)
        assert past.keys_values[0] is keys
    module(x[:, BEFORE:], hw.causal(BEFORE), past=past)
    assert past.length == LENGTH


@pytest.mark.parametrize("kind", [Attention, MLA])
def test_anything_else_as_a_past_is_refused(kind):
    for past in ((None, None), True, 5):
        with pytest.raises(ArgumentError, match=r"past must be a headway.nn.Past, .*got \w+$"):
            make(kind)(tokens(), hw.causal(), past=past)


# Every value of the library, for LENGTH queries and keys.
VALUES = {
    **{type(value).__name__: value for value, _ in REFUSED.values()},
    "prefix": hw.prefix(4),
    "padding": hw.padding(torch.tensor([5, 17])),
    "document": hw.document(torch.arange(LENGTH) // 4),
    "spans": hw.spans(torch.arange(LENGTH) // 4 - 1),
    "block_table": hw.block_table(torch.rand(LENGTH, LENGTH) < 0.5, 1),
    "dense": hw.dense(torch.rand(LENGTH, LENGTH) < 0.5),
    "softcap": hw.softcap(2.0),
    "log_sigmoid": hw.log_sigmoid(-2.0),
    "bias": hw.bias(torch.randn(LENGTH, LENGTH)),
}


def test_no_value_of_the_library_is_forgotten():
    """A value whose queries count is refused, has an offset, or holds a tensor of queries."""
    names = {name for name in Mod.kinds if name.islower() and hasattr(hw, name)}
    assert names == VALUES.keys()
    at = torch.arange(12)
    for name, value in VALUES.items():
        score = [torch.randn(12, 12)] if isinstance(value, hw.Score) else []
        here, moved = (
            value(*score, torch.tensor(1), torch.tensor(2), i, at[None, :])
            for i in (at[:, None], at[:, None] + BEFORE)
        )
        depends = not torch.equal(*torch.broadcast_tensors(here, moved))
        knows = name in ("causal", "document", "spans", "dense", "block_table", "bias")
        assert depends == (isinstance(value, _FROM_ZERO) or knows), name
