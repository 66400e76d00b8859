"""Environment variables. No other module reads os.environ."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the folder of cached files: TILEWRIGHT_CACHE, or `tilewright` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TILEWRIGHT_CACHE") or Path(home) / "tilewright")


def results_dir() -> Path:
    """Return the folder of records: TILEWRIGHT_RESULTS, or that of the checkout, or that of the wheel."""
    if named := os.environ.get("TILEWRIGHT_RESULTS"):
        return Path(named)
    package = Path(__file__).parent
    checkout = package.parent.parent / "results"
    return checkout if checkout.is_dir() else package / "results"


def record_files() -> list[Path]:
    """Return the files of records in the results folder and in the folder of each GPU."""
    folder = results_dir()
    return sorted([*folder.glob("*.jsonl"), *folder.glob("*/*.jsonl")])


CACHES = (
    *("TMPDIR", "XDG_CACHE_HOME", "TILEWRIGHT_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"),
    *("CUDA_CACHE_PATH", "NUMBA_CACHE_DIR"),
)


def worker_environment(simulate: bool) -> dict[str, str]:
    """Return the environment of worker processes. `simulate` runs Numba kernels without a GPU.

    Numba reads the variable when a kernel is decorated, so it must be set before the process starts.
    """
    environment = dict(os.environ)
    package_root = str(Path(__file__).parent.parent)
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{package_root}{os.pathsep}{inherited}" if inherited else package_root
    environment["OPENBLAS_NUM_THREADS"] = "1"
    if simulate:
        environment |= {"NUMBA_ENABLE_CUDASIM": "1", "OMP_NUM_THREADS": "1"}
    return environment


def redirected_caches(folder: str) -> dict[str, str]:
    """Return the variables that make a worker process write all its files to one folder."""
    # In a sandbox the user id may have no name.
    return dict.fromkeys(CACHES, folder) | {"HOME": folder, "USER": "tilewright"}


def replace_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def debug() -> bool:
    """TILEWRIGHT_DEBUG: show the traceback of an unexpected error."""
    return bool(os.environ.get("TILEWRIGHT_DEBUG"))
