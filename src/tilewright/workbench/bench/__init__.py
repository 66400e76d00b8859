"""Time correct kernels, and compare them with the ceiling.

A kernel has no time if a check fails on its cases or on the timed inputs, if its results are wrong when timed, or if it
is faster than the hardware can be.
"""

from tilewright.workbench.bench.case_runner import QUICK, THOROUGH, Effort, Timing
from tilewright.workbench.bench.runner import SAMPLES, bench, step_count

__all__ = ["QUICK", "SAMPLES", "THOROUGH", "Effort", "Timing", "bench", "step_count"]
