"""The only reader of os.environ: a handful of typed knobs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where compiled CUDA C++ is kept: TILEWRIGHT_CACHE, else the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TILEWRIGHT_CACHE") or Path(home) / "tilewright")


def results_dir() -> Path:
    """Where recorded timings lie: TILEWRIGHT_RESULTS, else the checkout's, else the wheel's own."""
    if named := os.environ.get("TILEWRIGHT_RESULTS"):
        return Path(named)
    package = Path(__file__).parent
    checkout = package.parent.parent / "results"
    return checkout if checkout.is_dir() else package / "results"


def record_files() -> list[Path]:
    """Those in the folder, and in one of each GPU. What lies deeper is kept to be compared."""
    folder = results_dir()
    return sorted([*folder.glob("*.jsonl"), *folder.glob("*/*.jsonl")])


CACHES = (
    *("TMPDIR", "XDG_CACHE_HOME", "TILEWRIGHT_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"),
    *("CUDA_CACHE_PATH", "NUMBA_CACHE_DIR"),
)


def worker_environment(simulate: bool) -> dict[str, str]:
    """The environment of worker processes. `simulate`: Numba kernels without a GPU.

    Numba reads its switch when a kernel is decorated, so it must be set before the process imports it.
    """
    environment = dict(os.environ)
    package_root = str(Path(__file__).parent.parent)
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{package_root}{os.pathsep}{inherited}" if inherited else package_root
    environment["OPENBLAS_NUM_THREADS"] = "1"
    if simulate:
        environment |= {"NUMBA_ENABLE_CUDASIM": "1", "OMP_NUM_THREADS": "1"}
    return environment


def folder_of_worker(folder: str) -> dict[str, str]:
    """What has a worker process write all it writes to a folder of its own."""
    # In a sandbox it may be a user whom nobody knows.
    return dict.fromkeys(CACHES, folder) | {"HOME": folder, "USER": "tilewright"}


def replace_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def debug() -> bool:
    """TILEWRIGHT_DEBUG: show the traceback of an unexpected error."""
    return bool(os.environ.get("TILEWRIGHT_DEBUG"))
