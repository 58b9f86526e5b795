"""The package as a kernel of the Hugging Face Hub: loaded from a folder, under another name.

What the `kernels` package does is done here by hand (`importlib`, with the name from
metadata.json), so that the tests do not need it.
"""

import ast
import functools
import json
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TWO = """
import importlib, importlib.util, json, sys
from pathlib import Path

class Missing:  # what a machine with PyTorch need not have
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

MISSING = {"headway", "jaxtyping", "matplotlib", "rich", "safetensors", "transformers", "tyro"}
sys.meta_path.insert(0, Missing())

def load(variant):
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils import _pytree as pytree

kernels = [load(Path(folder)) for folder in sys.argv[1:]]
assert len({k.__name__ for k in kernels}) == 2
torch.manual_seed(0)
q, k, v = (torch.randn(2, 4, 33, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
weight = torch.randn(2, 4, 33, 8, dtype=torch.float64)
slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
distance = torch.arange(33)[:, None] - torch.arange(33)
bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, float("-inf"))
expected = sdpa(q, k, v, bias)
grads = torch.autograd.grad((expected * weight).sum(), (q, k, v))
learned = slopes.clone().requires_grad_()
outs = []
for kernel in kernels:
    score = lambda s, b, h, i, j: s - learned[h] * (i - j)
    call = lambda q, k, v: kernel.attention(q, k, v, score, kernel.causal())
    for run in (
        call,
        torch.compile(call, backend="eager"),
        torch.compile(lambda *x: kernel.attention(*x, kernel.alibi(slopes), kernel.causal()),
                      backend="aot_eager", fullgraph=True),
    ):
        out = run(q, k, v)
        torch.testing.assert_close(out, expected)
        for mine, right in zip(torch.autograd.grad((out * weight).sum(), (q, k, v)), grads):
            torch.testing.assert_close(mine, right)
    call(q, k, v).sum().backward()
    assert learned.grad.abs().min() > 0
    blocks = kernel.block_mask(kernel.causal(), 1, 1, 33, 33, tile=(16, 16))
    torch.testing.assert_close(kernel.attention(q, k, v, mask=blocks), sdpa(q, k, v, is_causal=True))
    leaves, spec = pytree.tree_flatten(blocks)
    assert type(pytree.tree_unflatten(leaves, spec)) is kernel.BlockMask
    importlib.import_module(".nn", kernel.__name__).Attention(16, 2)(torch.randn(1, 5, 16))
assert all(k.__name__ in dir(torch.ops) for k in kernels)
assert not [name for name in sys.modules if name.split(".")[0] in MISSING]
"""


@pytest.fixture(scope="module")
def lay_out():
    spec = util.spec_from_file_location("hub_kernel", ROOT / "scripts" / "hub_kernel.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.lay_out


def test_two_versions_run_side_by_side(tmp_path: Path, lay_out) -> None:
    """Forward, backward, compiled, with block masks and modules; `headway` itself is not there."""
    first = lay_out(tmp_path / "first")
    second = lay_out(tmp_path / "second")
    api = second / "api.py"
    api.write_text(api.read_text() + "\n# another version\n")
    changed = lay_out(tmp_path / "third", second)
    names = [json.loads((v / "metadata.json").read_text())["id"] for v in (first, second, changed)]
    assert names[0] == names[1] != names[2]
    command = [sys.executable, "-c", TWO, str(first), str(changed)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Loaded when a GPU plans a call, when a sequence is first cut over ranks, and for a large mask.
LATE = (
    "blocks/intervals.py",
    "backends/hopper/",
    "distributed/balance.py",
    "distributed/report.py",
    "distributed/exchange/",
)


def test_only_pytorch_and_triton_are_imported_at_the_start(tmp_path: Path, lay_out) -> None:
    allowed = sys.stdlib_module_names | {"torch", "triton"}
    found = set()
    variant = lay_out(tmp_path)
    for path in variant.rglob("*.py"):
        name = path.relative_to(variant).as_posix()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                tops = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                tops = [str(node.module)]
            else:
                continue
            found |= {(name, top.partition(".")[0]) for top in tops}
    strange = {pair for pair in found if pair[1] not in allowed and not pair[0].startswith(LATE)}
    assert not strange


@pytest.mark.parametrize("family", ["Llama", "GptOss"])
def test_transformers_takes_the_kernel_by_its_name(
    family: str, tmp_path: Path, lay_out, monkeypatch
) -> None:
    """`attn_implementation="owner/headway"`: what `kernels` downloads is loaded from a folder."""
    hf = pytest.importorskip("transformers", reason="transformers 5 is not installed")
    import torch
    from transformers import modeling_utils
    from transformers.integrations import hub_kernels

    variant = lay_out(tmp_path)
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setitem(sys.modules, name, kernel := util.module_from_spec(spec))
    spec.loader.exec_module(kernel)
    for module in (hub_kernels, modeling_utils):
        monkeypatch.setattr(module, "is_kernels_available", lambda *_, **__: True, raising=False)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *_, **__: kernel)
    calls = []
    real = kernel.flash_attn_varlen_func
    counting = functools.wraps(real)(lambda *a, **k: calls.append(1) or real(*a, **k))
    kernel.flash_attn_varlen_func = counting  # its signature tells transformers what it takes
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
    }  # fmt: skip
    if family == "GptOss":  # with sinks and windows
        sizes |= {"head_dim": 8, "sliding_window": 4, "num_local_experts": 2}
        sizes |= {"num_experts_per_tok": 1}
    config = getattr(hf, f"{family}Config")(**sizes)
    model = getattr(hf, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager")
    model.eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    tokens, kept = torch.randint(1, 64, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    kept[0, :3] = 0
    run = lambda: (model(tokens).logits, model(tokens, attention_mask=kept).logits[kept.bool()])
    expected = run()
    model.set_attn_implementation(f"owner/{family}")  # transformers loads a name once
    for got, right in zip(run(), expected, strict=True):
        torch.testing.assert_close(got, right)
    assert len(calls) == 2  # of the padded rows, in every layer
