"""What building a block mask takes: time, against PyTorch's own, and memory.

Each is built by `headway.block_mask` as a user would, with nothing cached, in tiles of 128.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from headway.api import block_mask
from headway.blocks import BlockMask, clear_block_cache
from headway.mods import causal

from .case import BUILD, Case, Inputs, inputs
from .machine import peak
from .peers import PEERS
from .results import WRONG, Result
from .timing import compare

TILE = (128, 128)


def build(case: Case, x: Inputs) -> BlockMask:
    """The call that is measured."""
    assert x.mask is not None
    clear_block_cache()
    return block_mask(
        x.mask, case.b, case.hq, case.length, case.length, device=x.q.device, tile=TILE
    )


def measure(
    case: Case, device: str, repeats: int, tick: Callable[[], object] = lambda: None
) -> list[Result]:
    """Milliseconds; the tiles of a peer's result are compared with Headway's, one by one."""
    x = inputs(case, device)
    results: dict[str, object] = {}

    def kept(name: str, call: Callable[[], object]) -> Callable[[], None]:
        return lambda: results.update({name: call()})

    calls = {"headway": kept("headway", lambda: build(case, x))}
    calls |= {name: kept(name, PEERS[name].prepare(case, x)) for name in case.peers}
    times = compare(calls, repeats, device, tick)
    ours = results.pop("headway")
    assert isinstance(ours, BlockMask)
    full, partial, empty = ours.counts()
    size = sum(t.numel() * t.element_size() for t in ours.tiles.flatten())
    note = f"{full:,} full, {partial:,} partial, {empty:,} empty; {size / 1e6:.3g} MB"
    first = Result(case.name, BUILD, "headway", tiles=full + partial, note=note)
    first = first.timed(times["headway"])
    if case.most is not None:
        limit = case.most
        first = first.asked(f"<= {limit:g} ms", times["headway"].median * 1e3 <= limit)
    lines = [first]
    for name, theirs in results.items():
        line = Result(case.name, BUILD, name)
        if not torch.equal(state(theirs, ours.grid), ours.to_dense()[0, 0].cpu()):
            lines.append(Result(case.name, BUILD, name, verdict=WRONG, note="other tiles are live"))
            continue
        ratio = times[name].median / times["headway"].median
        line = Result(
            case.name, BUILD, name, tiles=first.tiles, ratio=round(ratio, 1), note="equal tiles"
        ).timed(times[name])
        target = case.target(BUILD, name)
        lines.append(line if target is None else line.asked(f">= {target:g}x", ratio >= target))
    return lines


def state(theirs: object, grid: tuple[int, int]) -> Tensor:
    """FlexAttention's block mask as uint8 `(tile_rows, tile_cols)`: 0 empty, 1 partial, 2 full."""
    found = torch.zeros(grid, dtype=torch.uint8)
    for value, prefix in ((1, ""), (2, "full_")):
        counts, indices = (
            getattr(theirs, f"{prefix}{name}").cpu() for name in ("kv_num_blocks", "kv_indices")
        )
        for r, n in enumerate(counts[0, 0].tolist()):
            found[r, indices[0, 0, r, :n].long()] = value
    return found


def memory(case: Case, device: str) -> Result:
    """Peak memory of the build and its result, above what a process had that built a small one."""
    x = inputs(case, device)
    block_mask(causal(), 1, 1, 256, 256, device=device)  # what a first call loads
    before = peak(device)
    full, partial, _ = build(case, x).counts()
    used = (peak(device) - before) / 1e6
    result = Result(
        case.name, BUILD, "headway", unit="MB", median=round(used, 1), runs=1,
        tiles=full + partial, note=f"{before / 1e6:.0f} MB before",
    )  # fmt: skip
    if case.most is None:
        return result
    return result.asked(f"<= {case.most:g} MB", used <= case.most)
