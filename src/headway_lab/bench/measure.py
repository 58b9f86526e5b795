"""Headway and its peers on one case: checked against float64, timed in turns, judged.

The whole square does not fit at long lengths, and need not: the gradient of the output is zero but
for some rows of every head, so that those rows alone give the exact gradients of all keys. A block
mask is built by `headway.block_mask` as a user would, with nothing cached, in tiles of 128.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch._functorch import config as functorch

from headway.api import block_mask
from headway.blocks import BlockMask, clear_block_cache
from headway.dropout import keep, kept_factor
from headway.mods import causal

from .case import (
    BACKWARD,
    BOTH,
    BUILD,
    FORWARD,
    SEED,
    Case,
    CaseInputs,
    Size,
    Unavailable,
    make_inputs,
    size,
)
from .peers import PEERS, Peer
from .results import PASS, WRONG, Error, Result
from .timing import Clocks, Tick, Timing, compare, peak, repeat, roof

PAIRS = 1 << 23  # pairs looked at in one case, over all heads: 64 MB of float64 a matrix
FACTOR = 3.0  # times the error of plain PyTorch in the same dtype that are allowed ...
FLOOR = 5e-6  # ... or up to this: PyTorch's flash kernels take a faster, rougher exp
ROUNDED_OUT = 1.5  # times the share of a rounded out that are allowed with dropout


def definition(
    case: Case, inputs: CaseInputs, q: Tensor, k: Tensor, v: Tensor, rows: Tensor
) -> Tensor:
    """Return the `weights` times v."""
    v = v.repeat_interleave(case.hq // case.hk, dim=1)
    return weights(case, inputs, q, k, rows).to(v.dtype) @ v


def weights(case: Case, inputs: CaseInputs, q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
    """Return softmax(`logits`), with the pairs that dropout keeps."""
    p = logits(case, inputs, q, k, rows).softmax(-1)
    if case.dropout:
        seed = torch.tensor(SEED, device=q.device)
        p = p * keep(case.dropout, seed, *_index(case, rows)) * kept_factor(case.dropout)
    return p


def logits(case: Case, inputs: CaseInputs, q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
    """Return score(scale q kᵀ) for some rows, -inf where the mask is False, in plain PyTorch."""
    k = k.repeat_interleave(case.hq // case.hk, dim=1)
    s = (q[:, :, rows] @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(case.d)
    if inputs.score is not None:
        s = inputs.score(s, *_index(case, rows))
    if inputs.mask is not None:
        s = s.masked_fill(~inputs.mask(*_index(case, rows)), -math.inf)
    return s


def _index(case: Case, rows: Tensor) -> tuple[Tensor, ...]:
    """Return the indices of all pairs of some rows: b, h, i and j."""
    return (
        torch.arange(case.b, device=rows.device)[:, None, None, None],
        torch.arange(case.hq, device=rows.device)[:, None, None],
        rows[:, None],
        torch.arange(case.length, device=rows.device),
    )


def sampled_rows(case: Case, device: torch.device) -> Tensor:
    """Return the rows that are compared: some, and both ends, where tails go wrong."""
    count = max(4, min(256, PAIRS // (case.b * case.hq * case.length)))
    inner = torch.randperm(case.length, generator=torch.Generator().manual_seed(1))[:count]
    return torch.cat([inner, torch.tensor([0, case.length - 1])]).unique().to(device)


class Truth:
    """The right results of a case on some rows, and how far plain PyTorch is from them."""

    def __init__(self, case: Case, inputs: CaseInputs) -> None:
        self.rows = sampled_rows(case, inputs.q.device)
        self.dout = torch.zeros_like(inputs.dout)
        self.dout[:, :, self.rows] = inputs.dout[:, :, self.rows]
        self.inputs = inputs
        self.exact = self._plain(case, torch.float64)
        plain = self._plain(case, inputs.q.dtype)
        self.limits = [
            max(FACTOR * distance(a, b), FLOOR) for a, b in zip(plain, self.exact, strict=True)
        ]
        if case.dropout:
            rounded = self._with_rounded_out(case)
            shares = [
                ROUNDED_OUT * distance(a, b) for a, b in zip(rounded, self.exact, strict=True)
            ]
            self.limits = list(map(max, self.limits, shares))

    def _plain(self, case: Case, dtype: torch.dtype) -> list[Tensor]:
        inputs = self.inputs
        q, k, v = (t.detach().to(dtype).requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
        out = definition(case, inputs, q, k, v, self.rows)
        dout = inputs.dout[:, :, self.rows].to(dtype)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v, *inputs.learned), dout)]

    def _with_rounded_out(self, case: Case) -> list[Tensor]:
        """Return what is exact but that the backward takes rowsum(dout∘out) from a rounded out, as
        every flash kernel does. Without dropout the out of a query with one key is that key's value
        and not rounded; with it, dq is an error where it should be 0."""
        inputs, dout = self.inputs, self.inputs.dout[:, :, self.rows].double()
        q, k, v = (t.detach().double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
        out = definition(case, inputs, q, k, v, self.rows)
        error = (dout * (out.to(inputs.q.dtype) - out)).sum(-1).detach()
        lse = logits(case, inputs, q, k, self.rows).logsumexp(-1)  # dlse adds to rowsum(dout∘out)
        grads = torch.autograd.grad((out, lse), (q, k, v, *inputs.learned), (dout, -error))
        return [out.detach(), *grads]

    def errors(
        self, forward: Callable[[], Tensor], backward: bool, inputs: CaseInputs | None = None
    ) -> list[Error]:
        """Return the errors of a contestant's output, and of its gradients if it has a backward.
        `inputs`: the tensors that it computes on, if they are copies."""
        leaves = (self.inputs if inputs is None else inputs).leaves
        with torch.set_grad_enabled(backward):
            out = forward()
        results = [out.detach()[:, :, self.rows]]
        if backward:
            results += torch.autograd.grad(out, leaves, self.dout)
        return self.compare(results)

    def compare(self, results: list[Tensor]) -> list[Error]:
        """Return the errors of out on the rows, and of gradients that follow it."""
        learned_names = (f"d(learned {n})" for n in range(len(results) - 4))
        names = ("out", "dq", "dk", "dv", *learned_names)
        return [
            Error(name, distance(a, b), limit)
            for name, a, b, limit in zip(names, results, self.exact, self.limits, strict=False)
        ]


def distance(x: Tensor, exact: Tensor) -> float:
    """Return |x - exact| / |exact| of the worst head, or of all of it without heads."""
    x, exact = x.double(), exact.double()
    if x.dim() < 3:
        return float((x - exact).norm() / exact.norm())
    return float(((x - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))).max())


@dataclass(frozen=True)
class Contestant:
    """A call to time, the tensors that it computes on, and whether it has a backward."""

    forward: Callable[[], Tensor]
    inputs: CaseInputs
    backward: bool
    peer: Peer | None = None  # None for Headway

    @property
    def package(self) -> str:
        """The package of the peer and its version, or ""."""
        return (self.peer.installed or "") if self.peer else ""


# A compiled peer's backward is timed many times on one forward, whose buffers must last.
@functorch.patch(donated_buffer=False)
def measure_time(case: Case, device: str, repeats: int, tick: Tick = lambda: None) -> list[Result]:
    """Check Headway and every peer against float64, then time them in turns, both directions."""
    inputs = make_inputs(case, device)
    contestants, notes = _contestants(case, inputs)
    truth = Truth(case, inputs)
    checked: dict[str, Result] = {}
    for name, one in list(contestants.items()):
        result = Result(case.name, "", name, note=one.package)
        if one.peer is None or one.peer.same:
            try:
                result = result.checked(truth.errors(one.forward, one.backward, one.inputs))
            except Exception as error:
                if one.peer is None:
                    raise
                result = result.not_run(Unavailable.because(error))
        checked[name] = result
        if result.verdict:
            notes.append(result)
            del contestants[name]
    del truth
    if "headway" not in contestants:
        return notes
    measured = size(case, inputs.mask)
    results = []
    for direction in (FORWARD, BACKWARD):
        calls, clocks = _calls(contestants, direction), Clocks(device, tick)
        with torch.set_grad_enabled(direction == BACKWARD):
            times = compare(calls, repeats, device, clocks.sample)
        checked["headway"] = replace(checked["headway"], note=str(clocks))
        results += [
            judge(case, direction, checked[name], times, measured, device) for name in times
        ]
    return results + notes


def _contestants(case: Case, inputs: CaseInputs) -> tuple[dict[str, Contestant], list[Result]]:
    """Return the contestants, Headway first, and a line for every peer that refuses the case."""
    contestants = {"headway": Contestant(inputs.headway, inputs, backward=True)}
    notes = []
    for name in case.peers:
        peer = PEERS[name]
        if peer.installed is None:
            continue
        peer_inputs = inputs.by_rows() if peer.by_rows else inputs
        backward = inputs.q.device.type in peer.backward
        try:
            contestants[name] = Contestant(
                peer.prepare(case, peer_inputs), peer_inputs, backward, peer
            )
        except Exception as error:  # noqa: BLE001 of another library: out of memory, say
            notes.append(Result(case.name, "", name).not_run(Unavailable.because(error)))
    return contestants, notes


def _calls(contestants: dict[str, Contestant], direction: str) -> dict[str, Callable[[], object]]:
    if direction == FORWARD:
        return {name: one.forward for name, one in contestants.items()}
    return {
        name: partial(one.inputs.grads, one.forward(), again=True)
        for name, one in contestants.items() if one.backward
    }  # fmt: skip


def judge(
    case: Case, direction: str, checked: Result, times: dict[str, Timing], measured: Size,
    device: str,
) -> Result:  # fmt: skip
    """Return one line: the numbers, the ratio to Headway, and the target if there is one."""
    name = checked.contestant
    peer, timing, ours = PEERS.get(name), times[name], times["headway"]
    result = replace(checked, direction=direction).timed(timing)
    if peer is None or peer.same:
        flops = measured.flops(direction, *case.widths) / timing.median
        # A product in half precision may be slower than one in float32, which is open to all.
        top = max(roof(case.dtype, device), roof("float32", device))
        result = replace(
            result, pairs=measured.pairs, tiles=measured.tiles, gflops=round(flops / 1e9, 2),
            roof=round(top / 1e9, 2),
        )  # fmt: skip
    if peer is None:
        return result
    target, share = case.target(direction, name), 1.0
    if peer.per_tile:
        causal_size = size(case, causal())
        theirs, each = timing.median / causal_size.tiles, ours.median / measured.tiles
        share = causal_size.tiles / measured.tiles
        note = f"{theirs * 1e6:.1f} µs per live tile, here {each * 1e6:.1f} µs"
        result = replace(result, pairs=causal_size.pairs, tiles=causal_size.tiles, note=note)
    result = replace(result, ratio=round(timing.median / (share * ours.median), 4))
    for rival in case.targets:
        if (rival.of, rival.direction) == (name, direction) and rival.peer in times:
            faster = times[rival.peer].median / timing.median
            result = replace(result, note=f"{faster:.2f}x {rival.peer}")
            passed = times[rival.peer].takes(rival.times, timing)
            return result.asked(f">= {rival.times:g}x {rival.peer}", passed)
    if target is None:
        return result
    return result.asked(f">= {target:g}x", timing.takes(target * share, ours))


def measure_long(case: Case, device: str, repeats: int, tick: Tick) -> list[Result]:
    """Measure a call of a million tokens and one of half as many: memory must grow linearly."""
    results, used_mb = [], {}
    for length in (case.length // 2, case.length):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        part = replace(case, length=length)
        inputs = make_inputs(part, device)
        step = lambda inputs=inputs: inputs.grads(inputs.headway())
        step()  # compiles, and builds the block mask
        used_mb[length] = torch.cuda.max_memory_allocated() / 1e6
        note = f"{used_mb[length]:.0f} MB at most"
        result = Result(case.name, BOTH, f"headway, {length} tokens", verdict=PASS, note=note)
        result = result.timed(repeat(step, device, runs=3))
        results.append(result.checked(Truth(part, inputs).errors(inputs.headway, backward=True)))
        del inputs, step
    ratio = used_mb[case.length] / used_mb[case.length // 2]
    growth = Result(case.name, "memory", "headway", "ratio", round(ratio, 3))
    return [*results, growth.asked("<= 2.1", ratio <= 2.1)]


def build(case: Case, inputs: CaseInputs) -> BlockMask:
    """Build the block mask of a case, with an empty cache."""
    assert inputs.mask is not None
    clear_block_cache()
    n, device = case.length, inputs.q.device
    return block_mask(inputs.mask, case.b, case.hq, n, n, device=device, tile=(128, 128))


def measure_build(case: Case, device: str, repeats: int, tick: Tick = lambda: None) -> list[Result]:
    """Time the build in milliseconds; compare the tiles of a peer's result one by one."""
    inputs = make_inputs(case, device)
    results: dict[str, object] = {}

    def kept(name: str, call: Callable[[], object]) -> Callable[[], None]:
        return lambda: results.update({name: call()})

    calls = {"headway": kept("headway", lambda: build(case, inputs))}
    calls |= {name: kept(name, PEERS[name].prepare(case, inputs)) for name in case.peers}
    times = compare(calls, repeats, device, tick)
    ours = results.pop("headway")
    assert isinstance(ours, BlockMask)
    full, partial, empty = ours.counts()
    size = sum(t.numel() * t.element_size() for t in ours.tiles.flatten())
    note = f"{full:,} full, {partial:,} partial, {empty:,} empty; {size / 1e6:.3g} MB"
    ours_line = Result(case.name, BUILD, "headway", tiles=full + partial, note=note)
    lines = [ours_line := ours_line.timed(times["headway"]).at_most(case.most)]
    for name, theirs in results.items():
        line = Result(case.name, BUILD, name, note="equal tiles")
        if not torch.equal(state(theirs, ours.grid), ours.to_dense()[0, 0].cpu()):
            lines.append(replace(line, verdict=WRONG, note="other tiles are live"))
            continue
        ratio = times[name].median / times["headway"].median
        line = replace(line, tiles=ours_line.tiles, ratio=round(ratio, 1)).timed(times[name])
        target = case.target(BUILD, name)
        if target is not None:
            passed = times[name].takes(target, times["headway"])
            line = line.asked(f">= {target:g}x", passed)
        lines.append(line)
    return lines


def state(theirs: object, grid: tuple[int, int]) -> Tensor:
    """Return FlexAttention's tiles, uint8 `(tile_rows, tile_cols)`: 0 empty, 1 partial, 2 full."""
    states = torch.zeros(grid, dtype=torch.uint8)
    for value, prefix in ((1, ""), (2, "full_")):
        counts, indices = (
            getattr(theirs, f"{prefix}{name}").cpu() for name in ("kv_num_blocks", "kv_indices")
        )
        for r, n in enumerate(counts[0, 0].tolist()):
            states[r, indices[0, 0, r, :n].long()] = value
    return states


def build_memory(case: Case, device: str) -> Result:
    """Measure the peak memory of a build, above that of a process that built a small one."""
    inputs = make_inputs(case, device)
    block_mask(causal(), 1, 1, 256, 256, device=device)  # what a first call loads
    before = peak(device)
    full, partial, _ = build(case, inputs).counts()
    note = f"{before / 1e6:.0f} MB before"
    result = Result(case.name, BUILD, "headway", tiles=full + partial, note=note)
    return result.used(peak(device) - before).at_most(case.most)
