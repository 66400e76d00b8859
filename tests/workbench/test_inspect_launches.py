"""The launches that a call would do on a GPU that is not present."""

import json
from pathlib import Path

import pytest
import torch
from triton.runtime.jit import JITFunction

from tilewright import registry, source
from tilewright.errors import LauncherFailed, UnknownSetting
from tilewright.hardware import datasheet
from tilewright.runtime.cuda import MAX_DEFAULT_SHARED, is_installed
from tilewright.spec import Case
from tilewright.workbench.inspect.fake_gpu import fake_gpu
from tilewright.workbench.inspect.launches import call_launches, kernel_launches, with_config

FILE = Path(__file__).parent / "inspect_kernels.py"


def launches(name, *sizes, gpu="h200"):
    def load():
        return registry.launcher(FILE, name), [torch.empty(sizes, device="meta")]

    return call_launches(load, datasheet(gpu))


def softmax(kernel, gpu, directions=("forward",), **point):
    op = registry.load("softmax")
    return kernel_launches(op, op.kernels[kernel], Case(tuple(point.items()), "bfloat16"), datasheet(gpu), directions)


def attributes(launch):
    names = [*launch.code.signature]
    return {names[path[0]] for path, given in launch.code.attributes.items() if ["tt.divisibility", 16] in given}


def test_a_launch_is_specialised_as_by_triton():
    (launch,) = launches("copy", 4096)
    assert attributes(launch) == {"x_ptr", "y_ptr", "N"}
    assert launch.code.signature == {"x_ptr": "*fp32", "y_ptr": "*fp32", "N": "i32", "BLOCK": "constexpr"}
    assert launch.grid == (4, 1, 1)
    (moved,) = launches("copy_from_the_second", 4096)
    assert attributes(moved) == {"y_ptr"}, "neither the pointer nor 4095 is a multiple of 16"
    (one,) = launches("copy_one", 4096)
    assert one.code.signature["N"] == "constexpr"
    (long,) = launches("copy", 2**32)  # 16 GiB that are never allocated
    assert long.code.signature["N"] == "i64"


def test_each_gpu_has_its_own_tuned_configs_and_target():
    winner = json.loads((source.TUNED / "softmax.json").read_text())["h200"]["bwd 2 256"]
    (mine,), (default,) = (softmax("triton", gpu, ("backward",), M=4096, N=256) for gpu in ("h200", "a100"))
    assert {name: mine.code.config[name] for name in winner} == winner
    assert {name: default.code.config[name] for name in winner} != winner
    assert (mine.code.target.arch, default.code.target.arch) == (90, 80)
    (amd,) = softmax("triton", "mi300x", M=4096, N=256)
    assert (amd.code.target.backend, amd.code.target.warp_size) == ("hip", 64)


def test_blocks_have_at_most_1024_threads():
    for gpu, warps in (("a100", 32), ("mi300x", 16)):
        (launch,) = softmax("triton", gpu, M=512, N=32768)
        assert launch.code.config["num_warps"] == warps


@pytest.mark.skipif(not is_installed(), reason="needs cuda-core")
def test_cuda_uses_clusters_where_the_gpu_has_them():
    (launch,) = softmax("cuda", "h200", M=512, N=262144)
    assert launch.code.cluster > 1
    assert launch.blocks == launch.programs * launch.code.cluster
    assert "<bfloat16" in launch.name
    for gpu in ("a100", "rtx-4090"):
        (held,) = softmax("cuda", gpu, M=512, N=65536)
        assert "<bfloat16" in held.name
        assert (held.code.threads, held.code.cluster) == (1024, 1), "a row of 8192 packs, the maximum of one block"
        (fallen_back,) = softmax("cuda", gpu, M=512, N=65537)
        assert fallen_back.name == "_online_fwd"


@pytest.mark.skipif(not is_installed(), reason="needs cuda-core")
@pytest.mark.parametrize("gpu", ["h200", "a100", "rtx-4090"])
def test_weights_of_norms_fit_into_portable_shared_memory(gpu):
    op = registry.load("layer_norm")
    case = Case((("M", 512), ("N", 8192), ("affine", "fp32")), "bfloat16")
    found = kernel_launches(op, op.kernels["cuda"], case, datasheet(gpu), ("backward",))
    (launch,) = [one for one in found if one.name.startswith("norm_bwd")]
    assert launch.code.shared * launch.code.cluster == 8192 * torch.float32.itemsize
    assert launch.code.shared <= MAX_DEFAULT_SHARED


def test_the_number_of_stages_follows_from_shared_memory():
    def stages(name, gpu, dtype, **point):
        op = registry.load(name)
        launch = kernel_launches(op, op.kernels["triton"], Case(tuple(point.items()), dtype), datasheet(gpu))[0]
        return launch.code.config.get("STAGES") or launch.code.options["num_stages"]

    rows = {"M": 64, "N": 65536, "affine": "same"}
    norm = {gpu: stages("add_layer_norm", gpu, "float32", **rows) for gpu in ("h200", "rtx-4090")}
    assert norm == {"h200": 3, "rtx-4090": 2}
    sizes = {"M": 8192, "N": 8192, "K": 4096, "relu": True}
    linear = {gpu: stages("linear", gpu, "bfloat16", **sizes) for gpu in ("h200", "mi300x")}
    assert linear == {"h200": 3, "mi300x": 2}


def test_registered_operators_launch_in_both_directions():
    op = registry.load("attention")
    found = kernel_launches(op, op.kernels["triton"], op.bench[0], datasheet("h200"), ("forward", "backward"))
    assert [launch.direction for launch in found][:2] == ["forward", "backward"]
    assert len({launch.name for launch in found}) == len(found) >= 3
    only = kernel_launches(op, op.kernels["triton"], op.bench[0], datasheet("h200"), ("backward",))
    assert only == found[1:]


def test_an_autotuned_kernel_uses_its_first_configuration():
    (launch,) = launches("searched", 128)
    assert (launch.code.config["BLOCK"], launch.code.options["num_warps"], launch.grid) == (64, 2, (2, 1, 1))
    assert "the first of 2" in launch.note


def test_a_call_that_reads_values_is_traced_up_to_there():
    (launch,) = launches("until_a_value", 4096)
    why = "the call reads tensor values on the host"
    assert launch.note == f"the last launch that can be traced without a GPU: after it, {why}"
    with pytest.raises(LauncherFailed, match=rf"of_values fails before it launches a kernel \({why}\)"):
        launches("of_values", 4096)


def test_values_that_a_call_reads_can_be_provided():
    op = registry.load("unique")
    case = Case((("N", 2**20), ("spread", 1), ("inverse", True)), "int16")
    found = {n: kernel_launches(op, op.kernels["triton"], case, datasheet("h200"), reads=n) for n in (None, 0)}
    names = ["_unique_mark", "_unique_groups", "_unique_write", "_unique_inverse"]
    assert [launch.name for launch in found[0]] == names
    assert [launch.name for launch in found[None]] == names[:2]
    assert not found[0][-1].note


def test_with_config():
    (launch,) = launches("copy", 4096)
    other = with_config(launch, {"BLOCK": 256, "num_warps": 8})
    assert other.code.config | {"BLOCK": 256, "num_warps": 8} == other.code.config
    with pytest.raises(UnknownSetting, match="did you mean 'BLOCK'"):
        with_config(launch, {"BLOK": 1})


def test_a_fake_gpu_leaves_no_patches():
    before = JITFunction.run, torch.cuda.is_available, torch.cuda.get_device_name
    with fake_gpu(datasheet("h200")) as device:
        x = torch.empty(3, device="cuda")
        assert x.is_cuda
        assert x.device == device == x.cuda().device
        assert torch.cuda.get_device_capability() == (9, 0)
        assert x.new_empty(2).get_device() == device.index
        assert not torch.empty(3).is_cuda
    with pytest.raises(LauncherFailed):
        launches("of_values", 4096)
    assert x.is_meta
    assert not x.is_cuda
    assert (JITFunction.run, torch.cuda.is_available, torch.cuda.get_device_name) == before
