"""Bootstrap intervals (95 %) of a median and of a ratio of two medians, deterministic for the same samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
BOUNDS = (2.5, 97.5)  # percentiles


def of_median(samples: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the median."""
    taken = np.asarray(samples)
    return _bounds(_medians(taken, _draws(np.random.default_rng(0), len(taken))))


def width_of_median(samples: Sequence[float]) -> float:
    """Return about how wide the interval of the median is, from the order statistics alone: cheap enough to repeat."""
    ordered, half = sorted(samples), math.sqrt(len(samples))  # 1.96 standard deviations of the median's rank
    low, high = max(0, round(len(ordered) / 2 - half)), min(len(ordered) - 1, round(len(ordered) / 2 + half))
    return ordered[high] - ordered[low]


def of_ratio(
    numerator_samples: Sequence[float], denominator_samples: Sequence[float], *, paired: bool
) -> tuple[float, float, float]:
    """Return the ratio of the medians and its interval.

    `paired`: both were sampled in the same rounds, so that a round is drawn for both; otherwise they are of two runs.
    """
    above, below = np.asarray(numerator_samples), np.asarray(denominator_samples)
    if paired and len(above) != len(below):
        raise ValueError(f"paired samples need equal counts, not {len(above)} and {len(below)}")
    generator = np.random.default_rng(0)
    rounds = _draws(generator, len(above))
    others = rounds if paired else _draws(generator, len(below))
    return float(np.median(above) / np.median(below)), *_bounds(_medians(above, rounds) / _medians(below, others))


def _draws(generator: np.random.Generator, count: int) -> np.ndarray:
    return generator.integers(count, size=(RESAMPLES, count))


def _medians(samples: np.ndarray, draws: np.ndarray) -> np.ndarray:
    return np.median(samples[draws], axis=1)


def _bounds(resampled: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(resampled, BOUNDS)
    return float(low), float(high)
