"""Keeps a hidden state, as the problem does."""

EXPECTED = "right"
PROBLEM = "../level3_rnn_state.py"

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.state = torch.randn((8, hidden_size))
        self.i2h = nn.Linear(input_size + hidden_size, hidden_size)

    def forward(self, x):
        self.state = torch.tanh(self.i2h(torch.cat((x, self.state.to(x)), dim=1)))
        return self.state
