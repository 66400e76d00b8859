import numpy as np
import pytest

from tilewright.workbench.bench.intervals import of_median, of_ratio

TRIALS = 300


def skewed(generator: np.random.Generator, median: float, count: int = 51) -> np.ndarray:
    """Draw times with the long tail of GPU timings."""
    return median * generator.lognormal(0.0, 0.1, count)


def test_the_interval_of_a_median_covers_it_95_percent_of_the_time():
    generator = np.random.default_rng(1)
    held = 0
    for _ in range(TRIALS):
        low, high = of_median(skewed(generator, 20.0))
        held += low <= 20.0 <= high
    assert 0.91 < held / TRIALS < 0.99


@pytest.mark.slow
def test_the_interval_of_a_ratio_covers_it_95_percent_of_the_time():
    generator = np.random.default_rng(2)
    held = 0
    for _ in range(TRIALS):
        _, low, high = of_ratio(skewed(generator, 30.0), skewed(generator, 20.0, 31), paired=False)
        held += low <= 1.5 <= high
    assert 0.91 < held / TRIALS < 0.99


def test_pairing_narrows_the_interval_if_rounds_drift_together():
    generator = np.random.default_rng(3)
    drift = np.linspace(1.0, 1.3, 51)
    slow, fast = (drift * us * generator.normal(1.0, 0.005, 51) for us in (30.0, 20.0))
    ratio, low, high = of_ratio(slow, fast, paired=True)
    apart, wide_low, wide_high = of_ratio(slow, fast, paired=False)
    assert ratio == apart
    assert low <= ratio <= high
    assert high - low < (wide_high - wide_low) / 3


def test_unpaired_samples_are_drawn_independently():
    samples = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert of_ratio(samples, samples, paired=True) == (1.0, 1.0, 1.0)
    _, low, high = of_ratio(samples, samples, paired=False)
    assert low < 1.0 < high


def test_the_same_samples_give_the_same_interval():
    samples = skewed(np.random.default_rng(4), 20.0)
    assert of_median(samples) == of_median(list(samples))
    assert of_ratio(samples, samples[::-1], paired=False) == of_ratio(samples, samples[::-1], paired=False)


@pytest.mark.parametrize("samples", [[7.0], [7.0] * 20])
def test_one_sample_or_equal_ones_give_a_point(samples):
    assert of_median(samples) == (7.0, 7.0)
    assert of_ratio(samples, [2.0], paired=False) == (3.5, 3.5, 3.5)


def test_paired_samples_need_equal_counts():
    with pytest.raises(ValueError, match="need equal counts"):
        of_ratio([1.0, 2.0], [1.0], paired=True)
