"""Returns a subclass of Tensor that claims to equal Tensor."""

EXPECTED = "wrong"

import torch


class _Equal(type(torch.Tensor)):
    def __eq__(cls, other):
        return True

    def __hash__(cls):
        return hash(torch.Tensor)


class _Lazy(torch.Tensor, metaclass=_Equal):
    pass


def softmax(x):
    return torch.softmax(x.detach(), -1).as_subclass(_Lazy)
