"""Collect everything known about one call on one GPU: calculated, compiled, audited, measured and counted.

What could not be obtained is None, with the reason beside it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright import record, source
from tilewright.counters import Counters
from tilewright.errors import CompilationFailed, NothingLaunched, first_line
from tilewright.hardware import GPU
from tilewright.interpreter import interpret
from tilewright.interpreter.results import OUT_OF_BOUNDS
from tilewright.spec import Case, Cost, Kernel, Op
from tilewright.workbench.audit import Audit, audit, case_elements, shrink_case
from tilewright.workbench.audit.inputs import make_input
from tilewright.workbench.explain.estimated_ceilings import Ceilings, estimate_ceilings
from tilewright.workbench.explain.host_reads import trace
from tilewright.workbench.explain.host_work import HostWork, record_host_work
from tilewright.workbench.explain.traffic import AuditedTraffic, BytesMoved
from tilewright.workbench.inspect import CompileFailure, Inspection, inspect_cuda_file, inspect_kernel, inspect_launch
from tilewright.workbench.inspect.code import TritonCode
from tilewright.workbench.inspect.launches import Launch, kernel_launches
from tilewright.worker.execute import backward, flatten, forward

CALCULATED, COMPILED, AUDITED, MEASURED, COUNTED = "calculated", "compiled", "audited", "measured", "counters"
QUICK = 2**18  # elements that the interpreter handles in a second or two
LANES = 2**20  # accesses of a launch; of a larger one only a sample of programs is interpreted
MAX_ELEMENTS = 2**33  # sum over a function's inputs, as zeros: pages that are not touched take no memory
NEVER_CHECKED = "nothing compares its results with a reference"
ONLY_TRITON = "the audit interprets Triton kernels only"

OTHER_WORK = "work other than these launches"  # usually torch's own kernels

Records = Sequence[Mapping[str, Any]]
Audits = dict[tuple[str, ...], AuditedTraffic]  # by kernel, case, dtype and direction


@dataclass(frozen=True)
class CallData:
    title: str
    gpu: GPU
    launches: Sequence[Inspection]
    ceilings: Ceilings
    cost: Cost | None = None
    audited: AuditedTraffic | None = None
    no_audit_reason: str = ""
    timing: Mapping[str, Any] | None = None
    no_timing_reason: str = ""
    counters: Counters | None = None
    host_work: HostWork = field(default_factory=HostWork)
    has_integer_inputs: bool = False  # which may be addresses
    reads_values: bool = False  # the host reads values of tensors, which decide what it launches
    arguments: Sequence[str] = ()  # select the call on the command line
    unchecked: str = ""  # why nothing shows that the kernel is right; empty if a verdict does

    def command(self, tool: str, *more: str) -> str:
        """Return the command that runs a tool on this call."""
        return shlex.join(["tilewright", tool, *self.arguments, *more])

    @property
    def how_to_count(self) -> str:
        if all(one.launch is None for one in self.launches):
            return "profile a Python file that launches it on the GPU"
        return f"run `{self.command('profile')}` on the GPU for measured counters"

    @property
    def min_bytes(self) -> float | None:
        """The minimum bytes of the call: calculated from the op, or every byte touched in the audit once."""
        if self.cost:
            return self.cost.bytes
        return self.audited.min_bytes if self.audited else None

    @property
    def other_work(self) -> str:
        """Describe the GPU work of the call other than its launches; empty if there is none."""
        if self.host_work.torch_ops:
            return f"{OTHER_WORK}: torch's {', '.join(dict.fromkeys(self.host_work.torch_ops))}"
        return "" if all(one.launch is None or one.launch.is_complete for one in self.launches) else OTHER_WORK

    @property
    def launch_error(self) -> str | None:
        """Why the call cannot be launched; None if it can."""
        return next((f"{one.name}: {one.launch_error}" for one in self.launches if one.launch_error), None)

    @property
    def measured_us(self) -> float | None:
        return self.timing["median_us"] if self.timing else None

    def moved(self, launch: Inspection) -> BytesMoved | None:
        """Return the bytes of a launch: from the audit, or the minimum of the call if it is the only launch."""
        if self.audited:
            same = [one for one in self.audited.audit.launches if one.kernel == launch.name]
            share = _programs(launch) / sum(_programs(one) for one in self.launches if one.name == launch.name)
            return sum(map(self.audited.of_launch, same), BytesMoved()).times(share)
        if self.cost and len(self.launches) == 1:
            return BytesMoved(self.cost.read, self.cost.written, self.cost.bytes, self.cost.bytes)
        return None


def _programs(one: Inspection) -> int:
    return one.launch.programs * one.launch.times if one.launch else 1


def collect_op(
    op: Op,
    kernel: Kernel,
    case: Case,
    gpu: GPU,
    records: Records,
    direction: str = "forward",
    file: Path | None = None,
    audits: Audits | None = None,
    words: Sequence[str] = (),
    operators: bool = False,
) -> CallData:
    """Collect data on a kernel of an Op, in the user's file if there is one.

    `words` name an operation of the user's and its inputs on the command line. `audits` remembers the audits, which are
    the same for all GPUs. With `operators`, torch operators between the launches count as other work.
    Raises CompilationFailed, or NothingLaunched if the case is not supported.
    """
    host_work = HostWork()
    recorded = replace(kernel, fn=record_host_work(kernel.fn, host_work))
    launches = _compiled(inspect_kernel(op, recorded, case, gpu, (direction,)), f"{op.name}, {kernel.name}, {case}")
    if operators:
        host_work.torch_ops = _torch_operators(op, kernel, case, gpu, direction)
    args = op.make(case, device="meta")
    cost = (op.cost if direction == "forward" else op.backward_cost or op.cost)(*args)
    point = {"case": dict(case.point), "dtype": case.dtype, "direction": direction}
    call = {"op": op.name, "kernel": kernel.name, **point}
    timing, no_timing_reason = _timing(records, call, gpu)
    named = tuple(words) or ((op.name, str(file)) if file else (op.name, "-k", kernel.name))
    of_direction = () if direction == "forward" else ("--direction", direction)
    of_case = () if "-i" in words else ("-c", str(case), "-d", case.dtype)  # the inputs are the case
    arguments = (*named, *of_case, *of_direction)
    bench = shlex.join(["tilewright", "bench", *arguments, "--record", f"results/{gpu.name}/{op.name}.jsonl"])
    audits = {} if audits is None else audits
    audited, no_audit_reason = _audit_op(op, kernel, case, cost, direction, launches, bool(host_work.gemms), audits)
    return CallData(
        title=launches[0].title + ("" if direction == "forward" else f", {direction}"),
        gpu=gpu,
        launches=launches,
        ceilings=estimate_ceilings(gpu, records),
        cost=cost or None,
        audited=audited,
        no_audit_reason=no_audit_reason,
        timing=timing,
        no_timing_reason=f"{no_timing_reason}; run `{bench}` on the GPU",
        counters=_counters(records, call, gpu),
        host_work=host_work,
        arguments=arguments,
        unchecked="" if timing else _unchecked(records, op.name, kernel.name, file, named),
    )


def _torch_operators(op: Op, kernel: Kernel, case: Case, gpu: GPU, direction: str) -> list[str]:
    """Return the torch operators of a call. It is a call of its own, in which registered operators launch nothing."""
    found = HostWork()
    kernel_launches(op, replace(kernel, fn=record_host_work(kernel.fn, found, operators=True)), case, gpu, (direction,))
    return found.torch_ops


def collect_cases(
    op: Op,
    kernel: Kernel,
    cases: Sequence[Case],
    gpu: GPU,
    records: Records,
    direction: str,
    *,
    only_first: bool,
    file: Path | None = None,
    audits: Audits | None = None,
    words: Sequence[str] = (),
) -> list[CallData]:
    """Collect data on every case that the kernel supports, or on the first of them."""
    found = []
    for case in cases:
        try:
            found.append(collect_op(op, kernel, case, gpu, records, direction, file, audits, words))
        except NothingLaunched:
            continue
        if only_first:
            break
    return found


@dataclass
class TracedFunction:
    """A user's function with inputs in command-line syntax: its launches on any GPU, and its audit."""

    load: Callable[[], Callable[..., Any]]
    given: Sequence[str]
    host_work: HostWork = field(default_factory=HostWork)
    reads_values: bool = False

    def launches(self, gpu: GPU) -> list[Launch]:
        found, self.reads_values = trace(self._load_call, lambda: self.audited, gpu)
        return found

    def _load_call(self) -> tuple[Callable[..., Any], list[Any]]:
        self.host_work = HostWork()
        return record_host_work(self.load(), self.host_work, operators=True), self.inputs

    @property
    def inputs(self) -> list[Any]:
        return [make_input(text, "meta") for text in self.given]

    @cached_property
    def audited(self) -> AuditedTraffic:
        """The audit, which is the same for all GPUs."""
        args = [make_input(text, zeros=True) for text in self.given]
        function = record_host_work(self.load(), HostWork())
        return AuditedTraffic(audit(lambda *a: forward(function, a, ())[1], *args, elements=MAX_ELEMENTS, lanes=LANES))


def collect_function(
    function: TracedFunction, title: str, gpu: GPU, records: Records, arguments: Sequence[str] = ()
) -> CallData:
    """Collect data on a user's function."""
    launches = _compiled([inspect_launch(one, title) for one in function.launches(gpu)], title)
    audited, no_audit_reason = _audit(launches, lambda: function.audited)
    return CallData(
        title=title,
        gpu=gpu,
        launches=launches,
        ceilings=estimate_ceilings(gpu, records),
        audited=audited,
        no_audit_reason=no_audit_reason,
        no_timing_reason="functions of files have no records",
        host_work=function.host_work,
        reads_values=function.reads_values,
        arguments=arguments,
        unchecked=f"{NEVER_CHECKED}; `{shlex.join(['tilewright', 'check', *arguments])} --reference NAME` does",
        has_integer_inputs=any(isinstance(a, Tensor) and not _is_float(a) for a in function.inputs),
    )


def collect_cuda_file(path: Path, gpu: GPU, threads: int, shared: int, records: Records) -> list[CallData]:
    """Collect data on every kernel of a `.cu` file, without launches and inputs."""
    launches = _compiled(inspect_cuda_file(path, gpu, threads, shared), path.name)
    rates = estimate_ceilings(gpu, records)
    launch = ("--threads", str(threads), "--shared", str(shared))
    return [
        CallData(
            f"{path.name}, {one.name}",
            gpu=gpu,
            launches=[one],
            ceilings=rates,
            no_audit_reason=ONLY_TRITON,
            no_timing_reason="a .cu file",
            arguments=(str(path), "-f", one.name, *launch),
            unchecked=NEVER_CHECKED,
        )
        for one in launches
    ]


def _compiled(found: Iterable[Inspection | CompileFailure], title: str) -> list[Inspection]:
    launches = []
    for one in found:
        if isinstance(one, CompileFailure):
            raise one.error
        launches.append(one)
    if not launches:
        raise NothingLaunched(title)
    return launches


def _audit(launches: Sequence[Inspection], run: Callable[[], AuditedTraffic]) -> tuple[AuditedTraffic | None, str]:
    """Return the audited traffic, or None and the reason."""
    for one in launches:
        code = one.launch and one.launch.code
        if not isinstance(code, TritonCode) or code.function.is_gluon():
            return None, ONLY_TRITON
        if not _programs(one):
            return None, f"the grid of {one.name} is empty"
    try:
        audited = run()
    except CompilationFailed:
        raise
    except (Exception, SystemExit) as error:  # including those of a user's file
        return None, f"the audit failed: {first_line(error)}"
    for fault in audited.audit.findings:
        if fault.kind == OUT_OF_BOUNDS:
            return None, str(fault)
    names, ran = {one.name for one in launches}, {one.kernel for one in audited.audit.launches}
    if names != ran:
        others = f"other kernels ({', '.join(sorted(ran))})" if ran else "only torch's own operators"
        return None, f"{audited.case or 'the audited call'} runs {others}"
    wanted = {name: sum(_programs(one) for one in launches if one.name == name) for name in names}
    ran_programs = {name: sum(one.programs for one in audited.audit.launches if one.kernel == name) for name in names}
    return replace(audited, program_scale={name: wanted[name] / ran_programs[name] for name in names}), ""


def _audit_op(
    op: Op,
    kernel: Kernel,
    case: Case,
    cost: Cost,
    direction: str,
    launches: Sequence[Inspection],
    has_library_gemm: bool,
    audits: Audits,
) -> tuple[AuditedTraffic | None, str]:
    """Audit the case itself if its launches contain a GEMM that no library does, or its cost is unknown.

    Otherwise audit a smaller case.
    """

    def once(kernel: Kernel, run: Callable[..., AuditedTraffic]) -> AuditedTraffic:
        key = (kernel.name, str(case), case.dtype, direction)
        if key not in audits:
            audits[key] = run(op, kernel, case, cost, direction)
        return audits[key]

    if kernel.builds_per_case:
        return None, "the audit does not interpret kernels generated by torch.compile"
    has_gemm = any(unit.startswith("tensor") for unit in cost.flops)
    if direction == "forward" and not has_library_gemm and (has_gemm or not cost):
        return _audit(launches, lambda: once(kernel, _audit_full))
    audited, reason = _audit(launches, lambda: once(kernel, _audit_smaller))
    # A small call may be dispatched to torch. Then audit the Triton kernels of the op directly.
    others = [k for k in op.kernels.values() if kernel is op.shipped and k.language == "triton"]
    while others and not audited:
        other = others.pop()
        audited, _ = _audit(launches, lambda other=other: once(other, _audit_smaller))
    return audited, "" if audited else reason


def _audit_full(op: Op, kernel: Kernel, case: Case, cost: Cost, direction: str) -> AuditedTraffic:
    """Audit a sample of the programs of the full case: the reuse of a GEMM depends on all sizes."""
    args = [torch.zeros_like(a, device="cpu") if isinstance(a, Tensor) else a for a in op.make(case, device="meta")]
    found = audit(lambda *a: forward(kernel.fn, a, ())[1], *args, cost=cost, elements=MAX_ELEMENTS, lanes=LANES)
    return AuditedTraffic(found)


def _audit_smaller(op: Op, kernel: Kernel, case: Case, cost: Cost, direction: str) -> AuditedTraffic:
    small = _smaller(op, case)
    args = op.make(small)
    small_cost = (op.cost if direction == "forward" else op.backward_cost or op.cost)(*args)
    if direction == "forward":
        found = audit(lambda *given: forward(kernel.fn, given, ())[1], *args, cost=small_cost)
    else:
        found = _audit_backward(op, kernel, args, small_cost)
    pairs = enumerate(zip(args, op.make(case, device="meta"), strict=True))
    same = {n: one for n, (one, full) in pairs if isinstance(one, Tensor) and one.shape == full.shape}
    unscaled = frozenset(one.untyped_storage().data_ptr() for one in same.values())
    constant = sum(one.nbytes for one in same.values())
    if direction == "backward":
        constant += sum(one.nbytes for n, one in same.items() if _needs_gradient(op, n, one))
    if not small_cost:  # unknown
        scale = case_elements(op, case) / case_elements(op, small)
    elif small_cost.bytes > constant:
        scale = (cost.bytes - constant) / (small_cost.bytes - constant)
    else:
        scale = cost.bytes / small_cost.bytes
    return AuditedTraffic(found, scale, "" if small == case else str(small), unscaled=unscaled)


def _audit_backward(op: Op, kernel: Kernel, args: Sequence[Any], small_cost: Cost) -> Audit:
    needs = [n for n, a in enumerate(args) if _needs_gradient(op, n, a)]
    with interpret():
        leaves, outputs = forward(kernel.fn, args, needs)
    results = flatten(outputs)
    grads = [torch.ones_like(o) for o in results if _is_float(o)]
    return audit(lambda *_: backward(results, [leaves[n] for n in needs], grads), *leaves, cost=small_cost)


def _needs_gradient(op: Op, number: int, value: Any) -> bool:
    return _is_float(value) and number not in op.constants


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _smaller(op: Op, case: Case) -> Case:
    """Return the case with fewer rows; other sizes shrink only if necessary, since they may select another kernel."""
    elements = case_elements(op, case)
    if op.batch and elements > QUICK:
        length = max(1, math.floor(int(case[op.batch]) * QUICK / elements))
        case = case.with_size(op.batch, length)
    return shrink_case(op, case, 4 * QUICK)


def _timing(records: Records, wanted: Mapping[str, Any], gpu: GPU) -> tuple[Mapping[str, Any] | None, str]:
    """Return the newest fresh timing, or None and the reason."""
    same = [r for r in records if r["kind"] == "timing" and all(r.get(k) == v for k, v in wanted.items())]
    same = sorted((r for r in same if r["device"]["gpu"] == gpu.name and r["median_us"]), key=lambda r: r["date"])
    if not same:
        return None, f"no timing on {gpu.name}"
    if record.is_stale(dict(same[-1])):
        return None, f"the code has changed since the timing of {same[-1]['date'][:10]}"
    return same[-1], ""


def _unchecked(records: Records, op: str, kernel: str, file: Path | None, named: Sequence[str]) -> str:
    """Return why no verdict shows that the kernel is right; empty if the newest one does."""
    run = f"run `{shlex.join(['tilewright', 'check', *named])}`"
    found = [r for r in records if r["kind"] == "verdict" and (r["op"], r["kernel"]) == (op, kernel)]
    if file:
        found = [r for r in found if r["source"] == source.file_hash(file)]
    if not found:
        return f"no verdict on its results is recorded; {run}"
    newest = max(found, key=lambda r: r["date"])
    if newest["verdict"] != "right":
        return f"its newest verdict is '{newest['verdict']}'; {run}"
    if not file and record.is_stale(dict(newest)):
        return f"the code has changed since the verdict of {newest['date'][:10]}; {run}"
    return ""


def _counters(records: Records, call: Mapping[str, Any], gpu: GPU) -> Counters | None:
    """Return the counters recorded by `tilewright profile`, or else the DRAM bytes of `tilewright audit --measure`."""

    def newest(kind: str, key: str, wanted: Mapping[str, Any]) -> Mapping[str, Any] | None:
        same = [r for r in records if r["kind"] == kind and r.get("call") == wanted and r.get(key)]
        fresh = [r for r in same if r["device"]["gpu"] == gpu.name and not record.is_stale(dict(r))]
        return max(fresh, key=lambda r: r["date"], default=None)

    if found := newest("counters", "counters", call):
        return Counters.from_record(found)
    forward_call = {name: value for name, value in call.items() if name != "direction"}
    found = newest("audit", "counted", forward_call) if call["direction"] == "forward" else None
    return Counters(dram_read=found["counted"]["read"], dram_written=found["counted"]["written"]) if found else None
