"""Cases of `bench --random`: sizes of models and odd ones, from 1 KiB to 4 GiB, in several layouts and dtypes."""

import json
from collections import Counter

import pytest
import torch

from tilewright import registry, source
from tilewright.errors import NothingFits, NothingToDraw
from tilewright.timer import timer_for
from tilewright.workbench.bench import bench
from tilewright.workbench.bench import drawn as module
from tilewright.workbench.bench.drawn import MODELS, draw, model_sizes, moved_bytes, needed_bytes


@pytest.fixture(scope="module")
def softmax():
    return registry.load("softmax")


@pytest.fixture(scope="module")
def cases(softmax):
    return draw(softmax, 300, seed=1)


def test_a_seed_fixes_the_cases(softmax, cases):
    assert [str(one) for one in draw(softmax, 20, seed=1)] == [str(one) for one in cases[:20]]
    assert [str(one) for one in draw(softmax, 20, seed=2)] != [str(one) for one in cases[:20]]


def test_drawn_sizes_cover_what_people_use(softmax, cases):
    assert len(cases) == 300
    own = [one for one in cases if one.op is softmax]
    columns = [one.case["N"] for one in own]
    assert len(set(columns) & set(model_sizes("vocabulary"))) > 3
    assert len(set(columns) & set(model_sizes("hidden"))) > 3
    assert sum(n % 2 for n in columns) > len(own) / 10, "odd sizes"
    sizes = [moved_bytes(one.op, one.case) for one in cases]
    assert min(sizes) < 2**14
    assert 2**31 < max(sizes) <= 2**32
    assert {one.layout for one in cases} == set(module.LAYOUTS)
    assert {one.case.dtype for one in cases} == {"float32", "float16", "bfloat16"}
    assert {one.case["over"] for one in cases if one.op is not softmax} == {"0", "1"}


@pytest.mark.slow
def test_every_op_draws_valid_cases_or_says_why_not():
    refused = set()
    for name in source.op_files():
        op = registry.load(name)
        try:
            found = draw(op, 10, seed=0)
        except NothingToDraw:
            refused.add(name)
            continue
        assert len(found) == 10, name
        for one in found:
            one.op.reference(*one.op.make(one.case, "meta"))
    assert {"adamw", "unique", "linear_cross_entropy"} <= refused
    assert len(refused) < 6, refused


def test_variants_compute_what_their_public_function_does():
    for name in ("softmax", "sum", "amax", "argmax", "var", "cumsum", "logsumexp"):
        (variant,) = registry.load(name).variants
        for case in variant.check:
            args = variant.make(case)
            torch.testing.assert_close(variant.shipped.fn(*args), variant.reference(*args))
            assert variant.cost(*args).read == args[0].nbytes


def test_cases_that_do_not_fit_are_not_drawn(softmax):
    found = draw(softmax, 10, seed=0, memory=2**24)
    assert len(found) == 10
    assert all(needed_bytes(one) <= 2**24 for one in found)
    with pytest.raises(NothingFits, match="seed 0 draws no case of softmax that fits"):
        draw(softmax, 3, seed=0, memory=1)
    with pytest.raises(NothingToDraw):
        draw(registry.load("adamw"), 3, seed=0)


def test_operations_without_cases_are_named_and_the_others_are_drawn(monkeypatch):
    monkeypatch.setattr(module, "TRIES", 5)
    monkeypatch.setattr(module, "needed_bytes", lambda one: 2 if one.op.name == "rms_norm" else 1)
    ops = [registry.load(name) for name in ("softmax", "rms_norm", "adamw")]
    found, left_out = module.draw_from(ops, 4, 0, memory=1)
    assert [one.op.name for one in found] == ["softmax", "softmax"]
    assert left_out == [
        "without adamw: no size of theirs can grow by itself",
        "without rms_norm: no drawn case of theirs fits into memory",
    ]
    with pytest.raises(NothingFits):
        module.draw_from(ops[1:], 4, 0, memory=1)


@pytest.mark.parametrize(("name", "size"), [("softmax", "M"), ("rope", "S"), ("mla_decode", "B")])
def test_small_cases_have_the_rows_of_a_decoding_step(name, size):
    found = draw(registry.load(name), 5, seed=0, small=True)
    assert all(one.case[size] in module.ROWS and one.layout == "contiguous" for one in found)
    elements = [one.case["N"] for one in draw(registry.load("gelu"), 5, seed=0, small=True)]
    assert all(any(n % rows == 0 and n // rows in model_sizes("hidden") for rows in module.ROWS) for n in elements)


def test_model_sizes_have_a_source():
    data = json.loads(MODELS.read_text())
    assert {model["source"] for model in data["models"]} == data["sources"].keys()
    assert all(source.startswith("https://") for source in data["sources"].values())
    assert max(Counter(model["model"] for model in data["models"]).values()) == 1
    assert set(model_sizes("row")) == {*model_sizes("hidden"), *model_sizes("intermediate"), *model_sizes("vocabulary")}


@pytest.mark.slow
def test_drawn_cases_are_checked_and_timed_in_their_layout(softmax):
    small = [one for one in draw(softmax, 40, seed=5, memory=2**21) if one.op is softmax and one.layout != "expanded"]
    one = next(one for one in small if one.layout in ("padded", "offset", "transposed"))
    seen = []
    wrong_when_strided = lambda x: seen.append((x.stride(), x.storage_offset())) or torch.softmax(x, -1)
    kernel = softmax.kernel("spy", differentiable=False)
    try:
        kernel(wrong_when_strided)
        kernels = [softmax.kernels["eager"], softmax.kernels["spy"]]
        timings = list(bench(softmax, kernels, clock=timer_for("cpu"), cases=[one.check_case], samples=6, device="cpu"))
    finally:
        del softmax.kernels["spy"]
    assert [timing.verdict for timing in timings] == ["right", "right"], timings
    assert {timing.as_json()["layout"] for timing in timings} == {one.layout}
    contiguous = torch.empty(one.case["M"], one.case["N"]).stride()
    assert any(stride != contiguous or offset for stride, offset in seen)
