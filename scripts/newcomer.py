"""How long it takes from nothing to a first training step: `make newcomer`.

A virtual environment, the wheel with what it asks for, the first picture, the first training step,
each as a newcomer does it, with the clock running; whatever fails ends it. PyTorch comes from pip's
cache or its index, and which of the two is most of the time: run it twice.

    python scripts/newcomer.py
    python scripts/newcomer.py --index-url https://download.pytorch.org/whl/cpu    # options go to pip
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def first_example() -> str:
    """The first Python block of the README: a call and its gradients."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0]


def main(options: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="newcomer-") as name:
        folder = Path(name)
        (wheel,) = build(folder)
        scripts = folder / "venv" / ("bin" if os.name == "posix" else "Scripts")
        python, headway = str(scripts / "python"), str(scripts / "headway")
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options]
        mask = "causal() & sliding_window(64)"
        steps = {
            "a virtual environment": lambda: venv.create(folder / "venv", with_pip=True),
            "pip install, PyTorch too": lambda: run(*pip, f"headway[cli] @ {wheel.as_uri()}"),
            "the first picture": lambda: run(headway, "mask", mask, "--out", "mask.svg", at=folder),
            "the first training step": lambda: run(python, "-c", first_example(), at=folder),
        }
        total = 0.0
        for what, step in steps.items():
            start = time.perf_counter()
            step()
            seconds = time.perf_counter() - start
            total += seconds
            print(f"{what:26}{seconds:7.1f} s", flush=True)
        print(f"{'all':26}{total:7.1f} s")
        assert (folder / "mask.svg").stat().st_size > 1000
        print(run(python, "-c", "import torch; print('PyTorch', torch.__version__)").strip())


def build(folder: Path) -> list[Path]:
    """The wheel, as `make package` makes it; not a part of the time."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), at=ROOT)
    return list(folder.glob("*.whl"))


def run(*command: str, at: Path | None = None) -> str:
    """What a program prints, in an environment that knows nothing of this one."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=at, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)[:200]}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
