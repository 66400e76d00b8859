"""Advice against a bottleneck: the lines that cost most, the loads that are waited for, or fewer bytes."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.cost import size
from tilewright.workbench.explain.analysis import Analysis
from tilewright.workbench.explain.checklist import Check
from tilewright.workbench.explain.launch_model import LaunchModel
from tilewright.workbench.explain.line_costs import line_costs
from tilewright.workbench.explain.prediction import latency_parts

FEWER_BYTES = (
    "only fewer bytes make it faster: fuse it with the kernel before or after it, or store "
    "its tensors in a narrower dtype"
)
FEWER_LAUNCHES = "do more work per launch, or launch less often: fuse launches, or use a CUDA graph"
LESS_CONTENTION = "reduce in registers or shared memory first, then do fewer atomics"
BUSY_TENSOR_CORES = "use a narrower dtype (fp8, int8) or fewer FLOPs; nothing else is slower"
# The kinds of instructions that occupy each unit; all of them occupy instruction issue.
UNITS = {"issue": (), "fp32": ("fp32",), "fp64": ("fp64",), "special": ("special function",)}
# By the most frequent kind of instruction on a line.
REMEDIES = {
    "integer and other": "compute offsets and masks once, in 32 bits where they fit; skip the mask of full tiles",
    "fp32": "do less arithmetic per element: fold constants, and compute what is the same for a row once",
    "fp64": "compute in float32",
    "special function": "use fewer or cheaper special functions: exp2 with a folded scale, one reciprocal per row",
    "conversion": "convert each value once, or compute in the dtype it has",
    "global load": "load 16 bytes per thread, or each value once",
    "shared load": "keep values in registers between uses",
    "shuffle": "reduce once per tile instead of once per row or iteration",
    "branch": "hoist conditions out of the loop, or make them tl.constexpr",
}
LESS_WORK = "do this work once per tile instead of once per element or iteration"


def advise(analysis: Analysis, term: str | None, failed: Sequence[Check]) -> str:
    """Return what to try against a term of the prediction; empty if the failed checks say it all."""
    unit = (term or "").partition(".")[0]
    if unit in UNITS or (term is None and not failed):
        return advise_on_lines(analysis.models, UNITS.get(unit, ()))
    if unit == "latency":
        return _advise_on_latency(analysis)
    if failed or term is None:
        return ""
    return {
        "memory": FEWER_BYTES,
        "tensor": BUSY_TENSOR_CORES,
        "atomics": LESS_CONTENTION,
        "start": FEWER_LAUNCHES,
    }[unit]


def advise_on_lines(models: Sequence[LaunchModel], kinds: Sequence[str]) -> str:
    """Name the lines with the most instructions of these kinds, and a remedy for the first."""
    lines = line_costs(models, kinds)
    if not lines:
        return "compile with line info to see which lines have the most instructions"
    what = " and ".join(kinds) + " instructions" if kinds else "instructions"
    return f"{what} by line: {'; '.join(map(str, lines))}. {_capital(REMEDIES.get(lines[0].kind, LESS_WORK))}"


def _advise_on_latency(analysis: Analysis) -> str:
    """Say what a block waits for."""
    model, found = analysis.longest, analysis.prediction
    if found and found.is_too_short:
        moved = size(analysis.call.min_bytes or 0.0)
        return (
            f"{moved} are too few to saturate DRAM: do more work per launch, or fuse the call with the one before or "
            "after it, whose data is still in the L2"
        )
    loads, instructions = latency_parts(model)
    if loads >= instructions:
        where = _first_line(model)
        return (
            f"each block waits {model.load_waits:.0f} times for global loads{where}: {1e6 * loads:.1f} us, in which "
            f"{size(model.in_flight)} per SM are in flight and {size(analysis.saturating_bytes)} would saturate DRAM; "
            "issue more loads before the first use (larger tiles, unrolled or pipelined loops), or use more programs"
        )
    return (
        f"each warp waits for its own previous instruction, {model.instructions_per_warp:.0f} in a row: use more "
        f"programs or warps. {_capital(advise_on_lines([model], ()))}"
    )


def _first_line(model: LaunchModel) -> str:
    costs = line_costs([model], ("global load",))
    return f" ({costs[0]})" if costs else ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
