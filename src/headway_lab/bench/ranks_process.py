"""One rank of `ranks.py`: questions on standard input, a case each; the first rank answers on
standard output.

Every rank makes the whole tensors from the case's seed and keeps its own part. A contestant is
checked first: out of some rows of every head, and the gradients that follow from these rows, next
to the definition in float64 (`check.py`). Then contestants are timed in turns; a sample is the time
of the slowest rank. Backwards are timed on one forward.
"""

import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from headway import explain
from headway.api import attention
from headway.distributed import Layout
from headway.distributed.exchange.pull import reserved
from headway.mods import causal

from .case import BACKWARD, FORWARD, Case, Inputs, Size, Unavailable, inputs, size
from .cases import every
from .check import Truth, distance
from .ranks import ONE_CARD
from .ranks_peers import KERNELS, context_parallel, flex, sdpa
from .results import NOT_RUN, WRONG, Result
from .timing import Timing, between, mark, wait

PLANS = "gather", "heads", "ring", "ulysses"  # beside that of "auto"
EVERY_PLAN = "causal", "documents-64"  # names of cases; the others have the first plan alone
LONGEST = 1 << 17  # tokens: beyond, nothing is checked
PEERS = 1 << 17  # tokens: beyond, the first plan alone, no peers and no traces
BUSY = 20e-3  # seconds of a sample


class Contestant(NamedTuple):
    """A call on this rank's tensors.

    - `given`: this rank's part of the tensors, as the call sees them.
    - `size`: what all ranks keep together.
    """

    forward: Callable[[], Tensor]
    given: Inputs
    size: Size


def main(question: dict[str, Any]) -> None:
    """Answer until standard input ends."""
    rank, ranks, device = question["rank"], question["ranks"], question["device"]
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}[device]
    dist.init_process_group(
        backend, init_method=f"file://{question['store']}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    cases = {case.name: case for case in every()}
    for line in sys.stdin:
        asked = json.loads(line)
        for row in answer(cases[asked["case"]], device, asked["repeats"]):
            _say(asdict(row), rank)
        _say(None, rank)  # that was all


def _say(row: dict[str, Any] | None, rank: int) -> None:
    if rank == 0:
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


def answer(case: Case, device: str, repeats: int) -> Iterator[Result]:
    """The rows of a case, as they come."""
    whole = inputs(case, device)
    layout = layout_of(case, whole)
    measured = size(case, whole.mask)
    rows: list[Result] = []
    with ExitStack() as stack:
        found = contestants(case, whole, layout, measured, stack, rows)
        if case.length <= LONGEST:
            truth = Truth(case, whole)
            for name, one in list(found.items()):
                if name == ONE_CARD:
                    continue
                said = checked(case, name, one, whole, layout, truth)
                if said is not None:
                    rows.append(said)
                    del found[name]
            del truth
        del whole
        yield from rows
        told = explained(found["headway"].given, layout) if "headway" in found else ""
        for direction in (FORWARD, BACKWARD):
            for row in timed(case, found, direction, device, repeats):
                yield replace(row, note=told) if row.contestant == "headway" else row
        if device == "cuda" and "headway" in found:
            yield from memory(case, found["headway"])
            if case.length <= PEERS:
                yield from exposed(case, found["headway"])


def layout_of(case: Case, whole: Inputs) -> Layout:
    """Documents and windows balanced, all else zigzag."""
    group = dist.group.WORLD
    if "documents" in case.name or "window" in case.name:
        return Layout.balanced(case.length, group, whole.mask)
    return Layout.zigzag(case.length, group)


def explained(x: Inputs, layout: Layout) -> str:
    """What the layout and the plan do."""
    told = ("layout:", "keys:", "plan:", "transport:")
    lines = map(str.strip, str(explain(x.q, x.k, x.v, x.score, x.mask, layout=layout)).splitlines())
    return "; ".join(line for line in lines if line.startswith(told))


def part(whole: Inputs, layout: Layout) -> Inputs:
    """This rank's tensors; what scores learn is everybody's."""
    cut = lambda x: layout.shard(x.detach(), 2).contiguous()
    q, k, v = (cut(x).requires_grad_() for x in (whole.q, whole.k, whole.v))
    return whole._replace(q=q, k=k, v=v, dout=cut(whole.dout))


def contestants(
    case: Case, whole: Inputs, layout: Layout, measured: Size, stack: ExitStack, rows: list[Result]
) -> dict[str, Contestant]:
    """Headway, its plans, one card, and PyTorch's."""
    mine = part(whole, layout)
    ours = lambda at: lambda: attention(mine.q, mine.k, mine.v, mine.score, mine.mask, layout=at)
    found = {"headway": Contestant(ours(layout), mine, measured)}
    found[ONE_CARD] = one_card(case, layout.ranks, whole.q.device.type)
    every_plan = case.length <= PEERS and any(name in case.name for name in EVERY_PLAN)
    for plan in PLANS if every_plan else PLANS[:1]:
        found[f"headway, {plan}"] = Contestant(ours(layout.using(plan)), mine, measured)
    if not every_plan or not whole.q.is_cuda:
        return found
    if case.score is None and str(whole.mask) == str(causal()):
        stack.enter_context(context_parallel())
        for kernel in KERNELS:
            make = partial(sdpa, mine, kernel)
            _try(case, f"torch {kernel}", make, mine, measured, found, rows)
    if case.score is None and case.hq > 32 and case.length <= 1 << 16:  # compiles for long
        _try(case, "torch flex", partial(flex, mine, layout), mine, measured, found, rows)
    return found


def _try(
    case: Case, name: str, make: Callable[[], Callable[[], Tensor]], given: Inputs, measured: Size,
    found: dict[str, Contestant], rows: list[Result],
) -> None:  # fmt: skip
    """Add a peer that works on all ranks."""
    try:
        forward, why = make(), ""
        out = forward()
        torch.autograd.grad(out, given.leaves[:3], given.dout)
    except Exception as error:  # noqa: BLE001 the table says it
        why = str(Unavailable.because(error))
    if _anywhere(bool(why)):
        note = why or "could not run on another rank"
        rows.append(Result(case.name, "", name, verdict=NOT_RUN, note=note))
    else:
        found[name] = Contestant(forward, given, measured)


def one_card(case: Case, ranks: int, device: str) -> Contestant:
    """What `shortened` says, on a card by itself."""
    short = shortened(case, ranks)
    x = inputs(short, device)
    return Contestant(x.headway, x, Size(*(n * ranks for n in size(short, x.mask))))


def shortened(case: Case, ranks: int) -> Case:
    """A sequence so short that a card has about as many pairs as a rank has: of a mask that keeps a
    share of the square, by the root of the number of ranks; of windows and documents, by that
    number. A window is as wide as before."""
    local = any(word in case.name for word in ("window", "documents"))
    length = round(case.length / (ranks if local else ranks**0.5) / 128) * 128

    def remade(make: Any) -> Any:
        """What makes a mask or score, for this length."""
        if not isinstance(make, partial):
            return make
        return partial(make.func, *[length if n == case.length else n for n in make.args])

    return replace(case, length=length, mask=remade(case.mask), score=remade(case.score))


def _anywhere(flag: bool) -> bool:
    """Whether it is so on any rank."""
    at = torch.tensor(int(flag), device=_device())
    dist.all_reduce(at, dist.ReduceOp.MAX)
    return bool(at)


def _device() -> str:
    return "cuda" if "nccl" in dist.get_backend() else "cpu"


def checked(
    case: Case, name: str, one: Contestant, whole: Inputs, layout: Layout, truth: Truth
) -> Result | None:
    """A row if out or a gradient is wrong."""
    dout = layout.shard(truth.dout, 2).contiguous()
    out = one.forward()
    grads = list(torch.autograd.grad(out, one.given.leaves, dout, allow_unused=True))
    for g in grads[3:]:
        dist.all_reduce(g)
    full = [layout.unshard(x.detach(), 2) for x in (out, *grads[:3])]
    full = [full[0][:, :, truth.rows], *full[1:], *grads[3:]]
    for what, x, exact, limit in zip(
        ("out", "dq", "dk", "dv", "d(learned)"), full, truth.exact, truth.limits, strict=False
    ):
        error = distance(x, exact)
        if _anywhere(not error <= limit):
            note = f"{what} is off by {error:.1e}, {limit:.1e} are allowed"
            return Result(case.name, "", name, error=error, limit=limit, verdict=WRONG, note=note)
    return None


def timed(
    case: Case, found: dict[str, Contestant], direction: str, device: str, repeats: int
) -> list[Result]:
    """A row for every contestant, of one direction."""
    calls: dict[str, Callable[[], object]] = {}
    for name, one in found.items():
        calls[name] = one.forward
        if direction == BACKWARD:
            out, given = one.forward(), one.given
            calls[name] = lambda out=out, x=given: torch.autograd.grad(
                out, x.leaves, x.dout, retain_graph=True, allow_unused=True
            )
    samples: dict[str, list[float]] = {name: [] for name in calls}
    number = {}
    with torch.set_grad_enabled(direction == BACKWARD):
        for name, call in calls.items():
            call()
            number[name] = max(1, round(BUSY / sample(call, 1, device)))
        for turn in range(repeats):
            for name in list(calls)[:: 1 if turn % 2 else -1]:
                if sum(samples[name]) * number[name] < 3.0:
                    samples[name].append(sample(calls[name], number[name], device))
    rows, ranks = [], dist.get_world_size()
    for name, of in samples.items():
        flops = found[name].size.flops(direction, *case.widths) / ranks
        speed = flops / statistics.median(of) / 1e9
        row = Result(case.name, direction, name, gflops=speed).timed(Timing.of(of))
        rows.append(row)
    ours = next((r.gflops for r in rows if r.contestant == "headway"), None)
    return [replace(r, ratio=ours / r.gflops) if ours else r for r in rows]  # type: ignore[operator]


def sample(call: Callable[[], object], number: int, device: str) -> float:
    """Seconds per call of the slowest rank, one call after the other as layers are. Before several
    there is one that does not count, in which ranks that are not there at once wait for each
    other."""
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    wait(device)
    if number > 1:
        call()
    start = mark(device)
    for _ in range(number):
        call()
    took = torch.tensor(between(start, mark(device)) / number, device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def exposed(case: Case, one: Contestant) -> list[Result]:
    """The share of a call in which a card runs no kernel, from a trace of calls one after the
    other: of the card that has most to do, which waits for rows and not for other cards."""
    x, out = one.given, one.forward()
    calls: dict[str, Callable[[], object]] = {
        FORWARD: one.forward,
        BACKWARD: lambda: torch.autograd.grad(out, x.leaves, x.dout, retain_graph=True),
    }
    rows = []
    for direction, call in calls.items():
        with torch.set_grad_enabled(direction == BACKWARD):
            mine = torch.tensor(100 * _without_kernels(call), device="cuda")
        share = [mine.clone() for _ in range(dist.get_world_size())]
        dist.all_gather(share, mine)
        note = f"of the time no kernel runs; on the card that waits longest {max(share):.1f} %"
        rows.append(
            Result(
                case.name,
                f"{direction}, exposed",
                "headway",
                unit="%",
                median=float(min(share)),
                note=note,
            )
        )
    return rows


def _without_kernels(call: Callable[[], object]) -> float:
    """The share of the time of some calls in which no kernel runs on this card; they are queued
    while it is kept busy, so that it does not wait for the host; and when all ranks trace, of which
    some begin half a second late."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        torch.cuda.synchronize()
        dist.all_reduce(torch.zeros((), device="cpu"))  # not on the card
        wait("cuda")
        for _ in range(8):
            call()
        torch.cuda.synchronize()
    return idle([
        (event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if event.device_type.name == "CUDA"
        and not any(word in event.name for word in ("PtoP", "spin_kernel"))
    ])  # fmt: skip


def idle(spans: list[tuple[float, float]]) -> float:
    """The share of the time of calls that are alike in which none of the kernels (start, end) runs:
    from the end of the first longest kernel to that of the last, which are whole calls (or steps
    that are alike), wherever a trace begins and ends."""
    spans = sorted(spans)
    longest = max((end - start for start, end in spans), default=0.0)
    ends = [end for start, end in spans if end - start > 0.8 * longest]
    if len(ends) < 2:
        return 0.0
    begin, last = ends[0], ends[-1]
    busy, until = 0.0, begin
    for start, end in spans:
        busy += max(0.0, min(end, last) - max(start, until))
        until = max(until, min(end, last))
    return 1 - busy / (last - begin)


def memory(case: Case, one: Contestant) -> list[Result]:
    """MB beyond what the call is given and gives back, without the symmetric memory: that is kept,
    and made for the largest call."""
    x, rows = one.given, []
    torch.cuda.synchronize()
    keys = case.b * case.hk * case.length * sum(case.widths) * x.k.element_size()

    def row(direction: str, before: int, kept: int) -> Result:
        most = torch.cuda.max_memory_allocated() - before - kept
        used = torch.tensor(float(most), device="cuda")
        dist.all_reduce(used, dist.ReduceOp.MAX)
        note = (
            f"{float(used) / keys:.2f} of the keys and values of the sequence; and "
            f"{reserved() / 1e6:,.0f} MB of symmetric memory, for all calls so far"
        )
        return Result(
            case.name, f"{direction}, memory", "headway", unit="MB", median=float(used) / 1e6,
            note=note,
        )  # fmt: skip

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = one.forward()
    kept = torch.cuda.memory_allocated() - before
    rows.append(row(FORWARD, before, kept))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(out, x.leaves, x.dout)
    kept = sum(g.numel() * g.element_size() for g in grads)
    rows.append(row(BACKWARD, before, kept))
    return rows


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except BaseException:  # noqa: BLE001 others wait for this rank: it ends at once
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # threads of the group may outlive Python
