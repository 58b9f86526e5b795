"""Launches of compiled kernels through NVIDIA's driver, without Triton's launcher.

Triton's launcher unpacks the arguments, asks the driver about every pointer and encodes every TMA
descriptor at every launch. In calls of one kind only addresses and some floats differ. So all other
parameters are laid out once; a launch writes those that differ and calls the driver.

`launch_of` derives the parameters that Triton's launcher would pass, and compares their sizes with
those that the driver reports for the kernel. Where anything is unknown (other vendors, clusters,
scratch memory, an older driver, parameters of other sizes), Triton's launcher stays.
"""

import copy
import ctypes
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from triton import knobs

# CUlaunchConfig: grid, threads, bytes of shared memory. The stream follows, and no attributes.
_CONFIG, _STREAM = struct.Struct("<7I"), 32
_VALUES = _STREAM + 24  # from here on addresses, then numbers
_MAP = 128  # bytes of a TMA descriptor, and its alignment
# Bits that no address may have: for pointers that are no multiple of 16 Triton compiles other
# loads, and larger addresses than these were not tried in descriptors.
_OTHER = 0xFFFF_0000_0000_000F
_TRIED = 0xAAAA_AAAA_AAA0, 0x5555_5555_5550
_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H",
    "u32": "I", "u64": "Q", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip


# Numbers that differ between launches; each takes a multiple of 4 bytes.
_NUMBERS = {"fp32": "f", "i32": "i", "i64": "q"}


class Parameter(NamedTuple):
    """A parameter of a kernel, as bytes. They may begin with an address or a number that every
    launch overwrites.

    - `tensor`: the address: number of the tensor, and offset in bytes.
    - `number`: number among the numbers, and its format.
    """

    data: bytes
    tensor: tuple[int, int] | None = None
    number: tuple[int, str] | None = None


class Launch:
    """Launches of one compiled kernel on one grid.

    - `config`: blocks (3), threads (3), and bytes of shared memory.
    - `tensors`, `numbers`: how many addresses and numbers a launch has.
    """

    def __init__(
        self, function: int, config: Sequence[int], parameters: Sequence[Parameter],
        tensors: int, numbers: int,
    ) -> None:  # fmt: skip
        formats = dict(p.number for p in parameters if p.number is not None)
        kinds = [formats.get(n, "f") for n in range(numbers)]
        after = [struct.calcsize("<" + "".join(kinds[:n])) for n in range(numbers + 1)]
        self.pack = struct.Struct(f"<QQQ{tensors}Q{''.join(kinds)}").pack_into
        self.tensors = tensors
        self.other = int.from_bytes(struct.pack("<Q", _OTHER) * tensors, "little")
        self.moved: list[tuple[int, int, int]] = []  # word, tensor and bytes from its beginning
        self.at: list[int] = []  # where each parameter lies
        memory = bytearray(_VALUES + 8 * tensors + after[-1])
        _CONFIG.pack_into(memory, 0, *config)
        for data, tensor, number in parameters:
            if number is not None:
                self.at.append(_VALUES + 8 * tensors + after[number[0]])
            elif tensor is not None and tensor[1] == 0 and len(data) == 8:
                self.at.append(_VALUES + 8 * tensor[0])
            else:
                memory += bytes(-len(memory) % (_MAP if len(data) == _MAP else 8))
                self.at.append(len(memory))
                if tensor is not None:
                    self.moved.append((len(memory) // 8, *tensor))
                memory += data
        memory += bytes(-len(memory) % 8)
        self.function, self.memory = function, bytes(memory)
        # Results of `laid`: a launch takes one, and puts it back.
        self.free: list[tuple] = []

    def __call__(self, stream: int, addresses: Sequence[int], numbers: Sequence[float]) -> bool:
        """Launch. False if nothing was launched: Triton has to, or to say why it cannot."""
        try:
            memory, first, last, words, launch = laid = self.free.pop()
        except IndexError:
            memory, first, last, words, launch = laid = self.laid()
        try:
            self.pack(memory, first - 24, stream, 0, 0, *addresses, *numbers)
        except (OverflowError, struct.error):  # a float that C would make inf, a large integer
            return False
        if int.from_bytes(memory[first:last], "little") & self.other:
            return False
        for word, tensor, offset in self.moved:
            words[word] = addresses[tensor] + offset
        failed = launch()
        self.free.append(laid)
        return not failed

    def laid(self) -> tuple:
        """Memory that the driver reads: the memory, where its addresses begin and end, the memory
        as 64-bit words, and the function that launches."""
        size, count = len(self.memory), len(self.at)
        memory = bytearray(_MAP + size + 8 * count)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        shift = -first % _MAP
        first += shift
        memory[shift : shift + size] = self.memory
        struct.pack_into(f"<{count}Q", memory, shift + size, *[first + at for at in self.at])
        library = cuda()
        assert library is not None
        given = (ctypes.c_void_p.from_param(x) for x in (first, self.function, first + size))
        launch = partial(library.cuLaunchKernelEx, *given, None)
        words = memoryview(memory)[shift : shift + size].cast("Q")
        begin = shift + _VALUES
        return memory, begin, begin + 8 * self.tensors, words, launch


@lru_cache(maxsize=1)
def cuda() -> ctypes.CDLL | None:
    """The driver, if it has the functions needed here (CUDA 12.4). A call releases Python's lock:
    it may wait for the GPU, which may wait for a launch of another thread."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuLaunchKernelEx, library.cuFuncGetParamInfo  # noqa: B018
    except (OSError, AttributeError):
        return None
    size = ctypes.POINTER(ctypes.c_size_t)
    library.cuFuncGetParamInfo.argtypes = [ctypes.c_void_p, ctypes.c_size_t, size, size]
    return library


# -- the parameters of Triton's launcher ----------------------------------------------------------


def launch_of(
    compiled: Any, grid: tuple[int, int, int], args: Sequence[Any], tensors: Sequence[Tensor],
    numbers: Sequence[float],
) -> Launch | None:  # fmt: skip
    """The launch of a kernel that Triton has compiled; None where Triton has to launch it.

    - `args`: all arguments. Of those, later launches change addresses and numbers alone: tensors
      here share the storage of one of `tensors`, and such numbers are objects of `numbers`
      (`placeholders`).
    """
    try:
        return _launch_of(compiled, grid, args, tensors, numbers)
    except Exception:  # noqa: BLE001  (an unknown Triton or driver: Triton's launcher is right)
        return None


def _launch_of(
    compiled: Any, grid: tuple[int, int, int], args: Sequence[Any], tensors: Sequence[Tensor],
    numbers: Sequence[float],
) -> Launch | None:  # fmt: skip
    from triton.backends.nvidia.driver import CudaLauncher

    meta, loading = compiled.metadata, knobs.runtime.kernel_load_start_hook
    active: Any = driver.active
    if cuda() is None or active.launcher_cls is not CudaLauncher:
        return None
    special = meta.num_ctas - 1, meta.launch_cooperative_grid, meta.launch_pdl
    if any((*special, meta.global_scratch_size, meta.profile_scratch_size)):
        return None
    if getattr(loading, "calls", loading):  # a profiler watches what is loaded
        return None
    found = [*_parameters(compiled, args, tensors, numbers), *[Parameter(bytes(8))] * 2]
    function, threads = _loaded(compiled, active)
    if 32 * meta.num_warps > threads or [len(p.data) for p in found] != _sizes(function):
        return None
    config = *grid, 32 * meta.num_warps, 1, 1, meta.shared
    return Launch(function, config, found, len(tensors), len(numbers))


# (function, largest number of threads of a block), by hash of the kernel and device.
_FUNCTIONS: dict[tuple[str, int], tuple[int, int]] = {}


def _loaded(compiled: Any, active: Any) -> tuple[int, int]:
    """The function of a kernel, and the largest number of threads of a block. A kernel that Triton
    has not loaded is loaded here, once for all kinds of calls: Triton would compile a launcher for
    it with a C compiler."""
    if compiled.module is not None:
        return compiled.function, compiled.n_max_threads
    key = compiled.hash, active.get_current_device()
    if key not in _FUNCTIONS:
        _, function, _, _, threads = active.utils.load_binary(
            compiled.name, compiled.kernel, compiled.metadata.shared, key[1]
        )
        _FUNCTIONS[key] = function, threads
    return _FUNCTIONS[key]


def placeholders(
    tensors: Sequence[Tensor | None], numbers: Sequence[float]
) -> tuple[list[Tensor | None], list[float]]:
    """Tensors without data and numbers, in the place of a call's: every one a distinct object."""
    return [
        None if x is None
        else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        for x in tensors
    ], [
        (1 << 40) + n if isinstance(x, int) else float(str(x)) for n, x in enumerate(numbers)
    ]  # fmt: skip


class _Unknown(Exception):
    """Triton's launcher does something that is not known here."""


def _parameters(
    compiled: Any, args: Sequence[Any], tensors: Sequence[Tensor], numbers: Sequence[float]
) -> Iterator[Parameter]:
    """The parameters of a kernel, without the addresses of scratch memory at their end."""
    storage = {x.untyped_storage()._cdata: n for n, x in enumerate(tensors)}
    number = {id(x): n for n, x in enumerate(numbers)}
    descriptors = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())

    def place(x: Any) -> tuple[int, int]:
        if not isinstance(x, Tensor) or x.untyped_storage()._cdata not in storage:
            raise _Unknown
        return storage[x.untyped_storage()._cdata], int(x.storage_offset()) * x.element_size()

    for kind, x in _leaves(tuple(compiled.src.signature.values()), args):
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            meta = next(descriptors, None)
            if not meta:
                raise _Unknown
            data, *sizes = _encoded(x, meta)
            yield Parameter(data, place(x.base))
            for n, size in enumerate(sizes):
                yield Parameter(struct.pack("<i" if n < len(sizes) // 2 else "<q", size))
        elif kind[0] == "*":
            yield Parameter(bytes(8)) if x is None else Parameter(bytes(8), place(x))
        elif id(x) in number:
            if kind not in _NUMBERS:
                raise _Unknown
            form = _NUMBERS[kind]
            yield Parameter(bytes(struct.calcsize(form)), number=(number[id(x)], form))
        elif kind in _FORMATS:
            yield Parameter(struct.pack("<" + _FORMATS[kind], x))
        else:
            raise _Unknown


def _leaves(kinds: Any, args: Any) -> Iterator[tuple[str, Any]]:
    """Types and arguments; tuples are flattened."""
    if len(kinds) != len(args):
        raise _Unknown
    for kind, x in zip(kinds, args, strict=True):
        if isinstance(kind, tuple):
            yield from _leaves(kind, x)
        else:
            yield kind, x


def _encoded(descriptor: Any, meta: Any) -> tuple:
    """A TMA descriptor as Triton encodes it, then its shape and strides. Its first 8 bytes are the
    address: this is checked by encoding two addresses, whose other bytes must be the same."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    more = [()] * (make_tensordesc_arg.__code__.co_argcount - 2)  # in 3.9; not looked at
    found = []
    for address in _TRIED:
        at = copy.copy(descriptor)
        at.base = _Address(address)
        encoded, *sizes = make_tensordesc_arg(at, meta, *more)
        if id(encoded) % _MAP or type(encoded).__basicsize__ != 2 * _MAP:
            raise _Unknown
        data = ctypes.string_at(id(encoded) + _MAP, _MAP)
        if data[:8] != struct.pack("<Q", address):
            raise _Unknown
        found.append(data[8:])
    if found[0] != found[1]:
        raise _Unknown
    return data, *sizes


class _Address(NamedTuple):
    """The part of a tensor from which its descriptor is encoded."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def _sizes(function: int) -> list[int]:
    """The sizes of a kernel's parameters, as the driver reports them."""
    library = cuda()
    assert library is not None
    offset, size, found = ctypes.c_size_t(), ctypes.c_size_t(), []
    at = ctypes.byref(offset), ctypes.byref(size)
    while library.cuFuncGetParamInfo(function, len(found), *at) == 0 and len(found) < 4096:
        found.append(size.value)
    return found
