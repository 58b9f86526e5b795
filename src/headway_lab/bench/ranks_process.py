"""One rank of `ranks.py`: questions on standard input, a case each; the first rank answers on
standard output.

Every rank makes the whole tensors from the case's seed and keeps its own part. A contestant is
checked first: out of some rows of every head, and the gradients that follow from these rows, next
to the definition in float64 (`measure.py`). Then contestants are timed in turns; a sample is the
time of the slowest rank. Backwards are timed on one forward.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend
from torch.nn.attention import flex_attention as flex

from headway import explain
from headway.api import attention
from headway.distributed import Layout
from headway.distributed.exchange.pull import reserved_bytes
from headway.mods import causal

from .case import BACKWARD, FORWARD, Case, CaseInputs, Size, Unavailable, make_inputs, size
from .cases import every
from .measure import Truth
from .peers import mask_mod, sdpa_call, with_kernel
from .ranks import ONE_CARD
from .results import WRONG, Result
from .timing import Timing, between, mark, wait

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
PLANS = "gather", "heads", "ulysses"  # beside that of "auto"
EVERY_PLAN = "causal", "documents-64"  # names of cases; the others have the first plan alone
LONGEST = 1 << 17  # tokens: beyond, nothing is checked
PEERS = 1 << 17  # tokens: beyond, the first plan alone, no peers and no traces
BUSY = 20e-3  # seconds of a sample


class RankContestant(NamedTuple):
    """A call on this rank's part of the tensors, and the size of what all ranks keep together."""

    forward: Callable[[], Tensor]
    inputs: CaseInputs
    size: Size


def main(setup: dict[str, Any]) -> None:
    """Join the group, and answer until standard input ends."""
    rank, ranks, device = setup["rank"], setup["ranks"], setup["device"]
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}[device]
    dist.init_process_group(
        backend, init_method=f"file://{setup['store']}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    cases = {case.name: case for case in every()}
    for line in sys.stdin:
        question = json.loads(line)
        for row in answer(cases[question["case"]], device, question["repeats"]):
            _say(asdict(row), rank)
        _say(None, rank)  # that was all


def _say(row: dict[str, Any] | None, rank: int) -> None:
    if rank == 0:
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


def answer(case: Case, device: str, repeats: int) -> Iterator[Result]:
    """Yield the rows of a case."""
    full_inputs = make_inputs(case, device)
    layout = layout_of(case, full_inputs)
    with ExitStack() as stack:
        by_name, rows = contestants(case, full_inputs, layout, stack)
        if case.length <= LONGEST:
            truth = Truth(case, full_inputs)
            for name in [name for name in by_name if name != ONE_CARD]:
                row = checked(case, name, by_name[name], layout, truth)
                if row.verdict:
                    rows.append(row)
                    del by_name[name]
            del truth
        del full_inputs
        yield from rows
        ours = by_name.get("headway")
        explanation = explained(ours.inputs, layout) if ours else ""
        for direction in (FORWARD, BACKWARD):
            for row in timed(case, by_name, direction, device, repeats):
                yield replace(row, note=explanation) if row.contestant == "headway" else row
        if device == "cuda" and ours:
            yield from memory(case, ours)
            if case.length <= PEERS:
                yield from exposed(case, ours)


def layout_of(case: Case, full_inputs: CaseInputs) -> Layout:
    """Return a balanced layout for documents and windows, zigzag for all others."""
    group = dist.group.WORLD
    if "documents" in case.name or "window" in case.name:
        return Layout.balanced(case.length, group, full_inputs.mask)
    return Layout.zigzag(case.length, group)


def explained(inputs: CaseInputs, layout: Layout) -> str:
    """Describe the layout and the plan in one line."""
    text = explain(inputs.q, inputs.k, inputs.v, inputs.score, inputs.mask, layout=layout)
    lines = map(str.strip, str(text).splitlines())
    return "; ".join(x for x in lines if x.startswith(("layout:", "keys:", "plan:", "transport:")))


def part(full_inputs: CaseInputs, layout: Layout) -> CaseInputs:
    """Return this rank's shards; tensors of a score are shared by all ranks."""
    cut = lambda x: layout.shard(x.detach(), 2).contiguous()
    q, k, v = (cut(x).requires_grad_() for x in (full_inputs.q, full_inputs.k, full_inputs.v))
    return full_inputs._replace(q=q, k=k, v=v, dout=cut(full_inputs.dout))


def contestants(
    case: Case, full_inputs: CaseInputs, layout: Layout, stack: ExitStack
) -> tuple[dict[str, RankContestant], list[Result]]:
    """Return the contestants, and a row for each that cannot run: Headway, its plans, one GPU, and
    PyTorch's, whose context parallel lasts as long as `stack`."""
    mine, measured = part(full_inputs, layout), size(case, full_inputs.mask)
    ours = lambda at: lambda: attention(mine.q, mine.k, mine.v, mine.score, mine.mask, layout=at)
    by_name = {"headway": RankContestant(ours(layout), mine, measured)}
    by_name[ONE_CARD] = one_card(case, layout.ranks, full_inputs.q.device.type)
    every_plan = case.length <= PEERS and any(name in case.name for name in EVERY_PLAN)
    for plan in PLANS if every_plan else PLANS[:1]:
        by_name[f"headway, {plan}"] = RankContestant(ours(layout.using(plan)), mine, measured)
    peers: dict[str, Callable[[], Callable[[], Tensor]]] = {}
    if every_plan and full_inputs.q.is_cuda and case.score is None:
        if str(full_inputs.mask) == str(causal()):
            stack.enter_context(context_parallel())
            peers = {f"torch {name}": partial(sdpa_over_ranks, mine, name) for name in KERNELS}
        if case.hq > 32 and case.length <= 1 << 16:  # compiles for long
            peers["torch flex"] = partial(flex_over_ranks, mine, layout)
    rows = []
    for name, make in peers.items():
        try:
            forward, why = make(), ""
            torch.autograd.grad(forward(), mine.leaves[:3], mine.dout)
        except Exception as error:  # noqa: BLE001 the table says it
            why = str(Unavailable.because(error))
        if _anywhere(bool(why)):
            note = why or "could not run on another rank"
            rows.append(Result(case.name, "", name).not_run(note))
        else:
            by_name[name] = RankContestant(forward, mine, measured)
    return by_name, rows


def one_card(case: Case, ranks: int, device: str) -> RankContestant:
    """Return the `shortened` case on one GPU."""
    short = shortened(case, ranks)
    inputs = make_inputs(short, device)
    pairs, tiles = size(short, inputs.mask)
    return RankContestant(inputs.headway, inputs, Size(pairs * ranks, tiles * ranks))


def shortened(case: Case, ranks: int) -> Case:
    """Return the case so short that one GPU has as many pairs as a rank: the length over the root
    of the ranks, or for windows and documents over the ranks. A window keeps its width."""
    local = any(word in case.name for word in ("window", "documents"))
    length = round(case.length / (ranks if local else ranks**0.5) / 128) * 128

    def remade(make: Any) -> Any:
        """Return the function that makes a mask or score, for this length."""
        if not isinstance(make, partial):
            return make
        return partial(make.func, *[length if n == case.length else n for n in make.args])

    return replace(case, length=length, mask=remade(case.mask), score=remade(case.score))


def _anywhere(flag: bool) -> bool:
    """Return True if the flag is set on any rank."""
    flags = torch.tensor(int(flag), device=_device())
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def _device() -> str:
    return "cuda" if "nccl" in dist.get_backend() else "cpu"


def checked(
    case: Case, name: str, one: RankContestant, layout: Layout, truth: Truth
) -> Result:  # fmt: skip
    """Return a row that is wrong if out or a gradient is, on any rank."""
    dout = layout.shard(truth.dout, 2).contiguous()
    out = one.forward()
    grads = list(torch.autograd.grad(out, one.inputs.leaves, dout, allow_unused=True))
    for g in grads[3:]:
        dist.all_reduce(g)
    full = [layout.unshard(x.detach(), 2) for x in (out, *grads[:3])]
    errors = truth.compare([full[0][:, :, truth.rows], *full[1:], *grads[3:]])
    result = Result(case.name, "", name).checked(errors)
    if _anywhere(bool(result.verdict)) and not result.verdict:
        return replace(result, verdict=WRONG, note="wrong on another rank")
    return result


def timed(
    case: Case, by_name: dict[str, RankContestant], direction: str, device: str, repeats: int
) -> list[Result]:
    """Time one direction, and return a row for every contestant."""
    calls: dict[str, Callable[[], object]] = {
        name: one.forward if direction == FORWARD
        else partial(one.inputs.grads, one.forward(), again=True)
        for name, one in by_name.items()
    }  # fmt: skip
    samples: dict[str, list[float]] = {name: [] for name in calls}
    calls_per_sample = {}
    with torch.set_grad_enabled(direction == BACKWARD):
        for name, call in calls.items():
            call()
            calls_per_sample[name] = max(1, round(BUSY / sample(call, 1, device)))
        for turn in range(repeats):
            for name in list(calls)[:: 1 if turn % 2 else -1]:
                if sum(samples[name]) * calls_per_sample[name] < 3.0:
                    samples[name].append(sample(calls[name], calls_per_sample[name], device))
    rows, ranks = [], dist.get_world_size()
    for name, times in samples.items():
        flops = by_name[name].size.flops(direction, *case.widths) / ranks
        speed = flops / statistics.median(times) / 1e9
        row = Result(case.name, direction, name, gflops=speed).timed(Timing.of(times))
        rows.append(row)
    ours = next((r.gflops for r in rows if r.contestant == "headway"), None)
    return [replace(r, ratio=ours / r.gflops) if ours else r for r in rows]  # type: ignore[operator]


def sample(call: Callable[[], object], number: int, device: str) -> float:
    """Return seconds per call of the slowest rank; several calls begin with one that waits."""
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


def exposed(case: Case, one: RankContestant) -> list[Result]:
    """Measure the share of a call in which the busiest GPU runs no kernel: it waits for rows."""
    backward = partial(one.inputs.grads, one.forward(), again=True)
    calls: dict[str, Callable[[], object]] = {FORWARD: one.forward, BACKWARD: backward}
    rows = []
    for direction, call in calls.items():
        with torch.set_grad_enabled(direction == BACKWARD):
            mine = torch.tensor(100 * _without_kernels(call), device="cuda")
        share = [mine.clone() for _ in range(dist.get_world_size())]
        dist.all_gather(share, mine)
        note = f"of the time no kernel runs; on the card that waits longest {max(share):.1f} %"
        row = Result(
            case.name, f"{direction}, exposed", "headway", "%", float(min(share)), note=note
        )
        rows.append(row)
    return rows


def _without_kernels(call: Callable[[], object]) -> float:
    """Return the share of calls in which this GPU runs no kernel, by a trace. Calls are queued
    while it is busy, and only when all ranks trace: some begin half a second late."""
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
    """Return the share of time in which no kernel (start, end) of equal calls runs: from the end of
    the first longest kernel to that of the last, which are complete calls."""
    spans = sorted(spans)
    longest = max((end - start for start, end in spans), default=0.0)
    ends = [end for start, end in spans if end - start > 0.8 * longest]
    if len(ends) < 2:
        return 0.0
    window_start, window_end = ends[0], ends[-1]
    busy, until = 0.0, window_start
    for start, end in spans:
        busy += max(0.0, min(end, window_end) - max(start, until))
        until = max(until, min(end, window_end))
    return 1 - busy / (window_end - window_start)


def memory(case: Case, one: RankContestant) -> list[Result]:
    """Measure the MB beyond inputs and results, without symmetric memory, which all calls share."""
    x = one.inputs
    torch.cuda.synchronize()
    keys = case.b * case.hk * case.length * sum(case.widths) * x.k.element_size()

    def row(direction: str, before: int, result_bytes: int) -> Result:
        extra_bytes = torch.cuda.max_memory_allocated() - before - result_bytes
        largest_bytes = torch.tensor(float(extra_bytes), device="cuda")
        dist.all_reduce(largest_bytes, dist.ReduceOp.MAX)
        note = (
            f"{float(largest_bytes) / keys:.2f} of the keys and values of the sequence; and "
            f"{reserved_bytes() / 1e6:,.0f} MB of symmetric memory, for all calls so far"
        )
        used_mb = float(largest_bytes) / 1e6
        return Result(case.name, f"{direction}, memory", "headway", "MB", used_mb, note=note)

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = one.forward()
    forward_row = row(FORWARD, before, torch.cuda.memory_allocated() - before)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = x.grads(out)
    return [forward_row, row(BACKWARD, before, sum(g.nbytes for g in grads))]


# -- peers: PyTorch's context parallel ---------------------------------------------------------


def context_parallel() -> Any:
    """Return PyTorch's context parallel of `F.sdpa`, whose order is that of `Layout.zigzag`."""
    from torch.distributed.tensor import experimental

    ranks = dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("cp",))
    # It cuts buffers up. The bench's are cut already; this one is of no use.
    dummy = torch.empty(1, 2 * ranks, device="cuda")
    return experimental.context_parallel(mesh, buffers=[dummy], buffer_seq_dims=[1])


def sdpa_over_ranks(mine: CaseInputs, kernel: str) -> Callable[[], Tensor]:
    """Return a causal `F.scaled_dot_product_attention` of one kernel, in `context_parallel`."""
    return with_kernel(KERNELS[kernel], sdpa_call(mine, is_causal=True))


def flex_over_ranks(mine: CaseInputs, layout: Layout) -> Callable[[], Tensor]:
    """Return compiled FlexAttention over keys that are all-gathered first."""
    try:
        from torch.distributed.tensor.experimental._context_parallel._attention import (
            flex_cp_allgather as gather,
        )
    except ImportError:
        raise Unavailable("this PyTorch has no context parallel of FlexAttention") from None
    if mine.mask is None:
        raise Unavailable("timed with masks only")
    mask, name = mask_mod(mine.mask), dist.group.WORLD.group_name  # type: ignore[union-attr]
    sizes = torch.tensor(layout.sizes)
    if bool((sizes != sizes[0]).any()):
        raise Unavailable("its ranks hold as many tokens each")
    q_positions = layout.positions.to("cuda")
    gathered = [torch.empty_like(q_positions) for _ in sizes]
    dist.all_gather(gathered, q_positions)
    kv_positions = torch.cat(gathered)

    def attends(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return mask(b, h, q_positions[i], kv_positions[j])

    blocks = torch.compile(flex.create_block_mask)(
        attends, None, None, len(q_positions), len(kv_positions), device="cuda"
    )
    # A backward is timed many times on one forward.
    torch._functorch.config.donated_buffer = False  # type: ignore[bad-assignment]
    attend = torch.compile(flex.flex_attention)

    def run() -> Tensor:
        k, v = gather(mine.k, mine.v, 2, name)
        return attend(
            mine.q, k, v, block_mask=blocks, enable_gqa=mine.q.shape[1] != mine.k.shape[1]
        )

    return run


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except BaseException:  # noqa: BLE001 others wait for this rank: it ends at once
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # threads of the group may outlive Python
