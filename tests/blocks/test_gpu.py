"""On a GPU: the same tiles as on the CPU, and there."""

import pytest
import torch

import headway
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
