"""Compare predictions with recorded timings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright import record, registry, source
from tilewright.cost import BANDWIDTHS, Cost
from tilewright.errors import CompilationFailed, LauncherFailed, NothingLaunched
from tilewright.hardware import GPU
from tilewright.spec import Case
from tilewright.workbench.explain.collect import OTHER_WORK, Records, collect_op
from tilewright.workbench.explain.prediction import Prediction, predict

KIND = "prediction"


@dataclass(frozen=True)
class PredictionCheck:
    """A prediction with the timing of the same call."""

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
        """Return a record. Its source hash is that of the predicted code; the timing may be of older code."""
        timing = self.timing
        names = ("op", "kernel", "case", "dtype", "direction", "device")
        about = {name: timing[name] for name in names}
        return record.stamp(
            KIND,
            about.pop("op"),
            about.pop("kernel"),
            source.kernel_hash(timing["op"], timing["kernel"]) or "",
            **about,
            predicted_us=round(self.prediction.us, 3),
            interval_us=[round(self.prediction.low, 3), round(self.prediction.high, 3)],
            binds=self.prediction.bottleneck,
            terms={name: round(term.us, 3) for name, term in self.prediction.terms.items()},
            lacks=list(self.prediction.excludes),
            is_whole=not any(effect.startswith(OTHER_WORK) for effect in self.prediction.excludes),
            measured={"us": timing["median_us"], "date": timing["date"], "source": timing["source"]},
            memory_bound=self.is_memory_bound,
        )


def predictable(records: Records, gpu: GPU, ops: Sequence[str], kernels: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the timings of our kernels, or of the named ones, forward or backward."""

    def is_wanted(r: Mapping[str, Any]) -> bool:
        own = source.kernels(r["op"])
        is_named = r["kernel"] in kernels if kernels else r["kernel"] in own and not r["is_baseline"]
        return is_named and r["direction"] != "both" and bool(r["median_us"]) and r["op"] in ops and not r.get("sized")

    return [r for r in records if r["kind"] == "timing" and r["device"]["gpu"] == gpu.name and is_wanted(r)]


def check_predictions(
    timings: Iterable[Mapping[str, Any]], gpu: GPU, records: Records, on_skip: Callable[[str], None]
) -> Iterator[PredictionCheck]:
    """Yield each timing with its prediction. `on_skip` is called with the reason for those without one."""
    for timing in timings:
        op = registry.load(timing["op"])
        (kernel,) = registry.pick(op, [timing["kernel"]])
        case = Case(tuple(timing["case"].items()), timing["dtype"])
        try:
            call = collect_op(op, kernel, case, gpu, records, timing["direction"])
        except (NothingLaunched, LauncherFailed, CompilationFailed) as error:
            on_skip(f"{op.name}, {kernel.name}, {timing['direction']}: {error}")
            continue
        if found := predict(call):
            yield PredictionCheck(timing, found, call.ceilings.rates)
