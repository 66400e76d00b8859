"""Regenerate the table of tools and the session log of docs/mcp.md, by a session over standard input and output.

python scripts/agents_page.py             rewrite the page if it is out of date
python scripts/agents_page.py --check     only say so; exit with status 1 if it is
"""

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, StdioServerParameters

from tilewright.agents.arbiter import add_problem

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "mcp.md"
WIDTH = 118
SKIPPED = {"isolation", "seed", "calls", "results", "address"}  # differ between machines or runs
LONG = 300  # characters of a text that is shown
CASE = {"case": ["M=3,N=781"], "dtype": ["float32"]}
NO_MAXIMUM = """\
import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * N + offs_n, mask=offs_n < N, other=-float("inf")).to(tl.float32)
    e = tl.exp(x)
    tl.store(y_ptr + row * N + offs_n, (e / tl.sum(e, axis=0)).to(y_ptr.dtype.element_ty))


def softmax(x):
    x, (M, N) = x.contiguous(), x.shape
    y = torch.empty_like(x)
    if x.numel():
        _softmax[(M,)](x, y, N, BLOCK_N=triton.next_power_of_2(N))
    return y
"""
MASKED = NO_MAXIMUM.replace("element_ty))", "element_ty), mask=offs_n < N)")
RIGHT = MASKED.replace("tl.exp(x)", "tl.exp(x - tl.max(x, axis=0))")
STEPS: list[tuple[str, str, dict[str, Any]]] = [  # the edit before a call, the tool, its arguments
    (NO_MAXIMUM, "audit", {"case": "M=3,N=781", "dtype": "float32"}),
    (MASKED, "check", CASE | {"seed": 7}),
    (RIGHT, "check", CASE | {"seed": 7}),
    (RIGHT, "inspect", {"case": "M=16384,N=8192"}),
    (RIGHT, "explain", {"case": "M=16384,N=8192"}),
    (RIGHT, "bench", {"case": ["M=16384,N=8192"]}),
    (RIGHT, "explain", {"case": "M=16384"}),
    (RIGHT, "search_archive", {"problem": "softmax", "technique": "triton", "limit": 1}),
    (RIGHT, "submit", {"wait": 0}),
    (RIGHT, "read_board", {"problem": "softmax"}),
]
WITHOUT_FILE = ("search_archive", "read_board")
EDITS = {
    NO_MAXIMUM: "The agent writes `softmax.py`:",
    MASKED: "It adds the mask, `mask=offs_n < N`, to the store:",
    RIGHT: "It subtracts the maximum, `tl.exp(x - tl.max(x, axis=0))`:",
}


async def record() -> tuple[str, str]:
    """Return the table of tools and the session log."""
    with tempfile.TemporaryDirectory() as folder:
        add_problem(Path(folder) / "arena", "softmax", "h200 predicted", ["M=16384,N=8192"])
        command = ["-m", "tilewright", "mcp", "--arena", "arena"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        server = StdioServerParameters(command=sys.executable, args=command, env=environment, cwd=folder)
        async with Client(server) as client:
            tools = (await client.list_tools()).tools
            table = "\n".join(["| tool | arguments | answer |", "|---|---|---|", *map(_row, tools)])
            return table, await _session(client, Path(folder))


def _row(tool: Any) -> str:
    needed = tool.input_schema.get("required", [])
    names = [f"`{name}`" if name in needed else f"[`{name}`]" for name in tool.input_schema["properties"]]
    return f"| `{tool.name}` | {', '.join(names)} | {tool.description.partition(chr(10))[0]} |"


async def _session(client: Client, folder: Path) -> str:
    parts, shown = [], ""
    for code, tool, options in STEPS:
        if code != shown:
            parts.append(EDITS[code])
            if code == NO_MAXIMUM:
                parts.append(f"```python\n{code}```")
            (folder / "softmax.py").write_text(code)
            shown = code
        arguments = options if tool in WITHOUT_FILE else {"problem": "softmax", "file": "softmax.py", **options}
        steps: list[str] = []

        async def note(done: float, total: float | None, message: str | None, steps: list[str] = steps) -> None:
            steps.append(f"{message}")

        answer = await client.call_tool(tool, arguments, progress_callback=note)
        lines = [f"-> {tool} {json.dumps(arguments)}"]
        lines += [f"   {steps[-1]}"] if tool == "check" else []
        if answer.is_error:
            lines.append(f"<- error: {answer.content[0].text}")
        else:
            lines += _answer(answer.structured_content)
        parts.append("```text\n" + "\n".join(lines) + "\n```")
    return "\n\n".join(parts)


def _answer(content: dict[str, Any]) -> list[str]:
    """Return the fields of an answer, one per line and long lists one item per line."""
    lines = []
    for name, value in content.items():
        if name in SKIPPED or value in ("", None, []):
            continue
        value = _shortened(value)
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and len(text) > WIDTH - len(name) - 5:
            lines += [f"   {name}:", *(f"     {json.dumps(one, ensure_ascii=False)}" for one in value)]
        else:
            lines.append(f"   {name}: {text}")
    lines[0] = "<-" + lines[0][2:]
    return lines


def _shortened(value: Any) -> Any:
    """Return a value of JSON with long texts cut off."""
    if isinstance(value, str):
        return value if len(value) <= LONG else value[:LONG] + "…"
    if isinstance(value, dict):
        return {name: _shortened(one) for name, one in value.items()}
    return [_shortened(one) for one in value] if isinstance(value, list) else value


def page(text: str, table: str, session: str) -> str:
    """Return the page with its blocks filled."""
    for name, content in (("tools", table), ("session", session)):
        block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = block.sub(lambda found, content=content: f"{found[1]}\n{content}\n\n{found[2]}", text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    old = PAGE.read_text()
    new = page(old, *anyio.run(record))
    if new == old:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is out of date")
    if not options.check:
        PAGE.write_text(new)
    return int(options.check)


if __name__ == "__main__":
    sys.exit(main())
