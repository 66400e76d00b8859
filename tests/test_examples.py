"""Every example runs on a machine without a GPU and does what its text says."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright import record
from tilewright.report import markdown

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


@pytest.fixture
def interpreter():
    """Override the suite's fixture: examples run as users run them, with torch's functions on a CPU."""


@pytest.fixture
def transformer(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("transformer")


def test_the_model_is_causal_and_its_loss_matches_torch(transformer):
    torch.manual_seed(0)
    model = transformer.Transformer(vocabulary=50)
    tokens = torch.randint(50, (2, 20))
    logits = model(tokens)
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 50
    torch.testing.assert_close(model(changed)[:, :10], logits[:, :10])
    assert not torch.allclose(model(changed)[:, 10:], logits[:, 10:])
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(model.loss(tokens), expected)


def test_the_model_computes_the_same_with_our_kernels(transformer):
    """Interpreted, the norms, the rotary embedding and SwiGLU run as Triton kernels instead of torch's functions."""
    import tilewright

    torch.manual_seed(0)
    model = transformer.Transformer(vocabulary=50, width=32, heads=2)
    tokens = torch.randint(50, (1, 8))
    by_torch = model(tokens)
    with torch.no_grad(), tilewright.interpret() as run:
        by_kernels = model(tokens)
    launched = {launch.kernel for launch in run.launches}
    assert any("norm" in name for name in launched), launched
    assert any("rope" in name for name in launched), launched
    assert any("gated" in name for name in launched), launched
    torch.testing.assert_close(by_kernels, by_torch, rtol=1e-4, atol=1e-4)


def test_training_lowers_the_loss(transformer):
    losses = importlib.import_module("train").train(25)
    assert losses[-1] < 0.6 * losses[0]


def test_loss_curves_with_and_without_are_alike(transformer, tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    example, path = importlib.import_module("loss_curve"), tmp_path / "curves.jsonl"
    monkeypatch.setattr(example, "BATCH", 4)
    monkeypatch.setattr(sys, "argv", ["loss_curve.py", "--steps", "12", "--device", "cpu", "--record", str(path)])
    example.main()
    (made,) = record.read(path).records
    original, ours = made["curves"]["original"], made["curves"]["tilewright"]
    assert [len(one) for one in (*original, *ours)] == [12] * 4
    assert all(one[-1] < 0.8 * one[0] for one in (*original, *ours))
    for a, b in zip(original, ours, strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    assert original[0] != original[1]
    assert f"{example.distance(*original):.4f} between two seeds" in capsys.readouterr().out
    page = markdown.fill("<!-- records: loss-curves -->\n<!-- end -->", [made])
    assert f"| CPU, float32 | {example.smooth(original[0])[0]:.3f}, {example.smooth(original[1])[0]:.3f} |" in page
    assert f"| {example.distance(*original):.4f} |" in page
    for given, message in ((["--steps", "0"], "at least 1"), (["--record", str(tmp_path)], "directory")):
        monkeypatch.setattr(sys, "argv", ["loss_curve.py", *given])
        with pytest.raises(SystemExit):
            example.main()
        assert message in capsys.readouterr().err


def test_perplexity_rises_as_bits_fall(transformer):
    found = importlib.import_module("low_bit").compare(30)
    error = {name: abs(value - found["float32"]) for name, value in found.items()}
    assert 3 < found["float32"] < 60
    assert error["int8"] < 0.002 * found["float32"]
    assert error["int8"] <= error["int4-g32"] <= 0.05 * found["float32"]
    assert error["int4"] < error["2:4"]


@pytest.mark.parametrize("interpreted", [False, True])
def test_text_from_a_paged_cache_is_that_of_eager_mode(interpreted, monkeypatch):
    """Prompt and text fill several pages, and three sequences share the first one."""
    import tilewright

    monkeypatch.syspath_prepend(str(EXAMPLES))
    generate = importlib.import_module("generate")
    torch.manual_seed(0)
    model = generate.Model(generate.Shape(layers=1), context=40)
    prompt, noise = torch.randint(64, (21,)), torch.randn(4, 3, 64)
    expected = generate.generate_eager(model, prompt, noise)
    with tilewright.interpret() if interpreted else contextlib.nullcontext() as run:
        assert torch.equal(generate.generate(model, prompt, noise), expected)
    assert len({tuple(text) for text in expected.tolist()}) == 3
    if run is not None:
        assert {"_append_fwd", "_decode_fwd"} < {launch.kernel for launch in run.launches}


def cells(notebook: Path) -> list[str]:
    content = json.loads(notebook.read_text())
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_the_notebook_finds_the_bug_and_proves_the_fixed_kernel(tmp_path, capsys):
    namespace: dict[str, Any] = {"__name__": "notebook"}
    for number, code in enumerate(cells(EXAMPLES / "prove_a_kernel.ipynb")):
        path = tmp_path / f"cell_{number}.py"  # Triton reads the source of a kernel from its file
        path.write_text(code)
        exec(compile(code, str(path), "exec"), namespace)
    printed = capsys.readouterr().out
    assert "out of bounds in _softmax_unmasked" in printed
    assert namespace["verdict"].verdict == "right"
    assert torch.equal(namespace["y"].argmax(-1), namespace["x"].argmax(-1))


def test_notebooks_hold_no_output():
    for notebook in EXAMPLES.glob("*.ipynb"):
        for cell in json.loads(notebook.read_text())["cells"]:
            assert not cell.get("outputs"), f"{notebook.name}: clear the outputs before committing"


def test_the_readme_lists_every_example():
    page = (EXAMPLES / "README.md").read_text()
    for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb"), *(EXAMPLES / "flaws").iterdir()):
        if path.suffix in (".py", ".cu", ".ipynb"):
            assert f"({path.relative_to(EXAMPLES)})" in page, f"examples/README.md does not link {path.name}"


@pytest.mark.slow
def test_the_scripts_run(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "transformer.py")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
