"""The command `tilewright ops`."""

from __future__ import annotations

import inspect
import json
import shlex
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright import source
from tilewright.cli.crossovers import crossovers, print_crossovers
from tilewright.cli.options import AsJson, CallOptions
from tilewright.cli.selection import load_target
from tilewright.cli.shared import console, say_next, table

if TYPE_CHECKING:
    from tilewright.spec import Op


def ops(
    name: Annotated[
        str | None,
        typer.Argument(metavar="OP|FILE", help="Show the arguments of this operation.", show_default="list all"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the operations and their kernels, or show the arguments of one and where torch is called instead."""
    if name is not None:
        _show(name, as_json)
        return
    entries = [(name, source.read(path)) for name, path in source.op_files().items()]
    if as_json:
        for name, entry in entries:
            print(json.dumps({"op": name, "summary": entry.summary, "kernels": entry.kernels}))
        return
    shown = table("op", "computes", "kernels")
    for name, entry in entries:
        shown.add_row(name, entry.summary, ", ".join(entry.kernels))
    console().print(shown)
    say_next("tilewright ops OP   or   tilewright check OP   or   tilewright bench OP")


def _show(target: str, as_json: bool) -> None:
    from tilewright import registry
    from tilewright.workbench.check.cases import output_shapes

    op = load_target(target, CallOptions())
    case = op.check[-1].with_dtype(op.dtypes[0])
    args = op.make(case, device="meta")
    names = _argument_names(op, len(args))
    given = dict(zip(names, map(_described, args), strict=True))
    for number in op.mutates(*args):
        given[names[number]] += ", may be written to"
    returned = [*map(_described, output_shapes(op, case))]
    if as_json:
        about = {"op": op.name, "case": str(case), "arguments": given, "returns": returned, "dtypes": op.dtypes}
        about |= {"cases": [*map(str, op.check)], "kernels": [*registry.named(op)]}
        print(json.dumps(about | {"crossovers": [] if op.file else crossovers(op.name)}))
        return
    function = op.file.stem if op.file else op.name
    shown = table("argument", last=(f"for {case}",))
    for name, what in given.items():
        shown.add_row(name, what)
    shown.add_row("returns", ", ".join(returned))
    print(f"{function}({', '.join(names)}), in {', '.join(op.dtypes)}")
    print(f"Gradients: {'compared if the kernel has them' if op.backward_cost else 'none'}.\n")
    console().print(shown)
    print(f"\nReference:\n{_code(op)}")
    print(f"Cases, besides random ones: {_listed(op.check)}\nKernels: {', '.join(registry.named(op))}\n")
    if not op.file:
        print_crossovers(op.name)
    print(f"\nA kernel of your own, in my_{function}.py:\n")
    print(textwrap.indent(_skeleton(op, function, names, len(returned)), "    "))
    say_next(shlex.join(["tilewright", "check", target, f"my_{function}.py"]))


def _argument_names(op: Op, count: int) -> list[str]:
    return list(inspect.signature(op.reference).parameters)[:count]


def _described(value: Any) -> str:
    """Return the shape and dtype of a tensor in the syntax of --input, or another value as it is."""
    from torch import Tensor

    if not isinstance(value, Tensor):
        return f"{value!r} ({type(value).__name__})" if value is not None else "None"
    return f"{'x'.join(map(str, value.shape)) or 'scalar'}:{str(value.dtype).removeprefix('torch.')}"


def _code(op: Op) -> str:
    try:
        return textwrap.indent(textwrap.dedent(inspect.getsource(op.reference)), "    ")
    except (OSError, TypeError):  # a module, or defined where no source is
        return f"    {op.reference}\n"


def _listed(cases: Any, most: int = 6) -> str:
    shown = [*map(str, cases[:most])]
    return "; ".join([*shown, f"and {len(cases) - most} more"] if len(cases) > most else shown)


def _skeleton(op: Op, function: str, names: list[str], outputs: int) -> str:
    """Return a file that `check` takes: the signature, and a place for the kernel."""
    results = ", ".join(["y"] if outputs == 1 else [f"y{n}" for n in range(outputs)])
    return "\n".join(
        [
            "import tilewright",
            "",
            "",
            f'@tilewright.kernel("{function}")  # fits=lambda {", ".join(names)}: ... says which calls it takes',
            f"def my_{function}({', '.join(names)}):",
            "    ...  # launch your kernel; raise NotImplementedError for calls that it does not take",
            f"    return {results}",
        ]
    )
