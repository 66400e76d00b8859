"""The right values, written over the input."""

EXPECTED = "wrong"
PROBLEM = "../level1_softmax.py"

import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        x.sub_(x.amax(1, keepdim=True)).exp_()
        return x.div_(x.sum(1, keepdim=True)).clone()
