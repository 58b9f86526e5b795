"""What a function can see: found, traced again when it changes, never stale."""

import functools
import gc
import math
import types
import weakref

import pytest
import torch
from torch import nn

import headway as hw
from headway.mods import lowering
from headway.mods.tracing import capture

L = 6
QKV = [torch.zeros(1, 2, L, 4), torch.zeros(1, 2, L, 4), torch.randn(1, 2, L, 4)]


def _probabilities(score) -> torch.Tensor:
    """(L, L): the softmax of the score alone, since the logits are 0."""
    eye = torch.eye(L).expand(1, 2, L, L)
    return hw.attention(QKV[0], QKV[1], eye, score)[0, 0]


def _expect(score, numbers: torch.Tensor) -> None:
    right = torch.softmax(numbers.float(), -1)
    torch.testing.assert_close(_probabilities(score), right.expand(L, L), rtol=1e-5, atol=1e-6)


@pytest.fixture
def traces(monkeypatch) -> list:
    """Grows by one for every function traced."""
    made, real = [], lowering.trace

    def counted(*args, **kwargs):
        made.append(args[1])
        return real(*args, **kwargs)

    monkeypatch.setattr(lowering, "trace", counted)
    return made


J = torch.arange(L)


def _closure(tensor):
    return lambda s, b, h, i, j: s + tensor[j]


def _default(tensor):
    return lambda s, b, h, i, j, t=tensor: s + t[j]


def _keyword(tensor):
    def score(s, b, h, i, j, *, t=tensor):
        return s + t[j]

    return score


def _partial(tensor):
    return functools.partial(lambda t, s, b, h, i, j: s + t[j], tensor)


def _partial_keyword(tensor):
    return functools.partial(lambda s, b, h, i, j, t: s + t[j], t=tensor)


class Callable_:
    def __init__(self, tensor) -> None:
        self.tensor = tensor

    def __call__(self, s, b, h, i, j):
        return s + self.tensor[j]

    def method(self, s, b, h, i, j):
        return s + self.tensor[j]


class Module(nn.Module):
    def __init__(self, tensor) -> None:
        super().__init__()
        self.register_buffer("tensor", tensor)

    def forward(self, s, b, h, i, j):
        return s + self.tensor[j]


class Deep(nn.Module):
    def __init__(self, tensor) -> None:
        super().__init__()
        self.inner = Module(tensor)
        self.rows = [tensor]

    def forward(self, s, b, h, i, j):
        return self.inner(s, b, h, i, j) + 0 * self.rows[0][j]


def _through_another(tensor):
    def inner(j):
        return tensor[j]

    return lambda s, b, h, i, j: s + inner(j)


def _in_a_list(tensor):
    tensors = [torch.zeros(L), tensor]
    return lambda s, b, h, i, j: s + tensors[1][j]


def _in_a_dict(tensor):
    tensors = {"one": {"two": tensor}}
    return lambda s, b, h, i, j: s + tensors["one"]["two"][j]


def _namespace(tensor):
    config = types.SimpleNamespace(tensor=tensor)
    return lambda s, b, h, i, j: s + config.tensor[j]


def _library(tensor):
    return hw.bias(tensor)


def _between(tensor):
    return hw.softcap(1e6) >> (lambda s, b, h, i, j: s + tensor[j])


FORMS = [
    _closure, _default, _keyword, _partial, _partial_keyword, Callable_,
    lambda t: Callable_(t).method, Module, Deep, _through_another, _in_a_list, _in_a_dict,
    _namespace, _library, _between,
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__.strip("_<>"))
def test_tensors_are_found_wherever_they_are(form, traces):
    """Traced once; other tensors under the same code are read, and so are writes in place."""
    form(torch.randn(L))
    for n in range(3):
        tensor = torch.randn(L)
        score = form(tensor)
        _expect(score, tensor)
        tensor.mul_(-1)
        _expect(score, tensor)
        if n == 0:
            first = len(traces)
    assert len(traces) == first


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__.strip("_<>"))
def test_gradients_reach_them(form):
    tensor = torch.randn(L)
    leaf = nn.Parameter(tensor) if form in (Module, Deep) else tensor.requires_grad_()
    score = form(leaf)
    out = hw.attention(*QKV, score)
    (grad,) = torch.autograd.grad(out.square().sum(), leaf)
    plain = torch.softmax(leaf.expand(1, 2, L, L), -1) @ QKV[2]
    (right,) = torch.autograd.grad(plain.square().sum(), leaf)
    torch.testing.assert_close(grad, right, rtol=1e-4, atol=1e-5)


# -- numbers and everything else: traced again ----------------------------------------------------------


def test_a_number_in_a_closure():
    n = 1.0
    score = lambda s, b, h, i, j: s + n * j
    _expect(score, J)
    n = -2.0
    _expect(score, -2.0 * J)


def test_a_number_made_in_a_loop():
    for n in (1.0, -1.0, 0.5):
        _expect(lambda s, b, h, i, j, n=n: s + n * j, n * J)
        _expect(functools.partial(lambda n, s, b, h, i, j: s + n * j, n), n * J)
        _expect(lambda s, b, h, i, j: s + n * j, n * J)  # noqa: B023 - called here


def test_a_number_and_its_likeness():
    """1, 1.0 and True are equal and hash alike, yet are not the same constant."""
    for n, right in ((2, J // 2), (2.0, J / 2), (True, J)):
        score = lambda s, b, h, i, j, n=n: s + (j // n if isinstance(n, int) else j / n)
        _expect(score, right)
    for zero in (0.0, -0.0):
        score = lambda s, b, h, i, j, z=zero: s + math.copysign(1.0, z) * j
        _expect(score, J if str(zero)[0] != "-" else -J)


def test_an_attribute():
    scale = Callable_(torch.ones(L))
    scale.n = 1.0
    score = lambda s, b, h, i, j: s + scale.n * j
    _expect(score, J)
    scale.n = 3.0
    _expect(score, 3.0 * J)


def test_a_container():
    numbers = {"n": [1.0]}
    score = lambda s, b, h, i, j: s + numbers["n"][0] * j
    _expect(score, J)
    numbers["n"][0] = 4.0
    _expect(score, 4.0 * J)
    numbers["n"] = (5.0,)
    _expect(score, 5.0 * J)


N = 1.0
T = torch.ones(L)


def _globals(s, b, h, i, j):
    return s + N * j + T[j]


def test_globals(monkeypatch):
    _expect(_globals, J)
    monkeypatch.setitem(globals(), "N", 2.0)
    _expect(_globals, 2 * J)
    monkeypatch.setitem(globals(), "T", 5.0 * J)
    _expect(_globals, 7 * J)


def _helper(j):
    return 1.0 * j


def _calls_helper(s, b, h, i, j):
    return s + _helper(j)


def test_a_function_that_it_calls(monkeypatch):
    _expect(_calls_helper, J)
    monkeypatch.setitem(globals(), "_helper", lambda j: -2.0 * j)
    _expect(_calls_helper, -2 * J)


def test_a_module_attribute(monkeypatch):
    module = types.ModuleType("settings")
    module.n = 1.0
    monkeypatch.setitem(globals(), "settings", module)
    score = lambda s, b, h, i, j: s + settings.n * j
    _expect(score, J)
    module.n = 2.5
    _expect(score, 2.5 * J)


def test_the_shape_of_a_tensor():
    """A function may read it: `table.shape[0] - 1` is part of the formula."""

    def score_of(t):
        return lambda s, b, h, i, j: s + t[j.clamp(max=t.shape[0] - 1)]

    for n in (L, 3, 2):
        tensor = torch.randn(n)
        _expect(score_of(tensor), tensor[J.clamp(max=n - 1)])


def test_the_dtype_of_a_tensor():
    for dtype in (torch.float32, torch.int64, torch.float16, torch.bool):
        tensor = (torch.arange(L) % 2).to(dtype)
        _expect(lambda s, b, h, i, j, t=tensor: s + t[j], tensor)


def test_one_tensor_under_two_names():
    def score_of(a, c):
        return lambda s, b, h, i, j: s + a[j] - 2 * c[j]

    one, other = torch.randn(L), torch.randn(L)
    for a, c in ((one, one), (one, other), (other, one), (other, other)):
        _expect(score_of(a, c), a - 2 * c)


def test_the_training_mode_of_a_module():
    class Switch(nn.Module):
        def forward(self, s, b, h, i, j):
            return s + (j if self.training else -j)

    module = Switch()
    _expect(module, J)
    _expect(module.eval(), -J)


def test_a_cycle_ends():
    box = types.SimpleNamespace(n=2.0)
    box.self = box
    _expect(lambda s, b, h, i, j: s + box.self.self.n * j, 2 * J)


@pytest.mark.parametrize("guarding", [False, True])
def test_a_tensor_that_is_its_own_attribute_ends(guarding):
    table = torch.randn(L)
    table.me, table.n = table, 3
    reads = capture.collect_reads(lambda s, b, h, i, j: s + table[j] * table.me.me.n, guarding)
    assert reads.opaque_read is None
    assert len(reads.guards) < 10


def test_a_name_assigned_later():
    def make():
        score = lambda s, b, h, i, j: s + later[j]
        later = torch.randn(L)
        return score, later

    score, later = make()
    _expect(score, later)


def test_numbers_of_library_values_are_run_time_arguments(traces):
    for n in range(1, 5):
        hw.attention(*QKV, hw.softcap(float(n)), hw.causal(n) & hw.sliding_window(n))
        if n == 1:
            first = len(traces)
    assert len(traces) == first


def test_what_a_collection_finalizes_is_not_part_of_a_function(traces):
    class Cycle:
        def __init__(self):
            self.itself = self
            weakref.finalize(self, finalized.append, 1)

    def score(s, b, h, i, j):
        return s + 0.5 * j

    def callback(phase, info):  # as Hypothesis has one
        finalized.append(math.floor(2.5))

    finalized, before = [], gc.get_threshold()
    for _ in range(3):
        Cycle()
        gc.callbacks.append(callback)
        gc.set_threshold(1)
        try:
            _expect(score, 0.5 * J)
        finally:
            gc.set_threshold(*before)
            gc.callbacks.remove(callback)
    assert {1, 2} <= {*finalized}
    assert len(traces) == 1
