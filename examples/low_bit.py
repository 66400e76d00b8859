"""Perplexity of a small transformer in low-bit formats: `python examples/low_bit.py [STEPS]`. A minute on a CPU.

The model of `transformer.py` learns to predict the bytes of this repository's pages; the last tenth is held out.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformer import Transformer

import tilewright as tw

BATCH, CONTEXT, WIDTH = 16, 64, 128
WINDOWS = 256  # slices of the held-out text that measure the perplexity
PAGES = Path(__file__).parent.parent / "docs"
FORMATS = (
    *("int8", "int8-a8", "fp8", "fp8-a8", "fp8-tensor", "fp8-block128", "mxfp8"),
    *("int4-g32-zero", "int4-g32", "int4-g128", "int4", "nf4", "mxfp4"),
)


def split_text() -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and those held out."""
    data = torch.tensor([*b"".join(page.read_bytes() for page in sorted(PAGES.glob("*.md")))])
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def train(data: Tensor, steps: int) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(vocabulary=256, width=WIDTH)
    optimizer = tw.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    for _ in range(steps):
        starts = torch.randint(len(data) - CONTEXT, (BATCH,))
        loss = model.loss(torch.stack([data[start : start + CONTEXT + 1] for start in starts]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def perplexity(model: Transformer, data: Tensor) -> float:
    """Return e to the mean cross entropy of predicting each held-out byte."""
    windows = data[: WINDOWS * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    logits = model(windows[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).exp().item()


def pruned(model: Transformer) -> Transformer:
    """Return the model with the two largest of every four weights of its linear layers."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = tw.sparsify(module.weight.data).dense()
    return model


def compare(steps: int) -> dict[str, float]:
    """Train, print and return the perplexity with the weights of all linear layers in each format."""
    data, held_out = split_text()
    model = train(data, steps)
    found = {"float32": perplexity(model, held_out)}
    print(f"{'format':14}{'perplexity':>11}{'bits per weight':>17}{'lowest SNR (dB)':>17}")
    print(f"{'float32':14}{found['float32']:11.3f}{32:17.2f}")
    for name in FORMATS:
        with tw.apply(model, linear=name, include=[]) as patched:
            found[name] = perplexity(model, held_out)
            weights = sum(layer.original.numel() for layer in patched.quantized)
            bits = 8 * sum(layer.weight.nbytes for layer in patched.quantized) / weights
            noise = min(layer.snr for layer in patched.quantized)
            print(f"{name:14}{found[name]:11.3f}{bits:17.2f}{noise:17.1f}")
    found["2:4"] = perplexity(pruned(model), held_out)
    print(f"{'2:4':14}{found['2:4']:11.3f}   pruned by magnitude, without training again")
    return found


if __name__ == "__main__":
    compare(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
