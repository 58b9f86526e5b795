"""`Past`: where new queries are, and what is refused because it does not know."""

import pytest
import torch
from torch import Tensor

import headway as hw
from headway.errors import ArgumentError
from headway.inference import Cache, PagedCache
from headway.nn import MLA, Attention, Past, Rotary

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
        outs.append(module(part, hw.causal(), past=past))
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
            outs.append(step(part, hw.causal(), past=past))
    torch.testing.assert_close(torch.cat(outs, 1), expected)


# -- positions are global --------------------------------------------------------------------------

table, ids = torch.randn(HEADS, 9, dtype=torch.float64), torch.randint(3, (2, LENGTH))
VALUES = [
    hw.causal(), hw.causal(-1), hw.causal() & hw.sliding_window(4), hw.dilated(2, 3), hw.strided(4),
    hw.chunked(4), hw.block_causal(4), hw.global_tokens(2), hw.neighborhood(LENGTH, 5),
    hw.tiled(hw.causal(), (3, 7), (1, 7)), hw.causal() | hw.prefix(12), hw.document(ids),
    hw.causal() & hw.padding(torch.tensor([17, 21])), hw.dense(torch.rand(2, 1, LENGTH, LENGTH) < 0.7),
    hw.tree(torch.tensor([-1, 0, 0, 1, 2, 2]), LENGTH - 6), None,
    hw.alibi(HEADS), hw.relative_bias(table), hw.t5_bias(torch.randn(8, HEADS), 12),
    hw.window_bias(torch.randn(5 * 13, HEADS), (3, 7)), hw.bias(torch.randn(HEADS, LENGTH, LENGTH)),
    hw.softcap(2.0) >> hw.alibi(HEADS),
]  # fmt: skip


@pytest.mark.parametrize("kind", [Attention, MLA])
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_the_mask_and_score_of_the_whole_serve(value, kind):
    """With gradients and without, of one new token and of several."""
    module, x = make(kind), tokens()
    argument = "score" if isinstance(value, hw.Score) else "mask"
    whole = module(x, **{argument: value})
    for count in (1, LENGTH - BEFORE):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                past = after(module, x[:, :-count])
                out = module(x[:, -count:], past=past, **{argument: value})
            torch.testing.assert_close(out, whole[:, -count:])


def test_what_numbers_queries_from_zero_is_refused():
    module, x = make(Attention), tokens()
    past = after(module, x[:, :BEFORE])
    with pytest.raises(ArgumentError, match=r"causal\(9\): queries of a cache are at their global"):
        module(x[:, BEFORE:], hw.causal(BEFORE), past=past)
    with pytest.raises(ArgumentError, match=r"causal\(4\).* write causal\(\)"):
        module(x[:, BEFORE:], hw.prefix(3) | hw.causal(4), past=past)
    mask = hw.block_mask(hw.causal(), None, None, LENGTH - BEFORE, LENGTH)
    with pytest.raises(ArgumentError, match=r"past holds 9 positions .* pass its mask, causal\(\)"):
        module(x[:, BEFORE:], mask, past=past)


def test_without_gradients_a_step_copies_no_past():
    module, x = make(Attention), tokens()
    with torch.no_grad():
        past = after(module, x[:, :BEFORE])
        module(x[:, :1], hw.causal(), past=past)
        at = past.keys_values[0].data_ptr()
        for _ in range(5):
            module(x[:, :1], hw.causal(), past=past)
        assert past.keys_values[0].data_ptr() == at
    assert past.length == BEFORE + 6


@pytest.mark.parametrize("kind", [Attention, MLA])
@pytest.mark.parametrize("paged", [True, False])
def test_layers_of_a_cache(kind, paged):
    """Rows of different lengths, a prompt at once and then token by token."""
    module, x = make(kind), tokens()
    shape = (1, 12, 0) if kind is MLA else (2, 12, None)
    options = {"dtype": torch.float64}
    cache = (
        PagedCache(1, 16, 4, *shape, rows=2, **options)
        if paged else Cache(1, 2, *shape, capacity=8, **options)
    )  # fmt: skip
    lengths, outs = [LENGTH, LENGTH - 5], [[], []]
    with torch.no_grad():
        whole = module(x, hw.causal())
        cache.reserve([0, 1], [6, 1])
        first = torch.stack([x[0, :6], torch.cat((x[1, :5] * torch.nan, x[1, :1]))])
        out = module(first.nan_to_num(0), hw.causal(), past=cache[0])
        outs[0].append(out[0]), outs[1].append(out[1, 5:])
        for _ in range(LENGTH - 6):
            at = cache.row_lengths
            rows = [r for r in (0, 1) if at[r] < lengths[r]]
            step = torch.stack([x[r, min(at[r], LENGTH - 1)] for r in (0, 1)])[:, None]
            cache.reserve(rows, 1)
            out = module(step, hw.causal(), past=cache[0])
            for r in rows:
                outs[r].append(out[r])
    for r in (0, 1):
        torch.testing.assert_close(torch.cat(outs[r]), whole[r, : lengths[r]])


def test_an_empty_past_takes_everything():
    module, x = make(Attention), tokens()
    for mask in (hw.causal(), hw.sliding_window(4), hw.strided(3)):
        assert torch.equal(module(x, mask, past=Past()), module(x, mask))


def test_a_call_that_fails_leaves_the_past_as_it_was():
    module, x = make(Attention), tokens()
    past = after(module, x[:, :BEFORE])
    keys = past.keys_values[0]
    for mask in (hw.causal(3), "causal", hw.softcap(2.0)):
        with pytest.raises(ArgumentError):
            module(x[:, BEFORE:], mask, past=past)
        assert past.keys_values[0].data_ptr() == keys.data_ptr()
        assert past.length == BEFORE
    module(x[:, BEFORE:], hw.causal(), past=past)
    assert past.length == LENGTH


@pytest.mark.parametrize("kind", [Attention, MLA])
def test_anything_else_as_a_past_is_refused(kind):
    for past in ((None, None), True, 5):
        with pytest.raises(ArgumentError, match=r"past must be a headway.nn.Past, .*got \w+$"):
            make(kind)(tokens(), hw.causal(), past=past)
