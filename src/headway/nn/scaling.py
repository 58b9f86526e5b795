"""Where the softmax scale lives: one explicit choice per module, applied exactly once.

    "logits"  the kernel multiplies q kᵀ by it                     (the usual meaning, the default)
    "query"   q is multiplied by it, the kernel is told 1.0
    "init"    the query weights start multiplied by it, and nothing multiplies at run time

All three give the same logits at initialisation. "logits" and "query" train alike; "init" does not
under Adam: its query weights are smaller by the scale but their steps are not, which is a learning
rate 1/scale times larger for them. Under an optimizer with steps proportional to the weights, such
as Adafactor with parameter scaling, it trains alike again. (`headway experiment scaling` shows it.)
"""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from .. import inference
from ..api import attention, attention_with_stats
from ..arguments import check_dense, dropout_of, flag_of, number_of
from ..distributed.layout import Layout
from ..errors import ArgumentError
from ..inference import Layer
from ..run import run, run_out
from ..stability.record import MaxLogit
from ..stability.rows import local_part, local_rows
from ..types import Coords, Request
from .past import Past, check_past, length_of, positions_of
from .rotary import Angles, Rotary

Scaling = Literal["logits", "query", "init"]
SCALINGS: tuple[str, ...] = get_args(Scaling)
_KEY = "_extra_state"  # under which PyTorch keeps what `get_extra_state` returns


class ScaledAttention(nn.Module):
    """A base of `Attention` and `MLA`: it calls attention with the right scale, records max logits,
    and keeps the choice of scaling in the state dict.

    Attributes: `width`, of the input and output; `scaling`; `scale`, what the logits are multiplied
    by wherever it happens; and `max_logit`, the `MaxLogit` of the heads.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        scale: float,
        scaling: Scaling,
        sink: bool,
        dropout: float,
        backend: str,
        init: Callable[[Tensor], Any] | None,
        device: Any,
        dtype: torch.dtype | None,
    ):
        super().__init__()
        if scaling not in SCALINGS:
            raise ArgumentError(
                f"scaling={scaling!r} must be one of {', '.join(map(repr, SCALINGS))}"
            )
        self.scale = number_of("scale", scale)
        if not 0 < self.scale < math.inf:
            raise ArgumentError(f"scale={scale!r} must be a positive number")
        self.width, self.heads = width, heads
        self.scaling: str = scaling
        self.dropout = dropout_of(dropout)
        self.backend = backend
        self.init = init
        sink = flag_of("sink", sink)
        self.sink = nn.Parameter(torch.empty(heads, device=device, dtype=dtype)) if sink else None
        self.max_logit = MaxLogit(heads, device)
        self.register_load_state_dict_pre_hook(_check_scaling)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        score: Any,
        past: "Past | Layer | None" = None,
        layout: Layout | tuple[Layout, None] | None = None,
    ) -> Tensor:
        """(b, h, L, d), ... -> (b, L, h * dv): the one place where the scale is applied."""
        if past is None:
            out = self.trained(q, k, v, mask, score, layout=layout)
        elif layout is not None:
            raise ArgumentError("a past and a layout do not go together: decode without a layout")
        elif isinstance(past, Layer):
            check_past(mask, past)
            past.append(k, v)
            out = self.inferred(q, *past.kv, mask, score, past.options)
        else:
            check_past(mask, past)
            before, total = length_of(past), past.length + k.shape[2]
            k, v = past.extended(k, v)
            if before and not torch.is_grad_enabled() and not (self.training and self.dropout):
                lengths = torch.full((len(q),), total, dtype=torch.int32, device=q.device)
                out = self.inferred(q, k, v, mask, score, {"lengths": lengths})
            else:
                out = self.trained(q, k[:, :, :total], v[:, :, :total], mask, score, before)
            past.keep(k, v, total)  # a call that was refused leaves it as it was
        return out.transpose(1, 2).flatten(2)

    def trained(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, score: Any, start: int = 0,
        layout: Layout | tuple[Layout, None] | None = None,
    ) -> Tensor:  # fmt: skip
        """(b, h, L, dv): attention with a gradient, of queries from position `start` on, or of the
        tokens of a layout."""
        q, options = self._scaled(q)
        options["dropout"] = self.dropout if self.training else 0.0
        if start:
            request = Request(q, k, v, score, mask, keys=Coords(q=start), **options)
            if not self.max_logit.recording:
                return run_out(request)
            result = run(request._replace(max_logit=True))
            self.max_logit(result.max_logit)
            return result.out
        options["layout"] = layout
        if not self.max_logit.recording:
            return attention(q, k, v, score, mask, **options)
        out, _, max_logit = attention_with_stats(q, k, v, score, mask, **options)
        self.max_logit(max_logit)
        return out

    def inferred(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, score: Any, options: dict[str, Any]
    ) -> Tensor:
        """(b, h, L, dv): attention over a cache."""
        if self.training and self.dropout:
            raise ArgumentError(
                f"dropout={self.dropout} has no place in inference over a cache; call eval()"
            )
        q, own = self._scaled(q)
        if not self.max_logit.recording:
            return inference.attention(q, k, v, score, mask, **own, **options)
        out, _, max_logit = inference.attention_with_stats(q, k, v, score, mask, **own, **options)
        self.max_logit(max_logit)
        return out

    def _scaled(self, q: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """q, and the options of a call, one of which has the scale."""
        by_kernel = self.scale if self.scaling == "logits" else 1.0
        if self.scaling == "query":
            q = q * self.scale
        return q, {"scale": by_kernel, "sink": self.sink, "backend": self.backend}

    def check_input(self, x: Tensor) -> None:
        """x is `(b, length, width)`."""
        check_dense(x=x)
        if x.dim() != 3 or x.shape[-1] != self.width:
            raise ArgumentError(
                f"x must be (batch, length, width) with width={self.width}, got {tuple(x.shape)}"
            )

    @staticmethod
    def angles_of(
        rotary: Rotary, x: Tensor, past: "Past | Layer | None", layout: Layout | None = None
    ) -> Angles:
        """Return the angles of the positions of x `(b, length, width)`: those of the layout, or the
        next after the past."""
        if layout is not None:
            return rotary.angles(layout.positions.to(x.device))
        return rotary.angles(positions_of(past, x.shape[1], x.device))

    def query_side(self) -> list[tuple[Tensor, int]]:
        """The parameters that make the queries, each with the number of its first rows that do."""
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise every parameter, the scale of "init" included; forget the recorded logits.

        Projections by the `init` given to the constructor, which fills a weight in place, or as
        `nn.Linear` does by itself. Initialising the weights from outside instead would undo "init".
        """
        for module in self.children():
            if isinstance(module, nn.Linear | nn.RMSNorm):
                module.reset_parameters()
            if isinstance(module, nn.Linear) and self.init is not None:
                self.init(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.sink is not None:
            nn.init.zeros_(self.sink)
        if self.scaling == "init":
            self._scale_queries(self.scale)
        if not self.max_logit.value.is_meta:
            self.max_logit.reset()

    @torch.no_grad()
    def _scale_queries(self, factor: float) -> None:
        for parameter, count in self.query_side():
            local = local_part(parameter)
            wide = torch.promote_types(local.dtype, torch.float32)
            factors = torch.ones(len(local), dtype=wide, device="cpu")
            factors[local_rows(parameter) < count] = factor
            local.mul_(factors.to(local.device).view(-1, *[1] * (local.dim() - 1)))

    def get_extra_state(self) -> Tensor:
        """The scaling's number and the scale: a tensor, so that every checkpoint format can hold
        it."""
        state = SCALINGS.index(self.scaling), self.scale
        return torch.tensor(state, dtype=torch.float32, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Nothing to set: `_check_scaling` has refused what differs."""


def _check_scaling(module: Any, state_dict: dict, prefix: str, *_: Any) -> None:
    if not any(key.startswith(prefix) for key in state_dict):
        return  # not in this checkpoint: PyTorch reports what is missing
    name = prefix.removesuffix(".") or type(module).__name__
    saved = state_dict.get(prefix + _KEY)
    if saved is None:
        # Written by other software, where weights are free of the scale.
        if module.scaling == "init":
            raise ArgumentError(
                f"{name} has scaling='init', but the checkpoint does not say where its scale is: "
                "weights of other software are free of it. Call headway.nn.rescale(model, "
                "'logits'), load, then headway.nn.rescale(model, 'init')"
            )
        state_dict[prefix + _KEY] = module.get_extra_state()
        return
    code, scale = saved.tolist()
    saved_scaling = SCALINGS[int(code)]
    if saved_scaling != module.scaling:
        raise ArgumentError(
            f"{name} has scaling={module.scaling!r}, but the checkpoint was saved with "
            f"{saved_scaling!r}. To convert: headway.nn.rescale(model, {saved_scaling!r}), load "
            f"the checkpoint, then headway.nn.rescale(model, {module.scaling!r})"
        )
    # Elsewhere the scale is applied at run time and is the module's business (a longer context
    # may well change it). 1 %: formats that narrow every number keep 3 digits.
    if module.scaling == "init" and abs(scale / module.scale - 1) > 0.01:
        raise ArgumentError(
            f"{name} has scale={module.scale:.6g} in its query weights, but the checkpoint was "
            f"saved with {scale:.6g} in them. To convert: load it into a model of that scale, "
            "headway.nn.rescale(it, 'logits'), load its state dict into this model after "
            "headway.nn.rescale(model, 'logits'), then headway.nn.rescale(model, 'init')"
        )


def rescale(model: nn.Module, scaling: Scaling) -> None:
    """Move the scale of every `Attention` and `MLA` in `model`, in place.

    The model computes the same logits, up to rounding. To convert a checkpoint, rescale the model
    to the checkpoint's scaling, load it, and rescale to yours. Optimizer state is not converted:
    under Adam the two train differently.

    **Raises:** `ArgumentError` if there is no such module or the name is not a scaling.
    """
    if scaling not in SCALINGS:
        raise ArgumentError(f"scaling={scaling!r} must be one of {', '.join(map(repr, SCALINGS))}")
    modules = [m for m in model.modules() if isinstance(m, ScaledAttention)]
    if not modules:
        raise ArgumentError(
            f"{type(model).__name__} holds no headway.nn.Attention or MLA to rescale"
        )
    for module in modules:
        if module.scaling != scaling and "init" in (module.scaling, scaling):
            module._scale_queries(module.scale if scaling == "init" else 1 / module.scale)
        module.scaling = scaling
