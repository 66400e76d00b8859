"""Predicted bottlenecks compared with those that the hardware counted."""

import pytest

from tilewright.report import markdown, prediction_accuracy

DEVICE = {"name": "NVIDIA H200"}


def call(kind, n, **content):
    where = {"op": "softmax", "kernel": "triton", "direction": "forward", "case": {"N": n}, "dtype": "bfloat16"}
    return {"kind": kind, "source": "0", "date": "2026-01-02T00:00:00", "device": DEVICE, **where, **content}


def counted(n, memory, sm):
    return call("counters", n, counters={"memory": memory, "sm": sm})


@pytest.mark.parametrize(
    ("memory", "sm", "predicted", "agrees"),
    [
        (0.9, 0.2, "memory", True),
        (0.9, 0.2, "fp32", False),
        (0.3, 0.9, "tensor", True),
        (0.3, 0.9, "latency", False),
        (0.8, 0.85, "memory", True),
        (0.8, 0.85, "special", True),
        (0.8, 0.85, "latency", False),
        (0.2, 0.1, "start", True),
        (0.2, 0.1, "memory", False),
    ],
)
def test_a_bottleneck_is_compared_with_the_one_ncu_names(memory, sm, predicted, agrees):
    page = prediction_accuracy.bottlenecks([counted(64, memory, sm), call("prediction", 64, binds=predicted)])
    assert f"| softmax | triton | 1 | {int(agrees)} |" in page
    assert f"The prediction agrees with ncu in {int(agrees)} of 1 calls, {int(agrees):.0%}." in page
    assert ("- softmax, triton, N=64 bfloat16:" in page) != agrees


def test_only_calls_that_were_both_counted_and_predicted_are_compared():
    records = [counted(64, 0.9, 0.2), call("prediction", 128, binds="memory")]
    assert prediction_accuracy.bottlenecks(records) == "No records yet.\n"
    records.append(call("prediction", 64, binds="memory"))
    assert "1 of 1 calls, 100%" in markdown.fill("<!-- records: bottlenecks -->\n<!-- end -->", records)


def test_a_call_without_counters_is_not_compared():
    records = [call("counters", 64, counters={}), call("prediction", 64, binds="memory"), counted(128, 0.9, 0.1)]
    records.append(call("prediction", 128, binds="memory"))
    assert "1 of 1 calls" in prediction_accuracy.bottlenecks(records)
