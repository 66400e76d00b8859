"""Records for tests of readers, made without torch."""

from typing import Any

from tilewright import record, source


def timing_record(kernel: str = "triton", us: float | None = 1.0, gpu: str = "h200", **more: Any) -> dict[str, Any]:
    """A fresh timing of softmax as `bench --record` writes it."""
    newest = record.fingerprints(gpu).get(("softmax", kernel), {})  # a baseline of other libraries would be stale
    content = {
        "case": {"M": 3, "N": 50},
        "dtype": "float32",
        "direction": "forward",
        "cost": {"read": 10**6, "written": 10**6, "flops": {"fp32": 1.0}},
        "verdict": "right",
        "reason": "",
        "samples_us": [us] if us else [],
        "median_us": us,
        "interval_us": [us, us] if us else None,
        "calls": 1,
        "against": None,
        "host_us": 5.0,
        "extra_bytes": 0,
        "state": {},
        "timer": {},
        "is_baseline": kernel.startswith(("eager", "compile")),
        "ceilings": {"copy": 2e12, "read": 2e12},
        "device": {"gpu": gpu, "name": f"NVIDIA {gpu.upper()}"},
        "versions": newest.get("versions", {"torch": "2.11.0", "triton": "3.6.0"}),
    }
    return record.stamp("timing", "softmax", kernel, source.kernel_hash("softmax", kernel) or "", **content | more)


# What `bench --random` adds to a timing.
DRAWN: dict[str, Any] = {
    "kind": "random",
    "layout": "padded",
    "seed": 7,
    "path": "_softmax_fwd",
    "aligned": True,
    "seconds": {"samples": 1.0},
}
