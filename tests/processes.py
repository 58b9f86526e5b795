"""Several ranks on this machine, over gloo."""

import gc
import multiprocessing
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Case = Callable[[int, int], None]  # called with the number of ranks, and this rank


def dynamo_guards_are_not_timed() -> None:
    """Of each compiled function Dynamo times the guards, with a cache that it empties first: 20 ms."""
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda *args: 0.0


def run_ranks(world: int, cases: tuple[Case, ...], folder: Path) -> None:
    """Runs every case in each of `world` processes, which form the default group. Fails if one of
    them does. The cases are functions of a module; the ranks meet at a file in `folder`."""
    # One server imports PyTorch, once; all ranks are forks of it. (Forks of this process would not
    # do: it has threads.) Daemons, so that none outlives the test if its time is up.
    #
    # Forks also end without taking Python down, as a rank has to: gloo's threads live as long as
    # any DeviceMesh, and if one of them frees the last tensor it worked on after Python has begun
    # to end, the process dies of "terminate called without an active exception". Under load one
    # rank in some hundred did, with all its work done (pytorch/pytorch#38228, #179291).
    multiprocessing.set_forkserver_preload(
        ["headway.optim", "headway.nn", "headway.distributed.exchange.run", "pytest",
         "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch._dynamo",
         "torch._inductor.compile_fx"]
    )  # fmt: skip
    mp.start_processes(
        _rank,
        (world, str(folder / "store"), cases),
        nprocs=world,
        daemon=True,
        start_method="forkserver",
    )


def _rank(rank: int, world: int, file: str, cases: tuple[Case, ...]) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what the server imported is shared, and nobody looks through it
    dynamo_guards_are_not_timed()
    # A rank that fails must fail the others, not leave them waiting for it.
    limit = timedelta(minutes=5)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=world, timeout=limit
    )
    for case in cases:
        case(world, rank)
    dist.destroy_process_group()
