"""The one check that every backend goes through, right ones and deliberately wrong ones."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

import headway as hw
import oracle
from cases import Case, Problem, problem
from memory_order import same_order

_NARROW = (torch.bfloat16, torch.float16)
_TENSOR_CORES = ("triton", "hopper")


def gradients(
    given: Problem, out: Tensor, lse: Tensor | None, entropy: Tensor | None = None
) -> dict[str, Tensor]:
    """Of every leaf ("grad q", ...), from the gradient of out, and those of lse and of the entropy
    if they are given."""
    leaves = given.leaves()
    sent = [(out, given.dout)] + ([] if lse is None else [(lse, given.dlse)])
    sent += [] if entropy is None else [(entropy, given.dentropy)]
    sent = [(x, grad) for x, grad in sent if x.requires_grad]  # none does where nothing is seen
    grads = [None] * len(leaves)
    if sent:
        outputs, sent = zip(*sent, strict=True)
        grads = torch.autograd.grad(
            outputs, list(leaves.values()), sent, allow_unused=True, retain_graph=True
        )
    return {
        f"grad {name}": torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }


class Yardstick(NamedTuple):
    """What the results must be, and how far from it honest ones may be."""

    exact: dict[str, Tensor]
    tolerance: dict[str, float]  # of any element
    rms: dict[str, float]  # of out, dq, dk, dv in half precision, over all elements
    dtypes: dict[str, torch.dtype]  # that the results must have


@lru_cache(maxsize=128)  # of a few numbers and small tensors: faults run over the same cases
@torch.enable_grad()
def yardstick(
    case: Case, dtype: torch.dtype, narrow_factors: bool = False
) -> dict[bool, Yardstick]:
    """With statistics (True; the gradient of lse is sent too) and without: the exact results in
    float64, of the very numbers that the dtype can hold, and tolerances: twice the error of plain
    PyTorch in that dtype, and a rounding of the largest terms; in half precision, for all elements
    together, 1.3 times what rounding does to what was accumulated exactly. `narrow_factors`: P and
    dS are rounded, too, before they are multiplied."""
    given, keep = problem(case, dtype), None
    if case.dropout:
        at = oracle.grid(case.b, case.hq, case.q_len, case.kv_len)
        keep = oracle.keep(case.dropout, given.seed, *at)

    def plainly(of: Problem, factors: torch.dtype | None = None) -> oracle.Dense:
        return oracle.attention(
            of.q, of.k, of.v, of.score(plain=True), of.mask(plain=True), scale=case.scale,
            sink=of.sink, keep=keep, dropout=case.dropout, factors=factors, entropy=case.entropy,
        )  # fmt: skip

    def dense(of: Problem, made: oracle.Dense) -> tuple[dict, dict, dict]:
        """Values; gradients from both, and from out alone."""
        values = {name: x.detach() for name, x in made._asdict().items() if x is not None}
        with_statistics = gradients(of, made.out, made.lse, made.entropy)
        return values, with_statistics, gradients(of, made.out, None)

    def plain_in(dtype: torch.dtype | None = None) -> tuple[dict, dict, dict]:
        of = given.copy(dtype)
        return dense(of, plainly(of))

    def farther(part: dict[str, float], errors: dict[str, float]) -> None:
        for n, error in errors.items():
            part[n] = max(part[n], error)

    wide = given.copy(torch.float64)
    exactly = plainly(wide)
    exact = dense(wide, exactly)
    apart = [dict.fromkeys(part, 0.0) for part in exact]
    if dtype != torch.float64:  # there, roundings of the largest terms are all there is
        plain = plain_in()
        apart = [_distances(*parts) for parts in zip(plain, exact, strict=True)]
        if any(t.dtype in _NARROW for t in given.captured.values()):
            # What a function rounds by itself, of exact logits; in plain PyTorch's roundings of
            # logits that may be lost by chance.
            own = replace(wide, captured=given.copy().captured)
            for part, rounded, right in zip(apart, dense(own, plainly(own)), exact, strict=True):
                farther(part, _distances(rounded, right))
    if dtype in _NARROW:
        # A backward is given `out` in the narrow dtype. In delta = rowsum(dout∘out) − dlse its
        # error is one of dlse, so plain PyTorch can say what it does to gradients: the error of
        # plain PyTorch's out, and half a unit in the last place of every term, of either sign.
        out = exact[0]["out"]
        off = (wide.dout * (plain[0]["out"] - out)).sum(-1).abs()
        off += (wide.dout * out).square().sum(-1).sqrt() * torch.finfo(dtype).eps / 2
        draw = torch.Generator().manual_seed(0)
        for _ in range(4):
            sign = torch.randn(off.shape, generator=draw).sign()
            of_sign = replace(wide, dlse=wide.dlse + sign * off)
            errors = gradients(of_sign, exactly.out, exactly.lse, exactly.entropy)
            errors = _distances(errors, exact[1])
            for part in apart[1:]:
                farther(part, errors)
    sizes = oracle.magnitudes(
        *(t.detach() for t in (wide.q, wide.k, wide.v)),
        wide.score(plain=True), wide.mask(plain=True), case.scale,
        None if wide.sink is None else wide.sink.detach(), keep, case.dropout,
        wide.dout, wide.dlse, wide.learned(), wide.dentropy if case.entropy else None,
    )  # fmt: skip

    def tolerance(name: str, error: float, right: Tensor) -> float:
        accumulated = torch.finfo(torch.float32 if dtype in _NARROW else dtype).eps
        roundings = 16 if dtype == torch.float64 else 1
        floor = torch.finfo(dtypes[name]).eps * _largest(right)
        return 2 * error + floor + roundings * accumulated * sizes[name.removeprefix("grad ")]

    # Shorter sums do not lose much, and so few numbers have no spread.
    summed = dtype in _NARROW and min(case.q_len, case.kv_len) >= 64
    single = plain_in(torch.float32) if summed else None

    def rms() -> list[dict[str, float]]:
        if single is None:
            return [{}, {}, {}]
        mixed = replace(wide, captured=given.copy().captured)  # which scores compute with as it is
        factors = dtype if narrow_factors else None
        near, of_delta = _rounded(mixed, plainly(mixed, factors), exact, dtype)
        # Where factors are rounded the signs of out's errors are a kernel's own.
        luck = 1.0 if narrow_factors else 0.0
        return [
            {
                n: 1.3 * _rms(x - right[n]) + luck * of_delta[n] + 4 * _rms(f32[n] - right[n])
                for n, x in part.items()
            }
            for part, right, f32 in zip(near, exact, single, strict=True)
        ]

    dtypes = _dtypes(given)
    spread = rms()
    answer = {}
    for stats, part in ((True, 1), (False, 2)):
        values = exact[0] if stats else {"out": exact[0]["out"]}
        rights, errors = values | exact[part], apart[0] | apart[part]
        limits = {n: tolerance(n, errors[n], right) for n, right in rights.items()}
        answer[stats] = Yardstick(rights, limits, spread[0] | spread[part], dtypes)
    return answer


def _rounded(
    given: Problem, made: oracle.Dense, exact: tuple[dict, ...], dtype: torch.dtype
) -> tuple[list[dict[str, Tensor]], dict[str, float]]:
    """out, dq, dk and dv where `made` is rounded at the end and the backward has delta from out as
    it was rounded, in parts like the exact ones; and what that delta does (rms)."""
    out = made.out.detach().to(dtype)
    off = (given.dout * (out - exact[0]["out"])).sum(-1)
    through_lse = replace(given, dout=torch.zeros_like(given.dout), dlse=-off)
    of_delta = gradients(through_lse, made.out, made.lse)
    parts = [{"out": out}]
    for lse, entropy in ((made.lse, made.entropy), (None, None)):
        grads = gradients(given, made.out, lse, entropy)
        parts.append({f"grad {n}": grads[f"grad {n}"] + of_delta[f"grad {n}"] for n in "qkv"})
    near = [{n: x.to(dtype) for n, x in part.items()} for part in parts]
    return near, {"out": 0.0} | {n: _rms(x) for n, x in of_delta.items()}


def _dtypes(given: Problem) -> dict[str, torch.dtype]:
    """The dtype that each result must have."""
    wide = torch.float64 if given.q.dtype == torch.float64 else torch.float32
    grads = {f"grad {name}": leaf.dtype for name, leaf in given.leaves().items()}
    return {"out": given.q.dtype, "lse": wide, "max_logit": wide, "entropy": wide} | grads


def _distances(got: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    return {n: _largest(got[n].double() - right[n]) for n in right}


def _rms(x: Tensor) -> float:
    finite = x.isfinite()
    return (x.where(finite, 0).square().sum() / finite.sum().clamp(min=1)).sqrt().item()


def _largest(x: Tensor) -> float:
    """The largest size of a finite element."""
    return x.where(x.isfinite(), 0).abs().max().item() if x.numel() else 0.0


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that is not written to is NaN: torch.empty and its kin, in Python and inside torch."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def run(
    given: Problem, backend: str, stats: bool, tile: tuple[int, int] | None = None,
    deterministic: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """The library's results by name."""
    case, mask = given.case, given.mask()
    if tile is not None:
        mask = hw.block_mask(mask, case.b, case.hq, case.q_len, case.kv_len, tile=tile)
    call = hw.attention_with_stats if stats else hw.attention
    asked = {"entropy": True} if stats and case.entropy else {}
    made = call(
        given.q, given.k, given.v, given.score(), mask, scale=case.scale, sink=given.sink,
        dropout=case.dropout, seed=given.seed if case.dropout else None, backend=backend,
        deterministic=deterministic, **asked,
    )  # fmt: skip
    values = made._asdict() if stats else {"out": made}
    if asked:
        values["entropy"] = made.entropy
    assert same_order(given.q, values["out"]), (given.q.stride(), values["out"].stride())
    grads = gradients(given, values["out"], values.get("lse"), values.get("entropy"))
    return {name: x.detach() for name, x in values.items()} | grads


def check(
    case: Case,
    backend: str,
    dtype: torch.dtype,
    *,
    stats: bool = True,
    tile: tuple[int, int] | None = None,
) -> None:
    """Every result in every batch, head, row and column; AssertionError with all that is wrong.

    With `tile` the mask goes in as a block mask with such tiles.
    """
    given = problem(case, dtype)
    before = {n: t.detach().clone() for n, t in given.leaves().items()}
    with poisoned():
        made = run(given, backend, stats, tile)
    wrong = compare(case, dtype, made, stats, narrow_factors=backend in _TENSOR_CORES)
    for name, leaf in given.leaves().items():
        if not torch.equal(leaf.detach(), before[name]):
            wrong.append(f"{name}: the call changed its input")
    if wrong:
        what = f"{case} on {backend}, {dtype}, {'with' if stats else 'without'} statistics"
        raise AssertionError("\n  ".join([f"{what}:", *wrong]))


def compare(
    case: Case,
    dtype: torch.dtype,
    made: dict[str, Tensor],
    stats: bool,
    *,
    narrow_factors: bool = True,
) -> list[str]:
    """What is wrong with these results, a line for each. `narrow_factors`: P and dS may be rounded
    to the dtype before they are multiplied, as tensor cores want it."""
    exact, tolerance, rms, dtypes = yardstick(case, dtype, narrow_factors)[stats]
    wrong = []
    for name, right in exact.items():
        got, final = made[name], dtypes[name]
        if got.dtype != final or got.shape != right.shape:
            wrong.append(
                f"{name}: {got.dtype} {tuple(got.shape)}, should be {final} {tuple(right.shape)}"
            )
            continue
        # Infinities must be the same; a NaN is never within any tolerance.
        apart = torch.where(got.double() == right, 0.0, (got.double() - right).abs())
        bad = ~(apart <= tolerance[name])
        if bad.any():
            wrong.append(_worst(name, got, right, apart, bad, tolerance[name]))
        elif _rms(apart) > rms.get(name, math.inf):
            wrong.append(
                f"{name}: the error is {_rms(apart):.2g} (rms), {rms[name]:.2g} if accumulated well"
            )
    return wrong


def _worst(
    name: str, got: Tensor, right: Tensor, apart: Tensor, bad: Tensor, tolerance: float
) -> str:
    apart = apart.masked_fill(~bad, -1).nan_to_num(math.inf, math.inf)
    at = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    where = f"{int(bad.sum())} of {bad.numel()} wrong"
    if bad.dim() >= 3:
        per_row = bad.flatten(3).any(-1) if bad.dim() > 3 else bad
        heads = [tuple(x) for x in per_row.any(-1).nonzero().tolist()]
        where += f", in (batch, head) {heads[:6]}{'...' if len(heads) > 6 else ''}"
    return (
        f"{name}: {where}; worst at {at}: {got[at].item():.7g}, should be {right[at].item():.7g} "
        f"+- {tolerance:.2g}"
    )
