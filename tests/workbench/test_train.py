"""train-step: what a step costs, where its time goes, and what limits it."""

from typing import ClassVar

import pytest
import torch
from torch import nn

import tilewright as tw
from tilewright import hardware
from tilewright.errors import TilewrightError
from tilewright.workbench.train import diagnosis, rounds, trace, variants, work, workloads
from tilewright.workbench.train.child import Trainer
from tilewright.workbench.train.kinds import classify, kinds
from tilewright.workbench.train.trace import StepTimes

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", workloads.architectures())
def test_architectures_have_the_published_number_of_parameters(name):
    model = workloads.build(workloads.workload(name), "meta").model
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(
        workloads.architectures()[name]["parameters"], rel=0.02 if name not in ("tiny", "bert") else 0.15
    )


def test_flops_of_a_model_are_those_of_its_gemms_and_of_half_the_pairs_of_causal_attention():
    job = workloads.workload("llama-1b", batch=2, length=1024)
    step = work.count(job)
    tokens, about = 2 * 1024, workloads.architectures()["llama-1b"]["config"]
    width = about["num_attention_heads"] * about["head_dim"]
    attention = 6 * about["num_hidden_layers"] * width * 1024  # 12 L H Q T per token, halved
    norms = 2 * about["num_hidden_layers"] + 1
    gemm = 6 * (step.parameters - norms * about["hidden_size"])  # the embedding is also the head
    assert step.model_flops["tensor.bfloat16"] == pytest.approx((gemm + attention) * tokens, rel=1e-6)
    # A fused backward computes the scores again: a quarter of the forward pass, or half of its two products.
    assert step.hardware_flops["tensor.bfloat16"] == pytest.approx((gemm + attention * 7 / 6) * tokens, rel=1e-6)


def test_recomputed_layers_count_for_the_hardware_and_not_for_the_model():
    plain, recomputed = (work.count(workloads.workload("tiny", checkpointing=on)) for on in (False, True))
    assert recomputed.model_flops == plain.model_flops
    extra = recomputed.hardware_flops["tensor.bfloat16"] - plain.hardware_flops["tensor.bfloat16"]
    head = 2 * 32 * 256 * 32  # the head is no layer: tokens, vocabulary, width
    forward = (plain.model_flops["tensor.bfloat16"] - 3 * head) / 3
    last = 2 * (2 * 32 * 64 * 32)  # the last projection of both layers: backward needs its input, not its output
    assert extra == pytest.approx(forward - last, rel=1e-6)


def test_a_prediction_is_the_sum_of_the_floors_and_scales_with_the_rates():
    step = work.count(workloads.workload("llama-1b"))
    rates = hardware.datasheet("h200").rates()
    predicted = step.predict(rates)
    assert predicted.matrix_s < predicted.seconds
    assert predicted.by_kind["GEMM"] + predicted.by_kind["attention"] == pytest.approx(predicted.matrix_s)
    faster = step.predict({unit: 2 * rate for unit, rate in rates.items()})
    assert faster.seconds == pytest.approx(predicted.seconds / 2)
    assert step.share_of_peak(step.model_flops, predicted.seconds, rates) < 1
    assert step.share_of_peak(step.model_flops, 1.0, {}) is None


def test_a_model_that_reads_values_has_no_prediction(tmp_path, monkeypatch):
    (tmp_path / "reads.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x).sum() * x.sum().item()\n"
        "def factory(): return Model(3, 3), torch.ones(2, 3)\n"
    )
    monkeypatch.chdir(tmp_path)
    found = work.count(workloads.workload("reads:factory"))
    assert isinstance(found, str)
    assert "meta device" in found


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT", "aten::mm", "aten::linear"), "GEMM"),
        (("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "aten::addmm"), "GEMM"),
        (("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16",), "attention"),
        (("void at::native::vectorized_elementwise_kernel<4, MulFunctor>", "aten::mul"), "elementwise"),
        (("void at::native::vectorized_elementwise_kernel<4>", "aten::mul", "LlamaRMSNorm"), "norms"),
        (("void at::native::reduce_kernel<512>", "aten::sum", "MulBackward0", "LlamaRMSNorm"), "norms"),
        (("_rms_norm_fwd",), "norms"),
        (("_linear_cross_entropy_rows",), "loss"),
        (("void (anonymous namespace)::softMaxForward", "aten::_log_softmax", "aten::cross_entropy_loss"), "loss"),
        (("multi_tensor_apply_kernel", "aten::_fused_adamw_", "Optimizer.step#AdamW.step"), "optimizer"),
        (("_adamw_step",), "optimizer"),
        (("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",), "communication"),
        (("Memcpy HtoD (Pinned -> Device)", "aten::copy_"), "data loading"),
        (("void at::native::embedding_backward_feature_kernel", "aten::embedding_dense_backward"), "embedding"),
        (("normal_kernel", "aten::normal_"), "elementwise"),
        (("aten.mm.default",), "GEMM"),
        (("aten.native_layer_norm_backward.default",), "norms"),
    ],
)
def test_kinds_of_kernels(names, kind):
    assert classify(names) == kind
    assert kind in kinds()


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def gpu_trace():
    """A step of 100 us: a norm, a GEMM, an all-reduce that half overlaps, and the gradient of the norm."""
    return {
        "traceEvents": [
            event("user_annotation", "enumerate(DataLoader)#_SingleProcess.__next__", 0, 20),
            event("user_annotation", "LlamaRMSNorm", 20, 8),
            event("cpu_op", "aten::mul", 21, 6, **{"Sequence number": 7, "Fwd thread id": 0}),
            event("cuda_runtime", "cudaLaunchKernel", 22, 2, correlation=1),
            event("cpu_op", "aten::mm", 30, 5),
            event("cuda_driver", "cuLaunchKernelEx", 31, 2, correlation=2),
            event("cuda_runtime", "cudaLaunchKernelExC", 36, 2, correlation=3),
            event("cpu_op", "MulBackward0", 40, 9, 2, **{"Sequence number": 7, "Fwd thread id": 1}),
            event("cpu_op", "aten::sum", 41, 5, 2),
            event("cuda_runtime", "cudaLaunchKernel", 42, 2, 2, correlation=4),
            event("kernel", "vectorized_elementwise_kernel", 40, 10, 7, correlation=1),
            event("kernel", "nvjet_hsh", 50, 20, 7, correlation=2),
            event("kernel", "ncclDevKernel_AllReduce", 60, 20, 9, correlation=3),
            event("kernel", "reduce_kernel", 90, 10, 7, correlation=4),
            event("gpu_user_annotation", "LlamaRMSNorm", 40, 10, 7),
            {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 22},
        ]
    }


def test_kernels_are_classified_by_what_launched_them():
    times = trace.read(gpu_trace(), 1, 100.0)
    assert times.is_gpu
    assert times.by_kind == {"norms": 20.0, "GEMM": 20.0, "communication": 20.0}
    assert (times.busy_us, times.wait_us, times.exposed_us, times.launches) == (50.0, 20.0, 10.0, 4)


def test_times_are_per_step():
    assert trace.read(gpu_trace(), 2, 100.0).by_kind["GEMM"] == 10.0


def test_operators_of_a_cpu_count_the_time_they_spend_themselves():
    events = [
        event("cpu_op", "aten::linear", 0, 10),
        event("cpu_op", "aten::addmm", 2, 6),
        event("user_annotation", "Optimizer.step#AdamW.step", 10, 10),
        event("cpu_op", "aten::mul", 12, 4),
    ]
    times = trace.read({"traceEvents": events}, 1, 20.0)
    assert not times.is_gpu
    assert times.by_kind == {"GEMM": 10.0, "optimizer": 4.0}
    assert times.busy_us == 14.0


def times_of(busy=100.0, wait=0.0, exposed=0.0, **by_kind):
    return StepTimes(100.0, by_kind, busy, wait, exposed, 10, True)


@pytest.mark.parametrize(
    ("times", "limit"),
    [
        (times_of(GEMM=60.0, elementwise=40.0), diagnosis.COMPUTE),
        (times_of(GEMM=30.0, attention=10.0, elementwise=60.0), diagnosis.MEMORY),
        (times_of(busy=80.0, GEMM=80.0), diagnosis.HOST),
        (times_of(busy=80.0, wait=15.0, GEMM=80.0), diagnosis.LOADING),
        (times_of(busy=98.0, wait=60.0, GEMM=98.0), diagnosis.COMPUTE),  # loading that the GPU does not wait for
        (times_of(exposed=20.0, GEMM=80.0, communication=30.0), diagnosis.NETWORK),
    ],
)
def test_the_limit_of_a_job(times, limit):
    found = diagnosis.diagnose(100.0, times, 0.7)
    assert found.limit == limit
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert f"Bottleneck: {limit}" in str(found)
    assert found.next == diagnosis.NEXT[limit]
    assert "70% of the peak" in str(found)


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        torch.ones(1).item()
        import time

        time.sleep(0.02)
        return torch.ones(8)


def loop(job, batches, steps=6):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    for _, batch in zip(range(steps), batches, strict=False):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        job.step()


@pytest.mark.parametrize("is_torchs", [True, False])
def test_a_loop_that_waits_for_data_is_limited_by_data_loading(capfd, is_torchs):
    with tw.job(warmup=1, steps=3) as job:
        loader = torch.utils.data.DataLoader(Slow()) if is_torchs else job.batches(iter(Slow()))
        loop(job, loader)
    assert job.diagnosis.limit == diagnosis.LOADING
    assert job.times.wait_us > 10e3
    assert len(job.step_us) == 2  # six steps, without the warm-up and those that were profiled
    assert "Bottleneck: data loading" in capfd.readouterr().out


def test_a_loop_with_fewer_steps_than_the_warm_up_says_so(capfd):
    with tw.job() as job:
        loop(job, [torch.ones(8)] * 2)
    assert job.diagnosis is None
    assert "no step was profiled: the loop marked 2 steps" in capfd.readouterr().out
    with pytest.raises(ValueError, match="steps at least 1"):
        tw.job(steps=0)


def test_a_loop_inside_another_profiler_is_refused():
    with tw.job(warmup=0) as job:
        with pytest.raises(RuntimeError, match="another profiler is running: end it"), tw.job(warmup=0):
            pass
        loop(job, [torch.ones(8)])
    assert job.times is not None


def test_a_loop_that_fails_prints_nothing_and_stops_the_profiler(capfd):
    job = tw.job(warmup=0)

    def fail():
        with job:
            loop(job, [torch.ones(8)], 1)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert capfd.readouterr().out == ""
    assert job.times is not None
    torch.profiler.profile().__enter__().__exit__(None, None, None)  # another one can start


def test_memory_by_category():
    found = {}
    for variant in ("eager", "ours-8bit"):
        trainer = Trainer(workloads.workload("tiny", dtype="float32"), variant, "cpu")
        found[variant] = trainer.memory()
    parameters = sum(p.nbytes for p in trainer.running.model.parameters())
    one = found["eager"]
    assert one["gradients"] == parameters
    assert parameters < one["parameters"] < 1.01 * parameters  # with the buffers of the rotary embedding
    assert one["optimizer"] == pytest.approx(2 * parameters, rel=0.01)
    assert found["ours-8bit"]["optimizer"] < 1.6 * parameters  # some tensors are too small for 8 bits
    assert one["peak"] is None


def test_activations_are_what_forward_saves_beside_the_parameters(tmp_path, monkeypatch):
    (tmp_path / "square.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x): return super().forward(super().forward(x)).square().sum()\n"
        "def factory(): return Model(8, 8), torch.randn(5, 8)\n"
    )
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(workloads.workload("square:factory"), "eager", "cpu")
    assert (
        trainer.memory()["activations"] == 3 * 5 * 8 * 4
    )  # the inputs of two layers and of the square; not the weight


def test_every_step_takes_another_batch_and_lowers_the_loss():
    trainer = Trainer(workloads.workload("tiny", dtype="float32"), "ours", "cpu")
    trainer.running.optimizer.param_groups[0]["lr"] = 1e-2
    losses = [trainer._step().item() for _ in range(12)]
    assert losses[-1] < losses[0]
    assert len({*losses[:4]}) == 4


def test_norms_of_an_eager_model_are_found_in_both_directions():
    trainer = Trainer(workloads.workload("tiny", dtype="float32"), "eager", "cpu")
    times = StepTimes(**trainer.profile(1))
    assert {"GEMM", "attention", "norms", "loss", "optimizer", "embedding"} <= times.by_kind.keys()
    bare = Trainer(workloads.workload("tiny", dtype="float32"), "eager", "cpu")
    bare.running.takes_hooks = False
    launches = {name: kind for kind, name, _ in times.top}
    assert launches["aten::mm"] == "GEMM"
    assert StepTimes(**bare.profile(1)).by_kind["norms"] < times.by_kind["norms"]
    assert not any(m._forward_hooks for m in trainer.running.model.modules())


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "job:factory", "defines no function named 'factory'"),
        ("1 / 0", "job:factory", "cannot import job: ZeroDivisionError"),
        ("def factory(): return 3", "job:factory", r"must return \(model, batch\), not int"),
        ("def factory(): raise ValueError('no data')", "job:factory", "ValueError: no data"),
        ("", "llama-2b", "did you mean 'llama-1b'"),
    ],
)
def test_models_that_cannot_be_built(tmp_path, monkeypatch, text, name, message):
    (tmp_path / "job.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "job", raising=False)
    with pytest.raises(TilewrightError, match=message):
        workloads.build(workloads.workload(name), "cpu")


def test_a_model_without_a_loss_or_parameters_is_refused():
    with pytest.raises(TilewrightError, match="must return its loss"):
        workloads.loss_of(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(TilewrightError, match="requires a gradient"):
        variants.eager(nn.ReLU(), "cpu")
    with pytest.raises(TilewrightError, match="at most 64 tokens"):
        workloads.build(workloads.workload("tiny", length=65), "meta")


def test_liger_is_refused_where_it_would_change_nothing():
    pytest.importorskip("liger_kernel")
    with pytest.raises(TilewrightError, match="Liger does not support Linear"):
        variants.liger(nn.Linear(2, 2), "cpu")


class Recorder:
    """A child that answers at once; one variant fails in its second round, another cannot be built."""

    requests: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, work, variant, options):
        self.variant = variant

    def receive(self):
        if self.variant == "compile":
            return "failed", "no compiler"
        return "done", {"dtype": "float32", "units": 10, "unit": "tokens"}

    def ask(self, method, *args):
        self.requests.append((self.variant, method))
        if self.variant == "liger" and self.requests.count(("liger", "steps")) == 2:
            return "failed", "out of memory"
        speed = {"eager": 200.0, "ours": 100.0}.get(self.variant, 1.0)
        answers = {
            "steps": [speed] * (args[0] if args else 0),
            "memory": {"parameters": 1, "gradients": 1, "optimizer": 2, "activations": 3, "peak": 9},
            "profile": vars(times_of(GEMM=100.0)),
        }
        return "done", answers[method]

    def close(self):
        pass


def test_variants_take_turns_in_a_random_order_and_a_failure_does_not_stop_the_others(monkeypatch):
    monkeypatch.setattr(rounds, "_Child", Recorder)
    Recorder.requests.clear()
    names = ("eager", "compile", "liger", "ours")
    options = rounds.Options("cpu", rounds=12, steps=3)
    found = {one.variant: one for one in rounds.measure(workloads.workload("tiny"), names, options)}
    assert (found["compile"].reason, found["liger"].reason) == ("no compiler", "out of memory")
    assert found["liger"].samples_us == []
    assert len(found["eager"].samples_us) == len(found["ours"].samples_us) == 36
    assert found["ours"].against == {"kernel": "eager", "ratio": 2.0, "interval": [2.0, 2.0]}
    assert found["ours"].rate == pytest.approx(10 / 100e-6)
    assert found["ours"].memory.rest == 2
    turns = [variant for variant, method in Recorder.requests if method == "steps" and variant != "liger"]
    pairs = {tuple(turns[place : place + 2]) for place in range(0, len(turns), 2)}
    assert pairs == {("eager", "ours"), ("ours", "eager")}
