"""Predict the time of a call on a GPU from its traffic, the time of each compute unit, and launch overhead.

Launches run one after the other. Within a launch, memory and compute overlap as far as several blocks share an SM: one
block waits for memory while another computes. No constant is fitted to an operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilewright import counters
from tilewright.workbench.explain.collect import AUDITED, CALCULATED, COMPILED, CallData
from tilewright.workbench.explain.launch_model import LaunchModel
from tilewright.workbench.explain.traffic import BytesMoved

LAUNCH_US = 1.7  # overhead of a launch: memory is idle until the first bytes arrive and after the last ones
DRAM_LATENCY = 0.7e-6  # seconds, under load
L2_LATENCY = 0.3e-6  # seconds
MARGIN = 0.05  # by which ceilings vary between runs and access patterns
L2_RESIDENT = 0.8  # share of the L2 that holds the most recent bytes; written ones have not reached DRAM yet
L2_PORT = 64  # bytes per clock from the L2 to one SM
CONFLICT = 2.0  # times the ideal wavefronts, from which bank conflicts are reported
ASYNC_STAGES = 3  # tiles per block with async copies: one is computed on, two are in flight
ISSUE_CLOCKS = 2.0  # between two instructions of a warp: half the latency of a dependent one


@dataclass(frozen=True)
class Term:
    """One component of the predicted time."""

    us: float
    source: str  # where the amount comes from; rates come from the ceilings


@dataclass(frozen=True)
class Prediction:
    us: float
    low: float  # with full overlap
    high: float  # without overlap
    terms: Mapping[str, Term]  # sums over launches, by unit and `memory`, `latency`, `atomics`, `start`
    rates: str = ""  # the source of the ceilings
    excludes: tuple[str, ...] = ()  # effects that are not modelled
    busy: float = 1.0  # mean DRAM utilisation

    @property
    def longest(self) -> str:
        return max(self.terms, key=lambda name: self.terms[name].us)

    @property
    def is_too_short(self) -> bool:
        """Return whether memory takes longest, but the call ends before memory is busy."""
        return self.longest == "memory" and self.busy < counters.LATENCY_BOUND

    @property
    def bottleneck(self) -> str:
        """The longest term; `latency` if even memory, the longest, is not busy, as in ncu."""
        return "latency" if self.is_too_short else self.longest

    def as_json(self) -> dict[str, object]:
        terms = {name: {"us": term.us, "source": term.source} for name, term in self.terms.items()}
        return {
            **{name: getattr(self, name) for name in ("us", "low", "high", "bottleneck", "busy", "rates")},
            "terms": terms,
            "excludes": list(self.excludes),
        }


def predict(call: CallData) -> Prediction | None:
    """Predict the time of a call; None if its bytes are unknown or it cannot be launched."""
    if call.min_bytes is None or call.launch_error or not all(one.launch for one in call.launches):
        return None
    if call.audited is None and len(call.launches) > 1:
        return _predict_total(call)
    total = Prediction(call.ceilings.timer_us, call.ceilings.timer_us, call.ceilings.timer_us, {})
    for model in launch_models(call):
        total = _add(total, _predict_launch(call, model))
    return _finish(_add(total, _predict_library(call)), call)


def launch_models(call: CallData) -> list[LaunchModel]:
    """Return a model of each launch. Launches with MMAs share the GEMM FLOPs, which may be counted from their code."""
    if call.cost is None:
        return [LaunchModel(one, call.moved(one)).with_mma_flops(call.ceilings.rates) for one in call.launches]
    gemms = [one for one in call.launches if "tensor core" in one.mix.kinds]
    if not call.host_work.gemms and not call.other_work:
        gemms = gemms or call.launches
    each = {unit: n / len(gemms) for unit, n in _gemm_flops(call).items()} if gemms else {}
    return [LaunchModel(one, call.moved(one), each if one in gemms else {}) for one in call.launches]


def _gemm_flops(call: CallData) -> dict[str, float]:
    flops = call.cost.flops if call.cost else {}
    rates = call.ceilings.rates
    return {unit: amount for unit, amount in flops.items() if unit.startswith("tensor") and rates.get(unit)}


def _predict_library(call: CallData) -> Prediction:
    """Predict library GEMMs, at the measured rate of the library."""
    if not call.host_work.gemms or any("tensor core" in one.mix.kinds for one in call.launches):
        return Prediction(0.0, 0.0, 0.0, {})
    units = {unit: amount / call.ceilings.rates[unit] * 1e6 for unit, amount in _gemm_flops(call).items()}
    terms = {unit: Term(us, CALCULATED) for unit, us in units.items()}
    start = LAUNCH_US * call.host_work.gemms
    low, high = (start + (1 + side * MARGIN) * sum(units.values()) for side in (-1, 1))
    return Prediction(start + sum(units.values()), low, high, terms | {"start": Term(start, COMPILED)})


def _predict_total(call: CallData) -> Prediction:
    """Predict several launches from the minimum cost of the call, if the traffic of each launch is unknown."""
    assert call.cost
    memory = call.ceilings.memory_seconds(call.cost.read, call.cost.written) * 1e6
    rates = call.ceilings.rates
    units = {unit: n / rates[unit] * 1e6 for unit, n in call.cost.flops.items() if rates.get(unit)}
    starts = LAUNCH_US * sum(one.launch.times for one in call.launches if one.launch)
    longest = max(memory, *units.values(), 0.0)
    terms = {"memory": Term(memory, CALCULATED), "start": Term(starts, COMPILED)}
    terms |= {unit: Term(us, CALCULATED) for unit, us in units.items()}
    fixed = call.ceilings.timer_us + starts
    low, high = fixed + (1 - MARGIN) * longest, fixed + (1 + MARGIN) * (memory + sum(units.values()))
    return _finish(Prediction(fixed + longest, low, high, terms), call)


def _predict_launch(call: CallData, model: LaunchModel) -> Prediction:
    is_async = bool(model.kernel.mix.kinds.keys() & {"async copy", "bulk copy"})
    moved = model.moved or BytesMoved()
    memory, unmerged = (1e6 * _memory_seconds(call, model, moved, merged) for merged in (is_async, False))
    units = {u: 1e6 * s * _tail_factor(model) for u, s in model.seconds(call.ceilings.rates).items()}
    mma = sum(us for unit, us in units.items() if unit in model.mma_flops)
    others = max((us for unit, us in units.items() if unit not in model.mma_flops), default=0.0)
    latency = 1e6 * _latency_seconds(model)
    atomics = moved.contention / model.kernel.gpu.clock_mhz  # one per clock
    start = LAUNCH_US * (model.kernel.launch.times if model.kernel.launch else 1)
    stages = ASYNC_STAGES if is_async else 1
    compute = _overlapped(mma, others, model.resident_blocks)
    overlapped = _overlapped(memory, compute, stages * model.resident_blocks)
    low = start + (1 - MARGIN) * max(memory, mma, others, latency, atomics)
    high = start + (1 + MARGIN) * max(unmerged + sum(units.values()), latency, atomics)
    source = AUDITED if call.audited else CALCULATED
    terms = {"memory": Term(memory, source), "start": Term(start, COMPILED), "latency": Term(latency, COMPILED)}
    terms |= {"atomics": Term(atomics, source)} if atomics else {}
    terms |= {u: Term(us, CALCULATED if u in model.mma_flops else COMPILED) for u, us in units.items()}
    return Prediction(start + max(overlapped, latency, atomics), low, high, terms)


def _overlapped(a: float, b: float, blocks: float) -> float:
    """Return the time of two phases per block: the busier unit idles only while all blocks are in the other phase."""
    busy, other = max(a, b), min(a, b)
    return busy / (1 - (other / (busy + other)) ** max(1.0, blocks)) if other else busy


def _memory_seconds(call: CallData, model: LaunchModel, moved: BytesMoved, merged: bool) -> float:
    """Return the time of DRAM and L2. `merged`: the L2 serves the same tile to several SMs in one access."""
    gpu = model.kernel.gpu
    window = model.resident_blocks * gpu.sms / model.kernel.compiled.cluster * moved.distinct / model.programs
    if window <= gpu.l2:  # repeated accesses hit the L2
        port = L2_PORT * gpu.sms * gpu.clock_mhz * 1e6
        rate = max(port, call.ceilings.rates["l2"]) if merged else call.ceilings.rates["l2"]
        again = (moved.repeated + model.spilled) / rate
        return call.ceilings.memory_seconds(moved.read, moved.written) + again
    return call.ceilings.memory_seconds(moved.read + moved.repeated + model.spilled, moved.written)


def _latency_seconds(model: LaunchModel) -> float:
    """Return the time of the dependent chain: the load latency and instruction latency of one block, times waves."""
    return sum(latency_parts(model)) * max(1.0, model.kernel.waves or 0.0)


def latency_parts(model: LaunchModel) -> tuple[float, float]:
    """Return the seconds that one block waits for loads, and for the results of its own instructions."""
    moved = model.moved or BytesMoved()
    again = moved.repeated / (moved.read + moved.repeated) if moved.read else 0.0
    waiting = model.load_waits * (DRAM_LATENCY * (1 - again) + L2_LATENCY * again)
    return waiting, ISSUE_CLOCKS * model.instructions_per_warp / (model.kernel.gpu.clock_mhz * 1e6)


def _tail_factor(model: LaunchModel) -> float:
    """Return the slowdown by a partly idle last wave."""
    waves = model.kernel.waves
    return math.ceil(waves) / waves if waves and waves > 1 else 1.0


def _add(first: Prediction, second: Prediction) -> Prediction:
    terms = dict(first.terms)
    for name, term in second.terms.items():
        terms[name] = Term(term.us + (terms[name].us if name in terms else 0.0), term.source)
    sums = {name: getattr(first, name) + getattr(second, name) for name in ("us", "low", "high")}
    return Prediction(**sums, terms=terms)


def _finish(found: Prediction, call: CallData) -> Prediction:
    """Add the source of the rates, the effects that are not modelled and the DRAM utilisation."""
    excludes = []
    if not call.audited:
        excludes.append("repeated reads and writes, which the audit would count")
    elif call.has_integer_inputs:
        excludes.append("the values of integer inputs, if they are addresses: the audit used small ones, or zeros")
    if call.reads_values:
        excludes.append("the wait of the host for values that it reads; those of the audit decided what it launches")
    if call.other_work:
        excludes.append(call.other_work)
    accesses = [a for one in call.launches for a in one.shared_accesses or ()]
    if any(a.wavefronts > CONFLICT * a.ideal for a in accesses if a.wavefronts and a.ideal):
        excludes.append("bank conflicts of shared memory")
    busy = _dram_utilisation(call, found, found.us - call.ceilings.timer_us)
    return replace(found, rates=call.ceilings.source, excludes=tuple(excludes), busy=busy)


def _dram_utilisation(call: CallData, found: Prediction, us: float) -> float:
    """Return the utilisation relative to the read bandwidth. Repeated bytes count, even if a cache serves them."""
    read, written = (call.cost.read, call.cost.written) if call.cost else (0, 0)
    if call.audited:
        read, written = call.audited.moved.read, call.audited.moved.written
    in_l2 = min(1.0, L2_RESIDENT * call.gpu.l2 / max(1, read + written)) * written
    once = (read + written - in_l2) / call.ceilings.rates["read"]
    again = found.terms["memory"].us * 1e-6 - call.ceilings.memory_seconds(read, written)
    return (once + max(0.0, again)) / (us * 1e-6)
