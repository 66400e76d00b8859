"""How long a call takes on a GPU, from what must be moved, what the units must do, and what starting costs.

Launches follow each other. In each, memory and units work at once as far as several blocks share an SM: while one block
waits for memory another computes. No number here is fitted to an operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilewright import counters
from tilewright.workbench.explain.evidence import AUDITED, CALCULATED, COMPILED, Evidence, Moved
from tilewright.workbench.explain.work import Work

START_US = 1.7  # of a launch, until its first bytes are there and after its last: an idle memory, filled and drained
LATENCY = 0.7e-6  # seconds from a load to its bytes, with memory busy
CACHED = 0.3e-6  # if they are in the L2
MARGIN = 0.05  # by which ceilings differ from run to run and with the pattern of access
HELD = 0.8  # of the L2: the last bytes that passed; those of them that were written have not gone to memory yet
PORT = 64  # bytes a clock from the L2 to an SM
CONFLICT = 2.0  # times the wavefronts that could do, from which an access waits for banks
AHEAD = 3  # tiles of a block that copies by itself: one is computed, two are on their way
CLOCKS = 2.0  # from one instruction of a warp to the next: half of what a dependent one waits


@dataclass(frozen=True)
class Term:
    """One part of the time."""

    us: float
    source: str  # of the amounts; the rates are the ceilings'


@dataclass(frozen=True)
class Prediction:
    us: float
    low: float  # everything overlaps
    high: float  # nothing does
    terms: Mapping[str, Term]  # over all launches: by unit, `memory`, `latency`, `atomics`, and `start` of those
    rates: str  # where the ceilings come from
    lacks: tuple[str, ...] = ()  # what is not in it
    busy: float = 1.0  # the share of the memory's bandwidth that it has on average

    @property
    def longest(self) -> str:
        return max(self.terms, key=lambda name: self.terms[name].us)

    @property
    def is_unfilled(self) -> bool:
        """Whether it is over before memory is busy, though nothing takes longer."""
        return self.longest == "memory" and self.busy < counters.LATENCY

    @property
    def binds(self) -> str:
        """As ncu names it: what takes longest, unless it is not busy either."""
        return "latency" if self.is_unfilled else self.longest

    def as_json(self) -> dict[str, object]:
        terms = {name: {"us": term.us, "source": term.source} for name, term in self.terms.items()}
        return {
            **{name: getattr(self, name) for name in ("us", "low", "high", "binds", "busy", "rates")},
            "terms": terms,
            "lacks": list(self.lacks),
        }


def predicted(known: Evidence) -> Prediction | None:
    """None where not even the bytes are known."""
    if known.least is None or known.obstacle or not all(one.launch for one in known.launches):
        return None
    if known.audited is None and len(known.launches) > 1:
        return _together(known)
    total = Prediction(known.ceilings.timer_us, known.ceilings.timer_us, known.ceilings.timer_us, {}, "")
    for work in works(known):
        total = _then(total, _of_launch(known, work))
    return _with_words(_then(total, _of_library(known)), known)


def works(known: Evidence) -> list[Work]:
    """The launches, with what each moves, and products shared out among those that have instructions for them; where no
    one says how many they are, those that the code makes."""
    if known.cost is None:
        return [Work(one, known.moved(one)).with_products(known.ceilings.rates) for one in known.launches]
    multiplying = [one for one in known.launches if "tensor core" in one.mix.kinds]
    if not known.besides.products and not known.rest:
        multiplying = multiplying or known.launches
    each = {unit: n / len(multiplying) for unit, n in _products(known).items()} if multiplying else {}
    return [Work(one, known.moved(one), each if one in multiplying else {}) for one in known.launches]


def _products(known: Evidence) -> dict[str, float]:
    flops = known.cost.flops if known.cost else {}
    rates = known.ceilings.rates
    return {unit: amount for unit, amount in flops.items() if unit.startswith("tensor") and rates.get(unit)}


def _of_library(known: Evidence) -> Prediction:
    """Products that no launch of ours makes, at the rate at which torch's library was measured."""
    if not known.besides.products or any("tensor core" in one.mix.kinds for one in known.launches):
        return Prediction(0.0, 0.0, 0.0, {}, "")
    units = {unit: amount / known.ceilings.rates[unit] * 1e6 for unit, amount in _products(known).items()}
    terms = {unit: Term(us, CALCULATED) for unit, us in units.items()}
    start = START_US * known.besides.products
    low, high = (start + (1 + side * MARGIN) * sum(units.values()) for side in (-1, 1))
    return Prediction(start + sum(units.values()), low, high, terms | {"start": Term(start, COMPILED)}, "")


def _together(known: Evidence) -> Prediction:
    """Several launches of which only the whole is known: its least bytes and operations, one start each."""
    assert known.cost
    memory = known.ceilings.memory_seconds(known.cost.read, known.cost.written) * 1e6
    rates = known.ceilings.rates
    units = {unit: n / rates[unit] * 1e6 for unit, n in known.cost.flops.items() if rates.get(unit)}
    starts = START_US * sum(one.launch.times for one in known.launches if one.launch)
    longest = max(memory, *units.values(), 0.0)
    terms = {"memory": Term(memory, CALCULATED), "start": Term(starts, COMPILED)}
    terms |= {unit: Term(us, CALCULATED) for unit, us in units.items()}
    fixed = known.ceilings.timer_us + starts
    low, high = fixed + (1 - MARGIN) * longest, fixed + (1 + MARGIN) * (memory + sum(units.values()))
    return _with_words(Prediction(fixed + longest, low, high, terms, ""), known)


def _of_launch(known: Evidence, work: Work) -> Prediction:
    copies = bool(work.one.mix.kinds.keys() & {"async copy", "bulk copy"})
    memory, alone = (1e6 * _memory(known, work, work.moved or Moved(), merged) for merged in (copies, False))
    units = {u: 1e6 * s * _tail(work) for u, s in work.seconds(known.ceilings.rates).items()}
    products = sum(us for unit, us in units.items() if unit in work.products)
    others = max((us for unit, us in units.items() if unit not in work.products), default=0.0)
    latency = 1e6 * _chain(work, work.moved or Moved())
    atomics = (work.moved.met if work.moved else 0.0) / work.one.gpu.clock_mhz  # one a clock
    start = START_US * (work.one.launch.times if work.one.launch else 1)
    ahead = AHEAD if copies else 1
    together = _overlapped(memory, _overlapped(products, others, work.resident), ahead * work.resident)
    low = start + (1 - MARGIN) * max(memory, products, others, latency, atomics)
    high = start + (1 + MARGIN) * max(alone + sum(units.values()), latency, atomics)
    source = AUDITED if known.audited else CALCULATED
    terms = {"memory": Term(memory, source), "start": Term(start, COMPILED), "latency": Term(latency, COMPILED)}
    terms |= {"atomics": Term(atomics, source)} if atomics else {}
    terms |= {u: Term(us, CALCULATED if u in work.products else COMPILED) for u, us in units.items()}
    return Prediction(start + max(together, latency, atomics), low, high, terms, "")


def _overlapped(a: float, b: float, blocks: float) -> float:
    """Two parts of each block's work: the busier unit is idle only while all blocks of an SM are at the other one."""
    busy, other = max(a, b), min(a, b)
    return busy / (1 - (other / (busy + other)) ** max(1.0, blocks)) if other else busy


def _memory(known: Evidence, work: Work, moved: Moved, merged: bool) -> float:
    """`merged`: SMs that copy the same tiles at about the same time have them from one access of the L2, and each has
    what its port takes."""
    gpu = work.one.gpu
    window = work.resident * gpu.sms / work.one.made.cluster * moved.distinct / work.programs
    if window <= gpu.l2:  # what is asked for again is in the cache still
        port = PORT * gpu.sms * gpu.clock_mhz * 1e6
        rate = max(port, known.ceilings.rates["l2"]) if merged else known.ceilings.rates["l2"]
        again = (moved.repeated + work.spilled) / rate
        return known.ceilings.memory_seconds(moved.read, moved.written) + again
    return known.ceilings.memory_seconds(moved.read + moved.repeated + work.spilled, moved.written)


def _chain(work: Work, moved: Moved) -> float:
    """How long the blocks of an SM take if each only ever waits: for its loads, and for its own instructions."""
    again = moved.repeated / (moved.read + moved.repeated) if moved.read else 0.0
    waiting = work.waits * (LATENCY * (1 - again) + CACHED * again)
    alone = waiting + CLOCKS * work.steps_each / (work.one.gpu.clock_mhz * 1e6)
    return alone * max(1.0, work.one.waves or 0.0)


def _tail(work: Work) -> float:
    """By how much the last wave, part of it idle, lengthens what the units do."""
    waves = work.one.waves
    return math.ceil(waves) / waves if waves and waves > 1 else 1.0


def _then(first: Prediction, second: Prediction) -> Prediction:
    terms = dict(first.terms)
    for name, term in second.terms.items():
        terms[name] = Term(term.us + (terms[name].us if name in terms else 0.0), term.source)
    sums = {name: getattr(first, name) + getattr(second, name) for name in ("us", "low", "high")}
    return Prediction(**sums, terms=terms, rates="")


def _with_words(found: Prediction, known: Evidence) -> Prediction:
    lacks = []
    if not known.audited:
        lacks.append(f"repeated bytes ({known.unaudited})")
    elif known.drawn:
        lacks.append("where integers of the inputs lead, if to addresses: small ones were drawn, or zeros")
    if known.rest:
        lacks.append(known.rest)
    accesses = [a for one in known.launches for a in one.shared_accesses or ()]
    if any(a.wavefronts > CONFLICT * a.ideal for a in accesses if a.wavefronts and a.ideal):
        lacks.append("waiting for banks of shared memory")
    busy = _busy(known, found, found.us - known.ceilings.timer_us)
    return replace(found, rates=known.ceilings.source, lacks=tuple(lacks), busy=busy)


def _busy(known: Evidence, found: Prediction, us: float) -> float:
    """Of what reading alone can have, while its kernels run; with what is moved again, by caches too."""
    read, written = (known.cost.read, known.cost.written) if known.cost else (0, 0)
    if known.audited:
        read, written = known.audited.moved.read, known.audited.moved.written
    held = min(1.0, HELD * known.gpu.l2 / max(1, read + written)) * written
    once = (read + written - held) / known.ceilings.rates["read"]
    again = found.terms["memory"].us * 1e-6 - known.ceilings.memory_seconds(read, written)
    return (once + max(0.0, again)) / (us * 1e-6)
