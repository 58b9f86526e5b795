"""Thirty of the families that `scripts/hf_families.py` compares."""

from importlib import util
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers 5 is not installed")

PATH = Path(__file__).parents[2] / "scripts" / "hf_families.py"
FAMILIES = (
    "arcee bart bert cohere2 deepseek_v32 ernie4_5 exaone4 gemma2 gemma3 glm4 glm_moe_dsa gpt2 "
    "gpt_neox gpt_oss granite hy_v4 llama minimax_m3_vl mistral mistral3 mixtral modernbert "
    "olmo2 opt phi3 qwen3 qwen3_moe starcoder2 t5 vit"
).split()


@pytest.fixture(scope="module")
def script():
    spec = util.spec_from_file_location("hf_families", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_is_that_of_eager(family, script):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if family not in CONFIG_MAPPING_NAMES:
        pytest.skip("this transformers has no such family")
    found = script.compare(family, quick=True)
    assert found["result"] == "same", found


def test_what_differs_is_said(script):
    assert len(FAMILIES) == 30
    first = {"forward": script.torch.ones(3), "generation": script.torch.arange(3)}
    other = {
        "forward": script.torch.tensor([1, 1, 1.5]),
        "generation": script.torch.tensor([0, 1, 9]),
    }
    assert script.differences(first, other) == {"forward": 0.5, "generation": 1.0}
    found = {"llama": {"result": "same"}, "odd": {"result": "differs", "why": "forward 0.5"}}
    text = script.page(found)
    assert "| Equal to `eager` | 1 |" in text
    assert "| odd | forward 0.5 |" in text
    assert script.compare("no_such_family")["result"] == "not compared"
