"""The mask that transformers' models carry from where it is made to every layer."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..distributed.layout import Layout
from ..errors import BackendRefused
from ..mods import dense
from ..mods.base import MaskFn
from ..mods.lowering import describe, restore

# What describes a tensor and reads none of its numbers.
_DESCRIBES = frozenset(
    [getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad", "grad_fn",
        "itemsize", "nbytes", "is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "is_sparse",
        "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_maia", "is_vulkan",
        "is_ipu", "is_xla", "is_mtia", "names", "_base", "_version", "_backward_hooks",
        "output_nr", "retains_grad",
    ) if hasattr(Tensor, name)]
    + [getattr(Tensor, name) for name in (
        "dim", "ndimension", "size", "numel", "nelement", "stride", "storage_offset", "get_device",
        "element_size", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg",
        "is_inference", "_is_view", "untyped_storage", "__len__", "__hash__",
    )]
)  # fmt: skip
_LEARNS = Tensor.requires_grad.__set__  # type: ignore[attr-defined]


class AttentionMask(Tensor):
    """A mask of Headway's, and the tensor that a model finds when it looks at it.

    As a tensor it is transformers' mask for "eager": `(batch, 1, queries, keys)`, 0 where a pair is
    kept and the lowest number elsewhere. That square is made when something asks for its numbers.
    Once a view of it is out or it was written to, the square is the mask. (Its own memory is NaN.)
    """

    _step: Callable[[], tuple[MaskFn | None, Tensor]] | None
    _stepped: tuple[MaskFn | None, Tensor] | None
    # Of one new token on the CPU: how many keys there are, and which of them each row sees, bool
    # `(b, 1, 1, keys)`; None for all.
    near: tuple[int, Tensor | None] | None
    _mask: MaskFn | None
    _later: Callable[[], MaskFn | None] | None  # makes the mask at its first use
    sizes: tuple[int, ...]
    documents: bool  # packed documents do not see each other
    kept: Callable[[], Tensor] | None  # bool (batch, queries): tokens that are no padding
    taken: bool  # the square is in the hands of others, and is all that counts
    looked_at: Tensor | None  # the positions that were compared with the layout's
    over_ranks: Layout | None  # which tokens these are, where the sequence is cut over ranks
    _make: Callable[[], Tensor]
    _made: Tensor | None
    _bias: Tensor | None
    _moved: dict[Any, "AttentionMask"]

    @staticmethod
    def of(
        mask: MaskFn | None,
        sizes: tuple[int, ...],
        documents: bool,
        make: Callable[[], Tensor],
        dtype: torch.dtype,
        device: torch.device | str | None,
        later: Callable[[], MaskFn | None] | None = None,
        step: Callable[[], tuple[MaskFn | None, Tensor]] | None = None,
        near: tuple[int, Tensor | None] | None = None,
        kept: Callable[[], Tensor] | None = None,
    ) -> "AttentionMask":
        """Return a mask; `make` makes its square, `later` the mask, if that waits for a device."""
        nothing = torch.full((), math.nan, dtype=dtype, device=device).expand(sizes)
        new = nothing.as_subclass(AttentionMask)
        new._mask, new._later, new._step, new.near = mask, later, step, near
        new.sizes, new.documents, new.kept = sizes, documents, kept
        new.taken, new._make, new._made, new._moved = False, make, None, {}
        new.over_ranks = new.looked_at = new._bias = new._stepped = None
        return new

    @property
    def mask(self) -> MaskFn | None:
        """The mask, of queries and keys that begin at 0; None keeps every pair."""
        if self._later is not None:
            self._mask, self._later = self._later(), None
        return self._mask

    @property
    def is_step(self) -> bool:
        """Return whether this is for a few new tokens after those of a cache."""
        return self._step is not None

    @property
    def step(self) -> tuple[MaskFn | None, Tensor]:
        """Return, for new tokens after a cache, the mask (or None) and int32 lengths, `(b,)`."""
        if self._stepped is None:
            assert self._step is not None
            self._stepped = self._step()
        return self._stepped

    @property
    def is_looked_at(self) -> bool:
        """Return whether its numbers have been requested."""
        return self._made is not None

    def square(self) -> Tensor:
        """Return the mask as a plain tensor."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return what `near` adds to scores, 0 and -inf; None for nothing."""
        attended = None if self.near is None else self.near[1]
        if attended is not None and (self._bias is None or self._bias.dtype != dtype):
            zeros = torch.zeros(attended.shape, dtype=dtype, device=attended.device)
            self._bias = zeros.masked_fill_(~attended, -math.inf)
        return self._bias

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DESCRIBES or (func == _LEARNS and not args[1]):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in (Tensor.contiguous, Tensor.detach):
            return args[0]
        if func is Tensor.to and not args[0].taken:
            moved = args[0]._to(*args[1:], **kwargs)
            if moved is not None:
                return moved
        leaves, tree = pytree.tree_flatten((args, kwargs))
        masks = [x for x in leaves if isinstance(x, AttentionMask)]
        plain = [x.square() if isinstance(x, AttentionMask) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(plain, tree)
        if torch.compiler.is_compiling() or any(mask.square().is_inference() for mask in masks):
            for mask in masks:  # writes are not seen: the graph has not run, or none are counted
                mask.taken = True
            return func(*args, **kwargs)
        versions = [mask.square()._version for mask in masks]
        out = func(*args, **kwargs)
        for mask, version in zip(masks, versions, strict=True):
            was_written = mask.square()._version != version or func.__name__ == "__set__"
            mask.taken = mask.taken or was_written or _shares(out, mask.square())
        return out

    def _to(self, *args: Any, **kwargs: Any) -> "AttentionMask | None":
        """Return the mask elsewhere or of another dtype; None for what is a plain tensor."""
        if kwargs.get("copy") or kwargs.get("memory_format"):
            return None
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        dtype, device = dtype or self.dtype, torch.device(device or self.device)
        if not dtype.is_floating_point:
            return None
        if (dtype, device) == (self.dtype, self.device):
            return self
        if (dtype, device) not in self._moved:  # every layer asks for the same
            same_device = device == self.device
            later = lambda: self.mask if same_device else _carried(self, device)
            make = lambda: self.square().to(device, dtype)
            step = (lambda: self.step) if same_device and self.is_step else None
            near = self.near if same_device else None
            new = AttentionMask.of(
                None, self.sizes, self.documents, make, dtype, device, later, step, near, self.kept
            )
            new.over_ranks = self.over_ranks
            self._moved[dtype, device] = new
        return self._moved[dtype, device]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"AttentionMask({self.mask!r}, sizes={self.sizes})"


class GraphMask:
    """A stand-in for `AttentionMask` under `torch.compile`, without its numbers."""

    ndim, near = 4, None

    def __init__(
        self,
        later: Callable[[], MaskFn | None],
        shape: tuple[int, ...],
        step: tuple[MaskFn | None, Tensor] | None = None,
    ) -> None:
        self.later, self.shape, self.sizes = later, shape, shape
        self.step, self.is_step = step, step is not None
        self.taken = False

    @property
    def mask(self) -> MaskFn | None:
        """Return the mask, created on first use, as that of an `AttentionMask`."""
        return self.later()

    def dim(self) -> int:
        """4: batch, 1, queries, keys."""
        return self.ndim

    def contiguous(self) -> "GraphMask":
        """Itself."""
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise BackendRefused(_LOOKS_INSIDE)

    def __getattr__(self, name: str) -> Any:
        raise BackendRefused(f"attention_mask.{name}: {_LOOKS_INSIDE}")

    def __getitem__(self, index: Any) -> Any:
        raise BackendRefused(_LOOKS_INSIDE)

    def __add__(self, other: Any) -> Any:
        raise BackendRefused(_LOOKS_INSIDE)

    __radd__ = __add__


_LOOKS_INSIDE = (
    "the model looks inside its attention mask, which headway keeps as a function under "
    'torch.compile; run it without the compiler, or use attn_implementation="eager" or "sdpa"'
)


def kept(square: Tensor) -> Tensor:
    """Return where an additive mask keeps a pair. The lowest number means "not at all"."""
    return square > torch.finfo(square.dtype).min / 2


def _shares(out: Any, square: Tensor) -> bool:
    """Return whether a result of the square shares its memory."""
    if out is None or isinstance(out, bool | int | float | complex | str | torch.dtype):
        return False
    leaves = pytree.tree_leaves(out)
    if not all(isinstance(x, Tensor | bool | int | float) for x in leaves):
        return True  # an array, an address
    memory = square.untyped_storage()._cdata
    return any(isinstance(x, Tensor) and x.untyped_storage()._cdata == memory for x in leaves)


def _carried(mask: AttentionMask, device: torch.device) -> MaskFn | None:
    """Return the mask on another device: a value with its tensors there. Of a user's function,
    whose tensors may be anywhere, its square."""
    if mask.mask is None:
        return None
    parts = describe(mask.mask)
    if parts.functions:
        return dense(kept(mask.square()).to(device))
    return restore(parts._replace(tensors=[t.to(device) for t in parts.tensors]))
