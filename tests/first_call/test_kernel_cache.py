"""Kernels on disk: found again, by others too; never trusted where they are not what was written."""

import json
import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from triton.compiler.errors import CompilationError
from triton.runtime import driver

from headway.backends.gpu.runtime import compile_apart, kernel_cache
from headway.backends.gpu.runtime.parallel_compile import RecordedLaunch, _compile_and_load

from . import tiny

HERE = Path(__file__).parent
GROUP = "__grp__double.json"


def begin(folder: Path, *arguments: object) -> subprocess.Popen:
    """`child.py`, with its kernels in a folder."""
    return subprocess.Popen(
        [sys.executable, HERE / "child.py", *map(str, arguments)],
        env=os.environ | {"TRITON_CACHE_DIR": str(folder)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def made(child: subprocess.Popen) -> list:
    said, _ = child.communicate(timeout=120)
    assert child.returncode == 0
    return json.loads(said)


@pytest.fixture
def card(monkeypatch):
    """A card that is not there, of whose kernels this process has none."""
    monkeypatch.setattr(driver, "_active", tiny.Driver())
    monkeypatch.setattr(kernel_cache, "log", [])

    def forget():
        tiny.double.device_caches.clear()
        tiny.count.device_caches.clear()

    forget()
    yield forget
    forget()


def double(folder: Path):
    """The kernel, and whether it was compiled."""
    tiny.double.device_caches.clear()
    kernel_cache.adopt(tiny.double)
    with kernel_cache.use_folder(folder):
        kernel = tiny.double.warmup(tiny.Pointer(), 16, SIZE=64, grid=(1, 1, 1))
    return kernel, kernel_cache.log[-1].compiled


def entry_of(folder: Path) -> Path:
    (group,) = folder.rglob(GROUP)
    return group.parent


def test_eight_processes_compile_a_kernel_once_and_a_ninth_finds_it_in_a_copy(tmp_path):
    at = time.time() + 1.5
    children = [begin(tmp_path / "one", at) for _ in range(8)]
    compiled = [was for child in children for _, was in made(child)]
    assert sorted(compiled) == [False] * 7 + [True]
    shutil.move(tmp_path / "one", tmp_path / "two")
    assert made(begin(tmp_path / "two", 0)) == [["double", False]]


def test_a_holder_that_is_killed_lets_go_of_its_lock(tmp_path, card):
    kernel, _ = double(tmp_path / "first")
    holder = begin(tmp_path, "hold", tmp_path / "second", kernel.hash)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait()
    began = time.monotonic()
    assert double(tmp_path / "second")[1]
    assert time.monotonic() - began < 30


def test_a_holder_that_is_stuck_is_not_waited_for(tmp_path, card, monkeypatch):
    kernel, _ = double(tmp_path / "first")
    stuck = kernel_cache.Entry(tmp_path / "second", kernel.hash)
    assert stuck.get_group("double.json") is None
    monkeypatch.setattr(kernel_cache, "_LOCK_TIMEOUT", 0.1)
    assert double(tmp_path / "second")[1]
    stuck.close()


def flipped(entry: Path) -> None:
    data = bytearray((entry / "double.cubin").read_bytes())
    data[len(data) // 2] ^= 1
    (entry / "double.cubin").write_bytes(data)


def cut_short(entry: Path) -> None:
    data = (entry / "double.cubin").read_bytes()
    (entry / "double.cubin").write_bytes(data[:-100])


def lost(entry: Path) -> None:
    (entry / "double.cubin").unlink()


def torn(entry: Path) -> None:
    (entry / GROUP).write_text((entry / GROUP).read_text()[:50])


def of_triton(entry: Path) -> None:
    group = json.loads((entry / GROUP).read_text())
    (entry / GROUP).write_text(json.dumps({"child_paths": group["child_paths"]}))


def of_another_key(entry: Path) -> None:
    group = json.loads((entry / GROUP).read_text())
    (entry / GROUP).write_text(json.dumps(group | {"key": "0" * 64}))


def no_group(entry: Path) -> None:
    (entry / GROUP).write_text("[1, 2]")


@pytest.mark.parametrize(
    "damage", [flipped, cut_short, lost, torn, of_triton, of_another_key, no_group]
)
def test_an_entry_that_is_not_what_was_written_is_compiled_anew(tmp_path, card, damage):
    kernel, compiled = double(tmp_path)
    assert compiled
    damage(entry_of(tmp_path))
    again, compiled = double(tmp_path)
    assert compiled
    assert again.kernel == kernel.kernel
    assert double(tmp_path)[1] is False  # it was replaced


def test_a_kernel_of_another_source_is_another(tmp_path, card, monkeypatch):
    """What device functions of the library say counts, too."""
    assert double(tmp_path)[1]
    monkeypatch.setattr(kernel_cache, "_helper_hash", lambda: "other functions")
    assert double(tmp_path)[1]


def test_a_folder_that_cannot_be_written_to_is_read(tmp_path, card, monkeypatch):
    assert double(tmp_path / "kernels")[1]
    monkeypatch.setattr(os, "access", lambda *given: False)
    monkeypatch.setattr(kernel_cache, "_temporary", lambda: tmp_path / "mine")
    assert double(tmp_path / "kernels")[1] is False
    assert double(tmp_path / "none")[1]
    assert list((tmp_path / "mine").rglob(GROUP))


def test_triton_that_was_told_to_keep_kernels_elsewhere_does(tmp_path, card, monkeypatch):
    assert kernel_cache.is_supported()
    monkeypatch.setattr(kernel_cache.knobs.cache, "manager_class", object)
    assert not kernel_cache.is_supported()


def test_what_would_be_compiled_is_told_without_compiling(tmp_path, card):
    kernel_cache.adopt(tiny.double)
    given = tiny.double, (tiny.Pointer(), 16), {"SIZE": 64}
    with kernel_cache.use_folder(tmp_path):
        assert kernel_cache.state_of(*given) == ""
        assert not list(tmp_path.iterdir())
        double(tmp_path)
        assert kernel_cache.state_of(*given) == "loaded"
        tiny.double.device_caches.clear()
        assert kernel_cache.state_of(*given) == "cached"


# -- in processes of their own --------------------------------------------------------------------


def count(folder: Path):
    tiny.count.device_caches.clear()
    kernel_cache.adopt(tiny.count)
    given = tiny.Pointer(), tiny.Shape(8)
    with kernel_cache.use_folder(folder):
        return tiny.count.warmup(*given, SIZE=32, num_warps=1, grid=(1, 1, 1))


def test_a_process_of_its_own_compiles_the_same_code(tmp_path, card):
    here = count(tmp_path / "here")
    with kernel_cache.in_processes():
        there = count(tmp_path / "there")
    assert there.kernel == here.kernel
    assert there.hash == here.hash
    assert {"front end", "ttgir", "llir", "ptx", "cubin"} <= set(kernel_cache.log[-1].stages)
    assert kernel_cache.log[-2].stages.keys() == {"all"}


def test_several_kernels_of_gluon_have_a_process_each(tmp_path, card):
    """And those of Triton, of whose time little is Python's, a thread."""

    def recorded(fn, *args, **options):
        kernel_cache.adopt(fn)
        return RecordedLaunch(fn, args, options, lambda compiled: True)  # and not loaded

    one = [
        recorded(tiny.count, tiny.Pointer(), tiny.Shape(8), SIZE=32, num_warps=1),
        recorded(tiny.double, tiny.Pointer(), 16, SIZE=64),
    ]
    two = [*one, recorded(tiny.count, tiny.Pointer(), tiny.Shape(8), SIZE=64, num_warps=1)]
    for kernels, apart in ((one, 0), (two, 2)):
        card()
        kernel_cache.log.clear()
        with kernel_cache.use_folder(tmp_path / str(apart)):
            _compile_and_load(torch.device("cpu"), kernels)
        stages = [set(made.stages) != {"all"} for made in kernel_cache.log if made.name == "count"]
        assert len(kernel_cache.log) == len(kernels)
        assert sum(stages) == apart


@pytest.mark.parametrize("python", ["", "/usr/bin/uwsgi", "/nowhere/python3"])
def test_where_there_is_no_python_to_start_a_thread_compiles(tmp_path, card, monkeypatch, python):
    monkeypatch.setattr(sys, "executable", python)
    with kernel_cache.in_processes():
        assert count(tmp_path).kernel


def test_an_error_of_the_compiler_is_raised_where_the_kernel_is_wanted(tmp_path, card):
    def wrong():
        kernel_cache.adopt(tiny.count)
        tiny.count.warmup(tiny.Pointer(), 3, SIZE=32, num_warps=1, grid=(1, 1, 1))

    with kernel_cache.in_processes(), kernel_cache.use_folder(tmp_path):
        with pytest.raises(CompilationError, match="rows"):
            wrong()  # 3 has no rows
        with pytest.raises(CompilationError, match="rows"):
            wrong()  # and the lock is free


IMPORTS = """
import importlib, json, sys
from types import ModuleType
sys.modules["torch"] = None
for name, path in json.loads(sys.argv[1]).items():
    sys.modules[name] = package = ModuleType(name)
    package.__path__ = path
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def test_kernels_of_gluon_need_no_pytorch_to_be_compiled():
    """A process that compiles one does without: its import takes as long as half a kernel."""
    from headway.backends.hopper import launch, wrong_triton

    if wrong_triton():
        pytest.skip(wrong_triton())
    modules = {*launch.ForwardPlan.sources, *launch.BackwardPlan.sources}
    names = {m.__name__ for m in modules} - {"headway.backends.gpu.preprocess"}  # not of Gluon
    packages = {
        name: list(m.__path__)
        for name, m in sys.modules.items()
        if name.startswith("headway") and hasattr(m, "__path__")
    }
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, json.dumps(packages), *names],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_named_is_not_sent(tmp_path, card):
    assert compile_apart.run(object(), None, {}, "", str(tmp_path)) is None
