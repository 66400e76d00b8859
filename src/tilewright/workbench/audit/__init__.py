"""Run kernels in the interpreter, and report their faults and every byte they move."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilewright import hardware
from tilewright.cost import size
from tilewright.errors import KernelAborted, TilewrightError, TooLarge, first_line
from tilewright.fake_cuda import redirect_cuda
from tilewright.interpreter import STEPS, interpret
from tilewright.interpreter.results import SECTOR, Finding, Launch, Traffic, merged, tensors
from tilewright.spec import Case, Cost, Kernel, Op
from tilewright.workbench.audit.inputs import ELEMENTS
from tilewright.workbench.audit.page import render
from tilewright.workbench.audit.roles import Allocations, addresses, find_roles

SIGNIFICANT = 0.01  # share of all bytes moved; less is not mentioned
COLUMNS = ("launch", "argument", "loaded", "stored", "distinct", "reads/elem", "masked off", "overfetch*")
OVERFETCH = "* bytes of the 32-byte sectors touched over bytes used, if lanes run along the smallest stride"


@dataclass(repr=False)
class Audit:
    """The memory traffic and faults of a call, per launch."""

    title: str
    launches: list[Launch]
    findings: list[Finding]
    roles: dict[int, str]  # by storage address: output, in place, returned unchanged, scratch; the others are inputs
    cost: Cost | None = None  # minimum of the Op, if known
    sms: int = hardware.DATASHEETS["h200"].sms
    result: Any = None

    @property
    def moved(self) -> int:
        """Bytes requested by loads, stores and atomics."""
        return sum(t.moved for t in self.traffic)

    @property
    def distinct(self) -> int:
        """Distinct bytes read plus distinct bytes written, per launch: the DRAM traffic if caches catch all repeats."""
        return sum(t.distinct_read + t.distinct_written for t in self.traffic)

    @property
    def min_bytes(self) -> int:
        """The minimum bytes of the operation, or the distinct bytes if its cost is unknown."""
        return self.cost.bytes if self.cost else self.distinct

    @property
    def in_sectors(self) -> int:
        """Estimated bytes of the 32-byte sectors that warps access."""
        return SECTOR * sum(t.sectors for t in self.traffic)

    @property
    def scratch(self) -> int:
        """Bytes of tensors that the call allocated and did not return."""
        sizes = {
            t.tensor.untyped_storage().data_ptr(): t.tensor.nbytes for t in self.traffic if self.role(t) == "scratch"
        }
        return sum(sizes.values())

    @property
    def traffic(self) -> list[Traffic]:
        return [traffic for launch in self.launches for traffic in launch.arguments.values() if traffic.lanes]

    def role(self, traffic: Traffic) -> str:
        return self.roles.get(traffic.tensor.untyped_storage().data_ptr(), "input")

    def rows(self) -> list[tuple[str, ...]]:
        """Return the traffic table: one row per launch and argument, with a cell for each of COLUMNS."""
        rows = []
        for launch in self.launches:
            name = f"{launch.kernel} {'x'.join(map(str, launch.grid))}"
            for t in (t for t in launch.arguments.values() if t.lanes):
                loaded, stored = t.loaded + t.atomic, t.stored + t.atomic
                distinct = [size(count) for count in (t.distinct_read, t.distinct_written) if count]
                overfetch = f"{t.sectors * SECTOR / t.moved:.2f}x" if t.moved else ""
                reads = f"{t.reads_per_element:.2f}" if t.distinct_read else ""
                moved = [size(count) if count else "" for count in (loaded, stored)]
                argument, masked = f"{t.name} ({self.role(t)})", f"{t.masked / t.lanes:.0%}"
                rows.append((name, argument, *moved, " + ".join(distinct), reads, masked, overfetch))
                name = ""
        return rows

    def __repr__(self) -> str:
        table = [COLUMNS, *self.rows()]
        name, argument, *widths = (max(map(len, column)) for column in zip(*table, strict=True))
        layout = f"{{:{name}}}  {{:{argument}}}" + "".join(f"  {{:>{width}}}" for width in widths)
        lines = [layout.format(*row).rstrip() for row in table]
        return "\n".join([self.title, *lines, OVERFETCH, *self.summary(), *map(str, self.findings)])

    def summary(self) -> list[str]:
        """Return the main findings, one sentence each."""
        return list(dict.fromkeys(self._sentences()))

    def html(self) -> str:
        return render(self.title, self.launches, self.summary(), self.findings)

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "moved": self.moved,
            "distinct": self.distinct,
            "least": self.min_bytes,
            "in_sectors": self.in_sectors,
            "scratch": self.scratch,
            "summary": self.summary(),
            "findings": [{**vars(f), "text": str(f)} for f in self.findings],
            "launches": [self._launch_as_json(launch) for launch in self.launches],
        }

    def _launch_as_json(self, launch: Launch) -> dict[str, Any]:
        arguments = [
            {
                "name": t.name,
                "role": self.role(t),
                "shape": list(t.tensor.shape),
                "dtype": str(t.tensor.dtype).removeprefix("torch."),
                **{k: getattr(t, k) for k in ("loaded", "stored", "atomic", "distinct_read", "distinct_written")},
                **{k: getattr(t, k) for k in ("reads_per_element", "lanes", "masked")},
                "in_sectors": t.sectors * SECTOR,
            }
            for t in launch.arguments.values()
            if t.lanes
        ]
        return {"kernel": launch.kernel, "grid": list(launch.grid), "arguments": arguments}

    def _sentences(self) -> Iterator[str]:
        if not self.launches:
            yield "No Triton kernel was launched."
            return
        if self.moved and self.min_bytes:
            ratio = self.moved / self.min_bytes
            causes = list(dict.fromkeys(self._causes())) if ratio > 1.005 else []
            yield f"Moves {ratio:.2f}x the minimum bytes ({size(self.moved)}, minimum {size(self.min_bytes)})" + (
                f": {', '.join(causes)}." if causes else "."
            )
        output = sum(t.tensor.nbytes for t in self._first_of_each("output", "in place"))
        if output > 0.1 * self.min_bytes:
            yield f"Moves {self.moved / output:.2f} bytes per byte of output."
        scratch = [f"`{t.name}` ({size(t.tensor.nbytes)})" for t in self._first_of_each("scratch")]
        yield f"Scratch memory: {', '.join(scratch)}." if scratch else "No scratch memory."
        for t in (t for t in self.traffic if t.moved > SIGNIFICANT * self.moved):
            if t.sectors * SECTOR > 1.25 * t.moved:
                overfetch = f"{t.sectors * SECTOR / t.moved:.1f}x"
                yield f"`{t.name}`: not coalesced, warps move about {overfetch} the bytes they use."
            if t.masked > 0.25 * t.lanes:
                yield f"`{t.name}`: {t.masked / t.lanes:.0%} of the lanes are masked off."
        for launch in self.launches:
            yield self._waves(launch)

    def _causes(self) -> Iterator[str]:
        for t in (t for t in self.traffic if t.moved > SIGNIFICANT * self.moved):
            if t.reads_per_element > 1.005:
                yield f"`{t.name}` is read {_times(t.reads_per_element)}"
            if t.distinct_written and t.stored > 1.005 * t.distinct_written:
                yield f"`{t.name}` is written {_times(t.stored / t.distinct_written)}"
        if self.scratch > SIGNIFICANT * self.moved:
            yield "scratch memory is written and read"

    def _first_of_each(self, *roles: str) -> list[Traffic]:
        found = {t.tensor.untyped_storage().data_ptr(): t for t in reversed(self.traffic) if self.role(t) in roles}
        return list(found.values())[::-1]

    def _waves(self, launch: Launch) -> str:
        count = launch.programs
        text = f"{launch.kernel}: {count} program{'s' if count != 1 else ''} on {self.sms} SMs"
        if count <= self.sms:
            return f"{text}, {self.sms - count} idle." if count < self.sms else f"{text}, one each."
        last = count % self.sms or self.sms
        return f"{text}: {count / self.sms:.1f} waves at one program per SM, the last {last / self.sms:.0%} full."


def audit(
    fn: Callable[..., Any],
    *args: Any,
    cost: Cost | None = None,
    title: str | None = None,
    steps: int = STEPS,
    elements: int = ELEMENTS,
    lanes: int | None = None,
    gpu: str = "h200",
) -> Audit:
    """Call `fn(*args)` with every Triton launch interpreted, and return its memory traffic and faults.

    Faults are collected in `findings`; a kernel that cannot finish raises KernelAborted. `elements` limits the size of
    all tensors together, `steps` the operations per program. With `lanes`, only a sample of the programs runs of a
    launch that accesses more lanes, and its traffic is extrapolated.
    """
    given = list(tensors(args))
    count = sum(a.numel() for a in given)
    if count > elements:
        raise TooLarge(count, elements)
    checks = interpret(faults="collect", steps=steps, maps=lanes is None, lanes=lanes)
    with checks as run, redirect_cuda("cuda" if hardware.has_gpu() else "cpu"), Allocations() as made:
        result = fn(*args)
    found = [*merged(run.findings), *(run.unwritten(result) if lanes is None else ())]
    name = title or getattr(fn, "__name__", "audit")
    launches = [launch.extrapolated for launch in run.launches]
    roles = find_roles(launches, addresses(given), addresses(result), run.allocated | made.found)
    return Audit(name, launches, found, roles, cost, hardware.datasheet(gpu).sms, result)


def audit_kernel(op: Op, kernel: Kernel, case: Case, **limits: Any) -> Audit:
    """Audit a kernel of an Op on a case. A kernel that raises an exception raises KernelAborted, in one line."""
    elements = case_elements(op, case)
    if elements > ELEMENTS:
        raise TooLarge(elements, ELEMENTS, f"try --case {shrink_case(op, case)}")
    args = op.make(case)
    with abort_on_errors(kernel.name):
        return audit(kernel.fn, *args, cost=op.cost(*args), title=title_of(op, kernel, case), **limits)


def title_of(op: Op, kernel: Kernel, case: Case) -> str:
    return f"{op.name}, {kernel.name}, {case} {case.dtype}"


@contextlib.contextmanager
def abort_on_errors(name: str) -> Iterator[None]:
    """Turn an exception of the user's function into a one-line KernelAborted."""
    try:
        yield
    except TilewrightError:
        raise
    except (Exception, SystemExit) as error:
        raise KernelAborted(f"{name} fails: {first_line(error)}") from error


def default_case(op: Op, elements: int = 2**20) -> Case:
    """Return the largest case with at most `elements` that all Triton kernels of the Op support."""
    kernels = [kernel for kernel in op.kernels.values() if kernel.language == "triton"]

    def is_supported(case: Case) -> bool:
        args = op.make(case, device="meta")
        return case_elements(op, case) <= elements and all(kernel.fits(*args) for kernel in kernels)

    cases = [case.with_dtype(op.bench_dtype) for case in (*op.check, *op.bench)]
    fitting = [case for case in cases if is_supported(case)]
    return max(fitting or cases[:1], key=lambda case: case_elements(op, case))


def case_elements(op: Op, case: Case) -> int:
    return sum(a.numel() for a in op.make(case, device="meta") if isinstance(a, Tensor))


def shrink_case(op: Op, case: Case, elements: int = ELEMENTS) -> Case:
    """Return the case with its largest sizes halved until it has at most `elements`."""
    point: dict[str, Any] = dict(case.point)
    while case_elements(op, Case(tuple(point.items()), case.dtype)) > elements:
        sizes = {k: v for k, v in point.items() if isinstance(v, int) and not isinstance(v, bool)}
        largest = max(sizes, key=sizes.__getitem__)
        point[largest] //= 2
    return Case(tuple(point.items()), case.dtype)


def _times(count: float) -> str:
    whole = round(count)
    if abs(count - whole) < 0.005:
        return {1: "once", 2: "twice"}.get(whole, f"{whole} times")
    return f"{count:.2f} times"
