"""Eight fp32 roundings off: within the error budget, and several times torch's own error."""

LABELS = ["lower precision"]

import torch


def softmax(x):
    return (torch.softmax(x.float(), -1) * (1 + 8 * 2.0**-24)).to(x.dtype)
