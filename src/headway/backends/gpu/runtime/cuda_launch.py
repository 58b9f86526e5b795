"""Launches of compiled kernels through NVIDIA's driver, without Triton's launcher.

Triton's launcher unpacks the arguments, asks the driver about every pointer and encodes every TMA
descriptor at every launch. In calls of one kind only addresses and some numbers differ. So all
other parameters are laid out once. A launch writes those that differ and calls the driver, which
saves three quarters of the host's instructions (105 to 28 thousand, docs/lab/host.md).

`launch_of` derives the parameters that Triton's launcher would pass, and compares their sizes with
those that the driver reports for the kernel. If anything is unknown (other vendors, clusters,
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
_CONFIG, _STREAM_AT = struct.Struct("<7I"), 32
_VALUES_AT = _STREAM_AT + 24  # from here on addresses, then numbers
_DESCRIPTOR = 128  # bytes of a TMA descriptor, and its alignment
# Bits that no address may have: for pointers that are no multiple of 16 Triton compiles other
# loads, and larger addresses than these were not tried in descriptors.
_UNSUPPORTED_BITS = 0xFFFF_0000_0000_000F
_TEST_ADDRESSES = 0xAAAA_AAAA_AAA0, 0x5555_5555_5550
_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H",
    "u32": "I", "u64": "Q", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip


# Numbers that differ between launches; each takes a multiple of 4 bytes.
_NUMBERS = {"fp32": "f", "i32": "i", "i64": "q"}


class Parameter(NamedTuple):
    """A parameter of a kernel, as bytes. They may begin with an address or a number that every
    launch overwrites.

    - `tensor`: the index of the tensor whose address it is, and an offset in bytes.
    - `number`: the index of the number, and its format.
    """

    data: bytes
    tensor: tuple[int, int] | None = None
    number: tuple[int, str] | None = None


class Launch:
    """A compiled kernel on one grid, ready to launch.

    - `config`: CTAs (3), threads (3), and bytes of shared memory.
    - `tensors`, `numbers`: the counts of addresses and numbers of a launch.
    """

    def __init__(
        self, function: int, config: Sequence[int], parameters: Sequence[Parameter],
        tensors: int, numbers: int,
    ) -> None:  # fmt: skip
        number_formats = dict(p.number for p in parameters if p.number is not None)
        formats = [number_formats.get(n, "f") for n in range(numbers)]
        offsets = [struct.calcsize("<" + "".join(formats[:n])) for n in range(numbers + 1)]
        self.pack = struct.Struct(f"<QQQ{tensors}Q{''.join(formats)}").pack_into
        self.tensors = tensors
        self.unsupported = int.from_bytes(struct.pack("<Q", _UNSUPPORTED_BITS) * tensors, "little")
        # Addresses within other parameters: word of the memory, tensor, offset in bytes.
        self.inner_addresses: list[tuple[int, int, int]] = []
        self.parameter_offsets: list[int] = []
        memory = bytearray(_VALUES_AT + 8 * tensors + offsets[-1])
        _CONFIG.pack_into(memory, 0, *config)
        for data, tensor, number in parameters:
            if number is not None:
                self.parameter_offsets.append(_VALUES_AT + 8 * tensors + offsets[number[0]])
            elif tensor is not None and tensor[1] == 0 and len(data) == 8:
                self.parameter_offsets.append(_VALUES_AT + 8 * tensor[0])
            else:
                alignment = _DESCRIPTOR if len(data) == _DESCRIPTOR else 8
                memory += bytes(-len(memory) % alignment)
                self.parameter_offsets.append(len(memory))
                if tensor is not None:
                    self.inner_addresses.append((len(memory) // 8, *tensor))
                memory += data
        memory += bytes(-len(memory) % 8)
        self.function, self.memory = function, bytes(memory)
        # Copies of the memory (`_allocate`) that no thread is launching from.
        self.free_buffers: list[tuple] = []

    def __call__(self, stream: int, addresses: Sequence[int], numbers: Sequence[float]) -> bool:
        """Launch the kernel. Return False if nothing was launched: Triton has to launch it, or to
        say why it cannot."""
        try:
            memory, first, last, words, launch = buffer = self.free_buffers.pop()
        except IndexError:
            memory, first, last, words, launch = buffer = self._allocate()
        try:
            self.pack(memory, first - 24, stream, 0, 0, *addresses, *numbers)
        except (OverflowError, struct.error):  # a float that C would make inf, a large integer
            return False
        if int.from_bytes(memory[first:last], "little") & self.unsupported:
            return False
        for word, tensor, offset in self.inner_addresses:
            words[word] = addresses[tensor] + offset
        error = launch()
        self.free_buffers.append(buffer)
        return not error

    def _allocate(self) -> tuple:
        """Return a copy of the memory that the driver can read, where its addresses begin and end,
        its 64-bit words, and the function that launches from it."""
        size, count = len(self.memory), len(self.parameter_offsets)
        memory = bytearray(_DESCRIPTOR + size + 8 * count)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        shift = -base % _DESCRIPTOR
        base += shift
        memory[shift : shift + size] = self.memory
        pointers = [base + offset for offset in self.parameter_offsets]
        struct.pack_into(f"<{count}Q", memory, shift + size, *pointers)
        library = cuda()
        assert library is not None
        arguments = map(ctypes.c_void_p.from_param, (base, self.function, base + size))
        launch = partial(library.cuLaunchKernelEx, *arguments, None)
        words = memoryview(memory)[shift : shift + size].cast("Q")
        first = shift + _VALUES_AT
        return memory, first, first + 8 * self.tensors, words, launch


@lru_cache(maxsize=1)
def cuda() -> ctypes.CDLL | None:
    """Return the driver if it has the functions needed here (CUDA 12.4), else None. A call releases
    Python's lock: it may wait for the GPU, which may wait for a launch of another thread."""
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
    """Return the launch of a kernel that Triton has compiled; None if Triton has to launch it.

    - `args`: all arguments. Later launches change only addresses and numbers: tensors among `args`
      share the storage of one of `tensors`, and such numbers are objects of `numbers`
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

    metadata, load_hook = compiled.metadata, knobs.runtime.kernel_load_start_hook
    active: Any = driver.active
    if cuda() is None or active.launcher_cls is not CudaLauncher:
        return None
    launch_options = metadata.num_ctas - 1, metadata.launch_cooperative_grid, metadata.launch_pdl
    if any((*launch_options, metadata.global_scratch_size, metadata.profile_scratch_size)):
        return None
    if getattr(load_hook, "calls", load_hook):  # a profiler watches which kernels are loaded
        return None
    scratch_pointers = [Parameter(bytes(8))] * 2
    parameters = [*_parameters(compiled, args, tensors, numbers), *scratch_pointers]
    function, max_threads = _load(compiled, active)
    threads, sizes = 32 * metadata.num_warps, [len(p.data) for p in parameters]
    if threads > max_threads or sizes != _parameter_sizes(function):
        return None
    config = *grid, threads, 1, 1, metadata.shared
    return Launch(function, config, parameters, len(tensors), len(numbers))


# (function, largest number of threads of a CTA), by hash of the kernel and device.
_functions: dict[tuple[str, int], tuple[int, int]] = {}


def _load(compiled: Any, active: Any) -> tuple[int, int]:
    """Return the function of a kernel, and the largest number of threads of a CTA. A kernel that
    Triton has not loaded is loaded here, once for all kinds of calls: Triton would build a launcher
    for it with a C compiler, which takes half a second."""
    if compiled.module is not None:
        return compiled.function, compiled.n_max_threads
    key = compiled.hash, active.get_current_device()
    if key not in _functions:
        _, function, _, _, threads = active.utils.load_binary(
            compiled.name, compiled.kernel, compiled.metadata.shared, key[1]
        )
        _functions[key] = function, threads
    return _functions[key]


def placeholders(
    tensors: Sequence[Tensor | None], numbers: Sequence[float]
) -> tuple[list[Tensor | None], list[float]]:
    """Return tensors without data, and numbers, in place of a call's: each a distinct object."""
    return [
        None if tensor is None
        else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        for tensor in tensors
    ], [
        (1 << 40) + n if isinstance(number, int) else float(str(number))
        for n, number in enumerate(numbers)
    ]  # fmt: skip


class _UnsupportedParameter(Exception):
    """A parameter whose bytes are unknown here: Triton's launcher has to pass it."""


def _parameters(
    compiled: Any, args: Sequence[Any], tensors: Sequence[Tensor], numbers: Sequence[float]
) -> Iterator[Parameter]:
    """Return the parameters of a kernel, but for the addresses of scratch memory at their end."""
    tensor_of_storage = {tensor.untyped_storage()._cdata: n for n, tensor in enumerate(tensors)}
    number_of_id = {id(number): n for n, number in enumerate(numbers)}
    descriptors = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())

    def address_of(tensor: Any) -> tuple[int, int]:
        storage = tensor.untyped_storage()._cdata if isinstance(tensor, Tensor) else None
        if storage not in tensor_of_storage:
            raise _UnsupportedParameter
        return tensor_of_storage[storage], int(tensor.storage_offset()) * tensor.element_size()

    for type_name, value in _flatten(tuple(compiled.src.signature.values()), args):
        if type_name == "constexpr":
            continue
        if type_name.startswith("tensordesc"):
            metadata = next(descriptors, None)
            if not metadata:
                raise _UnsupportedParameter
            data, *sizes = _encode(value, metadata)
            yield Parameter(data, address_of(value.base))
            for n, size in enumerate(sizes):
                yield Parameter(struct.pack("<i" if n < len(sizes) // 2 else "<q", size))
        elif type_name[0] == "*":
            yield Parameter(bytes(8)) if value is None else Parameter(bytes(8), address_of(value))
        elif id(value) in number_of_id:
            if type_name not in _NUMBERS:
                raise _UnsupportedParameter
            form = _NUMBERS[type_name]
            yield Parameter(bytes(struct.calcsize(form)), number=(number_of_id[id(value)], form))
        elif type_name in _FORMATS:
            yield Parameter(struct.pack("<" + _FORMATS[type_name], value))
        else:
            raise _UnsupportedParameter


def _flatten(types: Any, args: Any) -> Iterator[tuple[str, Any]]:
    """Yield every type with its argument, also of those within tuples."""
    if len(types) != len(args):
        raise _UnsupportedParameter
    for type_name, value in zip(types, args, strict=True):
        if isinstance(type_name, tuple):
            yield from _flatten(type_name, value)
        else:
            yield type_name, value


def _encode(descriptor: Any, metadata: Any) -> tuple:
    """Return a TMA descriptor as Triton encodes it, then its shape and strides. Its first 8 bytes
    have to be the address, and no other byte may depend on it: two addresses are encoded."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    more = [()] * (make_tensordesc_arg.__code__.co_argcount - 2)  # of Triton 3.9, which ignores it
    remainders = []
    for address in _TEST_ADDRESSES:
        relocated = copy.copy(descriptor)
        relocated.base = _Address(address)
        encoded, *sizes = make_tensordesc_arg(relocated, metadata, *more)
        if id(encoded) % _DESCRIPTOR or type(encoded).__basicsize__ != 2 * _DESCRIPTOR:
            raise _UnsupportedParameter
        data = ctypes.string_at(id(encoded) + _DESCRIPTOR, _DESCRIPTOR)
        if data[:8] != struct.pack("<Q", address):
            raise _UnsupportedParameter
        remainders.append(data[8:])
    if remainders[0] != remainders[1]:
        raise _UnsupportedParameter
    return data, *sizes


class _Address(NamedTuple):
    """The part of a tensor that its descriptor is encoded from."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def _parameter_sizes(function: int) -> list[int]:
    """Return the sizes of a kernel's parameters, as the driver reports them."""
    library = cuda()
    assert library is not None
    offset, size, sizes = ctypes.c_size_t(), ctypes.c_size_t(), []
    results = ctypes.byref(offset), ctypes.byref(size)
    while library.cuFuncGetParamInfo(function, len(sizes), *results) == 0 and len(sizes) < 4096:
        sizes.append(size.value)
    return sizes
