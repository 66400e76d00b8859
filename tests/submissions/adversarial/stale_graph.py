"""Captures a CUDA graph of the first call and replays it for later inputs without giving it those."""

EXPECTED = "wrong"
NEEDS = "gpu"

import torch

_GRAPHS = {}


def softmax(x):
    key = (x.shape, x.dtype)
    if key not in _GRAPHS:
        first = x.detach().clone()
        torch.softmax(first, -1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = torch.softmax(first, -1)
        _GRAPHS[key] = graph, first, y
    graph, _, y = _GRAPHS[key]
    graph.replay()
    return y.clone()
