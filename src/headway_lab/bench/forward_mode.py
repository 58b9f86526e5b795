"""Forward mode on one case: out and its tangent, checked against float64, timed in turns."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .case import JVP, Case, CaseInputs, Unavailable, make_inputs, size
from .measure import FACTOR, FLOOR, definition, distance, judge, sampled_rows
from .peers import PEERS
from .results import Error, Result
from .timing import Clocks, Tick, compare


def measure_jvp(case: Case, device: str, repeats: int, tick: Tick = lambda: None) -> list[Result]:
    """Time attention of tensors q, k and v that all have tangents, which is what `torch.func.jvp`
    computes."""
    inputs = make_inputs(case, device)
    draw = torch.Generator(device).manual_seed(1)
    tensors = inputs.q, inputs.k, inputs.v
    primals = [x.detach() for x in tensors]
    tangents = [
        torch.randn(x.shape, generator=draw, device=device).to(x.dtype) for x in primals
    ]  # fmt: skip
    with torch.no_grad(), forward_ad.dual_level():
        q, k, v = map(forward_ad.make_dual, primals, tangents)
        moving = inputs._replace(q=q, k=k, v=v)
        rows = sampled_rows(case, inputs.q.device)
        in_dtype = lambda dtype: _exact(case, inputs, primals, tangents, rows, dtype)
        exact, plain = in_dtype(torch.float64), in_dtype(inputs.q.dtype)
        limits = [max(FACTOR * distance(a, b), FLOOR) for a, b in zip(plain, exact, strict=True)]
        calls: dict[str, Callable[[], Tensor]] = {}
        checked: dict[str, Result] = {}
        for name in ("headway", *case.peers):
            result = Result(case.name, JVP, name)
            try:
                call = PEERS[name].prepare(case, moving) if name in PEERS else moving.headway
                out = call()
                if name not in PEERS or PEERS[name].same:
                    parts = zip(("out", "out'"), _parts(out), exact, limits, strict=True)
                    result = result.checked([
                        Error(what, distance(x[:, :, rows], right), limit)
                        for what, x, right, limit in parts
                    ])  # fmt: skip
            except Exception as error:
                if name == "headway":
                    raise
                checked[name] = result.not_run(Unavailable.because(error))
                continue
            checked[name] = result
            if not result.verdict:
                calls[name] = call
        if "headway" not in calls:
            return [*checked.values()]
        clocks = Clocks(device, tick)
        times = compare(calls, repeats, device, clocks.sample)
    checked["headway"] = replace(checked["headway"], note=str(clocks))
    measured = size(case, inputs.mask)
    timed = [judge(case, JVP, checked[name], times, measured, device) for name in times]
    return timed + [result for name, result in checked.items() if name not in times]


def _exact(
    case: Case, inputs: CaseInputs, primals: list[Tensor], tangents: list[Tensor], rows: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out and its tangent on some rows, computed in a dtype."""
    pairs = zip(primals, tangents, strict=True)
    q, k, v = (forward_ad.make_dual(x.to(dtype), along.to(dtype)) for x, along in pairs)
    return _parts(definition(case, inputs, q, k, v, rows))


def _parts(out: Tensor) -> tuple[Tensor, Tensor]:
    """Return a value and its tangent."""
    primal, tangent = forward_ad.unpack_dual(out)
    if tangent is None:
        raise Unavailable("its out has no tangent")
    return primal, tangent
