"""Errors for keywords of other libraries' attention, which say what to write here.

The public calls end in `**unknown: Never`. A type checker refuses unknown keywords, and the calls
raise before anything else, with the replacement that Python's own error would lack.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from .errors import UnknownKeyword

_WEIGHTS = "no weights are ever made; to look at them, call headway.attention_weights(q, k, ...)"
_STATS = "headway.attention_with_stats returns (out, lse, max_logit)"
_CAUSAL = "write mask=headway.causal()"
_CHOSEN = "leave it out: tile sizes are chosen here, and searched by the command headway tune"

# By keyword: a parameter that a function has if this concerns it, and the way out.
_WAYS: dict[str, tuple[str, str]] = {
    "is_causal": ("mask", _CAUSAL),
    "causal": ("mask", _CAUSAL),
    "attn_mask": (
        "score", "a bool tensor m is mask=headway.dense(m), a float one score=headway.bias(m)"
    ),
    "attention_mask": (
        "mask", "m of (batch, kv_len), 1 at tokens, is mask=headway.dense(m[:, None, None].bool())"
    ),
    "key_padding_mask": (
        "mask", "m of (batch, kv_len), True at padding, is mask=headway.dense(~m[:, None, None])"
    ),
    "layout": (
        "mask", "a sequence is cut over ranks in headway.attention and attention_with_stats alone"
    ),
    "mask_mod": ("mask", "write mask="),
    "block_mask": ("mask", "write mask="),
    "window_size": (
        "mask", "a window of the last n keys is mask=headway.causal() & headway.sliding_window(n)"
    ),
    "score_mod": ("score", "write score="),
    "attn_bias": ("score", "write score=headway.bias(tensor)"),
    "bias": ("score", "write score=headway.bias(tensor)"),
    "softcap": ("score", "write score=headway.softcap(cap)"),
    "alibi_slopes": ("score", "write score=headway.alibi(slopes)"),
    "dropout_p": ("dropout", "write dropout="),
    "generator": ("seed", "write seed=, a number or a 0-d int64 tensor"),
    "softmax_scale": ("scale", "write scale="),
    "sm_scale": ("scale", "write scale="),
    "s_aux": ("sink", "write sink="),
    "sinks": ("sink", "write sink="),
    "learnable_sink": ("sink", "write sink="),
    "enable_gqa": (
        "mask", "leave it out: query heads share keys wherever k and v have fewer heads"
    ),
    "return_lse": ("sink", _STATS),
    "return_aux": ("sink", _STATS),
    "return_weights": ("sink", _WEIGHTS),
    "return_attn_probs": ("sink", _WEIGHTS),
    "need_weights": ("sink", _WEIGHTS),
    "output_attentions": ("sink", _WEIGHTS),
    "kernel_options": ("mask", _CHOSEN),
    "out": ("score", "it returns a new tensor; headway.inference.attention takes out="),
    "position_ids": ("angles", "write angles=module.rotary.angles(position_ids)"),
    "past_key_value": ("past", "write past=headway.nn.Past(), one for each layer"),
    "past_key_values": ("past", "write past=headway.nn.Past(), one for each layer"),
    "BLOCK_SIZE": ("tile", "write tile="),
    "B": ("tile", "write b="),
    "H": ("tile", "write h="),
    "Q_LEN": ("tile", "write q_len="),
    "KV_LEN": ("tile", "write kv_len="),
}  # fmt: skip


def unknown_keywords(fn: Callable[..., Any], unknown: Iterable[str]) -> UnknownKeyword:
    """Return the error for the first of the keywords that `fn` does not have."""
    name = next(iter(unknown))
    kinds = inspect.signature(fn).parameters.items()
    parameters = [n for n, p in kinds if p.kind is not p.VAR_KEYWORD and n != "self"]
    parameter, way = _WAYS.get(name, ("", ""))
    if parameter not in parameters:
        alike = difflib.get_close_matches(name, parameters, n=1)
        way = f"did you mean {alike[0]}=?" if alike else f"it takes {', '.join(parameters)}"
    return UnknownKeyword(f"{fn.__name__}() got an unexpected keyword argument {name!r}; {way}")
