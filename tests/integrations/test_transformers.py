"""Tiny randomly initialised Hugging Face models: the same as with their own eager attention."""

import copy
import importlib
import random
import warnings

import pytest
import torch

hf = pytest.importorskip("transformers", reason="transformers 5 is not installed")
VERSION = tuple(int(part) for part in hf.__version__.split(".")[:2])
if VERSION < (5, 17):
    pytest.skip(f"transformers {hf.__version__} is older than 5.17", allow_module_level=True)

from headway import call_cache  # noqa: E402
from headway.errors import ArgumentError, BackendRefused  # noqa: E402
from headway.integrations import transformers as integration  # noqa: E402
from long import long_unless  # noqa: E402

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
        hf.Gemma3TextConfig(**SMALL, **GEMMA, sliding_window_pattern=2)
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


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("is_causal", [True, False])
def test_documents_with_more_keys_than_queries(is_causal, window):
    """The last query of each document is at its last key, as in flash-attn, and no token after the
    last document sees anything."""
    cu_q, cu_k = torch.tensor([0, 2, 2, 5]).int(), torch.tensor([0, 5, 6, 10]).int()
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 12, 8)
    module = torch.nn.Module()
    call = lambda *offsets: integration.attention_forward(
        module, q, k, k, None, is_causal=is_causal, sliding_window=window,
        cu_seq_lens_q=offsets[0], cu_seq_lens_k=offsets[1],
    )[0].transpose(1, 2)  # fmt: skip
    out = call(cu_q, cu_k)
    for n in range(3):
        i, j = (slice(*cu[n : n + 2].tolist()) for cu in (cu_q, cu_k))
        q_len, kv_len = i.stop - i.start, j.stop - j.start
        distance = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)
        seen = (distance >= 0) | (not is_causal)
        seen &= distance < window if window else True
        truth = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, i], k[:, :, j], k[:, :, j], seen
        )
        torch.testing.assert_close(out[:, :, i], truth, **TOLERANCE)
    assert not out[:, :, 5:].any()
    for wrong in (torch.tensor([0, 2, 2, 7]).int(), cu_q.float(), cu_q[:3]):
        with pytest.raises(ArgumentError, match=r"cu_seq_lens_q must|numbers of sequences"):
            call(wrong, cu_k)


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


@pytest.mark.parametrize("name", long_unless(("t5", "vit"), OTHERS))  # T5's encoder is padded, too
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


# Mistral and Qwen 3 compile as Llama does: a window is a mask, a norm is theirs. Llama's own compiles
# over ranks (`distributed/test_frameworks.py`) and in steps (below).
@pytest.mark.parametrize(
    "name",
    long_unless(
        [name for name in DECODERS if name != "llama"],
        [name for name in DECODERS if name not in ("mistral", "qwen3")],
    ),
)
def test_compiles_whole(name, tokens):
    if name in ("gpt_oss", "deepseek_v3") and VERSION < (5, 23):
        pytest.skip("its experts do not compile whole, nor with its own attention")
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


# -- packed by the number of each token's document ------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_packed_sequences_by_seq_idx(name, tokens):
    """Every document is as it is alone, and as `cu_seq_lens` and `position_ids` make it."""
    model = DECODERS[name]().eval()
    model.set_attn_implementation("headway")
    positions = torch.cat([torch.arange(6), torch.arange(8), torch.arange(3)]).expand(2, -1)
    ids = torch.tensor([0] * 6 + [1] * 8 + [2] * 3, dtype=torch.int32).expand(2, -1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is seen that should not be
        packed = model(tokens, position_ids=positions, seq_idx=ids).logits
        of_one_row = model(tokens, position_ids=positions, seq_idx=ids[:1]).logits
    torch.testing.assert_close(of_one_row, packed, **TOLERANCE)
    for start, stop in ((0, 6), (6, 14), (14, 17)):
        alone = model(tokens[:, start:stop]).logits
        torch.testing.assert_close(packed[:, start:stop], alone, **TOLERANCE)
    offsets = torch.tensor([0, 6, 14, 17], dtype=torch.int32)
    more = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "seq_idx": ids}
    together = model(tokens, position_ids=positions, use_cache=False, **more).logits
    torch.testing.assert_close(together, packed, **TOLERANCE)


def test_seq_idx_of_each_row_and_of_a_cache():
    """Rows are packed differently; negative numbers are padding, which no document sees."""
    ids = torch.tensor([[0, 0, 0, 1, 1, -1, -1], [4, 4, 4, 4, 4, 4, 2]], dtype=torch.int32)
    q, k = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 7, 8)
    module = torch.nn.Module()
    module.is_causal = True
    out, _ = integration.attention_forward(module, q, k, k, None, seq_idx=ids)
    kept = (ids[:, 4:, None] == ids[:, None]) & (torch.arange(7) <= torch.arange(4, 7)[:, None])
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, k, kept[:, None])
    torch.testing.assert_close(out.transpose(1, 2), truth, **TOLERANCE)
    for wrong in (ids[:, :3], ids[0], torch.cat([ids, ids])):
        with pytest.raises(ArgumentError, match="seq_idx must be"):
            integration.attention_forward(module, q, k, k, None, seq_idx=wrong)


# -- models that look at their mask ---------------------------------------------------------------


def deepseek_v4(*layers):
    return lambda: hf.DeepseekV4ForCausalLM(
        hf.DeepseekV4Config(
            vocab_size=64, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, head_dim=16, q_lora_rank=24, n_routed_experts=4,
            num_experts_per_tok=2, index_n_heads=2, index_head_dim=16, index_topk=4,
            layer_types=list(layers), pad_token_id=0, eos_token_id=None,
        )
    )  # fmt: skip


CURIOUS = {
    "deepseek_v4": deepseek_v4("heavily_compressed_attention", "compressed_sparse_attention"),
    "deepseek_v4_sliding": deepseek_v4("sliding_attention", "compressed_sparse_attention"),
    "doge": lambda: hf.DogeForCausalLM(hf.DogeConfig(**SMALL)),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", CURIOUS)
def test_models_that_look_at_their_mask(name, padded, tokens, left_padded):
    """DeepSeek V4 lengthens it, Doge selects by it: in both it is the mask of "eager"."""
    more = {"attention_mask": left_padded.flip(1)} if padded else {}
    kept = left_padded.flip(1).bool() if padded else None
    same(both(CURIOUS[name], trained(kept, input_ids=tokens, **more)))


@pytest.mark.parametrize("name", ["deepseek_v4", "doge"])
def test_models_that_look_at_their_mask_generate(name, tokens):
    run = lambda m: m.eval().generate(tokens, max_new_tokens=4, do_sample=False)
    assert torch.equal(*both(CURIOUS[name], run))


def test_an_encoder_that_repeats_its_mask():
    """Siglip 2 gives it to an `nn.MultiheadAttention`."""
    make = lambda: hf.Siglip2VisionModel(
        hf.Siglip2VisionConfig(
            intermediate_size=48, num_patches=16, patch_size=4, attention_dropout=0.0, **SIZES
        )
    )
    inputs = {
        "pixel_values": torch.randn(2, 16, 48),
        "pixel_attention_mask": torch.tensor([[1] * 16, [1] * 12 + [0] * 4]),
        "spatial_shapes": torch.tensor([[4, 4], [3, 4]]),
    }
    same(both(make, lambda model: [model(**inputs).pooler_output.detach()]))


def test_a_decoder_that_joins_two_masks(tokens, left_padded):
    """T5 Gemma 2 attends to itself and to the encoder at once."""
    text = SMALL | GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}
    vision = {"intermediate_size": 48, "image_size": 16, "patch_size": 8} | SIZES
    make = lambda: hf.T5Gemma2ForConditionalGeneration(
        hf.T5Gemma2Config(
            encoder={"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4},
            decoder=text, vocab_size=64, eoi_token_index=61, image_token_index=62,
        )
    )  # fmt: skip
    inputs = {"input_ids": tokens.clamp(max=60), "decoder_input_ids": tokens[:, :7].clamp(max=60)}
    for kept in (None, left_padded.flip(1)):
        run = lambda m, kept=kept: [m.eval()(**inputs, attention_mask=kept).logits.detach()]
        same(both(make, run))


def test_a_model_that_looks_is_refused_under_a_compiler(tokens):
    model = CURIOUS["deepseek_v4"]().eval()
    model.set_attn_implementation("headway")
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="attention_mask is for"):
        compiled(tokens)


# -- the mask is a tensor -------------------------------------------------------------------------


def made(padded=False, window=None, dtype=torch.float32, batch=2, q_len=5, kv_len=7):
    """A mask as a model has it, and that of eager."""
    from transformers import masking_utils

    function = masking_utils.causal_mask_function
    if window is not None:
        function = masking_utils.sliding_window_causal_mask_function(window)
    padding = torch.rand(batch, kv_len) < 0.7 if padded else None
    sizes = {"batch_size": batch, "q_length": q_len, "kv_length": kv_len}
    given = {"q_offset": kv_len - q_len, "mask_function": function, "attention_mask": padding}
    arguments = sizes | given | {"dtype": dtype}
    return integration.attention_mask(**arguments), masking_utils.eager_mask(**arguments)


LOOKS = {
    "index": lambda m: m[:, :, 1:, :3],
    "cat": lambda m: torch.cat([m, m.new_ones(m.shape)], dim=-1),
    "plus": lambda m: torch.ones(3, *m.shape[1:])[:1] + m,
    "repeat": lambda m: m.repeat(1, 3, 1, 1),
    "expand": lambda m: m.expand(-1, 3, -1, -1),
    "bool": lambda m: m.bool(),
    "where": lambda m: torch.where(m == 0, 1.0, 2.0),
    "any": lambda m: (m < 0).any(-1),
    "size": lambda m: torch.tensor([*m.size(), m.size(-1), m.dim(), len(m), m.numel()]),
    "of": lambda m: torch.tensor([m.dtype == torch.float32, m.is_floating_point(), m.ndim == 4]),
    "half": lambda m: m.half(),
    "numpy": lambda m: torch.from_numpy(m.numpy().copy()),
    "copy": lambda m: copy.deepcopy(m),
    "sdpa": lambda m: torch.nn.functional.scaled_dot_product_attention(
        torch.ones(2, 1, 5, 4), torch.ones(2, 1, 7, 4), torch.arange(56.0).view(2, 1, 7, 4), m
    ),
}


@pytest.mark.parametrize("look", LOOKS)
def test_what_a_model_does_to_its_mask_it_does_to_that_of_eager(look):
    for padded, window in ((False, None), (True, None), (True, 3)):
        ours, eager = made(padded, window)
        assert isinstance(ours, torch.Tensor)
        seen = LOOKS[look](ours)
        assert type(seen) is torch.Tensor
        torch.testing.assert_close(seen, LOOKS[look](eager))


def attend(mask, query, key):
    return integration.attention_forward(torch.nn.Module(), query, key, key, mask)[0]


WRITES = {
    "item": lambda m: m.__setitem__((0, 0, 4, slice(None)), 0.0),
    "view": lambda m: m[0, 0].fill_(0.0),
    "in place": lambda m: m.masked_fill_(m < 0, 0.0),
    "data": lambda m: m.data.zero_(),
    "set data": lambda m: setattr(m, "data", torch.zeros(m.shape)),
    "numpy": lambda m: m.numpy().fill(0.0),
    "add": lambda m: m.add_(torch.rand(m.shape)),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_to_a_mask_take_effect(write):
    q, k = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 7, 8)
    ours, eager = made(padded=True)
    before = attend(ours, q, k)
    torch.manual_seed(1)
    WRITES[write](ours)
    torch.manual_seed(1)
    WRITES[write](eager)
    torch.testing.assert_close(attend(ours, q, k), attend(eager, q, k), **TOLERANCE)
    assert not torch.equal(attend(ours, q, k), before)


@pytest.mark.parametrize("write", WRITES)
def test_writes_in_inference_mode_take_effect(write):
    with torch.inference_mode():
        q, k = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 7, 8)
        ours, eager = made(padded=True)
        for mask in (ours, eager):
            torch.manual_seed(1)
            WRITES[write](mask)
        torch.testing.assert_close(attend(ours, q, k), attend(eager, q, k), **TOLERANCE)


def test_masks_move_with_their_tensors():
    """As accelerate moves them from layer to layer; reduced precision leaves them functions."""
    ours, eager = made(padded=True, window=3)
    assert ours.to("cpu") is ours
    assert ours.to(torch.bfloat16).mask is ours.mask
    assert ours.to(torch.bfloat16).dtype == torch.bfloat16
    assert type(ours.to(torch.int64)) is torch.Tensor
    moved = ours.to("meta")
    assert moved.device.type == "meta"
    assert moved is ours.to("meta")
    assert not moved.taken
    q, k = torch.randn(2, 2, 5, 8, device="meta"), torch.randn(2, 2, 7, 8, device="meta")
    assert all(x.device.type == "meta" for x in tensors_of(moved.mask))
    q, k = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 7, 8)
    out = attend(ours.to(torch.bfloat16), q, k)
    torch.testing.assert_close(out, attend(eager, q, k), **TOLERANCE)


def tensors_of(part):
    if isinstance(part, torch.Tensor):
        return [part]
    return [x for name in getattr(part, "fields", ()) for x in tensors_of(getattr(part, name))]


def test_a_users_mask_function_moves_as_its_square():
    ids = torch.tensor([0, 0, 1, 1, 1])
    ours = integration.attention_mask(2, 5, 5, mask_function=lambda b, h, i, j: ids[i] == ids[j])
    moved = ours.to("meta")
    assert [x.device.type for x in tensors_of(moved.mask)] == ["meta"]


@pytest.mark.parametrize("seed", range(30))
def test_a_mask_of_other_sizes_is_never_taken(seed):
    """Every kind of mask, with one or more sizes that are off: refused, or broadcast as eager's."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 3), 2, draw.randint(1, 6), draw.randint(1, 8)]
    own = [n if draw.random() < 0.6 else draw.randint(1, 9) for n in sizes]
    q, k = torch.randn(sizes[0], 2, sizes[2], 8), torch.randn(sizes[0], 2, sizes[3], 8)
    square = torch.rand(own) < 0.7
    square[..., :1] = True
    lowest = torch.finfo(torch.float32).min
    function, _ = made(batch=own[0], q_len=own[2], kv_len=max(own[2:]), padded=draw.random() < 0.5)
    masks = [square, torch.where(square, torch.randn(own), lowest), function]
    for mask in masks:
        fits = all(n in (1, size) for n, size in zip(mask.shape, sizes, strict=True))
        if not fits:
            with pytest.raises(ArgumentError, match="attention_mask is for"):
                attend(mask, q, k)
            continue
        as_tensor = mask.square() if mask is function else mask
        if as_tensor.dtype == torch.bool:
            as_tensor = torch.where(as_tensor, 0.0, lowest)
        truth = torch.nn.functional.scaled_dot_product_attention(q, k, k, as_tensor)
        seen = (as_tensor > lowest / 2).any(-1, keepdim=True).expand(*sizes[:3], 1)
        out = attend(mask, q, k).transpose(1, 2)
        torch.testing.assert_close(out, torch.where(seen, truth, 0.0), **TOLERANCE)


def test_a_mask_of_fewer_keys_is_refused_by_its_sizes():
    mask = integration.attention_mask(1, 4, 4, mask_function=None)
    with pytest.raises(ArgumentError, match=r"\(1, 1, 4, 4\), .* of \(1, 2, 4, 6\)"):
        attend(mask, torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8))


# -- models that keep their attention to themselves -----------------------------------------------


ALONE = {
    "bloom": lambda: hf.BloomModel._from_config(
        hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2),
        attn_implementation="headway",
    ),
    "deberta": lambda: hf.DebertaV2Model._from_config(
        hf.DebertaV2Config(**SIZES, intermediate_size=64, vocab_size=64),
        attn_implementation="headway",
    ),
    "rwkv": lambda: hf.RwkvModel._from_config(
        hf.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, context_length=32),
        attn_implementation="headway",
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_model_with_its_own_attention_says_so_once(name, tokens, left_padded):
    integration.hf_models._warned.clear()
    model = ALONE[name]().eval()
    with pytest.warns(UserWarning, match=f"{type(model).__name__} .* headway is not used") as seen:
        out = model(tokens, attention_mask=left_padded).last_hidden_state
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tokens)
        ALONE[name]().eval()(tokens)
    model.config._attn_implementation_internal = "eager"
    assert torch.equal(model(tokens, attention_mask=left_padded).last_hidden_state, out)


def test_a_part_with_its_own_attention_is_named():
    config = hf.SamVisionConfig(
        hidden_size=32, output_channels=16, num_hidden_layers=1, num_attention_heads=2, mlp_dim=48,
        image_size=32, patch_size=8, window_size=2, global_attn_indexes=[0],
    )  # fmt: skip
    model = hf.SamVisionModel(config).eval()
    model.set_attn_implementation("headway")
    integration.hf_models._warned.clear()
    with pytest.warns(UserWarning, match="SamVisionModel .*SamVisionSdpaAttention"):
        model(torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize("name", ["llama", "t5", "bert", "vit", "gpt_oss"])
def test_a_model_that_asks_for_headway_says_nothing(name, tokens):
    model = (DECODERS | OTHERS)[name]().eval()
    model.set_attn_implementation("headway")
    inputs = {"pixel_values": torch.randn(1, 3, 16, 16)} if name == "vit" else {"input_ids": tokens}
    inputs |= {"decoder_input_ids": tokens} if name == "t5" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**inputs)


def test_no_attention_is_nothing_to_say():
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic")
    model = hf.ResNetModel._from_config(config, attn_implementation="headway")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(2, 3, 32, 32))


HEADS = {"hidden_size": 32, "num_attention_heads": 2}


def test_models_that_choose_a_class_by_name_are_refused():
    config = hf.FalconConfig(vocab_size=64, num_hidden_layers=1, **HEADS)
    with pytest.raises(BackendRefused, match="FalconModel has attentions of its own, eager, sdpa"):
        hf.FalconModel._from_config(config, attn_implementation="headway")
    assert hf.FalconModel._from_config(config, attn_implementation="eager") is not None


# -- refused --------------------------------------------------------------------------------------


def call(**kwargs):
    q = torch.randn(1, 2, 5, 8)
    mask = kwargs.pop("attention_mask", None)
    return integration.attention_forward(torch.nn.Module(), q, q, q, mask, **kwargs)


@pytest.mark.parametrize(
    "name",
    ["topk_indices", "block_mask", "head_mask", "cache", "block_table", "alibi", "softmax_scale"],
)
def test_what_would_change_attention_and_is_not_honoured_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=name):
        call(**{name: torch.zeros(1)})
    out, weights = call(**{name: None})
    assert out.shape == (1, 5, 2, 8)
    assert weights is None


OTHER_WORDS = (
    "shift_labels", "token_type_ids", "mm_token_type_ids", "ignore_index", "reduction",
    "vocab_size", "skip_logits", "a_key_of_the_users",
)  # fmt: skip


@pytest.mark.parametrize("word", OTHER_WORDS)
def test_words_that_are_not_about_attention_are_passed_over(word, tokens):
    model = DECODERS["llama"]()
    model.set_attn_implementation("headway")
    more = torch.ones_like(tokens)
    assert torch.equal(model(tokens, **{word: more}).logits, model(tokens).logits)


def test_sharded_losses_are_those_of_eager(tokens):
    run = lambda model: [model(tokens, labels=tokens, shift_labels=tokens.flip(1)).loss.detach()]
    same(both(DECODERS["llama"], run))


def test_weights_and_odd_masks_are_refused():
    with pytest.raises(BackendRefused, match="output_attentions"):
        call(output_attentions=True)
    with pytest.raises(ArgumentError, match="attention_mask must be"):
        call(attention_mask=torch.ones(1, 5))
    with pytest.raises(ArgumentError, match="int64"):
        call(attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.long))


@pytest.mark.parametrize("family", ["DeepseekV32", "GlmMoeDsa", "AXK2", "HYV4"])
def test_sparse_models(family, tokens, left_padded):
    """Their indexer chooses 4 keys for every query."""
    kind = getattr(hf, f"{family}ForCausalLM", None)
    if kind is None:
        pytest.skip(f"transformers {hf.__version__} has no {family}")
    sparse = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16, "n_group": 1}
    make = lambda: kind(getattr(hf, f"{family}Config")(**MLA | sparse))
    run = trained(left_padded.bool(), input_ids=tokens, attention_mask=left_padded)
    same(both(make, run))
    texts = both(
        make, lambda model: [model.eval().generate(tokens, max_new_tokens=5, eos_token_id=-1)]
    )
    assert torch.equal(*[text for (text,) in texts])


def test_indices_are_keys_or_blocks_of_keys():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 23, 8)
    module = torch.nn.Module()
    module.indexer = torch.nn.Module()
    module.indexer.block_size = 4
    forward = lambda **more: integration.attention_forward(module, q, k, k, None, **more)[0]
    keys = torch.rand(2, 5, 23).topk(6).indices.int()
    keys[0, 1, 2:] = -1
    kept = torch.zeros(2, 1, 5, 24, dtype=torch.bool)
    kept.scatter_(-1, (keys[:, None] % 24).long(), True)
    right = torch.nn.functional.scaled_dot_product_attention(
        q, k, k, kept[..., :23], enable_gqa=True
    )
    torch.testing.assert_close(forward(indices=keys).transpose(1, 2), right)
    blocks = torch.rand(2, 2, 5, 6).topk(2).indices
    kept = torch.zeros(2, 2, 5, 6, dtype=torch.bool).scatter_(-1, blocks, True)
    kept = kept.repeat_interleave(4, 3)[..., :23].repeat_interleave(2, 1)
    right = torch.nn.functional.scaled_dot_product_attention(q, k, k, kept, enable_gqa=True)
    torch.testing.assert_close(forward(block_indices=blocks).transpose(1, 2), right)
    for wrong in (keys[0], keys[:, :3], keys[:, None], keys[:1]):
        with pytest.raises(ArgumentError, match="indices must name keys"):
            forward(indices=wrong)
    with pytest.raises(ArgumentError, match="block_indices must name keys"):
        forward(block_indices=blocks[:, :1].expand(-1, 3, -1, -1))
    with pytest.raises(BackendRefused, match=r"no indexer\.block_size"):
        integration.attention_forward(torch.nn.Module(), q, k, k, None, block_indices=blocks)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_sink_per_query(softcap):
    """As if there were one more key, of value 0, whose logit is the sink."""
    q, k = (
        torch.randn(2, 4, 7, 8, dtype=torch.float64),
        torch.randn(2, 2, 9, 8, dtype=torch.float64),
    )
    sink = torch.randn(2, 4, 7, 1, dtype=torch.float64)
    kept = torch.rand(2, 1, 7, 9) < 0.6
    kept[0, 0, 3] = False
    leaves = [x.requires_grad_() for x in (q, k, sink)]
    out, _ = integration.attention_forward(
        torch.nn.Module(), q, k, k, kept, softcap=softcap, sinks=sink
    )
    wide = k.repeat_interleave(2, 1)
    logits = q @ wide.mT / 8**0.5
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    weights = torch.cat([logits.masked_fill(~kept, -torch.inf), sink], -1).softmax(-1)[..., :-1]
    right = (weights @ wide).transpose(1, 2)
    torch.testing.assert_close(out, right)
    for got, true in zip(
        torch.autograd.grad(out.sin().sum(), leaves),
        torch.autograd.grad(right.sin().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got, true)
    with pytest.raises(ArgumentError, match=r"sinks must be .* \(2, 4, 7, 1\), got \(2, 4, 7\)"):
        integration.attention_forward(torch.nn.Module(), q, k, k, kept, sinks=sink[..., 0])


def test_a_window_without_a_mask_is_honoured():
    class Causal(torch.nn.Module):
        is_causal = True

    q, k = torch.randn(1, 2, 7, 8), torch.randn(1, 2, 9, 8)
    out, _ = integration.attention_forward(Causal(), q, k, k, None, sliding_window=3)
    i, j = torch.arange(7)[:, None] + 2, torch.arange(9)
    kept = (j <= i) & (i - j < 3)
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, k, kept)
    torch.testing.assert_close(out.transpose(1, 2), truth, **TOLERANCE)


# -- inference -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_a_step_makes_no_mask_and_no_plan(name, cache, tokens, monkeypatch):
    """After a prompt and a full window, nothing depends on the length."""
    build = importlib.import_module("headway.blocks.build")
    made = []
    real = build.build
    monkeypatch.setattr(build, "build", lambda *given: made.append(given) or real(*given))
    model = DECODERS[name]().eval()
    model.set_attn_implementation("headway")
    options = {"do_sample": False, "use_cache": True, "cache_implementation": cache}
    model.generate(tokens[:, :5], max_new_tokens=3, **options)
    before, known = len(made), len(call_cache._signatures)
    model.generate(tokens[:, :5], max_new_tokens=60, **options)
    assert len(made) <= before + (cache is not None)  # a prompt, into a cache of another size
    assert len(call_cache._signatures) <= known + 4


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("more", [1, 3, 12])
def test_more_tokens_into_a_static_cache(more, grad, tokens):
    """Its counter moves on before the first layer attends."""

    def run(model):
        cache = hf.StaticCache(config=model.config, max_cache_len=24)
        with torch.set_grad_enabled(grad):
            first = model.eval()(tokens[:, :5], past_key_values=cache).logits.detach()
            return first, model(tokens[:, 5 : 5 + more], past_key_values=cache).logits.detach()

    same(both(DECODERS["llama"], run))


def test_compiled_steps_over_a_static_cache(tokens, left_padded):
    """A graph for all lengths, with no square in it."""
    torch._dynamo.reset()
    model = DECODERS["llama"]().eval()
    model.set_attn_implementation("headway")
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def run(forward):
        cache = hf.StaticCache(config=model.config, max_cache_len=24)
        for start, stop in ((0, 6), (6, 7), (7, 8), (8, 11)):
            out = (forward if start else model)(
                tokens[:, start:stop], past_key_values=cache, attention_mask=left_padded[:, :stop]
            )
            yield out.logits

    with torch.no_grad():
        results = [
            list(run(f)) for f in (model, torch.compile(model, backend=backend, fullgraph=True))
        ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert len(graphs) <= 4  # the first length, any, three tokens
    kinds = [node.meta.get("example_value") for g in graphs for node in g.graph.nodes]
    masks = [x for x in kinds if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
    assert all(x.shape[-2] == 1 for x in masks if x.dim() == 4)


def mask_of_a_step(padding, keys, offset, dtype=torch.float32):
    """The mask of one new token of two rows."""
    from transformers.masking_utils import causal_mask_function

    options = {"device": padding.device, "dtype": dtype}
    return integration.attention_mask(
        2, 1, keys, offset, 0, causal_mask_function, padding, **options
    )


@torch.inference_mode()
def test_a_step_waits_for_no_device():
    """Of tensors whose numbers cannot be read, neither the mask nor a layer reads one."""
    new = lambda *shape, **kw: torch.empty(shape, device="meta", **kw)
    mask = mask_of_a_step(new(2, 9, dtype=torch.int64), 16, new(dtype=torch.int64))
    q, k = new(2, 4, 1, 16), new(2, 2, 16, 16)
    out, _ = integration.attention_forward(torch.nn.Module(), q, k, k, mask)
    assert out.shape == (2, 1, 4, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [9, 16])
def test_padded_keys_are_not_seen(keys, dtype):
    """NaN in a key that is padded shows nowhere, nor what lies behind the last key of a cache."""
    padding = torch.ones(2, 9, dtype=torch.long)
    padding[0, :3] = 0
    with torch.inference_mode():
        mask = mask_of_a_step(padding, keys, torch.tensor(8), dtype)
    q, k, v = (torch.randn(2, h, n, 16, dtype=dtype) for h, n in ((4, 1), (2, keys), (2, keys)))
    k[:, :, 9:] = v[:, :, 9:] = torch.nan
    forward = lambda: integration.attention_forward(torch.nn.Module(), q, k, v, mask)[0]
    with torch.inference_mode():
        before = forward()
        k[0, :, 1] = torch.nan
        after = forward()
    kept = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    kept[0, ..., :3] = False
    k[0, :, 1] = 0
    truth = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k[:, :, :9].double(), v[:, :, :9].double(), kept, enable_gqa=True
    ).transpose(1, 2)
    for out in (before, after):
        torch.testing.assert_close(out.double(), truth, atol=1e-2, rtol=1e-2)
    if dtype == torch.float32:
        torch.testing.assert_close(after.double(), truth, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_forward_mode(name):
    """`torch.func.jvp` along the embeddings, and a backward of the primal."""
    embeddings, moves = torch.randn(2, 2, 19, 64)

    def run(model):
        f = lambda x: model(inputs_embeds=x, use_cache=False).logits
        logits, tangent = torch.func.jvp(f, (embeddings,), (moves,))
        (logits - tangent.detach()).square().mean().backward()
        return logits.detach(), tangent.detach(), *[p.grad for p in model.parameters()]

    same(both(DECODERS[name], run))
