"""A kernel that puts together what the one before it has left, without the pause between two kernels.

Programmatic dependent launch (NVIDIA, from compute capability 9 on): the follower is brought to the GPU as soon as the
leader's last programs have begun, and waits there until the leader has ended and all that it wrote can be read.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilewright.runtime.configs import Config


@triton.jit
def let_follow(LEADS: tl.constexpr):
    """First thing in a leader."""
    if LEADS:
        gdc_launch_dependents()


@triton.jit
def await_leader(FOLLOWS: tl.constexpr):
    """In a follower, before it touches memory."""
    if FOLLOWS:
        gdc_wait()


@functools.cache
def can_follow(device: int) -> bool:
    """Whether the GPU of this number, if it is one, has kernels follow each other so."""
    return device >= 0 and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def following(device: int) -> Config:
    """How a follower is launched."""
    return {"FOLLOWS": True, "launch_pdl": True} if can_follow(device) else {"FOLLOWS": False}
