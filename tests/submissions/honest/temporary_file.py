"""Writes its input to a temporary file and reads it back."""

import tempfile

import torch


def softmax(x):
    with tempfile.NamedTemporaryFile() as file:
        torch.save(x.detach().clone(), file.name)
        return torch.softmax(torch.load(file.name), -1)
