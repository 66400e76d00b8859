"""Operations in users' files."""

import textwrap

import pytest
import torch

from tilewright import registry
from tilewright.errors import BadReference, FileBroken, NoInputs, NoReference, UnknownFunction, WrongInputs
from tilewright.own import kernels_of, load_operation
from tilewright.spec import Cost
from tilewright.workbench.check import OWN_INPUTS_ONLY, check
from tilewright.workbench.check.cases import CheckCase
from tilewright.workbench.check.expected import ReferenceRuns
from tilewright.workbench.check.judge import InProcess, Judge


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "mine.py"):
        path = tmp_path / name
        path.write_text("import torch\n" + textwrap.dedent(text))
        return path

    return write


IDENTITY = "def reference(x): return x\n"
SCALED = """
from tilewright.spec import Cost

def reference(x, weight, eps):
    return x * weight + eps

def inputs(draw):
    return draw.randn("M", "N"), draw.randn("N"), 0.5

cases = [{"M": 3, "N": 7}, {"M": 37, "N": 81}]
batch = "M"

def cost(x, weight, eps):
    return Cost(x.nbytes + weight.nbytes, x.nbytes)
"""


def verdict(path, depth="quick", seed=0, **given):
    op = load_operation(path, **given)
    (found,) = check(op, kernels_of(op), device="cpu", depth=depth, seed=seed)
    return found


def test_a_file_defines_a_whole_operation(file):
    op = load_operation(file(SCALED + "def scaled(x, weight, eps):\n    return eps + weight * x\n"))
    assert [str(case) for case in op.check] == ["M=3,N=7", "M=37,N=81"]
    assert (op.name, op.batch, op.dtypes, op.bench_dtypes) == (
        "mine.py",
        "M",
        ("float32", "float16", "bfloat16"),
        ("bfloat16",),
    )
    assert op.cost(*op.make(op.check[0], "meta")) == Cost(4 * (21 + 7), 4 * 21)
    assert op.backward_cost is not None
    assert [*op.kernels] == ["eager", "compile", "scaled"]
    assert "liger" not in registry.named(op)


def test_kernels_are_the_functions_that_lead_to_a_triton_kernel(file):
    text = """
    import triton

    @triton.jit
    def _copy(x, y, B: triton.language.constexpr):
        pass

    def launch(x):
        _copy[(1,)](x, x, B=1)
        return x

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return launch(x)

    def differentiable(x):
        return Copy.apply(x)

    def other(x):
        return (lambda: _copy[(1,)](x, x, B=1))()

    def twice(x):
        return 2 * x

    def reference(x):
        return twice(x)
    """
    op = load_operation(file(text), inputs=["3x4"])
    assert [kernel.name for kernel in kernels_of(op)] == ["differentiable", "other"]
    assert {kernel.language for kernel in kernels_of(op)} == {"triton"}
    assert [kernel.name for kernel in kernels_of(load_operation(file(text), inputs=["3x4"], function="launch"))] == [
        "launch"
    ]


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("return eps + weight * x", "right"),
        ("return eps + weight * x.bfloat16().to(x.dtype)", "wrong"),
        ("return weight * x", "wrong"),
    ],
)
def test_a_kernel_is_judged_by_the_reference_beside_it(file, kernel, expected):
    found = verdict(file(SCALED + f"def scaled(x, weight, eps):\n    {kernel}\n"))
    assert found.verdict == expected, found


def test_arguments_on_the_command_line_are_the_case(file):
    path = file("""
    def truth(x, shape, flag, mode):
        assert (shape, flag, mode) == ((7,), None, "fast")
        return x.double().sin().to(x.dtype)

    def mine(x, shape, flag, mode):
        assert isinstance(shape, tuple)
        return x.sin()
    """)
    given = ["5x7:bf16", "(7,)", "None", "fast"]
    found = verdict(path, reference="truth", inputs=given, depth="default")
    assert found.right, found
    assert "not told from constants: mode = fast" in found.labels
    assert found.labels[-1] == "at one size"
    assert found.cases[0].case == "x=5x7:bf16,shape=(7,),flag=None,mode=fast"
    assert {"(large)", "(transposed)", "(negated)", "(permuted)"} <= {
        case.case.rpartition(" ")[2] for case in found.cases
    }


@pytest.mark.parametrize(
    ("text", "expected", "reason"),
    [
        ("reference = torch.relu\ndef inputs(): return torch.rand(9, 70)\n"
         "def f(x): return x.clone()", OWN_INPUTS_ONLY, "random signs"),
        ("reference = torch.zeros_like\ndef inputs(): return torch.rand(9, 70)\n"
         "def f(x): return x - x", "right", "always returns 0"),
        ("reference = torch.nn.Linear(8, 3)\ndef inputs(draw): return draw.randn(9, 8, dtype=torch.float32)\n"
         "W, b = reference.weight.detach(), reference.bias.detach()\n"
         "def f(x): return torch.addmm(b, x, W.T)", "right", ""),
        ("def reference(x):\n    x = x.sigmoid()\n    for _ in range(120): x = 3.9 * x * (1 - x)\n    return x\n"
         "def inputs(): return torch.rand(9, 70)\ndef f(x): return x.detach() * 0", "unsupported", "rounding errors"),
        ("def reference(x): return x.softmax(-1)\ndef inputs(draw): return draw.randn(9, 70)\n"
         "def f(x):\n    e = (x - x.amax(-1, keepdim=True).clamp_min(0)).exp()\n    return e / e.sum(-1, keepdim=True)",
         "wrong", "far below zero"),
        ("def reference(x): return x[x > 0].sum()\ndef inputs(draw): return draw.randn(9, 8)\n"
         "def f(x): return torch.where(x > 0, x, 0).double().sum().to(x.dtype)", "right", ""),
    ],
)  # fmt: skip
def test_inputs_and_references_of_other_kinds(file, text, expected, reason):
    found = verdict(file(text))
    assert found.verdict == expected, found
    assert reason in str(found)


def test_a_reference_may_call_a_torch_function_of_the_kernels_name(file):
    text = "def softmax(x): return torch.softmax(x, -1)\ndef reference(x): return torch.softmax(x, -1)"
    assert [k.name for k in kernels_of(load_operation(file(text), inputs=["3x4"], function="softmax"))] == ["softmax"]


@pytest.mark.parametrize(
    ("text", "given", "error", "message"),
    [
        ("def f(x): return x", {}, NoReference, "defines no `reference` to compare with, only f"),
        ("def reference(x): return x", {}, NoInputs, r"no `inputs` for reference\(x\)"),
        ("def reference(x): return x", {"reference": "truth"}, UnknownFunction, "no function named 'truth'"),
        ("class reference(torch.nn.Module): pass", {"inputs": ["3"]}, UnknownFunction, "reference"),
        ("def reference(x, y): return x", {"inputs": ["3x4"]}, WrongInputs, "missing a required argument: 'y'"),
        ("def reference(x): return 3.0", {"inputs": ["3x4"]}, BadReference, "returns float, and only real tensors"),
        ("def reference(x): return x[99]", {"inputs": ["3x4"]}, BadReference, "fails .IndexError"),
        ("def reference(n): return torch.zeros(n)", {"inputs": ["3"]}, BadReference, "takes no tensor"),
        ("def f(x): return x", {"reference": "f", "function": "f", "inputs": ["3x4"]}, BadReference,
         "is the kernel `f` itself"),
        ("def f(x): return x\ndef reference(x): return f(x)", {"inputs": ["3x4"], "function": "f"}, BadReference,
         "calls the kernel `f` itself"),
        (IDENTITY + "torch.sin = torch.cos", {"inputs": ["3x4"]}, FileBroken, "it replaces torch.sin, on which"),
        (IDENTITY + "def inputs(draw): return [[draw.randn(3)]]", {}, FileBroken, "argument of its own"),
        (IDENTITY + "def inputs(draw): return 1 / 0", {}, FileBroken, "`inputs` fails"),
        (IDENTITY + "def inputs(draw): return draw.randn('M')", {}, FileBroken, "needs the size M, which `cases`"),
        (IDENTITY + "def inputs(draw): return draw.randn(3)\ncases = [3]", {}, FileBroken, "list of sizes"),
    ],
)  # fmt: skip
def test_files_that_define_no_operation_say_what_is_missing(file, text, given, error, message):
    with pytest.raises(error, match=message) as raised:
        load_operation(file(text), **given)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        ("def reference(x): return torch.topk(x, 5)\n"
         "def f(x): return tuple(t[:, :5] for t in torch.sort(x, dim=-1, descending=True, stable=True))", ["9x64"]),
        ("def reference(x):\n    s = x.float().abs().amax(-1, True) / 127\n"
         "    return (x.float() / s).round().to(torch.int8), s\n"
         "def f(x):\n    s = x.float().abs().amax(-1, True) / 127\n"
         "    return (x.float() * (1 / s)).round().to(torch.int8), s", ["64x1000:bf16"]),
        ("def reference(x): return x.relu().to(torch.float8_e4m3fn)\n"
         "def f(x): return x.double().relu().to(torch.float8_e4m3fn)", ["9x64"]),
        ("def reference(x): return 2 * x, None\ndef f(x): return x + x, None", ["9x64"]),
    ],
)  # fmt: skip
def test_ties_rounded_integers_and_none_are_no_errors(file, text, inputs):
    found = verdict(file(text), inputs=inputs)
    assert found.right, found


@pytest.mark.parametrize(
    ("reference", "wrong"),
    [("x.ge(1).sum()", "x.gt(1).sum()"), ("x.argmax(-1)", "63 - x.flip(-1).argmax(-1)"),
     ("(x * 3).floor().to(torch.int8)", "(x * 3).round().to(torch.int8)"),
     ("(x * 0.5).round().to(torch.int8)", "(x * 0.5 + 0.5).floor().to(torch.int8)")],
)  # fmt: skip
def test_integers_are_exact_but_for_numbers_close_to_a_half(file, reference, wrong):
    found = verdict(file(f"def reference(x): return {reference}\ndef f(x): return {wrong}"), inputs=["16x64"])
    assert found.verdict == "wrong", found


@pytest.mark.parametrize(
    ("reference", "kernel", "expected"),
    [
        ("torch.round(x)", "torch.floor(x + 0.5)", "wrong"),
        ("torch.round(x)", "x.sign() * torch.floor(x.abs() + 0.5)", "wrong"),
        ("torch.round(x)", "(x + 12582912.0) - 12582912.0", "right"),
        ("torch.floor(x / 0.3)", "torch.floor(x * (1 / 0.3))", "right"),
    ],
)
def test_rounding_keeps_its_rule_for_halves(file, reference, kernel, expected):
    """And where torch itself rounds before, as in x / 0.3, an element near a step may lie on either side."""
    text = f"def reference(x): return {reference}\ndef f(x):\n    x = x.detach()\n    return {kernel}"
    op = load_operation(file(text), inputs=["16x64"])
    run = ReferenceRuns(op, "cpu", 0)
    judge = Judge(op, op.kernels["f"], InProcess(op.kernels["f"].fn, "cpu"), run, "cpu")
    planned = [CheckCase(op.check[0], values) for values in ("normal", "halves")]
    assert judge.judge(planned, lambda: None).verdict == expected


def test_an_operation_of_ones_own_may_have_the_name_of_a_built_in_one(file):
    text = "def reference(x, w, shift): return x * w + shift\n"
    op = load_operation(file(text + "def mine(x, w, shift): return w * x + shift", "softmax.py"),
                        inputs=["5x7", "7:fp32", "2"])  # fmt: skip
    other = file("def softmax(x, w, shift): return x", "other.py")
    found = check(op, kernels_of(op), [other], device="cpu", depth="quick")
    assert [one.verdict for one in found] == ["right", "wrong"]


def test_a_callable_object_that_counts_its_calls_is_refused_by_name(file):
    path = file("""
    import itertools
    class Counter:
        def __init__(self): self.calls = itertools.count()
        def __call__(self, x): return x * next(self.calls)
    reference = Counter()
    def f(x): return x
    """)
    with pytest.raises(BadReference, match="the reference `Counter` returns different outputs"):
        verdict(path, inputs=["5x40"])


@pytest.mark.parametrize(("cast", "expected"), [("double", "right"), ("float", "wrong")])
def test_a_float64_result_must_be_computed_in_float64(file, cast, expected):
    path = file(f"""
    import torch
    def reference(x): return torch.softmax(x, -1)
    def f(x):
        e = torch.exp(x.{cast}() - x.{cast}().amax(-1, keepdim=True))
        return (e / e.sum(-1, keepdim=True)).double()
    """)
    assert verdict(path, inputs=["8x100:float64"]).verdict == expected


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("torch.nn.functional.dropout(x, 0.1)", "draws random numbers"),
        ("x.mul_(2)", "writes to its argument 1"),
        ("x * next(COUNT)", "returns different outputs"),
        ("x * (next(COUNT) > 5)", "returns different outputs"),
    ],
)
def test_references_that_no_kernel_can_be_compared_with_are_refused(file, reference, message):
    path = file(
        f"import itertools\nCOUNT = itertools.count()\ndef reference(x): return {reference}\ndef f(x): return x"
    )
    with pytest.raises(BadReference, match=message):
        verdict(path, inputs=["5x40"])


def test_a_file_beside_the_operation_holds_a_kernel_of_it(file):
    op = load_operation(file(SCALED))
    good = file("def mine(x, weight, eps): return torch.addcmul(torch.full_like(x, eps), x, weight)", "good.py")
    bad = file("import tilewright\n@tilewright.kernel('mine')\ndef f(x, weight, eps): return x", "bad.py")
    found = list(check(op, files=[good, bad], device="cpu", depth="quick", dtypes=["float32"]))
    assert [(one.kernel, one.verdict) for one in found] == [("good.py", "right"), ("bad.py", "wrong")]


def test_a_kernel_is_sandboxed_though_the_operation_is_not(file, tmp_path):
    secret = tmp_path.parent / "elsewhere.txt"
    secret.write_text("secret")
    text = SCALED + f"def scaled(x, weight, eps):\n    open({str(secret)!r}).read()\n    return x * weight + eps\n"
    found = verdict(file(text))
    assert (found.verdict, "PermissionError" in found.reason) == ("crashed", True) or not found.isolation


def test_references_run_in_float64(file):
    op = load_operation(file(SCALED))
    args = op.make(op.check[0].with_dtype("bfloat16"))
    assert op.reference(*(a.double() if isinstance(a, torch.Tensor) else a for a in args)).dtype == torch.float64
