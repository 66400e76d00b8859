"""Layouts of results, from the compiler: its own builder infers them from values that nothing computes."""

from __future__ import annotations

import functools
from typing import Any

import triton.language as tl
from triton._C.libtriton import ir
from triton._C.libtriton.gluon_ir import GluonOpBuilder
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon import language as gl

from tilewright.interpreter.compiler import TARGET


class LayoutRules:
    """The compiler's rules; the operations that it infers from pile up in a module that is never compiled."""

    def __init__(self) -> None:
        self._context = ir.context()
        ir.load_dialects(self._context)
        CUDABackend(TARGET).load_dialects(self._context)
        self.compiler: Any = GluonOpBuilder(self._context)
        self._module = self.compiler.create_module()
        signature = self.compiler.get_function_ty([], [])
        function = self.compiler.get_or_insert_function(self._module, "layouts", signature, "public", False)
        self._module.push_back(function)
        self.compiler.set_insertion_point_to_start(function.add_entry_block())
        self.compiler.set_loc("layouts", 1, 0)

    @functools.lru_cache(maxsize=1024)  # noqa: B019  there is one instance
    def of_tensor(self, operation: str, layout: Any, shape: tuple[int, ...], *params: Any) -> Any:
        """Return the layout of the result of an operation on one tensor."""
        value = self._tensor(layout, shape)
        params = tuple(list(p) if isinstance(p, tuple) else p for p in params)
        if operation == "reduce":
            result = self.compiler.create_reduce([value], *params).get_result(0)
        elif operation == "join":
            result = self.compiler.create_join(value, self._tensor(layout, shape))
        elif operation == "split":
            result = self.compiler.create_split(value)[0]
        else:
            result = getattr(self.compiler, f"create_{operation}")(value, *params)
        return self.compiler.get_gluon_layout_from_tensor(result)

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def of_buffer(self, operation: str, layout: Any, shape: tuple[int, ...], dtype: tl.dtype, params: Any) -> Any:
        """Return the layout of the result of an operation on a buffer in shared memory."""
        ty = gl.shared_memory_descriptor_type(dtype, list(shape), layout, list(shape)).to_ir(self.compiler)
        result = getattr(self.compiler, f"create_memdesc_{operation}")(
            self.compiler.create_local_alloc(ty), list(params)
        )
        return self.compiler.get_gluon_layout_from_memdesc(result)

    def _tensor(self, layout: Any, shape: tuple[int, ...]) -> Any:
        ty = gl.distributed_type(tl.int32, list(shape), layout).to_ir(self.compiler)
        return self.compiler.create_splat(ty, self.compiler.get_int32(0))
