"""Tangents of the cases of the table, by definition: the double backward of the dense oracle."""

import torch
from torch import Tensor

import oracle
from cases import Case, Problem
from checks import poisoned
from headway import backends
from headway.resolve import prepare
from headway.types import Dual, Tangents


def directions(given: Problem, moving: tuple[str, ...] | None = None) -> dict[str, Tensor]:
    """A random tangent of every leaf, or of some, of the leaf's shape, dtype and layout."""
    draw = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(leaf.shape, generator=draw, dtype=torch.float64).to(leaf.dtype)
        for name, leaf in given.leaves().items()
        if moving is None or name in moving
    }


@torch.enable_grad()
def dense(given: Problem, along: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """out, lse, the entropy if the case asks for it, and their tangents, in the problem's dtype:
    <cotangents, J t> = <Jᵀ cotangents, t>, differentiated by the cotangents."""
    case: Case = given.case
    keep = None
    if case.dropout:
        at = oracle.grid(case.b, case.hq, case.q_len, case.kv_len)
        keep = oracle.keep(case.dropout, given.seed, *at)
    made = oracle.attention(
        given.q, given.k, given.v, given.score(plain=True), given.mask(plain=True),
        scale=case.scale, sink=given.sink, keep=keep, dropout=case.dropout, entropy=case.entropy,
    )  # fmt: skip
    results = [x for x in (made.out, made.lse, made.entropy) if x is not None]
    return *[x.detach() for x in results], *[_moved(x, given, along) for x in results]


def _moved(result: Tensor, given: Problem, along: dict[str, Tensor]) -> Tensor:
    """The tangent of a dense result."""
    leaves = [given.leaves()[name] for name in along]
    tangent = torch.zeros_like(result)
    if not (result.requires_grad and leaves):
        return tangent
    cotangent = torch.zeros_like(result, requires_grad=True)
    grads = torch.autograd.grad(
        result, leaves, cotangent, create_graph=True, allow_unused=True, retain_graph=True
    )
    pairs = [
        (g, t) for g, t in zip(grads, along.values(), strict=True)
        if g is not None and g.requires_grad
    ]  # fmt: skip
    if pairs:
        grads = [g for g, _ in pairs]
        (by_cotangent,) = torch.autograd.grad(
            grads, cotangent, [t.to(g.dtype) for g, t in pairs], allow_unused=True,
            retain_graph=True,
        )  # fmt: skip
        tangent = tangent if by_cotangent is None else by_cotangent
    return tangent.detach()


def rounded(
    inputs: dict[str, Tensor], along: dict[str, Tensor], factors: torch.dtype | None
) -> Tensor:
    """out' in float64; with `factors` of a dense computation that rounds P and P (T' - lse') to
    that dtype before their products, and the result."""
    q, k, v, a, b, c = (t.double() for t in (*inputs.values(), *along.values()))
    scale = q.shape[-1] ** -0.5
    p = (scale * q @ k.mT).softmax(-1)
    t = scale * (a @ k.mT + q @ b.mT)
    if factors is None:
        return (p * (t - (p * t).sum(-1, keepdim=True))) @ v + p @ c
    narrow = lambda x: x.to(factors).double()
    return narrow(narrow(p * (t - (p * t).sum(-1, keepdim=True))) @ v + narrow(p) @ c)


def run(given: Problem, along: dict[str, Tensor], backend: str, **options) -> Dual:
    case = given.case
    spec, call = prepare(
        given.q, given.k, given.v, given.score(), given.mask(), scale=case.scale, sink=given.sink,
        dropout=case.dropout, seed=given.seed if case.dropout else None, backend=backend,
        entropy=case.entropy, **options,
    )  # fmt: skip
    tables = []
    for table in call.captured.tensors[: spec.score_tensors]:
        same = [n for n, t in given.captured.items() if t.data_ptr() == table.data_ptr()]
        tangent = along.get(same[0]) if same else None  # (a value may keep a view of a tensor)
        tables.append(None if tangent is None else tangent.view(table.shape))
    moves = [along.get(name) for name in ("q", "k", "v", "sink")]
    with torch.no_grad(), poisoned():
        return backends.get(backend).tangent(spec, call, Tangents(*moves, tuple(tables)))


def compare(dual: Dual, exact: tuple[Tensor, ...], tolerance: float) -> None:
    names, results = _results(dual, len(exact) // 2)
    for name, got, right in zip(names, results, exact, strict=True):
        assert got.shape == right.shape, name
        finite = right[right.isfinite()].abs()
        size = max(1.0, finite.max().item() if finite.numel() else 0.0)
        apart = torch.where(got == right, 0.0, (got.double() - right).abs())  # infinities
        assert (apart <= tolerance * size).all(), f"{name}: {apart.max():.2g} off, of {size:.2g}"


def _results(dual: Dual, count: int) -> tuple[list[str], list[Tensor]]:
    """The results that `dense` has, by name: so many, then as many tangents."""
    names = ["out", "lse", "entropy"][:count]
    results = [getattr(dual, name) for name in names]
    results += [getattr(dual, f"{name}_tangent") for name in names]
    return [*names, *(f"{name}'" for name in names)], results


def too_far(dual: Dual, given: Problem, along: dict[str, Tensor]) -> list[str]:
    """What is farther from float64 than 1.5 times the error of the dense formulas in that dtype, all
    elements together."""
    exact = dense(given.copy(torch.float64), {name: t.double() for name, t in along.items()})
    plain, wrong = dense(given.copy(), along), []
    count = len(exact) // 2
    parts = *_results(dual, count), plain, exact
    for name, got, near, right in zip(*(part[count:] for part in parts), strict=True):
        error = lambda x, right=right: (x.double() - right).square().mean().sqrt().item()
        limit = 1.5 * error(near) + torch.finfo(got.dtype).eps * right.square().mean().sqrt().item()
        if not error(got) <= limit:
            wrong.append(f"{name}: {error(got):.2g} off, at most {limit:.2g}")
    return wrong


def moved_alike(size: float, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    q, k, v, q_tangent, v_tangent = (torch.randn(1, 1, 256, 64).to(dtype) for _ in range(5))
    alike = (size * torch.randn(1, 1, 1, 64)).expand(1, 1, 256, 64)
    noise = torch.randn(1, 1, 256, 64)
    k_tangent = (alike + noise).to(dtype)
    inputs = {"q": q, "k": k, "v": v}
    return inputs, {"q": q_tangent, "k": k_tangent, "v": v_tangent}
