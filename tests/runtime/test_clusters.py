"""How rows are shared out to the blocks of a cluster."""

from itertools import product

import pytest
import torch

from tilewright import registry
from tilewright.hardware import datasheet
from tilewright.ops.norm._cuda import CUDA, LARGEST_BLOCK, MOST_THREADS, WARP, _cluster_choices, _cluster_default
from tilewright.runtime.clusters import CACHE_LINE, MAX_BLOCKS, VECTOR, VECTORS_PER_THREAD, Rows, cluster_choices, cluster_default
from tilewright.runtime.cuda import MAX_PORTABLE_CLUSTER, is_installed
from tilewright.spec import Case
from tilewright.workbench.inspect.compiler import CompiledKernel
from tilewright.workbench.inspect.launches import kernel_launches
from tilewright.workbench.inspect.resources import resources

NORMS = [(op, way) for op in ("layer_norm", "add_rms_norm") for way in LARGEST_BLOCK]
LENGTHS = (1, 2, 7, 8, 1000, 4096, 4097, 50257, 65535, 65536, 128256, 131072, 262144)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tensors", VECTORS_PER_THREAD)
@pytest.mark.parametrize("N", LENGTHS)
def test_pieces_hold_the_row_wherever_it_begins(N, tensors, dtype):
    rows = Rows(3, N, dtype, 0, True)
    for config in cluster_choices(tensors, rows.packs):
        threads, blocks = config["threads"], config["blocks"]
        if rows.packs > VECTORS_PER_THREAD[tensors] * threads * blocks:
            continue
        piece, align = rows.cut(blocks, blocks * threads * VECTORS_PER_THREAD[tensors])
        assert piece * rows.size % CACHE_LINE == 0, "every block begins on a line if the first one does"
        assert piece * rows.size <= threads * VECTORS_PER_THREAD[tensors] * VECTOR, "a block has registers for its piece"
        furthest = align - (rows.size if rows.has_edges else VECTOR)  # bytes before the row, at most
        assert blocks * piece * rows.size >= furthest + N * rows.size


def test_rows_begin_on_lines_where_there_is_room():
    room = {N: Rows(1, N, torch.bfloat16, 0, True).cut(8, 16384)[1] for N in (131072, 128256, 131000)}
    assert room == {131072: VECTOR, 128256: CACHE_LINE, 131000: CACHE_LINE}


@pytest.mark.parametrize("tensors", VECTORS_PER_THREAD)
def test_defaults_are_portable_and_among_the_choices(tensors):
    for packs in (2**n for n in range(15)):
        default = cluster_default(tensors, packs)
        assert default in cluster_choices(tensors, packs)
        assert default["blocks"] in (1, 2, 4, 8, MAX_BLOCKS)
        assert default["blocks"] <= 8 or packs > 8 * 1024 * VECTORS_PER_THREAD[tensors]


@pytest.mark.parametrize(("op", "way"), NORMS)
def test_blocks_of_norms_hold_their_rows_and_no_more_threads_than_they_may(op, way):
    for packs in (2**n for n in range(14)):
        choices = _cluster_choices(op, f"cuda-{way}", 2, packs)
        default = _cluster_default(op, f"cuda-{way}", 2, packs)
        assert default in choices
        assert default["blocks"] <= MAX_PORTABLE_CLUSTER
        for config in choices:
            threads = packs // (config["each"] * config["blocks"])
            assert threads <= LARGEST_BLOCK[way][config["each"]]
            assert threads * config["blocks"] <= MOST_THREADS, "every warp of a cluster has a slot"
            assert config["blocks"] <= MAX_BLOCKS
        assert not (op == "add_rms_norm" and any(config["each"] == 8 for config in choices))


@pytest.mark.skipif(not is_installed(), reason="needs cuda-core")
@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize("N", [1000, 1024, 5000, 8192, 9000, 16376, 32768])
def test_launches_of_norms_have_a_pack_of_a_thread_for_every_pack_of_the_row(N, gpu):
    op = registry.load("layer_norm")
    case = Case((("M", 7), ("N", N), ("affine", "same")), "bfloat16")
    found = kernel_launches(op, op.kernels["cuda"], case, datasheet(gpu), ("forward", "backward"))
    held = [one for one in found if one.name.startswith("norm_")]
    assert held or (gpu, N > 8192) == ("a100", True), "one block alone is too small for the longest rows"
    for one in held:
        each = int(one.name.split(",")[2])
        packs = N * 2 // VECTOR
        assert one.code.threads % WARP == 0
        assert one.code.threads * each >= -(-packs // one.code.cluster)
        assert one.code.threads * each * one.code.cluster < packs + WARP * each * one.code.cluster + one.code.cluster


@pytest.mark.skipif(not is_installed(), reason="needs cuda-core")
def test_norms_spill_no_registers():
    """As many as fit are held to a number; one more value alive would go through memory."""
    flags, one = ("true", "false"), "bfloat16, bfloat16"
    forward = [
        f"norm_fwd<{one}, {each}, {is_rms}, {adds}>"
        for each, is_rms, adds in product(LARGEST_BLOCK["forward"], flags, flags)
        if each < 8 or adds == "false"
    ]
    backward = [
        f"norm_bwd<{one}, {each}, {is_rms}, {adds}, {alone}>"
        for each, is_rms, adds, alone in product(LARGEST_BLOCK["backward"], flags, flags, flags)
    ]
    binary, symbols = CUDA.cubin("sm_90", (*forward, *backward))
    spilled = {name: resources(CompiledKernel(symbols[name], binary, "sm_90", WARP)).spills for name in symbols}
    assert len(spilled) == len(forward) + len(backward)
    assert {name for name, spills in spilled.items() if spills} == set()
