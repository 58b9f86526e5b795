"""Relative-bias tables: what a score reads by relative position, read for all distances before its
kernel runs, and the sums of their gradients. The host's side of device/relative_bias.py."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...mods.graph import Graph, parse
from ..gpu.codegen.dependence import diagonal_gathers
from ..gpu.runtime.call_plan import BasePlan, TileSchedules
from ..gpu.runtime.launcher import CallArguments, KernelLauncher
from .device.relative_bias import collect_bias_grad, fill_bias_table

_TILE = 128  # rows and columns of tiles at most
_BLOCK = 16  # a program fills this many times 16 distances


class BiasTables:
    """The tables of calls of one kind.

    - `wanted`: the gathers of the score that want a gradient.
    - `queries`: rows of accumulators are queries; else keys.
    """

    def __init__(
        self,
        plan: BasePlan,
        schedules: TileSchedules,
        wanted: tuple[int, ...] = (),
        *,
        queries: bool,
    ) -> None:
        self.plan, self.schedules, self.queries = plan, schedules, queries
        text = plan.codegen_spec
        graph = parse(text.score) if text.score is not None and text.bias_tables else None
        self.gathers = [] if graph is None else diagonal_gathers(graph)
        self.depends = [_depends(graph, n) for n in self.gathers] if graph is not None else []
        # Which of the gathers that want a gradient have a table.
        self.grad_tables = tuple(k for k, n in enumerate(wanted) if n in self.gathers)
        self.grad_depends = [self.depends[self.gathers.index(wanted[k])] for k in self.grad_tables]
        rows, columns = (-(-n // _TILE) * _TILE for n in (plan.q_len, plan.kv_len))
        if not queries:
            rows, columns = columns, rows
        self.zero, self.count = rows, rows + columns  # index of distance 0, and how many distances
        for on in self.grad_depends if plan.exact_sums.width else ():
            plan.exact_sums.reserve(self._heads(*on) * self.count)
        self.fills = [self._kernel(k, on, fill=True) for k, on in enumerate(self.depends)]
        self.collects = [
            self._kernel(k, on, fill=False)
            for k, on in zip(self.grad_tables, self.grad_depends, strict=True)
        ]  # fmt: skip

    def fill(self, call_args: CallArguments) -> list[Tensor]:
        """Return the tables of a call, float32."""
        tables = []
        for (b, h), fill in zip(self.depends, self.fills, strict=True):
            table = torch.empty(
                self._heads(b, h), 4 * self.count, dtype=torch.float32, device=self.plan.device
            )
            fill((table,), call_args)
            tables.append(table)
        return tables

    def new_sums(self) -> list[Tensor]:
        """Return the sums of gradients, which are 0, to which the kernel adds: float32 or exact."""
        counts = [self._heads(*on) * self.count for on in self.grad_depends]
        return [self.plan.exact_sums.zeros(count) for count in counts]

    def collect(
        self, sums: Sequence[Tensor], grads: Sequence[Tensor], call_args: CallArguments
    ) -> None:
        """Add sums to the gradients of what the gathers read; `grads`: of all gathers."""
        for x, k, kernel in zip(sums, self.grad_tables, self.collects, strict=True):
            kernel((x, grads[k]), call_args)

    def kernel_args(self, tensors: Sequence[Any]) -> tuple[tuple, tuple, tuple]:
        """Return tables and sums as kernels take them (`locate_bias`), and the other tensors, from
        all of them in a row."""
        n, m = len(self.depends), len(self.depends) + len(self.grad_tables)
        tables = self._with_strides(tensors[:n], self.depends, 4 * self.count)
        return (
            tables,
            self._with_strides(
                tensors[n:m], self.grad_depends, self.count * self.plan.exact_sums.rows
            ),
            tuple(tensors[m:]),
        )

    def _with_strides(
        self, tensors: Sequence[Any], depends: Sequence[tuple[bool, bool]], row: int
    ) -> tuple:
        arguments: list[Any] = [self.zero] if depends else []
        for x, (b, h) in zip(tensors, depends, strict=True):
            arguments += x, row * b * (self.plan.hq if h else 1), row * h
        return tuple(arguments)

    def _heads(self, b: bool, h: bool) -> int:
        return (self.plan.b if b else 1) * (self.plan.hq if h else 1)

    def _kernel(self, k: int, depends: tuple[bool, bool], *, fill: bool) -> KernelLauncher:
        plan, (b, h) = self.plan, depends
        first_b, first_h, first_q, first_kv = plan.offsets
        heads = plan.hq if h else 1
        places = (self.zero, self.count, heads, first_b, first_h, first_kv - first_q)

        def arrange(
            operands: Sequence[Any], tensors: Sequence[Any], floats: Sequence[float]
        ) -> tuple:
            score_tensors, _, score_numbers, _ = plan.arranged(self.schedules, tensors, floats)[2]
            return (*operands, score_tensors, score_numbers, *places)

        if fill:
            kernel, distances = fill_bias_table, 16 * _BLOCK  # of a program
            options = {"BAND": plan.function(f"bias{k}"), "SIGN": 1 if self.queries else -1}
        else:
            kernel, distances = collect_bias_grad, 64 * _BLOCK
            options = {"OFFSET": plan.function(f"offset{k}"), "WIDTH": plan.exact_sums.width}
        options["BLOCK"] = _BLOCK if fill else distances
        programs = self._heads(b, h) * -(-self.count // distances)
        return KernelLauncher(kernel, plan.device, options, programs, arrange)


def _depends(graph: Graph, n: int) -> tuple[bool, bool]:
    """Return whether a gather depends on the batch row, and whether it depends on the head."""
    visited, todo = set(), [f"%{n}"]
    while todo:
        name = todo.pop()
        visited.add(name)
        if name[0] == "%":
            args = [a for a in graph.nodes[int(name[1:])].args if isinstance(a, str)]
            todo += [a for a in args if a not in visited]
    return "b" in visited, "h" in visited
