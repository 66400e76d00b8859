"""The build for Hugging Face's `kernels`: loaded as it loads builds, beside this package and without it."""

import ast
import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import assert_one_line, in_process
from torch import nn

import tilewright as tw
from tilewright import hardware
from tilewright.workbench import hub

LAYERS = {
    "RMSNorm": {"weight": torch.randn(24), "variance_epsilon": 1e-5},
    "LayerNorm": {"normalized_shape": (24,), "weight": torch.randn(24), "bias": torch.randn(24), "eps": 1e-5},
    "SwiGLUMLP": {
        "gate_proj": nn.Linear(24, 40),
        "up_proj": nn.Linear(24, 40),
        "down_proj": nn.Linear(40, 24),
    },
    "SiLU": {"inplace": False},
    "GELU": {"approximate": "tanh"},
}
PLAIN = {
    "RMSNorm": lambda m, x: nn.functional.rms_norm(x, (24,), m.weight, m.variance_epsilon),
    "LayerNorm": lambda m, x: nn.functional.layer_norm(x, (24,), m.weight, m.bias, m.eps),
    "SwiGLUMLP": lambda m, x: m.down_proj(nn.functional.silu(m.gate_proj(x)) * m.up_proj(x)),
    "SiLU": lambda m, x: nn.functional.silu(x),
    "GELU": lambda m, x: nn.functional.gelu(x, approximate="tanh"),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    return hub.build(tmp_path_factory.mktemp("repository"), "universal")


@pytest.fixture(scope="module")
def loaded(built):
    """The module of the build, imported by its path under the name in its metadata, as `kernels` does."""
    name = json.loads((built / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, built / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for one in [one for one in sys.modules if one.partition(".")[0] == name]:
        del sys.modules[one]


def made(loaded, name):
    """Return one of the layers with the attributes of the module that it would replace."""
    layer = getattr(loaded.layers, name)()
    for attribute, value in LAYERS[name].items():
        setattr(layer, attribute, nn.Parameter(value) if isinstance(value, torch.Tensor) else value)
    return layer


@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_what_they_replace_with_kernels_of_the_build(loaded, name, monkeypatch):
    for module in [module for one, module in sys.modules.items() if one.startswith(f"{loaded.__name__}.ops")]:
        if hasattr(module, "CROSSOVER"):
            always = type(module.CROSSOVER)(f"test {module.__name__}", lambda gpu: 0.0)
            monkeypatch.setattr(module, "CROSSOVER", always)
    layer = made(loaded, name)
    x = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(0)).requires_grad_()
    if hardware.has_gpu():
        y = layer(x)
    else:
        with tw.interpret() as run:
            y = layer(x)
        assert run.launches
    torch.testing.assert_close(y, PLAIN[name](layer, x), rtol=1e-4, atol=1e-5)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    (expected,) = torch.autograd.grad(PLAIN[name](layer, x).square().sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_stateless_and_say_what_they_can_do(loaded, name):
    cls = getattr(loaded.layers, name)
    assert cls.has_backward
    assert cls.can_torch_compile
    assert cls.__init__ is nn.Module.__init__
    own = {member for member, _ in inspect.getmembers(cls)} - {member for member, _ in inspect.getmembers(nn.Module)}
    assert own == {"has_backward", "can_torch_compile"}


def test_operators_of_the_build_have_a_namespace_of_their_own(loaded):
    assert tw.rms_norm is not loaded.rms_norm
    ours, theirs = torch.ops.tilewright.normalize.default, getattr(torch.ops, loaded.__name__).normalize.default
    assert str(ours) == "tilewright.normalize.default"
    assert str(theirs) == f"{loaded.__name__}.normalize.default"


def test_every_import_is_relative_or_of_torch_and_triton(built):
    for path in built.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:  # at module level: what loading needs
            names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                top = name.partition(".")[0]
                assert top in {"torch", "triton"} | sys.stdlib_module_names, f"{path.name}: {name}"


def test_a_build_works_where_this_package_is_not_installed(built):
    code = (
        "import sys, torch, importlib.util as u; sys.modules['tilewright'] = sys.modules['pynvml'] = None\n"
        f"s = u.spec_from_file_location('some_build', {str(built / '__init__.py')!r}); m = u.module_from_spec(s)\n"
        "sys.modules['some_build'] = m; s.loader.exec_module(m)\n"
        "x = torch.randn(4, 8); print(torch.equal(m.silu(x), torch.nn.functional.silu(x)), m.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"True {tw.__version__}\n", "")


def test_the_kernels_package_loads_it(built, monkeypatch):
    monkeypatch.delitem(sys.modules, "kernels", raising=False)  # tests/interpreter/kernels.py
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not Path(folder, "kernels.py").is_file()])
    kernels = pytest.importorskip("kernels", reason="needs Hugging Face's package kernels")
    monkeypatch.setattr(torch.version, "cuda", "13.0")  # by which the package chooses among the builds of a folder
    module = kernels.get_local_kernel(built.parent.parent)
    x = torch.randn(4, 8)
    torch.testing.assert_close(module.layers.SiLU.forward(nn.SiLU(), x), nn.functional.silu(x))


def test_the_command(tmp_path, monkeypatch, capsys):
    call = in_process("kernels", monkeypatch, capsys)
    assert call("build", tmp_path).returncode == 0
    folder = tmp_path / "build" / "torch-cuda"
    about = json.loads((folder / "metadata.json").read_text())
    assert (about["name"], about["python-depends"], about["backend"]) == ("tilewright", [], {"type": "cuda"})
    (folder / "stale.py").touch()
    assert call("build", tmp_path).returncode == 0
    assert not (folder / "stale.py").exists()
    (folder / "metadata.json").unlink()
    assert_one_line(call("build", tmp_path), 2, "is not a build of ours")
    assert_one_line(call("build", tmp_path, "--backend", "metal"), 2, "'metal' is not one of cuda")
    (tmp_path / "file").touch()
    assert_one_line(call("build", tmp_path / "file"), 2, "cannot write")
