"""Which rows of which weights make the queries and keys of each head: all that QK-Clip has to know
about a module.

An adapter is a function `module -> Layout`. There is one for this library's modules, and for those
of Hugging Face that are like Llama's or DeepSeek's; for others, write one and pass
`adapters={MyAttention: my_layout}`.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from ..errors import ArgumentError
from .record import MaxLogit

# "query" and "key" meet in the logit's main part. "query_rope" meets a key that all heads share and
# that is therefore never scaled (MLA). "value" and other rows do not enter a logit.
Role = Literal["query", "query_rope", "key", "value", "other"]


class Block(NamedTuple):
    """Consecutive rows of a weight that belong to one head: their role, the head, how many."""

    role: Role
    head: int
    rows: int


class Projection(NamedTuple):
    """A linear layer, and the blocks of its rows, from the first row to the last."""

    linear: nn.Module
    blocks: tuple[Block, ...]


class Layout(NamedTuple):
    """The heads of one attention module and the projections that make its queries and keys.

    Query head h reads key head `h // (heads // kv_heads)`.
    """

    heads: int
    kv_heads: int
    projections: tuple[Projection, ...]


Adapter = Callable[[Any], Layout]


class AttentionLayer(NamedTuple):
    """An attention found in a model."""

    name: str
    module: nn.Module
    layout: Layout
    record: MaxLogit


def heads_of(role: Role, heads: int, width: int) -> tuple[Block, ...]:
    """Return one block of `width` rows per head."""
    return tuple(Block(role, head, width) for head in range(heads))


def gqa_layout(module: Any) -> Layout:
    """`headway.nn.Attention`."""
    return _gqa(module, module.heads, module.kv_heads, module.head_width)


def mla_layout(module: Any) -> Layout:
    """`headway.nn.MLA`."""
    return _mla(module, module.heads, module.nope_width, module.rope_width, module.value_width)


def huggingface_gqa_layout(module: Any) -> Layout:
    """Hugging Face's `LlamaAttention` and those with its names: Mistral, Qwen2, Gemma, Phi-3."""
    config = module.config
    return _gqa(module, config.num_attention_heads, config.num_key_value_heads, module.head_dim)


def huggingface_mla_layout(module: Any) -> Layout:
    """Hugging Face's `DeepseekV2Attention`, `DeepseekV3Attention` and those with their names."""
    widths = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
    return _mla(module, module.num_heads, *widths)


def _gqa(module: Any, heads: int, kv_heads: int, width: int) -> Layout:
    roles = ("query", heads), ("key", kv_heads), ("value", kv_heads)
    q, k, v = (heads_of(role, count, width) for role, count in roles)
    fused = getattr(module, "qkv_proj", None)
    if fused is not None:
        return Layout(heads, kv_heads, (Projection(fused, q + k + v),))
    linears = module.q_proj, module.k_proj, module.v_proj
    return Layout(heads, kv_heads, tuple(map(Projection, linears, (q, k, v))))


def _mla(module: Any, heads: int, nope: int, rope: int, value: int) -> Layout:
    in_turns = lambda *roles: tuple(Block(x, h, rows) for h in range(heads) for x, rows in roles)
    q = in_turns(("query", nope), ("query_rope", rope))
    kv = in_turns(("key", nope), ("value", value))
    query = module.q_proj if module.q_lora_rank is None else module.q_b_proj
    return Layout(heads, heads, (Projection(query, q), Projection(module.kv_b_proj, kv)))


def check_model(model: object) -> None:
    """Refuse anything but a module, such as its parameters."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; pass the model itself, "
            "not model.parameters()"
        )


def find_layers(
    model: nn.Module, adapters: dict[type, Adapter | None] | None = None
) -> list[AttentionLayer]:
    """Every attention of `model`, in order, with its `MaxLogit`, which one of Hugging Face's is
    given here if it has none.

    **Raises:** `ArgumentError` for what looks like an attention but has no adapter.
    `adapters={SomeAttention: None}` leaves a class out on purpose.
    """
    layers = []
    check_model(model)
    for path, module in model.named_modules():
        adapter = _adapter(module, adapters or {})
        if adapter is None:
            continue
        name = clean_name(path) or type(module).__name__
        layout = adapter(module)
        _check(name, layout)
        layers.append(AttentionLayer(name, module, layout, recorder(module, layout.heads)))
    return layers


def recorder(module: nn.Module, heads: int) -> MaxLogit:
    """Return the `MaxLogit` of a module, a new one if needed. What computes its attention calls it:
    `module.max_logit(attention_with_stats(...).max_logit)`."""
    record = getattr(module, "max_logit", None)
    if isinstance(record, MaxLogit):
        return record
    if record is not None:
        raise ArgumentError(
            f"{type(module).__name__}.max_logit is {record!r}, where its MaxLogit should be: "
            "rename it"
        )
    device = next(module.parameters()).device
    record = module.max_logit = MaxLogit(heads, device).train(module.training)
    return record


def clean_name(path: str) -> str:
    """Return a module's name without the wrappers of compilation, activation checkpointing and
    FSDP."""
    wrappers = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
    return ".".join(part for part in path.split(".") if part not in wrappers)


def matrices(projection: Projection) -> Iterator[tuple[int, Role, int]]:
    """Join the blocks of a head and kind: (rows, role, head), a query's rope part with it."""
    size, last = 0, None
    for role, head, rows in projection.blocks:
        kind: tuple[Role, int] = ("query" if role == "query_rope" else role, head)
        if last is not None and kind != last:
            yield size, *last
            size = 0
        size, last = size + rows, kind
    if last is not None:
        yield size, *last


def _adapter(module: nn.Module, adapters: dict[type, Adapter | None]) -> Adapter | None:
    for cls in type(module).__mro__:
        if cls in adapters:
            return adapters[cls]
    kind = type(module).__name__
    if kind == "FullyShardedDataParallel":
        raise ArgumentError(
            "the model is wrapped in FullyShardedDataParallel, which flattens the weights so that "
            "heads cannot be found in them; use torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    # Told apart by what they have, so that neither headway.nn nor transformers is imported here.
    has = lambda *names: all(_own(module, name) is not None for name in names)
    if has("kv_b_proj", "nope_width"):
        return mla_layout
    if has("kv_b_proj", "qk_nope_head_dim", "config"):
        return huggingface_mla_layout
    separate = has("q_proj", "k_proj", "v_proj")
    if has("head_width", "kv_heads") and (separate or has("qkv_proj")):
        return gqa_layout
    if has("config", "head_dim") and (separate or has("qkv_proj")):
        return huggingface_gqa_layout
    # Not nn.Linear alone: GPT-2's are called Conv1D, and some hold their matrices themselves. What
    # only holds an attention has none and is looked into further.
    parts = (module, *module.children())
    owns = any(p.dim() >= 2 for part in parts for p in part.parameters(recurse=False))
    if owns and any(word in kind.lower() for word in ("attention", "attn")):
        raise ArgumentError(
            f"{kind} looks like an attention, but there is no adapter for it. Pass "
            f"adapters={{{kind}: function from the module to its Layout}}, or {{{kind}: None}} to "
            "leave it out on purpose"
        )
    return None


def _own(module: nn.Module, name: str) -> Any:
    """Return a module's own attribute: wrappers (`torch.compile`'s) show those that they wrap."""
    return module.__dict__.get(name, module._modules.get(name, getattr(type(module), name, None)))


_QK_NORMS = "q_norm k_norm query_norm key_norm q_layernorm k_layernorm qk_norm".split()


def check_clippable(layer: AttentionLayer) -> None:
    """Refuse an attention whose logits do not follow its query and key weights."""
    norms = [name for name in _QK_NORMS if isinstance(getattr(layer.module, name, None), nn.Module)]
    if norms:
        raise ArgumentError(
            f"{layer.name} normalises queries and keys after their projections "
            f"({', '.join(norms)}): scaling those weights changes no logit, so QK-Clip "
            "would do nothing. QK-norm bounds logits by itself; train without QK-Clip, or leave "
            f"the class out with adapters={{{type(layer.module).__name__}: None}}"
        )


def _check(name: str, layout: Layout) -> None:
    for linear, blocks in layout.projections:
        weight = linear._parameters.get("weight")
        rows = sum(block.rows for block in blocks)
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            raise ArgumentError(
                f"{name}: {type(linear).__name__} has no floating-point parameter `weight` of its "
                "own (quantised, parametrised or wrapped by an adapter such as LoRA), so that "
                "scaling it would be lost; merge or unwrap it"
            )
        if weight.dim() != 2 or weight.shape[0] != rows:
            raise ArgumentError(
                f"{name}: a weight of shape {tuple(weight.shape)} where the heads make {rows} "
                "rows: this module needs an adapter of its own"
            )
