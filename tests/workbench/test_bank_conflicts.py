"""Wavefronts of shared memory, compared with counts by hand and with Triton's count from its layouts."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewright import registry
from tilewright.hardware import datasheet
from tilewright.report.inspection import overview
from tilewright.workbench.inspect import inspect_cuda_file, inspect_kernel, inspect_launch
from tilewright.workbench.inspect.bank_conflicts import SharedAccess, mean_wavefronts, wavefronts
from tilewright.workbench.inspect.launches import call_launches
from tilewright.workbench.inspect.line_info import CodeLine
from tilewright.workbench.inspect.ptx_sim import shared_accesses

LAYOUTS = Path(__file__).parent / "bank_conflict_kernels.py"
LANES = np.arange(32)


def counted(addresses, active, width):
    ((counts, least),) = wavefronts(addresses, active, width).tolist()
    return counts, least


@pytest.mark.parametrize(
    ("addresses", "width", "expected"),
    [
        (LANES * 4, 4, (1, 1)),
        (LANES * 32 * 4, 4, (32, 1)),  # a column of 32 x 32 floats
        (LANES * 33 * 4, 4, (1, 1)),  # padded by a float
        ((LANES * 32 + (LANES ^ 5)) * 4, 4, (1, 1)),  # swizzled, column 5
        ((LANES * 32 + (LANES & 7 ^ 5)) * 4, 4, (4, 1)),  # swizzled by 8 rows
        (LANES * 0, 4, (1, 1)),  # all lanes access one word
        (LANES * 2, 2, (1, 1)),  # two lanes per word
        (LANES * 64, 2, (16, 1)),  # a column of 32 x 32 halves
        (LANES * 66, 2, (1, 1)),  # padded by a half, an even column
        (LANES * 66 + 2, 2, (2, 1)),  # and an odd one
        (LANES * 8, 8, (2, 2)),
        (LANES * 16, 8, (4, 2)),
        (LANES * 16, 16, (4, 4)),
        (LANES * 32, 16, (8, 4)),
        (LANES * 128, 16, (32, 4)),
        (LANES * 144, 16, (4, 4)),  # padded by 16 bytes
    ],
)
def test_wavefronts_counted_by_hand(addresses, width, expected):
    assert counted(addresses, np.ones(32, bool), width) == expected


def test_inactive_lanes_do_not_count():
    assert counted(LANES * 128, LANES < 8, 4) == (8, 1)
    assert counted(LANES * 16, LANES < 8, 16) == (1, 1)
    assert counted(LANES * 128, LANES < 0, 4) == (0, 0)


def test_warps_count_separately():
    threads = np.arange(80)  # the last warp is a half
    counts = wavefronts(np.where(threads < 32, threads * 8, threads * 4), threads != 40, 4)
    assert counts.tolist() == [[2, 1], [1, 1], [1, 1]]


def simulate(ptx: str, *, threads: int = 32, arguments=(), placeholder: int = 1 << 20):
    lines = [CodeLine(line.strip(), None) for line in ptx.strip().splitlines()]
    return list(shared_accesses(lines, threads, arguments, placeholder))


def computed(ptx: str, **more):
    """Return %r0 of each thread, given %r1 = thread index."""
    (access,) = simulate(f"mov.u32 %r1, %tid.x;\n{ptx}\nst.shared.b32 [%r0], %r1;", **more)
    return access.addresses


@pytest.mark.parametrize(
    ("ptx", "formula"),
    [
        ("shl.b32 %r0, %r1, 2;", lambda t: t * 4),
        ("mad.lo.s32 %r0, %r1, 132, 8;", lambda t: t * 132 + 8),
        ("bfe.u32 %r0, %r1, 2, 3;", lambda t: t >> 2 & 7),
        ("bfi.b32 %r0, %r1, 0, 4, 2;", lambda t: (t & 3) << 4),
        ("lop3.b32 %r0, %r1, 12, 3, 0xea;", lambda t: t & 12 | 3),
        ("xor.b32 %r2, %r1, 5;\nadd.s32 %r0, %r2, global_smem;", lambda t: t ^ 5),
        ("sub.s32 %r2, %r1, 16;\nshr.s32 %r2, %r2, 1;\nadd.s32 %r0, %r2, 16;", lambda t: (t - 16 >> 1) + 16),
        ("sub.s32 %r2, %r1, 16;\ndiv.s32 %r2, %r2, 3;\nadd.s32 %r0, %r2, 16;", lambda t: np.trunc((t - 16) / 3) + 16),
        ("rem.u32 %r0, %r1, 5;", lambda t: t % 5),
        ("mul.wide.s32 %rd2, %r1, -4;\ncvt.u32.u64 %r2, %rd2;\nneg.s32 %r0, %r2;", lambda t: t * 4),
        ("cvt.s64.s32 %rd1, %r1;\nadd.s64 %rd1, %rd1, -1;\ncvt.u32.u64 %r2, %rd1;\nadd.s32 %r0, %r2, 1;", lambda t: t),
        ("setp.gt.u32 %p1, %r1, 7;\nselp.b32 %r0, 64, %r1, %p1;", lambda t: np.where(t > 7, 64, t)),
        ("setp.lt.s32 %p1, %r1, 7;\nnot.pred %p2, %p1;\nselp.b32 %r0, 64, %r1, %p2;", lambda t: np.where(t < 7, t, 64)),
        ("min.s32 %r0, %r1, 9;", lambda t: np.minimum(t, 9)),
        ("shfl.sync.idx.b32 %r0, %r1, 3, 31, -1;", lambda t: t * 0 + 3),
        ("mov.u32 %r0, 4;\nsetp.eq.s32 %p1, %r1, 2;\n@%p1 mov.u32 %r0, 8;", lambda t: np.where(t == 2, 8, 4)),
        ("ld.param.u32 %r2, [kernel_param_1];\nmul.lo.s32 %r0, %r1, %r2;", lambda t: t * 12),
        ("ld.param.u32 %r2, [kernel_param_0];\nand.b32 %r2, %r2, 7;\nadd.s32 %r0, %r1, %r2;", lambda t: t),
    ],
)
def test_integer_instructions(ptx, formula):
    np.testing.assert_array_equal(computed(ptx, arguments=(None, 12)), formula(LANES))


@pytest.mark.parametrize(
    "ptx",
    [
        "ld.global.b32 %r0, [%rd1];",
        "ld.shared.b32 %r0, [%r1];\nadd.s32 %r0, %r0, 4;",
        "cvt.rn.f32.s32 %r0, %r1;",
        "mov.b32 %r0, 0f3F800000;",
        "mov.u32 %r0, %tid.y;",
        "ld.global.b32 %r2, [%rd1];\nsetp.eq.s32 %p1, %r2, 0;\nmov.u32 %r0, 4;\n@%p1 mov.u32 %r0, 8;",
    ],
)
def test_values_from_memory_are_unknown(ptx):
    assert simulate(f"mov.u32 %r1, %tid.x;\n{ptx}\nst.shared.b32 [%r0], %r1;")[-1].addresses is None


def test_branches_deactivate_threads_and_loops_run_once():
    first, inside, other, after = simulate(
        """
        mov.u32 %r1, %tid.x;
        setp.lt.u32 %p1, %r1, 8;
        $L_loop:
        st.shared.b32 [%r1], %r1;
        @%p1 bra $L_loop;
        @!%p1 bra $L_else;
        st.shared.v2.b32 [%r1+8], {%r1, %r1};
        bra.uni $L_end;
        $L_else:
        ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r1+-4];
        $L_end:
        cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r7;
        """
    )
    assert first.active.all()
    np.testing.assert_array_equal(inside.active, LANES < 8)
    np.testing.assert_array_equal(other.active, LANES >= 8)
    assert after.active.all()
    assert [(a.kind, a.width) for a in (first, inside, other, after)] == [
        ("store", 4),
        ("store", 8),
        ("load", 16),
        ("async copy", 16),
    ]
    assert (inside.addresses[0], other.addresses[0]) == (8, -4)


def test_both_paths_of_an_unknown_branch_are_taken():
    code = "ld.global.b32 %r2, [%rd1];\nsetp.eq.s32 %p1, %r2, 0;\n@%p1 bra $L_else;\nst.shared.b8 [%r1], %r1;"
    code += "\nbra.uni $L_end;\n$L_else:\nst.shared.b16 [%r1], %r1;\n$L_end:\nret;\nst.shared.b32 [%r1], %r1;"
    found = simulate(f"mov.u32 %r1, %tid.x;\n{code}")
    assert [(a.width, a.active.all(), a.active.any()) for a in found] == [(1, True, True), (2, True, True), (4, 0, 0)]


def test_ldmatrix_takes_a_row_address_from_each_lane():
    row, pitch = "mov.u32 %r1, %tid.x;", {"plain": 128, "padded": 144}
    for name, bytes_each in pitch.items():
        (access,) = simulate(
            f"{row}\nmul.lo.s32 %r2, %r1, {bytes_each};\nldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%r3, %r4}}, [%r2];"
        )
        counts = counted(access.addresses, access.active, access.width)
        assert counts == {"plain": (16, 2), "padded": (2, 2)}[name]


@pytest.mark.parametrize(
    ("layout", "expected"), [("plain", 32), ("swizzled", 1), ("partly_swizzled", 4), ("padded", 1)]
)
def test_conflicts_of_gluon_layouts(layout, expected):
    """The kernels assert the conflicts that Triton derives from the layouts alone."""
    launches = call_launches(
        lambda: (registry.launcher(LAYOUTS, layout), [torch.empty(32, 32, device="meta")]), datasheet("h200")
    )
    found = inspect_launch(launches[0], layout)
    store, load = found.shared_accesses
    assert (store.kind, load.kind) == ("store", "load")
    assert store.wavefronts == store.ideal
    assert (load.wavefronts, load.ideal, load.count) == (expected, 1, 8)
    text = LAYOUTS.read_text().splitlines()
    assert [text[access.source_line[1] - 1].rpartition("# ")[2] for access in (store, load)] == [
        "by rows",
        "by columns",
    ]


def predicted(kernel: str, dtype: str):
    op = registry.load("transpose")
    (found,) = inspect_kernel(op, op.kernels[kernel], op.bench[-1].with_dtype(dtype), datasheet("h200"))
    return found


@pytest.mark.parametrize(
    ("kernel", "floats", "halves"), [("cuda", 32, 16), ("cuda-padded", 1, 1), ("cuda-swizzled", 1, 1), ("triton", 1, 4)]
)
def test_transpose_kernels(kernel, floats, halves):
    for dtype, expected in (("float32", floats), ("bfloat16", halves)):
        found = predicted(kernel, dtype)
        loads, stores = (mean_wavefronts(found.shared_accesses, kind) for kind in ("load", "store"))
        assert loads[0] == expected
        assert stores[0] == stores[1]
        assert loads[1] == stores[1] == (4 if (kernel, dtype) == ("triton", "bfloat16") else 1)
    assert found.as_json()["shared_accesses"][1]["kind"] == "load"


def test_a_report_names_the_source_line(capsys):
    from rich.console import Console

    Console(width=200).print(overview([predicted("cuda", "float32")]))
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("load, 4 x 4 B"))
    assert line.split()[5:7] == ["32.0", "1.0"]
    assert "transpose.cu:" in line
    assert "tile[Layout<T>::offset(lane, row)]" in line


def test_bank_conflicts_of_amd_are_unknown(capsys):
    from rich.console import Console

    op = registry.load("transpose")
    (found,) = inspect_kernel(op, op.kernels["triton"], op.bench[0].with_dtype("float32"), datasheet("mi300x"))
    assert found.shared_accesses is None
    assert found.as_json()["shared_accesses"] is None
    Console(width=200).print(overview([found]))
    assert "bank conflicts are unknown" in capsys.readouterr().out


def test_mean_wavefronts_weighs_by_instructions_of_one_kind():
    accesses = [SharedAccess("load", 4, None, 3, 1.0, 1.0), SharedAccess("load", 16, None, 1, 8.0, 4.0)]
    assert mean_wavefronts(accesses, "load") == (2.75, 1.75)
    assert mean_wavefronts(accesses, "store") is None
    assert mean_wavefronts([*accesses, SharedAccess("load", 4, None, 1, None, None)], "load") is None


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_a_cuda_file_of_two_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    file = tmp_path / "two.cu"
    file.write_text(
        "__shared__ volatile float s[32 * 256];\n"
        'extern "C" __global__ void slow(float* x) { s[threadIdx.x * 32] = *x; }\n'
        'extern "C" __global__ void odd(float* x, int n) { s[threadIdx.x * n] = *x; }\n'
    )
    found = {one.name: one.shared_accesses for one in inspect_cuda_file(file, datasheet("h200"), 256, 0)}
    assert [(a.wavefronts, a.source_line) for a in found["slow"]] == [(32, (str(file), 2))]
    assert [a.wavefronts for a in found["odd"]] == [None], "it goes by what n is"
