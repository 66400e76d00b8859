"""Softsign by torch."""

EXPECTED = "right"
PROBLEM = "../level1_softsign.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.nn.functional.softsign(x)
