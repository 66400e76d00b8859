"""The command `tilewright tune`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.cli.options import AsJson, Cases, Dtypes, Kernels, OpNames
from tilewright.cli.shared import console, load_op, op_names, parse_cases, parse_dtypes, progress, say_next, table, warn
from tilewright.errors import NoCrossover, NoGPU, NothingToTune
from tilewright.report.formatting import crossover_text, digits

if TYPE_CHECKING:
    from rich.table import Table

    from tilewright.spec import Op
    from tilewright.workbench.tune import Search
    from tilewright.workbench.tune.crossover import CrossoverSearch


def tune(
    op_name: OpNames = None,
    kernel: Kernels = None,
    case: Cases = None,
    dtype: Dtypes = None,
    samples: Annotated[int, typer.Option(min=6, metavar="INTEGER", help="Samples per configuration.")] = 15,
    save: Annotated[
        bool, typer.Option("--save", help="Save the best configurations in the package, for calls on this GPU model.")
    ] = False,
    crossover: Annotated[
        bool,
        typer.Option(
            "--crossover",
            help="Find the size above which our kernel beats torch, instead of configurations. Default: every OP.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Search for the fastest kernel configurations on this GPU. Each is checked before it is timed.

    Calls never search by themselves, and without --save nothing is saved.
    """
    from tilewright import hardware, registry

    if crossover:
        if kernel or case or dtype:
            raise typer.BadParameter("--crossover times the public function; leave out --kernel, --case and --dtype.")
        _find_crossovers([load_op(name) for name in op_names(op_name)], samples, save, as_json)
        return
    if op_name is None:
        raise typer.BadParameter("name an OP, or use --crossover, which takes every operation by default.")
    op = load_op(op_name)
    kernels = [one for one in registry.pick(op, kernel or []) if one.language in ("triton", "cuda")]
    dtypes = parse_dtypes(op, dtype) or op.bench_dtypes
    cases = [c.with_dtype(d) for d in dtypes for c in parse_cases(op, case) or op.bench]
    if not kernels:
        raise NothingToTune(op_name)
    if not hardware.has_gpu():
        raise NoGPU("tune")
    from tilewright.timer import Timer
    from tilewright.workbench import tune as tool

    gpu = hardware.current_gpu()["gpu"]
    found = []
    with progress(f"tuning {op_name}", None) as advance:
        for search in tool.tune(op, kernels, cases, clock=Timer(), samples=samples, on_step=advance):
            found.append(search)
            if as_json:
                print(json.dumps(tool.as_json(search, gpu)))
    if not found:
        raise NothingToTune(op_name)
    if save:
        tool.save(found, gpu)
    if not as_json:
        console().print(_table(found))
        better = sum(search.winner is not None for search in found)
        unsaved = f"{better} configurations beat the default; save them with --save"
        say_next(f"tilewright bench {op_name}" if save or not better else unsaved)


def _find_crossovers(ops: list[Op], samples: int, save: bool, as_json: bool) -> None:
    from tilewright import hardware
    from tilewright.runtime.crossovers import CROSSOVERS

    able = [op for op in ops if op.name in CROSSOVERS and op.shipped and op.sizes()]
    if not able:
        raise NoCrossover(ops[0].name)
    if not hardware.has_gpu():
        raise NoGPU("tune")
    from tilewright.timer import Timer
    from tilewright.workbench.tune.crossover import find_crossover

    gpu, clock, begin = hardware.current_gpu()["gpu"], Timer(), time.monotonic()
    every: list[CrossoverSearch] = []
    with progress("crossovers", None) as advance:
        for op in able:
            every.append(find_crossover(op, CROSSOVERS[op.name], clock=clock, samples=samples, on_step=advance))
            if save:
                every[-1].save(gpu)
            if as_json:
                print(json.dumps(every[-1].as_json(gpu)), flush=True)
    if as_json:
        return
    if len(every) == 1:
        console().print(_comparisons(every[0]))
    console().print(_sizes(every))
    for found in every:
        if found.reason:
            warn(f"{found.op}: stopped at {found.reason}")
    print(f"{len(every)} crossovers in {time.monotonic() - begin:.0f} s")
    names = "" if len(able) == len(op_names(None)) else f" {','.join(op.name for op in ops)}"
    say_next(f"tilewright ops {able[0].name}" if save else f"tilewright tune{names} --crossover --save")


def _sizes(every: list[CrossoverSearch]) -> Table:
    shown = table("operation", "our kernel in eager mode", "captured in a graph")
    for found in (one for one in every if one.comparisons):
        eager, captured = (crossover_text(size, found.unit) for size in (found.eager, found.captured))
        shown.add_row(found.op, eager, captured)
    return shown


def _comparisons(found: CrossoverSearch) -> Table:
    numbers = ("ours, device (us)", "torch, device (us)", "ours, host (us)", "torch, host (us)")
    shown = table(right=(found.unit, *numbers))
    for one in found.comparisons:
        times = one.ours.device_us, one.torch.device_us, one.ours.host_us, one.torch.host_us
        shown.add_row(f"{one.size}", *(digits(us) for us in times))
    return shown


def _table(found: list[Search]) -> Table:
    numbers = ("time (us)", "default (us)", "tried")
    shown = table("kernel", "case", "direction", "best configuration", right=numbers)
    for search in found:
        best = search.best
        words = ", ".join(f"{name}={value}" for name, value in best.config.items()) if best else "none is correct"
        shown.add_row(
            search.kernel,
            f"{search.case} {search.case.dtype}",
            search.direction,
            words if search.winner or not best else f"{words} (no faster than the default)",
            digits(best.us if best else None),
            digits(search.default_us),
            str(len(search.attempts)),
        )
    return shown
