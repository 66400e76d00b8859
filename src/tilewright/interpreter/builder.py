"""Triton's IR builder implemented with NumPy: where the compiler would emit an operation, the value is computed.

`triton.language.semantic` determines types, broadcasting and errors, exactly as it does for the compiler, and calls the
methods here. All programs of a batch run at once: axis 0 of every array is the program axis, of length 1 if all
programs have the same value.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime.jit import JITFunction

from tilewright.interpreter import numerics, unwritten
from tilewright.interpreter.accesses import Accesses
from tilewright.interpreter.arithmetic import Arithmetic
from tilewright.interpreter.blocks import Blocks
from tilewright.interpreter.compiler import BACKEND, verify
from tilewright.interpreter.exceptions import DeviceError, UnsupportedFeature
from tilewright.interpreter.values import Handle

if TYPE_CHECKING:
    from collections.abc import Callable


def parse_options(given: dict[str, Any]) -> SimpleNamespace:
    """Return the launch options with Triton's defaults; Triton raises AssertionError for invalid ones."""
    parsed = BACKEND.parse_options({"enable_fp_fusion": False, **given})
    derived = {name: getattr(parsed, name) for name, value in vars(type(parsed)).items() if isinstance(value, property)}
    return SimpleNamespace(**{**vars(parsed), **derived, "sanitize_overflow": False})


_OPTIONS = parse_options({"debug": False})


class Builder(Arithmetic, Blocks, Accesses):
    """The methods that Triton's semantic layer calls; the executor sets `memory`, `programs` and `grid`."""

    options = _OPTIONS
    arch = "sm90"
    generator: Any = None  # stands in for the compiler's code generator in functions that need one

    def __init__(self) -> None:
        self.codegen_fns: dict[str, Callable[..., Any]] = {
            **BACKEND.get_codegen_implementation(_OPTIONS),
            "convert_custom_types": self._convert_custom_types,
        }

    @staticmethod
    def _convert_custom_types(value, ty, rounding, _semantic):
        return tl.tensor(_semantic.builder.create_fp_to_fp(value.handle, ty, rounding), ty)

    def begin(self, programs: np.ndarray, steps: int) -> None:
        """Prepare for a batch of programs, which may execute `steps` operations."""
        self.programs = np.stack(self.memory.program_id(programs), axis=1)
        self.operations_left = steps

    def end(self) -> None:
        """Check what a batch of programs leaves behind."""

    # Types

    def block_type(self, element: tl.dtype, shape: list[int], layout: Any) -> tl.block_type:
        return tl.block_type(element, shape)

    def layout_of_reduction(self, value: Handle, axis: int) -> Any:
        return None

    def get_block_ty(self, element: tl.dtype, shape: list[int]) -> tl.dtype:
        return tl.block_type(element, shape)

    def get_ptr_ty(self, element: tl.dtype, address_space: int) -> tl.dtype:
        return tl.pointer_type(element, address_space)

    def get_void_ty(self) -> tl.dtype:
        return tl.void

    # Constants

    def get_null_value(self, ty: tl.dtype) -> Handle:
        kind = numerics.numpy_type(ty)
        return self._make(np.zeros(1, kind), ty, (0, 0) if kind.kind == "i" else None)

    def get_all_ones_value(self, ty: tl.dtype) -> Handle:
        return self._make(np.full(1, True if ty.is_bool() else -1, numerics.numpy_type(ty)), ty)

    # Program ids

    def create_get_program_id(self, axis: int) -> Handle:
        return self._make(self.programs[:, axis].astype(np.int32), tl.int32, (0, max(self.grid[axis] - 1, 0)))

    def create_get_num_programs(self, axis: int) -> Handle:
        return self._make(np.full(1, self.grid[axis], np.int32), tl.int32)

    # Operations without a result

    def create_print(self, prefix: str, hexadecimal: bool, args: list[Handle], is_signed: list[bool]) -> None:
        for row, program in enumerate(self.programs):
            for arg, sign in zip(args, is_signed, strict=True):
                data = arg.data[row if arg.data.shape[0] > 1 else 0]
                if arg.data.dtype.kind == "i" and not sign:
                    data = numerics.unsigned(data)
                shown = np.vectorize(hex)(data) if hexadecimal and data.dtype.kind in "iu" else data
                print(f"pid {tuple(int(p) for p in program)}{prefix}{shown}")
            if not args:
                print(f"pid {tuple(int(p) for p in program)}{prefix}")

    def create_assert(self, condition: Handle, message: str) -> None:
        self.memory.use(condition.poison, "assertion")
        if not condition.data.all():
            raise DeviceError(f"tl.device_assert: {message}")

    def create_assume(self, condition: Handle) -> None:
        self.memory.use(condition.poison, "assumption")
        if not condition.data.all():
            raise DeviceError("the condition of tl.assume is false")

    def create_barrier(self) -> None:
        self.tick()
        self.memory.unseen.synchronize()

    def create_grid_dependency_wait(self) -> None:
        self.tick()

    create_grid_dependency_launch_dependents = create_grid_dependency_wait

    def get_cache_policy(self, *_: Any) -> None:
        return None

    def create_inline_asm(self, *_: Any) -> Handle:
        raise UnsupportedFeature("tl.inline_asm_elementwise")


def _constants(ty: tl.dtype) -> Callable[[Builder, Any], Handle]:
    def constant(self: Builder, value: Any) -> Handle:
        kind = numerics.numpy_type(ty)
        if kind.kind == "i":
            half = 2 ** (kind.itemsize * 8 - 1)
            wrapped = (int(value) + half) % (2 * half) - half
            return self._make(np.full(1, wrapped, kind), ty, (wrapped, wrapped))
        data = np.full(1, value, np.float64 if ty.is_floating() else kind)
        return self._make(numerics.rounded(data, ty) if ty.is_floating() else data, ty)

    return constant


_INTEGERS = {
    f"{sign}int{bits}": getattr(tl, f"int{bits}")
    for bits in (1, 8, 16, 32, 64)
    for sign in ("", "u")
    if bits > 1 or not sign
}
_CONSTANTS = {**_INTEGERS, "fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32, "fp64": tl.float64}
_TYPES = {**_INTEGERS, "half": tl.float16, "bf16": tl.bfloat16, "float": tl.float32, "double": tl.float64}
_TYPES |= {f"fp8{kind}": getattr(tl, f"float8{kind}") for kind in ("e4nv", "e5", "e4b8", "e5b16", "e4b15")}


def _type_getter(ty: tl.dtype) -> Callable[[Builder], tl.dtype]:
    return lambda self: ty


for _name, _ty in _CONSTANTS.items():
    setattr(Builder, f"get_{_name}", _constants(_ty))
for _name, _ty in _TYPES.items():
    setattr(Builder, f"get_{_name}_ty", _type_getter(_ty))
unwritten.track(Builder)

# These pass data between the threads of a program, which takes a barrier.
_EXCHANGES = (
    "reshape", "trans", "cat", "join", "split", "gather", "histogram", "dot", "dot_scaled", "descriptor_load",
    "descriptor_store", "descriptor_reduce", "descriptor_gather", "descriptor_scatter",
)  # fmt: skip


def _exchanging(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Builder, *args: Any) -> Any:
        out = method(self, *args)
        self.memory.unseen.synchronize()
        return out

    return call


for _name in _EXCHANGES:
    setattr(Builder, f"create_{_name}", _exchanging(getattr(Builder, f"create_{_name}")))


class Language:
    """A builder and the semantic layer that calls it: Triton's."""

    def __init__(self, builder: Builder, semantic: TritonSemantic[Any]):
        self.builder = builder
        self.semantic = semantic

    def verify(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise an error for a kernel that only the compiler rejects."""
        if isinstance(function, JITFunction):  # under TRITON_INTERPRET=1 there is nothing to compile
            verify(function, args, kwargs)

    def make_descriptor(
        self, descriptor: Any, base: Any, shape: list[Any], strides: list[Any], block: list[Any]
    ) -> Any:
        """Return a descriptor that the host created, as the kernel receives it."""
        return self.semantic.make_tensor_descriptor(base, shape, strides, block, descriptor.padding)


class Active:
    """The language of the launch that is running."""

    calling = ""  # the function of the language that computes

    def __init__(self, language: Language):
        self.language = language

    @property
    def builder(self) -> Builder:
        return self.language.builder

    @property
    def semantic(self) -> TritonSemantic[Any]:
        return self.language.semantic


_BUILDER = Builder()
TRITON = Language(_BUILDER, TritonSemantic(_BUILDER))
ACTIVE = Active(TRITON)
