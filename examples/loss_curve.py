"""Loss curves of a small Llama with and without Tilewright: `python examples/loss_curve.py`. Two minutes on a CPU.

The model of transformers learns to predict the bytes of `constitution.txt`: most of the Constitution of the United
States (1787), which is in the public domain. Two seeds of the original show how much a curve varies by itself.
"""

import argparse
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import tilewright as tw
from tilewright import hardware, source
from tilewright.errors import CannotWrite
from tilewright.record import append, require_writable, stamp

TEXT = Path(__file__).parent / "constitution.txt"
BATCH, CONTEXT, LEARNING_RATE = 16, 64, 3e-3
SEEDS = (0, 1)
WINDOW = 10  # steps over which a curve is averaged


def model_of(seed: int, dtype: torch.dtype) -> Any:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        sys.exit("this example trains a model of transformers: pip install transformers")
    torch.manual_seed(seed)
    sizes = dict(hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2)
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=256, max_position_embeddings=CONTEXT)
    return LlamaForCausalLM(config).to(dtype).train()


def curve(seed: int, steps: int, is_patched: bool, device: str, dtype: torch.dtype) -> list[float]:
    """Train and return the loss of every step. A seed decides the weights and the batches."""
    data = torch.tensor([*TEXT.read_bytes()])
    model = model_of(seed, dtype).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    if is_patched:
        tw.apply(model, optimizer=optimizer)
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        starts = torch.randint(len(data) - CONTEXT, (BATCH,), generator=generator)
        tokens = torch.stack([data[start : start + CONTEXT] for start in starts.tolist()]).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 5))
    return losses


def smooth(losses: list[float]) -> list[float]:
    """Return the mean of every window of consecutive steps."""
    return [fmean(losses[start : start + WINDOW]) for start in range(0, len(losses), WINDOW)]


def distance(one: list[float], other: list[float]) -> float:
    """Return the largest difference of two curves, averaged over windows."""
    return max(abs(a - b) for a, b in zip(smooth(one), smooth(other), strict=True))


def compare(steps: int, device: str, dtype: str) -> dict[str, list[list[float]]]:
    """Return the curves of both seeds, with and without, and print what they show."""
    found: dict[str, list[list[float]]] = {}
    for name, is_patched in (("original", False), ("tilewright", True)):
        found[name] = [curve(seed, steps, is_patched, device, getattr(torch, dtype)) for seed in SEEDS]
    print(f"{'steps':>9}  " + "  ".join(f"{f'{name}, seed {seed}':>18}" for name in found for seed in SEEDS))
    for n in range(0, steps, max(WINDOW, steps // 10)):
        means = "  ".join(f"{fmean(one[n : n + WINDOW]):18.4f}" for curves in found.values() for one in curves)
        print(f"{f'{n + 1} to {min(n + WINDOW, steps)}':>9}  {means}")
    ours = max(distance(a, b) for a, b in zip(found["tilewright"], found["original"], strict=True))
    print(f"largest difference over {WINDOW} steps: {ours:.4f} with and without, same seed;")
    print(f"{distance(*found['original']):.4f} between two seeds of the original")
    return found


def main() -> None:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps per curve, at least 1 (300)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights (float32)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append the curves to this file of records")
    given = parser.parse_args()
    if given.steps < 1:
        parser.error("--steps must be at least 1")
    if given.device == "cuda" and not has_gpu:
        parser.error("--device cuda: this machine has no GPU")
    if given.record:
        try:
            require_writable(given.record)
        except CannotWrite as error:
            parser.error(str(error))
    curves = compare(given.steps, given.device, given.dtype)
    if given.record:
        about = {"gpu": "cpu", "name": "CPU"} if given.device == "cpu" else hardware.current_gpu()
        content = {"dtype": given.dtype, "curves": curves, "window": WINDOW, "seeds": SEEDS}
        content |= {"file": "examples/loss_curve.py", "code": source.code_hash(Path(__file__))}
        content |= {"device": about, "versions": hardware.versions()}
        file_hash = source.file_hash(Path(__file__))
        append(given.record, [stamp("loss_curve", "llama", "tilewright", file_hash, **content)])


if __name__ == "__main__":
    main()
