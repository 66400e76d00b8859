"""How rows are shared out to the blocks of a cluster."""

import pytest
import torch

from tilewright.ops._rows import LINE, MOST_BLOCKS, PACK, PACKS, Rows, cluster_choices, cluster_default

LENGTHS = (1, 2, 7, 8, 1000, 4096, 4097, 50257, 65535, 65536, 128256, 131072, 262144)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tensors", PACKS)
@pytest.mark.parametrize("N", LENGTHS)
def test_pieces_hold_the_row_wherever_it_begins(N, tensors, dtype):
    rows = Rows(3, N, dtype, 0, True)
    for config in cluster_choices(tensors, rows.packs):
        threads, blocks = config["threads"], config["blocks"]
        if rows.packs > PACKS[tensors] * threads * blocks:
            continue
        piece, align = rows.cut(blocks, blocks * threads * PACKS[tensors])
        assert piece * rows.size % LINE == 0, "every block begins on a line if the first one does"
        assert piece * rows.size <= threads * PACKS[tensors] * PACK, "a block has registers for its piece"
        furthest = align - (rows.size if rows.has_edges else PACK)  # bytes before the row, at most
        assert blocks * piece * rows.size >= furthest + N * rows.size


def test_rows_begin_on_lines_where_there_is_room():
    room = {N: Rows(1, N, torch.bfloat16, 0, True).cut(8, 16384)[1] for N in (131072, 128256, 131000)}
    assert room == {131072: PACK, 128256: LINE, 131000: LINE}


@pytest.mark.parametrize("tensors", PACKS)
def test_defaults_are_portable_and_among_the_choices(tensors):
    for packs in (2**n for n in range(15)):
        default = cluster_default(tensors, packs)
        assert default in cluster_choices(tensors, packs)
        assert default["blocks"] in (1, 2, 4, 8, MOST_BLOCKS)
        assert default["blocks"] <= 8 or packs > 8 * 1024 * PACKS[tensors]
