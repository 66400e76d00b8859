"""Laws of amin, and of min over a dimension. test_amax.py tests what they share with amax and max."""

import torch

import tilewright as tw
from reduction_laws import ExtremumLaws
from reduction_laws import few_programs as few_programs
from tilewright.ops.reduce import amin as module


class TestAmin(ExtremumLaws):
    module, call, formula = module, tw.amin, torch.amin
    with_index, formula_with_index = tw.min, torch.min
