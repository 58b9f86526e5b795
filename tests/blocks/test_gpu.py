"""On a GPU: the same tiles as on the CPU, and there."""

import gc
import time

import pytest
import torch

import headway
from headway.backends.gpu.runtime import device_guard
from headway.blocks import BlockMask

from .test_build import common_masks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def moved(value, built: BlockMask):
    """The same with its tensors on the GPU: a value of the library, or a function's closure."""
    if isinstance(value, headway.Mask):
        return built.to("cuda").mask
    for cell in value.__closure__ or ():
        if isinstance(cell.cell_contents, torch.Tensor):
            cell.cell_contents = cell.cell_contents.cuda()
    return value


def same(a: BlockMask, b: BlockMask) -> None:
    for x, y in zip(a.tiles.flatten(), b.tiles.flatten(), strict=True):
        assert torch.equal(x.cpu(), y.cpu())


@pytest.mark.parametrize("name", common_masks())
def test_tiles_are_those_of_the_cpu(name):
    mask = common_masks()[name]
    shape = (3, 4, 300, 300)
    here = headway.block_mask(mask, *shape, tile=(32, 16))
    there = headway.block_mask(moved(mask, here), *shape, tile=(32, 16), device="cuda")
    assert there.device.type == "cuda"
    same(here, there)
    same(here.retile((64, 64)), there.retile((64, 64)))
    same(here[:, :, 2:7, 1:9], there[:, :, 2:7, 1:9])
    same(here | here, there | there)
    assert repr(here) == repr(there)


def test_files_and_back(tmp_path):
    ids = torch.arange(300, device="cuda") // 40
    mask = headway.block_mask(headway.document(ids), 1, 1, 300, 300, tile=(32, 32))
    mask.save(tmp_path / "mask")
    back = BlockMask.load(tmp_path / "mask", device="cuda")
    assert back.device == back.mask.ids.device == mask.device
    same(mask, back)
    same(mask, mask.to("cpu"))


def test_a_million_tokens():
    mask = headway.causal() & headway.sliding_window(4096) | headway.prefix(100)
    here, there = (
        headway.block_mask(mask, 1, 1, 1 << 20, 1 << 20, device=d) for d in ("cpu", "cuda")
    )
    same(here, there)


def test_what_a_captured_graph_reads_is_freed_with_the_graph():
    q, k, v = (torch.randn(1, 4, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def captured(window: int):
        mask = headway.causal() & headway.sliding_window(window)
        mask = headway.block_mask(mask, 1, 1, 1024, 1024, device="cuda")
        out, graph = torch.empty_like(q), torch.cuda.CUDAGraph()
        expected = headway.attention(q, k, v, mask=mask)
        with torch.cuda.graph(graph):
            out.copy_(headway.attention(q, k, v, mask=mask))
        return graph, out, expected

    def replays_right(graph, out, expected) -> bool:
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        return torch.equal(out, expected)

    kept = device_guard._read_by_graphs
    before = set(kept)
    first, second = captured(100), captured(200)
    headway.clear_block_cache()
    gc.collect()
    overwriting = [torch.full((1 << 20,), 7, device="cuda") for _ in range(20)]
    assert replays_right(*first)
    assert replays_right(*second)
    assert len(set(kept) - before) == 2
    del first, overwriting
    gc.collect()
    torch.cuda.synchronize()
    time.sleep(1)  # the driver calls back from a thread of its own
    third = captured(300)
    assert len(set(kept) - before) == 2
    assert replays_right(*second)
    assert replays_right(*third)
