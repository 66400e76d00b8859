"""Generate text with a paged KV cache, several continuations of one prompt: `python examples/generate.py`.

The model has the shape of Llama and random weights. Its prompt is computed once; every continuation is a fork of that
sequence, which shares the pages of the prompt. On a GPU one CUDA graph is replayed for all tokens, since no launch
depends on the lengths. The same text comes from `eager`, which keeps its cache in plain tensors.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  the customary name
from torch import Tensor, nn

import tilewright as tw
from tilewright.serving import PagedCache


@dataclass(frozen=True)
class Shape:
    vocabulary: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 128

    @property
    def head_size(self) -> int:
        return self.width // self.heads


LARGE = Shape(vocabulary=128256, width=2048, layers=16, heads=32, kv_heads=8, hidden=8192)


class Layer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        width, kv = shape.width, shape.kv_heads * shape.head_size
        self.attention_norm = nn.Parameter(torch.ones(width))
        self.qkv = nn.Linear(width, width + 2 * kv, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.Parameter(torch.ones(width))
        self.gate_up = nn.Linear(width, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, width, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v of every token, [B, L, heads, D]."""
        heads, kv = self.shape.heads, self.shape.kv_heads
        return self.qkv(x).unflatten(-1, (heads + 2 * kv, -1)).split((heads, kv, kv), dim=2)


class Model(nn.Module):
    def __init__(self, shape: Shape, context: int):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.width))
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        pairs = shape.head_size // 2
        angles = torch.arange(context)[:, None] * 10000.0 ** (-torch.arange(pairs) / pairs)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def eager(self, tokens: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the logits [B, vocabulary] after new tokens [B, L]; `past` holds k and v of each layer, and grows."""
        x, start = self.embedding(tokens), past[0][0].shape[2] if past else 0
        cos, sin = (t[start : start + tokens.shape[1]] for t in (self.cos, self.sin))
        for number, layer in enumerate(self.layers):
            q, k, v = layer.project(F.rms_norm(x, x.shape[-1:], layer.attention_norm))
            q, k, v = (t.transpose(1, 2) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
            if start:
                k, v = (torch.cat(pair, 2) for pair in zip(past[number], (k, v), strict=True))
            past[number : number + 1] = [(k, v)]
            causal = tokens.shape[1] > 1  # the prompt, which has no past; one token sees everything
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
            x = x + layer.out(attended.transpose(1, 2).flatten(2))
            gate, up = layer.gate_up(F.rms_norm(x, x.shape[-1:], layer.feed_forward_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        return self.head(F.rms_norm(x[:, -1], x.shape[-1:], self.norm))

    def paged(self, tokens: Tensor, cache: PagedCache) -> Tensor:
        """Do the same for the first sequences of a cache, which has room for the new tokens of each."""
        B = len(tokens)
        lengths, table = cache.lengths[:B], cache.block_table[:B]
        x = self.embedding(tokens)
        residual = torch.zeros_like(x)
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            x, residual = tw.add_rms_norm(x, residual, x.shape[-1:], layer.attention_norm)
            q, k, v = layer.project(x)
            attended = tw.decode_attention(
                q, keys, values, lengths, table, k_new=k, v_new=v, rotary_cos=self.cos, rotary_sin=self.sin
            )
            x = layer.out(attended.flatten(2))
            x, residual = tw.add_rms_norm(x, residual, x.shape[-1:], layer.feed_forward_norm)
            x = layer.down(tw.swiglu(layer.gate_up(x)))
        last = (x + residual)[:, -1]
        return self.head(tw.rms_norm(last, last.shape[-1:], self.norm))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def sample(logits: Tensor, noise: Tensor) -> Tensor:
    """Draw a token per sequence, [B, 1]; Gumbel noise makes the largest logit a sample of the softmax."""
    return (logits.float() + noise).argmax(-1, keepdim=True)


@torch.no_grad()
def generate_eager(model: Model, prompt: Tensor, noise: Tensor) -> Tensor:
    """Return one continuation of the prompt [L] per sequence of the noise [tokens, sequences, vocabulary]."""
    past: list[tuple[Tensor, Tensor]] = []
    text = [sample(model.eager(prompt.expand(noise.shape[1], -1), past), noise[0])]
    for step in noise[1:]:
        text.append(sample(model.eager(text[-1], past), step))
    return torch.cat(text, 1)


@torch.no_grad()
def generate(model: Model, prompt: Tensor, noise: Tensor, page: int = 16) -> Tensor:
    """Return the same from a paged cache."""
    count, sequences, _ = noise.shape
    capacity, shape = len(prompt) + count, model.shape
    cache = PagedCache(
        layers=shape.layers, heads=shape.kv_heads, head_size=shape.head_size, page=page, sequences=sequences,
        pages=sequences * -(-capacity // page), capacity=capacity, dtype=model.head.weight.dtype, device=prompt.device,
    )  # fmt: skip
    first = cache.allocate()
    cache.reserve([first], len(prompt))
    logits = model.paged(prompt[None], cache)
    cache.advance([first], len(prompt))
    rows = [first, *(cache.fork(first) for _ in range(sequences - 1))]

    tokens = sample(logits, noise[0])  # its memory is what the graph reads
    text = [tokens.clone()]
    replay: Callable[[], Tensor] | None = None
    for step in noise[1:]:
        cache.reserve(rows)
        replay = replay or recorded(lambda: model.paged(tokens, cache), prompt.is_cuda)
        tokens.copy_(sample(replay(), step))
        cache.advance(rows)
        text.append(tokens.clone())
    return torch.cat(text, 1)


def recorded(step: Callable[[], Tensor], is_cuda: bool) -> Callable[[], Tensor]:
    """Return a function that replays a step as a CUDA graph; the step itself on a CPU.

    The keys that the calls before the capture write are overwritten by the replay.
    """
    if not is_cuda:
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate text with a random model, eager and with a paged cache.")
    parser.add_argument("--tokens", type=int, default=16, help="Tokens per continuation.")
    parser.add_argument("--samples", type=int, default=4, help="Continuations of the prompt.")
    parser.add_argument("--prompt", type=int, default=40, help="Tokens of the prompt.")
    options = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    device, dtype, shape = ("cuda", torch.bfloat16, LARGE) if is_cuda else ("cpu", torch.float32, Shape())
    torch.manual_seed(0)
    model = Model(shape, options.prompt + options.tokens).to(device, dtype)
    prompt = torch.randint(shape.vocabulary, (options.prompt,), device=device)
    uniform = torch.rand(options.tokens, options.samples, shape.vocabulary, device=device)
    noise = -torch.log(-torch.log(uniform.clamp(1e-7, 1 - 1e-7)))
    texts = []
    for name, run in (("eager", generate_eager), ("Tilewright", generate)):
        run(model, prompt, noise)  # compiles the kernels
        start = time.perf_counter()
        texts.append(run(model, prompt, noise).tolist())  # waits for the GPU
        rate = options.tokens * options.samples / (time.perf_counter() - start)
        print(f"{name:10} {rate:9.0f} tokens/s on {torch.cuda.get_device_name() if is_cuda else 'a CPU'}")
    equal = sum(a == b for one, other in zip(*texts, strict=True) for a, b in zip(one, other, strict=True))
    print(f"{equal} of {options.tokens * options.samples} tokens are the same; the first text is {texts[1][0]}")


if __name__ == "__main__":
    main()
