"""Fine-tune a tiny Llama with LoRA on packed rows: transformers, PEFT, and Headway's attention.

Needs `pip install transformers peft`. The model first learns to count up through the alphabet
("defgh"); then its weights are frozen, and LoRA teaches it to count down. Sequences of many lengths
are packed into one row, told apart by positions that restart; Headway keeps them apart without a
square of pairs. At the end both skills are there: the second with LoRA's matrices, the first
without.

    python examples/finetune_lora.py        # half a minute on a laptop's CPU
    python examples/finetune_lora.py --help
"""

import argparse
import time

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from headway.integrations import transformers as headway_transformers

LETTERS = 26


def packed(length: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """A row of sequences that count by `step`: tokens, positions that restart, targets (1, length).

    Nothing is learned of a sequence's first letter, which may be any."""
    sizes = torch.randint(3, 20, (length // 3,))
    start = torch.repeat_interleave(torch.randint(LETTERS, sizes.shape), sizes)[:length]
    first = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)[:length]
    positions = torch.arange(length) - first
    tokens = (start + step * positions) % LETTERS
    return tokens[None], positions[None], tokens.masked_fill(positions == 0, -100)[None]


def loss_of(model: nn.Module, length: int, step: int) -> Tensor:
    tokens, positions, targets = packed(length, step)
    # Without a cache and an attention mask, transformers reads the packing off the positions.
    return model(tokens, position_ids=positions, labels=targets, use_cache=False).loss


def train(model: nn.Module, steps: int, length: int, step: int, lr: float) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    losses, start = [], time.perf_counter()
    for n in range(1, steps + 1):
        loss = loss_of(model, length, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if n % max(1, steps // 5) == 0:
            seconds = time.perf_counter() - start
            print(f"  step {n:4}/{steps}   loss {losses[-1]:.3f}   {seconds:.0f} s")
    return losses


@torch.no_grad()
def continued(model: nn.Module, letters: str, count: int = 8) -> str:
    tokens = torch.tensor([[ord(c) - 97 for c in letters]])
    for _ in range(count):
        tokens = torch.cat((tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    return "".join(chr(97 + t) for t in tokens[0].tolist())


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train twice, print, and return the losses on both tasks before and after LoRA."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="of the base model, and of LoRA")
    parser.add_argument("--length", type=int, default=512, help="tokens in a packed row")
    parser.add_argument("--rank", type=int, default=8)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    headway_transformers.register()
    config = LlamaConfig(
        vocab_size=LETTERS, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="headway",
    )  # fmt: skip
    base = LlamaForCausalLM(config)
    print("the base model learns to count up")
    train(base, args.steps, args.length, step=1, lr=3e-3)

    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=args.rank, target_modules=layers))
    before = loss_of(model, args.length, step=-1).item()
    print("LoRA learns to count down")
    model.print_trainable_parameters()
    train(model, args.steps, args.length, step=-1, lr=1e-2)

    model.eval()
    with torch.no_grad():
        after = loss_of(model, args.length, step=-1).item()
        with model.disable_adapter():
            kept = loss_of(model, args.length, step=1).item()
            up = continued(model, "fgh")
    print(f"\nwith LoRA     hgf -> {continued(model, 'hgf')}   loss {before:.2f} -> {after:.2f}")
    print(f"without it    fgh -> {up}   loss {kept:.2f}")
    return {"before": before, "after": after, "kept": kept}


if __name__ == "__main__":
    main()
