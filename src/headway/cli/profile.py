"""`headway profile`."""

import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from ..errors import ArgumentError, HeadwayError
from ..types import NAMESPACE
from .files import from_file
from .options import check_positive

# What a time is spent on. The operators are ours, and PyTorch's where a compiler has those in their
# place; the ranges and the nodes of autograd are around them.
FORWARD, BACKWARD, MASKS, HOST = PARTS = "forward", "backward", "block masks", "host"
_NATIVE = "aten::_scaled_dot_product_flash_attention_for_cpu"
_PARTS = {
    f"{NAMESPACE}::forward": FORWARD, f"{NAMESPACE}::infer": FORWARD,
    f"{NAMESPACE}::cp_forward": FORWARD, f"{NAMESPACE}::backward": BACKWARD,
    f"{NAMESPACE}::cp_backward": BACKWARD, f"{NAMESPACE}::block_mask": MASKS,
    f"{NAMESPACE}::attention": HOST, _NATIVE: FORWARD, f"{_NATIVE}_backward": BACKWARD,
}  # fmt: skip
_NODE = "_Attention"  # `autograd`
_PARTS |= dict.fromkeys((_NODE, f"{_NODE}Backward"), HOST)
_PARTS[f"autograd::engine::evaluate_function: {_NODE}Backward"] = HOST
_STEP = "headway profile: step"


@dataclass(frozen=True)
class Arguments:
    """Print where the time of a training step goes: attention forward and backward, building block
    masks, Python on the host for attention, and everything else.

    FILE:FUNCTION is a function without arguments that does a whole step: forward, backward,
    optimizer. The file is run first, except for its __main__ part, and creates the model. The first
    step traces, builds and compiles, so it is printed separately. On a GPU, times of kernels and of
    the host are both printed. For example:

      headway profile train.py:step
      headway profile train.py:step --steps 20 --trace step.json
    """

    function: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE:FUNCTION")]
    """The training step."""
    steps: int = 5
    """Number of steps after the first; their mean is printed."""
    trace: Path | None = None
    """Also write the last step to this file (.json, .json.gz) for chrome://tracing or Perfetto."""


@dataclass
class Times:
    """The ms of steps: on the host, which waits for the device after each, and on the device."""

    whole: float  # from the start of each step to its end
    host: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    device: dict[str, float] = field(default_factory=lambda: dict.fromkeys([*PARTS, ""], 0.0))
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))

    def on_host(self) -> dict[str, float]:
        """Return the time of all parts; the rest is everything else."""
        return {**self.host, "everything else": self.whole - sum(self.host.values())}

    def on_device(self) -> dict[str, float]:
        """Return the time of all parts; the rest is time without a kernel."""
        *parts, rest = self.device.values()
        by_part = dict(zip(PARTS, parts, strict=True))
        return {**by_part, "everything else": rest, "idle": self.whole - sum(parts) - rest}


def main(arguments: list[str]) -> int:
    """Run `headway profile`; return exit status 0."""
    options = tyro.cli(Arguments, args=arguments, prog="headway profile")
    check_positive(options, "steps")
    if options.trace is not None and not options.trace.name.endswith((".json", ".json.gz")):
        raise ArgumentError(f"--trace {options.trace} must end in .json or .json.gz")
    step = _step(options.function)
    first_step = times_of(_profiled(step))
    if not any(first_step.calls.values()):
        raise ArgumentError(
            f"{options.function} made no call of headway's attention, so there is nothing to tell"
        )
    unprofiled_seconds = _seconds(step, options.steps)
    profiles = [_profiled(step) for _ in range(options.steps)]
    if options.trace is not None:
        try:
            profiles[-1].export_chrome_trace(str(options.trace))
        except (OSError, RuntimeError) as error:
            raise ArgumentError(f"cannot write to {options.trace}: {error}") from error
    later_steps = mean([times_of(run) for run in profiles])
    print(f"{options.function}, {_where(later_steps)}\n")
    print(table(first_step, later_steps, options.steps))
    print(f"\nWithout the profiler a step takes {1e3 * unprofiled_seconds:.2f} ms.")
    if options.trace is not None:
        print(f"wrote {options.trace}")
    return 0


def _step(text: str) -> Callable[[], Any]:
    """Return the user's function, whose errors become a message of one line."""
    function = from_file(text)
    if not callable(function):
        raise ArgumentError(f"{text!r} is not callable, but of type {type(function).__name__}")
    try:
        required = [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):
        required = []
    if required:
        raise ArgumentError(
            f"{text!r} takes {', '.join(required)}; write a function without arguments that does "
            "one step, as lambda: step(model, batch)"
        )

    def step() -> None:
        try:
            function()
        except HeadwayError:
            raise
        except Exception as error:
            raise ArgumentError(f"{text} failed: {type(error).__name__}: {error}") from error
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return step


def _profiled(step: Callable[[], Any]) -> profile:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as profiler, record_function(_STEP):
        step()
    return profiler


def _seconds(step: Callable[[], Any], steps: int) -> float:
    """Return the seconds of the fastest step without the profiler."""
    samples = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        samples.append(time.perf_counter() - start)
    return min(samples)


# -- what the profiler saw ------------------------------------------------------------------------


def times_of(profiler: Any) -> Times:
    """Return the times of one step, from the events of a profiler."""
    events = [event for event in profiler.events() if event.device_type == DeviceType.CPU]
    step_us = sum(event.cpu_time_total for event in events if event.name == _STEP)
    times = Times(step_us / 1e3)
    roots = (event for event in events if event.cpu_parent is None)
    for event, part, above in _in_parts(roots):
        # What our operators do themselves, and not by PyTorch's, is Python: plans and launches.
        python = event.name in _PARTS and not event.name.startswith(_NATIVE) and part != MASKS
        if part:
            times.host[HOST if python else part] += event.self_cpu_time_total / 1e3
        kernels = [k for k in event.kernels if k.name != event.name]  # a range is no kernel
        times.device[part or ""] += sum(k.duration for k in kernels) / 1e3
        if part and part not in (HOST, above):  # PyTorch's operator inside ours is the same call
            times.calls[part] += 1
    return times


def _in_parts(events: Iterable[Any]) -> Iterator[tuple[Any, str | None, str | None]]:
    """Yield events and all below them, each with its part and the part above that."""
    todo: list[tuple[Any, str | None]] = [(event, None) for event in events]
    while todo:
        event, above = todo.pop()
        part = _PARTS.get(event.name, above)
        if part == HOST and above:  # what is inside an operator is the operator's
            part = above
        yield event, part, above
        todo += [(child, part) for child in event.cpu_children]


def mean(steps: list[Times]) -> Times:
    """Return the mean times of several steps."""
    n = len(steps)
    return Times(
        sum(x.whole for x in steps) / n,
        {part: sum(x.host[part] for x in steps) / n for part in steps[0].host},
        {part: sum(x.device[part] for x in steps) / n for part in steps[0].device},
        {part: sum(x.calls[part] for x in steps) // n for part in steps[0].calls},
    )


# -- what is printed ------------------------------------------------------------------------------


def _where(times: Times) -> str:
    if any(times.device.values()):
        return f"on {torch.cuda.get_device_name()}, with the profiler on"
    threads = torch.get_num_threads()
    return f"on the CPU, {threads} thread{'s' * (threads > 1)}, with the profiler on"


def table(first_step: Times, later_steps: Times, steps: int) -> str:
    """Return tables of the first step beside the mean of the others: GPU kernels, then host."""
    host = first_step.on_host(), later_steps.on_host(), later_steps, steps
    if not any(later_steps.device.values()):
        return _table("", *host)
    kernels = _table("kernels", first_step.on_device(), later_steps.on_device(), later_steps, steps)
    return f"{kernels}\n\n{_table('host', *host)}"


def _table(
    title: str, first_step: dict[str, float], later_steps: dict[str, float], times: Times,
    steps: int,
) -> str:  # fmt: skip
    head = f"{title:22}{'first step':>18}{f'mean of {steps} more':>20}{'calls':>8}"
    lines = [head, f"{'':22}{'ms':>10}{'share':>8}{'ms':>12}{'share':>8}"]
    for name in [*first_step, "all"]:
        cells = [f"{('attention: ' if name in PARTS else '') + name:22}"]
        for of, width in ((first_step, 10), (later_steps, 12)):
            total = sum(of.values())
            ms = total if name == "all" else of[name]
            cells.append(f"{ms:{width}.2f}{ms / max(total, 1e-9):8.1%}")
        calls = times.calls.get(name)
        cells.append(f"{calls:8}" if calls else "")
        lines.append("".join(cells))
    return "\n".join(lines)
