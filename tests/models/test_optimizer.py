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


def test_moments_of_one_byte_per_element():
    model = nn.Linear(128, 128)
    optimizer = torch.optim.AdamW(model.parameters())
    patched = tw.apply(model, optimizer=optimizer, state_bits=8)
    model(torch.randn(2, 128)).sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.uint8
    patched.revert()
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.float32
    with pytest.raises(ValueError, match="state_bits must be 8 or 32, not 4"):
        tw.apply(model, optimizer=torch.optim.AdamW(model.parameters()), state_bits=4)


@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("around", ["nothing", "scheduler", "scaler"])
def test_what_was_built_around_the_optimizer_keeps_working(pair, flags, around):
    model, other = pair[0], copy.deepcopy(pair[0])
    ends = []
    for one in (model, other):
        groups = [{"params": [*one[0].parameters()], "lr": 1e-2}, {"params": [*one[2].parameters()]}]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.1, **flags)
        held, called, generator = optimizer.param_groups[0], [], torch.Generator().manual_seed(3)
        optimizer.register_step_post_hook(lambda *_, called=called: called.append(1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) if around == "scheduler" else None
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=around == "scaler")
        patched, before = None, dict(vars(optimizer))
        for n in range(8):
            if one is other and n == 2:
                patched = tw.apply(one, optimizer=optimizer)
            if patched and n == 6:
                patched.revert()
                assert vars(optimizer).keys() - {"_opt_called"} == before.keys()
                assert vars(optimizer).get("step") is before.get("step")
                assert all(held[flag] == value for flag, value in flags.items())
            held["weight_decay"] = 0.1 * n  # through a reference from before the exchange
            optimizer.zero_grad()
            loss = one(torch.randn(4, 6, generator=generator)).square().mean()
            # A step with an overflow, which the scaler must skip with either optimizer.
            scaler.scale(loss * (float("inf") if around == "scaler" and n == 4 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            if scheduler:
                scheduler.step()
        assert optimizer.param_groups[0] is held
        ends.append(([*one.parameters()], len(called), held["lr"]))
    for ours, expected in zip(ends[1][0], ends[0][0], strict=True):
        torch.testing.assert_close(ours, expected)
    assert ends[1][2] == ends[0][2]
    # torch's fused step skips an overflow inside of step().
    assert ends[1][1] == ends[0][1] - (flags == {"fused": True} and around == "scaler")


def test_a_capturable_optimizer_stays_capturable(pair):
    model, optimizer = pair
    for group in optimizer.param_groups:  # torch accepts it on a GPU only
        group["capturable"] = True
    held = copy.deepcopy(model)
    with tw.apply(model, optimizer=optimizer), tw.interpret():
        steps(model, optimizer, 2, 0)
        assert all(group["capturable"] for group in optimizer.param_groups)
        assert optimizer.state_dict()["state"][0]["step"] == 2
    assert all(group["capturable"] for group in optimizer.param_groups)
    theirs = torch.optim.AdamW([{"params": held[0].parameters(), "lr": 1e-2}, {"params": held[1:].parameters()}])
    theirs.param_groups[0]["weight_decay"] = theirs.param_groups[1]["weight_decay"] = 0.1
    steps(held, theirs, 2, 0)
    for ours, expected in zip(model.parameters(), held.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)


def test_a_failed_exchange_changes_nothing(pair, monkeypatch):
    model, optimizer = pair
    steps(model, optimizer, 1, 0)
    before, held = dict(vars(optimizer)), optimizer.param_groups[0]
    moment = optimizer.state[model[0].weight]["exp_avg"]
    monkeypatch.setattr(tw.AdamW, "_state_of", lambda *_: exec("raise torch.OutOfMemoryError('no memory')"))
    with pytest.raises(torch.OutOfMemoryError):
        tw.apply(model, optimizer=optimizer)
    assert type(optimizer) is torch.optim.AdamW
    assert vars(optimizer) == before
    assert optimizer.param_groups[0] is held
    assert optimizer.state[model[0].weight]["exp_avg"] is moment
    assert not any("forward" in vars(module) for module in model.modules())


def test_refusals(pair):
    model, optimizer = pair
    with pytest.raises(ValueError, match="amsgrad=True"):
        tw.apply(model, optimizer=torch.optim.AdamW(model.parameters(), amsgrad=True))
    tw.apply(model, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"is a tilewright.AdamW already"):
        tw.apply(model, optimizer=optimizer)
    other = torch.optim.AdamW(model.parameters())
    other.step = lambda: None
    with pytest.raises(ValueError, match="something wraps the optimizer's step"):
        tw.apply(model, optimizer=other)
