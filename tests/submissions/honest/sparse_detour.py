"""Adds two vectors as sparse tensors."""

OP = "add"


def add(x, y):
    return (x.detach().float().to_sparse() + y.detach().float().to_sparse()).to_dense().to(x.dtype)
