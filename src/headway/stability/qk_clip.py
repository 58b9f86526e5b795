"""QK-Clip: rescale the query and key weights of every head whose logits grew past a bound.

    γ_h = min(1, τ / S_h),   S_h the largest logit of head h in the step

(Kimi K2, arXiv 2507.20534, section 2.1 and algorithm 1.) What is scaled by what:

    MHA      W_q by γ^α, W_k by γ^(1-α)
    MLA      q^C by γ^α, k^C by γ^(1-α), q^R by γ; the shared k^R, V and the latents stay
    GQA      K2 gives no rule, since a key head is shared by a group g of query heads:
      "query"     W_q by γ_h, W_k stays: every head exactly, no factor above one
      "group"     γ_g = min γ_h of the group: W_q by γ_g^α, W_k by γ_g^(1-α), quiet heads as well
                  (Megatron-LM's)
      "balanced"  W_k by γ_g^(1-α), W_q by γ_h / γ_g^(1-α): every head exactly, but quiet heads'
                  W_q grows, without bound over many steps

Biases are scaled with their weights. A logit is bilinear in the two sides, so each head's logits,
rotary included, are multiplied by exactly γ_h.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ..arguments import number_of
from ..errors import ArgumentError, HeadwayError
from .adapters import Adapter, AttentionLayer, Layout, Role, check_clippable, find_layers
from .logit_stats import Group, check_group, pack
from .record import reset
from .rows import is_strided, local_part, local_rows

GQARule = Literal["query", "group", "balanced"]
Masters = Callable[[nn.Parameter], Tensor | None]


class LogitError(HeadwayError, ArithmeticError):
    """Logits that are NaN or infinite, or that were not recorded."""


@dataclass(frozen=True)
class Clipped:
    """The max logits and factors of a `QKClip.step`, on the device.

    - `max_logit`, `gamma`: by layer, `(heads,)` float32; the heads of this rank under tensor
      parallelism.
    - `count`: 0-d, how many heads were clipped.
    """

    max_logit: dict[str, Tensor]
    gamma: dict[str, Tensor]
    count: Tensor


class _Plan(NamedTuple):
    """A plan of which row each factor multiplies, computed once."""

    groups: Tensor  # (N,) of the N query heads of all layers: the packed key head that each reads
    query_power: Tensor  # (N,)
    key_power: Tensor  # (K,)
    index: Tensor  # (rows,) into [1 | query factors | γ | key factors], for the rows of all targets
    sizes: list[int]  # rows of each target
    targets: list[Tensor]  # what to scale: this rank's part of these weights, biases and masters
    heads: list[int]  # of each layer, on this rank
    first: list[int]  # of each layer, the global number of this rank's first head


class QKClip:
    """QK-Clip for every attention of a model: call `.step()` after `optimizer.step()`.

    A step takes the largest logits that all forwards since the last step recorded, reduces them
    over ranks with one all-reduce, scales the weights in place, and resets the records. The host
    waits for the device only in the first step under a new layout.

    ```python
    import torch
    from headway.nn import Attention
    from headway.stability import QKClip

    model = Attention(64, heads=4)
    optimizer, clip = torch.optim.AdamW(model.parameters()), QKClip(model, tau=100.0)
    model(torch.randn(2, 50, 64)).square().mean().backward()
    optimizer.step()
    print(clip.step().max_logit)  # (4,) per layer: the largest logit of each head
    ```

    **Arguments:**

    - `model`: the model as you train it, already sharded. Its attention is `headway.nn`'s, or one
      that `adapters` or `headway.stability.adapters` knows and that records into its `MaxLogit`.
    - `tau`: the bound on logits, 100 in Kimi K2. Logits may exceed it by the growth of one step.
    - `alpha`: the query's share of the factor, 0.5 in Kimi K2.
    - `gqa`: the rule for shared key heads, see the module.
    - `group`: ranks with other data or other parts of the sequences, as in `logit_stats`.
    - `adapters`: from a class to a function that returns the `Layout` of its modules, or None to
      leave the class out.
    - `masters`: from a parameter to its higher-precision copy of the same (local) shape, which is
      scaled too, or to None.

    Layers whose query and key weights are all frozen are left out. One whose weights are frozen in
    part is refused if a frozen weight would be scaled.

    A head whose largest logit is at most tau keeps its weights, bit for bit. So does a head whose
    largest logit is not finite. -inf means that it attended to nothing. For NaN or +inf, the next
    `step` (or `check`) raises an error that names layer and head: no step waits for the device.

    **Raises:** `ArgumentError` where clipping cannot work (QK-norm, unknown attention, replaced
    parameters); `LogitError` at once for a layer without statistics.
    """

    def __init__(
        self,
        model: nn.Module,
        tau: float = 100.0,
        alpha: float = 0.5,
        *,
        gqa: GQARule = "query",
        group: Group = None,
        adapters: dict[type, Adapter | None] | None = None,
        masters: Masters | None = None,
    ):
        tau, alpha = number_of("tau", tau), number_of("alpha", alpha)
        if not (math.isfinite(tau) and tau > 0):
            raise ArgumentError(f"tau={tau!r} must be a positive number")
        if not 0 <= alpha <= 1:
            raise ArgumentError(f"alpha={alpha!r} must be from 0 to 1")
        if gqa not in get_args(GQARule):
            raise ArgumentError(f"gqa={gqa!r} must be one of {', '.join(get_args(GQARule))}")
        self.tau, self.alpha, self.gqa = tau, alpha, gqa
        self.group = check_group(group)
        self.masters = masters
        self.layers = [layer for layer in find_layers(model, adapters) if self._is_trained(layer)]
        if not self.layers:
            raise ArgumentError(
                f"{type(model).__name__} holds no attention that QK-Clip knows and that trains; "
                "use headway.nn, or pass adapters={YourAttention: function from the module to its "
                "Layout}"
            )
        for layer in self.layers:
            check_clippable(layer)
        self._parameters = [self._scaled(layer) for layer in self.layers]
        _check_unshared(self.layers, self._parameters)
        self._plan: _Plan | None = None
        self._suspect: tuple[Tensor, torch.cuda.Event | None] | None = None

    @torch.no_grad()
    def step(self) -> Clipped:
        """Clip by what was recorded since the last step, and start a new record."""
        self.check()
        records = [layer.record for layer in self.layers]
        if missing := [layer.name for layer in self.layers if layer.record.empty]:
            raise LogitError(
                f"no logits were recorded for {', '.join(missing)} since the last step: there was "
                "no forward in training mode with gradients enabled, or what computes this "
                "attention does not call module.max_logit(...)"
            )
        packed, heads = pack(records, self.group)
        plan = self._plan
        if plan is None or plan.index.device != packed.device:
            plan = self._plan = self._make_plan(heads, packed.device)
        self._check_parameters()
        # Below tau, not finite: exactly 1, which leaves a weight bit-equal.
        over = (packed > self.tau) & (packed < math.inf)
        gamma = torch.where(over, self.tau / packed, 1.0)
        factors = self._factors(plan, gamma).split(plan.sizes)
        targets = [local_part(target) for target in plan.targets]
        pairs = zip(targets, factors, strict=True)
        torch._foreach_mul_(targets, [f if t.dim() == 1 else f[:, None] for t, f in pairs])
        self._copy_for_check(packed)
        reset(records)
        names = [layer.name for layer in self.layers]
        by_layer = lambda x: dict(zip(names, x.split(heads), strict=True))
        return Clipped(by_layer(packed), by_layer(gamma), over.sum())

    def check(self) -> None:
        """Raise `LogitError` if the last step met NaN or infinite logits. `step` begins with it;
        call it after the last one, too."""
        if self._suspect is None:
            return
        (packed, event), self._suspect = self._suspect, None
        if event is not None:
            event.synchronize()  # of a copy that was queued one whole step ago
        infinite = (packed == math.inf).nonzero().flatten().tolist()
        if not infinite:
            return
        assert self._plan is not None
        per_layer = zip(self.layers, self._plan.heads, self._plan.first, strict=True)
        names = [f"{layer.name} head {first + n}" for layer, count, first in per_layer
                 for n in range(count)]  # fmt: skip
        heads = ", ".join(names[n] for n in infinite[:8])
        more = f" and {len(infinite) - 8} more" if len(infinite) > 8 else ""
        raise LogitError(
            f"NaN or infinite logits in the last step: {heads}{more}. Their weights were left as "
            "they were; NaN in activations or weights, or an overflow in half precision, came "
            "before"
        )

    def _copy_for_check(self, packed: Tensor) -> None:
        """Start the copy that the next `check` looks at."""
        if packed.device.type != "cuda":
            self._suspect = packed.to("cpu", copy=True), None
            return
        host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
        host.copy_(packed, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._suspect = host, event

    def _roles(self, layout: Layout) -> tuple[Role, ...]:
        """Return the roles whose rows are scaled."""
        query = self.alpha > 0 or self.gqa == "balanced" or self._spares_keys(layout)
        key = self.alpha < 1 and not self._spares_keys(layout)
        return ("query_rope", *["query"] * query, *["key"] * key)  # type: ignore[return-value]

    def _spares_keys(self, layout: Layout) -> bool:
        return layout.heads > layout.kv_heads and self.gqa == "query"

    def _scaled(self, layer: AttentionLayer) -> list[nn.Parameter]:
        return _parameters(layer, self._roles(layer.layout))

    def _is_trained(self, layer: AttentionLayer) -> bool:
        """Return False for a frozen layer. Raise where only a part of what is scaled is frozen."""
        if not any(p.requires_grad for p in _parameters(layer, ("query", "query_rope", "key"))):
            return False
        frozen = [p for p in self._scaled(layer) if not p.requires_grad]
        if frozen:
            names = [n for n, p in layer.module.named_parameters() if any(p is f for f in frozen)]
            raise ArgumentError(
                f"{layer.name}: {', '.join(names)} is frozen (requires_grad=False), but QK-Clip "
                "would scale it. Train it or freeze all weights of its queries and keys; "
                "alpha=1.0 scales queries alone, alpha=0.0 keys alone"
            )
        return True

    def _factors(self, plan: _Plan, gamma: Tensor) -> Tensor:
        """Return the factor of every row of every target; each is computed as 1 where γ is 1."""
        of_group = torch.ones_like(plan.key_power)
        of_group.scatter_reduce_(0, plan.groups, gamma, "amin")
        key = of_group**plan.key_power
        if self.gqa == "group":
            query = of_group[plan.groups] ** plan.query_power
        elif self.gqa == "balanced":
            query = gamma / key[plan.groups]
        else:
            query = gamma**plan.query_power
        return torch.cat((gamma.new_ones(1), query, gamma, key))[plan.index]

    def _make_plan(self, heads: list[int], device: torch.device) -> _Plan:
        total = sum(heads)
        groups, query_power, key_power, first_heads = [], [], [], []
        index, sizes, targets = [], [], []
        start = 0
        per_layer = zip(self.layers, self._parameters, heads, strict=True)
        for layer, parameters, local_heads in per_layer:
            layout = layer.layout
            per_key = layout.heads // layout.kv_heads
            if local_heads % per_key:
                raise ArgumentError(
                    f"{layer.name}: this rank has {local_heads} of {layout.heads} query heads, not "
                    f"a multiple of the {per_key} that share a key head"
                )
            is_whole = local_heads == layout.heads
            first_head = 0 if is_whole else _first_head(layer, parameters, local_heads)
            kv_start = len(key_power)
            groups += [kv_start + h // per_key for h in range(local_heads)]
            alone = self._spares_keys(layout)
            query_power += [1.0 if alone else self.alpha] * local_heads
            key_power += [0.0 if alone else 1 - self.alpha] * (local_heads // per_key)
            offsets = {
                "query": (1 + start, first_head, local_heads),
                "query_rope": (1 + total + start, first_head, local_heads),
                "key": (1 + 2 * total + kv_start, first_head // per_key, local_heads // per_key),
            }
            offsets = {role: offsets[role] for role in self._roles(layout)}
            for parameter, rows in zip(parameters, _rows(layer, offsets), strict=True):
                for target, local in self._targets(layer, parameter):
                    targets.append(target)
                    index.append(rows[local])
                    sizes.append(len(local))
            first_heads.append(first_head)
            start += local_heads
        floats = {"dtype": torch.float32, "device": device}
        return _Plan(
            torch.tensor(groups, device=device), torch.tensor(query_power, **floats),
            torch.tensor(key_power, **floats), torch.cat(index).to(device), sizes, targets, heads,
            first_heads,
        )  # fmt: skip

    def _targets(
        self, layer: AttentionLayer, parameter: nn.Parameter
    ) -> list[tuple[Tensor, Tensor]]:
        rows = local_rows(parameter)
        master = None if self.masters is None else self.masters(parameter)
        if master is None:
            return [(parameter, rows)]
        local_shape = local_part(parameter).shape
        if local_part(master).shape != local_shape:
            raise ArgumentError(
                f"{layer.name}: the master of a {tuple(parameter.shape)} parameter has shape "
                f"{tuple(master.shape)}, the part of the parameter on this rank "
                f"{tuple(local_shape)}; masters must return the same part, not flattened"
            )
        return [(parameter, rows), (master, rows)]

    def _check_parameters(self) -> None:
        for layer, parameters in zip(self.layers, self._parameters, strict=True):
            now = self._scaled(layer)
            if any(a is not b or not b.requires_grad for a, b in zip(parameters, now, strict=True)):
                raise ArgumentError(
                    f"{layer.name}: its parameters were replaced or frozen after QKClip was made; "
                    "make it after sharding, loading and freezing, as one makes an optimizer"
                )


def _parameters(layer: AttentionLayer, roles: Sequence[Role]) -> list[nn.Parameter]:
    """Return the weights and biases that have rows of these roles."""
    return [
        parameter
        for linear, blocks in layer.layout.projections
        if any(block.role in roles for block in blocks)
        for parameter in (linear._parameters["weight"], linear._parameters.get("bias"))
        if parameter is not None
    ]


def _rows(layer: AttentionLayer, offsets: dict[Role, tuple[int, int, int]]) -> list[Tensor]:
    """Return each row's factor index, by parameter; `offsets`: a role's start, head and count."""
    row_tensors = []
    for linear, blocks in layer.layout.projections:
        rows = []
        for role, head, count in blocks:
            start, first_head, local_heads = offsets.get(role, (0, 0, 0))
            is_local = first_head <= head < first_head + local_heads
            rows += [start + head - first_head if is_local else 0] * count
        if any(block.role in offsets for block in blocks):
            bias = linear._parameters.get("bias")
            row_tensors += [torch.tensor(rows, device="cpu")] * (1 if bias is None else 2)
    return row_tensors


def _first_head(layer: AttentionLayer, parameters: Sequence[nn.Parameter], local_heads: int) -> int:
    """Return the number of this rank's first head: a `Shard(0)` that is not FSDP's cuts them."""
    for parameter in parameters:
        placements = getattr(parameter, "placements", ())
        cuts = [n for n, p in enumerate(placements) if p.is_shard(0) and not is_strided(p)]
        mesh = parameter.device_mesh if len(cuts) == 1 else None  # type: ignore[attr-defined]
        if mesh is not None and mesh.size(cuts[0]) * local_heads == layer.layout.heads:
            return mesh.get_local_rank(cuts[0]) * local_heads
    raise ArgumentError(
        f"{layer.name}: {local_heads} of {layer.layout.heads} heads were recorded, but its weights "
        "are not cut by head over a mesh (ColwiseParallel), so that it is unknown which they are"
    )


def _check_unshared(layers: list[AttentionLayer], parameters: list[list[nn.Parameter]]) -> None:
    owners: dict[int, AttentionLayer] = {}
    for layer, layer_parameters in zip(layers, parameters, strict=True):
        for parameter in layer_parameters:
            if (owner := owners.get(id(parameter))) is not None:
                both = "Queries and keys of" if owner is layer else f"{owner.name} and"
                raise ArgumentError(
                    f"{both} {layer.name} share a parameter, which would be clipped twice"
                )
            owners[id(parameter)] = layer
