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

# What a time is spent on. The operators are ours, and PyTorch's where a compiler has those in their
# place; the ranges and the nodes of autograd are around them.
FORWARD, BACKWARD, MASKS, HOST = PARTS = "forward", "backward", "block masks", "host"
_NATIVE = "aten::_scaled_dot_product_flash_attention_for_cpu"
_PARTS = {
    f"{NAMESPACE}::forward": FORWARD,
    f"{NAMESPACE}::infer": FORWARD,
    f"{NAMESPACE}::cp_forward": FORWARD,
    f"{NAMESPACE}::backward": BACKWARD,
    f"{NAMESPACE}::cp_backward": BACKWARD,
    f"{NAMESPACE}::block_mask": MASKS,
    f"{NAMESPACE}::attention": HOST,
    _NATIVE: FORWARD,
    f"{_NATIVE}_backward": BACKWARD,
}
_NODES = ("_Attention", "_Dual", "_Direct")  # `autograd`
_PARTS |= {name: HOST for node in _NODES for name in (node, f"{node}Backward")}
_PARTS |= {f"autograd::engine::evaluate_function: {node}Backward": HOST for node in _NODES}
_STEP = "headway profile: step"


@dataclass(frozen=True)
class Arguments:
    """Print where the time of a training step goes: attention forward and backward, block masks
    that are built, what attention costs the host in Python, and everything else.

    The step is a function without arguments in a file, FILE:FUNCTION, that does all of it: forward,
    backward, optimizer. The file makes the model when it is run, as by python FILE, but for what it
    does under __main__. The first step, which traces, builds and compiles, is told apart from those
    after it. On a GPU times are those of its kernels, and the host's beside them. For example:

      headway profile train.py:step
      headway profile train.py:step --steps 20 --trace step.json
    """

    function: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE:FUNCTION")]
    """The training step."""
    steps: int = 5
    """Steps after the first, whose mean is printed."""
    trace: Path | None = None
    """Also write the last step to this file (.json, .json.gz) for chrome://tracing or Perfetto."""


@dataclass
class Times:
    """Where the time of some steps went, in ms: on the host, which waits for the device at the end
    of each, and on the device."""

    whole: float  # from the start of each step to its end
    host: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    device: dict[str, float] = field(default_factory=lambda: dict.fromkeys([*PARTS, ""], 0.0))
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))

    def on_host(self) -> dict[str, float]:
        """All parts: what is left over is everything else."""
        return {**self.host, "everything else": self.whole - sum(self.host.values())}

    def on_device(self) -> dict[str, float]:
        """All parts: what is left over is time without a kernel."""
        *parts, rest = self.device.values()
        found = dict(zip(PARTS, parts, strict=True))
        return {**found, "everything else": rest, "idle": self.whole - sum(parts) - rest}


def main(arguments: list[str]) -> int:
    """Exit status 0."""
    asked = tyro.cli(Arguments, args=arguments, prog="headway profile")
    if asked.steps < 1:
        raise ArgumentError(f"--steps {asked.steps} must be an integer, 1 or more")
    if asked.trace is not None and not asked.trace.name.endswith((".json", ".json.gz")):
        raise ArgumentError(f"--trace {asked.trace} must end in .json or .json.gz")
    step = _step(asked.function)
    first = times_of(_profiled(step))
    if not any(first.calls.values()):
        raise ArgumentError(
            f"{asked.function} made no call of headway's attention, so there is nothing to tell"
        )
    bare = _seconds(step, asked.steps)
    seen = [_profiled(step) for _ in range(asked.steps)]
    if asked.trace is not None:
        try:
            seen[-1].export_chrome_trace(str(asked.trace))
        except (OSError, RuntimeError) as error:
            raise ArgumentError(f"cannot write to {asked.trace}: {error}") from error
    later = mean([times_of(run) for run in seen])
    print(f"{asked.function}, {_where(later)}\n")
    print(table(first, later, asked.steps))
    print(f"\nWithout the profiler a step takes {1e3 * bare:.2f} ms.")
    if asked.trace is not None:
        print(f"wrote {asked.trace}")
    return 0


def _step(text: str) -> Callable[[], Any]:
    """The function, run as a user's: what goes wrong in it is told in one line."""
    found = from_file(text)
    if not callable(found):
        raise ArgumentError(f"{text!r} is no function, but {type(found).__name__}")
    try:
        needed = [
            p.name
            for p in inspect.signature(found).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):
        needed = []
    if needed:
        raise ArgumentError(
            f"{text!r} takes {', '.join(needed)}; write a function without arguments that does one "
            "step, as lambda: step(model, batch)"
        )

    def step() -> None:
        try:
            found()
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
    with profile(activities=activities, acc_events=True) as seen, record_function(_STEP):
        step()
    return seen


def _seconds(step: Callable[[], Any], steps: int) -> float:
    """Of a step that nobody watches: the fastest."""
    found = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    return min(found)


# -- what the profiler saw ------------------------------------------------------------------------


def times_of(seen: Any) -> Times:
    """From the events of a profiler, of one step."""
    events = [event for event in seen.events() if event.device_type == DeviceType.CPU]
    whole = sum(event.cpu_time_total for event in events if event.name == _STEP)
    times = Times(whole / 1e3)
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
    """Events and all below them, each with its part: its own, or that of the nearest above it; and
    the part above it."""
    todo: list[tuple[Any, str | None]] = [(event, None) for event in events]
    while todo:
        event, above = todo.pop()
        part = _PARTS.get(event.name, above)
        yield event, part, above
        todo += [(child, part) for child in event.cpu_children]


def mean(found: list[Times]) -> Times:
    """Of several steps."""
    n = len(found)
    return Times(
        sum(x.whole for x in found) / n,
        {part: sum(x.host[part] for x in found) / n for part in found[0].host},
        {part: sum(x.device[part] for x in found) / n for part in found[0].device},
        {part: sum(x.calls[part] for x in found) // n for part in found[0].calls},
    )


# -- what is printed ------------------------------------------------------------------------------


def _where(times: Times) -> str:
    if any(times.device.values()):
        return f"on {torch.cuda.get_device_name()}, with the profiler on"
    threads = torch.get_num_threads()
    return f"on the CPU, {threads} thread{'s' * (threads > 1)}, with the profiler on"


def table(first: Times, later: Times, steps: int) -> str:
    """The first step beside the mean of those after it; of a GPU's kernels, then of the host."""
    host = first.on_host(), later.on_host(), later, steps
    if not any(later.device.values()):
        return _table("", *host)
    kernels = _table("kernels", first.on_device(), later.on_device(), later, steps)
    return f"{kernels}\n\n{_table('host', *host)}"


def _table(
    title: str, first: dict[str, float], later: dict[str, float], times: Times, steps: int
) -> str:
    head = f"{title:22}{'first step':>18}{f'mean of {steps} more':>20}{'calls':>8}"
    lines = [head, f"{'':22}{'ms':>10}{'share':>8}{'ms':>12}{'share':>8}"]
    for name in [*first, "all"]:
        cells = [f"{('attention: ' if name in PARTS else '') + name:22}"]
        for of, width in ((first, 10), (later, 12)):
            whole = sum(of.values())
            ms = whole if name == "all" else of[name]
            cells.append(f"{ms:{width}.2f}{ms / max(whole, 1e-9):8.1%}")
        calls = times.calls.get(name)
        cells.append(f"{calls:8}" if calls else "")
        lines.append("".join(cells))
    return "\n".join(lines)
