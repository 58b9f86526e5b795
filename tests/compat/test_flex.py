"""Against `torch.nn.attention.flex_attention` where it can, a dense oracle where not."""

import copy
import functools
import itertools
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from torch.nn.attention.flex_attention import BlockMask as TheirBlockMask

import headway as hw
import oracle
from headway.compat import flex
from headway.errors import ArgumentError
from long import long_unless

from .variants import MASKS, SCORES, N, causal, sliding_window

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def square(mask, b, h, q_len, kv_len):
    return theirs.create_mask(mask, b, h, q_len, kv_len, device="cpu")


# -- masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_the_library_run_unchanged(name):
    make, q_len, kv_len = MASKS[name]
    mask = make()
    expected = square(mask, 2, 4, q_len, kv_len)
    assert expected.any()
    assert not expected.all()
    assert torch.equal(flex.create_mask(mask, 2, 4, q_len, kv_len, "cpu"), expected)
    blocks = flex.create_block_mask(mask, 2, 4, q_len, kv_len, "cpu", BLOCK_SIZE=8)
    reference = theirs.create_block_mask(mask, 2, 4, q_len, kv_len, "cpu", BLOCK_SIZE=8)
    assert blocks.shape == reference.shape
    assert torch.equal(blocks.to_dense(), reference.to_dense())
    q, k, v = (torch.randn(2, 4, n, 8, requires_grad=True) for n in (q_len, kv_len, kv_len))
    out = flex.flex_attention(q, k, v, block_mask=blocks)
    kept = lambda b, h, i, j: expected[b, h, i, j]
    dout = torch.randn_like(out)
    truth = oracle.attention(*(x.double() for x in (q, k, v)), mask=kept).out
    torch.testing.assert_close(out.double(), truth, rtol=1e-4, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v), dout),
        torch.autograd.grad(truth, (q, k, v), dout.double()),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", SCORES)
def test_scores_of_the_library_run_unchanged_and_train(name):
    score, learned = SCORES[name]()
    q, k, v = (torch.randn(2, 4, N, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    window = sliding_window(20)
    mask = flex.create_block_mask(window, None, None, N, N, "cpu", BLOCK_SIZE=16)
    out, aux = flex.flex_attention(
        q, k, v, score, mask, return_aux=flex.AuxRequest(lse=True, max_scores=True)
    )
    truth = oracle.attention(q, k, v, score, window)
    torch.testing.assert_close(out, truth.out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(aux.lse, truth.lse, rtol=1e-6, atol=1e-6)
    t = oracle.scores(q, k, score, window, None).t.detach()
    torch.testing.assert_close(aux.max_scores, t.amax(-1), rtol=1e-6, atol=1e-6)
    assert not aux.max_scores.requires_grad
    weights = torch.randn_like(out), torch.randn_like(aux.lse)
    inputs = [q, k, v, *learned]
    ours = torch.autograd.grad([out, aux.lse], inputs, weights)
    for a, b in zip(ours, torch.autograd.grad(truth[:2], inputs, weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# -- against PyTorch's own, which runs forward only here ------------------------------------------


def test_agrees_with_pytorchs_own_forward():
    q, k, v = torch.randn(2, 4, 200, 16), torch.randn(2, 2, 250, 16), torch.randn(2, 2, 250, 24)
    score = lambda s, b, h, i, j: s + 0.1 * (i - j)
    mask = lambda b, h, i, j: (i + 17 * b >= j) & (j % 5 != h)
    ours = flex.create_block_mask(mask, 2, 4, 200, 250, "cpu", BLOCK_SIZE=64)
    expected = theirs.create_block_mask(mask, 2, 4, 200, 250, "cpu", BLOCK_SIZE=64)
    out, lse = theirs.flex_attention(
        q, k, v, score, expected, scale=0.3, enable_gqa=True, return_aux=theirs.AuxRequest(lse=True)
    )
    for given in (ours, expected):
        result, aux = flex.flex_attention(
            q, k, v, score, given, 0.3, True, return_aux=theirs.AuxRequest(lse=True)
        )
        torch.testing.assert_close(result, out)
        torch.testing.assert_close(aux.lse, lse.lse)
        assert aux.max_scores is None


def test_return_lse_and_types_of_results():
    q = torch.randn(1, 2, 33, 8)
    assert isinstance(flex.flex_attention(q, q, q), torch.Tensor)
    _, lse = flex.flex_attention(q, q, q, return_lse=True)
    assert lse.shape == (1, 2, 33)
    assert lse.dtype == torch.float32
    _, aux = flex.flex_attention(q, q, q, return_aux=flex.AuxRequest())
    assert aux == flex.AuxOutput(None, None)
    with pytest.raises(ValueError, match="both return_lse and return_aux"):
        flex.flex_attention(q, q, q, return_lse=True, return_aux=flex.AuxRequest(lse=True))


def test_rows_that_see_nothing():
    mask = flex.create_block_mask(lambda b, h, i, j: (i != 3) & (i >= j), None, None, 9, 9, "cpu")
    q = torch.randn(1, 2, 9, 8, requires_grad=True)
    out, aux = flex.flex_attention(
        q, q, q, block_mask=mask, return_aux=flex.AuxRequest(lse=True, max_scores=True)
    )
    assert (out[:, :, 3] == 0).all()
    assert (aux.lse[:, :, 3] == -math.inf).all()
    assert (aux.max_scores[:, :, 3] == -math.inf).all()
    out.sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("ratio", [1, 3, 5])
def test_any_ratio_of_heads_any_width_one_batch_of_keys(ratio):
    q = torch.randn(3, 2 * ratio, 17, 5, requires_grad=True)
    k, v = torch.randn(1, 2, 29, 5), torch.randn(1, 2, 29, 3)
    mask = flex.create_block_mask(lambda b, h, i, j: (i + b) % 3 != j % 2, 3, None, 17, 29, "cpu")
    out = flex.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    every = [x.double().expand(3, -1, -1, -1) for x in (k, v)]
    truth = oracle.attention(q.double(), *every, mask=mask.mask_mod).out
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-5)
    out.sum().backward()


# -- BlockMask ------------------------------------------------------------------------------------


@pytest.fixture
def masks():
    mask = lambda b, h, i, j: (i >= j) & (i - j < 60 + 30 * h) | (j < 8 * b)
    return [
        m.create_block_mask(mask, 2, 3, 128, 192, "cpu", BLOCK_SIZE=(16, 32))
        for m in (flex, theirs)
    ]


def same_lists(a, b):
    for name in ("kv", "full_kv", "q", "full_q"):
        count, at = (getattr(a, f"{name}{part}") for part in ("_num_blocks", "_indices"))
        their_count, their_at = (
            getattr(b, f"{name}{part}") for part in ("_num_blocks", "_indices")
        )
        if their_count is None:
            assert count is at is None
            continue
        assert torch.equal(count, their_count)
        assert count.dtype == at.dtype == torch.int32
        live = torch.arange(at.shape[-1]) < count[..., None]
        assert torch.equal(at[live], their_at[live])


def test_block_mask_holds_what_pytorchs_holds(masks):
    ours, expected = masks
    same_lists(ours, expected)
    assert ours.shape == expected.shape == (2, 3, 128, 192)
    assert ours.numel() == expected.numel()
    assert torch.equal(ours.to_dense(), expected.to_dense())
    assert ours.BLOCK_SIZE == expected.BLOCK_SIZE
    assert ours.seq_lengths == expected.seq_lengths
    empty = 1 - expected.to_dense().double().mean().item()
    assert ours.sparsity() == pytest.approx(100 * empty)
    assert [type(x) for x in ours.as_tuple()] == [type(x) for x in expected.as_tuple()]
    assert len(ours.as_tuple(flatten=False)) == len(expected.as_tuple(flatten=False))
    assert "sparsity" in str(ours)
    assert ours.to("cpu").shape == ours.shape


def test_block_mask_adjusts_and_slices(masks):
    ours, expected = masks
    for lengths in ((100, 150), (64, 192), (128, 160)):
        same_lists(ours._adjust(*lengths), expected._adjust(*lengths))
    q, kv = torch.randn(2, 3, 100, 8), torch.randn(2, 3, 150, 8)
    cut = flex.flex_attention(q, kv, kv, block_mask=ours._adjust(100, 150))
    truth = oracle.attention(q, kv, kv, mask=ours.mask_mod).out
    torch.testing.assert_close(cut, truth, rtol=1e-4, atol=1e-5)
    rows, whole_q, whole_kv = torch.tensor([3, 0]), *torch.randn(2, 2, 3, 192, 8)
    whole_q = whole_q[:, :, :128]
    for index in (1, (0, 2), (slice(0, 1), slice(1, 3)), (0, 1, slice(2, 5)), (0, 1, rows)):
        part, reference = ours[index], expected[index]
        assert part.shape == reference.shape
        same_lists(part, reference)
        with pytest.raises(RuntimeError, match="sliced BlockMask"):
            flex.flex_attention(whole_q, whole_kv, whole_kv, block_mask=part)
        with pytest.raises(RuntimeError, match="sliced BlockMask"):  # whatever the lengths
            flex.flex_attention(whole_q[:, :, :5], whole_kv, whole_kv, block_mask=part)


def test_a_sliced_mask_with_its_own_mask_is_a_decode_step(masks):
    ours, _ = masks
    at = 70  # one query, at this position
    row = ours[:, :, at // 16]
    row.mask_mod = lambda b, h, i, j: ours.mask_mod(b, h, i + at, j)
    row.seq_lengths = (1, 192)
    q, kv = torch.randn(2, 3, 128, 8), torch.randn(2, 3, 192, 8)
    step = flex.flex_attention(q[:, :, at : at + 1], kv, kv, block_mask=row)
    whole = flex.flex_attention(q, kv, kv, block_mask=ours)
    torch.testing.assert_close(step[:, :, 0], whole[:, :, at])


def test_lists_of_blocks_rule_whatever_the_mask_says():
    """Data-dependent sparsity: the lists skip blocks that the mask would keep."""
    state = torch.randint(0, 3, (2, 1, 6, 7))
    lists = []
    for kind in (1, 2):
        lists += theirs._dense_to_ordered((state == kind).to(torch.int8))
    mask = lambda b, h, i, j: (i + j) % 3 != 0
    every = state.repeat_interleave(16, 2).repeat_interleave(32, 3)[:, :, :90, :200]
    i, j = torch.arange(90)[:, None], torch.arange(200)
    kept = (every == 2) | ((every == 1) & mask(0, 0, i, j))
    q, kv = torch.randn(2, 2, 90, 8), torch.randn(2, 2, 200, 8)
    truth = oracle.attention(q, kv, kv, mask=lambda b, h, i, j: kept[b, 0, i, j]).out
    for kind in (flex.BlockMask, TheirBlockMask):
        blocks = kind.from_kv_blocks(
            *lists, BLOCK_SIZE=(16, 32), mask_mod=mask, seq_lengths=(90, 200)
        )
        out = flex.flex_attention(q, kv, kv, block_mask=blocks)
        torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-5)
    ours = flex.BlockMask.from_kv_blocks(*lists[:2], BLOCK_SIZE=(16, 32))
    assert ours.seq_lengths == (96, 224)
    assert ours.full_kv_num_blocks is None


def kept_by(state, mask, block, lengths):
    """The square that full and partial blocks leave of a mask."""
    every = state.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)
    every = every[..., : lengths[0], : lengths[1]]
    i, j = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])
    return (every == 2) | ((every == 1) & mask(0, 0, i, j))


def compact(state, kind, room=0):
    """Lists with no more columns than the fullest row needs, and some."""
    num, indices = theirs._dense_to_ordered((state == kind).to(torch.int8))
    return num, indices[..., : int(num.max()) + room].contiguous()


@pytest.mark.parametrize(
    ("seed", "room"), long_unless([(0, 0), (1, 1)], itertools.product(range(4), (0, 1)))
)
def test_compact_lists(seed, room):
    """Fewer columns than there are blocks, some of them none at all."""
    torch.manual_seed(seed)
    state = torch.randint(0, 3, (2, 1, 6, 7)) * (torch.rand(2, 1, 6, 7) < 0.4)
    lists = [*compact(state, 1, room), *compact(state, 2, room)]
    kept = kept_by(state, causal, (16, 32), (90, 200))
    q, kv = torch.randn(2, 2, 90, 8), torch.randn(2, 2, 200, 8)
    truth = oracle.attention(q, kv, kv, mask=lambda b, h, i, j: kept[b, 0, i, j]).out
    more = {"BLOCK_SIZE": (16, 32), "mask_mod": causal, "seq_lengths": (90, 200)}
    ours = flex.BlockMask.from_kv_blocks(*lists, **more)
    made = flex.BlockMask((90, 200), *lists, BLOCK_SIZE=(16, 32), mask_mod=causal)
    pytorchs = TheirBlockMask((90, 200), *lists, *[None] * 4, BLOCK_SIZE=(16, 32), mask_mod=causal)
    assert torch.equal(ours.to_dense(), (state > 0).int())
    assert ours.q_indices.shape == (2, 1, 7, 6)
    for mask in (ours, made, pytorchs, copy.deepcopy(ours)):
        out = flex.flex_attention(q, kv, kv, block_mask=mask)
        torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    compiled = torch.compile(flex.flex_attention, fullgraph=True, backend="aot_eager")
    for mask in (ours, pytorchs):
        torch.testing.assert_close(
            compiled(q, kv, kv, block_mask=mask), truth, rtol=1e-4, atol=1e-5
        )


def test_lists_that_name_a_block_too_many_are_refused():
    num, indices = torch.ones(1, 1, 3, dtype=torch.int32), torch.arange(1, 4).int().view(1, 1, 3, 1)
    with pytest.raises(RuntimeError, match="names 3, but there are 3"):
        flex.BlockMask.from_kv_blocks(num, indices, BLOCK_SIZE=32, seq_lengths=(96, 96))


def drop_last(mask):
    mask.kv_num_blocks.sub_(1).clamp_(min=0)


def set_none(mask):
    mask.full_kv_num_blocks = torch.zeros_like(mask.full_kv_num_blocks)


def no_full(mask):
    mask.full_kv_num_blocks, mask.full_kv_indices = None, None


def all_partial(mask):
    num, indices = mask.full_kv_num_blocks.clone(), mask.full_kv_indices.clone()
    set_none(mask)
    mask.kv_num_blocks = num
    mask.kv_indices = indices


def swap(mask):
    mask.kv_indices, mask.full_kv_indices = mask.full_kv_indices, mask.kv_indices
    mask.kv_num_blocks, mask.full_kv_num_blocks = mask.full_kv_num_blocks, mask.kv_num_blocks


def one_index(mask):
    mask.kv_indices[..., 0] = 1
    mask.kv_num_blocks[..., 0] = 1


LIST_WRITES = {f.__name__: f for f in (drop_last, set_none, no_full, all_partial, swap, one_index)}


@pytest.mark.parametrize("write", LIST_WRITES)
@pytest.mark.parametrize("made", ["create_block_mask", "from_kv_blocks", "sliced", "copied"])
def test_writes_to_lists_take_effect(made, write):
    """As in the original: what the lists of keys say is visited, from then on."""
    masks = []
    for library in (flex, theirs):
        mask = library.create_block_mask(causal, 1, 2, 96, 96, "cpu", BLOCK_SIZE=16)
        if made == "from_kv_blocks":
            lists = [getattr(mask, name).clone() for name in (
                "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")]  # fmt: skip
            mask = library.BlockMask.from_kv_blocks(*lists, 16, causal, (96, 96))
        if made == "sliced":
            mask = mask[:, :1]
            mask.mask_mod = causal
        masks.append(copy.deepcopy(mask) if made == "copied" else mask)
    q = torch.randn(1, masks[0].shape[1], 96, 8, requires_grad=True)
    before = flex.flex_attention(q, q, q, block_mask=masks[0])
    for mask in masks:
        LIST_WRITES[write](mask)
    out, truth = (flex.flex_attention(q, q, q, block_mask=mask) for mask in masks)
    torch.testing.assert_close(out, truth)
    assert not torch.equal(out, before)
    kept = square_of(masks[1], causal)
    dense = oracle.attention(q, q, q, mask=lambda b, h, i, j: kept[0, h, i, j]).out
    torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-5)
    grads = [torch.autograd.grad(x.square().sum(), q)[0] for x in (out, dense)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)
    assert torch.equal(masks[0].to_dense(), masks[1].to_dense())
    assert torch.equal(copy.deepcopy(masks[0]).to_dense(), masks[1].to_dense())


def square_of(mask, mask_mod):
    """What the lists of PyTorch's block mask keep."""
    ordered = [
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    ]
    n = mask.kv_indices.shape[-1]
    state = torch.zeros(*mask.kv_indices.shape[:3], n, dtype=torch.int64)
    for kind, (num, indices) in enumerate(ordered, 1):
        for at in [] if num is None else torch.cartesian_prod(*map(torch.arange, num.shape)):
            b, h, row = at.tolist()
            for column in indices[b, h, row, : int(num[b, h, row])].tolist():
                state[b, h, row, column] = max(int(state[b, h, row, column]), kind)
    return kept_by(state, mask_mod, mask.BLOCK_SIZE, mask.seq_lengths)


def test_writes_to_the_lists_that_a_mask_was_made_from_take_effect():
    mask = flex.create_block_mask(causal, 1, 1, 96, 96, "cpu", BLOCK_SIZE=16)
    num, indices = mask.kv_num_blocks.clone(), mask.kv_indices.clone()
    ours = flex.BlockMask.from_kv_blocks(num, indices, BLOCK_SIZE=16)
    assert ours.kv_num_blocks is num
    q = torch.randn(1, 1, 96, 8)
    assert flex.flex_attention(q, q, q, block_mask=ours).abs().sum() > 0
    compiled = torch.compile(flex.flex_attention, fullgraph=True, backend="aot_eager")
    assert compiled(q, q, q, block_mask=ours).abs().sum() > 0
    num.zero_()
    assert flex.flex_attention(q, q, q, block_mask=ours).abs().sum() == 0
    assert compiled(q, q, q, block_mask=ours).abs().sum() == 0
    assert ours.sparsity() == 100


def test_writes_in_inference_mode_take_effect():
    with torch.inference_mode():
        num = torch.ones(1, 1, 2, dtype=torch.int32)
        indices = torch.arange(2, dtype=torch.int32).view(1, 1, 2, 1)
        ours = flex.BlockMask.from_kv_blocks(num, indices, BLOCK_SIZE=8, seq_lengths=(16, 16))
        q = torch.randn(1, 1, 16, 8)
        assert flex.flex_attention(q, q, q, block_mask=ours).abs().sum() > 0
        num.zero_()
        assert flex.flex_attention(q, q, q, block_mask=ours).abs().sum() == 0


def test_lists_of_queries_that_say_something_else_are_refused():
    make = lambda: flex.create_block_mask(causal, 1, 1, 96, 96, "cpu", BLOCK_SIZE=16)
    mask = make()
    mask.q_num_blocks.zero_()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="q_num_blocks: the lists of queries"):
            flex.flex_attention(*[torch.randn(1, 1, 96, 8)] * 3, block_mask=mask)
    mask = make()
    lists = mask.as_tuple(flatten=False)[1:9]
    same = flex.BlockMask((96, 96), *lists, BLOCK_SIZE=(16, 16), mask_mod=causal)
    assert torch.equal(same.to_dense(), mask.to_dense())
    lists = [*lists[:4], torch.zeros_like(lists[4]), *lists[5:]]
    with pytest.raises(RuntimeError, match="q_num_blocks: the lists of queries"):
        flex.BlockMask((96, 96), *lists, BLOCK_SIZE=(16, 16), mask_mod=causal).to_dense()
    former = mask.q_num_blocks
    mask.kv_num_blocks.zero_()
    assert mask.q_num_blocks.sum() == 0  # worked out anew
    former.add_(1)
    with pytest.raises(RuntimeError, match=r"q_num_blocks was written to, .*: read it again"):
        mask.to_dense()
    with pytest.raises(TypeError, match="kv_indices must be a tensor"):
        mask.kv_indices = None


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("combine", ["and_masks", "or_masks"])
def test_combinations_take_a_name(combine, count):
    def band(b, h, i, j):
        """A band."""
        return (i - j).abs() < 5

    combine = getattr(flex, combine)
    masks = [causal, band, hw.sliding_window(9)][:count]
    one, other = combine(*masks), combine(*masks)
    assert isinstance(one.__name__, str)
    before = [getattr(flex.noop_mask, "__name__", None), causal.__name__, repr(one)]
    one.__name__ = "window"
    assert one.__name__ == "window"
    assert other.__name__ != "window"
    assert [flex.noop_mask.__name__, causal.__name__] == before[:2]
    functools.wraps(band)(other)
    assert (other.__name__, other.__doc__) == ("band", "A band.")
    named = functools.wraps(one)(lambda b, h, i, j: one(b, h, i, j))
    assert named.__name__ == "window"
    blocks = flex.create_block_mask(one, None, None, 64, 64, "cpu", BLOCK_SIZE=16)
    assert blocks.mask_mod.__name__ == "window"
    if count > 1:
        assert one == other  # a name is no part of what they are
        assert hash(one) == hash(other)
        assert repr(one) == before[2]
        assert copy.deepcopy(one).__name__ == "window"
        with pytest.raises(AttributeError, match="first"):
            one.first = causal
        with pytest.raises(AttributeError, match="nonsense"):
            one.nonsense  # noqa: B018


def test_pytorchs_block_mask_is_read_again_when_it_changes():
    expected = theirs.create_block_mask(causal, None, None, 96, 96, "cpu", BLOCK_SIZE=32)
    q = torch.randn(1, 1, 96, 8)
    first = flex.flex_attention(q, q, q, block_mask=expected)
    assert torch.equal(flex.flex_attention(q, q, q, block_mask=expected), first)
    expected.mask_mod = sliding_window(3)
    expected.full_kv_num_blocks.zero_()
    second = flex.flex_attention(q, q, q, block_mask=expected)
    mask = lambda b, h, i, j: sliding_window(3)(b, h, i, j) & (i // 32 == j // 32)
    torch.testing.assert_close(
        second, oracle.attention(q, q, q, mask=mask).out, rtol=1e-4, atol=1e-5
    )


def test_full_blocks_need_not_be_separate():
    kwargs = {"BLOCK_SIZE": 16, "device": "cpu"}
    mask = flex.create_block_mask(causal, None, None, 64, 64, **kwargs, separate_full_blocks=False)
    same_lists(
        mask,
        theirs.create_block_mask(causal, None, None, 64, 64, **kwargs, separate_full_blocks=False),
    )
    assert mask.full_kv_num_blocks is None
    q = torch.randn(1, 2, 64, 8)
    torch.testing.assert_close(
        flex.flex_attention(q, q, q, block_mask=mask), hw.attention(q, q, q, mask=hw.causal())
    )


@pytest.mark.parametrize("lengths", [(300, 300), (256, 300), (300, 256), (5, 257), (1, 1)], ids=str)
@pytest.mark.parametrize("separate", [True, False])
def test_lists_of_ragged_lengths(lengths, separate):
    """PyTorch pads the mask: a block that a length cuts is partial, whatever the mask keeps."""
    options = {"BLOCK_SIZE": (64, 32), "device": "cpu", "separate_full_blocks": separate}
    for mask in (causal, flex.noop_mask, sliding_window(40), lambda b, h, i, j: h + b + j > i):
        ours, expected = (
            m.create_block_mask(mask, 2, 3, *map(np.int64, lengths), **options)
            for m in (flex, theirs)
        )
        same_lists(ours, expected)
        for cut in ((3, 250), (64, 32), (1, 1)):
            if cut[0] <= lengths[0] and cut[1] <= lengths[1]:
                try:
                    crop = expected._adjust(*cut)
                except IndexError:  # PyTorch reads entries past a row's blocks
                    continue
                same_lists(ours._adjust(*cut), crop)
        same_lists(ours[1:, 2], expected[1:, 2])
        q, kv = torch.randn(2, 3, lengths[0], 8), torch.randn(2, 3, lengths[1], 8)
        out = flex.flex_attention(q, kv, kv, block_mask=ours)
        truth = oracle.attention(q, kv, kv, mask=mask).out
        torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-5)
        again = flex.BlockMask(*ours.as_tuple(False)[:9],
                               BLOCK_SIZE=ours.BLOCK_SIZE, mask_mod=mask)  # fmt: skip
        torch.testing.assert_close(flex.flex_attention(q, kv, kv, block_mask=again), out)


def test_lists_that_are_none():
    """A block mask has the lists that PyTorch's has, also of parts, and where they are set."""
    num, at = torch.tensor([[[1, 2]]]).int(), torch.tensor([[[[0, 1], [0, 1]]]]).int()
    for options in (
        {},
        {"compute_q_blocks": False},
        {"full_kv_num_blocks": num * 0, "full_kv_indices": at},
    ):
        ours, expected = (
            kind.from_kv_blocks(num, at, BLOCK_SIZE=16, **options)
            for kind in (flex.BlockMask, TheirBlockMask)
        )
        for part in (
            lambda m: m,
            lambda m: m._adjust(20, 30),
            lambda m: m[:, :, 1:],
            lambda m: m.to("cpu"),
        ):
            a, b = part(ours), part(expected)
            same_lists(a, b)
            assert [x is None for x in a.as_tuple()] == [x is None for x in b.as_tuple()]
    copy = pickle.loads(
        pickle.dumps(
            flex.BlockMask.from_kv_blocks(num, at, mask_mod=flex.noop_mask, compute_q_blocks=False)
        )
    )
    assert copy.q_indices is None
    assert copy.full_kv_indices is None
    ours = flex.BlockMask.from_kv_blocks(num, at, BLOCK_SIZE=16, compute_q_blocks=False)
    ours.full_kv_num_blocks, ours.full_kv_indices = torch.tensor([[[0, 1]]]).int(), at
    ours.q_num_blocks = torch.tensor([[[2, 1]]]).int() - torch.tensor([[[1, 0]]]).int()
    ours.kv_num_blocks = torch.tensor([[[1, 0]]]).int()
    with pytest.raises(RuntimeError, match="lists of queries name other blocks"):
        ours.tiles  # noqa: B018
    for lists in ((num, at, num, None), (num, at, None, None, num, at, num, None)):
        with pytest.raises(AssertionError, match="must be both provided or omitted"):
            flex.BlockMask((32, 32), *lists, *[None] * (4 - len(lists)), BLOCK_SIZE=(16, 16))


def test_flattened_as_pytorchs():
    ours = flex.create_block_mask(causal, 1, 2, 100, 64, "cpu", 32)
    expected = theirs.create_block_mask(causal, 1, 2, 100, 64, "cpu", 32)
    assert ours._TENSOR_ATTRS == expected._TENSOR_ATTRS
    assert ours._CONTEXT_ATTRS == expected._CONTEXT_ATTRS
    for name in ("dq_write_order", "dq_write_order_full", "dq_kv_order", "dq_kv_order_spt"):
        assert getattr(ours, name) is getattr(expected, name) is None
        setattr(ours, name, None)
        with pytest.raises(ValueError, match="schedule FlashAttention's kernels"):
            setattr(ours, name, torch.zeros(1))
    assert ours._dq_kv_order() is expected._dq_kv_order() is None
    leaves, context = ours._flatten()
    assert len(leaves) == len(expected._flatten()[0])
    with_keys, _ = ours._flatten_with_keys()
    assert [key for key, _ in with_keys] == [key for key, _ in expected._flatten_with_keys()[0]]
    again = flex.BlockMask._unflatten(leaves, context)
    same_lists(again, expected)
    assert again.mask_mod is causal
    assert again.seq_lengths == (100, 64)


def test_names_that_others_import():
    from headway.compat.flex import FlexKernelOptions, _mask_mod_signature, _vmap_for_bhqkv

    assert FlexKernelOptions is theirs.FlexKernelOptions
    assert _mask_mod_signature is theirs._mask_mod_signature
    assert _vmap_for_bhqkv is theirs._vmap_for_bhqkv
    q = torch.randn(1, 2, 9, 4)
    empty = flex._create_empty_block_mask(q, q)
    assert torch.equal(flex.flex_attention(q, q, q, block_mask=empty), hw.attention(q, q, q))
    for name in ("_no_such_name", "no_such_name", "__wrapped__"):
        with pytest.raises(AttributeError, match=name):
            getattr(flex, name)


def test_a_mask_of_more_rows_than_q():
    """FlexAttention takes it, whole or adjusted, if all rows have the same blocks."""
    q, kv = torch.randn(1, 2, 50, 8), torch.randn(1, 2, 70, 8)
    want = hw.attention(q, kv, kv, mask=hw.causal())
    whole = flex.create_block_mask(causal, 4, 2, 50, 70, "cpu", 16)
    longer = flex.create_block_mask(causal, 4, 2, 90, 96, "cpu", 16)
    lists = flex.BlockMask(*whole.as_tuple(False)[:9], BLOCK_SIZE=(16, 16), mask_mod=causal)
    for mask in (whole, longer._adjust(50, 70), whole._adjust(50, 70), lists):
        torch.testing.assert_close(flex.flex_attention(q, kv, kv, block_mask=mask), want)
    each = flex.create_block_mask(lambda b, h, i, j: j <= i + b, 4, 2, 50, 70, "cpu", 16)
    for mask in (each, each._adjust(50, 70)):
        with pytest.raises(RuntimeError, match="batch 4"):
            flex.flex_attention(q, kv, kv, block_mask=mask)
    rows = flex.create_block_mask(lambda b, h, i, j: j <= i + 0 * b, 4, 2, 64, 64, "cpu", 16)
    q, kv = torch.randn(4, 2, 60, 8), torch.randn(4, 2, 60, 8)
    torch.testing.assert_close(
        flex.flex_attention(q, kv, kv, block_mask=rows._adjust(60, 60)),
        hw.attention(q, kv, kv, mask=hw.causal()),
    )


def test_options_that_conflict():
    q = torch.randn(1, 1, 8, 8)
    call = lambda options, **more: flex.flex_attention(q, q, q, kernel_options=options, **more)
    with pytest.raises(RuntimeError, match="leave out FORCE_USE_FLEX_ATTENTION"):
        call({"BACKEND": "FLASH", "FORCE_USE_FLEX_ATTENTION": True})
    with pytest.raises(NotImplementedError, match="does not return max_scores"):
        call({"BACKEND": "FLASH"}, return_aux=flex.AuxRequest(max_scores=True))
    for name in ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX"):
        with pytest.raises(AssertionError, match=f"{name} follow"):
            call({name: True})


def test_lengths_are_integers():
    for wrong in (8.0, True, torch.tensor(8), "8", None):
        with pytest.raises(TypeError, match="Q_LEN must be an integer"):
            flex.create_block_mask(causal, None, None, wrong, 8, "cpu")
        with pytest.raises(TypeError, match="KV_LEN must be an integer"):
            flex.create_mask(causal, None, None, 8, wrong, "cpu")


def test_and_or_noop():
    a, b = causal, sliding_window(5)
    for name in ("and_masks", "or_masks"):
        for masks in ((a, b), (a, b, MASKS["prefix_lm"][0]()), (a,), (hw.causal(), b)):
            ours, expected = (getattr(m, name)(*masks) for m in (flex, theirs))
            assert torch.equal(
                flex.create_mask(ours, 1, 1, 20, 20, "cpu"), square(expected, 1, 1, 20, 20)
            )
            assert torch.equal(
                flex.create_mask(expected, 1, 1, 20, 20, "cpu"), square(ours, 1, 1, 20, 20)
            )
    for mask in (flex.noop_mask, theirs.noop_mask, flex.and_masks(), theirs.and_masks()):
        assert flex.create_mask(mask, 1, 1, 300, 300, "cpu").all()
        blocks = flex.create_block_mask(mask, None, None, 300, 300, "cpu")
        same_lists(blocks, theirs.create_block_mask(mask, None, None, 300, 300, "cpu"))
    assert not flex.create_mask(flex.or_masks(), 1, 1, 4, 4, "cpu").any()
    with pytest.raises(RuntimeError, match="callable"):
        flex.and_masks(a, 3)


def test_create_mask_of_a_score():
    score = lambda s, b, h, i, j: torch.where(i >= j, s + h, -math.inf)
    assert torch.equal(flex.create_mask(score, 1, 2, 9, 9, "cpu"), square(score, 1, 2, 9, 9))


# -- kernel_options, bad input --------------------------------------------------------------------


def test_kernel_options_are_named_once_and_unknown_ones_refused():
    flex._warned.clear()
    q = torch.randn(1, 1, 8, 8)
    options = {"BLOCK_M": 64, "fwd_num_warps": 4}
    with pytest.warns(UserWarning, match="BLOCK_M, fwd_num_warps"):
        flex.flex_attention(q, q, q, kernel_options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flex.flex_attention(q, q, q, kernel_options=options)
        flex.flex_attention(q, q, q, kernel_options={})
    with pytest.raises(ValueError, match="BLOCK_X"):
        flex.flex_attention(q, q, q, kernel_options={"BLOCK_X": 1})
    with pytest.raises(ValueError, match="BACKEND='FASTEST'"):
        flex.flex_attention(q, q, q, kernel_options={"BACKEND": "FASTEST"})
    with pytest.raises(TypeError, match="dict"):
        flex.flex_attention(q, q, q, kernel_options=[1])


Q = torch.randn(2, 4, 32, 16)
CAUSAL = {m: m.create_block_mask(causal, None, None, 32, 32, device="cpu") for m in (flex, theirs)}
BAD_CALLS = {
    "1-D": lambda m: m.flex_attention(Q[0, 0, 0], Q[0, 0, 0], Q[0, 0, 0]),
    "3-D": lambda m: m.flex_attention(Q[0], Q[0], Q[0]),
    "widths": lambda m: m.flex_attention(Q, torch.randn(2, 4, 32, 17), Q),
    "lengths": lambda m: m.flex_attention(Q, torch.randn(2, 4, 31, 16), Q),
    "batch": lambda m: m.flex_attention(Q, Q[:1], Q[:1]),
    "batch of mask": lambda m: m.flex_attention(Q, Q[:1], Q[:1], block_mask=CAUSAL[m]),
    "heads": lambda m: m.flex_attention(Q, Q[:, :2], Q[:, :2]),
    "ratio": lambda m: m.flex_attention(Q, Q[:, :3], Q[:, :3], enable_gqa=True),
    "not a tensor": lambda m: m.flex_attention([1], Q, Q),
    "mask function": lambda m: m.flex_attention(Q, Q, Q, block_mask=causal),
    "mask tensor": lambda m: m.flex_attention(Q, Q, Q, block_mask=torch.ones(32, 32)),
    "sliced": lambda m: m.flex_attention(Q, Q, Q, block_mask=CAUSAL[m][0]),
    "shorter": lambda m: m.flex_attention(*[Q[:, :, :9]] * 3, block_mask=CAUSAL[m]),
    "longer": lambda m: m.flex_attention(*[torch.randn(2, 4, 40, 16)] * 3, block_mask=CAUSAL[m]),
    "score of no function": lambda m: m.flex_attention(Q, Q, Q, 3),
    "score of a mask": lambda m: m.flex_attention(Q, Q, Q, causal),
    "mask of a score": lambda m: m.create_block_mask(lambda s, b, h, i, j: i, 1, 1, 8, 8, "cpu"),
    "three arguments": lambda m: m.create_block_mask(lambda b, h, i: i > 0, 1, 1, 8, 8, "cpu"),
    "not bool": lambda m: m.create_block_mask(lambda b, h, i, j: i, 1, 1, 8, 8, "cpu"),
    "a decision": lambda m: m.create_block_mask(
        lambda b, h, i, j: i >= j if i > 3 else j > i, 1, 1, 8, 8, "cpu"
    ),
    "mask of no function": lambda m: m.create_block_mask(3, 1, 1, 8, 8, "cpu"),
    "negative length": lambda m: m.create_block_mask(causal, 1, 1, -8, 8, "cpu"),
    "length of text": lambda m: m.create_block_mask(causal, 1, 1, "8", 8, "cpu"),
    "order": lambda m: m.create_block_mask(causal, 1, 1, 8, 8, "cpu", dq_kv_order=3),
    "one list": lambda m: m.BlockMask.from_kv_blocks(
        torch.ones(1, 1, 2), torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2)
    ),
    "flat lists": lambda m: m.BlockMask.from_kv_blocks(torch.ones(()), torch.ones(2)),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_refused_with_the_originals_error_type(name):
    with pytest.raises(Exception, match=r"\w") as expected:
        BAD_CALLS[name](theirs)
    # The compiler wraps what the original raises while it traces.
    kind = RuntimeError if isinstance(expected.value, RuntimeError) else expected.type
    with pytest.raises(kind, match=r"\w"):
        BAD_CALLS[name](flex)


def test_what_serves_other_kernels_is_refused_by_name():
    with pytest.raises(ArgumentError, match="compute_dq_write_order"):
        flex.create_block_mask(causal, 1, 1, 8, 8, "cpu", compute_dq_write_order=True)


# -- torch.compile --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [flex, theirs], ids=["ours", "pytorch's"])
def test_compiles_whole(kind):
    blocks = kind.create_block_mask(sliding_window(9), None, None, 70, 70, "cpu", BLOCK_SIZE=32)
    table = torch.randn(2, 139, requires_grad=True)
    score = lambda s, b, h, i, j: s + table[h, i - j + 69]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(q):
        out, aux = flex.flex_attention(q, q, q, score, blocks, return_aux=flex.AuxRequest(lse=True))
        return out.sum() + aux.lse.sum()

    q = torch.randn(1, 2, 70, 8, requires_grad=True)
    f(q).backward()
    compiled = q.grad.clone(), table.grad.clone()
    q.grad = table.grad = None
    out, lse, *_ = oracle.attention(q, q, q, score, sliding_window(9))
    (out.sum() + lse.sum()).backward()
    for a, b in zip(compiled, (q.grad, table.grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
