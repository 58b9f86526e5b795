"""What depends on the inside of transformers: its calls, masks and hooks, which change with its
versions. `make test` runs this file with the newest one and with the oldest supported one."""

import copy
import pickle
import re
import warnings

import pytest
import torch

hf = pytest.importorskip("transformers", reason="transformers 5 is not installed")

from headway.errors import BackendRefused  # noqa: E402
from headway.integrations import hf_calls, hf_models  # noqa: E402
from headway.integrations import transformers as integration  # noqa: E402

hf.logging.set_verbosity_error()
integration.register()

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 128}
HEADS = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
PLAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**SMALL, sliding_window=5, sliding_window_pattern=2)
    ),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**SMALL, sliding_window=5, num_local_experts=4, num_experts_per_tok=2)
    ),
    "llama4": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(**SMALL, intermediate_size_mlp=48, moe_layers=[])
    ),
    "deepseek_v4": lambda: hf.DeepseekV4ForCausalLM(
        hf.DeepseekV4Config(
            vocab_size=64, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, head_dim=16, q_lora_rank=24, n_routed_experts=2,
            num_experts_per_tok=2, index_n_heads=2, index_head_dim=16, index_topk=4,
            layer_types=["compressed_sparse_attention"], pad_token_id=0, o_groups=1,
        )
    ),
    "doge": lambda: hf.DogeForCausalLM(hf.DogeConfig(**SMALL)),
    "persimmon": lambda: hf.PersimmonForCausalLM(
        hf.PersimmonConfig(vocab_size=64, intermediate_size=48, **HEADS)
    ),
    "gpt_bigcode": lambda: hf.GPTBigCodeForCausalLM(hf.GPTBigCodeConfig(**GPT)),
    "ctrl": lambda: hf.CTRLLMHeadModel(hf.CTRLConfig(**GPT, dff=48)),
    "stablelm": lambda: hf.StableLmForCausalLM(
        hf.StableLmConfig(vocab_size=64, intermediate_size=48, num_key_value_heads=2, **HEADS)
    ),
    "bert": lambda: hf.BertModel(
        hf.BertConfig(vocab_size=64, intermediate_size=48, **HEADS, **PLAIN),
        add_pooling_layer=False,
    ),
    "gpt2": lambda: hf.GPT2Model(hf.GPT2Config(**GPT)),
    "opt": lambda: hf.OPTModel(
        hf.OPTConfig(vocab_size=64, ffn_dim=48, word_embed_proj_dim=32, **HEADS)
    ),
    "bloom": lambda: hf.BloomModel(
        hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    ),
    "git": lambda: hf.GitForCausalLM(
        hf.GitConfig(
            vocab_size=64, intermediate_size=48, **HEADS,
            vision_config=HEADS | {"intermediate_size": 48, "image_size": 16, "patch_size": 8},
        )
    ),
    "siglip": lambda: hf.SiglipVisionModel(
        hf.SiglipVisionConfig(intermediate_size=48, image_size=16, patch_size=8, **HEADS)
    ),
}  # fmt: skip

POSITIONS = torch.cat([torch.arange(6), torch.arange(8), torch.arange(3)]).expand(2, -1)
IDS = torch.tensor([0] * 6 + [1] * 8 + [2] * 3, dtype=torch.int32).expand(2, -1)
OFFSETS = torch.tensor([0, 6, 14, 17], dtype=torch.int32)
ONES = torch.ones(2, 17, dtype=torch.long)


def ours(name):
    model = MODELS[name]().eval()
    model.set_attn_implementation("headway")
    return model


@pytest.fixture
def tokens():
    return torch.randint(1, 64, (2, 17))


def result(out):
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def warned(run):
    """What it gives, and its warnings about documents."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        out = run()
    return out, [str(w.message) for w in seen if "documents see each other" in str(w.message)]


def apart(model, tokens, out):
    """Whether every document is as it is alone."""
    parts = ((0, 6), (6, 14), (14, 17))
    alone = torch.cat([result(model(tokens[:, a:b])) for a, b in parts], 1)
    return bool((result(out) - alone).abs().max() <= 1e-4 * (1 + alone.abs().max()))


# -- equal to eager -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_equals_eager(name, tokens):
    """Padded on the left, with its gradients; and generating over a static cache."""
    model = MODELS[name]().eval()
    kept = ONES.clone()
    kept[0, :4] = 0
    weights, texts = [], []
    for implementation in ("eager", "headway"):
        twin = copy.deepcopy(model)
        twin.set_attn_implementation(implementation)
        out = twin(tokens, attention_mask=kept).logits[kept.bool()]
        out.square().sum().backward()
        weights.append([out.detach(), *(p.grad for p in twin.parameters())])
        options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
        texts.append(twin.generate(tokens, attention_mask=kept, **options))
    assert torch.equal(*texts)
    for a, b in zip(*weights, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a - b).abs().max() <= 2e-5 * (1 + a.abs().max())


def test_a_mask_that_keeps_all_is_none_as_for_eager():
    """Informer's encoder halves its length from layer to layer, and compares a mask's sizes."""
    config = hf.InformerConfig(
        prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=1,
        d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
    )  # fmt: skip
    draw = torch.randn
    inputs = {
        "past_values": draw(2, 10), "past_time_features": draw(2, 10, 1),
        "past_observed_mask": torch.ones(2, 10), "future_values": draw(2, 4),
        "future_time_features": draw(2, 4, 1),
    }  # fmt: skip
    model = hf.InformerModel(config).eval()
    results = []
    for implementation in ("eager", "headway"):
        model.set_attn_implementation(implementation)
        torch.manual_seed(0)  # it draws the keys that it looks at
        results.append(model(**inputs).last_hidden_state)
    torch.testing.assert_close(*results)


def test_no_mask_is_not_causal_for_an_attention_that_says_it_is():
    """Phi 4's image encoder does, and is given no mask where nothing is padded."""
    config = hf.Phi4MultimodalVisionConfig(
        intermediate_size=48, image_size=16, crop_size=16, patch_size=8, **HEADS
    )
    model = hf.Phi4MultimodalVisionModel(config).eval()
    image = torch.randn(1, 3, 16, 16)
    results = []
    for implementation in ("eager", "headway"):
        model.set_attn_implementation(implementation)
        results.append(model(image).last_hidden_state)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


# -- packed documents -----------------------------------------------------------------------------

WITH_CACHE = "use_cache=False and no attention_mask.*seq_idx"
FORMS = [
    *((name, {}, WITH_CACHE) for name in ("llama4", "doge", "persimmon", "ctrl", "gpt_bigcode")),
    ("llama", {"use_cache": False, "attention_mask": ONES}, WITH_CACHE),
    ("llama4", {"use_cache": False, "attention_mask": ONES}, WITH_CACHE),
    ("gpt_oss", {"use_cache": False}, "^(?!.*no attention_mask).*seq_idx.*cu_seq_lens_q"),
    ("bert", {"use_cache": False}, "^(?!.*no attention_mask).*seq_idx.*cu_seq_lens_q"),
    ("deepseek_v4", {"use_cache": False}, "adds keys .* one document a row"),
    ("deepseek_v4", {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS}, "one document a row"),
    ("stablelm", {"seq_idx": IDS}, "does not hand seq_idx to its attention"),
]


@torch.no_grad()
@pytest.mark.parametrize(("name", "given", "words"), FORMS)
def test_documents_that_see_each_other_are_warned_about(name, given, words, tokens):
    model = ours(name)
    rows = 1 if "cu_seq_lens_q" in given else 2
    out, seen = warned(lambda: model(tokens[:rows], position_ids=POSITIONS[:rows], **given))
    assert len(seen) == 1
    assert re.search(words, seen[0].partition("each other: ")[2])
    assert not apart(model, tokens[:rows], out)


@pytest.mark.parametrize("grad", [False, True])
def test_short_packed_rows_are_warned_about(grad, tokens):
    """Without gradients, they are a step over a cache."""
    model = ours("llama")
    with torch.set_grad_enabled(grad):
        assert len(warned(lambda: model(tokens[:, :9], None, POSITIONS[:, :9]))[1]) == 1


@torch.no_grad()
@pytest.mark.parametrize("given", [{"use_cache": False}, {"seq_idx": IDS}])
@pytest.mark.parametrize("name", ["llama4", "doge", "gpt_oss"])
def test_documents_that_are_apart_are_not(name, given, tokens):
    if (name, *given) == ("gpt_oss", "use_cache"):
        pytest.skip("transformers does not read its positions")
    model = ours(name)
    out, seen = warned(lambda: model(tokens, position_ids=POSITIONS, **given))
    assert not seen
    assert apart(model, tokens, out)


def test_positions_of_padding_and_masks_of_the_callers_are_no_documents(tokens):
    model = ours("llama")
    kept = ONES.clone()
    kept[:, :3] = 0
    positions = (kept.cumsum(1) - 1).masked_fill(kept == 0, 1)
    square = (IDS[:, :, None] == IDS[:, None]).tril()[:, None]
    options = {"max_new_tokens": 2, "do_sample": False, "attention_mask": kept}

    def calls():
        model(tokens, position_ids=positions, attention_mask=kept)
        right = kept.flip(1)
        model(tokens, position_ids=right.cumsum(1) * right, attention_mask=right)
        model(tokens, position_ids=POSITIONS, attention_mask=square)
        model(tokens, position_ids=torch.arange(17)[None])
        model.generate(tokens, **options)
        model.generate(tokens, cache_implementation="static", **options)

    assert warned(calls)[1] == []
    padded = ONES.clone()
    padded[:, 15:] = 0
    assert warned(lambda: model(tokens, position_ids=POSITIONS, attention_mask=padded))[1]


def test_a_call_ends_with_its_forward(tokens):
    """Also where it fails; a copy and a pickle of the model say the same."""
    model = ours("llama")
    with pytest.raises(ValueError, match="input_ids"):
        model(position_ids=POSITIONS)
    assert hf_calls.current() is None
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(warned(lambda m=twin: m(tokens, position_ids=POSITIONS))[1]) == 1
        assert hf_calls.current() is None


# -- weights, and attention of a model's own ------------------------------------------------------


def image(name, tokens):
    return (torch.randn(1, 3, 16, 16),) if name == "siglip" else (tokens,)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_bigcode", "persimmon", "siglip"])
def test_weights_are_refused_wherever_they_are_asked_for(name, tokens):
    model = ours(name)
    inputs = image(name, tokens)
    words = r'output_attentions=True of .*attn_implementation="eager"'
    with pytest.raises(BackendRefused, match=words):
        model(*inputs, output_attentions=True)
    model(*inputs, output_attentions=False)
    model.config._output_attentions = True
    with pytest.raises(BackendRefused, match=words):
        model(*inputs)


def test_weights_are_refused_in_generate(tokens):
    options = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_attentions": True}
    with pytest.raises(BackendRefused, match="output_attentions"):
        ours("llama").generate(tokens, **options)


def test_a_model_with_attention_of_its_own_gives_its_weights(tokens):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ours("bloom")(tokens, output_attentions=True).attentions[0] is not None


@pytest.mark.parametrize(
    ("name", "own"), [("git", "GitSelfAttention"), ("siglip", "MultiheadAttention")]
)
def test_a_part_with_attention_of_its_own_is_named(name, own, tokens):
    """GIT's image encoder asks for headway, its text model does not."""
    hf_models._warned.clear()
    model = ours(name)
    cls = type(model).__name__
    words = rf"{cls} .*\({own}\).* headway is not used in it, but in the rest of the model"
    with pytest.warns(UserWarning, match=words) as seen:
        model(*image(name, tokens))
    assert len(seen) == 1


def test_a_model_that_was_made_before_is_met_when_its_attention_is_set(tokens):
    hf_models._warned.clear()
    model = MODELS["git"]()
    for part in model.modules():
        part._forward_pre_hooks.clear()
        part._forward_hooks.clear()
    model.set_attn_implementation("headway")
    with pytest.warns(UserWarning, match="GitSelfAttention"):
        model(tokens)


# -- continuous batching --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_continuous_batching_is_that_of_sdpa(name, tokens):
    """By transformers' manager, which takes no other name than its own: a user registers there."""
    from transformers import AttentionInterface, ContinuousBatchingConfig
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    model = MODELS[name]().eval()
    model.set_attn_implementation("sdpa")
    prompts = [row[: 3 + 6 * n].tolist() for n, row in enumerate(tokens)]
    config = hf.GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=-1)
    # Without a size its cache takes all memory, half a minute for each.
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    texts = []
    for forward in (sdpa_attention_forward, integration.attention_forward):
        AttentionInterface.register("sdpa", forward)
        try:
            out = model.generate_batch(prompts, config, small, progress_bar=False)
        finally:
            AttentionInterface.register("sdpa", sdpa_attention_forward)
        assert [x.error for x in out.values()] == [None, None]
        texts.append(sorted(tuple(x.generated_tokens) for x in out.values()))
    assert texts[0] == texts[1]
    assert all(len(text) == 6 for text in texts[0])


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_continuous_batching_by_name(name, tokens):
    """What a model generates by itself: GPT-OSS has sinks, which "sdpa" does not run."""
    from transformers import ContinuousBatchingConfig

    model = MODELS[name]().eval()
    model.set_attn_implementation("headway")
    prompts = [row[: 3 + 6 * n].tolist() for n, row in enumerate(tokens)]
    config = hf.GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=-1)
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    out = model.generate_batch(prompts, config, small, progress_bar=False)
    if tuple(map(int, hf.__version__.split(".")[:2])) < (5, 24):
        for x in out.values():
            assert "needs transformers 5.24 or newer" in x.error
        return
    assert [x.error for x in out.values()] == [None, None]
    texts = {tuple(x.prompt_ids): list(x.generated_tokens) for x in out.values()}
    for prompt in prompts:
        alone = model.generate(torch.tensor([prompt]), generation_config=config)
        assert texts[tuple(prompt)] == alone[0, len(prompt) :].tolist()
    assert model.config._attn_implementation == "headway"


def test_what_continuous_batching_cannot_have_is_refused_by_name():
    q = torch.randn(1, 2, 5, 8)
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 5}
    given |= {"max_length_k": 5, "read_index": [offsets], "write_index": [offsets]}
    call = lambda **more: integration.attention_forward(
        torch.nn.Module(), q, q, q, None, **given | more
    )
    assert call()[0].shape == (1, 5, 2, 8)
    with pytest.raises(BackendRefused, match="max_blocks_per_request=0"):
        call(block_table=offsets)
    for name in ("position_bias", "seq_idx", "alibi"):
        with pytest.raises(BackendRefused, match=name):
            call(**{name: torch.zeros(1, 2, 5, 5)})
    with pytest.raises(BackendRefused, match="read_index, write_index"):
        call(cu_seq_lens_k={"full_attention": offsets}, cu_seq_lens_q=None)
