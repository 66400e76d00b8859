"""Record what a call would launch on a GPU, without one: kernels, their specialisation and their grids."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
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
from tilewright.runtime.cuda import CudaLaunch, CudaSource, cpp_name
from tilewright.spec import Case, Kernel, Op, bound_to
from tilewright.workbench.inspect.code import CudaCode, TritonCode
from tilewright.workbench.inspect.compiler import compile_kernel
from tilewright.workbench.inspect.fake_gpu import Reads, fake_gpu, target
from tilewright.workbench.inspect.occupancy import occupancy
from tilewright.workbench.inspect.resources import resources
from tilewright.worker.execute import backward, flatten, forward

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """A kernel launched over a grid."""

    name: str
    code: TritonCode | CudaCode
    grid: Grid
    gpu: GPU
    direction: str = "forward"
    note: str = ""  # a caveat about how the launch was found
    is_complete: bool = True  # the recorded launches are all that the call does on the GPU
    times: int = field(default=1, compare=False)  # launches per call
    arguments: tuple[int | None, ...] = field(default=(), compare=False)  # integer arguments by position

    @property
    def programs(self) -> int:
        """Programs of the grid; a program is a block or a cluster of blocks."""
        return math.prod(self.grid)

    @property
    def blocks(self) -> int:
        return self.programs * self.code.cluster


def kernel_launches(
    op: Op,
    kernel: Kernel,
    case: Case,
    gpu: GPU,
    directions: Sequence[str] = ("forward",),
    reads: int | None = None,
    computed: list[str] | None = None,
) -> list[Launch]:
    """Return the launches of one call of a kernel, in order; empty if the kernel does not support the case.

    Lists that the call reads from tensors hold `reads`; without it, and after other reads, the launches end. Torch
    functions that the call runs are put into `computed`.
    """
    if kernel.name == "compile":
        return _generated(op, case, gpu) if "forward" in directions else []
    with fake_gpu(gpu, None if reads is None else partial(_read_list, reads), computed), recording(gpu) as found:
        args = op.make(case, device="meta")
        if computed is not None:
            computed.clear()  # drawing the inputs is not part of the call
        if not kernel.fits(*args):
            return []
        floats = [n for n, a in enumerate(args) if _is_float(a) and n not in op.constants]
        needs = floats if "backward" in directions and kernel.differentiable else []
        split = None
        with _failures(kernel.name, found):
            leaves, outputs = forward(kernel.fn, args, needs)
            split = len(found)
            if needs:
                results = flatten(outputs)
                backward(results, [leaves[n] for n in needs], [torch.empty_like(o) for o in results if _is_float(o)])
    after = [] if split is None else [replace(launch, direction="backward") for launch in found[split:]]
    launches = _merged([*(found[:split] if "forward" in directions else []), *after])
    return [*map(_noted_fallback, launches)] if kernel.language == "cuda" and gpu.is_amd else launches


def _noted_fallback(launch: Launch) -> Launch:
    if isinstance(launch.code, CudaCode):
        return launch
    note = f"CUDA C++ does not run on {launch.gpu.name}; the call launches this kernel instead"
    return replace(launch, note=f"{note}; {launch.note}" if launch.note else note)


def _read_list(value: int, func: Any, args: tuple[Any, ...]) -> Any:
    """Return `value` for each element of a list that a launcher reads; other reads fail as on meta tensors.

    Our launchers read sizes by `tolist`. What follows another read may depend on the value in ways that no trace shows.
    """
    return func(torch.full(args[0].shape, value)) if func is Tensor.tolist else func(*args)


def _generated(op: Op, case: Case, gpu: GPU) -> list[Launch]:
    """Return the launches of the reference compiled by torch.compile, forward."""
    from tilewright.workbench.inspect.inductor import generated_kernels  # takes seconds

    found: list[Launch] = []
    with _failures("torch.compile", found):
        args = op.make(case, device="meta")
        for one in generated_kernels(bound_to(op.reference, args), args, gpu):
            note = f"the first of {one.configs} configurations that torch.compile would time" if one.configs > 1 else ""
            found.append(Launch(one.name, one.code, _grid(one.grid), gpu, note=note, is_complete=one.is_complete))
    return _merged(found)


def call_launches(
    load: Callable[[], tuple[Callable[..., Any], Sequence[Any]]], gpu: GPU, reads: Reads | None = None
) -> list[Launch]:
    """Return the launches of one call.

    `load` returns a function and its arguments. It runs on the fake GPU too, since a file may query the GPU on import.
    Values that the call reads from tensors come from `reads`; without it the launches end there.
    """
    with fake_gpu(gpu, reads), recording(gpu) as found:
        fn, args = load()
        _require_inputs(fn, args)
        with _failures(getattr(fn, "__name__", str(fn)), found):
            fn(*args)
    return _merged(found)


def _require_inputs(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    taken = inspect.signature(fn)
    try:
        taken.bind(*args)
    except TypeError as error:
        raise WrongInputs(fn.__name__, str(error), str(taken)) from None


def with_config(launch: Launch, changes: Mapping[str, Any]) -> Launch:
    """Return the launch with changed constexpr arguments or compiler options, on the same grid."""
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


def _merged(found: list[Launch]) -> list[Launch]:
    """Return each distinct launch once, with its count, in the order of first launches."""
    times: dict[int, int] = {}
    for launch in found:
        first = next(n for n, one in enumerate(found) if one == launch)
        times[first] = times.get(first, 0) + 1
    return [replace(found[n], times=count) for n, count in times.items()]


@contextmanager
def _failures(name: str, found: list[Launch]) -> Iterator[None]:
    """Keep the launches of a call that fails after them, for example because it reads a result."""
    try:
        yield
    except TilewrightError:
        raise
    except (Exception, SystemExit) as error:
        if not found:
            raise LauncherFailed(name, _reason(error)) from error
        note = f"the last launch that can be traced without a GPU: after it, {_reason(error)}"
        found[-1] = replace(found[-1], note=note, is_complete=False)


def _reason(error: BaseException) -> str:
    """Return the message of an error; one about missing values of meta tensors is rephrased."""
    needs_values = re.search(r"\bmeta (tensor|device)|register_meta|with Meta tensors", str(error))
    return "the call reads tensor values on the host" if needs_values else first_line(error)


@contextmanager
def recording(gpu: GPU) -> Iterator[list[Launch]]:
    """Record the launches on a fake GPU instead of performing them."""
    found: list[Launch] = []
    compile_target, backend = target(gpu), make_backend(target(gpu))
    note = ""  # for the next launch

    def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        # The steps of JITFunction.run before it compiles.
        options["debug"] = options.get("debug", function.debug) or knobs.runtime.debug
        options["instrumentation_mode"] = knobs.compilation.instrumentation_mode
        for hook in function.pre_run_hooks:
            hook(*args, **options)
        bind = create_function_from_signature(function.signature, function.params, backend)
        bound, specialization, given = bind(*args, **options)
        parsed, signature, constants, attributes = function._pack_args(backend, options, bound, specialization, given)
        if not warmup:
            code = TritonCode(function, signature, constants, attributes, vars(parsed), compile_target)
            sizes = grid(bound) if callable(grid) else grid
            passed = _integers(bound[name] for name, kind in signature.items() if kind != "constexpr")
            found.append(Launch(function.fn.__name__, code, _grid(sizes), gpu, note=note, arguments=passed))

    def run_first(tuner: Any, *args: Any, **options: Any) -> None:
        nonlocal note
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        config = tuner.prune_configs(options)[0]
        chosen = config.all_kwargs()
        if config.pre_hook:
            config.pre_hook({**tuner.nargs, **options, **chosen})
        if len(tuner.configs) > 1:
            note = f"the first of {len(tuner.configs)} autotuner configurations; choosing the best needs a GPU"
        tuner.fn.run(*args, **options, **chosen)
        tuner.nargs, note = None, ""

    def launch_cuda(prepared: CudaLaunch, *tensors: Tensor | None) -> None:
        instance = cpp_name(prepared.kernel, prepared.dtype)
        code = CudaCode(prepared.source, instance, gpu.arch, prepared.block, prepared.shared, prepared.cluster)
        passed = (*(0 if t is None else None for t in tensors), *_integers(prepared.numbers))
        found.append(Launch(instance, code, _grid(prepared.grid), gpu, arguments=passed))

    def resident(
        source: Any, kernel: str, dtype: Any, device: int, block: int, *, shared: int = 0, cluster: int = 1
    ) -> int:
        # An upper bound: only the driver knows how clusters map to GPCs.
        compiled = compile_kernel(CudaCode(source, cpp_name(kernel, dtype), gpu.arch, block, shared, cluster))
        return gpu.sms * occupancy(gpu, resources(compiled), block).blocks // cluster

    with ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", run))
        stack.enter_context(patch.object(Autotuner, "run", run_first))
        stack.enter_context(patch.object(CudaLaunch, "__call__", launch_cuda))
        stack.enter_context(patch.object(CudaSource, "resident", resident, create=True))
        # With a launch hook, our launchers call JITFunction.run, which is recorded.
        knobs.runtime.launch_enter_hook.add(_hook)
        stack.callback(knobs.runtime.launch_enter_hook.remove, _hook)
        yield found


def _hook(metadata: Any) -> None: ...


def _integers(args: Iterable[Any]) -> tuple[int | None, ...]:
    return tuple(arg if type(arg) is int else None for arg in args)


def _grid(grid: Any) -> Grid:
    sizes = (grid,) if isinstance(grid, int) else tuple(grid)
    x, y, z = (*map(int, sizes), 1, 1)[:3]
    return x, y, z
