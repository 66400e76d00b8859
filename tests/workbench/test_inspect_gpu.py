"""The GPU in hand agrees: registers, local memory and occupancy of every kernel as the driver tells them."""

import pytest
import torch

from tilewright import hardware, registry, source
from tilewright.workbench.inspect import Inspection, inspect_kernel

pytestmark = pytest.mark.gpu


def asked(found: Inspection) -> tuple[int, int, int]:
    """Registers and bytes of local memory of a thread, and blocks on an SM."""
    from cuda.bindings import driver

    def answer(result):
        status, *values = result
        assert status == driver.CUresult.CUDA_SUCCESS, status
        return values[0] if values else None

    torch.zeros(1, device="cuda")  # makes the context
    module = answer(driver.cuModuleLoadData(found.made.binary))
    function = answer(driver.cuModuleGetFunction(module, found.made.symbol.encode()))
    kinds = driver.CUfunction_attribute
    most = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    answer(driver.cuFuncSetAttribute(function, most, found.made.shared))
    registers = answer(driver.cuFuncGetAttribute(kinds.CU_FUNC_ATTRIBUTE_NUM_REGS, function))
    local = answer(driver.cuFuncGetAttribute(kinds.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function))
    blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, found.made.threads, found.made.shared)
    answer(driver.cuModuleUnload(module))
    return registers, local, answer(blocks)


@pytest.mark.parametrize("name", source.op_files())
def test_the_driver_agrees(name):
    gpu = hardware.DATASHEETS.get(hardware.in_hand()["gpu"])
    if gpu is None or gpu.is_amd:
        pytest.skip("no datasheet of this GPU, or no CUDA driver")
    op = registry.load(name)
    for kernel in op.kernels.values():
        for case in (op.bench[0], op.bench[-1]) if kernel.language in ("triton", "cuda") else ():
            for found in inspect_kernel(op, kernel, case.with_dtype(op.bench_dtype), gpu, ("forward", "backward")):
                assert isinstance(found, Inspection), found.error
                used = found.resources
                assert asked(found) == (used.registers, used.stack, found.occupancy.blocks), found.name
