"""Train the transformer of `transformer.py` on this file: `python examples/train.py [STEPS]`. A minute on a CPU."""

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformer import Transformer

import tilewright as tw

BATCH, CONTEXT = 8, 64


def batch(data: Tensor, device: str) -> Tensor:
    """Return BATCH random slices of the data, [BATCH, CONTEXT + 1]."""
    starts = torch.randint(len(data) - CONTEXT, (BATCH,))
    return torch.stack([data[start : start + CONTEXT + 1] for start in starts]).to(device)


def train(steps: int) -> list[float]:
    """Train a model to predict the bytes of this file and return the loss of every step."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = torch.tensor(list(Path(__file__).read_bytes()))
    model = Transformer(vocabulary=256).to(device)
    optimizer = tw.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)  # clips gradients in the same kernels
    losses = []
    for step in range(steps):
        loss = model.loss(batch(data, device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:4d}   loss {losses[-1]:.3f}   gradient norm {optimizer.grad_norm:.2f}")
    return losses


if __name__ == "__main__":
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
