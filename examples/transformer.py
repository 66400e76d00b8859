"""A small decoder-only transformer built from Tilewright's functions: `python examples/transformer.py`."""

import torch
from torch import Tensor, nn

import tilewright as tw


class Block(nn.Module):
    """Attention and a SwiGLU feed-forward layer, each after an RMS norm that also adds the residual."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.Parameter(torch.ones(width))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.Parameter(torch.ones(width))
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        B, S, width = x.shape
        x, residual = tw.add_rms_norm(x, residual, (width,), self.attention_norm)
        q, k, v = self.qkv(x).view(B, S, 3, self.heads, -1).unbind(2)
        q, k = tw.rope(q, k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, heads, S, D]
        attended = tw.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.out(attended.transpose(1, 2).reshape(B, S, width))
        x, residual = tw.add_rms_norm(x, residual, (width,), self.feed_forward_norm)
        return self.down(tw.swiglu(self.gate_up(x))), residual


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, width: int = 64, heads: int = 4, layers: int = 2, context: int = 128):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, 2 * width) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        pairs = width // heads // 2
        angles = torch.arange(context)[:, None] * 10000.0 ** (-torch.arange(pairs) / pairs)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the normalised output of the last block, [B, S, width]."""
        x = self.embedding(tokens)
        residual = torch.zeros_like(x)
        for block in self.blocks:
            x, residual = block(x, residual, self.cos, self.sin)
        return tw.rms_norm(x + residual, x.shape[-1:], self.norm)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token, [B, S, vocabulary]."""
        return self.head(self.hidden(tokens))

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean cross entropy of predicting each token from those before it, without storing all logits."""
        hidden = self.hidden(tokens[:, :-1])
        return tw.linear_cross_entropy(hidden.flatten(0, 1), self.head.weight, tokens[:, 1:].flatten())


def main() -> None:
    torch.manual_seed(0)
    model = Transformer(vocabulary=256)
    tokens = torch.randint(256, (2, 32))
    print(f"{sum(p.numel() for p in model.parameters())} parameters, logits {list(model(tokens).shape)}")
    print(f"loss {model.loss(tokens).item():.2f}; guessing gives {torch.tensor(256.0).log().item():.2f}")


if __name__ == "__main__":
    main()
