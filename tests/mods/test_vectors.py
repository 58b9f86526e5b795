"""Short vectors, views of captured tensors and searches in a score or mask, against the function
itself, called once per pair on PyTorch's own numbers."""

import functools
import math

import pytest
import torch

import headway as hw
from headway.errors import CapturedIndexError, ModError

B, H, L = 1, 2, 6
draw = torch.Generator().manual_seed(5)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=draw).requires_grad_()


Q, K, V = (real(B, H, L, 4) for _ in range(3))
T, CUBE, ROW, SINGLE = real(H, L), real(H, 4, L), real(5), real(1, L, 1)
QUERY_ROPE, KEY_ROPE = real(B, H, L, 6), real(B, 1, L, 6)
LEAVES = Q, K, V, T, CUBE, ROW, SINGLE, QUERY_ROPE, KEY_ROPE
ONE, CHOSEN = torch.tensor(1), torch.tensor([[0, 2], [1, 1], [2, 0]])
FEW, MANY = torch.linspace(-2, 2, 7), torch.linspace(-3, 3, 100).double()
EDGES = torch.tensor([0, 1, 3, 3, 5])

SCORES = {
    "0-d index": lambda s, b, h, i, j: s + CUBE[h, ONE, j] + CUBE[h, ONE][j],
    "flat": lambda s, b, h, i, j: s + T.view(-1)[h * L + j] + T.flatten()[-1 - j],
    "transposed": lambda s, b, h, i, j: s + T.mT[j, h] * T.t()[i, h] + T.mT.reshape(-1)[j],
    "computed": lambda s, b, h, i, j: s + (T * 2)[h, j] - (T.exp() + 1)[h, i],
    "rows": lambda s, b, h, i, j: s + T[h, :][j] + T[..., j][h] + T[:, j][h] + T[None, h, j].sum(),
    "parts": lambda s, b, h, i, j: s + T[:, 1:4][h, j % 3] + T[:, 1::2][h, j % 3 - 3],
    "shapes": lambda s, b, h, i, j: s + T.view(H, 3, 2)[h, j % 3, i % 2] * T.reshape(L, H)[j, h],
    "axes": lambda s, b, h, i, j: s + CUBE.permute(2, 0, 1)[j, h, i % 4] + CUBE.unsqueeze(1)[h, 0, 1, j],
    "diagonal": lambda s, b, h, i, j: s + CUBE[0].diagonal()[j % 4] + CUBE.unflatten(2, (2, 3))[h, 0, 1, 2],
    "picked": lambda s, b, h, i, j: s + CUBE[h, [1, 3], j].sum() + CUBE[:, CHOSEN[0], j][h].sum(),
    "one row": lambda s, b, h, i, j: s + (SINGLE * 2)[b, j, h - h] * SINGLE.detach()[b, i, 0] + (SINGLE + T[None, :, :1].mT)[b, j, h],
    "any": lambda s, b, h, i, j: torch.where((CHOSEN[i // 2] == (j // 2).unsqueeze(-1)).any(-1), s, -s),
    "dot": lambda s, b, h, i, j: s + torch.dot(QUERY_ROPE[b, h, i], KEY_ROPE[b, 0, j]),
    "products": lambda s, b, h, i, j: s + QUERY_ROPE[b, h, i] @ KEY_ROPE[b, 0, j]
    + (CUBE[h].contiguous() @ QUERY_ROPE[b, h, j]).sum() + (CUBE[h, :2] @ T.mT).sum(),
    "isin": lambda s, b, h, i, j: torch.where(torch.isin(j, EDGES) & ~torch.isin(i, CHOSEN[j // 2]), s, s * 2),
    "stack": lambda s, b, h, i, j: torch.stack([s, s * s, T[h, j]]).sum() + torch.stack([s, T[h, j]]).prod(),
    "largest": lambda s, b, h, i, j: CUBE[h, :, j].amax(-1) * s + CUBE[h, :, j].max() - CUBE[h, :, j].amin(),
    "the same twice": lambda s, b, h, i, j: torch.stack([s, s * 1, T[h, j], s + 0]).amax(0),
    "mean": lambda s, b, h, i, j: s + ROW.mean() * s + CUBE[h, :, j].mean(-1) + ROW.sum() * ROW.prod(),
    "loops": lambda s, b, h, i, j: s + sum(CUBE[h][n, j] * n for n in range(4)) + sum(CUBE[h, :, j].unbind()),
    "softmax": lambda s, b, h, i, j: s + (CUBE[h, :, j].softmax(-1) * torch.arange(4)).sum(),
    "norm": lambda s, b, h, i, j: s + torch.linalg.vector_norm(QUERY_ROPE[b, h, i] - KEY_ROPE[b, 0, j]),
    "detached": lambda s, b, h, i, j: s + (CUBE[h, :, j].detach() * s).sum() + CUBE[h].detach()[0, j],
    "moved": lambda s, b, h, i, j: torch.cat([s[None], CUBE[h, :, j]]).flip(0).roll(1)[2] + s,
    "made": lambda s, b, h, i, j: (s.new_zeros(3) + s).sum() + (torch.arange(3, device=s.device) * s).sum()
    + s.new_tensor([0.3, 1.0]).sum() * s.new_tensor(2) + torch.zeros_like(ROW).sum(),
    "reads": lambda s, b, h, i, j: s + T.index_select(0, h).squeeze()[j] + torch.take(T, h * L + j)
    + torch.gather(ROW, 0, j % 5) + torch.gather(T[h], 0, torch.stack([i, j])).sum(),
    "searches": lambda s, b, h, i, j: s + torch.bucketize(s, FEW) + torch.searchsorted(MANY, s)
    + 0.1 * torch.searchsorted(MANY, s, right=True) + torch.bucketize(j, EDGES, right=True),
    "numbers": lambda s, b, h, i, j: s + torch.fmod(s, 0.7) + (s / 0.3).round() + (i // 4) * (i % 4),
}  # fmt: skip


def pairs(fn, *first) -> torch.Tensor:
    """Return `fn` of every pair, on numbers."""
    results = []
    for n in range(B * H * L * L):
        place = n // (H * L * L), n // (L * L) % H, n // L % L, n % L
        results.append(fn(*(x[place] for x in first), *map(torch.tensor, place)))
    return torch.stack(results).view(B, H, L, L)


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    right = pairs(SCORES[name], Q @ K.mT / 2).double().softmax(-1) @ V
    found = hw.attention(Q, K, V, SCORES[name])
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(right.sin().sum(), LEAVES, allow_unused=True)
    gradients = torch.autograd.grad(found.sin().sum(), LEAVES, allow_unused=True)
    for one, other in zip(gradients, expected, strict=True):
        zero = torch.zeros((), dtype=torch.float64)
        one, other = zero if one is None else one, zero if other is None else other
        torch.testing.assert_close(one, other.expand_as(one), rtol=1e-11, atol=1e-11)


def _larger(a, c, s):
    return torch.where(a >= c, s, s * 0.5)


def _first_of(s, first, *rest):
    return s * first + sum(rest)


UNPACKED = {
    "arguments": lambda s, b, h, i, j: _larger(*torch.stack([i, j]), s),
    "a loop": lambda s, b, h, i, j: s + sum([n * t for n, t in enumerate(CUBE[h, :, j])]),
    "the rest": lambda s, b, h, i, j: _first_of(s, *CUBE[h, :, j]),
    "a list": lambda s, b, h, i, j: s + list(CUBE[h, :, j])[1] * torch.stack([*T[h], s]).sum(),
    "rows": lambda s, b, h, i, j: s + sum([t * row[i % 2] for row in CUBE[h, 1:3] for t in row]),
    "columns": lambda s, b, h, i, j: s + sum([t[h] * t.sum() for t in T.t() * 2]),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, "compiled") for name in UNPACKED]
    + [(name, way) for name in ("arguments", "a loop") for way in ("eager", "exported")],
)
def test_what_unpacks(name, way):
    """A partial is recorded while Dynamo traces, which unpacks tensors by itself."""
    score = functools.partial(UNPACKED[name])
    right = pairs(score, Q @ K.mT / 2).softmax(-1) @ V
    attend = lambda q: hw.attention(q, K.detach(), V, score)
    if way == "compiled":
        attend = torch.compile(attend, backend="eager", fullgraph=True)
    if way == "exported":
        attend = torch.export.export(Calls(attend), (Q,)).module()
    out = attend(Q)
    torch.testing.assert_close(out, right, rtol=1e-12, atol=1e-12)
    grads = (torch.autograd.grad(x.sin().sum(), Q)[0] for x in (out, right))
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)


class Calls(torch.nn.Module):
    """A module that calls a function."""

    def __init__(self, fn) -> None:
        super().__init__()
        self.forward = fn


LONG = torch.randperm(128, generator=draw)
MASKS = {
    "any": lambda b, h, i, j: (CHOSEN[i // 2] == (j // 2).unsqueeze(-1)).any(-1),
    "all": lambda b, h, i, j: (CHOSEN[i // 2] >= j.unsqueeze(-1) - 2).all(-1) | (i == j),
    "128 numbers": lambda b, h, i, j: (LONG[:128] == (i * L + j) * 2).any() | (i == j),
    "isin": lambda b, h, i, j: torch.isin(i - j, EDGES),
    "a search": lambda b, h, i, j: torch.bucketize(i, EDGES) == torch.searchsorted(EDGES, j),
    "a search in rows": lambda b, h, i, j: torch.searchsorted(CHOSEN.sort().values[0], j) <= i,
    "a view": lambda b, h, i, j: LONG.view(-1, 2)[i, 0] >= LONG.view(2, -1).mT[j, 1],
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in MASKS if n != "a search in rows"])
def test_masks(name):
    mask = MASKS[name]
    keep = pairs(mask)
    right = (Q @ K.mT / 2).masked_fill(~keep, -math.inf).softmax(-1).nan_to_num(0) @ V
    for given in (mask, hw.block_mask(mask, B, H, L, L, tile=2)):
        torch.testing.assert_close(hw.attention(Q, K, V, mask=given), right)


REFUSED = {
    "too many": (lambda s, *_: s + LONG.float().repeat(2).sum(), "reduces 256 numbers .* with"),
    "sorted": (lambda s, *_: s + LONG.sort()[0][0], "computes sort on a whole captured tensor"),
    "slices": (lambda s, b, h, i, j: s + T[0, :j].sum(), "slices a captured tensor with a value"),
    "own": (lambda s, b, h, i, j: s + torch.arange(9)[j], "a tensor that it makes itself; index"),
    "stacked": (lambda s, b, h, i, j: torch.stack([s, s])[j], "the result of stack with a value"),
    "outside": (lambda s, b, h, i, j: s + T[0, 1:3][2], "a dimension of length 2 with 2"),
    "shapes": (lambda s, b, h, i, j: s + (T[0, :3] + T[0, :4]).sum(), "tensors that do not fit"),
    "a vector": (lambda s, b, h, i, j: s * T[0], r"shape \(6,\) as one number; .* x.any\(-1\)"),
    "a condition": (lambda s, b, h, i, j: s + T[0][T[0] > 0].sum(), "with a torch.bool value"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named_with_its_line(name):
    fn, words = REFUSED[name]
    with pytest.raises(ModError, match=words) as raised:
        hw.attention(Q, K, V, fn)
    assert __file__ in str(raised.value)


def test_an_index_outside_of_a_view_is_an_error():
    """Of the view, though the tensor itself has it; and a masked pair may have any."""
    score = lambda s, b, h, i, j: s + T[:, 1:4][h, j]
    with pytest.raises(CapturedIndexError):
        hw.attention(Q, K, V, score)
    found = hw.attention(Q, K, V, score, lambda b, h, i, j: j < 3)
    right = (Q @ K[:, :, :3].mT / 2 + T[:, None, 1:4]).softmax(-1) @ V[:, :, :3]
    torch.testing.assert_close(found, right)


def test_a_shape_that_changes_is_seen():
    for length in (3, 5, 2):
        captured = torch.randn(length, dtype=torch.float64)
        found = hw.attention(Q, K, V, lambda s, *_, t=captured: s * t.sum() + t.view(-1, 1)[-1, 0])
        right = (Q @ K.mT / 2 * captured.sum()).softmax(-1) @ V
        torch.testing.assert_close(found, right)


# -- functions of autograd ------------------------------------------------------------------------


@torch.library.custom_op("headway_test::rough_tanh", mutates_args=())
def rough_tanh(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


rough_tanh.register_fake(torch.empty_like)


@torch.library.custom_op("headway_test::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


cube.register_fake(torch.empty_like)
cube.register_autograd(lambda ctx, grad: 7 * grad, setup_context=lambda ctx, inputs, output: None)


class Tanh(torch.autograd.Function):
    """As libraries write one that runs under vmap."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x):
        return torch.ops.headway_test.rough_tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)

    @staticmethod
    def vmap(info, in_dims, x):
        return Tanh.apply(x), 0


LIBRARY = torch.library.Library("headway_test", "FRAGMENT")
LIBRARY.define("halved_tanh(Tensor x) -> Tensor")
LIBRARY.impl("halved_tanh", lambda x: (x / 2).tanh(), "CompositeExplicitAutograd")


class HalvedTanh(Tanh):
    @staticmethod
    def forward(x):
        return torch.ops.headway_test.halved_tanh(x)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y) * 3

    @staticmethod
    def vmap(info, in_dims, x):
        return HalvedTanh.apply(x), 0


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Product(torch.autograd.Function):
    """Of two values, with a derivative that is no derivative of it; it takes a number as well."""

    @staticmethod
    def forward(ctx, a, b, n):
        ctx.save_for_backward(a, b)
        return a * b * n, a + b

    @staticmethod
    def backward(ctx, grad, other):
        a, b = ctx.saved_tensors
        return grad * b * 7, grad * a + 2 * other, None


NUMBER = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
FUNCTIONS = {
    "as libraries do": lambda s, b, h, i, j: 2 * Tanh.apply(s / 2),
    "an op of a library": lambda s, b, h, i, j: HalvedTanh.apply(s) + s,
    "straight through": lambda s, b, h, i, j: Straight.apply(s) * s,
    "one after the other": lambda s, b, h, i, j: Straight.apply(Tanh.apply(s * 3)) + s,
    "several": lambda s, b, h, i, j: s + sum(Product.apply(s * 0.1, T[h, j], 3)),
    "of a number": lambda s, b, h, i, j: s * Product.apply(NUMBER, NUMBER.exp(), 2)[0],
    "in place, before": lambda s, b, h, i, j: Tanh.apply((s * 1).mul_(2)),
    "detached": lambda s, b, h, i, j: s * Straight.apply(s).detach(),
    "an op with a derivative": lambda s, b, h, i, j: torch.ops.headway_test.cube(s) * 0.1,
    "no grad": lambda s, b, h, i, j: s * torch.no_grad()(rough_tanh)(s),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_autograd_keep_their_derivative(name):
    leaves = Q, K, V, T, NUMBER
    right = pairs(FUNCTIONS[name], Q @ K.mT / 2).softmax(-1) @ V
    expected = torch.autograd.grad(right.sin().sum(), leaves, allow_unused=True)
    for _ in range(2):
        found = hw.attention(Q, K, V, FUNCTIONS[name])
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
        gradients = torch.autograd.grad(found.sin().sum(), leaves, allow_unused=True)
        for one, other in zip(gradients, expected, strict=True):
            assert (one is None or not one.any()) if other is None else True
            if other is not None:
                torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_hooks_on_a_value_are_refused():
    def score(s, b, h, i, j):
        s.register_hook(lambda grad: grad * 2)
        return Straight.apply(s)

    with pytest.raises(ModError, match="changes an attribute"):
        hw.attention(Q, K, V, score)


def test_an_op_without_a_derivative_is_refused():
    with pytest.raises(ModError, match="calls headway_test::rough_tanh, whose derivative fails"):
        hw.attention(Q, K, V, lambda s, *_: rough_tanh(s))
    with pytest.raises(ModError, match="calls headway_test::halved_tanh"):
        hw.attention(Q, K, V, lambda s, *_: torch.ops.headway_test.halved_tanh(s))
