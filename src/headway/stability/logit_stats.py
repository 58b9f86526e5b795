"""The max logits of a whole model: one number per layer and head, reduced over ranks at once."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from .adapters import clean_name
from .record import MaxLogit, reset

# A ProcessGroup, a one-dimensional DeviceMesh, None where there is one process, or "local".
Group = Any | Literal["local"] | None


def logit_stats(model: nn.Module, group: Group = None) -> dict[str, Tensor]:
    """Return the largest logit of every head since the last reset, by attention module.

    Logits are signed and scaled, before the score function, of pairs that the mask keeps, without
    sinks. The numbers stay on the device. A head with a NaN or +inf logit has +inf. A head that
    attended to nothing, or without a recorded forward, has -inf.

    **Arguments:**

    - `model`: a model with attention of `headway.nn`, or modules that hold a `MaxLogit`.
    - `group`: the ranks that see other data or other parts of the same sequences: a process group
      or a one-dimensional `DeviceMesh`. One all-reduce takes the maximum over them. "local" skips
      it, and one process needs no group. Leave tensor-parallel ranks out, since their heads differ:
      the result has the heads of this rank.

    **Returns:** a dict from the module's name to `(heads,)` float32.

    **Raises:** `ArgumentError` where the model records nothing, or where several processes run and
    `group` is missing.
    """
    process_group = check_group(group)
    records = {
        clean_name(path): module
        for path, module in model.named_modules()
        if isinstance(module, MaxLogit)
    }
    if not records:
        raise ArgumentError(
            f"{type(model).__name__} records no largest logits: it has no attention of headway.nn. "
            "Use one, or headway.stability.monitor, which measures any module that calls Headway"
        )
    packed, sizes = pack(list(records.values()), process_group)
    # "blocks.0.attention.max_logit" is the record of "blocks.0.attention".
    names = [path.rpartition(".")[0] or type(model).__name__ for path in records]
    return dict(zip(names, packed.split(sizes), strict=True))


def reset_logit_stats(model: nn.Module) -> None:
    """Forget the recorded max logits. `QKClip.step` does it by itself."""
    reset([module for module in model.modules() if isinstance(module, MaxLogit)])


def pack(records: list[MaxLogit], process_group: Any) -> tuple[Tensor, list[int]]:
    """All heads of this rank in one tensor, reduced by one MAX all-reduce; heads per record."""
    values = [r.value if r.empty else r.value[: r.heads_here()] for r in records]
    # The records hold no NaN but for "nothing recorded": NaN among logits became +inf there, which
    # a MAX reduction keeps whatever the order of ranks.
    packed = torch.cat(values).nan_to_num(-math.inf, math.inf, -math.inf)
    if process_group is not None:
        torch.distributed.all_reduce(packed, torch.distributed.ReduceOp.MAX, group=process_group)
    return packed, [len(v) for v in values]


def check_group(group: Group) -> Any:
    """Return the process group to reduce over, or None for no reduction; it is never guessed."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if isinstance(group, str):
        if group != "local":
            raise ArgumentError(f'group={group!r} must be a process group, a DeviceMesh or "local"')
        return None
    if group is None:
        if distributed and torch.distributed.get_world_size() > 1:
            raise ArgumentError(
                "there are several processes: pass group=, the ranks that see different data or "
                "different parts of the sequences (torch.distributed.group.WORLD for pure data "
                'parallelism, the data mesh under tensor parallelism), or "local" for none'
            )
        return None
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ArgumentError(
                f"group={group} has {group.ndim} dimensions; pass one, such as mesh['dp'], or a "
                "flattened mesh"
            )
        return group.get_group()
    return group
