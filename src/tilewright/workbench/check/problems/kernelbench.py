"""KernelBench files: `Model`, `get_inputs` and `get_init_inputs`; the solution defines `ModelNew`."""

from __future__ import annotations

import ast
import copy
import secrets
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from tilewright import source
from tilewright.errors import BadProblem, FileNeedsPackage, first_line
from tilewright.fake_cuda import redirect_cuda
from tilewright.spec import Case
from tilewright.workbench.check.problems.base import Problem, quiet
from tilewright.workbench.check.repeatable import same_outputs
from tilewright.worker import constants, tf32
from tilewright.worker.execute import flatten
from tilewright.worker.solutions import construct_model

TOLERANCE = {torch.float32: 1e-4}  # other dtypes: 1e-2; absolute and relative
NAMED_PARAMETERS = 4  # in a label
DEFINED = ("Model", "get_inputs", "get_init_inputs")
FUNCTIONS = ("get_inputs", "get_init_inputs")


class KernelBench(Problem):
    """A KernelBench file.

    Its sizes are the integers assigned at module level, and those written in `get_inputs` and `get_init_inputs`, which
    have their digits for a name.
    """

    kind = "kernelbench"

    def __init__(self, path: Path):
        source.require_python_file(path)
        self.path = path
        self._source = ast.parse(path.read_bytes())
        self._seed = secrets.randbits(31)  # for the parameters, which a solution draws from the same seed
        self._modules: dict[Case, types.ModuleType] = {}
        self._models: dict[tuple[str, bool], Any] = {}  # by device and width, of a Model that keeps no state
        self._is_stateless = False
        self._own_sizes = constants.sizes(self._source)
        self._literals = constants.literals(self._source, FUNCTIONS)
        case = Case((*self._own_sizes.items(), *self._literals.items()))
        with tf32.allowed(tf32.Tf32()):
            module = self._module(case)
            self.tf32 = tf32.current()
        for name in DEFINED:
            if not callable(getattr(module, name, None)):
                raise BadProblem(path, f"it defines no {name}")
        super().__init__(path, [case])

    def _use(self, cases: Sequence[Case]) -> None:
        if len(cases) > 1:
            raise BadProblem(self.path, "its sizes decide how Model is constructed, so give one --case at a time")
        super()._use(cases)

    def solution(self, device: str, case: Case | None = None) -> dict[str, Any]:
        checked = self.op.check[0]
        case = case or checked
        leaves, tree = pytree.tree_flatten(self._arguments(case))
        for leaf in leaves:
            if not isinstance(leaf, int | float | str | bool | None):
                what = f"Model is constructed with a {type(leaf).__name__}, which cannot be sent to another process"
                raise BadProblem(self.path, what)
        self._is_stateless = not self._keeps_state(checked, device)
        if constant := self._constant_parameters(checked):
            label = f"not told from constants: {', '.join(constant)}"
            self.labels += [] if label in self.labels else [label]
        changed = {name: value for name, value in self._own_sizes.items() if case[name] != value}
        return {
            "kind": self.kind,
            "init": leaves,
            "init_tree": pytree.treespec_dumps(tree),
            "seed": self._seed,
            "new_model_per_call": not self._is_stateless,
            "sizes": {name: [value, case[name]] for name, value in changed.items()},
            **self._common(device),
            "folders": [],
        }

    def own_check(self, args: Sequence[Any], outputs: list[Tensor]) -> str | None:
        expected = self._results(args, flatten(self._reference(*args)))
        for got, wanted in zip(self._results(args, outputs), expected, strict=True):
            tolerance = TOLERANCE.get(wanted.dtype, 1e-2)
            if got.shape != wanted.shape or not torch.allclose(got.to(wanted), wanted, rtol=tolerance, atol=tolerance):
                return f"not within {tolerance:g} of the reference"
        return None

    def _module(self, case: Case) -> types.ModuleType:
        """Return the problem's module with the sizes of the case."""
        case = case.with_dtype("")
        if case not in self._modules:
            tree = copy.deepcopy(self._source)
            constants.replace_sizes(tree, {name: case[name] for name in self._own_sizes})
            constants.replace_literals(tree, FUNCTIONS, {name: case[name] for name in self._literals})  # type: ignore[misc]
            module = types.ModuleType(f"_tilewright_problem_{self.path.stem}")
            module.__file__ = str(self.path)
            sys.modules[module.__name__] = module
            sys.path.append(str(self.path.parent))
            try:
                with quiet():
                    exec(
                        compile(ast.fix_missing_locations(tree), str(self.path), "exec", dont_inherit=True),
                        vars(module),
                    )
            except ModuleNotFoundError as missing:
                raise FileNeedsPackage(self.path, missing.name) from missing
            except (Exception, SystemExit) as error:
                raise BadProblem(self.path, f"it does not load ({first_line(error)})") from error
            finally:
                sys.path.remove(str(self.path.parent))
            self._modules[case] = module
        return self._modules[case]

    def _arguments(self, case: Case) -> Any:
        torch.manual_seed(self._seed)
        module = self._module(case)
        try:
            return module.get_init_inputs()
        except Exception as error:
            raise BadProblem(self.path, f"get_init_inputs fails ({first_line(error)})") from error

    def _data(self, case: Case, seed: int) -> Any:
        return self._module(case).get_inputs()

    def _callable(self, case: Case, device: str, wide: bool) -> Callable[[Any], Any]:
        model = self._model(case, device, wide)
        return lambda data: model(*data)

    def _parameter_elements(self, case: Case) -> int:
        model = self._model(case, "meta")
        parts = [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else []
        return sum(part.numel() for part in parts)

    def _constant_parameters(self, case: Case) -> list[str]:
        """Return the parameters whose elements are all equal, as weight and bias of a norm: a solution may ignore them.

        Each comes with its value.
        """
        model = self._model(case, "cpu")
        named = model.named_parameters() if isinstance(model, torch.nn.Module) else []
        found = []
        for name, parameter in named:
            values = parameter.detach().reshape(-1)
            if values.numel() and bool((values == values[0]).all()) and (values.numel() > 1 or values[0] in (0, 1)):
                found.append(f"{name} = {float(values[0]):g}")
        more = len(found) - NAMED_PARAMETERS
        return [*found[:NAMED_PARAMETERS], f"{more} more"] if more > 0 else found

    def _model(self, case: Case, device: str, wide: bool = False) -> Any:
        """Return a Model; a new one each time if a call may have changed its state."""
        kept = self._is_stateless and device != "meta" and case.point == self.op.check[0].point
        if kept and (device, wide) in self._models:
            return self._models[device, wide]
        try:
            with _disable_current_modes():  # drawing the parameters is no work of the operation
                model = construct_model(self._module(case).Model, self._arguments(case), self._seed, device)
                model = model.double() if wide else model
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            raise BadProblem(self.path, f"Model cannot be constructed ({first_line(error)})") from error
        if kept:
            self._models[device, wide] = model
        return model

    def _keeps_state(self, case: Case, device: str) -> bool:
        """Return whether a second call of one Model returns other outputs. Refuse a Model that draws random numbers."""
        self._is_stateless = False
        arguments = self.op.make(case, device)

        def prepare() -> Any:
            model = self._model(case, device)
            return lambda: model(*self._inputs(arguments))

        with redirect_cuda(device), torch.no_grad(), tf32.allowed(self.tf32):
            self._require_repeatable(prepare)
            call = prepare()
            return not same_outputs(flatten(call()), flatten(call()))
