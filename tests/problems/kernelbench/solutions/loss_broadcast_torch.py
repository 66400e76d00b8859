"""The hinge loss, all of it."""

EXPECTED = "right"
PROBLEM = "../level1_loss_broadcast.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, predictions, targets):
        return torch.relu(1 - predictions * targets[None, :]).mean()
