"""Analyse a submission in a confined process: audit, resources, roofline and predicted time.

`tilewright explain` imports the file it explains. Here that file is hostile, so a server process that has imported
torch forks a child per request; the child confines itself before it reads the file, and its process group is killed
when it has answered or is late. An answer comes from the process of the submission: it is evidence about an honest
kernel, not a proof. Measured boards do not use it for ranking.
"""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from tilewright import settings
from tilewright.errors import NothingLaunched, TilewrightError, first_line

BOOTSTRAP = "import sys; sys.path[:] = [p for p in sys.path if p]; from tilewright.arena.analysis import serve; serve()"
SECONDS = 180.0  # for all cases together
MEMORY = 8 * 2**30
PROCESSES = 64  # compilers and their threads
MAX_FILE_BYTES = 2**28
MAX_ANSWER_BYTES = 2**22
MAX_TEXT, MAX_ITEMS = 500, 40  # longer answers are cut


class Analyst:
    """The fork server of analyses; started on first use and again if it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the analysis of a file for the cases of a problem, or {"error": reason}."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=settings.worker_environment(simulate=True),
            )
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            self.close()
            return {"error": "the analysis ended without an answer"}
        return json.loads(line)

    def close(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe:
                    pipe.close()
            self._process = None


def serve() -> None:
    """Answer requests until the standard input ends. This process never runs a submission."""
    from tilewright.worker.forkserver import die_with_parent

    die_with_parent()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    records = _import_tools()
    for line in sys.stdin.buffer:
        answers.write(json.dumps(_in_child(json.loads(line), records)).encode() + b"\n")
        answers.flush()


def _import_tools() -> list[dict[str, Any]]:
    """Import before the fork what every analysis needs, and return the records, which measured the ceilings."""
    import tilewright.workbench.check.problems
    import tilewright.workbench.explain
    import tilewright.workbench.explain.collect
    import tilewright.worker.tampering  # noqa: F401
    from tilewright.record import latest, read

    return [*latest([r for path in settings.record_files() for r in read(path).records])]


def _in_child(request: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    folder = tempfile.mkdtemp(prefix="tilewright-analysis-")
    out, result = os.pipe()
    if not (pid := os.fork()):
        _become_child(request, records, Path(folder), result)
    os.close(result)
    try:
        with os.fdopen(out, "rb") as pipe:
            return _checked(_read_until(pipe, time.monotonic() + request.get("seconds", SECONDS)))
    finally:
        _kill_group(pid)
        shutil.rmtree(folder, ignore_errors=True)


def _become_child(request: dict[str, Any], records: list[dict[str, Any]], folder: Path, result: int) -> None:
    from tilewright.worker.forkserver import die_with_parent

    try:
        die_with_parent()
        os.setsid()
        _keep_only(result)
        settings.replace_environment(settings.worker_environment(True) | settings.redirected_caches(str(folder)))
        tempfile.tempdir = None
        os.chdir(folder)
        answer = _analyse(request, records, folder)
    except NothingLaunched:  # whose message names options of the command line
        answer = {"error": "it launches no Triton or CUDA C++ kernel"}
    except TilewrightError as error:
        answer = {"error": str(error)}
    except BaseException as error:  # including SystemExit of the submission
        answer = {"error": first_line(error)}
    try:
        data = memoryview(json.dumps(answer, default=str).encode())
        while data:
            data = data[os.write(result, data) :]
    finally:
        os._exit(0)


def _keep_only(result: int) -> None:
    """Close every inherited file but `result`: through the server's pipe, a submission could answer for the next one.

    The output is dropped, since the file to which it goes has no limit.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.closerange(3, result)
    os.closerange(result + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _analyse(request: dict[str, Any], records: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    from tilewright import hardware, registry, sandbox
    from tilewright.arena import problems
    from tilewright.spec import Kernel
    from tilewright.workbench.inspect.fake_gpu import fake_gpu
    from tilewright.worker import solutions
    from tilewright.worker.tampering import FunctionSnapshot

    gpu, file = hardware.datasheet(request["gpu"]), Path(request["file"])
    unpacked = Path(tempfile.mkdtemp(dir=folder))  # deleted by the parent: this process will not be allowed to
    with problems.loaded(request["problem"], unpacked) as found:
        solution = None
        if found.problem:
            found.problem.select(device="cpu")  # the reference runs here, at sizes that fit
            solution = found.problem.solution("cpu", found.cases[0])
        others = [Path(name) for name in (solution or {}).get("folders", [])]
        layers = sandbox.confine(
            read=[*sandbox.runtime(), file, *others],
            write=[folder],
            memory=MEMORY,
            processes=PROCESSES,
            file_bytes=MAX_FILE_BYTES,
        )
        snapshot = FunctionSnapshot()
        with fake_gpu(gpu):  # a file may query the GPU when it is imported
            if solution:
                fn = solutions.load(file, solution, "cpu")
                kernel = Kernel(file.name, fn, "python", lambda *_: True, False, origin="user")
            else:
                kernel = registry.load_file(file, found.op)
        cases = [_diagnosis(found.op, kernel, case, gpu, records) for case in found.cases]
        if replaced := snapshot.replaced():
            return {"error": f"it replaced {', '.join(replaced[:4])}"}
    return {"cases": cases, "isolation": layers}


def _diagnosis(op: Any, kernel: Any, case: Any, gpu: Any, records: Any) -> dict[str, Any]:
    from tilewright.workbench.explain import diagnose
    from tilewright.workbench.explain.collect import collect_op

    found = diagnose(collect_op(op, kernel, case, gpu, records, operators=True))
    predicted, call = found.prediction, found.call
    audited = call.audited.audit if call.audited else None
    return {
        "case": str(case),
        "dtype": case.dtype,
        "us": predicted.us if predicted else None,
        "low": predicted.low if predicted else None,
        "high": predicted.high if predicted else None,
        "floor_us": found.floor_us,
        "other_work": call.other_work or call.launch_error or "",
        "bottleneck": found.bottleneck.name if found.bottleneck else "",
        "advice": [check.advice for check in found.failed if check.advice][:3],
        "summary": audited.summary() if audited else [call.no_audit_reason],
        "findings": [str(finding) for finding in audited.findings][:20] if audited else [],
        "launches": [_resources(one) for one in call.launches],
        "roofline": call.launches[0].roofline.as_json() if call.launches[0].roofline else None,
    }


def _resources(one: Any) -> dict[str, Any]:
    content = one.as_json()
    names = ("kernel", "grid", "threads", "registers", "shared", "spills", "waves", "launch_error")
    kept = {name: content[name] for name in names if name in content}
    return kept | {"blocks_per_sm": content["occupancy"].get("blocks"), "limiter": content["occupancy"]["limiter"]}


def _read_until(pipe: IO[bytes], deadline: float) -> bytes:
    data = b""
    while len(data) <= MAX_ANSWER_BYTES:
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return json.dumps({"error": "it was not analysed in time"}).encode()
        if not (part := os.read(pipe.fileno(), 1 << 16)):
            return data
        data += part
    return b""


def _checked(data: bytes) -> dict[str, Any]:
    """Return an answer of the expected form; a submission may have written anything."""
    try:
        answer = json.loads(data)
        if "error" in answer:
            return {"error": str(answer["error"])[:MAX_TEXT]}
        cases = [_checked_case(case) for case in answer["cases"]]
        return {"cases": cases, "isolation": [str(layer)[:MAX_TEXT] for layer in answer["isolation"]][:MAX_ITEMS]}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {"error": "the process of the analysis did not answer"}


def _checked_case(case: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("us", "low", "high", "floor_us"):
        value = case[name]
        if value is not None and not (isinstance(value, int | float) and 0 < value < 1e12):
            raise ValueError(name)
        found[name] = value
    for name in ("case", "dtype", "other_work", "bottleneck"):
        found[name] = str(case[name])[:MAX_TEXT]
    for name in ("advice", "summary", "findings"):
        found[name] = [str(line)[:MAX_TEXT] for line in list(case[name])[:MAX_ITEMS]]
    found["launches"] = [_checked_values(launch) for launch in list(case["launches"])[:MAX_ITEMS]]
    found["roofline"] = _checked_values(case["roofline"]) if case["roofline"] else None
    return found


def _checked_values(given: dict[str, Any]) -> dict[str, Any]:
    plain = {str(key)[:40]: value for key, value in [*given.items()][:MAX_ITEMS]}
    return {k: v if isinstance(v, int | float | None) else str(v)[:MAX_TEXT] for k, v in plain.items()}


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # killed before it had a group of its own
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
