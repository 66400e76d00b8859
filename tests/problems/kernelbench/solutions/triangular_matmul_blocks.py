"""Skips the blocks above the diagonal, as the structure of the inputs allows."""

EXPECTED = "right"
PROBLEM = "../level1_triangular_matmul.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, A, B):
        C = torch.zeros_like(A)
        for i in range(0, len(A), 16):
            for j in range(0, i + 16, 16):
                C[i : i + 16, j : j + 16] = A[i : i + 16, j : i + 16] @ B[j : i + 16, j : j + 16]
        return C
