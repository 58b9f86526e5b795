"""A text and a network small enough to train in a second."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from headway_lab.recipe import TrainConfig
from headway_lab.recipe.machine import threads


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """All is tiny here: a second thread would only be waited for."""
    with threads(1):
        yield


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 short .py files, each with its own words; a few in folders that are left out."""
    root = tmp_path_factory.mktemp("text")
    draw = random.Random(1)
    for n in range(120):
        folder = root / ("package" if n % 3 else "")
        folder.mkdir(exist_ok=True)
        words = [draw.choice("abcdefgh") * draw.randint(1, 5) for _ in range(draw.randint(2, 40))]
        (folder / f"m{n}.py").write_text(" = ".join(words) + "\n")
    for left_out in ("test/test_a.py", "idlelib/b.py", "package/tests/c.py", "_sysconfigdata_x.py"):
        (root / left_out).parent.mkdir(parents=True, exist_ok=True)
        (root / left_out).write_text("left out")
    (root / "package" / "empty.py").write_text("")
    (root / "notes.txt").write_text("no Python")
    return root


@pytest.fixture(scope="session")
def tiny_in(text_folder: Path) -> Callable[[Path], TrainConfig]:
    """Twelve steps of a one-layer network with two query heads on one key head."""
    return lambda folder: TrainConfig(
        name="tiny",
        depth=1,
        width=16,
        heads=2,
        steps=12,
        context=24,
        batch=2,
        eval_every=5,
        save_every=4,
        corpus=text_folder,
        threads=1,
        runs=folder / "runs",
    )


@pytest.fixture
def tiny(tiny_in: Callable[[Path], TrainConfig], tmp_path: Path) -> TrainConfig:
    return tiny_in(tmp_path)


@pytest.fixture
def quiet() -> Console:
    return Console(quiet=True)
