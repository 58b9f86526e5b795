"""Tensors and modules of PyTorch that a function can read."""

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from .guards import Path
from .locations import quote
from .purity import is_library_code

if TYPE_CHECKING:
    from .capture import ReadWalker

_MODULE_ATTRIBUTES = torch.nn.Module().__dict__
# What the classes of tensors have by themselves; and what they have now.
TENSOR_MEMBERS = [
    (vars(cls), {name: item for name, item in vars(cls).items() if is_library_code(item)})
    for cls in (Tensor, torch.nn.Parameter)
]


def follow_tensor(
    walker: "ReadWalker", tensor: Tensor, path: Path, ancestors: tuple, first_time: bool
) -> None:
    """Follow a captured tensor: its data may change, its kind may not."""
    if first_time:
        walker.reads.tensors.append((path, tensor))
    kind = type(tensor)
    if tensor.is_nested and tensor.layout is torch.strided:  # PyTorch's own have no shape
        raise ArgumentError(
            f"a score or mask captures {walker.label}, a nested tensor; pad it, or capture its "
            f"parts{quote(walker.location)}"
        )
    walker.reads.key.append(
        (kind, tensor.dtype, tuple(tensor.shape), tensor.device, tensor.requires_grad)
    )
    if walker.guarding:
        walker.guard(path, "exists")
    if kind not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and not _is_fake(kind):
        walker.mark_opaque(f"reads {walker.label}, a {kind.__name__}, which may be anything")
    elif tensor.__dict__:
        walker.defer_attributes(tensor, path, ancestors)


def follow_tensor_member(walker: "ReadWalker", name: str, item: Any) -> None:
    """Follow what a class of tensors got under a name: the symbols of a trace have it."""
    walker.label = name
    walker.mark_unguarded("an attribute of the class of tensors")
    walker.reads.key.append(name)
    if is_library_code(item):
        walker.reads.key.append(item)
    else:
        walker.follow(item, (), ())


def follow_torch_module(
    walker: "ReadWalker", value: torch.nn.Module, path: Path, ancestors: tuple
) -> None:
    """Follow a module of torch's to all that it has, which its code may read."""
    walker.reads.modules.add(id(value))
    if id(kind := type(value)) not in walker.numbers:  # it may have been given attributes
        walker.numbers[id(kind)] = len(walker.numbers), kind
        walker.defer_attributes(kind, (*path, ("attr", "__class__")), ancestors)
    for name, item in vars(value).items():
        if name not in _MODULE_ATTRIBUTES:
            walker.follow(item, (*path, ("attr", name)), ancestors)
    walker.follow(value.training, (*path, ("attr", "training")), ancestors)
    walker.reads.key.append(frozenset(value._non_persistent_buffers_set))
    for tensors in (value._parameters, value._buffers):
        walker.reads.key += tensors
        for name, item in tensors.items():
            walker.follow(item, (*path, ("attr", name)), ancestors)
    walker.guard(path, "modules", list(value._modules))
    by_number = isinstance(value, torch.nn.ModuleList | torch.nn.Sequential)
    step = "item" if by_number or isinstance(value, torch.nn.ModuleDict) else "attr"
    for name, item in value._modules.items():
        walker.reads.key.append(name)
        walker.follow(item, (*path, (step, int(name) if by_number else name)), ancestors)


def _is_fake(kind: type) -> bool:
    """Return whether a tensor's type is that of tensors without data, which `torch.export` puts in
    the place of parameters."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and kind is fakes.FakeTensor
