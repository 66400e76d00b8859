"""Cross entropy by hand, with whole class indices."""

EXPECTED = "right"
PROBLEM = "../level1_cross_entropy.py"

import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, predictions, targets):
        chosen = predictions.gather(1, targets[:, None]).squeeze(1)
        return (predictions.logsumexp(1) - chosen).mean()
