"""Laws of all norms, with and without a residual."""

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from support import assert_compiles, assert_gradients_match, assert_right, crossover_at, laid_out
from tilewright.ops.norm import _cuda as _norm_cuda
from tilewright.ops.norm import _operators as _norm
from tilewright.ops.norm import _triton as _norm_triton
from tilewright.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from tilewright.ops.norm._operators import Norm, NormBackward
from tilewright.runtime.configs import clear_plans
from tilewright.runtime.crossovers import PerGPU
from tilewright.runtime.sizes import next_power_of_2, quarter_octave

NORMS = (rms_norm, layer_norm, add_rms_norm, add_layer_norm)
inf, nan = float("inf"), float("nan")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def fast_path(monkeypatch):
    """The public functions use our kernels for inputs of any size."""
    for norm in NORMS:
        monkeypatch.setattr(norm, "CROSSOVER", crossover_at(0))


class NormLaws:
    """Laws of tw.<op>(*inputs, normalized_shape, *weights), with `inputs` and `weights` tensors."""

    module: ModuleType
    call: Callable[..., Any]
    formula: Callable[..., Any]
    inputs = 1
    weights: int
    is_rms: bool

    def ours(self, *tensors: Tensor | None, dims: int = 1, **options: Any):
        return self._by(type(self).call, tensors, dims, options)

    def expected(self, *tensors: Tensor | None, dims: int = 1, **options: Any):
        return self._by(type(self).formula, tensors, dims, options)

    def _by(self, fn, tensors, dims, options):
        """Return all results stacked into one tensor."""
        inputs, weights = tensors[: self.inputs], tensors[self.inputs :]
        results = fn(*inputs, inputs[0].shape[-dims:], *weights, **options)
        return results if isinstance(results, Tensor) else torch.stack(results)

    def tensors(self, shape, device, layout="contiguous", dtype=torch.float32, wide=False, dims=1) -> list[Tensor]:
        rows = [laid_out(shape, layout, device=device, dtype=dtype, seed=n) for n in range(self.inputs)]
        kind = torch.float32 if wide else dtype
        return rows + [
            laid_out(shape[-dims:], layout, device=device, dtype=kind, seed=9 + n) for n in range(self.weights)
        ]

    @pytest.mark.parametrize("layout", ["transposed", "sliced", "offset", "expanded"])
    @pytest.mark.parametrize("shape", [(7, 1, 9), (6, 33)])
    def test_any_shape_and_layout(self, shape, layout, device):
        tensors = self.tensors(shape, device, layout)
        assert_right(self.ours(*tensors), self.expected, *tensors)
        assert_gradients_match(self.ours, self.expected, *tensors)

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_weight_dtypes(self, dtype, device):
        for tensors in (
            self.tensors((5, 40), device, dtype=dtype),
            self.tensors((5, 40), device, dtype=dtype, wide=True),
            self.tensors((5, 40), device, dtype=dtype)[: self.inputs],
        ):
            assert self.ours(*tensors).dtype == dtype
            assert_right(self.ours(*tensors), self.expected, *tensors)
            assert_gradients_match(self.ours, self.expected, *tensors)

    def test_several_normalized_dimensions(self, device):
        tensors = self.tensors((5, 3, 7), device, dims=2)
        fit = {"dims": 2}
        assert_right(self.ours(*tensors, **fit), lambda *t: self.expected(*t, **fit), *tensors)
        assert_gradients_match(lambda *t: self.ours(*t, **fit), lambda *t: self.expected(*t, **fit), *tensors)

    @pytest.mark.parametrize("shape", [(37, 200), (3, 8192), (3, 8200)], ids=str)
    def test_every_configuration(self, shape, device, monkeypatch):
        """With so few programs that each loops over several tiles."""
        never = PerGPU("never", lambda gpu: float("inf"))
        monkeypatch.setattr(_norm_cuda, "MIN_CLUSTER", dict.fromkeys(_norm_cuda.MIN_CLUSTER, never))
        tensors = [t.requires_grad_() for t in self.tensors(shape, device)]

        def run(norm):
            y = norm(*tensors)
            return y, *torch.autograd.grad(y, tensors, torch.cos(y.detach()))

        expected = run(self.expected)
        for direction in ("forward", "backward"):
            bucket = quarter_octave if direction == "forward" else next_power_of_2
            key = (self.module.op.name, direction, 4, bucket(shape[1]))
            alike = {"PROGRAMS": 2} | (
                {"num_warps": 4, "STAGES": 1} if device == "cpu" else {}
            )  # these have no effect on the CPU
            choices = [
                {name: alike.get(name, value) for name, value in config.items()}
                for config in _norm_triton.CONFIG.choices_on(-1, key)
            ]
            for config in (c for n, c in enumerate(choices) if c not in choices[:n]):
                with _norm_triton.CONFIG.override(key, config):
                    torch.testing.assert_close(run(self.ours), expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("is_turned", [False, True])
    def test_double_backward(self, is_turned, device):
        shape = (2, 3, 5)
        tensors = self.tensors(shape, device)
        if is_turned:  # rows in an order that no view can undo
            turned = [t.permute(1, 0, 2).contiguous().permute(1, 0, 2) for t in tensors[: self.inputs]]
            tensors = [*turned, *tensors[self.inputs :]]
        tensors = [t.requires_grad_() for t in tensors]

        def twice(norm):
            first = torch.autograd.grad(norm(*tensors).square().sum(), tensors, create_graph=True)
            return torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), tensors)

        for ours, theirs in zip(twice(self.ours), twice(self.expected), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    def test_only_required_gradients_are_computed(self, device):
        for number in range(self.inputs + self.weights):
            tensors = self.tensors((4, 9), device)
            tensors[number].requires_grad_()
            self.ours(*tensors).square().sum().backward()
            expected = [t.detach().clone() for t in tensors]
            expected[number].requires_grad_()
            self.expected(*expected).square().sum().backward()
            assert [t.grad is not None for t in tensors] == [n == number for n in range(len(tensors))]
            torch.testing.assert_close(tensors[number].grad, expected[number].grad, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 4), (5,)])
    def test_empty_tensors_and_single_rows(self, shape, device):
        tensors = [t.requires_grad_() for t in self.tensors(shape, device)]
        got = self.ours(*tensors)
        torch.testing.assert_close(got, self.expected(*tensors))
        gradients = torch.autograd.grad(got.sum(), tensors)
        assert [g.shape for g in gradients] == [t.shape for t in tensors]
        assert shape == (5,) or all(not g.any() for g in gradients)

    def test_double_precision_matches_torch(self, device):
        tensors = self.tensors((4, 9), device, dtype=torch.float64)
        torch.testing.assert_close(self.ours(*tensors), self.expected(*tensors), rtol=0, atol=0)

    @pytest.mark.parametrize("value", [nan, inf, -inf])
    def test_nan_and_infinity_stay_in_their_row(self, value, device):
        tensors = self.tensors((4, 30), device)
        tensors[0][1, 3] = value
        expected = self.expected(*[t.cpu() for t in tensors])  # torch's CUDA kernel returns NaN for the whole row
        torch.testing.assert_close(self.ours(*tensors).cpu(), expected, equal_nan=True, rtol=1e-5, atol=1e-5)

    def test_results_are_deterministic(self, device):
        def once():
            tensors = [t.requires_grad_() for t in self.tensors((1000, 24), device)]
            return torch.autograd.grad(self.ours(*tensors).square().sum(), tensors)

        for one, other in zip(once(), once(), strict=True):
            assert torch.equal(one, other)

    @pytest.mark.filterwarnings("ignore:Mismatch dtype")
    def test_other_weight_dtypes_go_to_torch(self, device, monkeypatch):
        monkeypatch.setattr(_norm, "_plan_forward", lambda *_: pytest.fail("our kernel was launched"))
        clear_plans()
        for dtype, other in ((torch.float32, torch.float16), (torch.float16, torch.bfloat16)):
            tensors = self.tensors((4, 9), device)
            inputs = [x.to(dtype) for x in tensors[: self.inputs]]
            weights = [w.to(other) for w in tensors[self.inputs :]]
            with contextlib.suppress(RuntimeError):  # torch rejects some of these
                type(self).call(*inputs, (9,), *weights)

    def test_errors_match_torch(self, device):
        tensors = self.tensors((4, 8), device)
        inputs, weights = tensors[: self.inputs], tensors[self.inputs :]
        bad = [
            (*inputs, (7,)),
            (*inputs, ()),
            (*inputs, 8),
            (*inputs, (8,), torch.ones(7, device=device)),
            (*inputs, (8,), [1.0] * 8),
            (*inputs, (8,), *weights, "small"),
            (*(x.int() for x in inputs), (8,)),
        ]
        for args in bad:
            with pytest.raises((RuntimeError, TypeError)) as theirs:
                type(self).formula(*args)
            with pytest.raises(theirs.type) as ours:
                type(self).call(*args)
            assert str(ours.value) == str(theirs.value)

    def test_autocast_and_functional_transforms_match_torch(self, device):
        tensors = self.tensors((4, 8), device)
        with torch.autocast(device, dtype=torch.bfloat16):
            assert self.ours(*tensors).dtype == self.expected(*tensors).dtype
        inputs = tuple(tensors[: self.inputs])
        torch.testing.assert_close(torch.func.vmap(self.ours)(*inputs), torch.func.vmap(self.expected)(*inputs))
        ours, theirs = (torch.func.jvp(norm, inputs, inputs) for norm in (self.ours, self.expected))
        torch.testing.assert_close(ours, theirs)

    def test_small_inputs_go_to_torch(self, device, monkeypatch):
        monkeypatch.setattr(self.module, "CROSSOVER", crossover_at(33))
        tensors = self.tensors((4, 8), device)
        torch.testing.assert_close(self.ours(*tensors), self.expected(*tensors), rtol=0, atol=0)

    def test_registered_operators(self, device):
        operator = _norm.normalize if self.inputs == 1 else _norm.add_normalize
        weights = [*self.tensors((4, 33), device)[self.inputs :], None][:2]
        options = Norm(33, 1e-5, self.is_rms)
        inputs = self.tensors((4, 33), device, "transposed")[: self.inputs]
        for keeps in (False, True):
            torch.library.opcheck(operator.registered, (*inputs, *weights, *options._replace(keeps_stats=keeps)))
        inputs[0].requires_grad_()
        for keeps in (False, True):  # without saved statistics backward recomputes them
            torch.library.opcheck(operator.registered, (*inputs, None, None, *options._replace(keeps_stats=keeps)))
        grads = (*self.tensors((4, 33), device)[: self.inputs], None)[:2]
        wanted = [w is not None for w in weights]
        stats = torch.rand(4, 2, device=device)
        args = (inputs[0].detach(), *weights, stats, *grads, *NormBackward(33, 0.0, self.is_rms, "best", *wanted))
        torch.library.opcheck(_norm.normalize_backward.registered, args)

    def stats_of(self, tensors: list[Tensor], form: str, keeps: bool = True) -> Tensor:
        inputs, weights = tensors[: self.inputs], [*tensors[self.inputs :], None][:2]
        operator = _norm.normalize if self.inputs == 1 else _norm.add_normalize
        options = Norm(inputs[0].shape[-1], 1e-5, self.is_rms, form=form, keeps_stats=keeps)
        return operator(*inputs, *weights, options)[-1]

    @pytest.mark.parametrize("form", ["triton", pytest.param("cuda", marks=pytest.mark.gpu)])
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_forward_saves_mean_and_rstd(self, dtype, form, device):
        for shape in ((0, 8), (1, 1), (37, 200), (5, 781), (3, 4096), (2, 40000)):
            tensors = self.tensors(shape, device, dtype=dtype)
            stats = self.stats_of(tensors, form)
            x = (tensors[0] if self.inputs == 1 else tensors[0] + tensors[1]).double()
            mean = torch.zeros_like(x[:, 0]) if self.is_rms else x.mean(1)
            scale = ((x - mean[:, None]).square().mean(1) + 1e-5).rsqrt()
            torch.testing.assert_close(stats.double(), torch.stack([mean, scale], 1), rtol=1e-5, atol=1e-6)

    def test_nothing_is_saved_without_gradients(self, device, monkeypatch):
        plan = _norm._plan_forward

        def kept(*tensors):
            found = []
            spy = lambda options, *rest: found.append(options.keeps_stats) or plan(options, *rest)
            monkeypatch.setattr(_norm, "_plan_forward", spy)
            clear_plans()
            self.ours(*tensors)
            return found

        tensors = self.tensors((4, 9), device)
        assert kept(*tensors) == [False]
        with torch.no_grad():
            assert kept(*(t.clone().requires_grad_() for t in tensors)) == [False]
        for number in range(len(tensors)):
            with_gradient = tensors[number].clone().requires_grad_()
            assert kept(*tensors[:number], with_gradient, *tensors[number + 1 :]) == [True]

    def test_saved_statistics_have_no_gradient(self, device):
        tensors = self.tensors((4, 9), device)
        tensors[0].requires_grad_()
        assert not self.stats_of(tensors, "triton").requires_grad
        results = type(self).call(*tensors[: self.inputs], (9,), *tensors[self.inputs :])
        assert isinstance(results, Tensor) if self.inputs == 1 else len(results) == 2

    def test_compiled_results_are_equal(self, device):
        tensors = self.tensors((4, 33), device)
        assert_compiles(self.ours, *tensors)
        compiled = torch.compile(self.ours, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (5, 6):
            leaves = [t.requires_grad_() for t in self.tensors((rows, 33), device)]
            gradients = torch.autograd.grad(compiled(*leaves).square().sum(), leaves)
            expected = torch.autograd.grad(self.ours(*leaves).square().sum(), leaves)
            torch.testing.assert_close(gradients, expected)

    @pytest.mark.parametrize("shape", [(6, 33), (2, 3, 1000)], ids=str)
    def test_rows_with_gaps_are_read_in_place(self, shape, device, monkeypatch):
        tensors = self.tensors(shape, device)
        wide = torch.zeros(*shape[:-1], shape[-1] + 24, device=device)
        x = wide[..., : shape[-1]].copy_(tensors[0])
        spied, plan = [], _norm._plan_forward
        monkeypatch.setattr(_norm, "_plan_forward", lambda *args: spied.append(args[5:]) or plan(*args))
        torch.testing.assert_close(self.ours(x, *tensors[1:]), self.ours(*tensors), rtol=0, atol=0)
        assert spied[0] == (shape[-1] + 24,)

    @pytest.mark.gpu
    def test_more_than_2_31_elements(self, device):
        x = torch.ones(2**20 + 1, 2048, device=device, dtype=torch.bfloat16)
        x[-1] = torch.arange(2048)
        tensors = [*[x] * self.inputs, *(torch.ones(2048, device=device, dtype=x.dtype) for _ in range(self.weights))]
        last = [*[x[-1:]] * self.inputs, *tensors[self.inputs :]]
        torch.testing.assert_close(self.ours(*tensors)[..., -1:, :], self.expected(*last))
        weights = [*tensors[self.inputs :], None][:2]
        for form in ("triton", "cuda"):
            stats = self.stats_of(tensors, form)
            torch.testing.assert_close(stats[-1:], self.stats_of(last, form))
            if self.inputs > 1:
                stats = _norm.normalize(x, *weights, Norm(2048, 1e-5, self.is_rms, form=form, keeps_stats=True))[1]
            options = NormBackward(2048, 0.0, self.is_rms, form, True, self.weights > 1)
            dx, *others = _norm.normalize_backward(x, *weights, stats, x, None, options)
            alone = _norm.normalize_backward(x[-1:], *weights, stats[-1:].clone(), x[-1:], None, options)[0]
            torch.testing.assert_close(dx[-1:], alone)
            assert all(g.isfinite().all() for g in others)

    def by_clusters(self, *tensors: Tensor):
        inputs, weights = tensors[: self.inputs], [*tensors[self.inputs :], None, None][:2]
        x, residual = (*inputs, None)[:2]
        results = _norm.apply_norm(Norm(x.shape[-1], 1e-5, self.is_rms, form="cuda"), x, residual, *weights)
        return results if isinstance(results, Tensor) else torch.stack(results)

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("M", [1, 3, 1500])
    def test_clusters(self, M, dtype, device):
        """Rows that start at vectors or anywhere, and more rows than clusters. Unaligned memory uses another kernel."""
        for N in (8, 1000, 4096, 5120, 32768 if M < 10 else 1024, 3, 257, 1001, 1002, 5003, 20001 if M < 10 else 129):
            for wide in (False, True):
                tensors = self.tensors((M, N), device, dtype=dtype, wide=wide)
                for given in (tensors, tensors[: self.inputs]):
                    expected = lambda *t: self.expected(*t, eps=1e-5)
                    assert_right(self.by_clusters(*given), expected, *given)
                    assert_gradients_match(self.by_clusters, expected, *given)
        tensors = self.tensors((M, 64), device, "offset", dtype=dtype)
        assert_right(self.by_clusters(*tensors), lambda *t: self.expected(*t, eps=1e-5), *tensors)

    @pytest.mark.gpu
    @pytest.mark.parametrize("N", [500, 501, 512, 1024, 5001, 8192, 12288, 32768])
    def test_every_configuration_of_clusters(self, N, device):
        tensors = [t.requires_grad_() for t in self.tensors((700, N), device)]

        def run(norm):
            y = norm(*tensors)
            return y, *torch.autograd.grad(y, tensors, torch.cos(y.detach()))

        expected = run(lambda *t: self.expected(*t, eps=1e-5))
        for direction in ("cuda-uneven" if N % 4 else "cuda-forward", "cuda-backward"):
            key = (self.module.op.name, direction, 4, quarter_octave(-(-(N + 3 * (N % 4 > 0)) // 4)))
            for config in _norm_cuda.CLUSTER.choices_on(-1, key):
                with _norm_cuda.CLUSTER.override(key, config):
                    torch.testing.assert_close(run(self.by_clusters), expected, rtol=1e-4, atol=1e-3)


class AddLaws(NormLaws):
    """Laws of tw.add_<norm>(input, residual, …), which also returns the sum."""

    inputs = 2
    alone: Callable[..., Any]  # tw.<norm>

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_equals_the_norm_of_the_rounded_sum(self, dtype, device):
        x, residual, *weights = self.tensors((5, 40), device, dtype=dtype)
        normed, total = type(self).call(x, residual, (40,), *weights)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, type(self).alone(x + residual, (40,), *weights))

    @pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
    def test_gradients_of_each_output(self, used, device):
        tensors = [t.requires_grad_() for t in self.tensors((4, 9), device)]

        def gradients(fn):
            results = fn(*tensors[:2], (9,), *tensors[2:])
            loss = torch.stack([results[n].square().sum() for n in used]).sum()
            return torch.autograd.grad(loss, tensors, allow_unused=True)

        ours, theirs = gradients(type(self).call), gradients(type(self).formula)
        assert torch.equal(ours[0], ours[1])
        assert [g is None for g in ours] == [g is None for g in theirs]
        for mine, torchs in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-4)

    def test_inputs_must_be_tensors_of_one_shape(self, device):
        x = torch.randn(4, 8, device=device)
        for residual, error, what in ((x[:1], ValueError, "shape"), (1, TypeError, "int")):
            with pytest.raises(error, match=f"^residual must .*{what}"):
                type(self).call(x, residual, (8,))

    @pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)], ids=str)
    def test_two_dtypes_are_promoted_as_torch_does(self, dtypes, device):
        """An autocast model adds a bfloat16 branch to a float32 residual."""
        branch, residual, *weights = self.tensors((4, 40), device)
        tensors = [branch.to(dtypes[0]), residual.to(dtypes[1]), *weights]
        leaves = [t.detach().requires_grad_() for t in tensors]

        def run(fn):
            results = fn(*leaves[:2], (40,), *leaves[2:])
            loss = results[0].square().sum() + (3 * results[1]).sum()
            return *results, *torch.autograd.grad(loss, leaves)

        def in_two_steps(x, r, shape, *weights):
            total = x + r
            return type(self).alone(total, shape, *weights), total

        ours, theirs = run(type(self).call), run(in_two_steps)
        assert [t.dtype for t in ours] == [torch.float32] * 2 + [t.dtype for t in tensors]
        for mine, torchs in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, torchs)
        assert_compiles(lambda x, r, *w: type(self).call(x, r, (40,), *w), *tensors)
