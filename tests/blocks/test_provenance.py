"""A block mask whose mask is no longer what its tiles were found for is refused, never mixed."""

import copy
import gc
import pickle
import random
import sys
import weakref
from unittest import mock

import pytest
import torch

import headway as hw
import headway.inference
from headway import caches
from headway.blocks import provenance
from headway.compat import flex
from headway.errors import ArgumentError

LENGTH, TILE = 40, (8, 8)
WRITTEN = (
    r"captures a tensor \(40,\) torch.int64 that was written to since .*build the block mask again"
)


@pytest.fixture
def q():
    return torch.randn(2, 2, LENGTH, 8)


def documents(length: int = 7) -> torch.Tensor:
    return torch.arange(LENGTH) // length


def of_function(ids):
    return lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)


MASKS = {
    "value": lambda ids: hw.causal() & hw.document(ids),
    "function": of_function,
    "both": lambda ids: hw.causal() & of_function(ids),
}
WAYS = {
    "itself": lambda m: m,
    "part": lambda m: m[:, :, 0:5],
    "tiles": lambda m: m.retile((16, 16)),
    "and": lambda m: m & m,
    "or": lambda m: m | hw.block_mask(hw.sliding_window(2), 1, 1, LENGTH, LENGTH, tile=TILE),
    "device": lambda m: m.to("cpu"),
    "copy": copy.copy,
    "tree": lambda m: torch.utils._pytree.tree_map(lambda t: t, m),
}


def build(mask, **options):
    return hw.block_mask(mask, 1, 1, LENGTH, LENGTH, tile=TILE, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MASKS)
def test_written_ids_are_refused(name, way, q):
    ids = documents()
    mask = MASKS[name](ids)
    made = WAYS[way](build(mask))
    right = hw.attention(q, q, q, None, mask)
    for _ in range(2):  # the second is known
        got = hw.attention(q, q, q, None, made)
        if way not in ("part", "or"):
            torch.testing.assert_close(got, right)
    ids.copy_(documents(11))
    for _ in range(2):
        with pytest.raises(ArgumentError, match=WRITTEN):
            hw.attention(q, q, q, None, made)
    torch.testing.assert_close(
        hw.attention(q, q, q, None, build(mask)), hw.attention(q, q, q, None, mask)
    )


@pytest.mark.parametrize("way", ["part", "and", "or", "device", "pickle", "deepcopy", "save"])
def test_nothing_is_made_of_one_that_is_no_longer_right(way, tmp_path):
    ids = documents()
    made = build(hw.causal() & hw.document(ids))
    ways = WAYS | {
        "pickle": pickle.dumps, "deepcopy": copy.deepcopy, "save": lambda m: m.save(tmp_path / "m")
    }  # fmt: skip
    ids.add_(0)
    with pytest.raises(ArgumentError, match=WRITTEN):
        ways[way](made)


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "save"])
def test_copies_have_ids_of_their_own(way, q, tmp_path):
    """Which may have been written to before the block mask was built."""
    ids = documents()
    ids.add_(1)
    made = build(hw.causal() & hw.document(ids))
    right = hw.attention(q, q, q, None, made)
    if way == "save":
        made.save(tmp_path / "m")
        again = hw.BlockMask.load(tmp_path / "m")
    else:
        again = pickle.loads(pickle.dumps(made)) if way == "pickle" else copy.deepcopy(made)
    ids.zero_()
    assert torch.equal(hw.attention(q, q, q, None, again), right)
    again.mask.second.ids.zero_()
    with pytest.raises(ArgumentError, match=WRITTEN):
        hw.attention(q, q, q, None, again)


def test_other_captured_objects_are_refused(q):
    ids, width = documents(), 5
    by_ids, by_width = (lambda b, h, i, j: ids[i] == ids[j]), (lambda b, h, i, j: i - j < width)
    made = build(by_ids), build(by_width)
    for mask in made:
        hw.attention(q, q, q, None, mask)
    ids, width = documents(11), 30
    with pytest.raises(
        ArgumentError, match=r"captures another tensor .*build the block mask again"
    ):
        hw.attention(q, q, q, None, made[0])
    with pytest.raises(ArgumentError, match="it captures another number or function"):
        hw.attention(q, q, q, None, made[1])


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_programs_ask_when_they_are_run(q, backend):
    ids = documents()
    mask = hw.causal() & hw.document(ids)
    made = build(mask)
    call = torch.compile(lambda m: hw.attention(q, q, q, None, m), backend=backend, fullgraph=True)
    torch.testing.assert_close(call(made), hw.attention(q, q, q, None, mask))
    ids.copy_(documents(11))
    with pytest.raises(ArgumentError, match=WRITTEN):
        call(made)
    torch.testing.assert_close(call(build(mask)), hw.attention(q, q, q, None, mask))


def test_tiles_of_the_callers_own_are_the_callers(q):
    """No one knows what decided them: a partial tile is looked at, whatever its mask has become."""
    ids = documents()
    mask = hw.document(ids)
    made = build(mask)
    own = hw.BlockMask(mask, made.shape, made.tile, made.tiles)
    ids.add_(0)
    assert torch.equal(hw.attention(q, q, q, None, own), hw.attention(q, q, q, None, mask))


@pytest.mark.parametrize("way", [*WAYS, "compiled"])
@pytest.mark.parametrize("name", MASKS)
def test_inference_tensors_have_no_counter(name, way, q):
    """They are compared with what they held."""
    with torch.inference_mode():
        ids = documents()
        mask = MASKS[name](ids)
        built = build(mask)
        made = built if way == "compiled" else WAYS[way](built)
        inside = hw.attention(q, q, q, None, made)
    call = lambda m: hw.attention(q, q, q, None, m)
    if way == "compiled":
        call = torch.compile(call, backend="eager", fullgraph=name == "value")
    for _ in range(2):
        torch.testing.assert_close(call(made), inside.clone())
    if way not in ("part", "or"):
        torch.testing.assert_close(call(made), hw.attention(q, q, q, None, mask))
    with torch.inference_mode():
        ids.copy_(documents(11))
        for _ in range(2):
            with pytest.raises(ArgumentError, match=WRITTEN):
                call(made)
        ids.copy_(documents())
        call(made)  # as it was
        if way == "compiled":
            return
        ids.resize_(LENGTH + 1).copy_(torch.arange(LENGTH + 1))
    with pytest.raises(ArgumentError, match=r"\(41,\)"):  # a library value says so itself
        call(made)


def test_inference_tensors_of_any_kind_are_compared(q):
    for dtype in (torch.bool, torch.int8, torch.float32, torch.bfloat16):
        with torch.inference_mode():
            t = torch.ones(LENGTH, LENGTH).to(dtype)
            if dtype.is_floating_point:
                t[3, 4] = torch.nan
            given = build(lambda b, h, i, j, t=t: t[i, j] > 0)
            hw.attention(q, q, q, None, given)
            t[5, 6] = 0
            with pytest.raises(ArgumentError, match="written to since"):
                hw.attention(q, q, q, None, given)


def test_while_a_graph_is_captured_nothing_is_compared(q):
    with torch.inference_mode():
        ids = documents()
        made = build(hw.document(ids))
    with (
        mock.patch.object(provenance, "capturing", return_value=True),
        pytest.raises(
            ArgumentError, match=r"made in inference mode.*being captured\. Pass the mask"
        ),
    ):
        hw.attention(q, q, q, None, made)


def test_nothing_is_built_of_tensors_while_a_graph_is_captured():
    """It would read them, and every replay go on with what it found."""
    ids = documents()
    mask = hw.causal() & hw.document(ids)
    build(mask)
    with (
        mock.patch.object(caches, "capturing", return_value=True),
        mock.patch.object(sys.modules["headway.blocks.build"], "capturing", return_value=True),
    ):
        build(hw.causal())
        with pytest.raises(
            ArgumentError, match=r"cannot be found while a CUDA graph .*Pass the mask"
        ):
            build(mask)


@pytest.mark.parametrize("create", ["headway", "flex"])
def test_nothing_is_kept_of_what_masks_captured(create):
    """Nor are tiles, once nobody holds the block mask."""

    def step(n):
        kept = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(n)
        mask = lambda b, h, i, j: kept[i, j]
        if create == "flex":
            made = flex.create_block_mask(mask, None, None, LENGTH, LENGTH, "cpu", 8)
        else:
            made = build(random.choice([mask, hw.dense(kept[None, None])]))
        hw.attention(q, q, q, None, made.tiles if create == "flex" else made)
        tiles = made.tiles.tiles if create == "flex" else made.tiles
        return weakref.ref(kept), weakref.ref(tiles.row_order)

    q = torch.zeros(1, 1, LENGTH, 8)
    gone = [step(n) for n in range(12)]
    gc.collect()
    assert not [ref for pair in gone for ref in pair if ref() is not None]


# -- one row of a batch, or one head, for all -----------------------------------------------------

ROWS = torch.stack([documents(7), documents(11)])
DEPENDING = {
    "b": lambda b, h, i, j: ROWS[b, i] == ROWS[b, j],
    "h": lambda b, h, i, j: i - j < 3 + 9 * h,
    "bh": lambda b, h, i, j: (ROWS[b, i] == ROWS[b, j]) & (i - j < 3 + 9 * h),
    "": lambda b, h, i, j: i - j < 9,
}


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("on", DEPENDING)
def test_a_mask_that_depends_on_the_row_is_not_built_for_one(on, combined, q):
    mask = DEPENDING[on]
    mask = hw.causal() & mask if combined else mask
    for b, h in ((None, 1), (1, 2), (2, None), (2, 2)):
        made = hw.block_mask(mask, b, h, LENGTH, LENGTH, tile=TILE)
        for rows, heads in ((1, 1), (1, 2), (2, 1), (2, 2)):
            x = q[:rows, :heads]
            wrong = [
                name
                for name, built, used in (("b", b, rows), ("h", h, heads))
                if name in on and (built or 1) != used
            ]
            right = hw.attention(x, x, x, None, mask)
            for _ in range(2):  # the second is known
                if not wrong:
                    torch.testing.assert_close(hw.attention(x, x, x, None, made), right)
                    continue
                with pytest.raises(ArgumentError, match=r"depends on|build it for these numbers"):
                    hw.attention(x, x, x, None, made)


def test_the_words_of_that_refusal(q):
    made = hw.block_mask(DEPENDING["b"], None, None, LENGTH, LENGTH, tile=TILE)
    words = (
        r"built with b=1, but its mask depends on b, and it is used for b=2; build it with .*b=2\)"
    )
    with pytest.raises(ArgumentError, match=words):
        hw.attention(q, q, q, None, made)
    two = hw.block_mask(DEPENDING["b"], 2, 1, LENGTH, LENGTH, tile=TILE)
    for combine in (lambda: made & two, lambda: two | made):
        with pytest.raises(ArgumentError, match=words):
            combine()
    part, one = two[1], [q[:1]] * 3
    right = hw.attention(*one, None, hw.document(ROWS[1]))
    torch.testing.assert_close(hw.attention(*one, None, part), right)
    with pytest.raises(ArgumentError, match=words):
        hw.attention(q, q, q, None, part)
    given = flex.create_block_mask(DEPENDING["h"], None, None, LENGTH, LENGTH, "cpu", 8)
    with pytest.raises(RuntimeError, match="depends on h, and it is used for h=2"):
        flex.flex_attention(q, q, q, None, given)
    lengths = torch.full((2,), LENGTH, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=words), torch.no_grad():
        hw.inference.attention(q[:, :, -1:], q, q, lengths=lengths, mask=made)
    compiled = torch.compile(hw.attention, backend="eager")
    with pytest.raises((ArgumentError, torch._dynamo.exc.Unsupported), match=words):
        compiled(q, q, q, None, made)


def test_tiles_of_the_callers_own_may_be_those_of_all_rows(q):
    """Partial ones, in which the mask of every row is looked at."""
    mask, all_partial = hw.causal() & DEPENDING["b"], hw.sliding_window(3)
    tiles = hw.block_mask(all_partial, 1, 1, LENGTH, LENGTH, tile=LENGTH).tiles
    own = hw.BlockMask(mask, (1, 1, LENGTH, LENGTH), (LENGTH, LENGTH), tiles)
    built = hw.block_mask(mask, 1, 1, LENGTH, LENGTH, tile=LENGTH)
    for _ in range(2):  # the second is known
        right = hw.attention(q, q, q, None, mask)
        torch.testing.assert_close(hw.attention(q, q, q, None, own), right)
        with pytest.raises(ArgumentError, match="depends on b"):
            hw.attention(q, q, q, None, built)


# -- FlexAttention's names ------------------------------------------------------------------------

FLEX_WAYS = {
    "itself": lambda m: m,
    "device": lambda m: m.to("cpu"),
    "adjusted": lambda m: m._adjust(LENGTH, LENGTH),
    "partial": lambda m: m.partial_only(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("way", FLEX_WAYS)
def test_create_block_mask_is_the_same(way, used, q):
    ids = documents()
    mask = of_function(ids)
    create = lambda: flex.create_block_mask(mask, None, None, LENGTH, LENGTH, "cpu", 8)
    made = FLEX_WAYS[way](create())
    if used:
        right = hw.attention(q, q, q, None, mask)
        torch.testing.assert_close(flex.flex_attention(q, q, q, None, made), right)
    ids.copy_(documents(11))
    with pytest.raises(ValueError, match=r"written to since .*build the block mask again"):
        flex.flex_attention(q, q, q, None, made)
    flex.flex_attention(q, q, q, None, create())


def test_lists_and_masks_of_the_callers_own_are_the_callers(q):
    """Lists that are given, and masks that are set: they mean what they say, as in the original."""
    ids = documents()
    mask = of_function(ids)
    made = flex.create_block_mask(mask, None, None, LENGTH, LENGTH, "cpu", 8)
    lists = [
        getattr(made, f"{kind}kv_{name}")
        for kind in ("", "full_")
        for name in ("num_blocks", "indices")
    ]
    given = flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=8, mask_mod=mask)
    part = made[:, :, :]
    part.mask_mod = mask
    before = [flex.flex_attention(q, q, q, None, m) for m in (given, part)]
    ids.add_(1)
    for m, x in zip((given, part), before, strict=True):
        assert torch.equal(flex.flex_attention(q, q, q, None, m), x)
