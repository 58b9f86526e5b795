"""Derive a superset of a mask that reads no tensor: `causal()` of `causal() & padding(lengths)`.

Its tiles stay valid while the lengths are written to, as CUDA graphs need.
"""

from functools import lru_cache

import torch

from ..mods.graph import Arg, Builder, Graph
from ..types import Captured, Coords
from .build import cached_build
from .runs import combine
from .tiles import Tiles

# A superset and a subset of a bool: True wherever it is True, and True only where it is.
BoolBounds = tuple[Arg, Arg]


@lru_cache(maxsize=1024)
def superset_mask(graph: Graph, unknown: frozenset[str] = frozenset()) -> Graph:
    """Return a mask that reads no tensor and keeps every pair that this one may keep.

    - `unknown`: further inputs that it does not read, such as positions that the caller gives.
    """
    hidden = {i.name for i in graph.inputs if i.ndim is not None} | unknown
    builder = Builder()
    new_names: dict[Arg, Arg] = {}  # new names of values that depend on no hidden input
    bounds: dict[Arg, BoolBounds] = {}  # of bools that depend on one

    def bounds_of(arg: Arg) -> BoolBounds:
        if not isinstance(arg, str):
            return bool(arg), bool(arg)
        return (
            (new_names[arg], new_names[arg]) if arg in new_names else bounds.get(arg, (True, False))
        )

    def emit(op: str, *args: Arg) -> Arg:
        return builder.emit(op, args, "bool")

    def both(a: Arg, b: Arg) -> Arg:
        return False if a is False or b is False else emit("and", a, b)

    def either(a: Arg, b: Arg) -> Arg:
        return True if a is True or b is True else emit("or", a, b)

    for name in (i.name for i in graph.inputs if i.name not in hidden):
        new_names[name] = name
    for n, node in enumerate(graph.nodes):
        name, args = f"%{n}", node.args
        if all(a in new_names for a in args if isinstance(a, str)):
            new_args = tuple(new_names[a] if isinstance(a, str) else a for a in args)
            new_names[name] = builder.emit(node.op, new_args, node.dtype, node.line)
        elif node.dtype != "bool":
            continue
        elif node.op in ("and", "or"):
            join = both if node.op == "and" else either
            (upper, lower), (upper_b, lower_b) = map(bounds_of, args)
            bounds[name] = join(upper, upper_b), join(lower, lower_b)
        elif node.op in ("not", "invert"):
            upper, lower = bounds_of(args[0])
            bounds[name] = emit("not", lower), emit("not", upper)
        elif node.op == "where":
            (upper, lower), (upper_b, lower_b) = map(bounds_of, args[1:])
            bounds[name] = either(upper, upper_b), both(lower, lower_b)
    upper, _ = bounds_of(graph.outputs[0])
    inputs = tuple(i for i in graph.inputs if i.ndim is None)
    return builder.finish(graph.kind, inputs, (upper,))


def superset_tiles(
    graph: Graph, captured: Captured, shape: tuple[int, int, int, int], tile: tuple[int, int],
    device: torch.device, coords: Coords = Coords(),
) -> tuple[Tiles, int, int]:  # fmt: skip
    """Return what `build` does for any content of tensors: live tiles are partial. On the host."""
    given_positions = {"q_idx": coords.q_pos, "kv_idx": coords.kv_pos}
    unknown = frozenset(name for name, pos in given_positions.items() if pos is not None)
    superset, numbers = superset_mask(graph, unknown), captured._replace(tensors=[])
    scalar_coords, host = coords._replace(q_pos=None, kv_pos=None), torch.device("cpu")
    tiles, b, h = cached_build(superset, numbers, shape, tile, host, scalar_coords)
    runs_by_axis = (tiles.rows_full, tiles.rows_partial), (tiles.cols_full, tiles.cols_partial)
    superset_runs = []
    for (full, partial), axis in zip(runs_by_axis, (1, 0), strict=True):
        live = combine([full, partial], -(-shape[2 + axis] // tile[axis]))
        superset_runs += [full.cut(0, 0), live(lambda covered: covered[0] | covered[1])]
    flat_tiles = Tiles.of_runs(*superset_runs).flatten()
    return Tiles.unflatten([x.to(device) for x in flat_tiles]), b, h
