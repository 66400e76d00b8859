"""The process in which a tool call runs, so that one that crashes or hangs does not end the server.

Requests and replies are JSON lines. A request is `{"tool": …, "arguments": …}`. It is answered by any number of
`{"progress": [done, total, message]}`, and one `{"result": …}` or `{"error": …}`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from tilewright.agents import tools
from tilewright.errors import OneKernelNeeded, TilewrightError, first_line
from tilewright.worker.process import die_with_parent, fork_server

CODE_FILE = "solution.py"
TOOLS = {
    "read_problem": tools.read_problem,
    "check": tools.check,
    "audit": tools.audit,
    "inspect": tools.inspect,
    "explain": tools.explain,
    "bench": tools.bench,
}


def serve() -> None:
    """Answer requests until the server closes the pipe."""
    die_with_parent()
    requests, replies = sys.stdin, os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of libraries must not reach the pipe
    fork_server("cpu")  # imports torch for the sandboxed workers while the first request is awaited
    for line in requests:
        _answer(json.loads(line), replies)


def _answer(request: dict[str, Any], replies: IO[str]) -> None:
    def send(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    def progress(done: int, total: int | None, message: str) -> None:
        send(progress=[done, total, message])

    with tempfile.TemporaryDirectory(prefix="tilewright-code-") as folder:
        try:
            reply = {"result": TOOLS[request["tool"]](**_with_file(request["arguments"], folder), progress=progress)}
        except TilewrightError as error:
            reply = {"error": str(error).strip().partition("\n")[0]}
        except Exception as error:
            reply = {"error": f"unexpected {first_line(error)}; this is a fault of Tilewright, try other arguments"}
    send(**_without_folder(reply, folder))


def _with_file(arguments: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the arguments with source text written to a file."""
    if "code" not in arguments:
        return arguments
    if "file" in arguments:
        raise OneKernelNeeded
    path = Path(folder) / CODE_FILE
    path.write_text(arguments["code"], encoding="utf-8")
    return {name: value for name, value in arguments.items() if name != "code"} | {"file": str(path)}


def _without_folder(reply: Any, folder: str) -> Any:
    """Return the reply with bare file names: the caller of a tool that takes source text has no such folder."""
    if isinstance(reply, str):
        return reply.replace(f"{folder}/", "")
    if isinstance(reply, dict):
        return {name: _without_folder(value, folder) for name, value in reply.items()}
    return [_without_folder(one, folder) for one in reply] if isinstance(reply, list) else reply
