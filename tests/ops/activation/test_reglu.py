"""Laws of ReGLU."""

import torch.nn.functional as F  # noqa: N812  the customary name

import tilewright as tw
from activation_laws import GatedLaws
from tilewright.ops.activation import reglu as module


class TestReglu(GatedLaws):
    module, act, call, formula = module, "relu", tw.reglu, F.relu
