"""Foreign problems as they are, made into Ops: KernelBench's files and gpu-mode's task folders.

Their inputs, cases and references are used as they stand, with seeds of ours; their tolerance is not, but their own
check is asked too, so that a report can say where the two verdicts differ.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import json
import secrets
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.utils import _pytree as pytree

from tilewright import source
from tilewright.errors import BadProblem, TilewrightError, first_line
from tilewright.spec import Case, Cost, Draw, Op
from tilewright.worker.execute import flat
from tilewright.worker.fake_cuda import without_cuda
from tilewright.worker.solutions import constructed, nested

KERNELBENCH_TOLERANCE = {torch.float32: 1e-4}  # others: 1e-2; absolute and relative
LARGEST_HERE = 2**24  # elements: more take long without a GPU
SENDABLE = (int, float, str, bool, type(None), torch.dtype)


class Problem:
    """What both kinds share: nested inputs taken apart, a reference that runs in float64 if it can.

    The last argument of the Op says how the others make up the data, and of which case they are.
    """

    kind: str

    def __init__(self, path: Path, cases: Sequence[Case]):
        self.path = path
        self.labels: list[str] = []
        self.op = Op(
            path.stem,
            self._reference,
            cost=lambda *_: Cost(0, 0),
            inputs=self._leaves,
            check=cases,
            bench=[],
            is_varied=False,
        )
        floats = (
            leaf.dtype for leaf in self._shapes(cases[0]) if isinstance(leaf, Tensor) and leaf.is_floating_point()
        )
        name = str(next(floats, torch.float32)).removeprefix("torch.")
        self.op.check, self.op.dtypes = [case.with_dtype(name) for case in cases], (name,)

    def _shapes(self, case: Case) -> tuple[Any, ...]:
        try:
            return self.op.make(case, "meta")
        except TilewrightError:
            raise
        except Exception as error:
            raise BadProblem(self.path, f"its inputs cannot be made ({first_line(error)})") from error

    def solution(self, device: str) -> dict[str, Any]:
        """What the child needs to load a solution."""
        raise NotImplementedError

    def theirs(self, args: Sequence[Any], outputs: list[Tensor]) -> str | None:
        """What the problem's own check has against these outputs; None if nothing."""
        raise NotImplementedError

    def use(self, cases: Sequence[Case]) -> None:
        """Ask these cases instead of the problem's own."""
        self.op.check = cases

    def close(self) -> None:
        """Leave nothing behind."""

    def _data(self, case: Case, seed: int) -> Any:
        raise NotImplementedError

    def _run(self, data: Any, case: Case, wide: bool) -> Any:
        raise NotImplementedError

    def _leaves(self, draw: Draw) -> tuple[Any, ...]:
        try:
            data = self._drawn(draw.case, draw.seed, draw.device)
        except RuntimeError:
            if draw.device != "meta":
                raise
            data = self._drawn(draw.case, draw.seed, "cpu")  # what depends on values cannot be made without them
        leaves, tree = pytree.tree_flatten(data)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *SENDABLE)):
                raise BadProblem(
                    self.path, f"its inputs hold a {type(leaf).__name__}, which cannot be given to another process"
                )
        dtypes = [str(leaf.dtype).removeprefix("torch.") if isinstance(leaf, Tensor) else None for leaf in leaves]
        about = {"tree": pytree.treespec_dumps(tree), "dtypes": dtypes, "point": draw.case.point}
        moved = [leaf.to(draw.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return (*moved, json.dumps(about))

    def _drawn(self, case: Case, seed: int, device: str) -> Any:
        with without_cuda(device):
            torch.manual_seed(seed)
            return self._data(case, seed)

    def _reference(self, *arguments: Any) -> Any:
        leaves, about = arguments[:-1], json.loads(arguments[-1])
        case = Case(_point(dict(about["point"])))
        dtypes = [name and getattr(torch, name) for name in about["dtypes"]]

        def run(values: Sequence[Any], wide: bool) -> Any:
            copies = [v.clone() if isinstance(v, Tensor) else v for v in values]  # it may write to them
            with without_cuda(_device(leaves)):
                return self._run(nested((*copies, arguments[-1])), case, wide)

        if all(dtype is None or leaf.dtype == dtype for leaf, dtype in zip(leaves, dtypes, strict=True)):
            return run(leaves, wide=False)
        try:
            results = run(leaves, wide=True)
        except Exception:  # whatever a reference says that is written for one dtype
            self.labels = ["the problem's reference does not run in float64: it is held to be exact"]
            results = run([v.to(d) if d else v for v, d in zip(leaves, dtypes, strict=True)], wide=False)
        return pytree.tree_map(lambda o: o.double() if o.is_floating_point() else o, results)


class KernelBench(Problem):
    """A file with `Model`, `get_inputs` and `get_init_inputs`. Its sizes are the whole numbers it names at its top."""

    kind = "kernelbench"

    def __init__(self, path: Path):
        source.require_python_file(path)
        self._source = ast.parse(path.read_bytes())
        self._seed = secrets.randbits(31)  # of the parameters, which a solution draws too
        self._modules: dict[Case, types.ModuleType] = {}
        case = Case(tuple(_whole_numbers(self._source)))
        self.path = path
        module = self._module(case)
        for name in ("Model", "get_inputs", "get_init_inputs"):
            if not callable(getattr(module, name, None)):
                raise BadProblem(path, f"it defines no {name}")
        super().__init__(path, [case])

    def use(self, cases: Sequence[Case]) -> None:
        if len(cases) > 1:
            raise BadProblem(self.path, "its sizes decide how Model is constructed, so one --case at a time is taken")
        super().use(cases)

    def solution(self, device: str) -> dict[str, Any]:
        case = self.op.check[0]
        leaves, tree = pytree.tree_flatten(self._arguments(case))
        for leaf in leaves:
            if not isinstance(leaf, int | float | str | bool | None):
                what = f"Model is constructed with a {type(leaf).__name__}, which cannot be given to another process"
                raise BadProblem(self.path, what)
        return {
            "kind": self.kind,
            "init": leaves,
            "init_tree": pytree.treespec_dumps(tree),
            "seed": self._seed,
            "anew": self._keeps_state(case, device),
            "folders": [],
        }

    def theirs(self, args: Sequence[Any], outputs: list[Tensor]) -> str | None:
        for got, wanted in zip(outputs, flat(self._reference(*args)), strict=True):
            tolerance = KERNELBENCH_TOLERANCE.get(wanted.dtype, 1e-2)
            if got.shape != wanted.shape or not torch.allclose(got.to(wanted), wanted, rtol=tolerance, atol=tolerance):
                return f"not within {tolerance:g} of the reference"
        return None

    def _module(self, case: Case) -> types.ModuleType:
        """The problem, with the case's numbers in place of its own."""
        if case not in self._modules:
            tree = copy.deepcopy(self._source)
            for statement, name in _assignments(tree):
                statement.value = ast.Constant(case[name])
            module = types.ModuleType(f"_tilewright_problem_{self.path.stem}")
            module.__file__ = str(self.path)
            sys.modules[module.__name__] = module
            sys.path.append(str(self.path.parent))
            try:
                exec(compile(ast.fix_missing_locations(tree), str(self.path), "exec"), vars(module))
            except (Exception, SystemExit) as error:
                raise BadProblem(self.path, f"it does not load ({first_line(error)})") from error
            finally:
                sys.path.remove(str(self.path.parent))
            self._modules[case] = module
        return self._modules[case]

    def _arguments(self, case: Case) -> Any:
        torch.manual_seed(self._seed)
        return self._module(case).get_init_inputs()

    def _data(self, case: Case, seed: int) -> Any:
        return self._module(case).get_inputs()

    def _run(self, data: Any, case: Case, wide: bool) -> Any:
        model = self._model(case, _device(pytree.tree_leaves(data)))
        return (model.double() if wide else model)(*data)

    def _model(self, case: Case, device: str) -> Any:
        """A new one for each call: it may keep state."""
        try:
            return constructed(self._module(case).Model, self._arguments(case), self._seed, device)
        except Exception as error:
            raise BadProblem(self.path, f"Model cannot be constructed ({first_line(error)})") from error

    def _keeps_state(self, case: Case, device: str) -> bool:
        """Whether one Model gives other answers to the same inputs; one that draws them is of no use as a reference."""
        if device == "cpu" and sum(s.numel() for s in self._shapes(case) if isinstance(s, Tensor)) > LARGEST_HERE:
            return False  # it will not be asked here anyway
        data = pytree.tree_map_only(Tensor, lambda t: t.to(device), self._drawn(case, 0, device))
        with without_cuda(device), torch.no_grad():
            first, other = self._model(case, device), self._model(case, device)
            one = flat(first(*copy.deepcopy(data)))
            torch.manual_seed(1)
            two, again = flat(other(*copy.deepcopy(data))), flat(first(*copy.deepcopy(data)))
        if not _same(one, two):
            raise BadProblem(self.path, "its reference draws random numbers, so that no answer is the right one")
        return not _same(one, again)


class Task(Problem):
    """A folder with `task.yml`: `generate_input`, `ref_kernel` and `check_implementation` in reference.py."""

    kind = "gpu-mode"

    def __init__(self, path: Path):
        self.path = path / "task.yml" if path.is_dir() else path
        try:
            task = yaml.safe_load(self.path.read_text())
            files = {entry["name"]: entry["source"] for entry in task["files"]}
            tests = [dict(test) for test in task["tests"]]
        except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
            raise BadProblem(self.path, f"it is no task with files and tests ({first_line(error)})") from None
        if task.get("lang", "py") != "py" or task.get("multi_gpu") or not tests:
            raise BadProblem(self.path, "only tasks in Python, for one GPU and with tests, can be checked")
        self.folder = Path(tempfile.mkdtemp(prefix="tilewright-task-"))  # flat, as gpu-mode lays them out
        try:
            self._load(files, tests)
        except BaseException:
            self.close()
            raise

    def _load(self, files: dict[str, str], tests: list[dict[str, Any]]) -> None:
        for name, where in files.items():
            if where != "@SUBMISSION@":
                if not (self.path.parent / where).is_file():
                    raise BadProblem(self.path, f"it names {where}, which is not there")
                shutil.copy(self.path.parent / where, self.folder / name)
        self._reference_module = self._import("reference")
        for name in ("generate_input", "ref_kernel", "check_implementation"):
            if not callable(getattr(self._reference_module, name, None)):
                raise BadProblem(self.path, f"its reference.py defines no {name}")
        self._takes = inspect.signature(self._reference_module.generate_input).parameters
        unknown = {n for n, p in self._takes.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
        if missing := sorted(unknown - {"seed"} - set(tests[0])):
            raise BadProblem(self.path, f"its tests lack {', '.join(missing)}, which generate_input needs")
        super().__init__(self.path.parent / "task", [Case(_point(test)) for test in tests])
        self.op.name = self.path.parent.name
        self.op.mutates = self._changed

    def solution(self, device: str) -> dict[str, Any]:
        return {"kind": self.kind, "folders": [str(self.folder)]}

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def theirs(self, args: Sequence[Any], outputs: list[Tensor]) -> str | None:
        copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
        structure = pytree.tree_structure(self._run(nested(copies), self.op.check[0], wide=False))
        output = pytree.tree_unflatten([o.clone() for o in outputs], structure)
        said = self._reference_module.check_implementation(nested(args), output)
        good, why = said if isinstance(said, tuple) else (not said, said)
        return None if good else (str(why) or "refused").partition("\n")[0]

    def _data(self, case: Case, seed: int) -> Any:
        named = {name: list(value) if isinstance(value, tuple) else value for name, value in case.point}
        seeded = {"seed": seed % 2**31} if "seed" in self._takes else {}
        return self._reference_module.generate_input(**named, **seeded)

    def _run(self, data: Any, case: Case, wide: bool) -> Any:
        return self._reference_module.ref_kernel(data)

    def _changed(self, *arguments: Any) -> list[int]:
        """Those that the reference itself writes to: buffers for results."""
        copies = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        with without_cuda(_device(arguments)):
            self._run(nested(copies), self.op.check[0], wide=False)
        pairs = enumerate(zip(arguments, copies, strict=True))
        return [n for n, (a, b) in pairs if isinstance(a, Tensor) and not _same([a], [b])]

    def _import(self, name: str) -> types.ModuleType:
        """One of the task's modules, which import each other by names that others may have too."""
        with _modules_of(self.folder):
            try:
                return __import__(name)
            except Exception as error:
                raise BadProblem(self.path, f"{name}.py does not load ({first_line(error)})") from error


@contextlib.contextmanager
def _modules_of(folder: Path) -> Iterator[None]:
    names = [path.stem for path in folder.glob("*.py")]
    hidden = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


def load(path: Path) -> KernelBench | Task:
    if path.is_dir() or path.suffix in (".yml", ".yaml"):
        return Task(path)
    return KernelBench(path)


def _point(test: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((n, tuple(v) if isinstance(v, list) else v) for n, v in test.items() if n != "seed")


def _device(values: Sequence[Any]) -> str:
    return next((value.device.type for value in values if isinstance(value, Tensor)), "cpu")


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True))


def _assignments(tree: ast.Module) -> Iterator[tuple[ast.Assign, str]]:
    for statement in tree.body:
        if (
            isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and isinstance(statement.value, ast.Constant)
            and type(statement.value.value) is int
        ):
            yield statement, statement.targets[0].id


def _whole_numbers(tree: ast.Module) -> list[tuple[str, int]]:
    return [(name, statement.value.value) for statement, name in _assignments(tree)]  # type: ignore[attr-defined]
