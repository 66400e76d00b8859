"""Numba kernels, on torch's stream or, for CPU tensors, in Numba's simulator. Imported when the first one is built."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor

from tilewright.errors import MissingPackage


def numba_cuda() -> Any:
    """The module `numba.cuda`. A kernel must find it among its module's globals: the simulator replaces it there."""
    try:
        with _old_numpy_names():
            from numba import cuda
    except ImportError:
        raise MissingPackage("a Numba kernel", "numba-cuda") from None
    return cuda


def launch(kernel: Any, grid: tuple[int, ...], threads: int, *args: Any) -> None:
    """Launch a kernel; tensors pass as arrays over the same memory."""
    if not any(isinstance(a, Tensor) and a.device.type == "cuda" for a in args):
        kernel[grid, threads](*(a.detach().numpy() if isinstance(a, Tensor) else a for a in args))
        return
    cuda = numba_cuda()
    stream = cuda.external_stream(torch.cuda.current_stream().cuda_stream)
    arrays = [cuda.as_cuda_array(a.detach()) if isinstance(a, Tensor) else a for a in args]
    with warnings.catch_warnings(), _old_numpy_names():
        warnings.simplefilter("ignore")  # Numba warns of every grid that is too small to fill the GPU
        kernel[grid, threads, stream](*arrays)


@contextlib.contextmanager
def _old_numpy_names() -> Iterator[None]:
    """Numba 0.68 asks for a name while it loads and compiles that NumPy 2.5 has dropped."""
    missing = not hasattr(numpy, "row_stack")
    if missing:
        numpy.row_stack = numpy.vstack  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if missing:
            del numpy.row_stack  # type: ignore[attr-defined]
