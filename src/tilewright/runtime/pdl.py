"""Programmatic dependent launch (PDL): a kernel starts before the previous one on its stream has ended.

From compute capability 9 on, the second kernel is scheduled as soon as the first one's last programs have started, and
waits on the GPU until the first has ended and its writes are visible. That hides the launch latency between them.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilewright.runtime.configs import Config


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start. The first statement of the first kernel."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait for the previous kernel. In the second kernel, before it accesses memory."""
    if PDL:
        gdc_wait()


@functools.cache
def has_pdl(device: int) -> bool:
    """Return whether the GPU of this number has programmatic dependent launch."""
    return device >= 0 and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def dependent_launch(device: int) -> Config:
    """Return the options that launch a second kernel."""
    return {"WAITS": True, "launch_pdl": True} if has_pdl(device) else {"WAITS": False}
