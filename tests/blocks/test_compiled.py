"""Block masks that compiled code makes, cuts, looks at and returns, with `fullgraph=True`: what the
mask keeps, against dense attention in float64, in no more graphs than FlexAttention compiles.

A compilation takes a second. Cases share one where they can, and each takes one choice of many: of
static and dynamic sizes, of the ways to read a mask. Tests marked `long` take all."""

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._inductor import config
from torch.nn.attention import flex_attention as original
from torch.utils.checkpoint import checkpoint

import headway as hw
from headway.compat import flex
from headway.errors import ArgumentError, HeadwayError

B, H, L, D = 3, 2, 70, 8
SIZES = (4, 60), (4, 70), (3, 70), (2, 90), (3, 100)  # batches and lengths
TILE = 32
long = pytest.mark.long
# Inductor calls PyTorch for every operator, where it can: its C++ takes seconds to compile.
PLAIN = {"fallback_by_default": True} if hasattr(config, "fallback_by_default") else {}


@pytest.fixture(autouse=True)
def _no_graphs():
    torch.compiler.reset()


def _inputs(b: int = B, length: int = L, grad: bool = True) -> tuple[Tensor, Tensor]:
    x = torch.randn(b, H, length, D, requires_grad=grad)
    return x, torch.randint(0, 3, (b, length)).sort(-1).values


def _shuffled(names: Any) -> list[str]:
    """Return the names in a new order, and print its seed, which pytest shows if the test fails."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"the order of random.Random({seed})")
    return random.Random(seed).sample(list(names), len(names))


def _kept(ids: Tensor) -> Tensor:
    i = torch.arange(ids.shape[1])
    return (ids[:, None, :, None] == ids[:, None, None]) & (i[:, None] >= i)


def _dense(q: Tensor, k: Tensor, kept: Tensor) -> Tensor:
    s = q.double() @ k.double().mT / math.sqrt(D)
    return s.masked_fill(~kept, -math.inf).softmax(-1) @ k.double()


def _check(out: Tensor, right: Tensor, x: Tensor) -> None:
    torch.testing.assert_close(out.double(), right, rtol=1e-4, atol=1e-5)
    grad, expected = (torch.autograd.grad(o.square().sum(), x)[0] for o in (out, right))
    torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-4)


def _documents(ids: Tensor) -> Callable:
    return lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j)


def _causal(b, h, i, j):
    return i >= j


def _ours(mask: Any, x: Tensor, tile: int = TILE) -> hw.BlockMask:
    return hw.block_mask(mask, x.shape[0], None, x.shape[2], x.shape[2], tile=tile)


def _create(mask: Any, x: Tensor, module: Any = flex, **options: Any) -> Any:
    b, _, n, _ = x.shape
    return module.create_block_mask(mask, b, None, n, n, "cpu", TILE, **options)


def _of_lists(mask: Any) -> flex.BlockMask:
    return flex.BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
        mask.BLOCK_SIZE, mask.mask_mod, mask.seq_lengths,
    )  # fmt: skip


def _with_mask(mask: Any, fn: Callable) -> Any:
    mask.mask_mod = fn
    return mask


MASKS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a closure over a tensor": lambda x, ids: _ours(_documents(ids), x),
    "a closure over a result": lambda x, ids: _ours(_documents(ids * 2 + 1), x),
    "a value of the library": lambda x, ids: _ours(hw.causal() & hw.document(ids), x),
    "two, in coarser tiles": lambda x, ids: (
        (_ours(_causal, x, 16) & _ours(hw.document(ids), x, 16)).retile(TILE)[:, :].to("cpu")
    ),
    "FlexAttention's": lambda x, ids: _create(_documents(ids), x),
    "no full blocks": lambda x, ids: _create(_documents(ids), x, separate_full_blocks=False),
    "lists": lambda x, ids: _of_lists(_create(_documents(ids), x)),
    "a mask set later": lambda x, ids: _with_mask(
        _create(hw.document(ids) & _causal, x), _documents(ids)
    ),
    "a part": lambda x, ids: _with_mask(_create(_documents(ids), x)[:, :, :], _documents(ids)),
    "adjusted": lambda x, ids: _create(_documents(ids), x)._adjust(x.shape[2], x.shape[2]),
}


def _check_masks(names: list[str], dynamic: bool | None, sizes: Any) -> None:
    def step(x: Tensor, ids: Tensor) -> list[Tensor]:
        return [flex.flex_attention(x, x, x, block_mask=MASKS[n](x, ids)) for n in names]

    torch.compiler.reset()
    compiled = torch.compile(step, backend="eager", fullgraph=True, dynamic=dynamic)
    for b, length in sizes:
        x, ids = _inputs(b, length)
        for name, out in zip(names, compiled(x, ids), strict=True):
            print(name)
            _check(out, _dense(x, x, _kept(ids)), x)


def test_what_it_keeps():
    names = _shuffled(MASKS)
    _check_masks(names[:2], True, SIZES[1:4:2])
    static = [name for name in names[2:] if name not in RETURNED]  # whose static sizes are below
    _check_masks(static, False, SIZES[1:2])


@long
@pytest.mark.parametrize("name", MASKS)
def test_what_each_keeps(name):
    _check_masks([name], None, SIZES[1:4:2])


class Model(nn.Module):
    """Two layers with one block mask of a method."""

    def __init__(self, ids: Tensor, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.register_buffer("ids", ids)

    def keep(self, b, h, i, j):
        return (self.ids[b, i] == self.ids[b, j]) & (i >= j)

    def forward(self, x: Tensor) -> Tensor:
        mask = _create(self.keep, x)
        layer = lambda x: x + flex.flex_attention(x, x, x, block_mask=mask)
        if self.checkpoints:
            return checkpoint(layer, layer(x), use_reentrant=False)
        return layer(layer(x))


@pytest.mark.parametrize(
    "way", ["inductor", pytest.param("dynamic", marks=long), "strict", "traced"]
)
def test_a_model(way):
    x, ids = _inputs()
    exported, right = way in ("strict", "traced"), x.double()
    model = Model(ids, not exported)  # PyTorch's exported programs cannot checkpoint
    for _ in range(2):
        right = right + _dense(right, right, _kept(ids))
    if exported:
        out = torch.export.export(model, (x,), strict=way == "strict").module()(x)
    else:
        how = {"backend": "aot_eager", "dynamic": True} if way == "dynamic" else {"options": PLAIN}
        out = torch.compile(model, fullgraph=True, **how)(x)
    _check(out, right, x)


def test_a_second_graph_takes_all_lengths():
    """With gradients; FlexAttention compiles two as well (below)."""
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def step(x: Tensor, ids: Tensor) -> Tensor:
        return flex.flex_attention(x, x, x, block_mask=_create(_documents(ids), x))

    for b, length in SIZES[::2] + SIZES[3:]:
        x, ids = _inputs(b, length)
        _check(step(x, ids), _dense(x, x, _kept(ids)), x)
    assert counter.frame_count == 2


@long
@pytest.mark.parametrize("sizes", [SIZES, SIZES[::2] + SIZES[3:]])
@pytest.mark.parametrize("dynamic", [None, True])
def test_as_many_graphs_as_flex_attention(dynamic, sizes):
    def graphs(module: Any) -> int:
        torch.compiler.reset()
        counter = CompileCounter()

        @torch.compile(backend=counter, fullgraph=True, dynamic=dynamic)
        def step(x: Tensor, ids: Tensor) -> Tensor:
            mask = _create(_documents(ids), x, module)
            return module.flex_attention(x, x, x, block_mask=mask)

        for b, length in sizes:
            x, ids = _inputs(b, length, grad=False)
            right = _dense(x, x, _kept(ids))
            torch.testing.assert_close(step(x, ids).double(), right, rtol=1e-4, atol=1e-5)
        return counter.frame_count

    assert graphs(flex) <= graphs(original)


def _tiles_shown(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    mask, causal = _ours(_documents(ids), x), _ours(_causal, x)
    return (
        mask.to_dense() + 0, mask[1:, :, 1, :2].to_dense() + 0,
        x * mask.shape[0], x * causal.shape[0], x * causal.grid[1],
    )  # fmt: skip


def _lists_shown(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    mask = _create(_documents(ids), x)
    return (
        *[t + 0 for t in mask.as_tuple() if isinstance(t, Tensor)], mask.to_dense() + 0,
        flex.create_mask(_documents(ids), x.shape[0], None, x.shape[2], x.shape[2], "cpu"),
    )  # fmt: skip


LOOKS = {"tiles": _tiles_shown, "lists": _lists_shown}


@pytest.mark.parametrize(("name", "dynamic"), [
    ("tiles", True), ("lists", False),
    pytest.param("tiles", False, marks=long), pytest.param("lists", True, marks=long),
])  # fmt: skip
def test_what_it_shows(name, dynamic):
    compiled = torch.compile(LOOKS[name], backend="eager", fullgraph=True, dynamic=dynamic)
    x, ids = _inputs()
    for shown, right in zip(compiled(x, ids), LOOKS[name](x, ids), strict=True):
        assert torch.equal(shown, right)


RETURNED = {
    name: MASKS[name]
    for name in ("a closure over a result", "two, in coarser tiles", "FlexAttention's", "lists")
}


def _attend(x: Tensor, mask: Any) -> Tensor:
    return flex.flex_attention(x, x, x, block_mask=mask)


def _check_returned(names: list[str], ways: list[list[int]]) -> None:
    """Check that masks of compiled code are read by eager code, by another compiled program, or by
    both; each itself or a copy: `ways` has the numbers of the ways of every name."""
    makes = lambda x, ids: [RETURNED[name](x, ids) for name in names]
    make = torch.compile(makes, backend="eager", fullgraph=True)
    compiled = torch.compile(_attend, backend="eager", fullgraph=True)
    orders = (_attend, compiled), (compiled, _attend), (_attend, _attend)
    for turn in range(len(ways[0])):
        x, ids = _inputs()
        for name, made, numbers in zip(names, make(x, ids), ways, strict=True):
            number = numbers[turn]
            print(name, number)
            mask = (lambda m: m, copy.copy, copy.deepcopy)[number](made)
            for step in orders[number]:
                _check(step(x, mask), _dense(x, x, _kept(ids)), x)
            same = RETURNED[name](x, ids)
            assert mask.shape == same.shape
            assert mask.device == same.device
            assert torch.equal(mask.to_dense(), same.to_dense())
            assert mask.sparsity() == same.sparsity()


def test_what_it_returns():
    _check_returned(_shuffled(RETURNED), [[n % 3] for n in range(len(RETURNED))])


@long
@pytest.mark.parametrize("name", RETURNED)
def test_what_each_returns(name):
    _check_returned([name], [[0, 1, 2]])


@pytest.mark.parametrize("name", ["a closure over a tensor", "FlexAttention's"])
def test_its_tiles_are_those_of_its_mask(name):
    """A write before the tiles are read is seen; one after that is refused, as everywhere."""
    x, ids = _inputs()
    mask = torch.compile(MASKS[name], backend="eager", fullgraph=True)(x, ids)
    ids.copy_(_inputs()[1])
    _check(flex.flex_attention(x, x, x, block_mask=mask), _dense(x, x, _kept(ids)), x)
    ids.zero_()
    with pytest.raises(ArgumentError, match="written to since"):
        flex.flex_attention(x, x, x, block_mask=mask)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda ids: ids.add_(1),
    "to an item": lambda ids: ids.__setitem__((0, 3), 9),
    "to a view": lambda ids: ids[:, 4:9].fill_(9),
    "to what is detached": lambda ids: ids.detach().zero_(),
    "out": lambda ids: torch.add(ids, 1, out=ids),
}


@pytest.mark.parametrize(("write", "joined"), [("in place", True), *((w, False) for w in WRITES)])
def test_a_write_between_making_and_using_it(write, joined):
    """It is refused, as in eager code; calls before it, and writes to others, are not."""

    def step(x: Tensor, ids: Tensor, again: bool) -> Tensor:
        mask = _ours(_documents(ids), x)
        if joined:
            mask = mask & _ours(_causal, x)
        out = hw.attention(x, x, x, mask=mask)
        WRITES[write](ids.clone())
        out = out + hw.attention(x, x, x, mask=mask)
        WRITES[write](ids)
        if joined and again:
            mask = mask & _ours(_documents(ids), x)
        return out + hw.attention(x, x, x, mask=mask) if again else out

    x, ids = _inputs(grad=False)  # a backward would refuse the write to what it has saved
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, ids.clone(), False), step(x, ids.clone(), False))
    for run in (compiled, step):
        with pytest.raises(ArgumentError, match="written to"):
            run(x, ids.clone(), True)


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "its runs": (
        lambda x, ids: _ours(_causal, x).tiles.row_order + 1, "the tiles of a block mask that"),
    "its counts": (
        lambda x, ids: x * _ours(_causal, x).counts()[0], "the tiles of a block mask that"),
    "another device": (
        lambda x, ids: x * _ours(_causal, x).to("cuda").shape[2], "compiled code that makes a"),
    "one row for all": (
        lambda x, ids: hw.attention(
            x, x, x, mask=hw.block_mask(_documents(ids), 1, 1, L, L)), "the block mask was built"),
    "a length": (
        lambda x, ids: hw.attention(x, x, x, mask=hw.block_mask(_causal, 1, 1, L, L + 1)),
        "the block mask is for lengths"),
    "a block mask's length": (
        lambda x, ids: flex.flex_attention(x, x, x, block_mask=_create(_causal, x[:, :, 1:])),
        "block_mask was created for"),
    "no function": (lambda x, ids: _ours(3, x), "mask=3 is not callable"),
    "no tile": (lambda x, ids: _ours(_causal, x, 0), "tile=0 must be"),
    "a gradient": (
        lambda x, ids: _ours(lambda b, h, i, j: x[b, 0, i, 0] > 0, x),
        "the mask captures a tensor"),
    "other arguments": (
        lambda x, ids: _create(lambda i, j: i >= j, x), "the mask function takes other arguments"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_first_line_is_ours(name):
    step, line = REFUSED[name]
    with pytest.raises(HeadwayError) as error:
        torch.compile(step, backend="eager", fullgraph=True)(*_inputs())
    assert str(error.value).startswith(line)


def test_a_part_of_unknown_time_is_refused():
    make = torch.compile(MASKS["adjusted"], backend="eager", fullgraph=True)
    x, ids = _inputs()
    with pytest.raises(ArgumentError, match="cut from another in compiled code"):
        flex.flex_attention(x, x, x, block_mask=make(x, ids))
