"""References that do not repeat themselves are found; rounding differences between runs are not mistaken for that."""

import random

import numpy as np
import pytest
import torch
from torch.nn.functional import dropout

from tilewright.workbench.check.repeatable import same_outputs, unrepeatable

X = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.calls


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (lambda x: dropout(x, 0.1), "draws random numbers"),
        (lambda x: dropout(x, 0.0005), "draws random numbers"),
        (lambda x: (x.sin(), torch.bernoulli(x.sigmoid()).long()), "draws random numbers"),
        (lambda x: x * (3 if random.random() < 0.1 else 2), "draws random numbers"),
        (lambda x: x + torch.from_numpy(np.random.rand(*x.shape)), "draws random numbers"),
        (lambda x: x + torch.from_numpy(np.random.default_rng().random(x.shape)), "different outputs"),
        (Counter(), "different outputs"),
    ],
)
def test_references_that_do_not_repeat_themselves_are_found(reference, reason):
    assert reason in unrepeatable(reference, (X,))


def shuffled_sum(x):
    return x[:, torch.randperm(x.shape[1])].sum(-1)


def seeded_noise(x):
    torch.manual_seed(3)
    return x + torch.rand_like(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "reference",
    [
        lambda x: x.softmax(-1),
        lambda x: (x.sin(), x.argmax(-1)),
        lambda x: x.log(),
        lambda x: x.add_(1),
        lambda x: dropout(x, 0.1, training=False),
        lambda x: x.float() + torch.zeros(64, 300, dtype=torch.float32),
        shuffled_sum,
        seeded_noise,
    ],
)
def test_references_that_repeat_themselves_up_to_rounding_pass(reference, dtype):
    x = X.to(dtype)
    assert unrepeatable(reference, (x,)) is None
    assert torch.equal(x, X.to(dtype))


def test_a_reference_that_does_not_run_in_float64_is_run_in_its_dtype():
    weight = torch.ones(300, 2)
    assert unrepeatable(lambda x: x @ weight, (X,)) is None
    assert unrepeatable(lambda x: dropout(x @ weight, 0.5), (X,)) == "draws random numbers"


@pytest.mark.parametrize(
    ("dtype", "rounding", "other"), [(torch.float32, 1e-5, 1e-3), (torch.float64, 1e-13, 1e-5), (torch.half, 4e-3, 0.1)]
)
def test_only_differences_of_rounding_size_are_the_same(dtype, rounding, other):
    x = X.to(dtype)
    assert same_outputs([x], [(x.double() * (1 + rounding)).to(dtype)])
    assert not same_outputs([x], [(x.double() * (1 + other)).to(dtype)])
    assert not same_outputs([x], [torch.where(x == x.max(), torch.nan, x)])
    assert not same_outputs([x, x], [x])
    assert not same_outputs([x.long()], [x.long() + 1])


def test_the_random_state_of_the_caller_is_unchanged():
    state = torch.get_rng_state()
    unrepeatable(lambda x: dropout(x, 0.1), (X,))
    assert torch.equal(torch.get_rng_state(), state)
