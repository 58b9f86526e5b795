"""Every example runs with a few steps, learns something, and says what it is."""

import importlib.util
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def falls(losses: list[float], by: float) -> None:
    assert all(map(math.isfinite, losses))
    first, last = sum(losses[:3]) / 3, sum(losses[-3:]) / 3
    assert last < first - by, losses


def test_a_gpt_learns_and_so_do_its_scores(capsys):
    example = load("train_gpt")
    losses = example.main("--steps 20 --width 32 --depth 2 --heads 2 --context 64 --rows 8".split())
    falls(losses, 1.0)
    out = capsys.readouterr().out
    assert out.count("nearest to") == 4
    assert "x1.00" not in out.replace("x1.00", "", 3), "temperatures did not move"


def test_a_gpt_score_is_what_it_says():
    example = load("train_gpt")
    attention = example.SelfAttention(32, 2)
    with torch.no_grad():
        attention.bias.normal_()
        attention.log_temperature.normal_()
    x = torch.randn(2, 90, 32)
    q, k, v = attention.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
    distance = torch.arange(90)[:, None] - torch.arange(90)
    bias = attention.bias[:, distance.clamp(0, example.REACH)]
    logits = q @ k.mT / 4 * attention.log_temperature.exp()[:, None, None] + bias
    dense = logits.masked_fill(distance < 0, -math.inf).softmax(-1) @ v
    torch.testing.assert_close(attention(x), attention.out(dense.transpose(1, 2).flatten(2)))


def test_a_vision_transformer_learns():
    losses, right = load("train_vit").main("--steps 40 --side 16 --rows 32 --window 3".split())
    falls(losses, 0.05)
    assert right > 0.3  # four shapes


def test_pictures_are_of_their_shapes():
    images, labels = load("train_vit").pictures(200, 24, noise=0.0)
    area = images.sum((1, 2, 3))
    disk, square, diamond, cross = [area[labels == n].mean().item() for n in range(4)]
    assert square > disk > diamond
    assert square > cross


def test_a_t5_learns_to_sort():
    losses, right = load("train_t5").main("--steps 60 --longest 4 --width 48 --depth 1".split())
    falls(losses, 1.5)
    assert right > 0.05  # of some hundred thousand words, by chance none


def test_a_t5_does_not_see_padding():
    example = load("train_t5")
    model = example.T5(32, 1, 2)
    letters, lengths, answer = example.words(4, 8)
    assert (answer.gather(1, lengths[:, None]) == example.END).all()
    other = letters.masked_fill(letters == example.PAD, 3)
    results = [model.decode(answer, model.encode(x, lengths), lengths) for x in (letters, other)]
    torch.testing.assert_close(*results)
    assert not torch.equal(letters, other)


def test_a_packed_model_learns_and_writes():
    options = "--steps 25 --width 32 --depth 2 --heads 2 --context 64 --length 40".split()
    losses, text = load("generate").main([*options, "--prompt", "def f"])
    falls(losses, 1.0)
    assert text.startswith("def f")
    assert len(text) > len("def f")


def test_a_one_step_generator_learns_eager_and_compiled():
    small = "--steps 30 --width 24 --depth 1 --heads 2 --sets 3".split()
    example = load("meanflow")
    losses, noise, made = example.main(small)
    falls(losses, 0.1)
    assert math.isfinite(made)
    assert noise > 0.3
    compiled, *_ = example.main([*small, "--compile", "aot_eager"])
    torch.testing.assert_close(compiled, losses, rtol=1e-3, atol=1e-3)


def test_polygons_are_regular():
    example = load("meanflow")
    points, polygon = example.polygons(5)
    assert example.roughness(points, polygon) < 1e-5
    assert torch.bincount(polygon).sort().values.tolist() == [
        n for n in (3, 4, 5, 6) for _ in range(5)
    ]


def test_packed_functions_are_whole():
    example = load("generate")
    texts = example.functions()
    rows = example.pack(texts[:20], 64)
    text = bytes(32 if t == example.BEGIN else t for t in rows.flatten().tolist())
    assert text.startswith(b" def ")
    assert (rows == example.BEGIN).sum() >= 10


def test_lora_learns_and_leaves_the_base_alone():
    losses = load("finetune_lora").main("--steps 40 --length 256".split())
    assert losses["after"] < 0.2 * losses["before"]
    assert losses["kept"] < 0.5


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_is(name, capsys):
    example = load(name)
    assert len(example.__doc__.splitlines()) > 5
    assert re.search(rf"python examples/{name}.py  .*(second|minute)", example.__doc__)
    with pytest.raises(SystemExit) as end:
        example.main(["--help"])
    assert end.value.code == 0
    assert "--steps" in capsys.readouterr().out


def test_all_are_listed():
    listed = re.findall(r"\]\((\w+)\.py\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == NAMES
