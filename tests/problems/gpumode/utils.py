"""Helpers that the tasks in this folder share."""

import os
import random

import numpy as np
import torch


def set_seed(seed=42):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


@torch.no_grad()
def verbose_allclose(received, expected, rtol=1e-05, atol=1e-08, max_print=5) -> list[str]:
    """Return why the tensors are not close; an empty list if they are."""
    if received.shape != expected.shape:
        return ["SIZE MISMATCH"]
    bad = (received - expected).abs() > atol + rtol * expected.abs()
    bad |= torch.isnan(received) ^ torch.isnan(expected)
    bad |= torch.isinf(received) ^ torch.isinf(expected)
    return _describe(bad, received, expected, max_print)


@torch.no_grad()
def verbose_allequal(received, expected, max_print=5) -> list[str]:
    return _describe(received != expected, received, expected, max_print)


def _describe(bad, received, expected, max_print) -> list[str]:
    places = torch.nonzero(bad)
    if not len(places):
        return []
    told = [f"{len(places)} elements differ"]
    for place in places[:max_print]:
        i = tuple(place.tolist())
        told.append(f"at {i}: {received[i]} {expected[i]}")
    return told


def match_reference(data, output, reference, rtol=1e-05, atol=1e-08) -> tuple[bool, str]:
    reasons = verbose_allclose(output, reference(data), rtol=rtol, atol=atol)
    return not reasons, " ".join(reasons)


def make_match_reference(reference, **kwargs):
    def wrapped(data, output):
        return match_reference(data, output, reference=reference, **kwargs)

    return wrapped


class DeterministicContext:
    def __enter__(self):
        self.workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        self.tf32 = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = False
        torch.use_deterministic_algorithms(True)
        return self

    def __exit__(self, *_):
        torch.backends.cudnn.allow_tf32 = self.tf32
        torch.use_deterministic_algorithms(False)
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = self.workspace


def clear_l2_cache():
    torch.empty((32, 1024, 1024), dtype=torch.int64, device="cuda").fill_(42)
