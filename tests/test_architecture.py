"""Imports follow the layers of the folder tree: ops and tools do not import each other."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tilewright
from tilewright import registry, source

PACKAGE = Path(source.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))

# The modules that each part may import; the longest matching prefix counts. `cli` may import everything.
MAY_IMPORT = {
    "errors": set(),
    "settings": set(),
    "sandbox": set(),
    "source": {"errors"},
    "arguments": {"errors", "spec"},
    "cost": set(),
    "files": set(),
    "counters": set(),
    "captured": set(),
    "inputs": {"errors"},
    "variants": {"spec"},
    "spec": {"captured", "cost", "errors", "source"},
    "hardware": {"errors", "__version__"},
    "driver": {"errors", "hardware"},
    "fake_cuda": set(),
    "registry": {"driver", "errors", "source", "spec"},
    "own": {"captured", "errors", "inputs", "registry", "spec", "variants", "worker"},
    "record": {"cost", "errors", "files", "settings", "source"},
    "timer": {"errors"},
    "interpreter": {"driver", "errors", "interpreter"},
    "worker": {"errors", "fake_cuda", "interpreter", "registry", "sandbox", "settings", "source", "timer", "worker"},
    "worker.process": {"settings"},
    "runtime": {"errors", "files", "hardware", "runtime", "settings"},
    "ops": {"errors", "ops", "runtime", "spec"},
    "models": {"models", "ops"},
    "serving": {"ops", "serving"},
    "peers": set(),
    "workbench": set(),
    "workbench.fingerprints": {"hardware", "record", "registry", "settings", "source", "spec", "workbench.inspect"},
    "workbench.check": {
        "errors",
        "fake_cuda",
        "registry",
        "sandbox",
        "source",
        "spec",
        "variants",
        "worker",
        "workbench.check",
    },
    "workbench.audit": {
        "cost",
        "errors",
        "fake_cuda",
        "hardware",
        "inputs",
        "interpreter",
        "own",
        "registry",
        "spec",
        "workbench.audit",
    },
    "workbench.inspect": {
        "driver",
        "errors",
        "files",
        "hardware",
        "runtime.cuda",
        "settings",
        "spec",
        "workbench.inspect",
        "worker",
    },
    "workbench.profile": {
        "cost",
        "counters",
        "errors",
        "registry",
        "workbench.audit.inputs",
        "workbench.audit.nsight",
        "workbench.profile",
        "worker",
    },
    "workbench.explain": {
        "cost",
        "counters",
        "errors",
        "hardware",
        "interpreter",
        "record",
        "registry",
        "source",
        "spec",
        "workbench.audit",
        "workbench.explain",
        "workbench.inspect",
        "worker",
    },
    "workbench.hub": {"__version__", "errors", "source"},
    "workbench.train": {
        "cost",
        "errors",
        "hardware",
        "models",
        "record",
        "source",
        "spec",
        "workbench.bench.intervals",
        "workbench.train",
    },
    "workbench.tune": {"errors", "runtime.configs", "runtime.crossovers", "spec", "timer", "workbench.check", "worker"},
    "workbench.bench": {
        "errors",
        "files",
        "hardware",
        "record",
        "registry",
        "runtime.crossovers",
        "runtime.trace",
        "settings",
        "source",
        "spec",
        "timer",
        "workbench.bench",
        "workbench.check",
        "workbench.inspect",
        "worker",
    },
    "arena": {
        "arena",
        "cost",
        "errors",
        "hardware",
        "own",
        "record",
        "registry",
        "sandbox",
        "settings",
        "source",
        "spec",
        "timer",
        "workbench.bench",
        "workbench.check",
        "workbench.explain",
        "workbench.inspect.fake_gpu",
        "worker",
    },
    "report": {
        "cost",
        "counters",
        "errors",
        "hardware",
        "interpreter",
        "record",
        "source",
        "spec",
        "workbench.audit",
        "workbench.check",
        "workbench.explain",
        "workbench.inspect",
        "workbench.profile",
        "workbench.train",
        "report",
    },
    "agents": {
        "__version__",
        "agents",
        "arena",
        "arguments",
        "errors",
        "hardware",
        "record",
        "registry",
        "settings",
        "source",
        "spec",
        "timer",
        "workbench",
        "worker",
    },
    "flash_attn": {"ops"},
    "pytest_plugin": {"interpreter"},
    "testing": {"captured", "registry", "spec", "variants", "workbench.check", "worker"},
    "notebook": {
        "captured",
        "errors",
        "hardware",
        "spec",
        "timer",
        "variants",
        "workbench.bench",
        "workbench.check",
        "worker",
    },
    "__init__": {"source"},
    "__main__": {"cli"},
}


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.ImportFrom) or node.level == 0, (
            "imports must be absolute for this test to see them"
        )
        if isinstance(node, ast.ImportFrom) and node.module == "tilewright":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tilewright."):
            found.add(node.module.removeprefix("tilewright."))
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("tilewright.") for a in node.names if a.name.startswith("tilewright.")}
    return found


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_imports_point_one_way(path):
    name = _name(path)
    if name.startswith("cli"):
        return
    owner = max((key for key in MAY_IMPORT if f"{name}.".startswith(f"{key}.")), key=len, default=None)
    assert owner is not None, f"{name} has no entry in MAY_IMPORT: add one"
    for imported in _imports(path):
        allowed = any(f"{imported}.".startswith(f"{ok}.") for ok in MAY_IMPORT[owner])
        assert allowed, f"{name} may not import {imported}"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_only_settings_reads_the_environment(path):
    if _name(path) == "settings":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in ("environ", "getenv", "putenv"), f"{path.name}, line {node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            assert not {alias.name for alias in node.names} & {"environ", "getenv"}, f"{path.name}, line {node.lineno}"


def test_every_op_has_a_test_file():
    tests = {path.stem.removeprefix("test_") for path in (Path(__file__).parent / "ops").rglob("test_*.py")}
    assert set(source.op_files()) == tests


@pytest.mark.parametrize("name", source.op_files())
def test_reading_an_op_as_text_finds_the_kernels_that_importing_it_registers(name):
    text = source.read(source.op_files()[name])
    assert text.summary.endswith(".")
    op = registry.load(name)
    assert text.kernels == [*op.kernels, *registry.shipped(op)]


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)


def test_importing_tilewright_loads_no_torch_and_prints_nothing():
    done = _python("import sys, tilewright; assert 'torch' not in sys.modules; tilewright.__version__")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_dir_lists_public_names_once_before_and_after_first_use():
    assert "softmax" in dir(tilewright)
    assert tilewright.softmax is tilewright.softmax
    assert len(dir(tilewright)) == len({*dir(tilewright)})


def test_importing_every_op_uses_no_gpu_compiles_nothing_and_loads_no_compiler():
    ops = "; ".join(f"import {source.module_name(path)}" for path in source.op_files().values())
    done = _python(
        f"import subprocess, sys, torch; subprocess.Popen = None; {ops}; "
        "assert not torch.cuda.is_initialized(); assert not {'numba', 'cuda.core', 'torch._dynamo'} & set(sys.modules)"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("command", ["--help", "--version", "ops", "bench --help", "roofline --help", "mcp --help"])
def test_light_commands_need_no_torch(command):
    done = _python(
        "import sys; from tilewright.cli import main\n"
        f"sys.argv = ['tilewright', *{command.split()!r}]\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
