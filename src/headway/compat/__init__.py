"""Drop-ins: the signatures and corner cases of PyTorch's and FlashAttention's calls.

- `headway.compat.torch_sdpa`: `torch.nn.functional.scaled_dot_product_attention`
- `headway.compat.flex`: `torch.nn.attention.flex_attention`
- `headway.compat.flash`, `flash3`, `flash4`: `flash_attn` and its successors
- `headway.compat.torch_varlen`: `torch.nn.attention.varlen`

Code that calls one of them changes an import; `use_for_sdpa()` reroutes code that cannot be edited.
"""

from .torch_sdpa import use_for_sdpa as use_for_sdpa
