"""`Attention`: one scale, whatever the mode, the backend, the dtype; gradients; state dicts."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headway
from headway.errors import ArgumentError, BackendRefused
from headway.nn import MLA, Attention, Past, Rotary, YaRN, rescale

MODES = ["logits", "query", "init"]
WIDTH, HEADS, LENGTH = 48, 4, 21


def normal(weight: Tensor) -> None:
    """Logits of size about 1: a wrong scale shows."""
    nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


def expected(module: Attention, x: Tensor, dtype: torch.dtype, compute=torch.float64):
    """(output, logits) of `module` by plain PyTorch, with every tensor of `dtype` in `compute`."""
    p = {name: t.detach().to(dtype).to(compute) for name, t in module.named_parameters()}
    x = x.to(dtype).to(compute)
    d, h, hk = module.head_width, module.heads, module.kv_heads
    if module.qkv_proj is None:
        names = ["q_proj", "k_proj", "v_proj"]
        q, k, v = (F.linear(x, p[f"{n}.weight"], p.get(f"{n}.bias")) for n in names)
    else:
        qkv = F.linear(x, p["qkv_proj.weight"], p.get("qkv_proj.bias"))
        q, k, v = qkv.split([h * d, hk * d, hk * d], -1)
    q, k, v = (t.unflatten(-1, (-1, d)).transpose(1, 2) for t in (q, k, v))
    if module.q_norm is not None:
        q, k = (
            F.rms_norm(t, (d,), p[f"{n}_norm.weight"], module.q_norm.eps)
            for n, t in (("q", q), ("k", k))
        )
    if module.rotary is not None:
        q, k = (turn(t, module.rotary) for t in (q, k))
    k, v = (t.repeat_interleave(h // hk, 1) for t in (k, v))
    scale = 1.0 if module.scaling == "init" else module.scale
    logits = (q @ k.mT * scale).masked_fill(
        torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -math.inf
    )
    out = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return F.linear(out, p["o_proj.weight"], p.get("o_proj.bias")), logits


def turn(x: Tensor, rotary: Rotary) -> Tensor:
    """RoPE by complex numbers, which is how the paper puts it."""
    w = rotary.width
    exponents = torch.arange(0, w, 2).double() / w
    angles = torch.arange(x.shape[2])[:, None].double() * rotary.base**-exponents
    x = x.clone()
    a = slice(0, w, 2) if rotary.interleaved else slice(0, w // 2)
    b = slice(1, w, 2) if rotary.interleaved else slice(w // 2, w)
    z = torch.complex(x[..., a].double(), x[..., b].double()) * torch.polar(
        torch.ones_like(angles), angles
    )
    x[..., a], x[..., b] = z.real.to(x.dtype), z.imag.to(x.dtype)
    return x


def error(x: Tensor, truth: Tensor) -> float:
    return (x.double() - truth).abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", headway.backends.NAMES)
@pytest.mark.parametrize("scaling", MODES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_scale_is_applied_exactly_once(dtype, backend, scaling, fused, qk_norm):
    gpu = backend not in ("cpu", "reference") and torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    module = Attention(
        WIDTH, HEADS, 2, fused=fused, bias=True, qk_norm=qk_norm, rotary=Rotary(12),
        scaling=scaling, init=normal, backend=backend, dtype=dtype, device=device,
    )  # fmt: skip
    for name, p in module.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p)
    x = torch.randn(2, LENGTH, WIDTH, dtype=dtype, device=device)
    try:
        out = module(x, headway.causal()).cpu()
    except BackendRefused as refusal:
        pytest.skip(str(refusal).splitlines()[-1])
    module, x = module.cpu(), x.cpu()
    truth, logits = expected(module, x, dtype)
    plain, plain_logits = expected(module, x, dtype, compute=dtype)
    peak = logits.amax((0, 2, 3))
    # Plain PyTorch in the same dtype rounds q, k and the logits; so do we, but for the logits.
    # 3e-6: our angles are float32 in every dtype.
    assert error(out, truth) <= 3 * error(plain, truth) + 3e-6
    limit = 3 * error(plain_logits.tril(), logits.tril()) + 3e-7 * peak.abs().max().item()
    assert error(module.max_logit.value, peak) <= limit
    assert peak.std() > 0.01  # a scale applied twice or never would show


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_modes_begin_alike_and_their_gradients_do(fused, qk_norm):
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    results = []
    for scaling in MODES:
        torch.manual_seed(3)
        module = Attention(
            WIDTH, HEADS, fused=fused, qk_norm=qk_norm, scaling=scaling, dtype=torch.float64
        )
        out = module(x, headway.causal())
        out.square().sum().backward()
        last = module.o_proj.weight.grad
        results.append((module.max_logit.value, out.detach(), last))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("scaling", MODES)
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"qk_norm": True}])
def test_gradients_against_float64_autograd(scaling, options):
    module = Attention(
        WIDTH, HEADS, 2, bias=True, rotary=Rotary(6, interleaved=True), scaling=scaling, **options
    ).double()
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    dout = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    (module(x, headway.causal()) * dout).sum().backward()
    ours = {name: p.grad for name, p in module.named_parameters()}
    params = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}

    class Plain(Attention):
        def attend(self, q, k, v, mask, score, past=None, layout=None):
            scale = 1.0 if self.scaling == "init" else self.scale
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
            return out.transpose(1, 2).flatten(2)

    plain = Plain(
        WIDTH, HEADS, 2, bias=True, rotary=Rotary(6, interleaved=True), scaling=scaling, **options
    ).double()
    (torch.func.functional_call(plain, params, (x,)) * dout).sum().backward()
    for name, p in params.items():
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [4, 12])
def test_rotary_by_complex_numbers(interleaved, width):
    rotary = Rotary(width, base=300.0, interleaved=interleaved)
    x = torch.randn(2, 3, LENGTH, 12, dtype=torch.float64)
    got = rotary.rotate(x, rotary.angles(torch.arange(LENGTH)))
    torch.testing.assert_close(got, turn(x, rotary), rtol=1e-4, atol=1e-5)  # float32 angles
    per_row = torch.stack([torch.arange(LENGTH), torch.arange(5, 5 + LENGTH)])
    moved = rotary.rotate(x, rotary.angles(per_row))
    torch.testing.assert_close(moved[0], got[0])
    assert (moved[1] - got[1]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("old", "new"), [("logits", "init"), ("init", "query"), ("query", "logits"), ("init", "logits")]
)
@pytest.mark.parametrize("options", [{}, {"fused": True, "bias": True}, {"qk_norm": True}])
def test_checkpoints_refuse_another_scaling_and_say_how_to_convert(old, new, options):
    saved = Attention(WIDTH, HEADS, 2, scaling=old, **options)
    x = torch.randn(2, LENGTH, WIDTH)
    truth = saved(x)
    model = nn.ModuleDict({"a": Attention(WIDTH, HEADS, 2, scaling=new, **options)})
    before = {n: p.clone() for n, p in model.named_parameters()}
    checkpoint = {f"a.{k}": v for k, v in saved.state_dict().items()}
    with pytest.raises(ArgumentError, match=rf"rescale\(model, '{old}'\)"):
        model.load_state_dict(checkpoint)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    rescale(model, old)
    model.load_state_dict(checkpoint)
    assert torch.equal(model["a"](x), truth)
    rescale(model, new)
    torch.testing.assert_close(model["a"](x), truth, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        model["a"].max_logit.value, saved.max_logit.value, rtol=1e-5, atol=1e-6
    )


def test_another_scale_is_refused_where_the_weights_hold_it():
    saved = Attention(WIDTH, HEADS, scaling="init", scale=0.5)
    model = Attention(WIDTH, HEADS, scaling="init")
    with pytest.raises(ArgumentError, match=r"scale=0\.288675 .* saved with 0\.5 .*rescale"):
        model.load_state_dict(saved.state_dict())
    x = torch.randn(1, LENGTH, WIDTH)
    for module in (saved, model):  # as the message says
        rescale(module, "logits")
    model.load_state_dict(saved.state_dict())
    rescale(model, "init")
    saved.scale = model.scale
    torch.testing.assert_close(model(x), saved(x))
    narrowed = {name: t.bfloat16() for name, t in model.state_dict().items()}
    Attention(WIDTH, HEADS, scaling="init").load_state_dict(narrowed)


def test_checkpoints_of_other_software_are_free_of_the_scale():
    foreign = {k: v for k, v in Attention(WIDTH, HEADS).state_dict().items() if "extra" not in k}
    Attention(WIDTH, HEADS).load_state_dict(foreign)
    with pytest.raises(ArgumentError, match="does not say where its scale is"):
        Attention(WIDTH, HEADS, scaling="init").load_state_dict(foreign)
    with pytest.raises(RuntimeError, match="Missing key"):
        nn.ModuleDict({"a": Attention(WIDTH, HEADS)}).load_state_dict({})


def test_state_dict_goes_through_torch_save_and_safetensors(tmp_path):
    from safetensors.torch import load_file, save_file

    module = Attention(WIDTH, HEADS, scaling="init")
    torch.save(module.state_dict(), tmp_path / "a.pt")
    save_file(module.state_dict(), tmp_path / "a.safetensors")
    for state in (torch.load(tmp_path / "a.pt"), load_file(tmp_path / "a.safetensors")):
        Attention(WIDTH, HEADS, scaling="init").load_state_dict(state)
        with pytest.raises(ArgumentError, match="'init'"):
            Attention(WIDTH, HEADS).load_state_dict(state)


def test_init_survives_the_meta_device():
    with torch.device("meta"):
        module = Attention(WIDTH, HEADS, scaling="init", init=lambda w: nn.init.constant_(w, 1.0))
    module.to_empty(device="cpu")
    module.reset_parameters()
    assert module.q_proj.weight.unique().tolist() == pytest.approx([12**-0.5])
    assert module.k_proj.weight.unique().tolist() == [1.0]
    assert module.max_logit.empty
    module(torch.randn(1, 3, WIDTH))
    assert module.max_logit.value.isfinite().all()


def test_masks_scores_sinks_and_dropout_reach_the_kernel():
    module = Attention(WIDTH, HEADS, sink=True, dropout=0.5)
    nn.init.normal_(module.sink)
    x = torch.randn(2, LENGTH, WIDTH)
    assert not torch.equal(module(x), module(x))
    module.eval()
    q, k, v = module._project(x)
    mask, score = headway.sliding_window(3), headway.softcap(0.1)
    out = headway.attention(q, k, v, score, mask, scale=12**-0.5, sink=module.sink)
    got = module(x, mask, score)
    torch.testing.assert_close(got, module.o_proj(out.transpose(1, 2).flatten(2)))
    tiles = headway.block_mask(mask, 1, 1, LENGTH, LENGTH)
    torch.testing.assert_close(module(x, tiles, score), got)


def test_yarn_slows_the_slow_pairs_only():
    plain, slow = Rotary(64), Rotary(64, yarn=YaRN(40.0, 4096))
    ratio = plain.frequencies() / slow.frequencies()
    assert ratio[0] == 1.0
    assert ratio[-1].item() == pytest.approx(40.0)
    assert (ratio.diff() >= -1e-5).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((48, 4, 3), "multiple of kv_heads=3"),
        ((50, 4), "give head_width"),
        ((48, 4, None, 8, {"rotary": Rotary(12)}), "rotates 12 channels, but a head has 8"),
        ((48, 4, None, 8, {"scaling": "softmax"}), "'softmax' must be one of"),
        ((48, 4, None, 8, {"scale": 0.0}), "scale=0.0"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    options = arguments[-1] if isinstance(arguments[-1], dict) else {}
    positional = [a for a in arguments if not isinstance(a, dict)]
    with pytest.raises(ArgumentError, match=message):
        Attention(*positional, **options)


@pytest.mark.parametrize("shape", [(2, 4, WIDTH + 1), (4, WIDTH), (2, 3, 4, WIDTH)])
@pytest.mark.parametrize("kind", [Attention, MLA])
def test_inputs_of_another_shape_are_refused(kind, shape):
    with pytest.raises(ArgumentError, match=rf"width={WIDTH}, got \({shape[0]}, "):
        kind(WIDTH, HEADS)(torch.randn(shape))


def test_angles_without_rotary_are_refused():
    x = torch.randn(1, 4, WIDTH)
    with pytest.raises(ArgumentError, match="has no rotary"):
        Attention(WIDTH, HEADS)(x, angles=Rotary(12).angles(torch.arange(4)))
    with pytest.raises(ArgumentError, match="no headway"):
        rescale(nn.Linear(2, 2), "init")


@pytest.mark.parametrize("kind", [Attention, MLA])
def test_decoding_in_parts_repeats_the_whole(kind):
    if kind is MLA:
        small = {"kv_lora_rank": 8, "nope_width": 8, "rope_width": 4, "value_width": 6}
        module = MLA(WIDTH, HEADS, **small).double()
    else:
        module = Attention(WIDTH, HEADS, 2, rotary=Rotary(12), scaling="query").double()
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    past, parts = Past(), []
    with torch.no_grad():
        whole = module(x, headway.causal())
        for part in x.split([5, 1, 15], dim=1):
            start = past.length
            angles = module.rotary.angles(torch.arange(start, start + part.shape[1]))
            parts.append(module(part, headway.causal(), angles=angles, past=past))
    torch.testing.assert_close(torch.cat(parts, 1), whole)
