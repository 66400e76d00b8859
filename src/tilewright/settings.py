"""Environment variables. No other module reads os.environ."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
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


TOKEN = "TILEWRIGHT_ARENA_TOKEN"


def arena_token() -> str:
    """TILEWRIGHT_ARENA_TOKEN: the token that `tilewright arena` sends to a server."""
    return os.environ.get(TOKEN, "")


# What Python, compilers and the libraries of GPUs read. Anything else in the environment may be a secret.
TOOLCHAIN = re.compile(
    r"PATH|HOME|USER|LANG|LC_\w+|TZ|TMPDIR|XDG_CACHE_HOME|LD_\w+|CC|CXX|VIRTUAL_ENV|CONDA_PREFIX|"
    r"(PYTHON|PYTORCH|TORCH|TRITON|NUMBA|CUDA|NVIDIA|NCCL|HIP|HSA|ROCM|ROCR|OMP|MKL|OPENBLAS|MALLOC|TILEWRIGHT)\w*"
)


def without_secrets(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process that runs other people's code, which could report what it reads there."""
    return {name: value for name, value in environment.items() if TOOLCHAIN.fullmatch(name) and name != TOKEN}


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


@contextlib.contextmanager
def fork_safe_cuda() -> Iterator[None]:
    """Let processes started meanwhile count GPUs without CUDA: after a call of CUDA, no fork of theirs could use it."""
    before = dict(os.environ)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        yield
    finally:
        replace_environment(before)


def replace_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def debug() -> bool:
    """TILEWRIGHT_DEBUG: show the traceback of an unexpected error."""
    return bool(os.environ.get("TILEWRIGHT_DEBUG"))
