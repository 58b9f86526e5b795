"""A plugin of pytest that notes which code of the kernels each test takes.

`python -m pytest -p tools.launch_features --features FILE TESTS` writes, for every test, whether it is
marked `long`, and its features: the kernels that it launches with each constant that they are
compiled with; and of those that the simulator runs, every step from one line to another. Kernels of
Triton are neither compiled nor run.
"""

import dataclasses
import enum
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--features", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Recorder(config.getoption("--features")))


def constants(name: str, x: Any) -> Iterator[str]:
    """Yield `name=value` of a constant, and of each field of one that has fields."""
    if dataclasses.is_dataclass(x):
        for field in dataclasses.fields(x):
            yield from constants(f"{name}.{field.name}", getattr(x, field.name))
    elif hasattr(x, "_fields"):
        for field, value in zip(x._fields, x, strict=True):
            yield from constants(f"{name}.{field}", value)
    elif (
        x is None
        or isinstance(x, bool | int | float | str | enum.Enum | tuple)
        or type(x).__name__ == "dtype"
    ):
        yield f"{name}={x}"
    else:  # a function, of which each call has its own
        yield f"{name}={type(x).__name__}"


class _Recorder:
    def __init__(self, path: Path) -> None:
        self.path, self.tests, self.features = path, {}, set()
        self.is_kernel: dict[CodeType, bool] = {}

    def note(self, target: Any, kernel: str, args: tuple, named: dict[str, Any]) -> None:
        texts = [text for name, x in named.items() for text in constants(name, x)]
        for n, x in enumerate(args):
            tensor = getattr(x, "base", x)  # of a descriptor
            texts += [f"{n} is {tensor.dtype}"] if isinstance(tensor, torch.Tensor) else []
        self.features.update(f"{target} {kernel} {text}" for text in texts)

    def trace(self, frame: FrameType, event: str, value: Any) -> Any:
        """Follow the lines of a function that is a part of a kernel."""
        code = frame.f_code
        if code not in self.is_kernel:
            self.is_kernel[code] = frame.f_globals.get("__name__", "").startswith("simulated.")
        if not self.is_kernel[code]:
            return None
        steps, last = self.features, 0

        def line(frame: FrameType, event: str, value: Any) -> Any:
            nonlocal last
            if event == "line":
                steps.add((code, last, frame.f_lineno))
                last = frame.f_lineno
            return line

        return line

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        from tools import simulator

        self.features = set()
        run_here = simulator.Kernel.__getitem__

        def simulated(kernel: Any, grid: Any) -> Any:
            def launch(*args: Any, **named: Any) -> None:
                target = "simulated abreast" if kernel.abreast else "simulated"
                self.note(target, kernel.function.__name__, args, named)
                threading.settrace(self.trace)
                sys.settrace(self.trace)
                try:
                    run_here(kernel, grid)(*args, **named)
                finally:
                    threading.settrace(None)
                    sys.settrace(None)

            return launch

        def compile_nothing(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
            self.note(driver.active.get_current_target().arch, kernel.__name__, args, named)

        with (
            mock.patch.object(simulator.Kernel, "__getitem__", simulated),
            mock.patch.object(JITFunction, "run", compile_nothing),
        ):
            try:
                return (yield)
            except (Exception, pytest.fail.Exception):  # noqa: BLE001  (where no kernel runs no result is right)
                return None
            finally:
                self.tests[item.nodeid] = {
                    "long": item.get_closest_marker("long") is not None,
                    "features": sorted(
                        {x if isinstance(x, str) else _step(*x) for x in self.features}
                    ),
                }

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.tests, indent=1))


def _step(code: CodeType, line: int, to: int) -> str:
    return f"{'/'.join(Path(code.co_filename).parts[-3:])} {code.co_name} from {line} to {to}"
