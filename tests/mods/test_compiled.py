"""Functions that `torch.compile(fullgraph=True)` meets inside a model: methods, closures that `forward`
makes, partials. They mean what they mean without it, and compile no more graphs than FlexAttention."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import headway as hw
from headway.errors import ArgumentError, ModError

from .programs import asserts

L, H, D = 12, 2, 8
_draw = torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def _no_graphs():
    torch.compiler.reset()


def _dense(x: Tensor, score: Callable, mask: Callable | None = None) -> Tensor:
    """Attention of x to itself in float64, with the function on index tensors."""
    x = x.double()
    at = (
        torch.arange(x.shape[0])[:, None, None, None], torch.arange(H)[:, None, None],
        torch.arange(x.shape[2])[:, None], torch.arange(x.shape[2]),
    )  # fmt: skip
    s = score(x @ x.mT / math.sqrt(D), *at)
    if mask is not None:
        s = s.masked_fill(~mask(*at), -math.inf)
    return s.softmax(-1) @ x


class Layer(nn.Module):
    """`attend` is the attention of `kind`, whose functions read the module and the arguments."""

    def __init__(self, kind: str = "methods") -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(H, 64, generator=_draw))
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.act = nn.Tanh()
        self.window, self.kind = 5, kind

    def score(self, s, b, h, i, j):
        return self.act(s * self.gain) + self.bias[h, j]

    def mask(self, b, h, i, j):
        return (i - j).abs() < self.window

    def functions(self, x: Tensor, number: float) -> tuple[Callable, Callable | None]:
        length, mean = x.shape[2], x.mean(-1)
        if self.kind == "methods":
            return self.score, self.mask
        if self.kind == "a closure over parameters":

            def score(s, b, h, i, j):
                with torch.no_grad():
                    cut = s * self.gain
                return s + cut + self.bias.exp()[h, (i - j).abs()]

            return score, self.mask
        if self.kind == "a closure over numbers and a shape":
            return lambda s, b, h, i, j: s * number + j / length, None
        if self.kind == "a closure over what was computed":
            return lambda s, b, h, i, j: (s + mean[b, h, i] * j).clamp(max=number * 9), None
        return functools.partial(_partial, t=self.bias, x=number), self.mask

    def forward(self, x: Tensor, number: float = 0.5, dense: bool = False) -> Tensor:
        score, mask = self.functions(x, number)
        if dense:
            return _dense(x, score, mask)
        return hw.attention(x, x, x, score, None if mask is None else hw.causal() | mask)


def _partial(s, b, h, i, j, t, x):
    return s * x + t[h, j]


KINDS = (
    "methods", "a closure over parameters", "a closure over numbers and a shape",
    "a closure over what was computed", "a partial",
)  # fmt: skip
STEPS = [(12, 0.5), (9, 1.5), (17, 2.5), (23, 3.5)]  # from the second on, both are symbols


def _gradients(layer: nn.Module, out: Tensor, x: Tensor) -> list[Tensor]:
    wanted = [x, *layer.parameters()]
    grads = torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)
    zero = torch.zeros((), dtype=torch.float64)
    return [zero if g is None else g.double() for g in grads]


@pytest.mark.parametrize("kind", KINDS)
def test_functions_of_a_model(kind):
    layer = Layer(kind)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for length, number in STEPS[:3]:
        x = torch.randn(1, H, length, D, generator=_draw, requires_grad=True)
        score, mask = layer.functions(x.double(), number)
        whole = None if mask is None else lambda *at, m=mask: (at[2] >= at[3]) | m(*at)
        right = _dense(x, score, whole)
        out = compiled(x, number)
        torch.testing.assert_close(out.double(), right, rtol=1e-4, atol=1e-4)
        got, expected = _gradients(layer, out, x), _gradients(layer, right, x)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b.expand_as(a), rtol=1e-3, atol=1e-3)
    assert counter.frame_count <= 2


BODIES = {
    "a checkpoint": lambda layer: lambda x: checkpoint(layer, x, use_reentrant=False),
    "a checkpoint by reentrant autograd": lambda layer: (
        lambda x: checkpoint(layer, x, use_reentrant=True)
    ),
    "a region that is compiled once": lambda layer: torch.compiler.nested_compile_region(
        lambda x: layer(x)
    ),
    "a branch": lambda layer: (
        lambda x: torch.cond(x.sum() > -1e9, lambda x: layer(x), lambda x: layer(x) * 2, (x,))
    ),
}


@pytest.mark.parametrize(
    ("body", "kind"),
    [(body, "methods") for body in BODIES] + [("a checkpoint", kind) for kind in KINDS[1:3]],
)
def test_functions_of_a_layer_in_a_body(body, kind):
    """The layer is in the body of a higher-order operator: what a recording does there must not leave it."""
    layer = Layer(kind)
    compiled = torch.compile(BODIES[body](layer), backend="aot_eager", fullgraph=True)
    for length in (12, 9):
        x = torch.randn(1, H, length, D, generator=_draw, requires_grad=True)
        out, right = compiled(x), layer(x)
        torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-4)
        for a, b in zip(_gradients(layer, out, x), _gradients(layer, right, x), strict=True):
            torch.testing.assert_close(a, b.expand_as(a), rtol=1e-3, atol=1e-3)


def test_a_score_with_an_effect_in_a_checkpoint_is_refused():
    class Counting(Layer):
        calls = 0

        def score(self, s, b, h, i, j):
            self.calls += 1
            return s

    step = torch.compile(BODIES["a checkpoint"](Counting()), backend="eager", fullgraph=True)
    with pytest.raises(Unsupported, match="side effect"):
        step(torch.randn(1, H, L, D, requires_grad=True))


def test_a_mark_on_a_class_is_no_change_of_its_protocols():
    """Dynamo sets attributes of its own on `nn.Module`; Python asks objects for methods like `__bool__` alone."""

    class Marked(Layer):
        pass

    x = torch.randn(1, H, L, D, generator=_draw)
    for _ in range(2):
        layer = Marked()
        out = torch.compile(layer, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(out, layer(x), rtol=1e-5, atol=1e-5)
        setattr(Marked, "___mark", True)
        torch.compiler.reset()
    Marked.__bool__ = lambda self: True
    with pytest.raises(ModError, match="uses Marked, a class that changed after it was compiled"):
        torch.compile(Marked(), backend="eager", fullgraph=True)(x)


def test_a_method_sees_what_changes():
    layer = Layer()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.randn(1, H, L, D, generator=_draw)
    for window in (5, 2, 3):
        layer.window = window
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-5)
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 0)
    try:
        with pytest.raises(ModError, match="global hooks of modules are registered"):
            compiled(x)
        broken = torch.compile(layer.forward, backend="eager")
        torch.testing.assert_close(broken(x), layer.forward(x), rtol=1e-5, atol=1e-5)
    finally:
        hook.remove()


def test_a_closure_under_inductor():
    layer = Layer("a closure over parameters")
    x = torch.randn(1, H, L, D, generator=_draw, requires_grad=True)
    out, right = torch.compile(layer, fullgraph=True)(x), layer(x)
    torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)
    for a, b in zip(_gradients(layer, out, x), _gradients(layer, right, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_as_many_graphs_as_flex_attention():
    table = torch.randn(H, 64, generator=_draw)

    def run(attention: Callable) -> tuple[int, list[Tensor]]:
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")

        @torch.compile(backend=counter, fullgraph=True)
        def step(x: Tensor, number: float) -> Tensor:
            def score(s, b, h, i, j):
                return s * number + table[h, j] + x.shape[2]

            return attention(x, x, x, score)

        draw = torch.Generator().manual_seed(1)
        made = [step(torch.randn(1, H, n, D, generator=draw), x) for n, x in STEPS]
        return counter.frame_count, made

    (ours, made), (theirs, expected) = run(hw.attention), run(flex_attention)
    assert ours <= theirs, (ours, theirs)
    for a, b in zip(made, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_row_of_a_symbolic_length():
    """Its sum is unrolled: the length becomes a constant."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: Tensor, t: Tensor) -> Tensor:
        return hw.attention(x, x, x, lambda s, b, h, i, j: s + t[h].amax() * j)

    x = torch.randn(1, H, L, D, generator=_draw)
    for n in (3, 5, 7):
        t = torch.randn(H, n, generator=_draw)
        right = _dense(x, lambda s, b, h, i, j, t=t: s + t.amax(-1)[h] * j)
        torch.testing.assert_close(step(x, t).double(), right, rtol=1e-4, atol=1e-4)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


apply = Tripled.apply
BOX = {"x": 2.0}


def _tries(s, b, h, i, j):
    try:
        return s * BOX["y"]
    except KeyError:
        return s


def _tripled(s, b, h, i, j):
    return apply(s)


def _prints(s, b, h, i, j):
    print(s)
    return s


def _raises(s, b, h, i, j):
    raise ValueError(s)


_foreign: dict[str, Any] = {"__name__": "math"}
exec("def fn(s, b, h, i, j):\n    return s * 2", _foreign)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], type, str]] = {
    "a value": (lambda x: lambda s, b, h, i, j: s * x[0, 0, 0, 0].item(), ModError,
                "the score function reads the value of a tensor (item)"),
    "a NumPy array": (lambda x: (lambda a: lambda s, b, h, i, j: s * a[0])(np.ones(3)), ModError,
                      "the score function uses a value that is NumPy's"),
    "an op": (lambda x: lambda s, b, h, i, j: s + torch.rand(()), ModError, "the score function"),
    "no number": (lambda x: lambda s, b, h, i, j: None, ModError, "the score function"),
    "a handler": (lambda x: _tries, ModError, "the score function handles exceptions"),
    "a method's handler": (lambda x: functools.partial(_tries), ModError,
                           "the score function handles exceptions"),
    "an autograd Function": (lambda x: _tripled, ModError, "the score function reads"),
    "an autograd Function, called inside": (
        lambda x: lambda s, b, h, i, j: apply(s) * x.shape[2], ModError, "the score function"),
    "a branch": (lambda x: lambda s, b, h, i, j: s if i > j else s * x.shape[2], ModError,
                 "the score function makes a Python decision on the value of a symbol"),
    "an and": (lambda x: lambda s, b, h, i, j: (i > j and j) * s * x.shape[2], ModError,
               "the score function makes a Python decision on the value of a symbol"),
    "an assertion": (lambda x: lambda s, b, h, i, j: asserts(s, i, j) * x.shape[2], ModError,
                     "the score function makes a Python decision on the value of a symbol"),
    "an assertion of PyTorch's": (
        lambda x: lambda s, b, h, i, j: s * x.shape[2] if torch._assert(i > j, "") is None else s,
        ModError, "the score function makes a Python decision on the value of a symbol"),
    "other arguments": (lambda x: lambda s, i, j: s * x.shape[2], ModError,
                        "the score function takes other arguments; a score takes (score, b, h"),
    "print": (lambda x: functools.partial(_prints), ModError, "the score function reads print"),
    "an error": (lambda x: functools.partial(_raises), ModError,
                 "the score function cannot be traced by torch.compile"),
    "a code of its own": (lambda x: functools.partial(_foreign["fn"]), ModError,
                          "the score function runs fn, whose globals are no module's"),
    "no function": (lambda x: 3, ArgumentError, "score"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_first_line_is_ours(name):
    make, kind, line = REFUSED[name]
    x = torch.randn(1, H, L, D, generator=_draw, requires_grad=True)
    with pytest.raises(kind) as error:
        torch.compile(lambda x: hw.attention(x, x, x, make(x)), backend="eager", fullgraph=True)(x)
    assert str(error.value).startswith(line)


def test_the_first_line_of_an_argument_error_is_ours():
    x = torch.randn(1, H, L, D, generator=_draw)
    for call in (
        lambda x: hw.attention(x, x[..., :3], x), lambda x: hw.attention(x, x, x, dropout=2.0),
        lambda x: hw.attention(x, x[:, :, :3, :2], x, hw.softcap(3.0)),
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as plain:
            call(x)
        with pytest.raises(ArgumentError) as error:
            torch.compile(call, backend="eager", fullgraph=True)(x)
        assert str(error.value).startswith(str(plain.value).splitlines()[0])


@pytest.mark.parametrize("fn", [Tripled.apply, apply], ids=["by attribute", "by another name"])
def test_an_autograd_function_keeps_its_derivative(fn):
    """Compiled with a graph break; fullgraph=True refuses it."""
    x = torch.randn(1, H, L, D, generator=_draw, requires_grad=True)
    step = lambda x: hw.attention(x, x, x, lambda s, b, h, i, j: fn(s) * x.shape[2])
    right = torch.autograd.grad(step(x).square().sum(), x)[0]
    out = torch.compile(step, backend="aot_eager")(x)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), x)[0], right)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(step, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("dynamic", [None, True])
def test_block_masks_whose_sizes_change(dynamic):
    """The last batch of an epoch is smaller, too."""
    compiled = torch.compile(hw.attention, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for batch, length in ((4, 160), (4, 200), (3, 200)):
        x = torch.randn(batch, H, length, D, generator=_draw)
        ids = torch.randint(0, 3, (batch, length), generator=_draw).sort(-1).values
        mask = hw.block_mask(hw.causal() & hw.document(ids), batch, 1, length, length)
        right = _dense(x, lambda s, *at: s, mask.mask)
        torch.testing.assert_close(
            compiled(x, x, x, mask=mask).double(), right, rtol=1e-4, atol=1e-4
        )
