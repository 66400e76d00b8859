"""Classify kernels and operators by the kind of work they do; the rules are data (`kinds.json`)."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("kinds.json")
OWN = 2  # names of the scope `own`: the kernel and the operator that launches it
MATRIX = ("GEMM", "attention")  # kinds whose work is on tensor cores
COMMUNICATION, LOADING = "communication", "data loading"


@functools.lru_cache(1)
def _table() -> tuple[str, list[tuple[str, bool, re.Pattern[str]]]]:
    data: dict[str, Any] = json.loads(DATA.read_text())
    rules = [(r["kind"], r["scope"] == "own", re.compile(r["names"], re.IGNORECASE)) for r in data["rules"]]
    return data["default"], rules


def kinds() -> list[str]:
    """Return every kind, in the order in which tables show them."""
    default, rules = _table()
    return [kind for kind, *_ in rules] + [default]


@functools.lru_cache(65536)
def classify(names: Sequence[str]) -> str:
    """Return the kind of a kernel by its name and the names that enclose its launch, innermost first."""
    default, rules = _table()
    for kind, is_own, expression in rules:
        if any(expression.search(name) for name in (names[:OWN] if is_own else names)):
            return kind
    return default
