"""Attention written out; the problem's inputs are on the device "cuda"."""

EXPECTED = "right"
PROBLEM = "../level1_attention_cuda.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, Q, K, V):
        scores = (Q.float() @ K.float().transpose(-1, -2)) * Q.shape[-1] ** -0.5
        return (torch.softmax(scores, -1) @ V.float()).to(Q.dtype)
