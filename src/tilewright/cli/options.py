"""Arguments and options that several commands share."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

THREADS = 256  # per block, for a .cu file that is compiled and not launched

OpName = Annotated[str, typer.Argument(metavar="OP", help="Operation; `tilewright ops` lists them.")]
OpNames = Annotated[
    str | None,
    typer.Argument(
        metavar="OP|FILE",
        help="Operation, several separated by commas, a folder of them (norm/), or a .py file with your own.",
        show_default="all",
    ),
]
Files = Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="Python file with a kernel of your own.")]
Kernels = Annotated[
    list[str] | None, typer.Option("--kernel", "-k", metavar="NAME", help="Only this kernel. Repeatable.")
]
Cases = Annotated[
    list[str] | None, typer.Option("--case", "-c", metavar="CASE", help="Sizes, e.g. M=64,N=1000. Repeatable.")
]
Dtypes = Annotated[
    list[str] | None,
    typer.Option("--dtype", "-d", metavar="DTYPE", help="float32, float16 or bfloat16. Repeatable."),
]
FunctionName = Annotated[
    str | None,
    typer.Option("--function", "-f", metavar="NAME", help="Function of FILE to call, or kernel of a .cu file."),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        "-i",
        metavar="INPUT",
        help="Argument of the function: a tensor 64x1000:bf16 or 1000:fp32, or 0.5, None, (64,). Repeatable.",
    ),
]
ReferenceName = Annotated[
    str | None,
    typer.Option("--reference", metavar="NAME", help="Function of FILE that computes the same in plain PyTorch."),
]
Threads = Annotated[int, typer.Option(min=1, metavar="INTEGER", help="Threads per block of a .cu kernel.")]
SharedBytes = Annotated[
    int, typer.Option(min=0, metavar="INTEGER", help="Dynamic shared memory of a .cu kernel, in bytes per block.")
]
Direction = Annotated[str, typer.Option("--direction", metavar="DIRECTION", help="forward or backward.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON lines instead of a table.")]
RecordFile = Annotated[
    Path | None, typer.Option("--record", metavar="FILE", help="Append the results to this file as JSON lines.")
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Measure the ceilings again instead of reusing those of the last hour.")
]


@dataclasses.dataclass
class OpOptions:
    """The kernels and cases of an operation that a command works on."""

    files: Files = None
    kernel: Kernels = None
    case: Cases = None
    dtype: Dtypes = None


@dataclasses.dataclass
class CallOptions(OpOptions):
    """The same, or a function in a file and its arguments."""

    function: FunctionName = None
    reference: ReferenceName = None
    inputs: Inputs = None


@dataclasses.dataclass
class CompileOptions(CallOptions):
    """The same, or a CUDA C++ file and its launch."""

    threads: Threads = THREADS
    shared: SharedBytes = 0


class Command(TyperCommand):
    """A command whose help lists its arguments by name alone, without Python types."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                parameter.display_type_rich = lambda ctx: ""  # type: ignore[attr-defined]
        super().format_options(ctx, formatter)


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each dataclass parameter of a command by one parameter per field, in a signature that Typer can read."""
    declared = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: p.annotation for name, p in declared.items() if dataclasses.is_dataclass(p.annotation)
    }
    parameters = []
    for name, parameter in declared.items():
        if name not in groups:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        else:
            parameters += inspect.signature(groups[name], eval_str=True).parameters.values()
    signature = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters])

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
        command(**given)

    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    del run.__wrapped__
    return run
