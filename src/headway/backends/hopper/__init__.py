"""The Hopper backend: warp-specialised kernels for compute capability 9.0, into which scores and
masks are compiled. docs/performance.md compares it with cuDNN and FlexAttention.

Importing it loads no Triton, no tile shapes and no code generation, which `import headway` would
wait for. Asking whether it can run loads Gluon only on a machine with such a GPU.

- fwd/, bwd/: the kernels and their plans; device/: device code that they share.
- launch.py: from a call to kernel launches; launch_plan.py: what the plans share.
- config.py: tile shapes; tma.py: descriptors; bias_tables.py: relative biases.
"""

import importlib.util
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path

import torch

from ...blocks import TILE
from ...mods.graph import parse
from ...types import Spec, acc_dtype, constant_under_compile
from ..base import Call, CapabilityKey, launched, no_operator, observes, plainly_masked
from ..gpu import inference
from ..gpu import limits as limits
from ..gpu.named_card import named_card

name = "hopper"
DTYPES = (torch.bfloat16, torch.float16)
OLDEST, NEWEST = (3, 6), (3, 9)  # Triton; Gluon is experimental, and its names move


def reasons_against(spec: Spec, kind: CapabilityKey) -> list[str]:
    """Return the reasons why it cannot run a call. It runs on compute capability 9.0, in bfloat16
    and float16, up to a width of 256; over a cache, it runs what `gpu.inference` runs."""
    from .config import BWD_TILE_SHAPES, FWD_TILE_SHAPES, first_fit

    d, dv = kind.d, kind.dv
    reasons = []
    reason = unavailable(kind.device.type, kind.device.index)
    if reason:
        reasons.append(reason)
    if kind.cache:
        return reasons + inference.reasons_against(spec, kind)
    if kind.dtype not in DTYPES:
        reasons.append(f"{kind.dtype} is not bfloat16 or float16, which its tensor cores multiply")
    if first_fit(FWD_TILE_SHAPES, d, dv) is None:
        reasons.append(f"widths d = {d}, dv = {dv}: at most 256 fit in shared memory")
    elif (
        spec.score is not None and kind.learned
        and len(first_fit(BWD_TILE_SHAPES, d, dv).d) == 2 and _by_query(spec.score)
    ):  # fmt: skip
        reasons.append(
            f"widths d = {d}, dv = {dv}, and a captured tensor that requires grad, where the score "
            "reads a number for each query: sums of its gradient do not fit in shared memory; "
            "detach() it, or use backend='triton'"
        )
    elif spec.dropout and len(first_fit(BWD_TILE_SHAPES, d, dv).d) == 2:
        reasons.append(
            f"dropout at widths d = {d}, dv = {dv}: with d from 129 to 192 and dv up to 128 the "
            "backward has no registers left for it; use backend='triton'"
        )
    if kind.moves:
        reasons.append(
            "an input has a tangent (forward mode), for which it has no kernel: use "
            "backend='triton', whose out may differ from this backend's by rounding"
        )
    if observes(spec):
        reasons.append(
            "the mean of a function of the pair (expect), for which it has no kernel: use "
            "backend='triton'"
        )
    if spec.tiles is not None and any(n % t for n, t in zip(spec.tiles[2:], TILE, strict=True)):
        reasons.append(
            f"a block mask with tiles of {spec.tiles[2:]}: give tile={TILE}, or multiples of it"
        )
    return reasons


def slower(spec: Spec, kind: CapabilityKey) -> str:
    """Say why the Triton backend is faster at a call; empty if it is not.

    It reads every tensor by relative position once per diagonal of a tile. These kernels do so for
    floats only, and at widths 129 to 192 have no registers left for their gradient.
    Deterministic, up to width 64, its second pass takes less time than the dQ semaphore does, but
    for causal or no masks (8k, causal: semaphore 3.1 ms, two passes 4.0; before dK and dQ were
    software-pipelined, 5.9).
    """
    plain = spec.score is None and plainly_masked(spec)
    if spec.deterministic and kind.trained and max(kind.d, kind.dv) <= 64 and not plain:
        return "dq is added up in order, and up to width 64 the two passes of 'triton' are faster"
    if spec.score is None or kind.scattered:
        return ""
    if kind.learned and 128 < max(kind.d, kind.dv) <= 192 and _by_distance(spec.score)[0]:
        return "a gradient by relative position, for which there are no registers at this width"
    if _by_distance(spec.score)[1]:
        return "the score reads integers by relative position, pair by pair"
    return ""


@lru_cache(maxsize=1024)
def _by_distance(score: str) -> tuple[bool, bool]:
    """Return whether a score reads floats by relative position, and whether it reads integers so
    that are not indices of the former."""
    from ..gpu.codegen.dependence import dependence_of, diagonal_gathers, gathers_in_kernel

    graph = parse(score)
    others = (graph.nodes[n] for n in gathers_in_kernel(graph))
    return diagonal_gathers(graph) != [], any(
        dependence_of(graph, node.args[1:]) == "diagonals" for node in others
    )


@lru_cache(maxsize=1024)
def _by_query(score: str) -> bool:
    """Return whether a score reads a float for each query, which may want a gradient."""
    from ..gpu.codegen.dependence import float_gathers

    return float_gathers(parse(score), "rows") != []


forward, backward, prepare = (
    launched(__name__, part) for part in ("forward", "backward", "prepare")
)
accumulates, native, infer = acc_dtype, no_operator, inference.infer
code = partial(inference.code, per_diagonal=True, affine=True, hoist=True, bias_tables=True)


def unavailable(device: str, index: int | None) -> str:
    """Say why kernels cannot run on a device; empty if they can."""
    card = named_card()
    if card is None and device != "cuda":
        return f"the tensors are on {device}: move them to a GPU of compute capability 9.0"
    capability = torch.cuda.get_device_capability(index) if card is None else card.capability
    if card is None and torch.version.hip is not None:
        return "the GPU is AMD's; the instructions are those of NVIDIA's compute capability 9.0"
    if capability != (9, 0):
        return f"the GPU has compute capability {capability}; the instructions are those of (9, 0)"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    return wrong_triton()


def wrong_triton() -> str:
    """Say why the installed Triton cannot compile these kernels; empty if it can."""
    import triton

    if not OLDEST <= tuple(map(int, triton.__version__.split(".")[:2])) <= NEWEST:
        oldest, newest = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
        return f"Triton {triton.__version__}: the kernels are written for {oldest} to {newest}"
    try:
        from .device import gluon_compat  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"Triton {triton.__version__} has another Gluon than the kernels know: {error}"
    return ""


constant_under_compile(unavailable)


# -- its first use on a card (`first_use.SelfTested`) ---------------------------------------------


def proof(device: torch.device) -> tuple[Path, dict[str, str]] | None:
    """Return the folder of the kernels, and by name everything but the inputs on which their
    results depend on a GPU. Return None if the version of the driver is unknown."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import get_cache_invalidating_env_vars, make_backend

    from ..gpu.runtime import kernel_cache
    from ..gpu.runtime.triton_hash import triton_hash
    from ..gpu.runtime.triton_startup import wait_for_triton

    wait_for_triton()
    driver, package = Path("/proc/driver/nvidia/version"), Path(__file__).parents[2]
    if not driver.exists():
        return None
    gpu, sources = torch.cuda.get_device_properties(device), sha256()
    for folder in ("backends", "blocks", "mods"):
        for file in sorted((package / folder).rglob("*.py")):
            sources.update(file.relative_to(package).as_posix().encode() + b"\0")
            sources.update(file.read_bytes())
    return kernel_cache.folder(), {
        "card": f"{gpu.name}, {gpu.major}.{gpu.minor}, {gpu.multi_processor_count}",
        "driver": driver.read_text().strip(),
        "CUDA of PyTorch": str(torch.version.cuda),
        "Triton": sha256(triton_hash().encode()).hexdigest(),
        "assembler": make_backend(GPUTarget("cuda", 10 * gpu.major + gpu.minor, 32)).hash(),
        "options of Triton": repr(sorted(get_cache_invalidating_env_vars().items())),
        "sources": sources.hexdigest(),
    }


def compile_ahead(spec: Spec, call: Call) -> None:
    """Begin to compile the kernels of a call, and of its backward, if there will be one."""
    from ..gpu.runtime import parallel_compile

    steps = parallel_compile.steps_of(spec, call, forward, backward)
    parallel_compile.precompile(call.q.device, steps)
