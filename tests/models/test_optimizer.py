"""Exchanging AdamW in place."""

import copy

import pytest
import torch
from torch import nn

import tilewright as tw


def steps(model, optimizer, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()


@pytest.fixture
def pair():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    groups = [
        {"params": model[0].parameters(), "lr": 1e-2},
        {"params": [*model[1].parameters(), *model[2].parameters()]},
    ]
    return model, torch.optim.AdamW(groups, weight_decay=0.1)


def test_a_run_through_both_optimizers_ends_where_torchs_does(pair):
    model, optimizer = pair
    other, theirs = copy.deepcopy((model, optimizer))
    for seed in range(3):
        steps(other, theirs, 2, seed)
    steps(model, optimizer, 2, 0)
    patched = tw.apply(model, optimizer=optimizer)
    assert type(optimizer) is tw.AdamW
    steps(model, optimizer, 2, 1)
    patched.revert()
    assert type(optimizer) is torch.optim.AdamW
    assert "max_grad_norm" not in vars(optimizer)
    steps(model, optimizer, 2, 2)
    for ours, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-3]
    assert optimizer.state_dict()["state"][0]["step"] == 6


def test_a_scheduler_made_afterwards_works(pair):
    model, optimizer = pair
    tw.apply(model, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    steps(model, optimizer, 1, 0)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 5e-3


def test_refusals(pair):
    model, optimizer = pair
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match="before creating a scheduler"):
        tw.apply(model, optimizer=optimizer)
    with pytest.raises(ValueError, match="amsgrad=True"):
        tw.apply(model, optimizer=torch.optim.AdamW(model.parameters(), amsgrad=True))
