"""The running maximum of every head's logits: what an attention module records as it trains."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ..surroundings import is_batched, is_wrapped, transforms
from ..types import allow_in_graph, called_in_graph
from .rows import local_part


class MaxLogit(nn.Module):
    """The largest logit of every head over the training forwards since the last `reset`.

    Make it a child of the attention module whose logits it records, so that it follows `.train()`,
    `.eval()` and the device. Call it with the `max_logit` of a forward, `(b, heads)`. It takes the
    maximum over the batch and all earlier calls, on the device, without waiting for it. For a
    DTensor it takes this rank's part. Under `torch.func.vmap` it covers all batches.

    It records only in training mode with gradients enabled, so evaluation changes nothing.
    Recomputed activations give the same maximum.

    `value` is `(heads,)` float32. NaN means that nothing was recorded for a head: on a rank of a
    tensor-parallel group its own heads come first, and the rest stay NaN. +inf means that a logit
    was NaN or +inf, and stays until the reset. -inf means that the head attended to nothing.

    `value` is not a buffer: `DistributedDataParallel` would overwrite it with that of rank 0 before
    every forward, `model.bfloat16()` would round it, and it does not belong in a state dict.
    """

    def __init__(self, heads: int, device: torch.device | str | None = None):
        super().__init__()
        self.value = torch.full((heads,), math.nan, dtype=torch.float32, device=device)
        self._fresh = self.value._version
        self._heads_here: int | None = None

    @property
    def recording(self) -> bool:
        """Return whether a forward would be recorded now."""
        return self.training and torch.is_grad_enabled()

    @property
    def empty(self) -> bool:
        """Return whether nothing was recorded since the reset, without waiting for a device."""
        # Every write counts up the version of a tensor, also one inside a compiled graph. (A flag
        # set here would be a side effect, which torch.compile refuses inside of a checkpoint.)
        return self.value._version == self._fresh

    def forward(self, max_logit: Tensor) -> None:  # (b, h)
        if not self.recording:
            return
        if self.value.device != max_logit.device:  # fully_shard moves parameters, not this
            self._move(max_logit.device)
        with torch.no_grad():
            if transforms():
                if torch.compiler.is_compiling():
                    allow_in_graph()
                _record_beneath(self.value, max_logit)
            else:
                _record(self.value, local_part(max_logit))

    def reset(self) -> None:
        """Forget what was recorded."""
        reset([self])

    def heads_here(self) -> int:
        """Return how many heads this rank has, once something was recorded; waits once."""
        if self._heads_here is None:
            self._heads_here = int((~self.value.isnan()).sum())
        return self._heads_here

    def _apply(self, fn, recurse=True):
        # Follows `.to(device)` and `.to_empty(device=...)`, never a change of dtype.
        super()._apply(fn, recurse)
        self._move(fn(self.value).device)
        return self

    def _move(self, device: torch.device) -> None:
        was_empty = self.empty or self.value.is_meta
        if self.value.is_meta:  # a model without numbers, given its parameters from outside
            self.value = torch.full(self.value.shape, math.nan, dtype=torch.float32, device=device)
        else:
            self.value = self.value.to(device)
        self._fresh = self.value._version if was_empty else -1

    def __getstate__(self) -> dict[str, Any]:
        """A copy counts its writes anew, so it is told whether it holds a record."""
        return vars(self) | {"_fresh": self.empty}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._fresh = self.value._version if state["_fresh"] else -1

    def extra_repr(self) -> str:
        return f"heads={len(self.value)}"


def _record(value: Tensor, max_logit: Tensor) -> None:
    """Write the maximum of `value` and of `max_logit`, (b, heads), to `value`."""
    local_value = value[: max_logit.shape[1]]
    if max_logit.shape[0]:
        largest = max_logit.amax(0).float()
        largest = largest.nan_to_num(math.inf, math.inf, -math.inf)
    else:  # an empty batch keeps no pair
        largest = torch.full_like(local_value, -math.inf)
    local_value.copy_(torch.fmax(local_value, largest))  # fmax: of NaN and a number, the number


@called_in_graph
def _record_beneath(value: Tensor, max_logit: Tensor) -> None:
    """Record what `torch.func` has wrapped: its transforms let nothing be written inside."""
    functorch = torch._C._functorch
    heads = 1  # the dimension
    while is_wrapped(max_logit):
        heads += is_batched(max_logit) and functorch.maybe_get_bdim(max_logit) <= heads
        max_logit = functorch.get_unwrapped(max_logit)
    with temporarily_clear_interpreter_stack():
        _record(value, max_logit.movedim(heads, -1).flatten(0, -2))


@torch.no_grad()
def reset(records: list[MaxLogit]) -> None:
    """Forget what was recorded, all records at once."""
    if records:
        torch._foreach_mul_([record.value for record in records], math.nan)  # one kernel for all
    for record in records:
        record._fresh = record.value._version
