"""Every Triton kernel compiles for an H200 with the arguments of its launches, without a GPU.

The interpreter accepts code that the compiler rejects. A separate process compiles instead of launching. It never
accesses memory, so it uses the bench cases.
"""

import os
import subprocess
import sys

import pytest

from tilewright import source

COMPILE = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from tilewright import registry
from tilewright.spec import Draw
from tilewright.worker.execute import backward, flatten, forward

TARGET = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024
launches = 0

def compile_instead(fn, *args, grid, warmup, **kwargs):
    global launches
    launches += 1
    backend = make_backend(TARGET)
    kwargs |= {"debug": False, "instrumentation_mode": ""}
    bound, specialization, options = create_function_from_signature(fn.signature, fn.params, backend)(*args, **kwargs)
    options, signature, constants, attributes = fn._pack_args(backend, kwargs, bound, specialization, options)
    made = triton.compile(ASTSource(fn, signature, constants, attributes), target=TARGET, options=options.__dict__)
    assert made.metadata.shared <= SHARED, f"{fn.__name__}: {made.metadata.shared} bytes of shared memory"

JITFunction.run = compile_instead
torch.mm = torch.addmm = lambda *args, out, **more: out  # GEMMs of torch would take hours

class Untouched(Draw):
    def randn(self, *dims, scale=1.0):
        return torch.empty([self.case[d] if isinstance(d, str) else d for d in dims], dtype=self.dtype)

    def randint(self, *dims, high):
        return torch.empty([self.case[d] if isinstance(d, str) else d for d in dims], dtype=torch.int64)

for name in sys.argv[1:]:
    op = registry.load(name)
    before = launches
    cases = op.benched(op.bench_dtype)
    cases += [case.with_dtype(dtype) for case in (op.check[0], op.check[-1]) for dtype in op.dtypes]
    for kernel in op.kernels.values():
        for case in cases:
            args = op.inputs(Untouched(case, "meta", 0))
            if kernel.language == "triton" and kernel.fits(*args):
                tensors = {n: a for n, a in enumerate(args) if isinstance(a, torch.Tensor)}
                floats = [n for n, a in tensors.items() if a.is_floating_point() and n not in op.constants]
                floats = floats if kernel.differentiable else []
                leaves, outputs = forward(kernel.fn, args, floats)
                if floats:
                    results = flatten(outputs)
                    backward(results, [leaves[n] for n in floats], [torch.empty_like(o) for o in results])
    assert launches > before, f"{name} launched nothing"
"""

GROUPS = 6  # processes; importing torch and Triton takes seconds


@pytest.mark.slow
@pytest.mark.parametrize("names", [[*source.op_files()][n::GROUPS] for n in range(GROUPS)], ids=" ".join)
def test_compiles(names):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *names], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
