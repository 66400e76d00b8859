"""A third-party problem as an Op: its inputs, cases and reference are used unchanged, with our seeds.

Its tolerance is not used, but its own check runs too, so that a report can say where the two verdicts differ.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilewright import source
from tilewright.errors import BadCase, BadProblem, FileNeedsPackage, ProblemTooLarge, TilewrightError, first_line
from tilewright.fake_cuda import redirect_cuda
from tilewright.spec import Case, Cost, Draw, Op
from tilewright.variants import PROBLEM_VALUES, vary
from tilewright.workbench.check.cases import CPU_ELEMENTS
from tilewright.workbench.check.problems import sizes
from tilewright.workbench.check.problems.values import in_float64
from tilewright.workbench.check.repeatable import unrepeatable_calls
from tilewright.worker import tf32
from tilewright.worker.execute import flatten, forward
from tilewright.worker.memory import bits, guard_allocations, same_bits
from tilewright.worker.results import flatten_results, result_names
from tilewright.worker.structure import NotSendable, flatten_inputs, unflatten_inputs

MAX_ELEMENTS = 2**34  # all inputs together: more fit into no GPU's memory
MAX_CPU_LOAD = 48  # see Work.cpu_load: a check of such a problem takes minutes
DRAWN_BYTES = 2**31  # for inputs that are drawn on a CPU to know their shapes
NEAR = 0.05  # relative difference of the reference in float64 and in its own dtype
WideContext = Callable[[], contextlib.AbstractContextManager[None]]
LARGE_CPU_LOAD, CPU_ONCE = 16, 2  # load and number of the cases that are called once
STOPPED_LOAD = 96  # at which a call on a CPU is stopped: its work is known to be too much
VALIDATED_LOAD = 4  # the reference runs on a CPU to see whether it accepts the sizes
EXACT_REFERENCE = "the problem's reference does not run in float64, and is taken to be exact"


class Changes(NamedTuple):
    """Effects of the reference on its arguments, which are given by number, and the names of its results."""

    written: list[int]
    effects: list[int]  # written, and not returned: their new contents are outputs, too
    buffers: list[int]  # whose contents no output depends on, with as many elements as an output
    names: list[str] | None


class Problem:
    """A problem as an Op of the leaves of its nested inputs, with a reference that runs in float64 if it can.

    The last argument of the Op holds the structure of the inputs and the case.
    """

    kind: str
    modules: Sequence[str] = ()  # whose classes the inputs may be of
    tf32 = tf32.Tf32()  # off, unless the problem turns it on: otherwise the error budget of fp32 would be TF32's

    def __init__(self, path: Path, cases: Sequence[Case]):
        self.path = path
        self.labels: list[str] = []
        self.is_selected = False
        self.once: list[Case] = []  # further cases, to be called once each
        self._shrunk: list[str] = []
        self._contexts: dict[str, tuple[WideContext, ...]] = {}  # in which the reference runs in float64, by case
        self._meta: dict[Case, tuple[Any, ...]] = {}
        self._runs_on_meta: bool | None = None
        self._drawn: Case | None = None  # a small case, if the inputs of some must be drawn to know their shapes
        self._changes: dict[str, Changes] = {}
        self.op = Op(
            path.stem,
            self._reference,
            cost=lambda *_: Cost(0, 0),
            inputs=self._leaves,
            check=cases,
            bench=[],
            is_varied=False,
            mutates=self._may_change,
        )
        floats = (leaf.dtype for leaf in self.op.make(cases[0], "meta") if _is_float(leaf))
        name = str(next(floats, torch.float32)).removeprefix("torch.")
        self.op.check, self.op.dtypes = [case.with_dtype(name) for case in cases], (name,)
        self.timed = self.op.check

    def select(self, texts: Sequence[str] = (), scale: Fraction | None = None, device: str = "cpu") -> None:
        """Check other cases than the problem's own: those given, or smaller ones.

        With `scale`, the inputs shrink to about this fraction. On a CPU, cases that it cannot check shrink until it
        can. Labels of the verdict say so.
        """
        self.is_selected = True
        if texts:
            self._use([self.parse(text) for text in texts])
            self.once = []
        elif scale or device == "cpu":
            found = [self._shrink(case, scale, device) for case in self.op.check]
            if shrunk := [(a, b) for a, b in zip(self.op.check, found, strict=True) if a != b]:
                cases = f"{len(shrunk)} of {len(found)} cases shrunk" if len(found) > 1 else "shrunk"
                why = f" to {scale}" if scale else " to fit a CPU"
                self._shrunk = [str(smaller) for _, smaller in shrunk]
                self.labels.append(f"{cases}{why}: {sizes.changes(*shrunk[-1])}")
            self._use(list(dict.fromkeys(found)))
            self.once = [] if scale else self._fitting(self.once) if device == "cpu" else self.once

    def is_shrunk(self, case: str) -> bool:
        """Return whether a checked case is smaller than the problem's own."""
        return any(case.startswith(smaller) for smaller in self._shrunk)

    def solution(self, device: str, case: Case | None = None) -> dict[str, Any]:
        """Return what the child process needs to load a solution, for the sizes of a case, or those that are checked.

        Refuse a reference that does not repeat itself at the sizes that are checked.
        """
        raise NotImplementedError

    def _common(self, device: str) -> dict[str, Any]:
        """Return the part of `solution` that does not depend on the kind of the problem."""
        *leaves, about = self.op.make(self.op.check[0], device)
        changes = self._changes_of(leaves, about)
        return {"tf32": list(self.tf32), "effects": changes.effects, "names": changes.names}

    def unpack(self, path: Path) -> tuple[Path, dict[str, Any]]:
        """Return the Python file of a solution, and what to add to `solution` for it."""
        source.require_python_file(path)
        return path, {}

    def own_check(self, args: Sequence[Any], outputs: list[Tensor]) -> str | None:
        """Return why the problem's own check rejects these outputs, or None if it accepts them."""
        raise NotImplementedError

    def baseline(self, case: Case, device: str) -> Callable[..., Any]:
        """Return the reference as it is, to be timed. It may write to its arguments; a model is constructed once."""
        reference = self._callable(case, device, wide=False)

        def call(*arguments: Any) -> Any:
            structure = json.loads(arguments[-1])["structure"]
            with redirect_cuda(device):
                return reference(unflatten_inputs(arguments[:-1], structure, self._resolve))

        return call

    def results(self, args: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return copies of the inputs, and the results of the reference on them, some of which may be these copies."""
        leaves = _copies(args[:-1])
        return leaves, self._call(leaves, args[-1])

    def destinations(self, args: Sequence[Any]) -> list[Tensor]:
        """Return the arguments that a solution may fill and return: the reference does not read their contents."""
        return [args[number] for number in self._changes_of(args[:-1], args[-1]).buffers]

    def close(self) -> None:
        """Delete temporary files."""

    def _use(self, cases: Sequence[Case]) -> None:
        self.op.check = cases

    def _data(self, case: Case, seed: int) -> Any:
        raise NotImplementedError

    def _callable(self, case: Case, device: str, wide: bool) -> Callable[[Any], Any]:
        """Return the reference as a function of the data, which it may write to; with float64 parameters if `wide`."""
        raise NotImplementedError

    def _parameter_elements(self, case: Case) -> int:
        return 0

    def _resolve(self, module: str, name: str) -> type:
        raise NotImplementedError

    def parse(self, text: str) -> Case:
        """Return a case from text like `size=128`; sizes that it lacks are those of one of the problem's own."""
        names = {part.partition("=")[0].strip() for part in text.split(",")}
        like = next((case for case in self.op.check if names <= dict(case.point).keys()), self.op.check[-1])
        case = Case.parse(text, like=like, partial=True).with_dtype(like.dtype)
        work = self._measure(case)
        if work is None:
            raise BadCase(text, f"{self.op.name} does not accept it", str(like))
        count = _elements(self.op.make(case, "meta"))
        if count > MAX_ELEMENTS:
            raise BadCase(text, f"it has {count} elements, more than the limit of {MAX_ELEMENTS}", str(like))
        return case

    def _shrink(self, case: Case, scale: Fraction | None, device: str) -> Case:
        whole = self._measure(case)
        if whole is None:
            return case  # the reference fails, which is reported when it runs
        load = (lambda work: work.share_of(whole) / float(scale)) if scale else (lambda work: work.cpu_load)
        smaller, work = sizes.shrink(case, self._measure, load) or (case, whole)
        if device == "cpu" and work.cpu_load > MAX_CPU_LOAD:
            fitting, least = sizes.shrink(case, self._measure, lambda work: work.cpu_load) or (case, whole)
            share = max(1, round(1 / least.share_of(whole)))
            fits = least.cpu_load <= MAX_CPU_LOAD and share > 1
            raise ProblemTooLarge(self.path, str(smaller), f"--scale 1/{share}" if fits and fitting != smaller else "")
        return smaller

    def _fitting(self, cases: Sequence[Case]) -> list[Case]:
        """Return the largest cases that a CPU can call once."""
        work = {case: self._measure(case) for case in cases}
        loads = {case: found.cpu_load for case, found in work.items() if found and found.cpu_load <= LARGE_CPU_LOAD}
        fitting = [case for case in loads if _elements(self.op.make(case, "meta")) <= CPU_ELEMENTS]
        return sorted(fitting, key=loads.__getitem__)[-CPU_ONCE:]

    def _measure(self, case: Case) -> sizes.Work | None:
        """Return the work of the reference at these sizes, or None if they do not fit together."""
        try:
            estimate = self._estimated_elements(case, self._drawn) if self._drawn and case not in self._meta else 0.0
            if estimate > LARGE_CPU_LOAD * sizes.CPU_ELEMENTS:
                return sizes.Work(round(estimate), 0, is_estimate=True)
            shapes = self.op.make(case, "meta")
        except TilewrightError:
            return None
        elements = _elements(shapes)
        work = None
        if self._runs_on_meta is not False:
            counter = sizes.WorkCounter()
            try:
                elements += self._parameter_elements(case)
                with counter:
                    forward(self._reference, shapes, [])
                work = sizes.Work(elements + counter.elements, counter.flops)
            except sizes.TooMuchWork:
                return sizes.Work(elements + counter.elements, counter.flops, is_estimate=True)
            except Exception:  # a reference may raise anything for sizes that do not fit together
                if self._runs_on_meta:
                    return None
                self._runs_on_meta = False  # it depends on the values
            else:
                self._runs_on_meta = True
                if work.cpu_load > 1:
                    return work
        if elements > VALIDATED_LOAD * sizes.CPU_ELEMENTS:
            return work or sizes.Work(elements, 0, is_estimate=True)
        counter = sizes.WorkCounter(STOPPED_LOAD)
        try:  # some sizes are rejected only where there are values
            with counter:
                *leaves, about = self.op.make(case, "cpu")
                forward(self._returned, [leaves, about], [])
        except sizes.TooMuchWork:
            return work or sizes.Work(counter.elements, counter.flops, is_estimate=True)
        except Exception:
            return None
        return work or sizes.Work(elements + counter.elements, counter.flops)

    def _estimated_elements(self, case: Case, known: Case) -> float:
        """Return about how many elements the inputs have, by those of a known case and of doubled sizes of it."""
        if known not in self._meta:
            return 0.0
        base = _elements(self._meta[known])
        estimate = float(base)
        for name, value in case.point:
            before = dict(known.point).get(name)
            if type(value) is int and type(before) is int and value > before > 0:
                try:
                    growth = _elements(self.op.make(known.with_size(name, 2 * before), "meta")) / max(1, base)
                except TilewrightError:
                    growth = 4.0  # as if the elements were the square of the size
                estimate *= (value / before) ** max(0.0, log2(max(growth, 1e-9)))
        return estimate

    def _leaves(self, draw: Draw) -> tuple[Any, ...]:
        if draw.device == "meta" and draw.case in self._meta:
            return self._meta[draw.case]
        try:
            try:
                data = self._draw_inputs(draw.case, draw.seed, draw.device)
            except (RuntimeError, NotImplementedError):  # shapes that depend on values need the values
                self._drawn = self._drawn or next(iter(self._meta), draw.case)
                if draw.device != "meta":
                    raise
                with _limited_memory(DRAWN_BYTES):
                    data = self._draw_inputs(draw.case, draw.seed, "cpu")
            leaves, structure = flatten_inputs(data, self.modules)
        except TilewrightError:
            raise
        except torch.cuda.OutOfMemoryError:
            raise
        except NotSendable as kind:
            raise BadProblem(self.path, f"its inputs hold a {kind}, which cannot be sent to another process") from None
        except Exception as error:
            raise BadProblem(self.path, f"its inputs cannot be created ({first_line(error)})") from error
        dtypes = [str(leaf.dtype).removeprefix("torch.") if isinstance(leaf, Tensor) else None for leaf in leaves]
        about = {"structure": structure, "dtypes": dtypes, "point": draw.case.point}
        moved = [leaf.to(draw.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if draw.values in PROBLEM_VALUES and draw.device != "meta":
            moved = vary(moved, draw.values, draw.device, draw.seed)
        found = (*moved, json.dumps(about))
        if draw.device == "meta":
            self._meta[draw.case] = found
        return found

    def _draw_inputs(self, case: Case, seed: int, device: str) -> Any:
        if device == "cuda":  # where a gigabyte takes milliseconds; a problem may insist on a CPU
            with contextlib.suppress(RuntimeError, TypeError, ValueError), torch.device(device):
                return self._drawn_with(case, seed, device)
        return self._drawn_with(case, seed, device)

    def _drawn_with(self, case: Case, seed: int, device: str) -> Any:
        # An output buffer from torch.empty must not hold what was computed before.
        with redirect_cuda(device), guard_allocations(), quiet():
            torch.manual_seed(seed)
            return self._data(case, seed)

    def _require_repeatable(self, prepare: Callable[[], Callable[[], Any]]) -> None:
        try:
            reason = unrepeatable_calls(prepare)
        except (TilewrightError, torch.cuda.OutOfMemoryError):
            raise
        except ModuleNotFoundError as missing:
            raise FileNeedsPackage(self.path, missing.name) from missing
        except Exception as error:
            raise BadProblem(self.path, f"its reference fails ({first_line(error)})") from error
        if reason:
            raise BadProblem(self.path, f"its reference {reason}, so that no kernel can be compared with it")

    def _reference(self, *arguments: Any) -> Any:
        leaves = arguments[:-1]
        dtypes = [name and getattr(torch, name) for name in json.loads(arguments[-1])["dtypes"]]
        if all(dtype is None or leaf.dtype == dtype for leaf, dtype in zip(leaves, dtypes, strict=True)):
            return self._call(_copies(leaves), arguments[-1])
        case = json.dumps(json.loads(arguments[-1])["point"])
        for context in self._contexts.get(case, (in_float64, contextlib.nullcontext)):
            try:
                found = _doubled(self._call(_copies(leaves), arguments[-1], context))
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception:  # a reference written for one dtype may raise anything
                continue
            if case in self._contexts or context is not in_float64 or self._is_near(found, arguments, dtypes):
                self._contexts[case] = (context,)
                return found
        self._contexts[case] = ()
        if EXACT_REFERENCE not in self.labels:
            self.labels.append(EXACT_REFERENCE)
        return _doubled(self._call(_narrowed(leaves, dtypes), arguments[-1]))

    def _is_near(self, found: Any, arguments: Sequence[Any], dtypes: Sequence[torch.dtype | None]) -> bool:
        """Return whether the reference computes the same in its own dtype: a cast may be part of the operation."""
        plain = _doubled(self._call(_narrowed(arguments[:-1], dtypes), arguments[-1]))
        for one, other in zip(flatten(found), flatten(plain), strict=True):
            if _is_float(other) and other.numel():
                both = one.isfinite() & other.isfinite()
                if float((one - other)[both].norm()) > NEAR * float(other[both].norm()):
                    return False
        return True

    def _call(self, leaves: Sequence[Any], about: str, wide: WideContext | None = None) -> Any:
        """Call the reference on these leaves, which it may write to; in float64 if a context for that is given.

        The outputs are its results, and the arguments that it writes to without returning them.
        """
        effects = [] if device_of(leaves) == "meta" else self._changes_of(leaves, about).effects
        returned = flatten_results(self._returned(leaves, about, wide))
        return [*flatten(returned), *(leaves[number] for number in effects)] if effects else returned

    def _returned(self, leaves: Sequence[Any], about: str, wide: WideContext | None = None) -> Any:
        content = json.loads(about)
        data = unflatten_inputs(leaves, content["structure"], self._resolve)
        device = device_of(leaves)
        reference = self._callable(Case(as_point(dict(content["point"]))), device, wide is not None)
        with redirect_cuda(device), tf32.allowed(self.tf32), wide() if wide else contextlib.nullcontext(), quiet():
            return reference(data)

    def _inputs(self, args: Sequence[Any]) -> Any:
        """Return a copy of the nested inputs."""
        return unflatten_inputs(_copies(args[:-1]), json.loads(args[-1])["structure"], self._resolve)

    def _results(self, args: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return those outputs that the reference returns."""
        effects = self._changes_of(args[:-1], args[-1]).effects
        return outputs[: len(outputs) - len(effects)]

    def _may_change(self, *arguments: Any) -> list[int]:
        """Return the arguments that a solution may write to."""
        changes = self._changes_of(arguments[:-1], arguments[-1])
        return sorted({*changes.written, *changes.buffers})

    def _changes_of(self, leaves: Sequence[Any], about: str) -> Changes:
        key = json.dumps(json.loads(about)["point"])
        if key not in self._changes:
            copies = _copies(leaves)
            returned = forward(self._returned, [copies, about], [])[1]
            results = flatten(flatten_results(returned))
            if strange := [type(result).__name__ for result in results if not isinstance(result, Tensor)]:
                raise BadProblem(self.path, f"its reference returns a {strange[0]}, which cannot be compared")
            contents = [bits(result) for result in results]
            pairs = enumerate(zip(leaves, copies, strict=True))
            written = [n for n, (a, b) in pairs if isinstance(a, Tensor) and not same_bits(a, b)]
            effects = [n for n in written if not any(torch.equal(bits(copies[n]), content) for content in contents)]
            if not results and not effects:
                raise BadProblem(self.path, "its reference returns nothing, and writes to none of its arguments")
            sizes_of_outputs = {result.numel() for result in results}
            buffers = [
                n
                for n, leaf in enumerate(leaves)
                if isinstance(leaf, Tensor) and leaf.numel() in sizes_of_outputs and self._is_unread(n, leaves, about)
            ]
            self._changes[key] = Changes(written, effects, buffers, result_names(returned))
        return self._changes[key]

    def _is_unread(self, number: int, leaves: Sequence[Any], about: str) -> bool:
        """Return whether the outputs stay the same, bit for bit, whatever this argument holds."""
        first: list[Tensor] = []
        for fill in (None, 0, 1, float("nan") if leaves[number].is_floating_point() else 2):
            copies = _copies(leaves)
            try:
                if fill is not None:
                    copies[number] = torch.full_like(copies[number], fill)
                found = [o.clone() for o in flatten(flatten_results(forward(self._returned, [copies, about], [])[1]))]
            except Exception:  # not a valid index, for example
                return False
            first = first or found
            if not all(same_bits(a, b) for a, b in zip(first, found, strict=True)):
                return False
        return True


def as_point(test: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the sizes of a test as those of a Case; the seed is ours."""
    return tuple((n, tuple(v) if isinstance(v, list) else v) for n, v in test.items() if n != "seed")


def quiet() -> contextlib.AbstractContextManager[Any]:
    """Send what a problem prints to stderr: it is no part of the verdict."""
    return contextlib.redirect_stdout(sys.stderr)


def device_of(values: Sequence[Any]) -> str:
    return next((value.device.type for value in values if isinstance(value, Tensor)), "cpu")


@contextlib.contextmanager
def _limited_memory(more: int) -> Iterator[None]:
    """Let this process allocate this many bytes more; beyond that torch raises an error. Only on Linux."""
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        used = 1024 * int(status["VmData"].split()[0])
    except (OSError, KeyError):
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [used + more, *(limit for limit in before if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _elements(arguments: Sequence[Any]) -> int:
    return sum(leaf.numel() for leaf in arguments if isinstance(leaf, Tensor))


def _copies(leaves: Sequence[Any]) -> list[Any]:
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _narrowed(leaves: Sequence[Any], dtypes: Sequence[torch.dtype | None]) -> list[Any]:
    return [leaf.to(dtype, copy=True) if dtype else leaf for leaf, dtype in zip(leaves, dtypes, strict=True)]


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _doubled(results: Any) -> Any:
    return pytree.tree_map(lambda o: o.double() if _is_float(o) else o, results)
