"""The rules of every problem, as an agent reads them."""

from __future__ import annotations

RULES = (
    "Accept every shape, stride and dtype of the cases, also sizes of 1 and 0.",
    "Return new tensors of the dtype and shape of the reference; leave the inputs as they are.",
    "Each element may differ from the float64 reference by about one rounding of the output dtype and eight times the "
    "rounding error of plain PyTorch.",
    "Compute every result from the inputs of the call. Results kept between calls, replaced functions of torch, "
    "Triton, the clock or Tilewright, and output written before the call are rejected.",
    "The file runs in a sandbox: no network, no files but its own folder, limited time and memory.",
    "Out-of-bounds accesses, races and unwritten outputs are wrong even if the values are right.",
)
RANKED_RULE = (
    "Do the work in your own kernel: one that falls back to torch's operators, is less precise than torch, or is not "
    "deterministic is right, but not ranked."
)
