"""A run on several devices: FSDP2 times context parallel, on one mesh of processes.

Weights, gradients and optimizer state are cut over all ranks. A step's sequences are dealt out to
groups of ranks, and each group cuts its sequences among its ranks (`headway.distributed.Layout`),
where documents are packed as ever: attention reaches the keys of the others.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.distributed import Layout
from headway.errors import ArgumentError

from .config import Settings
from .corpus import Batch
from .errors import RunError
from .model import Transformer

TILE = 128  # sequences are cut at multiples of it, where they are long enough


def started() -> int:
    """Return the number of processes that torchrun started; 0 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 0


def is_first() -> bool:
    """Return True in the process that prints and writes files for all."""
    return not dist.is_torchelastic_launched() or os.environ["RANK"] == "0"


class Ranks:
    """The processes of a run, one unless `devices` is more; together, one does nothing."""

    def __init__(self, settings: Settings):
        self.count = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if self.count > 1 else 0
        self.group: Any = None
        self.context, self.device = settings.context, settings.device
        self.documents = settings.mask == "documents"
        if self.count == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh

        over = settings.context_parallel or self.count
        shape = self.count // over, over
        mesh = init_device_mesh(settings.device, shape, mesh_dim_names=("dp", "cp"))
        self.whole, self.cp = mesh["dp", "cp"]._flatten("dp_cp"), mesh["cp"]
        self.row, self.rows = mesh["dp"].get_local_rank(), shape[0]
        self.group = self.whole.get_group()

    @property
    def first(self) -> bool:
        """True in the process that prints and writes files."""
        return self.rank == 0

    def shard(self, model: Transformer) -> None:
        """Cut the weights over all ranks, block by block."""
        if self.count == 1:
            return
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, mesh=self.whole)
        fully_shard(model, mesh=self.whole)

    def cut(self, batch: Batch, all_rows: bool = False) -> tuple[Batch, Layout | None]:
        """Return this rank's part of a batch that all ranks have: its group's sequences (every
        sequence if `all_rows`), and of those its tokens. `ids` stay those of whole sequences."""
        if self.count == 1:
            return batch, None
        parts = batch.tokens, batch.targets, batch.ids
        if not all_rows:
            size = len(batch.ids) // self.rows
            parts = [x[self.row * size : (self.row + 1) * size] for x in parts]
        tokens, targets, ids = parts
        if self.cp.size() == 1:
            return Batch(*parts), None
        tile = max(1, min(TILE, self.context // (4 * self.cp.size())))
        lengths = [_lengths(row) if self.documents else [self.context] for row in ids.cpu()]
        layout = Layout.of_lengths(lengths, self.cp, tile=tile)
        return Batch(layout.shard(tokens), layout.shard(targets), ids), layout

    def total(self, x: Tensor, all_rows: bool = False) -> Tensor:
        """Return the sum over ranks; over those of one sequence if `all_rows`."""
        if self.count > 1:
            x = x.clone()
            dist.all_reduce(x, group=self.cp.get_group() if all_rows else self.group)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """Return the maximum over ranks."""
        if self.count > 1:
            x = x.clone()
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def agree(self, compute: Callable[[], Any]) -> Any:
        """Compute on the first process and broadcast the result; if it fails, all fail."""
        if self.count == 1:
            return compute()
        outcome: list[Any] = [None, None]
        error = None
        if self.first:
            try:
                outcome[0] = compute()
            except Exception as raised:  # noqa: BLE001 raised again, when all know of it
                error = raised
                outcome[1] = f"{type(raised).__name__}: {raised}"
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        if error is not None:
            raise error
        if outcome[1] is not None:
            raise RunError(f"rank 0 could not go on: {outcome[1]}")
        return outcome[0]


@contextmanager
def ranks_of(settings: Settings) -> Iterator[Ranks]:
    """Join the ranks of a run, and leave them at the end of `with`.

    **Raises:** `ArgumentError` where torchrun has started another number than --devices.
    """
    count = dist.get_world_size() if dist.is_initialized() else started()
    if settings.devices > 1 and count != settings.devices:
        raise ArgumentError(
            f"--devices {settings.devices}, but {count or 'no'} processes were started; leave it "
            "to `headway train`, or to torchrun --nproc-per-node"
        )
    if count > 1 and settings.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mine = count > 1 and not dist.is_initialized()
    if mine:
        # gloo compares what ranks are about to do, on the CPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo")
    try:
        yield Ranks(settings)
    finally:
        if mine:
            dist.destroy_process_group()


def _lengths(ids: Tensor) -> list[int]:
    """Return the lengths of the documents of one sequence, from their ids."""
    return torch.unique_consecutive(ids, return_counts=True)[1].tolist()
