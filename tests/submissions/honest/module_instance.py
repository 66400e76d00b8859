"""An instance of torch.nn.Softmax."""

import torch

softmax = torch.nn.Softmax(dim=-1)
