"""The split of a row over the blocks of a cluster."""

from itertools import product

import pytest
import torch

from tilewright import registry
from tilewright.hardware import datasheet
from tilewright.ops.norm._cuda import CUDA, MAX_BLOCK_THREADS, MAX_THREADS, WARP, _cluster_choices, _cluster_default
from tilewright.runtime.clusters import (
    CACHE_LINE,
    MAX_BLOCKS,
    VECTOR,
    VECTORS_PER_THREAD,
    Rows,
    cluster_choices,
    cluster_default,
)
from tilewright.runtime.cuda import MAX_PORTABLE_CLUSTER, is_installed
from tilewright.spec import Case
from tilewright.workbench.inspect.compiler import CompiledKernel
from tilewright.workbench.inspect.launches import kernel_launches
from tilewright.workbench.inspect.resources import resources

NORMS = [(op, way) for op in ("layer_norm", "add_rms_norm") for way in MAX_BLOCK_THREADS]
LENGTHS = (1, 2, 7, 8, 1000, 4096, 4097, 50257, 65535, 65536, 128256, 131072, 262144)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tensors", VECTORS_PER_THREAD)
@pytest.mark.parametrize("N", LENGTHS)
def test_parts_cover_the_row_at_any_alignment(N, tensors, dtype):
    rows = Rows(3, N, dtype, 0, True)
    for config in cluster_choices(tensors, rows.vectors):
        threads, blocks = config["threads"], config["blocks"]
        if rows.vectors > VECTORS_PER_THREAD[tensors] * threads * blocks:
            continue
        part, align = rows.split(blocks, blocks * threads * VECTORS_PER_THREAD[tensors])
        assert part * rows.itemsize % CACHE_LINE == 0, "every block starts on a cache line if the first one does"
        assert part * rows.itemsize <= threads * VECTORS_PER_THREAD[tensors] * VECTOR, "it fits the registers"
        furthest = align - (rows.itemsize if rows.has_edges else VECTOR)  # bytes before the row, at most
        assert blocks * part * rows.itemsize >= furthest + N * rows.itemsize


def test_rows_start_on_cache_lines_if_capacity_allows():
    room = {N: Rows(1, N, torch.bfloat16, 0, True).split(8, 16384)[1] for N in (131072, 128256, 131000)}
    assert room == {131072: VECTOR, 128256: CACHE_LINE, 131000: CACHE_LINE}


@pytest.mark.parametrize("tensors", VECTORS_PER_THREAD)
def test_defaults_are_portable_and_among_the_choices(tensors):
    for vectors in (2**n for n in range(15)):
        default = cluster_default(tensors, vectors)
        assert default in cluster_choices(tensors, vectors)
        assert default["blocks"] in (1, 2, 4, 8, MAX_BLOCKS)
        assert default["blocks"] <= 8 or vectors > 8 * 1024 * VECTORS_PER_THREAD[tensors]


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
            assert threads * config["blocks"] <= MAX_THREADS, "every warp of a cluster has a slot in shared memory"
            assert config["blocks"] <= MAX_BLOCKS
        assert not (op == "add_rms_norm" and any(config["each"] == 8 for config in choices))


@pytest.mark.skipif(not is_installed(), reason="needs cuda-core")
@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize("N", [1000, 1024, 5000, 8192, 9000, 16376, 32768])
def test_norm_launches_have_a_thread_for_every_vector_of_the_row(N, gpu):
    op = registry.load("layer_norm")
    case = Case((("M", 7), ("N", N), ("affine", "same")), "bfloat16")
    found = kernel_launches(op, op.kernels["cuda"], case, datasheet(gpu), ("forward", "backward"))
    held = [one for one in found if one.name.startswith("norm_")]
    assert held or (gpu, N > 8192) == ("a100", True), "one block is too small for the longest rows"
    for one in held:
        each = int(one.name.split(",")[2])
        vectors = N * 2 // VECTOR
        assert one.code.threads % WARP == 0
        assert one.code.threads * each >= -(-vectors // one.code.cluster)
        assert one.code.threads * each * one.code.cluster < vectors + WARP * each * one.code.cluster + one.code.cluster


@pytest.mark.skipif(not is_installed(), reason="needs cuda-core")
def test_norms_spill_no_registers():
    """Launch bounds limit the registers; one more live value would spill."""
    flags, one = ("true", "false"), "bfloat16, bfloat16"
    forward = [
        f"norm_fwd<{one}, {each}, {is_rms}, {adds}>"
        for each, is_rms, adds in product(MAX_BLOCK_THREADS["forward"], flags, flags)
        if each < 8 or adds == "false"
    ]
    backward = [
        f"norm_bwd<{one}, {each}, {is_rms}, {adds}, {alone}>"
        for each, is_rms, adds, alone in product(MAX_BLOCK_THREADS["backward"], flags, flags, flags)
    ]
    binary, symbols = CUDA.cubin("sm_90", (*forward, *backward))
    spilled = {name: resources(CompiledKernel(symbols[name], binary, "sm_90", WARP)).spills for name in symbols}
    assert len(spilled) == len(forward) + len(backward)
    assert {name for name, spills in spilled.items() if spills} == set()
