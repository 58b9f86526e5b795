"""The shared check on another device: the same inputs moved there, the results brought back."""

from dataclasses import replace

import torch

from cases import Case, Problem, problem
from checks import compare, poisoned, run


def moved(given: Problem, device: str) -> Problem:
    """Leaves of its own on a device, with the strides that they had."""

    def there(t):
        if t is None:
            return None
        new = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
        if 0 in t.stride():  # expanded: the same number many times
            new = t.detach().to(device) if not t.numel() else _expanded(t, device)
        else:
            new.copy_(t.detach())
        return new.requires_grad_(t.requires_grad)

    return replace(
        given,
        **{name: there(getattr(given, name)) for name in ("q", "k", "v", "sink", "dout", "dlse")},
        captured={n: there(t) for n, t in given.captured.items()},
    )


def _expanded(t: torch.Tensor, device: str) -> torch.Tensor:
    one = t.detach()[tuple(slice(0, 1) if step == 0 else slice(None) for step in t.stride())]
    return one.to(device).expand_as(t)


def results(case: Case, dtype: torch.dtype, device: str, *, stats: bool = True) -> dict:
    """The results by name, on the CPU."""
    with poisoned():
        made = run(moved(problem(case, dtype), device), "triton", stats)
    return {name: x.cpu() for name, x in made.items()}


def check_on(case: Case, dtype: torch.dtype, device: str, *, stats: bool = True) -> None:
    """Every result against float64; AssertionError with all that is wrong."""
    wrong = compare(case, dtype, results(case, dtype, device, stats=stats), stats)
    if wrong:
        raise AssertionError("\n  ".join([f"{case}, {dtype}:", *wrong]))
