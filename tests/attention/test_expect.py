"""`expect`, against the dense definition, its gradients by PyTorch's autograd."""

import math
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

import headway as hw
from headway.backends import get
from headway.errors import ArgumentError, ModError
from headway.mods import retraced
from headway.row_statistics.scores import Observing
from headway.variants.expect import _score_first

B, HQ, HK, N, M, D = 2, 4, 2, 7, 9, 8
F64 = {"dtype": torch.float64, "requires_grad": True}


def learned() -> dict[str, Tensor]:
    return {
        "q": torch.randn(B, HQ, N, D, **F64), "k": torch.randn(B, HK, M, D, **F64),
        "table": torch.randn(HQ, M, **F64), "gain": torch.randn(HQ, **F64),
        "sink": torch.randn(HQ, **F64),
    }  # fmt: skip


def dense_scores(q, k, score, mask) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The scores T of all pairs, which of them are kept, and their positions."""
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[-1] ** 0.5
    positions = torch.meshgrid(*map(torch.arange, logits.shape), indexing="ij")
    t = logits if score is None else score(logits, *positions)
    kept = t != -math.inf
    return t, kept if mask is None else kept & mask(*positions), positions


def dense(q, k, f, score, mask, sink) -> Tensor:
    b, n, m = q.shape[0], q.shape[2], k.shape[2]
    t, kept, positions = dense_scores(q, k, score, mask)
    all_logits = t.masked_fill(~kept, -math.inf)
    if sink is not None:
        all_logits = torch.cat([all_logits, sink[None, :, None, None].expand(b, -1, n, 1)], -1)
    p = torch.where(kept, all_logits.softmax(-1)[..., :m], 0.0)
    number = torch.as_tensor(f(*positions, t)).to(q.dtype)
    return torch.where(kept, p * number, 0.0).sum(-1)


SCORES = {
    "none": lambda of: None,
    "table": lambda of: lambda s, b, h, i, j: s + of["table"][h, j],
    "drops": lambda of: (
        lambda s, b, h, i, j: torch.where((i + j) % 3 == 0, -math.inf, s * of["gain"][h])
    ),
}
MASKS = {"none": None, "causal": hw.causal(), "a row": lambda b, h, i, j: (i != 2) & (j <= i + 1)}
FUNCTIONS = {
    "distance": lambda of: lambda b, h, i, j, s: i - j,
    "mass": lambda of: lambda b, h, i, j, s: j < 3,
    "score": lambda of: lambda b, h, i, j, s: s,
    "learned": lambda of: lambda b, h, i, j, s: torch.tanh(s) * of["gain"][h] + of["table"][h, j],
    "a number": lambda of: lambda b, h, i, j, s: 3,
}


@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_definition(function, with_sink):
    for n, (score, mask) in enumerate((s, m) for s in SCORES for m in MASKS):
        of = learned()
        f, s, sink = FUNCTIONS[function](of), SCORES[score](of), of["sink"] if with_sink else None
        backend = ("cpu", "reference")[n % 2]
        made = hw.expect(of["q"], of["k"], f, s, MASKS[mask], sink=sink, backend=backend)
        right = dense(of["q"], of["k"], f, s, MASKS[mask], sink)
        torch.testing.assert_close(made, right, rtol=1e-10, atol=1e-10)
        sent = torch.randn_like(right)
        for name, x in of.items():
            ours, theirs = (
                torch.autograd.grad((e * sent).sum(), x, allow_unused=True, retain_graph=True)[0]
                for e in (made, right)
            )
            zero, case = torch.zeros_like(x), f"{score}, {mask}, {name}"
            torch.testing.assert_close(
                zero if ours is None else ours, zero if theirs is None else theirs,
                rtol=1e-9, atol=1e-9, msg=lambda text, case=case: f"{case}: {text}",
            )  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_one_forward(backend):
    q, k, sink, table = (torch.randn(*x) for x in ((1, 2, 5, 8), (1, 1, 7, 8), (2,), (7,)))
    score = lambda s, b, h, i, j: torch.tanh(s) + table[j]
    mask = lambda b, h, i, j: (j <= i + 2) & (i != 3)
    f = lambda b, h, i, j, s: s * table[j] + h
    forward = get(backend).forward
    with mock.patch.object(get(backend), "forward", side_effect=forward) as forwards:
        made = hw.expect(q, k, f, score, mask, sink=sink, backend=backend)
    assert forwards.call_count == 1
    right = hw.expect(q.double(), k.double(), f, score, mask, sink=sink.double())
    torch.testing.assert_close(made.double(), right, rtol=1e-5, atol=1e-6)


def test_gradcheck_of_an_entropy():
    of = learned()
    values = of["k"].new_zeros(B, HK, M, 1)

    def entropy(q: Tensor, k: Tensor) -> Tensor:
        lse = hw.attention_with_stats(q, k, values, mask=hw.causal()).lse
        return lse - hw.expect(q, k, lambda b, h, i, j, s: s, mask=hw.causal())

    q, k = of["q"][:1, :2, :4], of["k"][:1, :1, :4]
    values = values[:1, :1, :4]
    assert torch.autograd.gradcheck(entropy, (q, k))


NAMES = "q", "k", "table", "gain", "sink"


def both_ways(backend: str):
    """A mean as a function of all that it reads, and by its definition."""

    def call(mean, *x, **options):
        of = dict(zip(NAMES, x, strict=True))
        f, score = FUNCTIONS["learned"](of), SCORES["drops"](of)
        return mean(x[0], x[1], f, score, lambda b, h, i, j: j <= i, sink=of["sink"], **options)

    return partial(call, hw.expect, backend=backend), partial(call, dense)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_forward_mode(backend):
    of = learned()
    inputs = tuple(of[name].detach().float() for name in NAMES)
    along = tuple(map(torch.randn_like, inputs))
    made, right = both_ways(backend)
    made = torch.func.jvp(made, inputs, along)
    right = torch.func.jvp(right, *(tuple(x.double() for x in xs) for xs in (inputs, along)))
    for ours, theirs in zip(made, right, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_gradcheck():
    of = learned()
    assert torch.autograd.gradcheck(both_ways("cpu")[0], tuple(of[name] for name in NAMES))


# A score, a mask, a function, and whether there is a sink: small ones for the GPU kernels.
SMALL = (
    ("none", "none", "distance", False), ("none", "causal", "score", True),
    ("table", "a row", "mass", False), ("drops", "causal", "learned", True),
)  # fmt: skip


def small(backend: str, dtype: torch.dtype, tolerance: float, calls: tuple = SMALL) -> None:
    """Compare a few calls, and their gradients, with the definition in float64."""
    for score, mask, function, with_sink in calls:
        of = {name: x.detach()[:1, :2] for name, x in learned().items() if name in "qk"}
        of["k"] = of["k"][:, :1]
        of |= {name: x.detach()[:2] for name, x in learned().items() if name not in "qk"}
        rounded = {name: x.to(dtype if name in "qk" else torch.float32) for name, x in of.items()}
        exact = {name: x.double().requires_grad_() for name, x in rounded.items()}
        rounded = {name: x.requires_grad_() for name, x in rounded.items()}
        made, right = (
            call(
                of["q"], of["k"], FUNCTIONS[function](of), SCORES[score](of), MASKS[mask],
                sink=of["sink"] if with_sink else None, **options,
            )
            for call, of, options in (
                (hw.expect, rounded, {"backend": backend}), (dense, exact, {})
            )
        )  # fmt: skip
        case = f"{score}, {mask}, {function}"
        message = lambda text, case=case: f"{case}: {text}"
        torch.testing.assert_close(made.double(), right, rtol=0, atol=1e-5, msg=message)
        sent = torch.randn_like(right)
        for name, x in rounded.items():
            grads = [
                torch.autograd.grad((e * s).sum(), y, allow_unused=True, retain_graph=True)[0]
                for e, s, y in ((made, sent.float(), x), (right, sent, exact[name]))
            ]
            ours, theirs = (exact[name] * 0 if g is None else g.double() for g in grads)
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=message)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small(dtype):
    small("cpu", dtype, 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("cpu", torch.float32), ("cpu", F64["dtype"]), ("reference", F64["dtype"])],
)
def test_a_function_that_is_infinite_at_masked_pairs(backend, dtype):
    sizes = (1, 2, 6, 8), (1, 2, 6, 8), (6,)
    q, k, table = (torch.randn(*x, dtype=dtype, requires_grad=True) for x in sizes)
    right_table = table.detach().requires_grad_()
    f = lambda b, h, i, j, s: torch.log((i - j + 1) * 1.0) * table[i - j] / (i - j + 1)
    made = hw.expect(q, k, f, mask=hw.causal(), backend=backend)
    distance = torch.arange(6)[:, None] - torch.arange(6)
    past = distance.clamp(min=0)
    number = torch.log(past + 1.0) * right_table[past] / (past + 1)
    logits = (q @ k.mT / 8**0.5).masked_fill(distance < 0, -math.inf)
    right = (logits.softmax(-1) * number).sum(-1)
    torch.testing.assert_close(made, right)
    sent = torch.randn_like(right)
    for ours, theirs in zip(
        torch.autograd.grad((made * sent).sum(), (q, k, table)),
        torch.autograd.grad((right * sent).sum(), (q, k, right_table)), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(ours, theirs)


def test_what_it_calls_is_traced_once():
    score = lambda s, b, h, i, j: 2 * s
    for f in (of({}) for name, of in FUNCTIONS.items() if name != "learned"):
        observing = Observing(score, partial(_score_first, f))
        assert retraced("score", observing, torch.float32) is None


def test_rows_whose_every_score_is_large():
    q, k = torch.randn(1, 1, 3, D), torch.randn(1, 1, 5, D)
    made = hw.expect(q, k, lambda b, h, i, j, s: j * 1.0, lambda s, b, h, i, j: s - 1e9)
    scores = (q @ k.mT / D**0.5 - 1e9).double()
    right = (scores.softmax(-1) * torch.arange(5)).sum(-1)
    torch.testing.assert_close(made.double(), right, rtol=1e-6, atol=1e-6)


def test_half_precision_is_that_of_its_inputs():
    q, k = (torch.randn(2, 4, n, 32).bfloat16() for n in (70, 90))
    k = k[:, :2]
    f = lambda b, h, i, j, s: s
    made = hw.expect(q, k, f)
    assert made.dtype == torch.float32
    right = hw.expect(q.double(), k.double(), f)
    torch.testing.assert_close(made.double(), right, rtol=1e-5, atol=1e-5)


def test_compiled_and_transformed():
    q, k = torch.randn(1, 2, 5, 8, requires_grad=True), torch.randn(1, 2, 6, 8)
    call = lambda x: hw.expect(x, k, lambda b, h, i, j, s: s * j, mask=hw.causal())
    right = call(q)
    (right_grad,) = torch.autograd.grad(right.sum(), q)
    made = torch.compile(call, fullgraph=True, backend="aot_eager")(q)
    torch.testing.assert_close(made, right)
    torch.testing.assert_close(torch.autograd.grad(made.sum(), q)[0], right_grad)
    torch.testing.assert_close(torch.func.grad(lambda x: call(x).sum())(q), right_grad)
    batch = torch.vmap(call)(torch.stack([q, 2 * q]))
    torch.testing.assert_close(batch[1], call(2 * q))


Q, K = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 6, 8)
REFUSED = {
    "too few arguments": (lambda: hw.expect(Q, K, lambda s, b: s), ArgumentError, "score last"),
    "a mask": (lambda: hw.expect(Q, K, hw.causal()), ArgumentError, r"f=causal\(\) must be a func"),
    "values": (lambda: hw.expect(Q, K, K), ArgumentError, r"f=\(1, 2, 6, 8\) float32 must be"),
    "a vector": (
        lambda: hw.expect(Q, K, lambda b, h, i, j, s: torch.ones(3)), ModError, "as one number"
    ),
    "nothing": (lambda: hw.expect(Q, K, lambda b, h, i, j, s: None), ModError, "return one number"),
    "keyword": (lambda: hw.expect(Q, K, print, is_causal=True), TypeError, r"mask=headway\.causal"),
    "shape": (
        lambda: hw.expect(Q[0], K, lambda b, h, i, j, s: s), ArgumentError, r"q must be \(batch"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
