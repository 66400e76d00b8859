"""The split of a row over the blocks of a cluster."""

from itertools import product

import pytest
import torch

from tilewright import registry
from tilewright.hardware import datasheet
from tilewright.ops.norm import _cuda as norm
from tilewright.ops.norm._cuda import (
    CUDA,
    MAX_BLOCK_THREADS,
    WARP,
    _balanced_clusters,
    _cluster_choices,
    _cluster_default,
)
from tilewright.runtime.clusters import (
    CACHE_LINE,
    LANES,
    MAX_BLOCKS,
    MAX_THREADS,
    VECTOR,
    VECTORS_PER_THREAD,
    Held,
    Rows,
    row_choices,
    row_default,
    row_launch,
)
from tilewright.runtime.configs import TABLES, ConfigTable
from tilewright.runtime.cuda import MAX_PORTABLE_CLUSTER, is_installed
from tilewright.runtime.sizes import quarter_octave
from tilewright.spec import Case
from tilewright.workbench.inspect.compiler import CompiledKernel
from tilewright.workbench.inspect.launches import kernel_launches
from tilewright.workbench.inspect.resources import resources

NORMS = [(op, way) for op in ("layer_norm", "add_rms_norm") for way in MAX_BLOCK_THREADS]
LENGTHS = (1, 2, 7, 8, 1000, 4096, 4097, 50257, 65535, 65536, 128256, 131072, 262144)


def launches(rows: Rows, tensors: int, monkeypatch):
    """Return how rows are split by each of the choices."""
    monkeypatch.setattr("tilewright.runtime.clusters.has_clusters", lambda device: True)
    table = ConfigTable("none.json", lambda *key: row_default(Held(tensors), rows.vectors), lambda *key: [])
    key = "rows", rows.itemsize, quarter_octave(rows.vectors)
    for config in row_choices(Held(tensors), rows.vectors):
        with table.override(key, config):
            yield row_launch(table, "rows", rows, Held(tensors))
    TABLES.remove(table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tensors", VECTORS_PER_THREAD)
@pytest.mark.parametrize("N", LENGTHS)
def test_parts_cover_the_row_at_any_alignment(N, tensors, dtype, monkeypatch):
    rows = Rows(3, N, dtype, -1)
    found = [*launches(rows, tensors, monkeypatch)]
    assert found
    for how in found:
        part, align = how.numbers
        holders = how.lanes or how.threads
        assert 1 <= how.each <= VECTORS_PER_THREAD[tensors]
        assert part * rows.itemsize % CACHE_LINE == 0, "every block starts on a cache line if the first one does"
        furthest = align - (rows.itemsize if rows.has_edges else VECTOR)  # bytes before the row, at most
        assert how.blocks * part * rows.itemsize >= furthest + N * rows.itemsize
        held = min(part * rows.itemsize, furthest + N * rows.itemsize)
        assert held <= holders * how.each * VECTOR, "it fits the registers"
        assert how.threads % (how.lanes or WARP) == 0
        assert how.grid[0] * (how.threads // how.lanes if how.lanes else 1) >= rows.M


def test_rows_start_on_cache_lines_if_capacity_allows():
    room = {N: Rows(1, N, torch.bfloat16, 0).split(8, 16384)[1] for N in (131072, 128256, 131000)}
    assert room == {131072: VECTOR, 128256: CACHE_LINE, 131000: CACHE_LINE}


@pytest.mark.parametrize("tensors", VECTORS_PER_THREAD)
def test_defaults_are_portable_and_among_the_choices(tensors):
    for vectors in (*(2**n for n in range(15)), 12, 97, 375, 1376, 6283, 18993):
        default = row_default(Held(tensors), vectors)
        assert default in row_choices(Held(tensors), vectors)
        assert default.get("lanes", 4) in LANES
        assert default.get("blocks", 1) <= 8 or vectors > 8 * 1024 * VECTORS_PER_THREAD[tensors]
        if vectors <= VECTORS_PER_THREAD[tensors] * MAX_THREADS:
            assert row_default(Held(tensors), vectors, 1).get("blocks", 1) == 1, "a GPU may have no clusters"


@pytest.mark.parametrize(("op", "way"), NORMS)
def test_norm_clusters_hold_their_rows_within_the_thread_limits(op, way):
    for vectors in (2**n for n in range(14)):
        choices = _cluster_choices(op, f"cuda-{way}", 2, vectors)
        default = _cluster_default(op, f"cuda-{way}", 2, vectors)
        assert default in choices
        assert default["blocks"] <= MAX_PORTABLE_CLUSTER
        for config in choices:
            threads = vectors // (config["each"] * config["blocks"])
            assert threads <= MAX_BLOCK_THREADS[way][config["each"]]
            assert threads * config["blocks"] <= norm.MAX_THREADS, "every warp of a cluster has a slot in shared memory"
            assert config["blocks"] <= MAX_BLOCKS
        assert not (op == "add_rms_norm" and any(config["each"] == 8 for config in choices))


@pytest.mark.skipif(not is_installed(), reason="needs cuda-core")
@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize("N", [1000, 1001, 1024, 4097, 5000, 8192, 9000, 16376, 32763, 32768, 65529, 65536])
def test_norm_launches_have_a_thread_for_every_vector_of_the_row(N, gpu):
    op = registry.load("layer_norm")
    case = Case((("M", 7), ("N", N), ("affine", "same")), "bfloat16")
    found = kernel_launches(op, op.kernels["cuda"], case, datasheet(gpu), ("forward", "backward"))
    held = [one for one in found if one.name.startswith("norm_")]
    vectors = -(-(N * 2 + (VECTOR - 2 if N % 8 else 0)) // VECTOR)  # wherever a row starts
    assert held or (gpu, N > 8192) == ("a100", True), "one block is too small for the longest rows"
    assert len(held) == 2 or gpu == "a100"
    for one in held:
        each = int(one.name.split(",")[2])
        assert one.code.threads % WARP == 0
        assert one.code.threads * each >= -(-vectors // one.code.cluster)
        assert one.code.threads * each * one.code.cluster < vectors + WARP * each * one.code.cluster + one.code.cluster


@pytest.mark.verify
@pytest.mark.skipif(not is_installed(), reason="needs cuda-core")
def test_norms_spill_no_registers():
    """Launch bounds limit the registers; one more live value would spill."""
    flags, one = ("true", "false"), "bfloat16, bfloat16"
    forward = [
        f"norm_fwd<{one}, {each}, {is_rms}, {adds}>"
        for each, is_rms, adds in product(MAX_BLOCK_THREADS["forward"], flags, flags)
        if each < 8 or adds == "false"
    ]
    forward += [
        f"norm_fwd_uneven<{one}, {each}, {is_rms}, {adds}, {alone}>"
        for each, is_rms, adds, alone in product(MAX_BLOCK_THREADS["uneven"], flags, flags, flags)
        if each < 8 or adds == "false"
    ]
    backward = [
        f"norm_bwd<{one}, {each}, {is_rms}, {adds}, {alone}, {edges}>"
        for each, is_rms, adds, alone, edges in product(MAX_BLOCK_THREADS["backward"], *[flags] * 4)
    ]
    binary, symbols = CUDA.cubin("sm_90", (*forward, *backward))
    spilled = {name: resources(CompiledKernel(symbols[name], binary, "sm_90", WARP)).spills for name in symbols}
    assert len(spilled) == len(forward) + len(backward)
    assert {name for name, spills in spilled.items() if spills} == set()


def test_clusters_that_take_several_rows_take_those_of_one_shift():
    for rows, clusters, step in product((1, 7, 8, 100, 1001, 4099), (1, 6, 132, 1056), (1, 4, 8)):
        count = _balanced_clusters(rows, clusters, step)
        assert 1 <= count <= rows
        assert count == rows or count % step == 0
        assert count <= max(clusters, step)
        assert -(-rows // count) == -(-rows // min(rows, max(step, clusters // step * step))), "as many rows each"


@pytest.mark.skipif(not is_installed(), reason="needs cuda-core")
@pytest.mark.parametrize(
    ("M", "N", "forward", "backward"),
    [
        (300, 4096, "triton", "cuda"),
        (4096, 4096, "cuda", "cuda"),
        (4096, 1000, "triton", "cuda"),
        (4096, 5003, "cuda", "cuda"),
        (4096, 50257, "cuda", "cuda"),
        (20000, 100, "triton", "triton"),
        (64, 2**19, "triton", "triton"),
    ],
)
def test_the_kernel_that_wins_on_an_h200(M, N, forward, backward):
    op = registry.load("rms_norm")
    case = Case((("M", M), ("N", N), ("weight", "same")), "bfloat16")
    assert op.shipped
    found = kernel_launches(op, op.shipped, case, datasheet("h200"), ("forward", "backward"))
    kinds = ["cuda" if one.name.startswith("norm_") else "triton" for one in found if "norm_" in one.name]
    assert kinds == [forward, backward]


@pytest.mark.skipif(not is_installed(), reason="needs cuda-core")
@pytest.mark.parametrize(("gpu", "kernel"), [("h200", "norm_fwd_uneven"), ("a100", "_norm_fwd")])
def test_weights_that_exceed_shared_memory_go_to_triton(gpu, kernel):
    """Two float32 parameters of 24001 columns take 192 KiB in one block; an A100 has 163 KiB."""
    op = registry.load("layer_norm")
    case = Case((("M", 1000), ("N", 24001), ("affine", "fp32")), "bfloat16")
    (launch,) = kernel_launches(op, op.kernels["cuda"], case, datasheet(gpu), ("forward",))
    assert launch.name.startswith(kernel)
