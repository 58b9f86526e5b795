"""A block mask whose mask is no longer what its tiles were found for is refused, never mixed."""

import copy
import pickle

import pytest
import torch

import headway as hw
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


def test_inference_tensors_have_no_counter(q):
    """They are not watched; what captures them works as ever."""
    with torch.inference_mode():
        ids = documents()
        mask = hw.document(ids)
        made = build(mask)
        assert torch.equal(hw.attention(q, q, q, None, made), hw.attention(q, q, q, None, mask))
    assert torch.equal(hw.attention(q, q, q, None, made), hw.attention(q, q, q, None, mask))


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
