"""Laws of SwiGLU."""

import torch.nn.functional as F  # noqa: N812  the customary name

import tilewright as tw
from activation_laws import GatedLaws
from tilewright.ops.activation import swiglu as module


class TestSwiglu(GatedLaws):
    module, act, call, formula = module, "silu", tw.swiglu, F.silu
