"""Eight checks of a slow kernel, each with the numbers that decide it.

A check without numbers is `unknown`, and names the command that would provide them.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.cost import amount, size
from tilewright.interpreter.results import SECTOR, Traffic
from tilewright.workbench.audit.roles import READ_ONLY
from tilewright.workbench.explain.access_width import WIDE_GAIN
from tilewright.workbench.explain.analysis import Analysis
from tilewright.workbench.explain.collect import AUDITED, CALCULATED, COMPILED, MEASURED
from tilewright.workbench.explain.launch_model import ISSUE_RATE, LOADS, LaunchModel
from tilewright.workbench.explain.line_costs import is_in_triton
from tilewright.workbench.explain.prediction import LAUNCH_US
from tilewright.workbench.explain.traffic import AuditedTraffic, atomics_per_address
from tilewright.workbench.inspect import Inspection, unit_name
from tilewright.workbench.inspect.bank_conflicts import SharedAccess
from tilewright.workbench.inspect.code import TritonCode
from tilewright.workbench.inspect.line_info import SourceLine

PASS, FAIL, NOT_APPLICABLE, UNKNOWN = "pass", "fail", "not applicable", "unknown"
BOUND = "memory- or compute-bound"

NO_GRID = "a .cu file does not define the grid; explain a Python file that launches the kernel"
SCATTERED = 1.5  # sector bytes per byte used
REPEATED = 1.2  # reads per byte
PASSES = 1.15  # DRAM bytes / minimum bytes
DIVERGENT = 0.25  # share of the code
SIGNIFICANT = 0.4  # share of the floor that bank conflicts or repeated bytes may take
FEW = 0.02  # share of all instructions; less may be the slow path of a library function
FEW_WARPS = 4  # per SM: one per scheduler
STARVED = 0.5  # share of the bytes in flight that saturate DRAM
THIN = 8  # bytes per thread
MANY_WAVES = 32
NEAR = 0.6  # share of a ceiling


@dataclass(frozen=True)
class Fact:
    text: str
    source: str


@dataclass(frozen=True)
class Check:
    name: str
    verdict: str
    facts: Sequence[Fact] = ()
    source_line: SourceLine = None
    advice: str = ""  # what to try, or to run, next

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "verdict": self.verdict,
            "evidence": [vars(fact) for fact in self.facts],
            "line": list(self.source_line) if self.source_line else None,
            "next": self.advice,
        }


def checklist(analysis: Analysis) -> list[Check]:
    return [check(analysis) for check in _CHECKS]


def coalescing(analysis: Analysis) -> Check:
    """Check that neighbouring lanes access neighbouring bytes, and different banks of shared memory."""
    name = "coalesced access"
    facts = list(_widths(analysis.models))
    if access := _worst_conflict(analysis):
        counts = f"{access.wavefronts:.0f} wavefronts per warp instead of {access.ideal:.0f}"
        text = f"a shared memory {access.kind} takes {counts}"
        advice = "pad the rows of the tile, or swizzle its columns, so that the lanes of a warp access different banks"
        return Check(name, FAIL, [*facts, Fact(text, COMPILED)], access.source_line, advice)
    if not facts:
        return Check(name, NOT_APPLICABLE, [Fact("no access to global memory", COMPILED)])
    if analysis.is_short:
        return Check(name, NOT_APPLICABLE, facts)
    if found := analysis.narrow_access:
        facts += [Fact(text, COMPILED) for text in (found.cause, found.gain) if text]
        if found.is_thin and coarsening(analysis).verdict == FAIL:  # which has the remedy
            return Check(name, NOT_APPLICABLE, facts)
        if found.is_measured and analysis.is_memory_bound:
            facts.append(Fact(WIDE_GAIN, MEASURED))
        return Check(name, FAIL, facts, found.source_line, found.advice)
    if not analysis.call.audited:
        return _unknown(analysis, name, *facts)
    plain = [t for t in analysis.traffic if not t.atomic]
    ratios = {each: _scattering([t for t in plain if t.name == each]) for each in {t.name for t in plain}}
    worst = max(ratios, key=ratios.__getitem__, default="")
    if not worst or ratios[worst] <= SCATTERED:
        text = f"warps move {_scattering(plain):.2f} B per byte used"
        return Check(name, PASS, [*facts, Fact(text, AUDITED)] if plain else facts)
    facts.append(Fact(f"warps move {ratios[worst]:.1f} B per byte of `{worst}` used", AUDITED))
    advice = (
        f"let neighbouring lanes access neighbouring elements of `{worst}`: load a tile along its rows and transpose "
        "it in registers or shared memory"
    )
    return Check(name, FAIL, facts, _line_of(analysis, worst), advice)


def occupancy(analysis: Analysis) -> Check:
    """Check that enough warps are resident to hide latency."""
    name, model = "occupancy", analysis.longest
    kernel, held = model.kernel, model.kernel.occupancy
    if kernel.launch_error:
        advice = "use smaller tiles or fewer stages (shared memory), fewer warps (threads), or another grid"
        return Check(name, FAIL, [Fact(f"cannot be launched: {kernel.launch_error}", COMPILED)], advice=advice)
    warps = model.resident_blocks * kernel.compiled.threads / kernel.gpu.warp
    limit = f", limited by {held.limiter}" if held.limiter else ""
    text = f"{_counted(held.blocks, 'block')} per SM, {held.warps} of {kernel.gpu.warps_per_sm} warps{limit}"
    facts = [Fact(text, COMPILED)]
    if kernel.launch is None:
        return Check(name, UNKNOWN, facts, advice=NO_GRID)
    text = f"{_counted(kernel.launch.blocks, 'block')} on {kernel.gpu.sms} SMs: {warps:.3g} resident warps per SM"
    facts.append(Fact(text, COMPILED))
    if analysis.prediction is None or not model.moved:
        return _unknown(analysis, name, *facts)
    if analysis.is_short:
        return Check(name, NOT_APPLICABLE, facts)
    if warps < FEW_WARPS:
        return Check(name, FAIL, facts, None, _more_parallelism(model))
    is_plain = "async copy" not in kernel.mix.kinds and "bulk copy" not in kernel.mix.kinds
    if not is_plain or analysis.prediction.bottleneck not in ("memory", "latency"):
        return Check(name, PASS, facts)
    facts.append(_in_flight(analysis))
    has_room = warps < kernel.gpu.warps_per_sm
    if has_room and 0 < model.in_flight < STARVED * analysis.saturating_bytes:
        return Check(name, FAIL, facts, None, _more_parallelism(model))
    return Check(name, PASS, facts)


def bound(analysis: Analysis) -> Check:
    """Check that memory or a compute unit works near its ceiling."""
    name, found = BOUND, analysis.prediction
    if found is None or analysis.floor_us is None:
        return _unknown(analysis, name)
    if analysis.call.measured_us is None and analysis.call.other_work:
        return Check(name, UNKNOWN, advice=_profile(analysis, f"the call also does {analysis.call.other_work}"))
    facts = []
    roofline = analysis.longest.kernel.roofline
    if roofline and roofline.unit:
        facts.append(Fact(roofline.intensity_summary, CALCULATED))
    us, source = analysis.call.measured_us, MEASURED
    if us is None:
        us, source = found.us, "predicted"
    text = f"{us:.1f} us against a floor of {analysis.floor_us:.1f} us: {analysis.floor_us / us:.0%} of the ceiling"
    facts.append(Fact(text, source))
    overhead = found.terms["start"].us + analysis.call.ceilings.timer_us
    if analysis.floor_us >= NEAR * (us - overhead) or analysis.is_short:
        return Check(name, PASS, facts)
    return Check(name, FAIL, facts)


def divergence(analysis: Analysis) -> Check:
    """Check that the lanes of a warp take the same branches."""
    name = "divergence"
    simt = [model for model in analysis.models if not _is_triton(model.kernel)]
    if not simt:
        facts = [Fact("the control flow of a Triton program is uniform", CALCULATED), *_masked(analysis)]
        if any(model.kernel.resources.stack and not model.kernel.resources.spills for model in analysis.models):
            facts.append(Fact("except in a library function, whose slow path for rare values uses a stack", COMPILED))
        return Check(name, NOT_APPLICABLE, facts)
    if any(model.divergent_branches is None for model in simt):
        return Check(name, UNKNOWN, advice="branches are simulated from PTX, which AMD GPUs do not have")
    found = [branch for model in simt for branch in model.divergent_branches or ()]
    if not found:
        return Check(name, PASS, [Fact("no divergent branches", COMPILED)])
    worst = max(found, key=lambda branch: branch.share)
    count = _counted(len(found), "branch", "branches")
    text = f"{count} may diverge; the largest covers {worst.share:.0%} of the instructions"
    if worst.share < DIVERGENT:
        return Check(name, PASS, [Fact(text, COMPILED)])
    advice = "make branches uniform within a warp: one thread for a pair of elements, or elements sorted by branch"
    return Check(name, FAIL, [Fact(text, COMPILED)], worst.source_line, advice)


def reuse(analysis: Analysis) -> Check:
    """Check that loaded data is reused on chip instead of loaded again."""
    name, audited = "tiling and reuse", analysis.call.audited
    if audited is None or analysis.floor_us is None:
        return _unknown(analysis, name)
    used = audited.audit.traffic
    times = sum(t.loaded for t in used) / max(1, sum(t.distinct_read for t in used))
    where = f" in the audited case {audited.case}" if audited.case else ""
    facts = [Fact(f"each byte is read {_times(times)}{where}", AUDITED)]
    if times < REPEATED:
        return Check(name, NOT_APPLICABLE, facts)
    text = f"repeated reads add {analysis.repeats_us:.1f} us to a floor of {analysis.floor_us:.1f} us"
    facts.append(Fact(text, AUDITED))
    assert analysis.prediction
    if analysis.prediction.terms["memory"].us <= (1 + SIGNIFICANT) * analysis.floor_us or analysis.is_short:
        return Check(name, PASS, facts)
    worst = max(used, key=lambda t: t.loaded - t.distinct_read)
    facts.append(Fact(f"`{worst.name}` is read {_times(worst.reads_per_element)}", AUDITED))
    advice = f"keep loaded data of `{worst.name}` on chip for every use: larger tiles, or fewer passes"
    return Check(name, FAIL, facts, _line_of(analysis, worst.name), advice)


def privatisation(analysis: Analysis) -> Check:
    """Check that atomics do not contend for the same addresses."""
    name = "privatisation"
    atomics = {model.kernel.name: model.kernel.mix.kinds.get("atomic", 0) for model in analysis.models}
    if not any(atomics.values()):
        return Check(name, NOT_APPLICABLE, [Fact("no atomics", COMPILED)])
    facts = [Fact(f"{_counted(n, 'atomic instruction')} in {kernel}", COMPILED) for kernel, n in atomics.items() if n]
    audited = analysis.call.audited
    if audited is None or analysis.floor_us is None:
        return _unknown(analysis, name, *facts)
    used = [t for t in audited.audit.traffic if t.atomic]
    if not used:
        return Check(name, PASS, [*facts, Fact("none of them was executed", AUDITED)])
    worst = max(used, key=atomics_per_address)
    each = atomics_per_address(worst) * audited.scale
    us = each / analysis.call.gpu.clock_mhz
    text = f"{amount(each)} warp atomics per address of `{worst.name}`, one per clock: {us:.1f} us"
    facts.append(Fact(f"{text}, against a floor of {analysis.floor_us:.1f} us", AUDITED))
    if us <= analysis.floor_us or us < LAUNCH_US:
        return Check(name, PASS, facts)
    advice = f"reduce in registers or shared memory first, then do one atomic per program on `{worst.name}`"
    source_line = next((line for m in analysis.models for line in m.kernel.mix.by_line("atomic") if line), None)
    return Check(name, FAIL, facts, source_line, advice)


def coarsening(analysis: Analysis) -> Check:
    """Check that a thread does enough work for the cost of starting it."""
    name, model = "coarsening", analysis.longest
    kernel = model.kernel
    width, loops = model.bytes_per_thread, False
    if width is not None:
        facts = [Fact(f"{width:.0f} B moved per thread", AUDITED if analysis.call.audited else CALCULATED)]
    else:  # from the code, which may have paths that are not taken
        width = sum(i.width for i in model.instructions if i.kind in (*LOADS, "global store"))
        loops = any(i.in_loop and i.width for i in model.instructions)
        facts = [Fact(f"{width} B moved per thread" + (" and loop iteration" if loops else ""), COMPILED)]
    if "bulk copy" in kernel.mix.kinds or not width:
        return Check(name, NOT_APPLICABLE, [Fact("global memory is not accessed by loads of threads", COMPILED)])
    if kernel.launch is None:
        return Check(name, UNKNOWN, facts, advice=NO_GRID)
    waves = kernel.waves or 0.0
    text = f"{_counted(kernel.launch.blocks, 'block')} of {kernel.compiled.threads} threads, {waves:.1f} waves"
    facts.append(Fact(text, COMPILED))
    if loops or width > THIN or waves < MANY_WAVES:
        return Check(name, PASS, facts)
    advice = "process 8 times as many elements per program with the same threads: 16 B loads, an eighth of the blocks"
    source_line = next((line for line in kernel.mix.by_line(*LOADS) if line), None)
    return Check(name, FAIL, facts, source_line, advice)


def mathematics(analysis: Analysis) -> Check:
    """Check for avoidable work: spilled registers, unintended float64, idle tensor cores, extra passes over memory."""
    name, audited = "better mathematics", analysis.call.audited
    for model in analysis.models:
        rates = analysis.call.ceilings.rates
        if waste := _spills(model.kernel) or _accidental_fp64(model.kernel, rates) or _idle_tensor_cores(model):
            fact, kinds, advice = waste
            source_line = next((line for line in model.kernel.mix.by_line(*kinds) if line), None)
            return Check(name, FAIL, [fact], source_line, advice)
    facts = [Fact("no spills, no unintended float64", COMPILED)]
    if (found := analysis.dram_passes) is None:
        reason = analysis.call.no_audit_reason or f"the call also does {analysis.call.other_work}"
        return Check(name, UNKNOWN, facts, advice=_profile(analysis, reason))
    ratio, source = found
    facts.append(Fact(f"DRAM traffic is {ratio:.2f} times the minimum", source))
    if ratio < PASSES:
        return Check(name, PASS, facts)
    if analysis.call.host_work.gemms:
        return Check(name, UNKNOWN, facts, advice="the traffic of torch's GEMMs is included, but not known separately")
    if audited:
        facts += _repeated_traffic(audited)
    names = " and ".join(dict.fromkeys(model.kernel.name for model in analysis.models))
    fuse = f"fuse {names} into one launch, so that intermediate results and shared inputs stay in registers"
    one_pass = "use one pass: keep data on chip until its last use"
    return Check(name, FAIL, facts, None, fuse if len(analysis.models) > 1 else one_pass)


_CHECKS: tuple[Callable[[Analysis], Check], ...] = (
    coalescing,
    occupancy,
    bound,
    divergence,
    reuse,
    privatisation,
    coarsening,
    mathematics,
)


def _unknown(analysis: Analysis, name: str, *facts: Fact) -> Check:
    return Check(name, UNKNOWN, facts, advice=_profile(analysis, analysis.call.no_audit_reason))


def _profile(analysis: Analysis, reason: str) -> str:
    return f"{reason}; {analysis.call.how_to_count}"


def _counted(count: int, noun: str, plural: str = "") -> str:
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def _times(count: float) -> str:
    return "once" if round(count, 2) == 1 else f"{count:.1f} times" if count < 10 else f"{count:.0f} times"


def _is_triton(one: Inspection) -> bool:
    return one.launch is not None and isinstance(one.launch.code, TritonCode)


def _masked(analysis: Analysis) -> Iterator[Fact]:
    lanes = sum(t.lanes for t in analysis.traffic)
    if lanes:
        share = sum(t.masked for t in analysis.traffic) / lanes
        yield Fact(f"{share:.0%} of the lanes of loads and stores are masked off", AUDITED)


def _scattering(of: Sequence[Traffic]) -> float:
    """Return sector bytes per byte used."""
    return SECTOR * sum(t.sectors for t in of) / max(1, sum(t.moved for t in of))


def _widths(models: Sequence[LaunchModel]) -> Iterator[Fact]:
    for model in models:
        widths = []
        for what, kinds in (("load", LOADS), ("store", ("global store",))):
            if width := model.kernel.mix.mean_width(*kinds):
                widths.append(f"{width:.3g} B {what}s")
        if widths:
            yield Fact(f"{model.kernel.name}: {' and '.join(widths)} per thread", COMPILED)


def _worst_conflict(analysis: Analysis) -> SharedAccess | None:
    """Return the access with the most bank conflicts if they matter.

    They matter compared with the floor or, if it is unknown, with the time to issue all instructions.
    """
    for model in analysis.models:
        own = [a for a in model.kernel.shared_accesses or () if a.wavefronts and not is_in_triton(a.source_line)]
        waits = {a: a.count * (a.wavefronts - (a.ideal or 0)) for a in own if a.wavefronts}
        clocks, instructions = sum(waits.values()), len(model.instructions)
        us = (
            clocks * model.trips[1] * model.warps * model.programs / (model.kernel.gpu.sms * model.kernel.gpu.clock_mhz)
        )
        if us > SIGNIFICANT * analysis.floor_us if analysis.floor_us else clocks > instructions / ISSUE_RATE:
            return max(waits, key=waits.__getitem__)
    return None


def _in_flight(analysis: Analysis) -> Fact:
    loads, needed = size(analysis.longest.in_flight), size(analysis.saturating_bytes)
    return Fact(f"up to {loads} of loads in flight per SM; {needed} would saturate DRAM", COMPILED)


def _more_parallelism(model: LaunchModel) -> str:
    if model.resident_blocks < model.kernel.occupancy.blocks:
        return "split the work over more programs: every SM has room for more blocks"
    limiter = model.kernel.occupancy.limiter
    if "registers" in limiter:
        return "use fewer elements per thread, so that registers allow more blocks per SM"
    if "shared" in limiter:
        return "use smaller tiles or fewer stages, so that shared memory allows more blocks per SM"
    return "use more warps per block, or more elements per thread"


def _line_of(analysis: Analysis, argument: str) -> SourceLine:
    """Return the first line that loads or stores through a pointer of this name."""
    for one in analysis.call.launches:
        if one.launch is None or not isinstance(one.launch.code, TritonCode):
            continue
        lines, first = inspect.getsourcelines(one.launch.code.function.fn)
        for number, line in enumerate(lines, first):
            if f"{argument} +" in line and any(f"tl.{access}(" in line for access in ("load", "store")):
                return one.launch.code.file, number
    return None


def _repeated_traffic(audited: AuditedTraffic) -> Iterator[Fact]:
    """Yield what DRAM moves more than once: scratch memory, and inputs that several launches read."""
    if scratch := audited.audit.scratch:
        yield Fact(f"{size(scratch * audited.scale)} of scratch memory are written and read", AUDITED)
    readers: Counter[str] = Counter()
    for launch in audited.audit.launches:
        readers.update(
            {t.name for t in launch.arguments.values() if t.distinct_read and audited.audit.role(t) in READ_ONLY}
        )
    for name, count in readers.items():
        if count > 1:
            yield Fact(f"`{name}` is read by {count} launches", AUDITED)


Waste = tuple[Fact, tuple[str, ...], str]  # the fact, the kinds of instructions that show it, and the advice


def _spills(one: Inspection) -> Waste | None:
    kinds = ("local load", "local store")
    count = sum(one.mix.kinds.get(kind, 0) for kind in kinds)
    if not one.resources.spills or count < FEW * len(one.mix.instructions):
        return None
    used = one.resources
    text = f"{size(used.spills)} per thread are spilled at {used.registers} registers: {count} local memory accesses"
    return (
        Fact(text, COMPILED),
        kinds,
        "use more warps or fewer elements per program, or allow more registers per thread",
    )


def _accidental_fp64(one: Inspection, rates: Mapping[str, float]) -> Waste | None:
    """Find float64 arithmetic, unless all tensors are float64."""
    count = one.mix.kinds.get("fp64", 0)
    code = one.launch.code if one.launch else None
    kinds = code.signature if isinstance(code, TritonCode) else {}
    wide = [name for name, kind in kinds.items() if kind in ("*fp64", "fp64")]
    is_intended = bool(kinds) and all(kind == "*fp64" for kind in kinds.values() if kind.startswith("*"))
    if not count or count < FEW * len(one.mix.instructions) or is_intended:
        return None
    cause = f"; `{wide[0]}` is float64" if wide else ""
    slower = f", at 1/{rates['fp32'] / rates['fp64']:.0f} of the float32 rate" if rates.get("fp64") else ""
    text = f"{count} instructions compute in float64{slower}{cause}"
    return Fact(text, COMPILED), ("fp64",), "convert to float32 before use"


def _idle_tensor_cores(model: LaunchModel) -> Waste | None:
    if not model.mma_flops or model.uses_tensor_cores or model.kernel.gpu.is_amd:
        return None
    unit, flops = max(model.mma_flops.items(), key=lambda pair: pair[1])
    text = f"{amount(flops)}FLOP of matrix multiplication run as FMAs; the {unit_name(unit)} are idle"
    return Fact(text, COMPILED), ("fp32",), "use tensor cores: tl.dot in Triton, wmma or mma in CUDA C++"
