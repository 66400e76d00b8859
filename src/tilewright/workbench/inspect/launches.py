"""What a call would launch on a GPU, found without one: which kernel, specialised on what, over which grid."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import make_backend
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction, create_function_from_signature

from tilewright.errors import LauncherFailed, TilewrightError, UnknownSetting, WrongInputs, first_line
from tilewright.hardware import GPU
from tilewright.runtime.cuda import Prepared, Source, _spelled
from tilewright.spec import Case, Kernel, Op
from tilewright.workbench.inspect.code import CudaCode, TritonCode
from tilewright.workbench.inspect.compiling import compiled
from tilewright.workbench.inspect.fake_gpu import standing_in, target
from tilewright.workbench.inspect.occupancy import occupancy
from tilewright.workbench.inspect.resources import resources
from tilewright.worker.execute import backward, flat, forward

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """A kernel over a grid of blocks."""

    name: str
    code: TritonCode | CudaCode
    grid: Grid
    gpu: GPU
    direction: str = "forward"
    note: str = ""  # what a reader should know about how it was found
    is_all: bool = True  # of what the call does on the GPU, nothing is left out
    times: int = field(default=1, compare=False)  # it is launched in one call
    arguments: tuple[int | None, ...] = field(default=(), compare=False)  # whole numbers, by the kernel's parameters

    @property
    def programs(self) -> int:
        """A grid counts programs: blocks, or clusters of them."""
        return math.prod(self.grid)

    @property
    def blocks(self) -> int:
        return self.programs * self.code.cluster


def of_kernel(
    op: Op,
    kernel: Kernel,
    case: Case,
    gpu: GPU,
    directions: Sequence[str] = ("forward",),
    reads: int | None = None,
    computed: list[str] | None = None,
) -> list[Launch]:
    """The launches of one call of a kernel, in order. None where the kernel does not take the case. If it reads values
    of tensors, they are `reads`, or the launches end there. Torch functions that it calls to compute something are
    appended to `computed`."""
    if kernel.name == "compile":
        return _generated(op, case, gpu) if "forward" in directions else []
    with standing_in(gpu, reads, computed), _recording(gpu) as found:
        args = op.make(case, device="meta")
        if not kernel.fits(*args):
            return []
        floats = [n for n, a in enumerate(args) if _is_float(a) and n not in op.constants]
        needs = floats if "backward" in directions and kernel.differentiable else []
        split = None
        with _failures(kernel.name, found):
            leaves, outputs = forward(kernel.fn, args, needs)
            split = len(found)
            if needs:
                results = flat(outputs)
                backward(results, [leaves[n] for n in needs], [torch.empty_like(o) for o in results if _is_float(o)])
    behind = [] if split is None else [replace(launch, direction="backward") for launch in found[split:]]
    known = _counted([*(found[:split] if "forward" in directions else []), *behind])
    return [*map(_instead_of_cuda, known)] if kernel.language == "cuda" and gpu.is_amd else known


def _instead_of_cuda(launch: Launch) -> Launch:
    if isinstance(launch.code, CudaCode):
        return launch
    note = f"CUDA C++ does not run on {launch.gpu.name}; this is what a call launches there instead"
    return replace(launch, note=f"{note}; {launch.note}" if launch.note else note)


def _generated(op: Op, case: Case, gpu: GPU) -> list[Launch]:
    """What torch.compile would write for the reference, forward."""
    from tilewright.workbench.inspect.inductor import generated  # here, since it takes seconds

    found: list[Launch] = []
    with _failures("torch.compile", found):
        for one in generated(op.reference, op.make(case, device="meta"), gpu):
            search = f"the first of {one.choices} configurations that torch.compile would time"
            note = search if one.choices > 1 else ""
            found.append(Launch(one.name, one.code, _whole(one.grid), gpu, note=note, is_all=one.is_all))
    return _counted(found)


def of_call(load: Callable[[], tuple[Callable[..., Any], Sequence[Any]]], gpu: GPU) -> list[Launch]:
    """The launches of one call. `load` gives a function and its arguments; it is asked where the GPU seems to be, as
    a file may look at it when it is read."""
    with standing_in(gpu), _recording(gpu) as found:
        fn, args = load()
        _require_inputs(fn, args)
        with _failures(getattr(fn, "__name__", str(fn)), found):
            fn(*args)
    return _counted(found)


def _require_inputs(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    taken = inspect.signature(fn)
    try:
        taken.bind(*args)
    except TypeError as error:
        raise WrongInputs(fn.__name__, str(error), str(taken)) from None


def with_config(launch: Launch, changes: Mapping[str, Any]) -> Launch:
    """The launch with other constexpr arguments or compiler's options; its grid stays."""
    code = launch.code
    known = {*code.signature, *code.options} if isinstance(code, TritonCode) else set()
    for name in changes.keys() - known:
        raise UnknownSetting(launch.name, name, code.config)
    assert isinstance(code, TritonCode)
    names = [*code.signature]
    constants = code.constants | {(names.index(name),): changes[name] for name in changes if name in names}
    options = code.options | {name: changes[name] for name in changes if name in code.options}
    return replace(launch, code=replace(code, constants=constants, options=options))


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _counted(found: list[Launch]) -> list[Launch]:
    """Each launch once, in order of its first time."""
    times: dict[int, int] = {}
    for launch in found:
        first = next(n for n, one in enumerate(found) if one == launch)
        times[first] = times.get(first, 0) + 1
    return [replace(found[n], times=count) for n, count in times.items()]


@contextmanager
def _failures(name: str, found: list[Launch]) -> Iterator[None]:
    """A call that fails after launches, as one does that reads a result to go on, is known up to there."""
    try:
        yield
    except TilewrightError:
        raise
    except (Exception, SystemExit) as error:
        if not found:
            raise LauncherFailed(name, _said(error)) from error
        note = f"the last launch that is known: then {_said(error)}, so what comes after is not known here"
        found[-1] = replace(found[-1], note=note, is_all=False)


def _said(error: BaseException) -> str:
    """In plain words, where it is that our stand-ins have no values."""
    is_of_values = re.search(r"\bmeta (tensor|device)|register_meta|with Meta tensors", str(error))
    return "the call looks at its data on the host" if is_of_values else first_line(error)


@contextmanager
def _recording(gpu: GPU) -> Iterator[list[Launch]]:
    """Launches are written down instead of done."""
    found: list[Launch] = []
    aim, backend = target(gpu), make_backend(target(gpu))
    note = ""  # of the launch that a search is about to make

    def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        # As JITFunction.run does it before it compiles.
        options["debug"] = options.get("debug", function.debug) or knobs.runtime.debug
        options["instrumentation_mode"] = knobs.compilation.instrumentation_mode
        for hook in function.pre_run_hooks:
            hook(*args, **options)
        bind = create_function_from_signature(function.signature, function.params, backend)
        bound, specialization, given = bind(*args, **options)
        parsed, signature, constants, attributes = function._pack_args(backend, options, bound, specialization, given)
        if not warmup:
            code = TritonCode(function, signature, constants, attributes, vars(parsed), aim)
            sizes = grid(bound) if callable(grid) else grid
            passed = _numbers(bound[name] for name, kind in signature.items() if kind != "constexpr")
            found.append(Launch(function.fn.__name__, code, _whole(sizes), gpu, note=note, arguments=passed))

    def run_first(tuner: Any, *args: Any, **options: Any) -> None:
        nonlocal note
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        config = tuner.prune_configs(options)[0]
        chosen = config.all_kwargs()
        if config.pre_hook:
            config.pre_hook({**tuner.nargs, **options, **chosen})
        if len(tuner.configs) > 1:
            note = f"the first of {len(tuner.configs)} configurations: autotuning needs the GPU"
        tuner.fn.run(*args, **options, **chosen)
        tuner.nargs, note = None, ""

    def launch_cuda(prepared: Prepared, *tensors: Tensor | None) -> None:
        instance = _spelled(prepared.kernel, prepared.dtype)
        code = CudaCode(prepared.source, instance, gpu.arch, prepared.block, prepared.shared, prepared.cluster)
        passed = (*(0 if t is None else None for t in tensors), *_numbers(prepared.numbers))
        found.append(Launch(instance, code, _whole(prepared.grid), gpu, arguments=passed))

    def resident(
        source: Any, kernel: str, dtype: Any, device: int, block: int, *, shared: int = 0, cluster: int = 1
    ) -> int:
        # The most there can be: how clusters fall into the GPU's parts only the driver knows.
        made = compiled(CudaCode(source, _spelled(kernel, dtype), gpu.arch, block, shared, cluster))
        return gpu.sms * occupancy(gpu, resources(made), block).blocks // cluster

    with ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", run))
        stack.enter_context(patch.object(Autotuner, "run", run_first))
        stack.enter_context(patch.object(Prepared, "__call__", launch_cuda))
        stack.enter_context(patch.object(Source, "resident", resident, create=True))
        # With a listener our launchers take Triton's own way, which is the one that is written down.
        knobs.runtime.launch_enter_hook.add(_listener)
        stack.callback(knobs.runtime.launch_enter_hook.remove, _listener)
        yield found


def _listener(metadata: Any) -> None: ...


def _numbers(args: Iterable[Any]) -> tuple[int | None, ...]:
    return tuple(arg if type(arg) is int else None for arg in args)


def _whole(grid: Any) -> Grid:
    sizes = (grid,) if isinstance(grid, int) else tuple(grid)
    x, y, z = (*map(int, sizes), 1, 1)[:3]
    return x, y, z
