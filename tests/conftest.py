"""What every test gets: a seed of its own, a fixed number of threads, and files to compare with."""

import difflib
import gc
import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

GOLDEN = Path(__file__).parent / "golden"

# ------------------------------------------------------------------------------- random numbers


class TorchRandom:
    """PyTorch's generator, in the form in which hypothesis seeds it for each of its examples."""

    def seed(self, seed: int) -> None:
        import torch

        torch.manual_seed(seed)

    def getstate(self) -> Any:
        import torch

        return torch.get_rng_state()

    def setstate(self, state: Any) -> None:
        import torch

        torch.set_rng_state(state)


torch_random = TorchRandom()  # hypothesis holds it by a weak reference
hypothesis.register_random(torch_random)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("here", deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """This test's seed, made from its name: the same numbers alone, in any order, in parallel."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    torch_random.seed(seed)
    return seed


# ------------------------------------------------------------------------------- threads, files


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--accept-golden",
        action="store_true",
        help="write tests/golden/ from what the code makes now; runs the tests that use it, only",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", 0):
        return  # the process that hands out tests: others need not wait until it has imported PyTorch
    import torch

    if not torch.cuda.is_available():
        # For when there is one, each notes its caller's stack: a millisecond, twenty thousand times.
        for devices in (torch.cuda, torch.xpu, torch.mtia):
            devices.manual_seed_all = lambda seed: None
    # The processes of pytest-xdist share the cores. A test alone may use two threads, so that what
    # runs on several threads is tested as such.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, min(2, (os.cpu_count() or 1) // workers)))


# Files whose tests take seconds each. They go first, so that at the end of a run no process is left
# with a long one while the others wait: then those that are idle take from the rest.
LONGEST = (
    "tests/distributed/", "tests/recipe/test_ranks.py", "tests/bench/test_ranks.py",
    "tests/triton/test_interpreter.py", "tests/triton/test_driver.py", "tests/test_package.py", "tests/test_hub_kernel.py",
    "tests/mods/test_programs.py", "tests/mods/test_compiled_changes.py",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    if config.getoption("--accept-golden"):
        uses = [item for item in items if "golden" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in uses])
        items[:] = uses


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: Python need not look through it for garbage, test after test. And it
    looks less often: a compiled call makes a million objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)
    from processes import dynamo_guards_are_not_timed

    dynamo_guards_are_not_timed()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    none_ran = exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
    if none_ran and session.config.getoption("--accept-golden"):
        session.exitstatus = pytest.ExitCode.OK  # there are no golden files to write


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Calls and models are small: threads would wait for each other, and on a busy machine for a core."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """Compare a text with the file of that name in tests/golden/: `golden("causal.py", source)`.

    `make golden` (pytest --accept-golden) writes the files; the diff is for a person to read.
    """

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--accept-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        if not path.exists():
            pytest.fail(f"no {path}: `make golden` writes it")
        expected = path.read_text()
        if text != expected:
            lines = expected.splitlines(), text.splitlines()
            diff = "\n".join(difflib.unified_diff(*lines, "golden", "now", lineterm=""))
            pytest.fail(f"{path} has changed; if it should, `make golden` accepts it\n{diff}")

    return compare
