"""The MCP server: tools for coding agents over stdio. Imports no torch; every call runs in a process of the pool."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from anyio.to_thread import run_sync
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, TextContent, ToolAnnotations
from pydantic import Field, ValidationError

from tilewright import __version__, source
from tilewright.agents.answers import (
    AuditAnswer,
    BenchAnswer,
    CheckAnswer,
    ExplainAnswer,
    InspectAnswer,
    ProblemList,
    ProblemSummary,
    ProblemText,
)
from tilewright.agents.pool import Pool
from tilewright.errors import TilewrightError, as_arguments

if TYPE_CHECKING:
    from tilewright.agents.arenas import Arena

INSTRUCTIONS = """\
Tilewright judges GPU kernels for PyTorch. Write a kernel for a problem, and let the tools say what is wrong with it:
list_problems and read_problem first; check until the verdict is `right`; then audit, inspect and explain to find the
bottleneck; bench for the time. A kernel is a Python file (Triton, CUDA C++ through Tilewright, or torch) that defines
the entry point of the problem. Give it as `code`, or as the path `file`. Nothing here needs a GPU except measured
times."""
OTHER_PROBLEMS = (
    "A path also names a problem: a KernelBench file with Model, get_inputs and get_init_inputs, or a gpu-mode folder "
    "with task.yml."
)

Problem = Annotated[str, Field(description="Operation such as `softmax`, or the path of a problem.")]
Op = Annotated[str, Field(description="Operation such as `softmax`.")]
Code = Annotated[str | None, Field(description="Source text of the kernel.")]
File = Annotated[str | None, Field(description="Path of a Python file with the kernel.")]
KernelName = Annotated[str | None, Field(description="One of our kernels, instead of code or file.")]
OneCase = Annotated[str | None, Field(description="Sizes such as M=64,N=1000. Default: a case of the operation.")]
Cases = Annotated[list[str] | None, Field(description="Sizes such as M=64,N=1000. Default: the problem's cases.")]
OneDtype = Annotated[str | None, Field(description="float32, float16 or bfloat16.")]
Dtypes = Annotated[list[str] | None, Field(description="float32, float16 or bfloat16. Default: all.")]
GPUName = Annotated[str, Field(description="GPU to compile or predict for, such as h200, a100-80gb or mi300x.")]
Direction = Annotated[Literal["forward", "backward"], Field(description="Pass to analyse.")]
READ_ONLY = ToolAnnotations(read_only_hint=True, open_world_hint=False)


class Server(MCPServer[Any]):
    """An MCP server whose errors are one line that says what to do."""

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        tool = next((one for one in await self.list_tools() if one.name == name), None)
        if tool and (unknown := arguments.keys() - tool.input_schema["properties"].keys()):
            known = ", ".join(tool.input_schema["properties"]) or "none"
            return failed(f"{name} has no argument named '{min(unknown)}'; its arguments are: {known}")
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            cause = error.__cause__
            if isinstance(cause, TilewrightError):
                return failed(as_arguments(cause))
            if isinstance(cause, ValidationError):
                first = cause.errors()[0]
                where = ".".join(map(str, first["loc"]))
                return failed(f"{name}: argument '{where}': {first['msg']}; see the schema of the tool")
            raise


def failed(message: str) -> CallToolResult:
    """Return an error as the answer of a tool."""
    return CallToolResult(content=[TextContent(type="text", text=message)], is_error=True)


def build(pool: Pool, arena: Arena | None = None) -> MCPServer[Any]:
    """Return the server with its tools, which run in the processes of the pool; with an arena, also its tools."""

    @contextlib.asynccontextmanager
    async def lifespan(_: MCPServer[Any]) -> AsyncIterator[None]:
        await pool.warm()
        try:
            yield
        finally:
            await pool.close()
            if arena is not None:
                arena.close()

    server = Server(
        "tilewright", instructions=INSTRUCTIONS, version=__version__, lifespan=lifespan, log_level="WARNING"
    )

    async def call(ctx: Context[Any, Any], tool: str, **arguments: Any) -> Any:
        async def on_progress(done: int, total: int | None, message: str) -> None:
            await ctx.report_progress(done, total, message)

        given = {name: value for name, value in arguments.items() if value is not None}
        return await pool.call(tool, given, on_progress)

    @server.tool(annotations=READ_ONLY)
    async def list_problems() -> ProblemList:
        """List the problems: operations that a kernel can be written for, and those that an arena takes."""
        entries = [(name, source.read(path)) for name, path in source.op_files().items()]
        listed = [ProblemSummary(name, entry.summary, entry.kernels) for name, entry in entries]
        return ProblemList(listed, OTHER_PROBLEMS, await run_sync(arena.problem_names) if arena else [])

    @server.tool(annotations=READ_ONLY)
    async def read_problem(ctx: Context[Any, Any], problem: Problem) -> ProblemText:
        """Return the reference, signature, inputs, cases and rules of a problem."""
        if arena and problem not in source.op_files() and not Path(problem).exists():
            return await run_sync(arena.problem_text, problem)
        return await call(ctx, "read_problem", problem=problem)

    @server.tool(annotations=READ_ONLY)
    async def check(
        ctx: Context[Any, Any],
        problem: Problem,
        code: Code = None,
        file: File = None,
        kernel: KernelName = None,
        case: Cases = None,
        dtype: Dtypes = None,
        depth: Annotated[
            Literal["quick", "default", "full"], Field(description="quick takes seconds, full minutes.")
        ] = "default",
        seed: Annotated[int | None, Field(description="Repeat a check with the seed of its answer.", ge=0)] = None,
    ) -> CheckAnswer:
        """Judge a kernel against the float64 reference on many cases, in a sandbox. Needs no GPU for Triton."""
        kernels = {"code": code, "file": file, "kernel": kernel}
        return await call(ctx, "check", problem=problem, **kernels, case=case, dtype=dtype, depth=depth, seed=seed)

    @server.tool(annotations=READ_ONLY)
    async def audit(
        ctx: Context[Any, Any],
        problem: Op,
        code: Code = None,
        file: File = None,
        kernel: KernelName = None,
        case: OneCase = None,
        dtype: OneDtype = None,
        gpu: GPUName = "h200",
    ) -> AuditAnswer:
        """Count the bytes that a Triton kernel moves per tensor; find invalid accesses and races. Needs no GPU."""
        kernels = {"code": code, "file": file, "kernel": kernel}
        return await call(ctx, "audit", problem=problem, **kernels, case=case, dtype=dtype, gpu=gpu)

    @server.tool(annotations=READ_ONLY)
    async def inspect(
        ctx: Context[Any, Any],
        problem: Op,
        code: Code = None,
        file: File = None,
        kernel: KernelName = None,
        case: OneCase = None,
        dtype: OneDtype = None,
        gpu: GPUName = "h200",
        direction: Direction = "forward",
    ) -> InspectAnswer:
        """Compile a kernel for a GPU: registers, spills, shared memory, occupancy, waves. Needs no GPU."""
        options = {"code": code, "file": file, "kernel": kernel, "gpu": gpu, "direction": direction}
        return await call(ctx, "inspect", problem=problem, case=case, dtype=dtype, **options)

    @server.tool(annotations=READ_ONLY)
    async def explain(
        ctx: Context[Any, Any],
        problem: Op,
        code: Code = None,
        file: File = None,
        kernel: KernelName = None,
        case: OneCase = None,
        dtype: OneDtype = None,
        gpu: GPUName = "h200",
        direction: Direction = "forward",
    ) -> ExplainAnswer:
        """Find the bottleneck of a kernel on a GPU, its distance from the ceiling, and what to try next."""
        options = {"code": code, "file": file, "kernel": kernel, "gpu": gpu, "direction": direction}
        return await call(ctx, "explain", problem=problem, case=case, dtype=dtype, **options)

    @server.tool(annotations=READ_ONLY)
    async def bench(
        ctx: Context[Any, Any],
        problem: Problem,
        code: Code = None,
        file: File = None,
        kernel: KernelName = None,
        case: Cases = None,
        dtype: OneDtype = None,
        gpu: GPUName = "h200",
    ) -> BenchAnswer:
        """Time a kernel beside eager and torch.compile on this machine's GPU; without one, predict its time."""
        kernels = {"code": code, "file": file, "kernel": kernel}
        return await call(ctx, "bench", problem=problem, **kernels, case=case, dtype=dtype, gpu=gpu)

    if arena is not None:
        from tilewright.agents.arena_tools import add_arena_tools

        add_arena_tools(server, arena)
    return server
