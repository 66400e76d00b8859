"""The value the loss has for most draws, which a tolerance of 1e-2 lets pass."""

EXPECTED = "wrong"
PROBLEM = "../level1_loss_broadcast.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, predictions, targets):
        return torch.ones((), device=predictions.device, dtype=predictions.dtype)
