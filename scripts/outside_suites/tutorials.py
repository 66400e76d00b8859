"""Triton's tutorials: their functions on small inputs, against PyTorch."""

from __future__ import annotations

import ast
import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import triton

from outside_suites.cases import Case, Mismatch, Missing, assert_close, interpreted

SUITE = "tutorials"
SAMPLE = {"01-vector-add add"}
HALF = 2e-3  # tolerance of fp16 results
PRINTING = ("tabulate",)  # packages that only the examples call

CALLS: dict[str, tuple[str, Callable[[Any], None]]] = {}


def call(tutorial: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Register a check of the functions of a tutorial."""

    def register(fn: Callable[[Any], None]) -> Callable[[Any], None]:
        CALLS[f"{tutorial} {fn.__name__}"] = tutorial, fn
        return fn

    return register


def cases(path: Path | None) -> Iterator[Case]:
    folder = (path or Path()) / "python" / "tutorials"
    if path is None or not folder.is_dir():
        raise Missing(
            "tutorials: git clone --branch v3.6.0 https://github.com/triton-lang/triton, and name it with --triton PATH"
        )
    for name, (tutorial, fn) in CALLS.items():
        yield Case(SUITE, name, lambda f=fn, t=tutorial: _check(f, folder / f"{t}.py"))


def _check(fn: Callable[[Any], None], path: Path) -> None:
    with interpreted():
        module = definitions(path)
    with interpreted() as run:
        torch.manual_seed(0)
        fn(module)
    if not run.launches:
        raise RuntimeError("no kernel was launched")


def definitions(path: Path) -> types.ModuleType:
    """Load a tutorial without its benchmarks and examples: its definitions, and the constants that they use."""
    tree = ast.parse(path.read_text(), str(path))
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    for name in PRINTING:
        sys.modules.setdefault(name, types.ModuleType(name))
    used = {n.id for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.ClassDef) for n in _names(f)}
    for statement in tree.body:
        if _is_definition(statement, used):
            code = compile(ast.Module([statement], []), str(path), "exec")
            with contextlib.suppress(NameError):  # it uses the result of an example
                exec(code, vars(module))
    return module


def _names(tree: ast.AST) -> Iterator[ast.Name]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Name))


def _is_definition(statement: ast.stmt, used: set[str]) -> bool:
    if isinstance(statement, ast.FunctionDef):  # benchmarks ask for a GPU when they are decorated
        return not any("perf_report" in ast.unparse(decorator) for decorator in statement.decorator_list)
    if isinstance(statement, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id in used for t in statement.targets) or _is_alias(statement)
    if isinstance(statement, ast.If):
        test = ast.unparse(statement.test)
        inner = [*statement.body, *statement.orelse]
        return "is_available" not in test and all(isinstance(s, ast.Assign | ast.If) for s in inner)
    return isinstance(statement, ast.Import | ast.ImportFrom | ast.ClassDef)


def _is_alias(statement: ast.Assign) -> bool:
    return isinstance(statement.value, ast.Attribute)  # attention = _attention.apply


def _halves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape).half() for shape in shapes]


@call("01-vector-add")
def add(module: Any) -> None:
    x, y = torch.rand(1, 98432)[0], torch.rand(98432)
    assert_close("x + y", module.add(x, y), x + y, 0)


@call("02-fused-softmax")
def softmax(module: Any) -> None:
    x = torch.randn(183, 781)
    assert_close("softmax", module.softmax(x), x.softmax(-1), 1e-6)


@call("03-matrix-multiplication")
def matmul(module: Any) -> None:
    a, b = _halves((130, 200), (200, 90))
    assert_close("a @ b", module.matmul(a, b), a.float() @ b.float(), HALF)


@call("03-matrix-multiplication")
def matmul_leaky_relu(module: Any) -> None:
    a, b = _halves((130, 200), (200, 90))
    expected = F.leaky_relu(a.float() @ b.float(), 0.01)
    assert_close("leaky_relu(a @ b)", module.matmul(a, b, activation="leaky_relu"), expected, HALF)


@call("03-matrix-multiplication")
def matmul_fp8(module: Any) -> None:
    a, b = (x.to(torch.float8_e5m2) for x in _halves((128, 192), (96, 192)))
    assert_close("a @ b", module.matmul(a, b.T), a.float() @ b.float().T, HALF)


@call("04-low-memory-dropout")
def dropout(module: Any) -> None:
    x, keep = torch.randn(1000), torch.rand(1000) > 0.5
    assert_close("dropout", module.dropout(x, keep.to(torch.int32), 0.5), torch.where(keep, x / 0.5, 0.0), 1e-6)


@call("04-low-memory-dropout")
def seeded_dropout(module: Any) -> None:
    x = torch.rand(1000) + 1
    first, again, other = (module.seeded_dropout(x, p=0.25, seed=seed) for seed in (123, 123, 512))
    if not torch.equal(first, again) or torch.equal(first, other):
        raise Mismatch("the seed does not determine what is dropped")
    kept = first != 0
    if not 0.65 < kept.float().mean() < 0.85:
        raise Mismatch(f"{kept.float().mean():.0%} are kept, not about 75%")
    assert_close("what is kept", first[kept], x[kept] / 0.75, 1e-6)


@call("05-layer-norm")
def layer_norm(module: Any) -> None:
    x, dy = _halves((115, 819), (115, 819))
    w, b = (torch.rand(819).half() for _ in range(2))
    leaves = [t.requires_grad_() for t in (x, w, b)]
    y = module.layer_norm(x, (819,), w, b, 1e-5)
    y.backward(dy)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected = F.layer_norm(wide[0], (819,), wide[1], wide[2], 1e-5)
    expected.backward(dy.double())
    assert_close("y", y.detach(), expected.detach(), HALF)
    for name, found, want in zip(("dx", "dw", "db"), leaves, wide, strict=True):
        assert_close(name, found.grad, want.grad, HALF)


@call("06-fused-attention")
def attention(module: Any) -> None:  # its backward pass is right only with a causal mask, as its own test says
    q, k, v = _halves(*[(1, 2, 256, 64)] * 3)
    expected = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), scale=0.5)
    assert_close("o", module.attention(q, k, v, False, 0.5, False), expected, HALF)


@call("06-fused-attention")
def attention_causal(module: Any) -> None:
    q, k, v, do = _halves(*[(1, 2, 256, 64)] * 4)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    o = module.attention(q, k, v, True, 0.5, False)
    o.backward(do)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected = F.scaled_dot_product_attention(*wide, is_causal=True, scale=0.5)
    expected.backward(do.double())
    assert_close("o", o.detach(), expected.detach(), HALF)
    for name, found, want in zip(("dq", "dk", "dv"), leaves, wide, strict=True):
        assert_close(name, found.grad, want.grad, 5 * HALF)


@call("07-extern-functions")
def asin(module: Any) -> None:
    x, y = torch.rand(5000), torch.empty(5000)
    module.asin_kernel[(triton.cdiv(5000, 1024),)](x, y, 5000, BLOCK_SIZE=1024)
    assert_close("asin(x)", y, x.asin(), 1e-6)


def _groups() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    sizes = ((256, 128, 64), (128, 128, 128), (128, 256, 192))
    return [torch.rand(m, k).half() for m, _, k in sizes], [torch.rand(k, n).half() for _, n, k in sizes]


def _assert_products(found: list[torch.Tensor], a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for i, (c, x, y) in enumerate(zip(found, a, b, strict=True)):
        assert_close(f"product {i}", c, x.float() @ y.float(), HALF)


@call("08-grouped-gemm")
def grouped_gemm(module: Any) -> None:
    a, b = _groups()
    _assert_products(module.group_gemm_fn(a, b), a, b)


@call("08-grouped-gemm")
def grouped_gemm_tma(module: Any) -> None:
    a, b = _groups()
    _assert_products(module.group_gemm_tma_fn(a, [x.T.contiguous() for x in b]), a, b)


def _product(fn: Callable[..., torch.Tensor], transposed: bool, *options: Any) -> None:
    a, b = _halves((256, 192), (192, 384))
    assert_close("a @ b", fn(a, b.T.contiguous() if transposed else b, *options), a.float() @ b.float(), HALF)


@call("09-persistent-matmul")
def naive_matmul(module: Any) -> None:
    _product(module.matmul, False)


@call("09-persistent-matmul")
def matmul_persistent(module: Any) -> None:
    _product(module.matmul_persistent, False)


@call("09-persistent-matmul")
def matmul_tma(module: Any) -> None:
    _product(module.matmul_tma, True, False)


@call("09-persistent-matmul")
def matmul_tma_persistent(module: Any) -> None:
    _product(module.matmul_tma_persistent, True, False)


@call("09-persistent-matmul")
def matmul_descriptor_persistent(module: Any) -> None:
    _product(module.matmul_descriptor_persistent, True, False)


def _scaled(kind: str) -> Callable[[Any], None]:
    def check(module: Any) -> None:
        module.validate_block_scaled(256, 256, 512, block_scale_type=kind)

    check.__name__ = f"block_scaled_{kind}"
    return check


for _kind in ("nvfp4", "mxfp4", "mxfp8", "mixed"):
    call("10-block-scaled-matmul")(_scaled(_kind))


@call("11-programmatic-dependent-launch")
def add_with_pdl(module: Any) -> None:
    x, y = torch.rand(5000), torch.rand(5000)
    assert_close("x + y", module.add(x, y), x + y, 0)
