"""Capture calls and replay them in Triton's interpreter: `interpret_graphs.py PART PARTS`.

The last line printed is {mask: what is wrong}.
"""

import json
import random
import sys
import warnings
import zlib
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import captured
import graphs
import triton  # noqa: F401  (on the CPU the backend is there for whom loads Triton)
from tools.interpreter import quicker


def replayed(make, warm: bool) -> str:
    """What is wrong with a call that is replayed when what its mask reads was written to."""
    q, kv = random.choice([(40, 70), (70, 40)])
    of = make(q, kv, "cpu")
    step = captured.Step("triton", of, q, kv, "cpu", torch.float32)
    if warm:
        step()
    with graphs.recording() as graph:
        made = step()
    strange = [x.shape for x in graph.strangers(*of.reads)]
    step.rewrite()
    graph.replay()
    off = max(step.wrong(made))
    return "" if off < 1 and not strange else f"{off} off, not kept: {strange}"


def main(part: int, parts: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # NumPy's, of infinities that are meant
    wrong = {}
    for n, make in [*enumerate(captured.MASKS)][part::parts]:
        warm, name = n // parts % 2 == 0, make.__name__
        seed = zlib.crc32(name.encode())
        torch.manual_seed(seed)
        random.seed(seed)
        if said := replayed(make, warm):
            wrong[name] = said
    print(json.dumps(wrong))


if __name__ == "__main__":
    with quicker():
        main(int(sys.argv[1]), int(sys.argv[2]))
