"""The driver of the present GPU agrees on registers, local memory and occupancy of every kernel."""

import pytest
import torch

from tilewright import hardware, registry, source
from tilewright.workbench.inspect import Inspection, inspect_kernel

pytestmark = pytest.mark.gpu


def from_driver(found: Inspection) -> tuple[int, int, int]:
    """Return registers and local memory per thread, and blocks per SM."""
    from cuda.bindings import driver

    def checked(result):
        status, *values = result
        assert status == driver.CUresult.CUDA_SUCCESS, status
        return values[0] if values else None

    torch.zeros(1, device="cuda")  # creates the context
    module = checked(driver.cuModuleLoadData(found.compiled.binary))
    function = checked(driver.cuModuleGetFunction(module, found.compiled.symbol.encode()))
    kinds = driver.CUfunction_attribute
    most = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(function, most, found.compiled.shared))
    registers = checked(driver.cuFuncGetAttribute(kinds.CU_FUNC_ATTRIBUTE_NUM_REGS, function))
    local = checked(driver.cuFuncGetAttribute(kinds.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function))
    blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, found.compiled.threads, found.compiled.shared)
    checked(driver.cuModuleUnload(module))
    return registers, local, checked(blocks)


@pytest.mark.parametrize("name", source.op_files())
def test_the_driver_agrees(name):
    gpu = hardware.DATASHEETS.get(hardware.current_gpu()["gpu"])
    if gpu is None or gpu.is_amd:
        pytest.skip("no datasheet of this GPU, or no CUDA driver")
    op = registry.load(name)
    for kernel in op.kernels.values():
        for case in (op.bench[0], op.bench[-1]) if kernel.language in ("triton", "cuda") else ():
            for found in inspect_kernel(op, kernel, case.with_dtype(op.bench_dtype), gpu, ("forward", "backward")):
                assert isinstance(found, Inspection), found.error
                used = found.resources
                assert from_driver(found) == (used.registers, used.stack, found.occupancy.blocks), found.name
