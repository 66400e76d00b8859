"""All that is known of one call on one GPU: calculated, compiled, audited, measured. Nothing is guessed; what could not
be had says why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright import record
from tilewright.counters import Counters
from tilewright.errors import CompilerRefused, NothingLaunched, first_line
from tilewright.hardware import GPU
from tilewright.interpreter import interpret
from tilewright.interpreter.observed import OUT_OF_BOUNDS, SECTOR, Traffic
from tilewright.interpreter.observed import Launch as Ran
from tilewright.spec import Case, Cost, Kernel, Op
from tilewright.workbench.audit import Audit, audit, case_elements, shrunk
from tilewright.workbench.audit.inputs import make
from tilewright.workbench.explain.ceilings import Ceilings, ceilings
from tilewright.workbench.explain.host_work import Besides, watched
from tilewright.workbench.inspect import Inspection, Refused, inspect_cuda_file, inspect_kernel, inspect_launch
from tilewright.workbench.inspect.code import TritonCode
from tilewright.workbench.inspect.launches import of_call
from tilewright.worker.execute import backward, flat, forward

CALCULATED, COMPILED, AUDITED, MEASURED, COUNTED = "calculated", "compiled", "audited", "measured", "counters"
NEAR = 2**17  # bytes of an input that the near cache holds, beside what streams through it
QUICK = 2**18  # elements that are interpreted within a second or two
LANES = 2**20  # of a launch's accesses: of more, only some programs are interpreted
MOST = 2**33  # elements of a function's inputs: their addresses fit a program, and what is not touched takes no memory

BESIDES = "what the call does besides these launches"  # torch's own kernels, as a rule

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Moved:
    """Bytes of one launch, or of several."""

    read: float = 0  # of distinct elements
    written: float = 0
    asked: float = 0  # by loads, stores and atomics, repeats and all
    sectors: float = 0  # bytes that warps make the memory system move for what they ask
    near: float = 0  # of what is asked, what the near cache gives: small inputs that all programs read
    met: float = 0  # atomics on one address, where they meet most

    def __add__(self, other: Moved) -> Moved:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Moved(*(a + b for a, b in pairs))

    def times(self, factor: float) -> Moved:
        return Moved(*(factor * value for value in vars(self).values()))

    @property
    def distinct(self) -> float:
        return self.read + self.written

    @property
    def repeated(self) -> float:
        """What the far cache has to give, or memory once more."""
        return max(0.0, max(self.asked, self.sectors) - self.distinct - self.near)


@dataclass(frozen=True)
class Audited:
    """Traffic of the call, or of one like it that is smaller by `scale`."""

    found: Audit
    scale: float = 1.0
    case: str = ""  # on which it was audited, if not on the one in question
    grown: Mapping[str, float] = field(default_factory=dict)  # by kernel, how many times more programs are in question
    fixed: frozenset[int] = frozenset()  # addresses of inputs that are no larger in the call

    def of(self, launch: Ran) -> Moved:
        """Of one tensor that is given twice, bytes that both touch count once."""
        same: dict[tuple[Any, ...], Moved] = {}
        for t in launch.arguments.values():
            key, now = (t.tensor.data_ptr(), t.tensor.nbytes), self._of(t, launch.kernel)
            before = same.get(key, Moved())
            once = {"read": max(before.read, now.read), "written": max(before.written, now.written)}
            same[key] = replace(before + now, **once)
        met = max((meeting(t) for t in launch.arguments.values()), default=0)
        return replace(sum(same.values(), Moved()), met=met * self.scale)

    def _of(self, t: Traffic, kernel: str) -> Moved:
        """Each byte once, as often as the tensor is larger in the call; and what programs ask for again, as often as
        they are more: a program that has more to do need not ask more of it again."""
        scale, more = self._scale(t), min(self.scale, self.grown.get(kernel, self.scale))
        read, written = scale * t.distinct_read, scale * t.distinct_written
        asked = read + written + more * max(0, t.moved - t.distinct_read - t.distinct_written)
        is_near = t.distinct_read <= NEAR and not t.distinct_written and _address(t) in self.fixed
        near = asked - read if is_near else 0.0
        return Moved(read, written, asked, asked * SECTOR * t.sectors / t.moved if t.moved else 0.0, near)

    def _scale(self, t: Traffic) -> float:
        """Scratch memory grows with the programs that write it, which each leave as much; all else with the call."""
        if _address(t) in self.fixed:
            return 1.0
        if self.found.role(t) != "scratch":
            return self.scale
        all_used = ((launch.kernel, one) for launch in self.found.launches for one in launch.arguments.values())
        writers = (kernel for kernel, one in all_used if one.distinct_written and _address(one) == _address(t))
        return self.grown.get(next(writers, ""), self.scale)

    @property
    def moved(self) -> Moved:
        return sum(map(self.of, self.found.launches), Moved())

    @property
    def least(self) -> float:
        """Of inputs and outputs each byte once; scratch memory need not be."""
        if self.found.cost:
            return self.found.cost.bytes * self.scale
        of_view: dict[tuple[int, str], dict[tuple[int, int], int]] = {}  # launches may take parts of one storage
        sizes = {}
        for t in self.found.traffic:
            if self.found.role(t) != "scratch":
                at, view = _address(t), (t.tensor.data_ptr(), t.tensor.nbytes)
                sizes[at] = t.tensor.untyped_storage().nbytes()
                for way, count in (("read", t.distinct_read), ("written", t.distinct_written)):
                    known = of_view.setdefault((at, way), {})
                    known[view] = max(known.get(view, 0), count)
        return sum(min(sum(views.values()), sizes[at]) for (at, _), views in of_view.items()) * self.scale


@dataclass(frozen=True)
class Evidence:
    title: str
    gpu: GPU
    launches: Sequence[Inspection]
    ceilings: Ceilings
    cost: Cost | None = None
    audited: Audited | None = None
    unaudited: str = ""  # why there is no audit
    timing: Mapping[str, Any] | None = None
    untimed: str = ""
    counted: Counters | None = None  # by the hardware
    besides: Besides = field(default_factory=Besides)
    drawn: bool = False  # integers among its inputs, which may be addresses

    @property
    def least(self) -> float | None:
        """The fewest bytes of the call: as calculated, or those that it touches."""
        if self.cost:
            return self.cost.bytes
        return self.audited.least if self.audited else None

    @property
    def rest(self) -> str:
        """What the call does besides its launches, in words; empty if nothing is known to be left out."""
        if self.besides.others:
            return f"{BESIDES}: torch's {', '.join(dict.fromkeys(self.besides.others))}"
        return "" if all(one.launch is None or one.launch.is_all for one in self.launches) else BESIDES

    @property
    def obstacle(self) -> str | None:
        """Why it cannot be launched."""
        return next((f"{one.name}: {one.obstacle}" for one in self.launches if one.obstacle), None)

    @property
    def measured_us(self) -> float | None:
        return self.timing["median_us"] if self.timing else None

    def moved(self, asked: Inspection) -> Moved | None:
        """Bytes of a launch: as audited, or the least where it is the only one."""
        if self.audited:
            same = [one for one in self.audited.found.launches if one.kernel == asked.name]
            share = _programs(asked) / sum(_programs(one) for one in self.launches if one.name == asked.name)
            return sum(map(self.audited.of, same), Moved()).times(share)
        if self.cost and len(self.launches) == 1:
            return Moved(self.cost.read, self.cost.written, self.cost.bytes, self.cost.bytes)
        return None


def meeting(t: Traffic) -> float:
    """Atomics on each address, one after the other. Those of a warp on one address are made one."""
    if not t.warps:
        return 0.0
    size = t.tensor.element_size()
    addresses = max(1.0, t.distinct_written / size)
    lanes = t.atomic / size / t.warps
    apart = addresses * (1 - (1 - 1 / addresses) ** lanes)  # that the lanes of a warp are on, if they are on any
    return t.warps * apart / addresses


def _address(t: Traffic) -> int:
    return t.tensor.untyped_storage().data_ptr()


def _programs(one: Inspection) -> int:
    return one.launch.programs * one.launch.times if one.launch else 1


def of_op(op: Op, kernel: Kernel, case: Case, gpu: GPU, records: Records, direction: str = "forward") -> Evidence:
    """Of a kernel of an Op on a case. Raises CompilerRefused, or NothingLaunched where the kernel does not take it."""
    seen = Besides()
    found = list(inspect_kernel(op, replace(kernel, fn=watched(kernel.fn, seen)), case, gpu, (direction,)))
    launches = _compiled(found, f"{op.name}, {kernel.name}, {case}")
    args = op.make(case, device="meta")
    cost = (op.cost if direction == "forward" else op.backward_cost or op.cost)(*args)
    point = {"case": dict(case.point), "dtype": case.dtype, "direction": direction}
    call = {"op": op.name, "kernel": kernel.name, **point}
    timing, untimed = _timing(records, call, gpu)
    again = f"-k {kernel.name} -c {case}"
    audited, unaudited = _audited_op(op, kernel, case, cost, direction, launches, bool(seen.products))
    return Evidence(
        title=launches[0].title + ("" if direction == "forward" else f", {direction}"),
        gpu=gpu,
        launches=launches,
        ceilings=ceilings(gpu, records),
        cost=cost,
        audited=audited,
        unaudited=unaudited,
        timing=timing,
        untimed=f"{untimed}: run tilewright bench {op.name} {again} --record FILE on the GPU",
        counted=_counted(records, call, gpu),
        besides=seen,
    )


def of_function(
    load: Callable[[], Callable[..., Any]], given: Sequence[str], title: str, gpu: GPU, records: Records
) -> Evidence:
    """Of a user's function, with inputs as the command line writes them."""
    seen = Besides()

    def run() -> Audited:
        args = [make(text, zeros=True) for text in given]
        function = watched(load(), Besides())
        return Audited(audit(lambda *a: forward(function, a, ())[1], *args, elements=MOST, lanes=LANES))

    called = of_call(lambda: (watched(load(), seen, operators=True), [make(text, "meta") for text in given]), gpu)
    launches = _compiled([inspect_launch(one, title) for one in called], title)
    audited, unaudited = _audited(launches, run)
    return Evidence(
        title=title,
        gpu=gpu,
        launches=launches,
        ceilings=ceilings(gpu, records),
        audited=audited,
        unaudited=unaudited,
        untimed="a file's function has no records",
        besides=seen,
        drawn=any(isinstance(a, Tensor) and not _is_float(a) for a in (make(text, "meta") for text in given)),
    )


def of_cuda_file(path: Path, gpu: GPU, threads: int, shared: int, records: Records) -> list[Evidence]:
    """Of every kernel of a `.cu` file, which says nothing of launches and data."""
    launches = _compiled(list(inspect_cuda_file(path, gpu, threads, shared)), path.name)
    why = "only Triton kernels are interpreted"
    return [
        Evidence(f"{path.name}, {one.name}", gpu, [one], ceilings(gpu, records), unaudited=why, untimed="a .cu file")
        for one in launches
    ]


def _compiled(found: Iterable[Inspection | Refused], title: str) -> list[Inspection]:
    launches = []
    for one in found:
        if isinstance(one, Refused):
            raise one.error
        launches.append(one)
    if not launches:
        raise NothingLaunched(title)
    return launches


def _audited(launches: Sequence[Inspection], run: Callable[[], Audited]) -> tuple[Audited | None, str]:
    for one in launches:
        code = one.launch and one.launch.code
        if not isinstance(code, TritonCode) or code.function.is_gluon():
            return None, "only Triton kernels are interpreted"
        if not _programs(one):
            return None, f"the grid of {one.name} is empty, so that nothing is launched"
    try:
        done = run()
    except CompilerRefused:
        raise
    except (Exception, SystemExit) as error:  # a file's own, too: it is told, and the rest goes on
        return None, f"the audit came to no end ({first_line(error)})"
    for fault in done.found.findings:
        if fault.kind == OUT_OF_BOUNDS:
            return None, f"{fault}; tilewright audit tells more"
    names, ran = {one.name for one in launches}, {one.kernel for one in done.found.launches}
    if names != ran:
        others = f"other kernels ({', '.join(sorted(ran))})" if ran else "torch's own operators"
        return None, f"{done.case or 'the call'}, which was interpreted, takes {others}"
    asked = {name: sum(_programs(one) for one in launches if one.name == name) for name in names}
    there = {name: sum(one.programs for one in done.found.launches if one.kernel == name) for name in names}
    return replace(done, grown={name: asked[name] / there[name] for name in names}), ""


def _audited_op(
    op: Op,
    kernel: Kernel,
    case: Case,
    cost: Cost,
    direction: str,
    launches: Sequence[Inspection],
    has_librarys: bool,
) -> tuple[Audited | None, str]:
    """On the case itself, if its launches make products and no library does, else on a smaller one."""
    if kernel.builds_per_case:
        return None, "what torch.compile writes is not interpreted"
    if direction == "forward" and not has_librarys and any(unit.startswith("tensor") for unit in cost.flops):
        return _audited(launches, partial(_on_itself, op, kernel, case, cost))
    audited, unaudited = _audited(launches, partial(_on_smaller, op, kernel, case, cost, direction))
    # A small call may go to torch where the one in question does not: then by the kernel that this one takes.
    others = [k for k in op.kernels.values() if kernel is op.shipped and k.language == "triton"]
    while others and not audited:
        audited, _ = _audited(launches, partial(_on_smaller, op, others.pop(), case, cost, direction))
    return audited, "" if audited else unaudited


def _on_itself(op: Op, kernel: Kernel, case: Case, cost: Cost) -> Audited:
    """By some of its programs. Of a product, how often bytes are read again depends on all sizes."""
    args = [torch.zeros_like(a, device="cpu") if isinstance(a, Tensor) else a for a in op.make(case, device="meta")]
    found = audit(lambda *a: forward(kernel.fn, a, ())[1], *args, cost=cost, elements=MOST, lanes=LANES)
    return Audited(found)


def _on_smaller(op: Op, kernel: Kernel, case: Case, cost: Cost, direction: str) -> Audited:
    small = _smaller(op, case)
    args = op.make(small)
    least = (op.cost if direction == "forward" else op.backward_cost or op.cost)(*args)
    if direction == "forward":
        found = audit(lambda *given: forward(kernel.fn, given, ())[1], *args, cost=least)
    else:
        found = _backward(op, kernel, args, least)
    pairs = enumerate(zip(args, op.make(case, device="meta"), strict=True))
    same = {n: one for n, (one, there) in pairs if isinstance(one, Tensor) and one.shape == there.shape}
    fixed = frozenset(one.untyped_storage().data_ptr() for one in same.values())
    stays = sum(one.nbytes for one in same.values())
    if direction == "backward":
        stays += sum(one.nbytes for n, one in same.items() if _needs_gradient(op, n, one))
    scale = (cost.bytes - stays) / (least.bytes - stays) if least.bytes > stays else cost.bytes / least.bytes
    return Audited(found, scale, "" if small == case else str(small), fixed=fixed)


def _backward(op: Op, kernel: Kernel, args: Sequence[Any], least: Cost) -> Audit:
    needs = [n for n, a in enumerate(args) if _needs_gradient(op, n, a)]
    with interpret():
        leaves, outputs = forward(kernel.fn, args, needs)
    results = flat(outputs)
    grads = [torch.ones_like(o) for o in results if _is_float(o)]
    return audit(lambda *_: backward(results, [leaves[n] for n in needs], grads), *leaves, cost=least)


def _needs_gradient(op: Op, number: int, value: Any) -> bool:
    return _is_float(value) and number not in op.constants


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _smaller(op: Op, case: Case) -> Case:
    """Fewer rows of the same length, where that is enough: longer rows may take another kernel."""
    elements = case_elements(op, case)
    if op.batch and elements > QUICK:
        length = max(1, math.floor(int(case[op.batch]) * QUICK / elements))
        case = case.with_size(op.batch, length)
    return shrunk(op, case, 4 * QUICK)


def _timing(records: Records, wanted: Mapping[str, Any], gpu: GPU) -> tuple[Mapping[str, Any] | None, str]:
    """The newest fresh one, or why there is none."""
    same = [r for r in records if r["kind"] == "timing" and all(r.get(k) == v for k, v in wanted.items())]
    same = sorted((r for r in same if r["device"]["gpu"] == gpu.name and r["median_us"]), key=lambda r: r["date"])
    if not same:
        return None, f"no record on {gpu.name}"
    if record.is_stale(dict(same[-1])):
        return None, f"the code has changed since the record of {same[-1]['date'][:10]}"
    return same[-1], ""


def _counted(records: Records, call: Mapping[str, Any], gpu: GPU) -> Counters | None:
    """What `tilewright profile` recorded, or else the bytes that `tilewright audit --measure` did."""

    def newest(kind: str, key: str, wanted: Mapping[str, Any]) -> Mapping[str, Any] | None:
        same = [r for r in records if r["kind"] == kind and r.get("call") == wanted and r.get(key)]
        fresh = [r for r in same if r["device"]["gpu"] == gpu.name and not record.is_stale(dict(r))]
        return max(fresh, key=lambda r: r["date"], default=None)

    if found := newest("counters", "counters", call):
        return Counters.of_record(found)
    forward_call = {name: value for name, value in call.items() if name != "direction"}
    found = newest("audit", "counted", forward_call) if call["direction"] == "forward" else None
    return Counters(dram_read=found["counted"]["read"], dram_written=found["counted"]["written"]) if found else None
