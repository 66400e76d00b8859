"""Load third-party problems as Ops: KernelBench files and gpu-mode task folders.

Their inputs, cases and references are used unchanged, with our seeds. Their tolerance is not used, but their own check
runs too, so that a report can say where the two verdicts differ.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.utils import _pytree as pytree

from tilewright import source
from tilewright.errors import BadProblem, TilewrightError, first_line
from tilewright.spec import Case, Cost, Draw, Op
from tilewright.workbench.check.cases import PROBLEM_VALUES
from tilewright.workbench.check.repeatable import same_outputs, unrepeatable_calls
from tilewright.worker.execute import flatten
from tilewright.worker.fake_cuda import redirect_cuda
from tilewright.worker.solutions import construct_model, unflatten_inputs

KERNELBENCH_TOLERANCE = {torch.float32: 1e-4}  # other dtypes: 1e-2; absolute and relative
MAX_CPU_ELEMENTS = 2**24  # more take long without a GPU
SENDABLE = (int, float, str, bool, type(None), torch.dtype)  # to another process
SCALES = {"negated": -1.0, "zeros": 0.0, "scaled up": 8.0, "scaled down": 2.0**-6}


class Problem:
    """A problem as an Op of the leaves of its nested inputs, with a reference that runs in float64 if it can.

    The last argument of the Op holds the structure of the inputs and the case.
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
            raise BadProblem(self.path, f"its inputs cannot be created ({first_line(error)})") from error

    def solution(self, device: str) -> dict[str, Any]:
        """Return what the child process needs to load a solution."""
        raise NotImplementedError

    def own_check(self, args: Sequence[Any], outputs: list[Tensor]) -> str | None:
        """Return why the problem's own check rejects these outputs, or None if it accepts them."""
        raise NotImplementedError

    def use(self, cases: Sequence[Case]) -> None:
        """Check these cases instead of the problem's own."""
        self.op.check = cases

    def close(self) -> None:
        """Delete temporary files."""

    def _data(self, case: Case, seed: int) -> Any:
        raise NotImplementedError

    def _run(self, data: Any, case: Case, wide: bool) -> Any:
        raise NotImplementedError

    def _leaves(self, draw: Draw) -> tuple[Any, ...]:
        try:
            data = self._draw_inputs(draw.case, draw.seed, draw.device)
        except RuntimeError:
            if draw.device != "meta":
                raise
            data = self._draw_inputs(draw.case, draw.seed, "cpu")  # shapes that depend on values need the values
        leaves, tree = pytree.tree_flatten(data)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *SENDABLE)):
                raise BadProblem(
                    self.path, f"its inputs hold a {type(leaf).__name__}, which cannot be sent to another process"
                )
        dtypes = [str(leaf.dtype).removeprefix("torch.") if isinstance(leaf, Tensor) else None for leaf in leaves]
        about = {"tree": pytree.treespec_dumps(tree), "dtypes": dtypes, "point": draw.case.point}
        moved = [leaf.to(draw.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if draw.values in PROBLEM_VALUES and draw.device != "meta":
            generator = torch.Generator(draw.device).manual_seed(draw.seed)
            moved = [_changed(leaf, draw.values, generator) if _is_varied(leaf) else leaf for leaf in moved]
        return (*moved, json.dumps(about))

    def _is_too_large(self, case: Case, device: str) -> bool:
        """Return whether the case cannot be checked on this device anyway."""
        return (
            device == "cpu" and sum(s.numel() for s in self._shapes(case) if isinstance(s, Tensor)) > MAX_CPU_ELEMENTS
        )

    def _require_repeatable(self, prepare: Callable[[], Callable[[], Any]]) -> None:
        try:
            reason = unrepeatable_calls(prepare)
        except TilewrightError:
            raise
        except Exception as error:
            raise BadProblem(self.path, f"its reference fails ({first_line(error)})") from error
        if reason:
            raise BadProblem(self.path, f"its reference {reason}, so that no kernel can be compared with it")

    def _draw_inputs(self, case: Case, seed: int, device: str) -> Any:
        with redirect_cuda(device):
            torch.manual_seed(seed)
            return self._data(case, seed)

    def _reference(self, *arguments: Any) -> Any:
        leaves, about = arguments[:-1], json.loads(arguments[-1])
        case = Case(_point(dict(about["point"])))
        dtypes = [name and getattr(torch, name) for name in about["dtypes"]]

        def run(values: Sequence[Any], wide: bool) -> Any:
            copies = [v.clone() if isinstance(v, Tensor) else v for v in values]  # the reference may write to them
            with redirect_cuda(_device(leaves)):
                return self._run(unflatten_inputs((*copies, arguments[-1])), case, wide)

        if all(dtype is None or leaf.dtype == dtype for leaf, dtype in zip(leaves, dtypes, strict=True)):
            return run(leaves, wide=False)
        try:
            results = run(leaves, wide=True)
        except Exception:  # a reference written for one dtype may raise anything
            self.labels = ["the problem's reference does not run in float64, and is taken to be exact"]
            results = run([v.to(d) if d else v for v, d in zip(leaves, dtypes, strict=True)], wide=False)
        return pytree.tree_map(lambda o: o.double() if o.is_floating_point() else o, results)


class KernelBench(Problem):
    """A file with `Model`, `get_inputs` and `get_init_inputs`. Its sizes are the integers assigned at module level."""

    kind = "kernelbench"

    def __init__(self, path: Path):
        source.require_python_file(path)
        self._source = ast.parse(path.read_bytes())
        self._seed = secrets.randbits(31)  # for the parameters, which a solution draws from the same seed
        self._modules: dict[Case, types.ModuleType] = {}
        case = Case(tuple(_module_sizes(self._source)))
        self.path = path
        module = self._module(case)
        for name in ("Model", "get_inputs", "get_init_inputs"):
            if not callable(getattr(module, name, None)):
                raise BadProblem(path, f"it defines no {name}")
        super().__init__(path, [case])

    def use(self, cases: Sequence[Case]) -> None:
        if len(cases) > 1:
            raise BadProblem(self.path, "its sizes decide how Model is constructed, so give one --case at a time")
        super().use(cases)

    def solution(self, device: str) -> dict[str, Any]:
        case = self.op.check[0]
        leaves, tree = pytree.tree_flatten(self._arguments(case))
        for leaf in leaves:
            if not isinstance(leaf, int | float | str | bool | None):
                what = f"Model is constructed with a {type(leaf).__name__}, which cannot be sent to another process"
                raise BadProblem(self.path, what)
        return {
            "kind": self.kind,
            "init": leaves,
            "init_tree": pytree.treespec_dumps(tree),
            "seed": self._seed,
            "new_model_per_call": self._keeps_state(case, device),
            "folders": [],
        }

    def own_check(self, args: Sequence[Any], outputs: list[Tensor]) -> str | None:
        for got, wanted in zip(outputs, flatten(self._reference(*args)), strict=True):
            tolerance = KERNELBENCH_TOLERANCE.get(wanted.dtype, 1e-2)
            if got.shape != wanted.shape or not torch.allclose(got.to(wanted), wanted, rtol=tolerance, atol=tolerance):
                return f"not within {tolerance:g} of the reference"
        return None

    def _module(self, case: Case) -> types.ModuleType:
        """Return the problem's module with the sizes of the case."""
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
        """Construct a new model: one that was called may have changed its state."""
        try:
            return construct_model(self._module(case).Model, self._arguments(case), self._seed, device)
        except Exception as error:
            raise BadProblem(self.path, f"Model cannot be constructed ({first_line(error)})") from error

    def _keeps_state(self, case: Case, device: str) -> bool:
        """Return whether a second call of one Model returns other outputs. Refuse a Model that draws random numbers."""
        if self._is_too_large(case, device):
            return False
        data = pytree.tree_map_only(Tensor, lambda t: t.to(device), self._draw_inputs(case, 0, device))

        def prepare() -> Any:
            model = self._model(case, device)
            return lambda: model(*copy.deepcopy(data))

        with redirect_cuda(device), torch.no_grad():
            self._require_repeatable(prepare)
            call = prepare()
            return not same_outputs(flatten(call()), flatten(call()))


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
        self.folder = Path(tempfile.mkdtemp(prefix="tilewright-task-"))  # all files in one folder, as gpu-mode has them
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
        self._parameters = inspect.signature(self._reference_module.generate_input).parameters
        required = {
            n for n, p in self._parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        }
        if missing := sorted(required - {"seed"} - set(tests[0])):
            raise BadProblem(self.path, f"its tests lack {', '.join(missing)}, which generate_input needs")
        super().__init__(self.path.parent / "task", [Case(_point(test)) for test in tests])
        self.op.name = self.path.parent.name
        self.op.mutates = self._mutated

    def solution(self, device: str) -> dict[str, Any]:
        case = self.op.check[0]
        if not self._is_too_large(case, device):
            *leaves, structure = self.op.make(case, device)

            def prepare() -> Any:
                copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                return lambda: self._run(unflatten_inputs((*copies, structure)), case, wide=False)

            with redirect_cuda(device):
                self._require_repeatable(prepare)
        return {"kind": self.kind, "folders": [str(self.folder)]}

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def own_check(self, args: Sequence[Any], outputs: list[Tensor]) -> str | None:
        copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
        structure = pytree.tree_structure(self._run(unflatten_inputs(copies), self.op.check[0], wide=False))
        output = pytree.tree_unflatten([o.clone() for o in outputs], structure)
        result = self._reference_module.check_implementation(unflatten_inputs(args), output)
        good, why = result if isinstance(result, tuple) else (not result, result)
        return None if good else (str(why) or "rejected").partition("\n")[0]

    def _data(self, case: Case, seed: int) -> Any:
        named = {name: list(value) if isinstance(value, tuple) else value for name, value in case.point}
        seeded = {"seed": seed % 2**31} if "seed" in self._parameters else {}
        return self._reference_module.generate_input(**named, **seeded)

    def _run(self, data: Any, case: Case, wide: bool) -> Any:
        return self._reference_module.ref_kernel(data)

    def _mutated(self, *arguments: Any) -> list[int]:
        """Return the arguments that the reference itself writes to, such as output buffers."""
        copies = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        with redirect_cuda(_device(arguments)):
            self._run(unflatten_inputs(copies), self.op.check[0], wide=False)
        pairs = enumerate(zip(arguments, copies, strict=True))
        return [n for n, (a, b) in pairs if isinstance(a, Tensor) and not torch.equal(_bits(a), _bits(b))]

    def _import(self, name: str) -> types.ModuleType:
        """Import one of the task's modules, whose names may clash with those of installed ones."""
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


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _is_varied(leaf: Any) -> bool:
    """Return whether a leaf may get other values: not if it is a mask, a label or a probability distribution."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dtype.itemsize < 2 or not leaf.numel():
        return False
    values = leaf.double()
    low, high = values.min(), values.max()
    has_two_values = bool(((values == low) | (values == high)).all())
    is_distribution = leaf.dim() > 0 and bool(low >= 0 and ((values.sum(-1) - 1).abs() < 1e-3).all())
    return not has_two_values and not is_distribution


def _changed(leaf: Tensor, values: str, generator: torch.Generator) -> Tensor:
    """Return other values of the same kind.

    Zeros stay where they are, as in a triangular matrix, and a symmetric matrix stays symmetric.
    """
    if values in SCALES:
        return leaf * SCALES[values]
    if leaf.dim() > 1 and leaf.shape[-1] == leaf.shape[-2] and torch.equal(leaf, leaf.mT):
        return leaf
    if values == "random signs":
        return leaf * (2 * torch.randint(0, 2, leaf.shape, generator=generator, device=leaf.device) - 1)
    permuted = leaf.clone()
    nonzero = leaf[leaf != 0]
    permuted[leaf != 0] = nonzero[torch.randperm(len(nonzero), generator=generator, device=leaf.device)]
    return permuted


def _assignments(tree: ast.Module) -> Iterator[tuple[ast.Assign, str]]:
    for statement in tree.body:
        if (
            isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and isinstance(statement.value, ast.Constant)
            and type(statement.value.value) is int
        ):
            yield statement, statement.targets[0].id


def _module_sizes(tree: ast.Module) -> list[tuple[str, int]]:
    return [(name, statement.value.value) for statement, name in _assignments(tree)]  # type: ignore[attr-defined]
