import torch
import torch.nn as nn


class Model(nn.Module):
    """Attention whose inputs specify their device and dtype."""

    def forward(self, Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(Q, K, V)


batch_size = 2
num_heads = 2
sequence_length = 32
embedding_dimension = 16


def get_inputs():
    shape = (batch_size, num_heads, sequence_length, embedding_dimension)
    Q = torch.rand(*shape, device="cuda", dtype=torch.float16)
    K = torch.rand(*shape, device="cuda", dtype=torch.float16)
    V = torch.rand(*shape, device="cuda", dtype=torch.float16)
    return [Q, K, V]


def get_init_inputs():
    return []
