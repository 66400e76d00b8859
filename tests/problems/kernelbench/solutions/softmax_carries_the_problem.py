"""Defines its own Model, get_inputs and get_init_inputs, as many solutions do; the problem's are used."""

EXPECTED = "right"
PROBLEM = "../level1_softmax.py"

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return torch.softmax(x, dim=1)


batch_size = 1
dim = 2


def get_inputs():
    return [torch.zeros(batch_size, dim)]


def get_init_inputs():
    return []
