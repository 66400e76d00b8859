"""Patched models under FSDP2: two processes on one machine, with gloo."""

import copy
import socket

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import nn

import tilewright as tw

pytestmark = pytest.mark.slow


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """A layer of the form that is fused: the second norm is computed with its weight, not by calling it."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.mixer, self.mlp = Norm(), Norm(), nn.Linear(16, 16), Gated()

    def forward(self, hidden_states):
        hidden_states = hidden_states + self.mixer(self.norm1(hidden_states))
        return hidden_states + self.mlp(self.norm2(hidden_states))


def train(model: nn.Module, x: torch.Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def worker(rank: int, port: int, order: str, results) -> None:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))  # the same on both ranks
    expected = train(copy.deepcopy(model), x)
    if order == "patch first":
        tw.apply(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if order == "shard first":
        tw.apply(model)
    is_fused = all("forward" in vars(layer) for layer in model)
    results[rank] = (expected, train(model, x), is_fused)
    destroy_process_group()


@pytest.mark.parametrize("order", ["patch first", "shard first"])
def test_training_takes_the_same_steps(order):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with multiprocessing.Manager() as manager:
        results = manager.dict()
        multiprocessing.spawn(worker, (port, order, results), nprocs=2)
        for rank in range(2):
            expected, losses, is_fused = results[rank]
            assert losses == pytest.approx(expected, rel=1e-4)
            assert is_fused
