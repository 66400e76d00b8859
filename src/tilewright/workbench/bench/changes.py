"""Compare the timings of two files of records."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tilewright import record
from tilewright.workbench.bench.intervals import of_ratio

THRESHOLD = 0.02
LARGE = 1.5  # ratio that different calls per sample cannot explain
KEY = ("op", "kernel", "case", "dtype", "direction")
ORDER = ("slower", "faster", "same", "not comparable", "missing", "new")  # not comparable: different calls per sample


@dataclass(frozen=True)
class Change:
    op: str
    kernel: str
    case: dict[str, Any]
    dtype: str
    direction: str
    gpu: str
    verdict: str  # one of ORDER
    old_us: float | None = None
    new_us: float | None = None
    ratio: float | None = None  # new over old
    interval: tuple[float, float] | None = None  # 95 % of the ratio
    now: str = ""  # the new verdict and its reason, for a timing that is missing because the kernel fails now

    @property
    def is_regression(self) -> bool:
        return self.verdict == "slower" or bool(self.now)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"is_regression": self.is_regression}


def compare(old: list[dict[str, Any]], new: list[dict[str, Any]], threshold: float = THRESHOLD) -> list[Change]:
    """Return the change of every timing on the GPUs in both files: regressions first, then by ORDER."""
    before, after = _newest(old), _newest(new)
    both = gpus(old) & gpus(new)
    keys = [key for key in dict.fromkeys((*before, *after)) if key[-1] in both]
    changes = [_change(before.get(key), after.get(key), threshold) for key in keys]
    found = [change for change in changes if change]
    return sorted(found, key=lambda change: (not change.is_regression, ORDER.index(change.verdict)))


def gpus(records: list[dict[str, Any]]) -> set[str]:
    return {r["device"]["gpu"] for r in records if r["kind"] == "timing"}


def _newest(records: list[dict[str, Any]]) -> dict[tuple[str, ...], dict[str, Any]]:
    timings = record.latest([r for r in records if r["kind"] == "timing"])
    return {(*(str(r[name]) for name in KEY), r["device"]["gpu"]): r for r in timings}


def _change(old: dict[str, Any] | None, new: dict[str, Any] | None, threshold: float) -> Change | None:
    """Return the change of one timing; None if neither file has a time."""
    one: dict[str, Any] = new or old or {}
    about = {name: one[name] for name in KEY} | {"gpu": one["device"]["gpu"], "old_us": _us(old), "new_us": _us(new)}
    if old and new and _us(old) and _us(new):
        ratio, low, high = of_ratio(new["samples_us"], old["samples_us"], paired=False)
        if old["calls"] != new["calls"] and 1 / LARGE < ratio < LARGE:
            return Change(**about, verdict="not comparable")
        return Change(**about, verdict=_verdict(ratio, low, high, threshold), ratio=ratio, interval=(low, high))
    if _us(old):
        return Change(**about, verdict="missing", now=f"{new['verdict']}, {new['reason']}".strip(", ") if new else "")
    return Change(**about, verdict="new") if _us(new) else None


def _us(timing: dict[str, Any] | None) -> float | None:
    return timing["median_us"] if timing and timing["verdict"] == "right" else None


def _verdict(ratio: float, low: float, high: float, threshold: float) -> str:
    if low > 1 and ratio > 1 + threshold:
        return "slower"
    if high < 1 and ratio < 1 / (1 + threshold):
        return "faster"
    return "same"
