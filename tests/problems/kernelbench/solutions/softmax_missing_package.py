"""Imports a package that is not installed."""

EXPECTED = "unusable"
PROBLEM = "../level1_softmax.py"

import no_such_package
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        return no_such_package.softmax(x)
