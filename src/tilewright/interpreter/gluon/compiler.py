"""The compiler's verdict on a Gluon kernel: its front end, its layout passes and its allocation of shared memory.

They run in a child process, since the compiler aborts on some errors, and explains others on stderr only.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import resource
import signal
import warnings
from collections.abc import Callable
from typing import Any

from triton._C.libtriton import ir, nvidia, passes
from triton.experimental.gluon._runtime import GluonASTSource

from tilewright.driver import MODEL
from tilewright.interpreter.compiler import BACKEND, TARGET, attempted, front_end, judged
from tilewright.interpreter.exceptions import RejectedKernel, relative_path

PTX_VERSION = 86  # fixed: asking the installed ptxas would start a process, which a sandbox refuses
_DIAGNOSTIC = re.compile(r"^(?P<file>/[^:\n]+):(?P<line>\d+):\d+: error: (?P<what>.+)$", re.M)
_ERROR = re.compile(r"^(?:LLVM ERROR|error): (?P<what>.+)$", re.M)
_ASSERTION = re.compile(r"Assertion `(?P<what>.+)' failed")


def verify(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise RejectedKernel if the compiler rejects a kernel with these arguments."""
    verdict = judged(
        function, args, kwargs, GluonASTSource, lambda source, options: _in_child(lambda: _reply(source, options))
    )
    if verdict.shared > MODEL.shared_per_block:
        needs = f"needs {verdict.shared} bytes of shared memory per program"
        has = f"an {MODEL.name} has {MODEL.shared_per_block}; use smaller or fewer buffers"
        raise RejectedKernel(f"{verdict.file}:{verdict.line}: {function.fn.__name__} {needs}, and {has}")


def _reply(source: Any, options: Any) -> dict[str, Any]:
    """Return the fields of the verdict."""
    shared = 0

    def compile() -> None:
        nonlocal shared
        shared = _compile(source, options)

    return attempted(compile) or {"shared": shared}


def _compile(source: Any, options: Any) -> int:
    """Compile as far as layouts and memory are checked, and return the bytes of shared memory."""
    module = front_end(source, options)
    module = BACKEND.gluon_to_ttgir(module, {}, options, TARGET.arch)
    manager = ir.pass_manager(module.context)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, TARGET.arch, PTX_VERSION)
    manager.run(module, "allocate_shared_memory")
    return module.get_int_attr("ttg.shared") or 0


def _in_child(compile: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    output, printed = os.pipe()
    answer, given = os.pipe()
    child = _fork()
    if child == 0:
        _run_child(compile, printed, given)
    os.close(printed)
    os.close(given)
    with open(output, errors="replace") as read_output, open(answer) as read_answer:
        if child is None:
            return compile()
        text, reply = read_output.read(), read_answer.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return _explained(json.loads(reply or "{}"), text, status)


def _fork() -> int | None:
    """Fork, unless a sandbox does not let this process do so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads: the child uses none
        try:
            return os.fork()
        except PermissionError:
            return None


def _explained(reply: dict[str, Any], text: str, status: int) -> dict[str, Any]:
    """Add what the compiler printed and the exit status of the child to its reply."""
    if "shared" in reply:
        return reply
    if (found := _DIAGNOSTIC.search(text)) is not None:
        return {"file": relative_path(found["file"]), "line": int(found["line"]), "error": found["what"]}
    if (found := _ERROR.search(text) or _ASSERTION.search(text)) is not None:
        return {"error": f"the compiler aborts: {found['what']}" if status < 0 else found["what"]}
    return reply or {"error": f"the compiler was killed by {signal.Signals(-status).name}"}


def _run_child(compile: Callable[[], dict[str, Any]], output: int, answer: int) -> None:
    try:
        faulthandler.disable()  # the parent reports the crash
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(output, 1)
        os.dup2(output, 2)
        reply = compile()
        reply.pop("cause", None)  # an exception, of which the parent gets the message
        os.write(answer, json.dumps(reply).encode())
    finally:
        os._exit(0)
