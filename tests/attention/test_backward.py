"""`attention_backward`, next to autograd over all keys at once."""

import pytest
import torch
from torch import Tensor

import headway as hw
from cases import BY_NAME, problem
from checks import compare
from headway.errors import ArgumentError, BackendRefused

CASES = """length_65 lengths_127_301_end mask_padding_sink mask_prefix_lm mask_no_row_sink mask_nothing
    mask_by_batch mask_causal_document score_by_batch score_twice_masked score_bias_all score_holes
    scale_-0.5_score""".split()


def parts_of(name: str, backend: str, dtype: torch.dtype, cuts: int) -> dict[str, Tensor]:
    """The results of a case from parts of its keys, each with a forward and a backward of its own.

    Score and mask see a part from 0 on, so that they are told where it begins.
    """
    given = problem(BY_NAME[name], dtype)
    q, k, v = (x.detach() for x in (given.q, given.k, given.v))
    size = -(-given.case.kv_len // cuts)
    parts = []
    for n, (keys, values) in enumerate(zip(k.split(size, 2), v.split(size, 2), strict=True)):
        score, mask, first = given.score(), given.mask(), n * size
        new_score = (
            None
            if score is None
            else (lambda s, b, h, i, j, f=score, n=first: torch.as_tensor(f(s, b, h, i, j + n)))
        )
        new_mask = None if mask is None else (lambda b, h, i, j, f=mask, n=first: f(b, h, i, j + n))
        options = {
            "scale": given.case.scale, "sink": given.sink if n == 0 else None, "backend": backend,
        }  # fmt: skip
        parts.append(((keys, values), (new_score, new_mask), options))
    forwards = [
        hw.attention_with_stats(q, *keys, *mods, **options) for keys, mods, options in parts
    ]
    out, lse = hw.merge(*[(r.out.detach().to(r.lse.dtype), r.lse.detach()) for r in forwards])
    grads = [
        hw.attention_backward(
            q, *keys, out, lse, given.dout, given.dlse, *mods, **options
        ) for keys, mods, options in parts
    ]  # fmt: skip
    results = {
        "out": out.to(dtype), "lse": lse,
        "max_logit": torch.stack([r.max_logit for r in forwards]).amax(0),
        "grad q": sum(g.dq for g in grads),
        "grad k": torch.cat([g.dk for g in grads], 2), "grad v": torch.cat([g.dv for g in grads], 2),
    }  # fmt: skip
    if given.sink is not None:
        assert [g.dsink is None for g in grads] == [False] + [True] * (len(grads) - 1)
        results["grad sink"] = grads[0].dsink
    assert all(g.dtype == lse.dtype for g in results.values() if g is not results["out"])
    totals = [sum(same) for same in zip(*[g.captured for g in grads], strict=True)]
    for key, t in given.learned().items():  # in the order of their use, and of shapes of their own
        (results[f"grad {key}"],) = (x.to(t.dtype) for x in totals if x.shape == t.shape)
    leaves = {f"grad {name}": x for name, x in given.leaves().items()}
    return {n: x.to(leaves[n].dtype) if n in leaves else x for n, x in results.items()}


@pytest.mark.parametrize(
    ("name", "backend", "cuts"),
    [
        *[(name, "cpu", 3) for name in CASES],
        *[(name, "reference", 1 + n) for n, name in enumerate(CASES[:3])],
    ],
)
def test_parts_of_the_keys_add_up(name, backend, cuts):
    case = BY_NAME[name]
    made = parts_of(name, backend, torch.float64, cuts)
    assert compare(case, torch.float64, made, True) == []


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
def test_the_gradient_of_an_entropy_of_all_keys(backend, with_dlse):
    q, k, v, sink, dout = (
        torch.randn(*x, dtype=torch.float64)
        for x in ((2, 4, 9, 8), (2, 2, 21, 8), (2, 2, 21, 5), (4,), (2, 4, 9, 5))
    )
    dentropy, dlse = torch.randn(2, 2, 4, 9, dtype=torch.float64)
    table = torch.randn(4, 21, dtype=torch.float64, requires_grad=True)
    score = lambda s, b, h, i, j: s + table[h, j]
    inputs = [x.requires_grad_() for x in (q, k, v, sink)]
    whole = hw.attention_with_stats(
        q, k, v, score, hw.causal(2), sink=sink, backend=backend, entropy=True
    )
    sent = {"out": dout, "entropy": dentropy} | ({"lse": dlse} if with_dlse else {})
    right = torch.autograd.grad(
        [getattr(whole, name) for name in sent], [*inputs, table], list(sent.values())
    )
    q, k, v, sink = (x.detach() for x in inputs)
    starts = range(0, 21, 7)
    parts = [
        ((k[:, :, n : n + 7], v[:, :, n : n + 7]),
         (lambda s, b, h, i, j, n=n: score(s, b, h, i, j + n), hw.causal(2 - n)),
         {"sink": None if n else sink, "backend": backend}) for n in starts
    ]  # fmt: skip
    forwards = [
        hw.attention_with_stats(q, *keys, *mods, **options, entropy=True)
        for keys, mods, options in parts
    ]
    out, lse = hw.merge(*[(r.out.detach(), r.lse.detach()) for r in forwards])
    shares = [(r.lse.detach() - lse).exp() for r in forwards]
    entropy = sum(
        torch.where(w == 0, 0.0, w * (r.entropy.detach() - w.log()))
        for w, r in zip(shares, forwards, strict=True)
    )
    torch.testing.assert_close(entropy, whole.entropy.detach())
    grads = [
        hw.attention_backward(
            q, *keys, out, lse, dout, dlse if with_dlse else None, *mods, **options,
            entropy=entropy, dentropy=dentropy,
        ) for keys, mods, options in parts
    ]  # fmt: skip
    made = (
        sum(g.dq for g in grads), torch.cat([g.dk for g in grads], 2),
        torch.cat([g.dv for g in grads], 2), grads[0].dsink, sum(g.captured[0] for g in grads),
    )  # fmt: skip
    for ours, theirs in zip(made, right, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_dtypes(dtype):
    made = parts_of("length_65", "cpu", dtype, 1)
    assert compare(BY_NAME["length_65"], dtype, made, True) == []


def example(**changes) -> dict:
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 5)
    out, lse, _ = hw.attention_with_stats(q, k, v)
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": torch.randn_like(out)}
    return given | changes


def test_captured_tensors_in_the_order_of_their_use():
    given = example()
    last, first, constant = torch.randn(9), torch.randn(4), torch.randn(6)
    last.requires_grad_()
    first.requires_grad_()
    score = lambda s, b, h, i, j: s * first[h] + constant[i] + last[j]
    out, lse, _ = hw.attention_with_stats(given["q"], given["k"], given["v"], score)
    right = torch.autograd.grad(out, (first, last), given["dout"])
    made = hw.attention_backward(**given | {"out": out, "lse": lse}, score=score)
    assert len(made.captured) == 2
    for ours, theirs in zip(made.captured, right, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_dropout_needs_its_seed():
    given = example()
    leaves = [given[n].requires_grad_() for n in "qkv"]
    out, lse, _ = hw.attention_with_stats(*leaves, dropout=0.3, seed=5)
    right = torch.autograd.grad(out, leaves, given["dout"])
    made = hw.attention_backward(**given | {"out": out, "lse": lse}, dropout=0.3, seed=5)
    for ours, theirs in zip(made[:3], right, strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(ArgumentError, match="dropout needs the seed of the forward"):
        hw.attention_backward(**given, dropout=0.3)


def test_it_is_not_differentiable():
    given = example()
    given["q"].requires_grad_()
    made = hw.attention_backward(**given)
    with pytest.raises(BackendRefused, match="no second derivative"):
        made.dq.sum().backward()
    with torch.no_grad():
        assert not hw.attention_backward(**given).dq.requires_grad


def test_compiled_and_under_vmap():
    given = example()
    right = hw.attention_backward(**given, mask=hw.causal())
    call = lambda **named: hw.attention_backward(**named, mask=hw.causal())
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(**given)[:3], right[:3], strict=True):
        torch.testing.assert_close(ours, theirs)
    batched = torch.vmap(lambda dout: call(**given | {"dout": dout})[:3])
    for ours, theirs in zip(batched(torch.stack([given["dout"]] * 2)), right[:3], strict=True):
        torch.testing.assert_close(ours[1], theirs)


REFUSED = {
    "out": ({"out": torch.randn(1, 4, 6, 8)}, r"out must be a float tensor \(b, hq, q_len, dv\) ="),
    "lse": ({"lse": torch.randn(1, 4, 6, 1)}, r"lse must be a float tensor \(b, hq, q_len\) = \(1,"),
    "dout": ({"dout": None}, r"dout must be .* got NoneType"),
    "dlse": ({"dlse": torch.zeros(1, 4, 6).int()}, r"dlse must be a float tensor"),
    "entropy": ({"dentropy": torch.zeros(1, 4, 6)}, "entropy and dentropy go together"),
    "device": ({"lse": torch.zeros(1, 4, 6, device="meta")}, r"lse is on meta, q on cpu"),
    "k": ({"k": torch.randn(1, 2, 9, 7)}, r"q and k must have the same width"),
    "keyword": ({"is_causal": True}, r"write mask=headway\.causal\(\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changes, message = REFUSED[name]
    with pytest.raises((ArgumentError, TypeError), match=message):
        hw.attention_backward(**example(**changes))
