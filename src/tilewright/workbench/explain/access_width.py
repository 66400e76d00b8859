"""Find accesses of less than a word per thread, and why the compiler does not use wider ones.

The cause is found by compiling the same launch again with one fact added, for example that an argument is a multiple
of 8. If the accesses become wider, that fact was missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewright.errors import CompilationFailed
from tilewright.workbench.explain.launch_model import LaunchModel
from tilewright.workbench.inspect import Inspection
from tilewright.workbench.inspect.code import TritonCode
from tilewright.workbench.inspect.compiler import compile_kernel
from tilewright.workbench.inspect.instructions import Instruction
from tilewright.workbench.inspect.line_info import SourceLine

WORD = 4  # bytes: with less per thread, a warp requests less than a 128-byte line at once
ALIGNED = 16  # what Triton specialises on: elements for integers, bytes for pointers
MOST = 0.5  # share of the bytes of the loads, or of the stores
SIGNIFICANT = 0.1  # share of all bytes, of which loads or stores with less are ignored
WIDE_GAIN = "a softmax of bf16 rows became 1.2 to 1.3 times as fast by this on an H200"  # docs/lab-notes.md
KINDS = {"load": ("global load", "async copy"), "store": ("global store",)}
_DIVISIBILITY = "tt.divisibility"


@dataclass(frozen=True)
class NarrowAccess:
    """The accesses of one launch that move less than a word per thread."""

    kernel: Inspection
    kind: str  # load or store
    width: float  # bytes per thread, on average
    source_line: SourceLine
    cause: str = ""  # empty if unknown
    advice: str = "let each thread access 16 contiguous, aligned bytes"
    wide: Inspection | None = None  # the launch without the cause
    is_thin: bool = False  # the cause is the number of elements per thread

    @property
    def gain(self) -> str:
        """The effect of wider accesses; empty if the cause is unknown."""
        if self.wide is None:
            return ""
        width = self.wide.mix.mean_width(*KINDS[self.kind]) or 0.0
        fewer = 1 - len(self.wide.mix.instructions) / len(self.kernel.mix.instructions)
        text = f"otherwise {width:.3g} B {self.kind}s"
        return f"{text} and {fewer:.0%} fewer instructions" if fewer > 0 else text

    @property
    def is_measured(self) -> bool:
        """Return whether the widths are those of WIDE_GAIN."""
        return self.wide is not None and self.width == 2 and self.wide.mix.mean_width(*KINDS[self.kind]) == ALIGNED


def narrow_access(model: LaunchModel) -> NarrowAccess | None:
    """Return the accesses of a launch that are narrower than a word, if they move most of its loads or stores."""
    moved = {kind: _bytes_by_width(model, kinds) for kind, kinds in KINDS.items()}
    total = sum(map(Counter.total, moved.values()))
    for kind, by_width in moved.items():
        narrow = sum(count for width, count in by_width.items() if width < WORD)
        if narrow > MOST * by_width.total() and by_width.total() > SIGNIFICANT * total:
            chosen = [i for i in model.kernel.mix.instructions if i.kind in KINDS[kind]]
            line = next((i.source_line for i in chosen if i.width < WORD and i.source_line), None)
            return _explained(NarrowAccess(model.kernel, kind, _mean_width(chosen), line), KINDS[kind])
    return None


def _bytes_by_width(model: LaunchModel, kinds: tuple[str, ...]) -> Counter[int]:
    """Return the bytes that instructions of these kinds move, by their width."""
    moved: Counter[int] = Counter()
    for instruction, executed in model.executed_instructions():
        if instruction.kind in kinds:
            moved[instruction.width] += instruction.width * executed  # type: ignore[assignment]
    return moved


def _explained(found: NarrowAccess, kinds: tuple[str, ...]) -> NarrowAccess:
    """Add the first cause without which the accesses are at least twice as wide."""
    kernel, launch = found.kernel, found.kernel.launch
    if launch is None or not isinstance(launch.code, TritonCode):
        advice = "load and store several elements at once: uint4 and float4 are 16 B, __nv_bfloat162 is 4 B"
        return replace(found, advice=advice)
    for code, cause, advice in _changes(launch.code, launch.arguments):
        try:
            wide = replace(kernel, compiled=compile_kernel(code))
        except CompilationFailed:
            continue
        width = _mean_width([i for i in wide.mix.instructions if i.kind in kinds])
        if width >= 2 * found.width:
            is_thin = wide.compiled.threads < kernel.compiled.threads
            return replace(found, cause=cause, advice=advice, wide=wide, is_thin=is_thin)
    return found


def _changes(code: TritonCode, values: tuple[int | None, ...]) -> Iterator[tuple[TritonCode, str, str]]:
    """Yield the launch with one fact added, the cause that this would prove, and its remedy."""
    names = [*code.signature]
    passed = [name for name, kind in code.signature.items() if kind != "constexpr"]
    integers = {name: value for name, value in zip(passed, values, strict=False) if value}
    unknown = {name: value for name, value in integers.items() if not _has_divisibility(code, names.index(name))}
    divisors = {name: min(ALIGNED, value & -value) for name, value in unknown.items()}
    partly = {name: divisor for name, divisor in divisors.items() if 1 < divisor < ALIGNED}
    if partly:
        what = _enumerated(f"`{name}` = {integers[name]}" for name in partly)
        divisor = max(partly.values())
        verb = "is" if len(partly) == 1 else "are"
        cause = (
            f"{what} {verb} divisible by {divisor} but not by {ALIGNED}, and Triton specialises on multiples of "
            f"{ALIGNED} only"
        )
        yield _with_divisibility(code, partly), cause, _say_divisibility(partly)
    ignored = {name: divisor for name, divisor in divisors.items() if divisor == ALIGNED}
    if ignored:
        what = _enumerated(f"`{name}`" for name in ignored)
        cause = f"Triton does not specialise on {what} (do_not_specialize)"
        advice = f"specialise on {what}"
        yield _with_divisibility(code, ignored | partly), cause, advice
    if len(ignored) + len(partly) < len(divisors):
        odd = {name: ALIGNED for name in divisors if name not in ignored and name not in partly}
        what = _enumerated(f"`{name}` = {integers[name]}" for name in odd)
        cause = f"{what}: rows of odd length start at any address"
        advice = "pad rows to a multiple of 8 elements, and mask at that multiple"
        yield _with_divisibility(code, dict.fromkeys(divisors, ALIGNED)), cause, advice
    is_pointer = {name: code.signature[name].startswith("*") for name in names}
    unaligned = [n for n in names if is_pointer[n] and not _has_divisibility(code, names.index(n))]
    if unaligned:
        what = _enumerated(f"`{name}`" for name in unaligned)
        cause = f"{what} {'does' if len(unaligned) == 1 else 'do'} not start on a {ALIGNED}-byte boundary"
        advice = f"pass tensors that start on a {ALIGNED}-byte boundary: clone a view with an odd offset"
        yield _with_divisibility(code, dict.fromkeys(unaligned, ALIGNED) | divisors), cause, advice
    warps = code.options.get("num_warps", 1)
    if warps > 1:
        cause = f"the tile has too few elements for {warps} warps of threads with 16 B each"
        yield replace(code, options=code.options | {"num_warps": 1}), cause, "use fewer warps, or a larger tile"


def _say_divisibility(partly: Mapping[str, int]) -> str:
    lines = _enumerated(f"`{name} = {name} // {divisor} * {divisor}`" for name, divisor in partly.items())
    others = "tl.multiple_of has no effect on an integer argument"
    return f"begin the kernel with {lines} if that holds for every call, or make it a tl.constexpr ({others})"


def _enumerated(words: Iterator[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _has_divisibility(code: TritonCode, index: int) -> bool:
    return any(name == _DIVISIBILITY for name, _ in code.attributes.get((index,), ()))


def _with_divisibility(code: TritonCode, divisors: Mapping[str, int]) -> TritonCode:
    names, added = [*code.signature], dict[Any, Any](code.attributes)
    for name, divisor in divisors.items():
        at = (names.index(name),)
        added[at] = [*(pair for pair in added.get(at, ()) if pair[0] != _DIVISIBILITY), [_DIVISIBILITY, divisor]]
    return replace(code, attributes=added)


def _mean_width(instructions: Sequence[Instruction]) -> float:
    return sum(i.width for i in instructions) / max(1, len(instructions))
