"""Predictions held against what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright import record, registry, source
from tilewright.cost import BANDWIDTHS, Cost
from tilewright.errors import CompilerRefused, LauncherFailed, NothingLaunched
from tilewright.hardware import GPU
from tilewright.spec import Case
from tilewright.workbench.explain.evidence import BESIDES, Records, of_op
from tilewright.workbench.explain.prediction import Prediction, predicted

KIND = "prediction"


@dataclass(frozen=True)
class Compared:
    """A prediction beside the newest timing of the same call."""

    timing: Mapping[str, Any]
    prediction: Prediction
    rates: Mapping[str, float]

    @property
    def ratio(self) -> float:
        return self.prediction.us / self.timing["median_us"]

    @property
    def is_memory_bound(self) -> bool:
        return Cost(**self.timing["cost"]).floor(self.rates)[0] in BANDWIDTHS

    def as_record(self) -> dict[str, Any]:
        """Its source is the code that was predicted; that of the timing may be older."""
        timing = self.timing
        names = ("op", "kernel", "case", "dtype", "direction", "device")
        kept = {name: timing[name] for name in names}
        return record.stamp(
            KIND,
            kept.pop("op"),
            kept.pop("kernel"),
            source.kernel_hash(timing["op"], timing["kernel"]) or "",
            **kept,
            predicted_us=round(self.prediction.us, 3),
            interval_us=[round(self.prediction.low, 3), round(self.prediction.high, 3)],
            binds=self.prediction.binds,
            terms={name: round(term.us, 3) for name, term in self.prediction.terms.items()},
            lacks=list(self.prediction.lacks),
            is_whole=BESIDES not in self.prediction.lacks,
            measured={"us": timing["median_us"], "date": timing["date"], "source": timing["source"]},
            memory_bound=self.is_memory_bound,
        )


def predictable(records: Records, gpu: GPU, ops: Sequence[str], kernels: Sequence[str]) -> list[Mapping[str, Any]]:
    """Timings of our kernels, or of those named, one way."""

    def is_wanted(r: Mapping[str, Any]) -> bool:
        known = source.kernels(r["op"])
        is_named = r["kernel"] in kernels if kernels else r["kernel"] in known and not r["is_baseline"]
        return is_named and r["direction"] != "both" and bool(r["median_us"]) and r["op"] in ops and not r.get("sized")

    return [r for r in records if r["kind"] == "timing" and r["device"]["gpu"] == gpu.name and is_wanted(r)]


def compared(
    timings: Iterable[Mapping[str, Any]], gpu: GPU, records: Records, tell: Callable[[str], None]
) -> Iterator[Compared]:
    """Each with its prediction; of those without one `tell` is told why."""
    for timing in timings:
        op = registry.load(timing["op"])
        (kernel,) = registry.pick(op, [timing["kernel"]])
        case = Case(tuple(timing["case"].items()), timing["dtype"])
        try:
            known = of_op(op, kernel, case, gpu, records, timing["direction"])
        except (NothingLaunched, LauncherFailed, CompilerRefused) as error:
            tell(f"{op.name}, {kernel.name}, {timing['direction']}: {error}")
            continue
        if found := predicted(known):
            yield Compared(timing, found, known.ceilings.rates)
