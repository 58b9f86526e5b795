"""Tangents of the cases of the table, by definition: the double backward of the dense oracle."""

import torch
from torch import Tensor

import oracle
from cases import Case, Problem


def directions(given: Problem, moving: tuple[str, ...] | None = None) -> dict[str, Tensor]:
    """A random tangent of every leaf, or of some, of the leaf's shape, dtype and layout."""
    draw = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(leaf.shape, generator=draw, dtype=torch.float64).to(leaf.dtype)
        for name, leaf in given.leaves().items()
        if moving is None or name in moving
    }


@torch.enable_grad()
def dense(given: Problem, along: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse and their tangents, in the problem's dtype: <cotangents, J t> = <Jᵀ cotangents, t>,
    differentiated by the cotangents."""
    case: Case = given.case
    keep = None
    if case.dropout:
        at = oracle.grid(case.b, case.hq, case.q_len, case.kv_len)
        keep = oracle.keep(case.dropout, given.seed, *at)
    made = oracle.attention(
        given.q, given.k, given.v, given.score(plain=True), given.mask(plain=True),
        scale=case.scale, sink=given.sink, keep=keep, dropout=case.dropout,
    )  # fmt: skip
    tangents = []
    for result in (made.out, made.lse):
        tangent = torch.zeros_like(result)
        leaves = [given.leaves()[name] for name in along]
        if result.requires_grad and leaves:
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
                (moved,) = torch.autograd.grad(
                    grads, cotangent, [t.to(g.dtype) for g, t in pairs], allow_unused=True,
                    retain_graph=True,
                )  # fmt: skip
                tangent = tangent if moved is None else moved
        tangents.append(tangent.detach())
    return made.out.detach(), made.lse.detach(), *tangents


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
