"""Run a tiny random model of every family of transformers with "eager" and with "headway".

    scripts/hf_families.py                    all families, and the table to docs/lab/hugging-face.md
    scripts/hf_families.py llama gpt_oss      these, printed alone

Of every family: the forward, all gradients, rows with padding, generation after padding. Where
Headway does not run, "sdpa" is tried. A family runs in a process of its own with a time limit.
"""

import argparse
import contextlib
import copy
import inspect
import json
import os
import signal
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "lab" / "hugging-face.md"
LENGTH, TOLERANCE = 13, 2e-5

# The sizes of tiny models, by the names that configurations have for them.
SIZES = {
    64: "hidden_size d_model n_embd dim embed_dim model_dim hidden_dim emb_dim encoder_hidden_size "
    "decoder_hidden_size text_hidden_size d_embed embedding_size word_embed_proj_dim projection_dim",
    96: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size "
    "intermediate_size_mlp shared_expert_intermediate_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_encoder_layers num_decoder_layers num_experts_per_tok num_experts_per_token top_k moe_topk "
    "index_n_heads num_experts_per_topk moe_top_k",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads index_topk "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts",
    1: "n_group topk_group first_k_dense_replace n_shared_experts num_nextn_predict_layers",
    16: "head_dim v_head_dim d_kv index_head_dim kv_lora_rank attention_head_size",
    24: "q_lora_rank",
    8: "qk_rope_head_dim qk_nope_head_dim patch_size",
    32: "moe_intermediate_size image_size",
    128: "vocab_size max_position_embeddings n_positions max_seq_len n_ctx max_sequence_length",
    5: "sliding_window attention_window sliding_window_size",
}
FIELDS = {name: size for size, names in SIZES.items() for name in names.split()}
KEY_HEADS = "num_key_value_heads num_kv_heads n_kv_heads multi_query_group_num".split()
# What is tried until a model can be built and runs: other numbers for some names; None is removed.
ATTEMPTS: tuple[dict[str, Any], ...] = (
    dict.fromkeys(KEY_HEADS, 2),
    dict.fromkeys(KEY_HEADS, 4),
    dict.fromkeys(KEY_HEADS, 4) | {"head_dim": None, "attention_head_size": None},
    dict.fromkeys(KEY_HEADS, 4) | {"num_hidden_layers": None, "num_layers": None},
    dict.fromkeys(KEY_HEADS, 4) | {"qk_nope_head_dim": 16, "intermediate_size": 64},
)
SMALL = 40_000_000  # parameters


class Skip(Exception):
    """Raised where a family cannot be compared, with the reason."""


class Kept(Exception):
    """Raised where transformers does not take an implementation for a model."""


def tiny_config(kind: type, attempt: dict[str, Any]) -> Any:
    """Return a small configuration of a class, and of the parts that it has."""
    default = kind()
    values = default.to_dict()
    own: dict[str, Any] = {}
    for name, size in (FIELDS | attempt).items():
        if type(values.get(name)) is int and size is not None:
            own[name] = size
    layers = next((own[n] for n in ("num_hidden_layers", "num_layers", "n_layer") if n in own), 2)
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        if isinstance(kinds := values.get(name), list):  # of every kind one, as far as they go
            several = [*dict.fromkeys(kinds), *kinds]
            own[name] = several[:layers] if name == "layer_types" else kinds[:layers]
    for name, part in (getattr(kind, "sub_configs", None) or {}).items():
        if getattr(default, name, None) is not None:
            part = type(getattr(default, name)) if "Auto" in part.__name__ else part
            own[name] = tiny_config(part, attempt).to_dict()
    special = {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1}
    own |= {name: token for name, token in special.items() if name in values}
    return kind(**own)


def model_class(family: str) -> Any:
    """Return the class of a family that is compared: one with a head over text, if there is."""
    import transformers as hf
    from transformers.models.auto import modeling_auto as auto

    for table in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_MAPPING_NAMES,
    ):
        name = table.get(family)
        cls = getattr(hf, name, None) if isinstance(name, str) else None
        if cls is not None and cls.config_class is not None:
            return cls
    raise Skip("no class of a model")


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """Return two rows of tokens, or two images."""
    generator = torch.Generator().manual_seed(1)
    names = inspect.signature(model.forward).parameters
    config = model.config
    if "input_ids" in names:
        tokens = torch.randint(3, 100, (2, LENGTH), generator=generator)
        return {"input_ids": tokens} | (
            {"decoder_input_ids": tokens.flip(1)} if config.is_encoder_decoder else {}
        )
    if "pixel_values" in names:
        size = getattr(config, "image_size", None) or 32
        height, width = (size, size) if isinstance(size, int) else size[-2:]
        channels = getattr(config, "num_channels", 3)
        return {"pixel_values": torch.randn(2, channels, height, width, generator=generator)}
    raise Skip(f"takes {model.main_input_name}")


def build(family: str) -> Any:
    """Return a tiny model that runs with "eager", its weights random throughout."""
    cls, error = model_class(family), None
    for attempt in ATTEMPTS:
        try:
            torch.manual_seed(0)
            config = tiny_config(cls.config_class, attempt)
            with torch.device("meta"):
                count = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
            if count > SMALL:
                raise Skip(f"{count / 1e6:.0f} million parameters")
            model = cls._from_config(config, attn_implementation="eager").eval()
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.randn_like(p) * (0.2 if p.dim() > 1 else 0.1) + (p.dim() == 1))
                model(**inputs_of(model))
            return model
        except Exception as problem:  # noqa: BLE001 - the next attempt
            error = error or problem
    raise Skip(f"no tiny configuration: {_first_line(error)}")


def run(model: Any, implementation: str, quick: bool = False) -> dict[str, Any]:
    """Return what a model gives with an implementation: numbers by name."""
    model = copy.deepcopy(model)
    model.set_attn_implementation(implementation)
    if model.config._attn_implementation != implementation:
        raise Kept(f"transformers keeps {model.config._attn_implementation}, and says so")
    inputs = inputs_of(model)
    results: dict[str, Any] = {}
    torch.manual_seed(0)
    out = _numbers(model(**inputs))
    results["forward"] = out.detach()
    if out.requires_grad:
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        results["gradients"] = torch.cat([g.flatten() for g in grads])
    if "input_ids" not in inputs:
        return results
    kept = torch.ones(2, LENGTH, dtype=torch.long)
    kept[0, :4] = 0
    with torch.no_grad():
        for side, mask in (("left", kept), ("right", kept.flip(1))):
            if side == "right" and quick:
                continue
            out = _numbers(model(**inputs, attention_mask=mask))
            by_token = out.shape[:2] == mask.shape and not model.config.is_encoder_decoder
            results[f"{side} padding"] = out[mask.bool()] if by_token else out
        if model.can_generate():
            options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
            options["eos_token_id"] = -1
            if model.config.is_encoder_decoder:
                options["decoder_start_token_id"] = 1
            results["generation"] = model.generate(
                inputs["input_ids"], attention_mask=kept, **options
            )
    return results


def _numbers(out: Any) -> torch.Tensor:
    for name in ("logits", "last_hidden_state", "prediction_logits", "pooler_output"):
        if isinstance(getattr(out, name, None), torch.Tensor):
            return getattr(out, name)
    raise Skip("no logits and no hidden state")


def differences(first: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Return by how much results differ, relative to their largest number."""
    by_name = {}
    for name, x in first.items():
        y = other[name]
        if x.shape != y.shape:
            by_name[name] = float("inf")
        elif x.dtype.is_floating_point:
            scale = float(x.abs().max()) or 1.0
            gap = float((x - y).abs().nan_to_num(float("inf")).max())
            by_name[name] = gap / scale if x.isfinite().all() else 0.0 if x.equal(y) else gap
        else:
            by_name[name] = float((x != y).sum())
    return by_name


def compare(family: str, quick: bool = False) -> dict[str, Any]:
    """Return {"result": ..., "why": ..., "differences": ...} of a family."""
    import transformers as hf

    from headway.errors import ArgumentError, BackendRefused
    from headway.integrations import transformers as integration

    hf.logging.set_verbosity_error()
    integration.register()
    calls = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return integration.attention_forward(*args, **kwargs)

    try:
        model = build(family)
        wanted = run(model, "eager", quick)
    except Skip as skip:
        return {"result": "not compared", "why": str(skip)}
    except Exception as error:  # noqa: BLE001 - of the tiny configuration
        return {"result": "not compared", "why": f"eager fails: {_first_line(error)}"}
    hf.AttentionInterface.register("headway", counting)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            results = run(model, "headway", quick)
    except Kept as kept:
        return {"result": "own attention", "why": str(kept)}
    except (ArgumentError, BackendRefused) as error:
        return {"result": "refused", "why": _first_line(error), "sdpa": _sdpa(model, wanted, quick)}
    finally:
        hf.AttentionInterface.register("headway", integration.attention_forward)
    gaps = differences(wanted, results)
    if not calls:
        warned = any("headway is not used" in str(w.message) for w in said)
        way = "a warning names it" if warned else "nothing is said"
        return {"result": "own attention", "why": way}
    wrong = [name for name, gap in gaps.items() if not gap <= TOLERANCE]
    if wrong and not quick:  # rounding, if float64 agrees
        with contextlib.suppress(Exception):  # some models compute in float32 alone
            double = copy.deepcopy(model).double()
            exact = differences(run(double, "eager"), run(double, "headway"))
            wrong = [] if all(gap <= 1e-9 for gap in exact.values()) else wrong
    if not wrong:
        return {"result": "same", "differences": gaps}
    why = ", ".join(f"{name} {gaps[name]:.1e}" for name in wrong)
    return {"result": "differs", "why": why, "sdpa": _sdpa(model, wanted, quick)}


def _sdpa(model: Any, wanted: dict[str, Any], quick: bool) -> str:
    """Return what "sdpa" makes of the model."""
    try:
        gaps = differences(wanted, run(model, "sdpa", quick))
    except Exception as error:  # noqa: BLE001 - it does not run
        return f"sdpa fails: {_first_line(error)}"
    wrong = [f"{name} {gap:.1e}" for name, gap in gaps.items() if not gap <= TOLERANCE]
    return f"sdpa differs, too: {', '.join(wrong)}" if wrong else "sdpa runs"


def _first_line(error: Any) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2] if "validator" in lines[0] else lines[:1]) if lines else ""
    return f"{type(error).__name__}: {text[:200]}"


def in_process(family: str, limit: int) -> dict[str, Any]:
    """Return the comparison of a family, from a fork of this process that ends in time."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(limit)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os.write(write, json.dumps(compare(family)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        return json.loads(text)
    ended = f"more than {limit} seconds" if os.WTERMSIG(status) == signal.SIGALRM else f"{status=}"
    return {"result": "not compared", "why": ended}


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return the table of all families."""
    import transformers as hf

    groups = defaultdict(list)
    for family, found in sorted(results.items()):
        groups[found["result"]].append(family)
    titles = {
        "same": "Equal to `eager`",
        "differs": "Differs from `eager`",
        "refused": "Refused by a sentence",
        "own attention": "Runs its own attention",
        "not compared": "Not compared",
    }
    lines = [
        "# Families of Hugging Face transformers", "",
        "Written by `scripts/hf_families.py`; do not edit. Tiny random models with `eager` and with",
        f"`headway`: transformers {hf.__version__}, PyTorch {torch.__version__}, float32 on the CPU.",
        "Compared are the forward, every gradient, rows padded on the left and on the right, and",
        f"generation after padding. Equal: the largest difference is at most {TOLERANCE} of the",
        "largest number (or 1e-9 in float64), and all tokens are equal.", "",
        "| result | families |", "| --- | --- |",
        *[f"| {title} | {len(groups[key])} |" for key, title in titles.items()],
    ]  # fmt: skip
    for key, title in titles.items():
        lines += ["", f"## {title}", ""]
        if key == "same":
            lines.append(", ".join(groups[key]) + ".")
            continue
        lines += ["| family | why |", "| --- | --- |"]
        for family in groups[key]:
            why = "; ".join(
                str(results[family][n]) for n in ("why", "sdpa") if results[family].get(n)
            )
            lines.append(f"| {family} | {why.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("families", nargs="*")
    parser.add_argument("--limit", type=int, default=60, help="seconds for a family")
    parser.add_argument("--log", type=Path, help="file of results, which a second run continues")
    options = parser.parse_args()
    torch.set_num_threads(1)
    compare("llama")  # what it imports, forks have
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    results = {}
    if options.log and options.log.exists():
        results = dict(json.loads(line) for line in options.log.read_text().splitlines())
    for family in options.families or CONFIG_MAPPING_NAMES:
        if family not in results:
            results[family] = in_process(family, options.limit)
            if options.log:
                with options.log.open("a") as log:
                    log.write(json.dumps((family, results[family])) + "\n")
        print(f"{family:28} {results[family]}", flush=True)
    if not options.families:
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
