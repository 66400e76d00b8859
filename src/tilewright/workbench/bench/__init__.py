"""How long does a right kernel take, and how far is it from the ceiling? A Timing for each.

A kernel that `check` has not found right, on its cases and on the very inputs to be timed, has no time; nor has one
whose results are wrong while it is timed, or that is faster than the hardware can be.
"""

from tilewright.workbench.bench.ceilings import measure
from tilewright.workbench.bench.runner import SAMPLES, Timing, bench, steps

__all__ = ["SAMPLES", "Timing", "bench", "measure", "steps"]
