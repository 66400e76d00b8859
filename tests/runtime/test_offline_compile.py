"""Every Triton kernel compiles for an H200 with the arguments of its launches, without a GPU.

The interpreter accepts code that the compiler rejects. Each dtype is compiled with a case of its own, so that together
they cover small, middle and large launches. `tests/workbench/test_portability.py` compiles the bench cases.
"""

from itertools import cycle

import pytest

from tilewright import registry, source
from tilewright.hardware import datasheet
from tilewright.workbench.inspect import CompileFailure, inspect_launch
from tilewright.workbench.inspect.launches import kernel_launches

GROUPS = 6  # tests, so that both processes have some to run


@pytest.mark.verify
@pytest.mark.parametrize("names", [[*source.op_files()][n::GROUPS] for n in range(GROUPS)], ids=" ".join)
def test_compiles(names):
    problems = []
    for name in names:
        op = registry.load(name)
        spread = [op.check[0], op.check[len(op.check) // 2], op.check[-1]]
        cases = [case.with_dtype(dtype) for case, dtype in zip(cycle(spread), op.dtypes, strict=False)]
        kernels = [kernel for kernel in op.kernels.values() if kernel.language == "triton"]
        found = {}
        for kernel, case in ((kernel, case) for kernel in kernels for case in cases):
            for launch in kernel_launches(op, kernel, case, datasheet("h200"), ("forward", "backward"), reads=0):
                code = launch.code
                found.setdefault(
                    str((code.function, code.signature, code.constants, code.attributes, code.options)), launch
                )
        assert found or not kernels, f"{name} launched nothing"
        for one in (inspect_launch(launch, launch.name) for launch in found.values()):
            if why := str(one.error) if isinstance(one, CompileFailure) else one.launch_error:
                problems.append(f"{name}, {one.name}: {why}")
    assert not problems, "\n".join(problems)
