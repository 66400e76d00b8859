"""Gluon kernels in the interpreter: shared memory, mbarriers, TMA, wgmma and warp-specialised partitions."""

from __future__ import annotations

import functools
from typing import Any

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._semantic import GluonSemantic
from triton.experimental.gluon.language.nvidia.hopper import tma

from tilewright.interpreter.builder import Language
from tilewright.interpreter.exceptions import UnsupportedFeature
from tilewright.interpreter.gluon.builder import GluonBuilder
from tilewright.interpreter.gluon.compiler import verify
from tilewright.interpreter.language import OVERRIDES, give_methods
from tilewright.interpreter.tensors import ADOPTED, unwrap

SUPPORTED = "3.6"  # Gluon's builder changes with every version


def _known(tensor: Any) -> Any:
    """Tell the handle of a tensor its layout, from which the builder infers others."""
    tensor.handle.layout = tensor.type.layout
    return tensor


class Semantic(GluonSemantic):
    """Gluon's semantic layer. Questions about layouts alone go to a second one, which has the compiler's builder."""

    @functools.cached_property
    def _compiler(self) -> Any:
        return GluonSemantic(self.builder.rules.compiler)

    def expand_dims(self, input: Any, axis: int) -> Any:
        return super().expand_dims(_known(input), axis)

    def reshape(self, input: Any, dst_shape: Any, can_reorder: bool) -> Any:
        return super().reshape(_known(input), dst_shape, can_reorder)

    def permute(self, input: Any, dims: Any) -> Any:
        return super().permute(_known(input), dims)

    def split(self, a: Any) -> Any:
        return super().split(_known(a))

    def join(self, a: Any, b: Any) -> Any:
        return super().join(*map(_known, self.broadcast_impl_value(a, b)))

    def to_linear_layout(self, layout: Any, shape: Any) -> Any:
        return self._compiler.to_linear_layout(layout, shape)

    def bank_conflicts(self, distr_ty: Any, shared_ty: Any) -> Any:
        return self._compiler.bank_conflicts(distr_ty, shared_ty)


class SharedMemory(gl.shared_memory_descriptor):
    """A buffer in shared memory."""


class TmaDescriptor(tma.tensor_descriptor):
    """A tensor descriptor with a layout."""


class Gluon(Language):
    """Gluon's builder and semantic layer."""

    builder: GluonBuilder

    def verify(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not triton.__version__.startswith(SUPPORTED):
            raise UnsupportedFeature(f"the Gluon of Triton {triton.__version__}, not {SUPPORTED}")
        if self.builder.options.num_ctas > 1:
            raise UnsupportedFeature(f"num_ctas={self.builder.options.num_ctas}, a cluster")
        verify(function, args, kwargs)

    def make_descriptor(
        self, descriptor: Any, base: Any, shape: list[Any], strides: list[Any], block: list[Any]
    ) -> Any:
        make: Any = tma.make_tensor_descriptor
        return make(base, shape, strides, block, descriptor.layout, descriptor.padding, _semantic=self.semantic)


_BUILDER = GluonBuilder()
GLUON = Gluon(_BUILDER, Semantic(_BUILDER))


def _warp_specialize(functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any) -> Any:
    warps = [unwrap(count) for count in worker_num_warps]
    bodies, names = [], []
    for function, args in functions_and_args:
        bodies.append(lambda function=function, args=tuple(args): function(*args))
        names.append(function.__name__)
    return GLUON.builder.machine.specialize(bodies, names, warps)


for _base, _class in ((gl.shared_memory_descriptor, SharedMemory), (tma.tensor_descriptor, TmaDescriptor)):
    give_methods(_class)
    ADOPTED[_base] = _class
OVERRIDES[id(gl.warp_specialize)] = _warp_specialize
