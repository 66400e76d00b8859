"""A functools.partial object."""

import functools

import torch

softmax = functools.partial(torch.softmax, dim=-1)
