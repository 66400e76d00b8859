"""The eight things that experts look at in a slow kernel, each with the numbers that decide it.

A point says nothing that no number supports: what is not known names the command that would tell.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from tilewright.cost import amount, size
from tilewright.interpreter.observed import SECTOR, Traffic
from tilewright.workbench.explain.analysis import Known
from tilewright.workbench.explain.evidence import AUDITED, CALCULATED, COMPILED, MEASURED, Audited, meeting
from tilewright.workbench.explain.prediction import START_US
from tilewright.workbench.explain.work import ISSUED, LOADS, Work
from tilewright.workbench.inspect import Inspection
from tilewright.workbench.inspect.banks import SharedAccess
from tilewright.workbench.inspect.code import TritonCode
from tilewright.workbench.inspect.listing import Place

PASS, FAIL, NOT_APPLICABLE, UNKNOWN = "pass", "fail", "does not apply", "not known"
BOUND = "memory- or compute-bound"

COUNT = "run tilewright profile on the GPU, which counts"
NO_GRID = "not known: a .cu file does not say how many blocks there are; run tilewright explain on what launches it"
SHORT = "all its work takes less than its launch does"
SCATTERED = 1.5  # bytes of sectors for each byte used
REPEATED = 1.2  # times that a byte is read
PASSES = 1.15  # bytes for each that must move
PARTED = 0.25  # of the code
WAITING = 0.4  # of the floor: for one address, one bank, or the same bytes again
FEW = 0.02  # of all instructions: spills, or float64 that a library takes for rare numbers
FEW_WARPS = 4  # of an SM: one for each of its schedulers
STARVED = 0.5  # of the bytes that must be on their way
THIN = 8  # bytes that a thread moves
MANY = 32  # blocks for each that the GPU has at a time
NEAR = 0.6  # of a ceiling


@dataclass(frozen=True)
class Fact:
    text: str
    source: str


@dataclass(frozen=True)
class Point:
    name: str
    verdict: str
    facts: Sequence[Fact] = ()
    place: Place = None
    move: str = ""  # what to try next, or to run

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "verdict": self.verdict,
            "evidence": [vars(fact) for fact in self.facts],
            "line": list(self.place) if self.place else None,
            "next": self.move,
        }


def checklist(known: Known) -> list[Point]:
    return [look(known) for look in _POINTS]


def coalesced(known: Known) -> Point:
    """Do neighbouring lanes touch neighbouring bytes?"""
    name = "coalesced access"
    facts = list(_widths(known.works))
    if access := _worst_conflict(known):
        text = f"shared memory is asked {access.wavefronts:.0f} times for a {access.kind} of a warp, where"
        text = f"{text} {access.ideal:.0f} could do"
        move = "pad a row of the tile, or swizzle its columns, so that the lanes of a warp fall into different banks"
        return Point(name, FAIL, [*facts, Fact(text, COMPILED)], access.place, move)
    if not known.evidence.audited:
        if not facts:
            return Point(name, NOT_APPLICABLE, [Fact("no access to global memory", COMPILED)])
        return _unknown(known, name, *facts)
    if known.is_short:
        return Point(name, NOT_APPLICABLE, [*facts, Fact(SHORT, COMPILED)])
    plain = [t for t in known.traffic if not t.atomic]
    ratios = {each: _scattering([t for t in plain if t.name == each]) for each in {t.name for t in plain}}
    worst = max(ratios, key=ratios.__getitem__, default="")
    if not worst or ratios[worst] <= SCATTERED:
        text = f"warps move {_scattering(plain):.2f} B for each byte they use"
        return Point(name, PASS, [*facts, Fact(text, AUDITED)] if plain else facts)
    facts.append(Fact(f"for each byte of `{worst}` that is used, warps move {ratios[worst]:.1f}", AUDITED))
    move = (
        f"let neighbouring lanes take neighbouring elements of `{worst}`: a tile that is read along its rows and "
        "turned in registers or shared memory"
    )
    return Point(name, FAIL, facts, _line_of(known, worst), move)


def occupancy(known: Known) -> Point:
    """Is enough resident to hide the waiting?"""
    name, work = "occupancy", known.longest
    one, held = work.one, work.one.occupancy
    if one.obstacle:
        move = "smaller tiles or fewer stages, if that is memory; fewer warps, if threads; else another grid"
        return Point(name, FAIL, [Fact(f"it cannot be launched: {one.obstacle}", COMPILED)], move=move)
    warps = work.resident * one.made.threads / one.gpu.warp
    limit = f", limited by {held.limiter}" if held.limiter else ""
    facts = [
        Fact(
            f"an SM holds {_counted(held.blocks, 'block')}, {held.warps} of {one.gpu.warps_per_sm} warps{limit}",
            COMPILED,
        )
    ]
    if one.launch is None:
        return Point(name, UNKNOWN, facts, move=NO_GRID)
    facts.append(
        Fact(
            f"{_counted(one.launch.blocks, 'block')} on {one.gpu.sms} SMs: {warps:.3g} warps an SM at a time", COMPILED
        )
    )
    if known.prediction is None or not work.moved:
        return _unknown(known, name, *facts)
    if known.is_short:
        return Point(name, NOT_APPLICABLE, [*facts, Fact(SHORT, COMPILED)])
    if warps < FEW_WARPS:
        return Point(name, FAIL, facts, None, _more_parallel(work))
    is_plain = "async copy" not in one.mix.kinds and "bulk copy" not in one.mix.kinds
    if not is_plain or known.prediction.binds not in ("memory", "latency"):
        return Point(name, PASS, facts)
    facts.append(_on_their_way(known))
    has_room = warps < one.gpu.warps_per_sm
    if has_room and 0 < work.in_flight < STARVED * known.needed:
        return Point(name, FAIL, facts, None, _more_parallel(work))
    return Point(name, PASS, facts)


def bound(known: Known) -> Point:
    """Does a unit, or memory, work near its ceiling?"""
    name, found = BOUND, known.prediction
    if found is None or known.floor_us is None:
        return _unknown(known, name)
    if known.evidence.measured_us is None and known.evidence.rest:
        return Point(name, UNKNOWN, move=f"not known: {known.evidence.rest} takes time, too; {COUNT}")
    facts = []
    work = known.longest.one.work
    if work and work.unit:
        facts.append(Fact(work.beside_the_ridge, CALCULATED))
    us, source = known.evidence.measured_us, MEASURED
    if us is None:
        us, source = found.us, "predicted"
    text = f"{us:.1f} us; its floor is {known.floor_us:.1f} us: {known.floor_us / us:.0%} of the ceiling"
    facts.append(Fact(text, source))
    starts = found.terms["start"].us + known.evidence.ceilings.timer_us
    if known.floor_us >= NEAR * (us - starts) or known.is_short:
        return Point(name, PASS, facts)
    return Point(
        name, FAIL, facts, move="the other points say why; where none does, tilewright profile shows the stalls"
    )


def divergence(known: Known) -> Point:
    """Do lanes of one warp go different ways?"""
    name = "divergence"
    free = [work for work in known.works if not _is_triton(work.one)]
    if not free:
        facts = [Fact("all lanes of a Triton program go one way", CALCULATED), *_masked(known)]
        if any(work.one.resources.stack and not work.one.resources.spills for work in known.works):
            facts.append(Fact("but in a library function, whose rare ways have a stack", COMPILED))
        return Point(name, NOT_APPLICABLE, facts)
    if any(work.partings is None for work in free):
        return Point(name, UNKNOWN, move="not known: branches are followed in PTX, which is NVIDIA's")
    found = [parting for work in free for parting in work.partings or ()]
    if not found:
        return Point(name, PASS, [Fact("no branch at which the lanes of a warp part", COMPILED)])
    worst = max(found, key=lambda parting: parting.share)
    where = _counted(len(found), "branch", "branches")
    text = f"lanes may part at {where}, the largest before {worst.share:.0%} of the instructions"
    if worst.share < PARTED:
        return Point(name, PASS, [Fact(text, COMPILED)])
    move = "give all lanes of a warp the same way: one thread for a pair of elements, or elements sorted by their way"
    return Point(name, FAIL, [Fact(text, COMPILED)], worst.place, move)


def reuse(known: Known) -> Point:
    """Is what was fetched used again before it is fetched again?"""
    name, audited = "tiling and reuse", known.evidence.audited
    if audited is None or known.floor_us is None:
        return _unknown(known, name)
    used = audited.found.traffic
    times = sum(t.loaded for t in used) / max(1, sum(t.distinct_read for t in used))
    where = f" on {audited.case}" if audited.case else ""
    facts = [Fact(f"a byte that is read is read {_times(times)}{where}", AUDITED)]
    if times < REPEATED:
        return Point(name, NOT_APPLICABLE, facts)
    facts.append(Fact(f"that adds {known.repeats_us:.1f} us to a floor of {known.floor_us:.1f} us", AUDITED))
    assert known.prediction
    if known.prediction.terms["memory"].us <= (1 + WAITING) * known.floor_us or known.is_short:
        return Point(name, PASS, facts)
    worst = max(used, key=lambda t: t.loaded - t.distinct_read)
    facts.append(Fact(f"`{worst.name}` is read {_times(worst.reads_per_element)}", AUDITED))
    move = f"keep what is loaded of `{worst.name}` on the chip for all who need it: larger tiles, or fewer passes"
    return Point(name, FAIL, facts, _line_of(known, worst.name), move)


def privatisation(known: Known) -> Point:
    """Do threads meet at the same addresses?"""
    name = "privatisation"
    atomics = {work.one.name: work.one.mix.kinds.get("atomic", 0) for work in known.works}
    if not any(atomics.values()):
        return Point(name, NOT_APPLICABLE, [Fact("no atomics", COMPILED)])
    facts = [Fact(f"{_counted(n, 'atomic instruction')} in {kernel}", COMPILED) for kernel, n in atomics.items() if n]
    audited = known.evidence.audited
    if audited is None or known.floor_us is None:
        return _unknown(known, name, *facts)
    used = [t for t in audited.found.traffic if t.atomic]
    if not used:
        return Point(name, PASS, [*facts, Fact("none of them ran", AUDITED)])
    worst = max(used, key=meeting)
    each = meeting(worst) * audited.scale
    us = each / known.evidence.gpu.clock_mhz
    text = f"{amount(each)} atomics of warps on each address of `{worst.name}`, one a clock: {us:.1f} us"
    facts.append(Fact(f"{text}, where the floor is {known.floor_us:.1f} us", AUDITED))
    if us <= known.floor_us or us < START_US:
        return Point(name, PASS, facts)
    move = f"add up in registers or shared memory first, then once a program into `{worst.name}`"
    place = next((p for w in known.works for p in w.one.mix.by_place("atomic") if p), None)
    return Point(name, FAIL, facts, place, move)


def coarsening(known: Known) -> Point:
    """Does a thread do enough for what it costs to start it?"""
    name, work = "coarsening", known.longest
    one = work.one
    width, loops = work.thread_bytes, False
    if width is not None:
        facts = [Fact(f"a thread moves {width:.0f} B", AUDITED if known.evidence.audited else CALCULATED)]
    else:  # then by its code, which may have ways that are not gone
        width = sum(s.instruction.width for s in work.steps if s.instruction.kind in (*LOADS, "global store"))
        loops = any(s.in_loop and s.instruction.width for s in work.steps)
        facts = [Fact(f"a thread moves {width} B" + (" each round of its loop" if loops else ""), COMPILED)]
    if "bulk copy" in one.mix.kinds or not width:
        return Point(name, NOT_APPLICABLE, [Fact("the data does not go through a thread's loads", COMPILED)])
    if one.launch is None:
        return Point(name, UNKNOWN, facts, move=NO_GRID)
    waves = one.waves or 0.0
    facts.append(
        Fact(f"{_counted(one.launch.blocks, 'block')} of {one.made.threads} threads, {waves:.1f} waves", COMPILED)
    )
    if loops or width > THIN or waves < MANY:
        return Point(name, PASS, facts)
    facts.append(_on_their_way(known))
    move = "let a program take 8 times as many elements with as many threads: 16 B a load, an eighth of the blocks"
    place = next((p for p in one.mix.by_place(*LOADS) if p), None)
    return Point(name, FAIL, facts, place, move)


def mathematics(known: Known) -> Point:
    """Is there work that need not be: spilled registers, a precision no one asked for, a pass too many?"""
    name, audited = "better mathematics", known.evidence.audited
    for work in known.works:
        rates = known.evidence.ceilings.rates
        if waste := _spilled(work.one) or _accidental_fp64(work.one, rates) or _without_matrix_unit(work):
            fact, kinds, move = waste
            place = next((p for p in work.one.mix.by_place(*kinds) if p), None)
            return Point(name, FAIL, [fact], place, move)
    facts = [Fact("no spills, no float64 by accident", COMPILED)]
    if (found := known.passes) is None:
        why = known.evidence.unaudited or f"{known.evidence.rest} uses what they leave"
        return Point(name, UNKNOWN, facts, move=f"not known: {why}; {COUNT}")
    ratio, source = found
    facts.append(Fact(f"memory moves {ratio:.2f} times the least bytes", source))
    if ratio < PASSES:
        return Point(name, PASS, facts)
    if known.evidence.besides.products:
        return Point(
            name, UNKNOWN, facts, move="not known: how many of them torch's products move, which are with them"
        )
    if audited:
        facts += _moved_again(audited)
    names = " and ".join(dict.fromkeys(work.one.name for work in known.works))
    several = len(known.works) > 1
    move = f"one launch for {names}: what one leaves in memory, or has read, the next could have in registers"
    one_pass = "one pass: keep what is read until all that needs it is done"
    return Point(name, FAIL, facts, None, move if several else one_pass)


_POINTS: tuple[Callable[[Known], Point], ...] = (
    coalesced,
    occupancy,
    bound,
    divergence,
    reuse,
    privatisation,
    coarsening,
    mathematics,
)


def _unknown(known: Known, name: str, *facts: Fact) -> Point:
    return Point(name, UNKNOWN, facts, move=f"not known: {known.evidence.unaudited}; {COUNT}")


def _counted(count: int, what: str, several: str = "") -> str:
    return f"{count} {what if count == 1 else several or what + 's'}"


def _times(count: float) -> str:
    return "once" if round(count, 2) == 1 else f"{count:.1f} times" if count < 10 else f"{count:.0f} times"


def _is_triton(one: Inspection) -> bool:
    return one.launch is not None and isinstance(one.launch.code, TritonCode)


def _masked(known: Known) -> Iterator[Fact]:
    lanes = sum(t.lanes for t in known.traffic)
    if lanes:
        share = sum(t.masked for t in known.traffic) / lanes
        yield Fact(f"masks turn off {share:.0%} of the lanes of its loads and stores", AUDITED)


def _scattering(of: Sequence[Traffic]) -> float:
    """Bytes of sectors for each byte used."""
    return SECTOR * sum(t.sectors for t in of) / max(1, sum(t.moved for t in of))


def _widths(found: Sequence[Work]) -> Iterator[Fact]:
    for work in found:
        said = []
        for what, kinds in (("load", LOADS), ("store", ("global store",))):
            if count := work.one.mix.bytes_each(*kinds):
                said.append(f"{count:.3g} B a {what}")
        if said:
            yield Fact(f"{work.one.name}: {', '.join(said)} of a thread", COMPILED)


def _worst_conflict(known: Known) -> SharedAccess | None:
    """The accesses that wait most for banks of shared memory, where that waiting counts: against the floor or, where
    none is known, against the time in which all instructions could start."""
    for work in known.works:
        own = [a for a in work.one.shared_accesses or () if a.wavefronts and not _is_compilers(a.place)]
        waits = {a: a.count * (a.wavefronts - (a.ideal or 0)) for a in own if a.wavefronts}
        clocks, instructions = sum(waits.values()), len(work.steps)
        us = clocks * work.trips[1] * work.warps * work.programs / (work.one.gpu.sms * work.one.gpu.clock_mhz)
        if us > WAITING * known.floor_us if known.floor_us else clocks > instructions / ISSUED:
            return max(waits, key=waits.__getitem__)
    return None


def _is_compilers(place: Place) -> bool:
    """Scratch memory of Triton's own reductions: how it is laid out is not for a kernel to say."""
    return place is not None and Path(place[0]).is_relative_to(Path(triton.__file__).parent)


def _on_their_way(known: Known) -> Fact:
    most = size(known.longest.in_flight)
    return Fact(f"at most {most} of loads on their way an SM; {size(known.needed)} keep memory busy", COMPILED)


def _more_parallel(work: Work) -> str:
    if work.resident < work.one.occupancy.blocks:
        return "split the work over more programs: there are places for them on every SM"
    limiter = work.one.occupancy.limiter
    if "registers" in limiter:
        return "fewer elements a thread, so that registers allow more blocks an SM"
    if "shared" in limiter:
        return "smaller tiles or fewer stages, so that shared memory allows more blocks an SM"
    return "more warps a block, or more elements a thread"


def _line_of(known: Known, argument: str) -> Place:
    """The first line that loads or stores by a pointer of this name."""
    for one in known.evidence.launches:
        if one.launch is None or not isinstance(one.launch.code, TritonCode):
            continue
        lines, first = inspect.getsourcelines(one.launch.code.function.fn)
        for number, line in enumerate(lines, first):
            if f"{argument} +" in line and any(f"tl.{way}(" in line for way in ("load", "store")):
                return one.launch.code.file, number
    return None


def _moved_again(audited: Audited) -> Iterator[Fact]:
    """What memory moves more than once: scratch, and inputs that several launches read."""
    if scratch := audited.found.scratch:
        yield Fact(f"{size(scratch * audited.scale)} of scratch memory are written and read", AUDITED)
    readers: Counter[str] = Counter()
    for launch in audited.found.launches:
        readers.update(
            {t.name for t in launch.arguments.values() if t.distinct_read and audited.found.role(t) == "input"}
        )
    for name, count in readers.items():
        if count > 1:
            yield Fact(f"`{name}` is read by {count} launches", AUDITED)


Waste = tuple[Fact, tuple[str, ...], str]  # with the kinds of instructions that show it, and what to do


def _spilled(one: Inspection) -> Waste | None:
    kinds = ("local load", "local store")
    count = sum(one.mix.kinds.get(kind, 0) for kind in kinds)
    if not one.resources.spills or count < FEW * len(one.mix.instructions):
        return None
    used = one.resources
    text = f"{size(used.spills)} a thread do not fit into {used.registers} registers: {count} accesses to local memory"
    return Fact(text, COMPILED), kinds, "more warps, or fewer elements, for a program; or more registers for a thread"


def _accidental_fp64(one: Inspection, rates: Mapping[str, float]) -> Waste | None:
    """Where not all tensors are float64: then someone wants it."""
    count = one.mix.kinds.get("fp64", 0)
    code = one.launch.code if one.launch else None
    kinds = code.signature if isinstance(code, TritonCode) else {}
    wide = [name for name, kind in kinds.items() if kind in ("*fp64", "fp64")]
    is_wanted = bool(kinds) and all(kind == "*fp64" for kind in kinds.values() if kind.startswith("*"))
    if not count or count < FEW * len(one.mix.instructions) or is_wanted:
        return None
    who = f"; `{wide[0]}` is float64" if wide else ""
    slower = f", at 1/{rates['fp32'] / rates['fp64']:.0f} of the rate of float32" if rates.get("fp64") else ""
    text = f"{count} instructions compute in float64{slower}{who}"
    return Fact(text, COMPILED), ("fp64",), "convert to float32 before it is used"


def _without_matrix_unit(work: Work) -> Waste | None:
    if not work.products or work.has_matrix_unit or work.one.gpu.is_amd:
        return None
    unit, count = max(work.products.items(), key=lambda pair: pair[1])
    text = f"{amount(count)} operations of products run as multiply-adds, and {unit} is idle"
    return Fact(text, COMPILED), ("fp32",), "tl.dot, or wmma or mma in CUDA C++: the matrix unit multiplies tiles"
