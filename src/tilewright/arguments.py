"""Cases and dtypes of an operation, from the texts that users and agents write. Imports torch only when called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.errors import BadCase, UnknownDtype, first_line

if TYPE_CHECKING:
    from tilewright.spec import Case, Op

LARGEST_CASE = 2**34  # elements: larger inputs fit into no GPU's memory
SHORT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def parse_cases(op: Op, texts: list[str] | None) -> list[Case] | None:
    """Return the cases given as texts; None if there are none."""
    from tilewright.spec import Case

    cases = [Case.parse(text, like=op.check[-1]) for text in texts or []]
    for case, text in zip(cases, texts or [], strict=True):
        try:
            shapes = op.make(case, device="meta")
            op.reference(*shapes)
        except Exception as error:
            raise BadCase(text, f"{op.name} does not accept it ({first_line(error)})", str(op.check[-1])) from None
        size = sum(a.numel() for a in shapes if hasattr(a, "numel"))
        if size > LARGEST_CASE:
            raise BadCase(text, f"it has {size} elements, more than the limit of {LARGEST_CASE}", str(op.check[-1]))
    return cases or None


def parse_dtypes(op: Op, names: list[str] | None) -> list[str] | None:
    full = [SHORT_DTYPES.get(name, name) for name in names or []]
    for name in full:
        if name not in op.dtypes:
            raise UnknownDtype(name, op.dtypes)
    return full or None
