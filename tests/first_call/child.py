"""Compiles a kernel for a card that is not there, in a process without PyTorch.

`child.py` WHEN prints, at that time (`time.time`), the kernels that it made, as JSON: name, whether it
was compiled.
`child.py hold` FOLDER KEY takes the lock of an entry, says so, and waits to be killed.
"""

import json
import sys
import time
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).parents[2] / "src"
for name in ("headway", "headway.backends", "headway.backends.gpu", "headway.backends.gpu.runtime"):
    sys.modules[name] = package = ModuleType(name)
    package.__path__ = [str(SOURCE.joinpath(*name.split(".")))]

# Triton asks whether an argument is a tensor of PyTorch; to import that takes a second.
sys.modules["torch"] = torch = ModuleType("torch")
torch.Tensor = type("Tensor", (), {})

import tiny  # noqa: E402
from triton.runtime import cache, driver  # noqa: E402

from headway.backends.gpu.runtime import kernel_cache  # noqa: E402

if __name__ == "__main__":
    if sys.argv[1] == "hold":
        entry = kernel_cache.Entry(Path(sys.argv[2]), sys.argv[3])
        assert entry.get_group("kernel.json") is None
        print("held", flush=True)
        time.sleep(60)
    cache.triton_key = lambda: "its hash, which takes as long as the rest"
    driver.set_active(tiny.Driver())
    kernel_cache.adopt(tiny.double)
    time.sleep(max(0.0, float(sys.argv[1]) - time.time()))
    tiny.double.warmup(tiny.Pointer(), 16, SIZE=64, grid=(1, 1, 1))
    print(json.dumps([(made.name, made.compiled) for made in kernel_cache.log]))
