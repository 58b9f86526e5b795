"""The entropy of rows, or their mean distance: checked against float64, timed beside out alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headway.api import attention_with_stats
from headway.variants.expect import expect

from .case import BACKWARD, FORWARD, Case, CaseInputs, make_inputs, size
from .measure import FACTOR, FLOOR, distance, judge, sampled_rows, weights
from .peers import PEERS
from .results import Error, Result
from .timing import Clocks, Tick, compare


def measure_statistic(
    case: Case, device: str, repeats: int, tick: Tick = lambda: None, *, entropy: bool
) -> list[Result]:
    """Time out and the entropy, and the gradient of both; or the mean distance by itself."""
    inputs = make_inputs(case, device)
    options: dict[str, Any] = {"score": inputs.score, "mask": inputs.mask}

    def call() -> tuple[Tensor, ...]:
        if not entropy:
            return (expect(inputs.q, inputs.k, lambda b, h, i, j, s: i - j, **options),)
        result = attention_with_stats(inputs.q, inputs.k, inputs.v, **options, entropy=True)
        return result.entropy, result.out  # type: ignore[return-value]

    ours = Result(case.name, "", "headway").checked(_errors(case, inputs, call, entropy))
    if ours.verdict:
        return [ours]
    of_products = case if entropy else replace(case, dv=0)  # there is none with values
    peers = {name: PEERS[name].prepare(case, inputs) for name in case.peers}
    measured, lines = size(case, inputs.mask), []
    for direction in (FORWARD, BACKWARD):
        calls: dict[str, Callable[[], object]] = {"headway": call, **peers}
        if direction == BACKWARD:
            results = call()
            sent = [torch.ones_like(results[0]), inputs.dout][: len(results)]
            calls = {"headway": partial(_gradients, inputs, results, sent)}
            for name, peer in peers.items():
                calls[name] = partial(inputs.grads, peer(), again=True)
        clocks = Clocks(device, tick)
        with torch.set_grad_enabled(direction == BACKWARD):
            times = compare(calls, repeats, device, clocks.sample)
        checked = {"headway": replace(ours, note=str(clocks))}
        for name in times:
            line = checked.get(name, Result(case.name, "", name))
            lines.append(judge(of_products, direction, line, times, measured, device))
    return lines


def _gradients(
    inputs: CaseInputs, results: tuple[Tensor, ...], sent: list[Tensor]
) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(results, inputs.leaves, sent, retain_graph=True, allow_unused=True)


def _errors(
    case: Case, inputs: CaseInputs, call: Callable[[], tuple[Tensor, ...]], entropy: bool
) -> list[Error]:
    """Return the errors of the statistic on some rows, and of its gradient by q and k."""
    rows = sampled_rows(case, inputs.q.device)
    statistic = call()[0]
    sent = torch.zeros_like(statistic)
    sent[:, :, rows] = 1.0
    ours = statistic.detach(), *torch.autograd.grad(statistic, (inputs.q, inputs.k), sent)
    exact, plain = (_exact(case, inputs, rows, entropy, t) for t in (torch.float64, inputs.q.dtype))
    of_rows = lambda x: x[:, :, rows, None] if x.dim() == 3 else x
    return [
        Error(what, distance(of_rows(x), right), max(FACTOR * distance(other, right), FLOOR))
        for what, x, right, other in zip(("mean", "dq", "dk"), ours, exact, plain, strict=True)
    ]


def _exact(
    case: Case, inputs: CaseInputs, rows: Tensor, entropy: bool, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return the statistic on some rows, and its gradient, computed in a dtype."""
    q, k = (x.detach().to(dtype).requires_grad_() for x in (inputs.q, inputs.k))
    p = weights(case, inputs, q, k, rows)
    number = rows[:, None] - torch.arange(case.length, device=q.device)
    if entropy:
        number = -p.clamp_min(torch.finfo(p.dtype).tiny).log()
    statistic = (p * number).sum(-1, keepdim=True)
    return statistic.detach(), *torch.autograd.grad(statistic.sum(), (q, k))
