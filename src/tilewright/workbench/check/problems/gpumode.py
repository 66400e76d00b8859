"""gpu-mode tasks: a folder with `task.yml` and reference.py; the solution defines `custom_kernel`."""

from __future__ import annotations

import contextlib
import inspect
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from tilewright.errors import BadProblem, FileNeedsPackage, first_line
from tilewright.fake_cuda import redirect_cuda
from tilewright.spec import Case
from tilewright.workbench.check.problems.base import Problem, as_point, device_of, quiet
from tilewright.worker import tf32
from tilewright.worker.execute import forward
from tilewright.worker.results import rebuild_results

DEFINED = ("generate_input", "ref_kernel", "check_implementation")


class Task(Problem):
    """A gpu-mode task. Its cases are its tests; the inputs of its benchmarks are called once, if they fit."""

    kind = "gpu-mode"

    def __init__(self, path: Path):
        self.path = path / "task.yml" if path.is_dir() else path
        try:
            task = yaml.safe_load(self.path.read_text())
            files = {entry["name"]: entry["source"] for entry in task["files"]}
            tests = [dict(test) for test in task["tests"]]
            benchmarks = [dict(test) for test in task.get("benchmarks") or []]
        except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
            raise BadProblem(self.path, f"it is no task with files and tests ({first_line(error)})") from None
        if task.get("lang", "py") != "py" or task.get("multi_gpu") or not tests:
            raise BadProblem(self.path, "only tasks in Python, for one GPU and with tests, can be checked")
        self.folder = Path(tempfile.mkdtemp(prefix="tilewright-task-"))  # all files in one folder, as gpu-mode has them
        try:
            self._prepare(files, tests, benchmarks)
        except BaseException:
            self.close()
            raise

    def _prepare(self, files: dict[str, str], tests: list[dict[str, Any]], benchmarks: list[dict[str, Any]]) -> None:
        for name, where in files.items():
            if where != "@SUBMISSION@":
                if not (self.path.parent / where).is_file():
                    raise BadProblem(self.path, f"it names {where}, which is not there")
                shutil.copy(self.path.parent / where, self.folder / name)
        with tf32.allowed(tf32.Tf32()):
            self._modules = self._import("reference")
            self.tf32 = tf32.current()
        self.modules = [*self._modules]
        self._reference_module: Any = self._modules["reference"]
        for name in DEFINED:
            if not callable(getattr(self._reference_module, name, None)):
                raise BadProblem(self.path, f"its reference.py defines no {name}")
        self._parameters = inspect.signature(self._reference_module.generate_input).parameters
        required = {
            n for n, p in self._parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        }
        if missing := sorted(required - {"seed"} - set(tests[0])):
            raise BadProblem(self.path, f"its tests lack {', '.join(missing)}, which generate_input needs")
        super().__init__(self.path.parent / "task", list(dict.fromkeys(Case(as_point(test)) for test in tests)))
        self.op.name = self.path.parent.name
        self.timed = [*dict.fromkeys(Case(as_point(test), self.op.dtypes[0]) for test in benchmarks)] or self.op.check
        self.once = [case for case in self.timed if case not in self.op.check]

    def solution(self, device: str, case: Case | None = None) -> dict[str, Any]:
        *leaves, about = self.op.make(self.op.check[0], device)

        def prepare() -> Any:
            copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return lambda: self._call(copies, about)

        self._require_repeatable(prepare)
        return {"kind": self.kind, "folders": [str(self.folder)]} | self._common(device)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def own_check(self, args: Sequence[Any], outputs: list[Tensor]) -> str | None:
        def ask() -> Any:
            expected = self._reference_module.ref_kernel(self._inputs(args))
            output = rebuild_results((o.clone() for o in self._results(args, outputs)), expected)
            return self._reference_module.check_implementation(self._inputs(args), output)

        with redirect_cuda(device_of(args)), tf32.allowed(self.tf32):
            result = forward(ask, [], [])[1]
        good, why = result if isinstance(result, tuple) else (not result, result)
        return None if good else (str(why) or "rejected").partition("\n")[0]

    def _data(self, case: Case, seed: int) -> Any:
        named = {name: list(value) if isinstance(value, tuple) else value for name, value in case.point}
        seeded = {"seed": seed % 2**31} if "seed" in self._parameters else {}
        return self._reference_module.generate_input(**named, **seeded)

    def _callable(self, case: Case, device: str, wide: bool) -> Callable[[Any], Any]:
        return self._reference_module.ref_kernel

    def _resolve(self, module: str, name: str) -> type:
        found: Any = self._modules.get(module) or sys.modules[module]
        for part in name.split("."):
            found = getattr(found, part)
        return found

    def _import(self, name: str) -> dict[str, types.ModuleType]:
        """Return one of the task's modules and those it imports, whose names may clash with installed ones."""
        with _modules_of(self.folder) as names, quiet():
            try:
                __import__(name)
            except ModuleNotFoundError as missing:
                raise FileNeedsPackage(self.path, missing.name) from missing
            except Exception as error:
                raise BadProblem(self.path, f"{name}.py does not load ({first_line(error)})") from error
            return {name: sys.modules[name] for name in names if name in sys.modules}


@contextlib.contextmanager
def _modules_of(folder: Path) -> Iterator[list[str]]:
    names = [path.stem for path in folder.glob("*.py")]
    hidden = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(folder))
    try:
        yield names
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)
