"""Decide what limits a training job, and what to try next."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.workbench.train.kinds import MATRIX
from tilewright.workbench.train.trace import StepTimes

LONGEST_WAIT = 0.15  # the share of a step: if the GPU waits longer for one thing, that limits the job
COMPUTE, MEMORY, HOST, LOADING, NETWORK = "compute", "memory bandwidth", "host overhead", "data loading", "network"
NEXT = {
    COMPUTE: "larger micro-batches if the GEMMs are far from their peak, a lower precision (FP8), or more GPUs",
    MEMORY: "fuse what is not GEMM or attention: tilewright.apply(model), or torch.compile",
    HOST: "fewer launches: torch.compile, a CUDA graph (docs/models.md), or larger micro-batches",
    LOADING: "load batches ahead: DataLoader(num_workers=…, pin_memory=True, prefetch_factor=…)",
    NETWORK: "overlap communication with backward, shard less often, or use larger micro-batches",
}


@dataclass(frozen=True)
class Diagnosis:
    """The resource that limits a job, the share of the step that each takes, the evidence, and the next step."""

    limit: str
    shares: dict[str, float]
    evidence: list[str]
    next: str

    def __str__(self) -> str:
        lines = [f"Bottleneck: {self.limit}", *(f"  {line}" for line in self.evidence), f"Next: {self.next}"]
        return "\n".join(lines)


def diagnose(wall_us: float, times: StepTimes, share_of_peak: float | None = None) -> Diagnosis:
    """Return what limits a job whose steps take `wall_us`; `share_of_peak` is that of its GEMMs and attention."""
    wall_us = times.wall(wall_us)
    idle = max(0.0, wall_us - times.busy_us)
    waits = {
        LOADING: min(idle, times.wait_us),
        NETWORK: min(wall_us, times.exposed_us),
        HOST: max(0.0, idle - times.wait_us),
    }
    # Kernels that overlap are counted once: their times are scaled to the time in which any of them runs.
    running = max(0.0, min(wall_us, times.busy_us) - waits[NETWORK])
    matrix = sum(us for kind, us in times.by_kind.items() if kind in MATRIX)
    work = sum(us for kind, us in times.by_kind.items() if kind != "communication")
    share = matrix / work if work else 0.0
    parts = {COMPUTE: running * share, MEMORY: running * (1 - share), **waits}
    shares = {name: us / wall_us for name, us in parts.items()}
    longest = max(waits, key=waits.__getitem__)
    limit = longest if shares[longest] >= LONGEST_WAIT else max((COMPUTE, MEMORY), key=shares.__getitem__)
    return Diagnosis(limit, shares, _evidence(wall_us, times, shares, share_of_peak), NEXT[limit])


def _evidence(wall_us: float, times: StepTimes, shares: dict[str, float], share_of_peak: float | None) -> list[str]:
    device = "GPU" if times.is_gpu else "CPU"
    parts = {
        f"GEMM and attention {shares[COMPUTE]:.0%}": True,
        f"other kernels {shares[MEMORY]:.0%}": True,
        f"communication that nothing overlaps {shares[NETWORK]:.0%}": bool(times.exposed_us),
        f"waiting for data {shares[LOADING]:.0%}": bool(times.wait_us),
        f"{device} idle for the host {shares[HOST]:.0%}": True,
    }
    lines = [
        f"a step takes {wall_us / 1e3:.3g} ms: {', '.join(part for part, is_shown in parts.items() if is_shown)}",
        f"{times.launches:.0f} {'kernels' if times.is_gpu else 'operators'} per step, "
        f"{times.device_us / max(1.0, times.launches):.3g} us each",
    ]
    if share_of_peak is not None:
        lines.append(f"GEMM and attention run at {share_of_peak:.0%} of the peak")
    longest = ", ".join(f"{name[:48]} ({kind}) {us / times.device_us:.0%}" for kind, name, us in times.top[:3])
    return [*lines, f"of the {device}'s time: {longest}"] if longest else lines
