"""flashinfer-bench definitions: a JSON file with axes, inputs, outputs and a reference; workloads give the sizes.

The dataset keeps `definitions/…/NAME.json` beside `workloads/…/NAME.jsonl`. A solution is a JSON file with its sources,
or a Python file that defines `run`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright import source
from tilewright.errors import BadProblem, FileBroken, FileNeedsPackage, first_line
from tilewright.spec import Case
from tilewright.workbench.check.problems.base import Problem, quiet
from tilewright.worker import tf32
from tilewright.worker.execute import flatten
from tilewright.worker.solutions import named_outputs

KEYS = {"name", "axes", "inputs", "outputs", "reference"}
LANGUAGES = ("python", "triton")
TOLERANCE = 1e-2  # its own check: an element is off if its error exceeds this both absolutely and relatively
INTEGERS = {"int8": 128, "int16": 1024, "int32": 1024, "int64": 1024}  # random ones lie in [-n, n)
FP8_LIMIT = 2.0
WORKLOAD = "workload"  # the name in a case that tells workloads of equal sizes apart


class Definition(Problem):
    """A flashinfer-bench definition. Its cases are its workloads; all axes are sizes."""

    kind = "flashinfer-bench"

    def __init__(self, path: Path):
        self.path = path
        self._temporary: list[Path] = []
        self._content = content = _read(path)
        try:
            self._constants = {n: axis["value"] for n, axis in content["axes"].items() if axis["type"] == "const"}
            self._inputs_of = {name: _spec(spec) for name, spec in content["inputs"].items()}
            self._outputs_of = {name: _spec(spec) for name, spec in content["outputs"].items()}
            workloads = [one["workload"] for one in _workloads(path, content["name"])]
            self._workloads = {self._point(one, workloads): one["inputs"] for one in workloads}
        except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
            raise BadProblem(path, f"it is no definition with workloads ({first_line(error)})") from None
        if not self._workloads:
            name = f"{content['name']}.jsonl"
            raise BadProblem(path, f"it has no workloads; put {name} into the folder 'workloads' beside 'definitions'")
        with tf32.allowed(tf32.Tf32()):
            self._run = self._compiled(content["reference"])
            self.tf32 = tf32.current()
        super().__init__(path, [Case(point) for point in self._workloads])

    def solution(self, device: str, case: Case | None = None) -> dict[str, Any]:
        checked = self.op.check[0]
        *leaves, about = self.op.make(checked, device)

        def prepare() -> Any:
            copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return lambda: self._call(copies, about)

        self._require_repeatable(prepare)
        self._require_declared_outputs(flatten(self._call([*leaves], about)), checked)
        specs = self._outputs_of.items()
        outputs = {name: [shape, str(dtype).removeprefix("torch.")] for name, (shape, dtype) in specs}
        return {"kind": self.kind, "folders": [], "outputs": outputs} | self._common(device)

    def unpack(self, path: Path) -> tuple[Path, dict[str, Any]]:
        if path.suffix != ".json":
            return super().unpack(path)
        try:
            content = json.loads(path.read_text())
            spec, sources = content["spec"], {one["path"]: one["content"].encode() for one in content["sources"]}
            language, (entry, _, function) = spec["language"], spec["entry_point"].partition("::")
            definition, fills = content["definition"], spec.get("destination_passing_style", True)
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise FileBroken(path, None, f"no flashinfer-bench solution ({first_line(error)})") from None
        if definition != self._content["name"]:
            raise FileBroken(path, None, f"it solves {definition}, not {self._content['name']}")
        if language not in LANGUAGES:
            raise FileBroken(path, None, f"it is written in {language}; only {' and '.join(LANGUAGES)} can be checked")
        if not function:
            raise FileBroken(path, None, f"its entry_point '{entry}' is not FILE::FUNCTION")
        if entry not in sources or any(Path(name).is_absolute() or ".." in Path(name).parts for name in sources):
            raise FileBroken(path, None, f"its sources lack {entry}, or lie outside their folder")
        folder = Path(tempfile.mkdtemp(prefix="tilewright-solution-"))
        self._temporary.append(folder)
        for name, text in sources.items():
            try:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(text)
            except (OSError, ValueError) as error:
                raise FileBroken(path, None, f"its source {name!r} cannot be written ({first_line(error)})") from None
        source.require_python_file(folder / entry)
        return folder / entry, {"folders": [str(folder)], "entry": function, "fills_outputs": bool(fills)}

    def own_check(self, args: Sequence[Any], outputs: list[Tensor]) -> str | None:
        expected = self._results(args, flatten(self._reference(*args)))
        for name, got, wanted in zip(self._outputs_of, self._results(args, outputs), expected, strict=True):
            error = (got.double() - wanted.double()).abs()
            if bool((~got.double().isfinite()).any()):
                return f"{name} has infinities or NaN"
            if bool(((error > TOLERANCE) & (error > TOLERANCE * wanted.double().abs())).any()):
                return f"{name} is not within {TOLERANCE:g} of the reference"
        return None

    def close(self) -> None:
        for folder in self._temporary:
            shutil.rmtree(folder, ignore_errors=True)

    def _point(self, workload: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, Any], ...]:
        axes = {name: self._constants.get(name, workload["axes"].get(name)) for name in self._content["axes"]}
        if missing := [name for name, value in axes.items() if type(value) is not int]:
            raise ValueError(f"a workload gives no {missing[0]}")
        if missing := [name for name in self._inputs_of if name not in workload["inputs"]]:
            raise ValueError(f"a workload gives no {missing[0]}")
        differ = any(other["inputs"] != others[0]["inputs"] for other in others)
        return (*axes.items(), *([(WORKLOAD, str(workload["uuid"])[:8])] if differ else []))

    def _compiled(self, text: str) -> Callable[..., Any]:
        module = types.ModuleType(f"_tilewright_problem_{self.path.stem}")
        try:
            with quiet():
                exec(compile(text, f"{self.path}:reference", "exec", dont_inherit=True), vars(module))
            return vars(module)["run"]
        except ModuleNotFoundError as missing:
            raise FileNeedsPackage(self.path, missing.name) from missing
        except Exception as error:
            raise BadProblem(self.path, f"its reference does not load ({first_line(error)})") from error

    def _require_declared_outputs(self, outputs: Sequence[Tensor], case: Case) -> None:
        declared = [tuple(case[axis] for axis in shape or ()) for shape, _ in self._outputs_of.values()]
        returned = [tuple(output.shape) for output in outputs]
        if returned != declared:
            shapes = (" and ".join(map(str, found)) for found in (returned, declared))
            raise BadProblem(self.path, "its reference returns {}, but its outputs are {}".format(*shapes))

    def _data(self, case: Case, seed: int) -> Any:
        sizes: dict[str, Any] = dict(case.point)
        mark = sizes.get(WORKLOAD)
        point = next((p for p in self._workloads if dict(p).get(WORKLOAD) == mark), None)
        inputs = self._workloads[point] if point else next(iter(self._workloads.values()))
        return tuple(
            self._drawn_input(inputs[name], None if shape is None else [sizes[axis] for axis in shape], dtype)
            for name, (shape, dtype) in self._inputs_of.items()
        )

    def _drawn_input(self, how: Mapping[str, Any], shape: list[int] | None, dtype: torch.dtype) -> Any:
        if how["type"] == "scalar":
            return how["value"]
        if how["type"] == "safetensors":
            root = _root(self.path)
            found = read_safetensor(root / how["path"], how["tensor_key"])
            if list(found.shape) != shape:
                raise ValueError(f"{how['tensor_key']} has shape {list(found.shape)}, not {shape}")
            return found.to(torch.get_default_device())
        if how["type"] != "random":
            raise ValueError(f"{how['type']} is neither random, scalar nor safetensors")
        name = str(dtype).removeprefix("torch.")
        shape = shape or []
        if name == "bool":
            return torch.randint(0, 2, shape).bool()
        if limit := INTEGERS.get(name):
            return torch.randint(-limit, limit, shape, dtype=dtype)
        values = torch.randn(shape)
        return (values.clamp(-FP8_LIMIT, FP8_LIMIT) if dtype.itemsize == 1 else values).to(dtype)

    def _callable(self, case: Case, device: str, wide: bool) -> Callable[[Any], Any]:
        dtypes = {name: dtype for name, (_, dtype) in self._outputs_of.items()}

        def call(data: Any) -> Any:
            return named_outputs(self._run(*data), dtypes, device)

        return call


def is_definition(path: Path) -> bool:
    """Return whether a JSON file holds a flashinfer-bench definition."""
    try:
        return _read(path).keys() >= KEYS
    except (BadProblem, AttributeError):
        return False


def solves(path: Path) -> str | None:
    """Return the name of the definition that a JSON file solves."""
    try:
        content = _read(path)
        return content["definition"] if {"spec", "sources"} <= content.keys() else None
    except (BadProblem, AttributeError, KeyError):
        return None


def read_safetensor(path: Path, key: str) -> Tensor:
    """Return one tensor of a safetensors file: the length of a JSON header, the header, and the bytes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        about = json.loads(file.read(length))[key]
        start, end = about["data_offsets"]
        file.seek(8 + length + start)
        data = bytearray(file.read(end - start))
    dtype, shape = SAFETENSORS[about["dtype"]], about["shape"]
    if len(data) != dtype.itemsize * prod(shape):
        raise ValueError(f"{path} is too short")
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


SAFETENSORS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise BadProblem(path, f"it is no JSON file ({first_line(error)})") from None


def _spec(spec: Mapping[str, Any]) -> tuple[list[str] | None, torch.dtype]:
    dtype = getattr(torch, spec["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch computes nothing in {spec['dtype']}")
    return spec["shape"], dtype


def _root(path: Path) -> Path:
    """Return the folder that holds the folder `definitions`, or the file's own."""
    return next((parent.parent for parent in path.resolve().parents if parent.name == "definitions"), path.parent)


def _workloads(path: Path, name: str) -> Iterator[Any]:
    root = _root(path)
    files = [*(root / "workloads").rglob(f"{name}.jsonl"), path.with_suffix(".jsonl")]
    for file in (one for one in files if one.is_file()):
        yield from (json.loads(line) for line in file.read_text().splitlines() if line.strip())
