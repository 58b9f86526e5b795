"""Tiny randomly initialised Hugging Face models: the same as with their own eager attention."""

import copy

import pytest
import torch

hf = pytest.importorskip("transformers", reason="transformers 5 is not installed")
if int(hf.__version__.split(".")[0]) < 5:
    pytest.skip(f"transformers {hf.__version__} is older than 5", allow_module_level=True)

from headway.errors import ArgumentError, BackendRefused  # noqa: E402
from headway.integrations import transformers as integration  # noqa: E402

hf.logging.set_verbosity_error()
integration.register()

SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
MLA = {k: v for k, v in SMALL.items() if k not in ("head_dim", "num_key_value_heads")} | {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}  # fmt: skip
GEMMA = {"sliding_window": 5, "query_pre_attn_scalar": 16}
DECODERS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SMALL, sliding_window=5)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**SMALL, **GEMMA, attn_logit_softcapping=5.0)
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**SMALL | {"num_hidden_layers": 3}, **GEMMA, sliding_window_pattern=3)
    ),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**SMALL, sliding_window=5, num_local_experts=4, num_experts_per_tok=2)
    ),
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**MLA)),
}
TOLERANCE = {"rtol": 1e-4, "atol": 5e-6}


def both(make, run):
    """What `run(model)` gives with eager and with headway, on the same weights."""
    results = []
    model = make()
    with torch.no_grad():  # sinks and norms start at 0 or 1; let them matter
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    for implementation in ("eager", "headway"):
        twin = copy.deepcopy(model)
        twin.set_attn_implementation(implementation)
        results.append(run(twin))
    return results


def same(results):
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:  # float32 through two layers: relative to the tensor's largest number
            assert (a - b).abs().max() <= 1e-5 * (1 + a.abs().max())


def trained(kept=None, **inputs):
    """The outputs that count, and the gradient of every parameter."""

    def run(model):
        model.train()
        out = model(**inputs)
        out = out.logits if hasattr(out, "logits") else out.last_hidden_state
        out = out if kept is None else out[kept]
        weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
        (out * weight).sum().backward()
        grads = [p.grad for p in model.parameters()]
        assert sum(g is not None for g in grads) > len(grads) // 2
        return [out.detach(), *grads]

    return run


@pytest.fixture
def tokens():
    return torch.randint(1, 64, (2, 17))


@pytest.fixture
def left_padded():
    kept = torch.ones(2, 17, dtype=torch.long)
    kept[0, :4] = 0
    return kept


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_forward_and_every_gradient(name, tokens):
    same(both(DECODERS[name], trained(input_ids=tokens)))


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_with_padding(name, tokens, left_padded):
    run = trained(left_padded.bool(), input_ids=tokens, attention_mask=left_padded)
    same(both(DECODERS[name], run))


def test_long_sequences_of_many_tiles():
    tokens = torch.randint(1, 64, (1, 300))
    make = lambda: hf.MistralForCausalLM(
        hf.MistralConfig(**SMALL | {"max_position_embeddings": 512}, sliding_window=40)
    )
    same(both(make, trained(input_ids=tokens)))


@pytest.mark.parametrize("name", DECODERS)
def test_packed_sequences(name, tokens):
    positions = torch.cat([torch.arange(6), torch.arange(8), torch.arange(3)]).expand(2, -1)
    run = trained(input_ids=tokens, position_ids=positions, use_cache=False)
    results = both(DECODERS[name], run)
    same(results)
    if name == "llama":  # and every document is as it is alone
        model = DECODERS[name]()
        model.set_attn_implementation("headway")
        packed = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        alone = model(input_ids=tokens[:, 6:14], use_cache=False).logits
        torch.testing.assert_close(packed[:, 6:14], alone, **TOLERANCE)


def test_packing_that_transformers_ignores_is_warned_about(tokens):
    positions = torch.cat([torch.arange(6), torch.arange(11)]).expand(2, -1)
    model = DECODERS["llama"]()
    model.set_attn_implementation("headway")
    with pytest.warns(UserWarning, match="documents see each other"):
        model(input_ids=tokens, position_ids=positions)


def test_packed_sequences_by_their_offsets(tokens):
    model = DECODERS["llama"]()
    model.set_attn_implementation("headway")
    offsets = torch.tensor([0, 6, 14, 17], dtype=torch.int32)
    positions = torch.cat([torch.arange(6), torch.arange(8), torch.arange(3)])[None]
    packed = model(
        input_ids=tokens[:1], position_ids=positions, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets,
        max_length_q=8, max_length_k=8, use_cache=False,
    ).logits  # fmt: skip
    for start, stop in ((0, 6), (6, 14), (14, 17)):
        alone = model(input_ids=tokens[:1, start:stop]).logits
        torch.testing.assert_close(packed[:, start:stop], alone, **TOLERANCE)


def test_masks_of_four_dimensions(tokens):
    kept = (torch.rand(2, 1, 17, 17) < 0.7).tril() | torch.eye(17, dtype=torch.bool)
    added = torch.zeros(2, 1, 17, 17).masked_fill(~kept, torch.finfo(torch.float32).min)
    same(both(DECODERS["llama"], trained(input_ids=tokens, attention_mask=added)))
    model = DECODERS["llama"]()
    model.set_attn_implementation("headway")
    by_bool, by_float = (model(input_ids=tokens, attention_mask=m).logits for m in (kept, added))
    torch.testing.assert_close(by_bool, by_float, **TOLERANCE)


SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OTHERS = {
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=64, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, num_decoder_layers=1,
            dropout_rate=0.0, decoder_start_token_id=0,
        )
    ),
    "bert": lambda: hf.BertModel(
        hf.BertConfig(vocab_size=64, intermediate_size=96, **SIZES, **NO_DROPOUT),
        add_pooling_layer=False,
    ),
    "vit": lambda: hf.ViTModel(
        hf.ViTConfig(intermediate_size=96, image_size=16, patch_size=4, **SIZES, **NO_DROPOUT),
        add_pooling_layer=False,
    ),
}  # fmt: skip


def trained_other(name, tokens, kept=None):
    """As `trained`, with the inputs that the model takes; T5 has a decoder with keys of its own."""
    if name == "vit":
        return trained(pixel_values=torch.randn(2, 3, 16, 16))
    inputs = {"input_ids": tokens, "attention_mask": kept}
    if name == "t5":
        return trained(**inputs, decoder_input_ids=torch.randint(1, 64, (2, 9)))
    return trained(None if kept is None else kept.bool(), **inputs)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_encoders_forward_and_every_gradient(name, padded, tokens, left_padded):
    """Position bias, cross-attention and padding on the right; no mask at all."""
    kept = left_padded.flip(1) if padded else None
    same(both(OTHERS[name], trained_other(name, tokens, kept)))


@pytest.mark.parametrize("name", OTHERS)
def test_encoders_checkpoint_and_compile_whole(name, tokens, left_padded):
    torch._dynamo.reset()
    run = trained_other(name, tokens, left_padded.flip(1))

    def checkpointed(model):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return run(model)

    def compiled(model):
        if model.config._attn_implementation == "headway":
            model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        return run(model)

    same(both(OTHERS[name], checkpointed))
    same(both(OTHERS[name], compiled))


def test_t5_generates(tokens, left_padded):
    def run(model):
        kept = left_padded.flip(1)
        return model.eval().generate(tokens, attention_mask=kept, max_new_tokens=6, do_sample=False)

    assert torch.equal(*both(OTHERS["t5"], run))


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate_with_left_padding_and_caches(name, cache, tokens, left_padded):
    def run(model):
        return model.eval().generate(
            tokens, attention_mask=left_padded, max_new_tokens=6, do_sample=False,
            cache_implementation=cache,
        )  # fmt: skip

    assert torch.equal(*both(DECODERS[name], run))


@pytest.mark.parametrize("name", DECODERS)
def test_gradient_checkpointing(name, tokens, left_padded):
    def run(model):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return trained(left_padded.bool(), input_ids=tokens, attention_mask=left_padded)(model)

    same(both(DECODERS[name], run))


def test_autocast(tokens):
    def run(model):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            return model(input_ids=tokens).logits.float()

    eager, ours = both(DECODERS["gemma2"], run)
    torch.testing.assert_close(ours, eager, rtol=0.05, atol=0.05)


# Mistral and Qwen 3 compile as Llama does: a window is a mask, a norm is theirs.
@pytest.mark.parametrize("name", [name for name in DECODERS if name not in ("mistral", "qwen3")])
def test_compiles_whole(name, tokens):
    torch._dynamo.reset()

    def run(model):
        if model.config._attn_implementation == "headway":
            model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        return trained(input_ids=tokens)(model)

    same(both(DECODERS[name], run))


def test_dropout_is_honoured():
    config = hf.LlamaConfig(**SMALL, attention_dropout=0.5)
    model = hf.LlamaForCausalLM(config)
    model.set_attn_implementation("headway")
    tokens = torch.randint(1, 64, (2, 17))
    torch.manual_seed(0)
    first = model.train()(tokens).logits
    second = model(tokens).logits
    torch.manual_seed(0)
    assert torch.equal(model(tokens).logits, first)
    assert not torch.equal(first, second)
    assert torch.equal(model.eval()(tokens).logits, model(tokens).logits)


# -- refused --------------------------------------------------------------------------------------


def call(**kwargs):
    q = torch.randn(1, 2, 5, 8)
    mask = kwargs.pop("attention_mask", None)
    return integration.attention_forward(torch.nn.Module(), q, q, q, mask, **kwargs)


@pytest.mark.parametrize("name", ["indices", "block_indices", "head_mask", "anything_new"])
def test_what_is_not_honoured_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=name):
        call(**{name: torch.zeros(1)})
    out, weights = call(**{name: None})
    assert out.shape == (1, 5, 2, 8)
    assert weights is None


def test_weights_and_odd_masks_are_refused():
    with pytest.raises(BackendRefused, match="output_attentions"):
        call(output_attentions=True)
    with pytest.raises(ArgumentError, match="attention_mask must be"):
        call(attention_mask=torch.ones(1, 5))


def test_sparse_models_are_refused_rather_than_made_dense(tokens):
    config = hf.DeepseekV32Config(**MLA, index_topk=4, index_n_heads=2, index_head_dim=16)
    model = hf.DeepseekV32ForCausalLM(config)
    model.set_attn_implementation("headway")
    with pytest.raises(NotImplementedError, match="indices"):
        model(tokens)


def test_a_window_without_a_mask_is_honoured():
    class Causal(torch.nn.Module):
        is_causal = True

    q, k = torch.randn(1, 2, 7, 8), torch.randn(1, 2, 9, 8)
    out, _ = integration.attention_forward(Causal(), q, k, k, None, sliding_window=3)
    i, j = torch.arange(7)[:, None] + 2, torch.arange(9)
    kept = (j <= i) & (i - j < 3)
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, k, kept)
    torch.testing.assert_close(out.transpose(1, 2), truth, **TOLERANCE)
