"""Laws of AdamW: it matches torch, for many tensors per launch, with clipping and 8-bit moments."""

import copy
import io
import itertools
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tilewright as tw
from tilewright.interpreter.arguments import SLOT_BITS, SLOT_ORIGIN
from tilewright.ops.optim import _triton as _adamw
from tilewright.ops.optim import adamw as module

SHAPES = [(33, 70), (1,), (5,), (0,), (2, 3, 4), (1025,), ()]
nan = float("nan")


def tensors(device: str, shapes=SHAPES, dtype=torch.float32, seed=0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    return [t.to(device, dtype).requires_grad_() for t in made]


def give_grads(params: list[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = torch.empty_like(p, requires_grad=False).copy_(torch.randn(p.shape, generator=generator))


def run(make, params: list[Tensor], steps: int, *, first: int = 0, before=None) -> Any:
    optimizer = make(params)
    for step in range(first, first + steps):
        give_grads(params, step)
        if before is not None:
            before(optimizer, params)
        optimizer.step()
    return optimizer


def assert_same(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-6) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


@pytest.fixture
def launches(monkeypatch):
    """One entry per launch of the kernel."""
    seen = []
    launch = _adamw._launch_update
    monkeypatch.setattr(_adamw, "_launch_update", lambda *args, **more: (seen.append(1), launch(*args, **more)))
    return seen


OTHERS = {"maximize": True, "betas": (0.6, 0.9), "eps": 1e-3, "weight_decay": 0.2}


@pytest.mark.parametrize(("options", "shapes"), [({}, SHAPES), (OTHERS, SHAPES[:2])])
def test_twenty_steps_match_torch(options, shapes, device, launches):
    ours, theirs = tensors(device, shapes), tensors(device, shapes)
    mine = run(lambda p: tw.AdamW(p, lr=0.01, **options), ours, 20)
    other = run(lambda p: torch.optim.AdamW(p, lr=0.01, **options), theirs, 20)
    assert_same(ours, theirs)
    assert len(launches) >= 20
    for p, q in zip(ours, theirs, strict=True):
        assert mine.state[p]["step"] == other.state[q]["step"] == 20
        assert_same([mine.state[p]["exp_avg_sq"]], [other.state[q]["exp_avg_sq"]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_fp32_rounded_to_nearest(dtype, device):
    ours = tensors(device, dtype=dtype)
    wide = [p.detach().float() for p in ours]
    means = [(torch.zeros_like(p), torch.zeros_like(p)) for p in wide]
    optimizer = tw.AdamW(ours, lr=0.01)
    for step in range(5):
        give_grads(ours, step)
        optimizer.step()
        by = _adamw.Step.of(step + 1, 0.01, (0.9, 0.999), 1e-8, 1e-2)
        for n, p in enumerate(ours):
            assert p.grad is not None
            wide[n], m, v = _adamw.torch_adamw(wide[n], p.grad, *means[n], by)
            means[n] = m, v
            wide[n] = wide[n].to(dtype).float()
            torch.testing.assert_close(p.float(), wide[n], rtol=torch.finfo(dtype).eps, atol=1e-7)
            assert (p.float() == wide[n]).float().mean() > 0.99 or p.numel() < 100
            assert optimizer.state[p]["exp_avg"].dtype == torch.float32


def test_parameter_groups_have_their_own_options(device):
    def make(kind):
        def made(params):
            return kind([{"params": params[:3], "lr": 0.1, "weight_decay": 0.0}, {"params": params[3:]}], lr=0.01)

        return made

    ours, theirs = tensors(device), tensors(device)
    run(make(tw.AdamW), ours, 3)
    run(make(torch.optim.AdamW), theirs, 3)
    assert_same(ours, theirs)


@pytest.mark.parametrize("limit", [0.5, 1e4])
def test_clipping_matches_torch(limit, device):
    ours, theirs = tensors(device), tensors(device)
    norms = []
    mine = run(lambda p: tw.AdamW(p, lr=0.01, max_grad_norm=limit), ours, 4)
    run(
        lambda p: torch.optim.AdamW(p, lr=0.01),
        theirs,
        4,
        before=lambda _, params: norms.append(torch.nn.utils.clip_grad_norm_(params, limit)),
    )
    assert_same(ours, theirs)
    assert mine.grad_norm is not None
    torch.testing.assert_close(mine.grad_norm, norms[-1])
    assert all((p.grad == q.grad).all() for p, q in zip(ours, theirs, strict=True)) is (limit > 100)


def test_clipping_includes_gradients_that_go_to_torch(device):
    ours, theirs = ([*tensors(device, [(300,)]), *tensors(device, [(40,)], torch.float64)] for _ in range(2))
    run(lambda p: tw.AdamW(p, max_grad_norm=0.1), ours, 2)
    clip = torch.nn.utils.clip_grad_norm_
    run(lambda p: torch.optim.AdamW(p), theirs, 2, before=lambda _, params: clip(params, 0.1))
    assert_same(ours, theirs)


def test_schedulers_change_the_learning_rate(device):
    ours, theirs = tensors(device, [(50,)]), tensors(device, [(50,)])
    for kind, params in ((tw.AdamW, ours), (torch.optim.AdamW, theirs)):
        optimizer = kind(params, lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            give_grads(params, step)
            optimizer.step()
            scheduler.step()
    assert_same(ours, theirs)


def test_parameters_without_gradient_do_not_change(device):
    """Some parameters have a gradient in some steps only, so their step counts differ."""
    ours, theirs = tensors(device), tensors(device)
    for kind, params in ((tw.AdamW, ours), (torch.optim.AdamW, theirs)):
        optimizer = kind(params, lr=0.01)
        for step in range(4):
            give_grads(params, step)
            params[step].grad = None
            optimizer.step()
            optimizer.zero_grad()
        assert [float(optimizer.state[p]["step"]) for p in params] == [3, 3, 3, 3, 4, 4, 4]
    assert_same(ours, theirs)
    tw.AdamW(ours).step()


def test_closures(device):
    (p,) = tensors(device, [(5,)])
    optimizer = tw.AdamW([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("bits", [32, 8])
def test_steps_are_deterministic(bits, device):
    shapes = [(70, 71), (300,)]
    twice = [tensors(device, shapes) for _ in range(2)]
    for params in twice:
        run(lambda p: tw.AdamW(p, max_grad_norm=1.0, state_bits=bits), params, 3)
    assert all(torch.equal(a, b) for a, b in zip(*twice, strict=True))


def saved(optimizer) -> dict[str, Any]:
    """Return the state dict after a round trip through a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("kinds", [*itertools.product([tw.AdamW, torch.optim.AdamW], repeat=2)])
def test_states_are_interchangeable_with_torch(kinds, device):
    params, whole = tensors(device, SHAPES[:4]), tensors(device, SHAPES[:4])
    start = run(lambda p: kinds[0](p, lr=0.02), params, 3)

    def goes_on(p):
        optimizer = kinds[1](p)
        optimizer.load_state_dict(saved(start))
        return optimizer

    end = run(goes_on, params, 3, first=3)
    run(lambda p: torch.optim.AdamW(p, lr=0.02), whole, 6)
    assert_same(params, whole)
    assert end.param_groups[0]["lr"] == 0.02
    assert {*end.state_dict()["state"][0]} == {"step", "exp_avg", "exp_avg_sq"}
    assert start.state[params[0]]["step"] == 3


def test_state_dict_keeps_fp32_moments_of_bf16_parameters(device):
    params = tensors(device, dtype=torch.bfloat16)
    first = run(tw.AdamW, params, 2)
    second = tw.AdamW(params)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.state[params[0]]["exp_avg"], second.state[params[0]]["exp_avg"])


def test_8_bit_moments_survive_a_state_dict(device):
    params = tensors(device, [(70, 71), (64, 3, 8, 8), (10,)])
    params[1] = params[1].detach().to(memory_format=torch.channels_last).requires_grad_()
    first = run(lambda p: tw.AdamW(p, state_bits=8), params, 3)
    state = saved(first)["state"]
    assert state[0]["exp_avg"].dtype == torch.float32
    assert state[1]["exp_avg_sq"].shape == params[1].shape
    second = tw.AdamW(params, state_bits=8)
    second.load_state_dict(saved(first))
    for p in params:
        assert first.state[p].keys() == second.state[p].keys()
        for name, value in first.state[p].items():
            torch.testing.assert_close(value, second.state[p][name], rtol=1e-6, atol=0)
    assert first.state[params[0]]["exp_avg"].dtype == torch.uint8
    assert first.state[params[2]]["exp_avg"].dtype == torch.float32  # too small for 8 bits


def test_torch_continues_from_an_8_bit_state(device):
    params = tensors(device, [(70, 71)])
    first = run(lambda p: tw.AdamW(p, state_bits=8), params, 2)
    state = saved(first)

    def continued(optimizer_type, copies):
        optimizer = optimizer_type(copies)
        optimizer.load_state_dict(state)
        return optimizer

    ours, theirs = ([p.detach().clone().requires_grad_() for p in params] for _ in range(2))
    mine = run(lambda p: continued(tw.AdamW, p), ours, 1, first=2)
    other = run(lambda p: continued(torch.optim.AdamW, p), theirs, 1, first=2)
    assert_same(ours, theirs)
    assert other.state[theirs[0]]["step"] == 3
    assert_same([mine.state[ours[0]]["exp_avg"]], [other.state[theirs[0]]["exp_avg"]])


@pytest.mark.parametrize("size", [256, 1000])
def test_8_bit_moments_are_within_one_quantization_step(size, device):
    generator = torch.Generator().manual_seed(0)
    m = torch.randn(size, generator=generator) * torch.logspace(-3, 2, size)
    v = torch.rand(size, generator=generator) * torch.logspace(-6, 2, size)
    v[3] = 0.0
    for seed in (None, 5):
        codes = _adamw.encode(m, v, seed)
        back_m, back_v = _adamw.decode(*codes)
        share = 1.0 if seed else 0.5
        scale = _adamw._per_element(codes[2], size)
        assert ((back_m - m).abs() <= share * m.abs() / 8 + scale * 2.0**-15).all()
        scale = _adamw._per_element(codes[3], size)
        assert ((back_v.sqrt() - v.sqrt()).abs() <= share * v.sqrt() / 16 + scale * 2.0**-15).all()
        assert (back_v > 0).all()  # never zero, or a step would be infinite
    assert all((c == 0).all() for c in _adamw.encode(0 * v, 0 * v, 5)[::2])
    assert (_adamw.decode(*_adamw.encode(0 * v, 0 * v, 5))[1] == 0).all()


def test_stochastic_rounding_is_unbiased():
    generator = torch.Generator().manual_seed(0)
    m, v = (torch.rand(256, generator=generator) + 0.01 for _ in range(2))
    m[1::4] *= -1
    m[2::4] *= 2.0**-17  # where codes are evenly spaced, down to zero
    back = [_adamw.decode(*_adamw.encode(m, v, 2 * seed + 3)) for seed in range(400)]
    mean = torch.stack([b[0] for b in back]).mean(0)
    root = torch.stack([b[1].sqrt() for b in back]).mean(0)
    assert ((mean - m).abs() <= 0.015 * m.abs() + m.max() * 2.0**-20).all()
    assert (root / v.sqrt() - 1).abs().max() < 0.0075


def test_random_bits_are_uniform_and_independent():
    """Across elements, between neighbours, and from step to step."""
    bits = [_adamw._random_bits(64, 2 * step + 3, torch.device("cpu")) for step in range(4000)]
    drawn = torch.stack(bits).double() / 2**32
    assert (drawn.mean(0) - 0.5).abs().max() < 0.02
    assert (drawn.var(0) - 1 / 12).abs().max() < 0.005
    others = torch.cat([drawn[:-1], drawn[1:]], 1).T.corrcoef().fill_diagonal_(0.0)
    assert others.abs().max() < 0.08


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_quantizes_as_the_torch_reference(dtype, device, launches):
    shapes = [(4099,)]
    ours, theirs = tensors(device, shapes, dtype), tensors(device, shapes, dtype)
    mine, other = (tw.AdamW(p, state_bits=8, max_grad_norm=3.0) for p in (ours, theirs))
    for step in range(3):
        give_grads(ours, step)
        give_grads(theirs, step)
        mine.step()
        by = _adamw.Step.of(step + 1, 1e-3, (0.9, 0.999), 1e-8, 1e-2)
        state = other._state_of(theirs[0])
        assert theirs[0].grad is not None
        grad = theirs[0].grad.float()
        with torch.no_grad():
            module._update_by_torch(theirs[0], grad * (3.0 / (grad.norm() + 1e-6)).clamp(max=1.0), state, by)
        assert_same(ours, theirs, 2e-2 if dtype == torch.bfloat16 else 1e-3)
        for name in module.MOMENTS:
            assert (mine.state[ours[0]][name] == state[name]).float().mean() > 0.98
        for name in module.SCALES:
            torch.testing.assert_close(mine.state[ours[0]][name], state[name])
        for name in (*module.MOMENTS, *module.SCALES):  # each step starts from the same state
            state[name].copy_(mine.state[ours[0]][name])
    assert launches


def test_results_do_not_depend_on_tiles_or_fp8_support(device, monkeypatch):
    """A GPU without float8_e4m3fn conversions writes the same codes as one with them."""
    found, dtype = [], torch.bfloat16
    for width, block, chunks, has_fp8 in ((4, 512, 1, True), (8, 256, 4, True), (8, 512, 2, False)):
        monkeypatch.setattr(_adamw, "has_fp8", lambda _, has_fp8=has_fp8: has_fp8)
        params = tensors(device, [(4999,)], dtype)
        config = {"block": block, "chunks": chunks, "width": width, "num_warps": block // 256}
        with _adamw.CONFIG.override(("8-bit", dtype.itemsize), config):
            optimizer = run(lambda p: tw.AdamW(p, lr=0.1, state_bits=8), params, 2)
        found.append([params[0].detach(), *(value for name, value in optimizer.state[params[0]].items())])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def trained(kind, device: str, steps: int = 40, **options) -> float:
    """Return the loss of a small network after training."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=generator).to(device)
    y = torch.tanh(x @ torch.randn(64, 8, generator=generator).to(device) / 8)
    first = (torch.randn(64, 96, generator=generator) / 8).to(device).requires_grad_()
    second = (torch.randn(96, 8, generator=generator) / 10).to(device).requires_grad_()
    optimizer = kind([first, second], lr=3e-3, **options)
    loss = x.new_zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (torch.tanh(x @ first) @ second - y).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.slow
def test_8_bit_training_matches_fp32_training(device, monkeypatch):
    monkeypatch.setattr(module, "SMALLEST", 512)
    theirs, start = trained(torch.optim.AdamW, device), trained(torch.optim.AdamW, device, 1)
    ours = trained(tw.AdamW, device, state_bits=8)
    assert theirs < start / 50
    assert 0.9 < ours / theirs < 1.1


def test_8_bit_moments_decay():
    """Rounded to nearest, a second moment would never decay after one large gradient."""
    m, v = torch.zeros(512), torch.ones(512)
    v[::2] = 0.25
    codes = _adamw.encode(m, v)
    for step in range(300):
        back = _adamw.decode(*codes)
        codes = _adamw.encode(back[0], back[1] * torch.where(v < 1, 0.99, 1.0), 2 * step + 3)
    left = _adamw.decode(*codes)[1][::2].mean() / 0.25
    assert 0.8 < left / 0.99**300 < 1.25


@pytest.mark.parametrize("coded", [False, True])
def test_an_address_table_reaches_the_same_tensors(coded, device):
    """The interpreter has its own addresses, so the test translates those of tensors inside one argument."""
    case = next(c for c in module.op.check if c["coded"] == coded and c["N"] in (781, 5000))
    one: tuple[Any, ...] = module.op.make(case, device)
    two: tuple[Any, ...] = tuple(a.clone() if isinstance(a, Tensor) else a for a in one)
    module.triton_adamw(*one)
    if device == "cpu":
        flat = [a for a in two if isinstance(a, Tensor)]
        parts = module.split(two[6], *two[:6])
        tables = [list(part) for part in parts if part[0].numel()]
        rows = [
            [
                (n + 1 << SLOT_BITS) + SLOT_ORIGIN + part.storage_offset() * part.element_size()
                for n, part in enumerate(row)
            ]
            + [0] * (6 - len(flat))
            + [row[0].numel(), 0, 0]
            for row in tables
        ]
        grads = torch.tensor([row.pop(1) for row in rows])
        sizes = tuple(row[0].numel() for row in tables)
        chunks = _adamw._chunk_table(sizes, 512 * 2, flat[0].device, 0)
        clip = None
        if two[7]:
            norm = two[1].float().norm()
            clip = torch.stack([(module.MAX_NORM / (norm + 1e-6)).clamp(max=1.0), norm])
        _adamw._launch_update(
            (len(chunks),), *two[:6], clip, torch.tensor(rows), grads, chunks, None, 0, *module.STEP,
            MAXIMIZE=False, ALIGNED=False, FP8=True, WIDTH=4, BLOCK=512, CHUNKS=2,
        )  # fmt: skip
    else:
        module.triton_adamw(*two)
    for a, b in zip(one[:6], two[:6], strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a.float(), b.float(), rtol=1e-5, atol=1.0 if a.dtype == torch.uint8 else 1e-6)


def test_norms_of_long_gradients_are_partial_sums(device):
    g = torch.randn(2 * _adamw.PART.value + 1001, device=device)
    batch = _adamw.Batch([g], [g], [(g, g)])
    scale, norm = _adamw.clip_factor([(batch, [g])], 1.0)
    torch.testing.assert_close(norm, g.norm())
    torch.testing.assert_close(scale, 1 / g.norm())


@pytest.mark.parametrize(
    "kind", ["transposed", "channels_last", "strided", "offset", "other grad", "double", "complex"]
)
def test_parameters_of_any_kind(kind, device, launches):
    def made() -> list[Tensor]:
        base = torch.arange(1200, dtype=torch.float32, device=device).sin()
        p = {
            "transposed": lambda: base.view(30, 40).t(),
            "channels_last": lambda: base.view(5, 4, 6, 10).to(memory_format=torch.channels_last),
            "strided": lambda: base.view(30, 40)[:, ::2],
            "offset": lambda: base[1:],
            "other grad": lambda: base.view(30, 40),
            "double": lambda: base.double(),
            "complex": lambda: torch.complex(base, base.cos()),
        }[kind]()
        return [p.detach().requires_grad_()]

    def before(_, params: list[Tensor]) -> None:
        if kind == "other grad":
            params[0].grad = torch.zeros(40, 30, device=device).t().copy_(params[0].detach())

    ours, theirs = made(), made()
    run(tw.AdamW, ours, 3, before=before)
    run(torch.optim.AdamW, theirs, 3, before=before)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert bool(launches) is (kind in ("transposed", "channels_last", "offset"))


def test_cpu_tensors_go_to_torch_without_the_interpreter(monkeypatch):
    """With 8-bit moments too."""
    monkeypatch.setattr(module, "is_interpreted", lambda _: False)
    monkeypatch.setattr(_adamw, "_launch_update", lambda *_, **__: pytest.fail("our kernel was launched"))
    ours, theirs = tensors("cpu"), tensors("cpu")
    run(lambda p: tw.AdamW(p, max_grad_norm=1.0), ours, 3)
    clip = torch.nn.utils.clip_grad_norm_
    run(lambda p: torch.optim.AdamW(p), theirs, 3, before=lambda _, params: clip(params, 1.0))
    assert_same(ours, theirs)
    run(lambda p: tw.AdamW(p, state_bits=8), tensors("cpu", [(80, 90)]), 2)


@pytest.fixture
def plans(monkeypatch):
    """One entry per plan that was made."""
    seen = []
    make = module._Plan.__init__
    monkeypatch.setattr(module._Plan, "__init__", lambda self, *args: (seen.append(self), make(self, *args))[1])
    return seen


@pytest.mark.parametrize("bits", [32, 8])
def test_moved_gradients_keep_the_plan(bits, device, plans):
    shapes = [(70, 71), ()]
    ours, theirs = tensors(device, shapes), tensors(device, shapes)
    mine, kept = tw.AdamW(ours, state_bits=bits), tw.AdamW(theirs, state_bits=bits)
    alive = []
    for step in range(3):
        give_grads(ours, step)
        alive += [p.grad for p in ours]  # so that the next gradients have other addresses
        for p, q in zip(ours, theirs, strict=True):
            assert p.grad is not None
            q.grad = p.grad.clone() if q.grad is None else q.grad.copy_(p.grad)
        mine.step()
        kept.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len(plans) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the CPU go to torch there")
def test_addresses_are_copied_when_gradients_move(plans, monkeypatch):
    """Each copy has its own pinned memory: the previous copy may still be in progress."""
    monkeypatch.setattr(_adamw, "is_interpreted", lambda _: False)
    sent = []
    monkeypatch.setattr(_adamw, "_launch_update", lambda _, *args, **__: sent.append(args[7:9]))
    params = tensors("cpu", [(30, 40), (7,), (500,)])
    optimizer, alive = tw.AdamW(params), []
    for step in (0, 1, 1, 0):
        if step == len(alive):
            alive.append([torch.zeros_like(p) for p in params])
        for p, g in zip(params, alive[step], strict=True):
            p.grad = g
        optimizer.step()
    assert len(plans) == 1
    assert [places.tolist() for _, places in sent] == [[g.data_ptr() for g in alive[n]] for n in (0, 1, 1, 0)]
    assert sent[0][1] is not sent[1][1]
    assert sent[1][1] is sent[2][1]
    assert sent[0][1] is sent[3][1]
    assert sent[0][0] is sent[3][0]
    assert sent[0][0].view(len(params), -1)[:, 0].tolist() == [p.data_ptr() for p in params]


def changed(kind: str, p: Tensor) -> None:
    assert p.grad is not None
    flat = torch.zeros(p.numel() + 1, device=p.device)
    if kind == "alignment":
        p.grad = flat[1:].view(p.shape).copy_(p.grad)
    elif kind == "strides":
        p.grad = flat[1:].view(p.shape[::-1]).t().copy_(p.grad)
    elif kind == "data":
        p.data = p.data.clone()
    elif kind == "layout of data":
        p.data = p.data.t().contiguous().t()
        p.grad = p.grad.t().contiguous().t()


@pytest.mark.parametrize("kind", ["alignment", "strides", "data", "layout of data", "steps", "group"])
def test_changes_that_need_a_new_plan(kind, device, plans):
    found = []
    for make in (tw.AdamW, torch.optim.AdamW):
        params = tensors(device, [(30, 41), (60,)])
        optimizer = make([{"params": params[:1]}, {"params": params[1:], "lr": 0.1}])
        for step in range(3):
            give_grads(params, step)
            if step == 1:
                changed(kind, params[0])
            if step == 1 and kind == "steps":
                optimizer.state[params[0]]["step"].fill_(7)
            if step == 1 and kind == "group":
                optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
            optimizer.step()
        found.append(params)
    assert_same(*found)
    assert len(plans) >= 2


def test_a_new_dtype_needs_a_new_plan(device, plans):
    (p,) = tensors(device, [(30, 41)])
    optimizer = run(lambda p: tw.AdamW(p, lr=0.5), [p], 1)
    p.grad, grad = None, p.grad
    p.data = p.data.double()
    assert grad is not None
    p.grad = grad.double()
    before = p.detach().clone()
    optimizer.step()
    assert len(plans) == 2
    assert (before - p).abs().min() > 0.4


def test_nan_gradients_give_nan_parameters(device):
    for bits in (32, 8):
        (p,) = tensors(device, [(5000,)])
        optimizer = tw.AdamW([p], state_bits=bits)
        give_grads([p], 0)
        assert p.grad is not None
        p.grad[7] = nan
        optimizer.step()
        assert p.isnan().sum() == 1
        optimizer = tw.AdamW([p], state_bits=bits, max_grad_norm=1.0)
        optimizer.step()
        assert p.isnan().all()


@pytest.mark.gpu  # the interpreter holds references
def test_gradients_are_released(device):
    (p,) = tensors(device, [(50,)])
    optimizer = run(tw.AdamW, [p], 1)
    grad = weakref.ref(p.grad)
    optimizer.zero_grad()
    assert grad() is None


def test_copies_and_versions(device):
    (p,) = tensors(device, [(50,)])
    version = p._version
    optimizer = run(lambda p: tw.AdamW(p, max_grad_norm=1.0, state_bits=8), [p], 1)
    assert p._version > version
    twin = copy.deepcopy(optimizer)
    assert (twin.max_grad_norm, twin.state_bits) == (1.0, 8)
    (q,) = twin.param_groups[0]["params"]
    give_grads([p], 1)
    give_grads([q], 1)
    optimizer.step()
    twin.step()
    assert torch.equal(p, q)


def test_errors_are_one_line(device):
    (p,) = tensors(device, [(5,)])
    options: Any
    for options in ({"state_bits": 16}, {"max_grad_norm": 0.0}, {"lr": -1.0}):
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            tw.AdamW([p], **options)
    p.grad = torch.zeros(5, device=device).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        tw.AdamW([p]).step()
    other = torch.optim.AdamW([p], amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad"):
        tw.AdamW([p]).load_state_dict(other.state_dict())


def test_registered_operator(device):
    case = module.op.check[2]
    torch.library.opcheck(module.adamw_.registered, module.op.make(case, device))


class Graph(TorchDispatchMode):
    """Repeat the operators and launches of a block as a CUDA graph does, without what the host computed."""

    WAITS = ("aten._local_scalar_dense.default", "aten.equal.default")  # the host reads their results

    def __init__(self, monkeypatch):
        super().__init__()
        self.work, self.is_open = [], False
        for name in ("_launch_update", "_launch_squares", "_launch_norm"):
            monkeypatch.setattr(_adamw, name, partial(self.launch, getattr(_adamw, name)))
        for place in (_adamw, module):
            monkeypatch.setattr(place, "is_capturing", lambda: self.is_open)

    def __enter__(self):
        self.is_open = True
        return super().__enter__()

    def __exit__(self, *error):
        self.is_open = False
        super().__exit__(*error)

    def launch(self, launcher, *args, **options):
        if self.is_open:
            self.work.append((partial(launcher, *args, **options), None))
        else:
            launcher(*args, **options)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert str(func) not in self.WAITS
        run = partial(func, *args, **(kwargs or {}))
        out = run()
        if func.namespace == "aten":  # and not the ranges of a profiler
            self.work.append((run, out))
        return out

    def replay(self):
        for run, out in self.work:
            for old, new in zip(tree_leaves(out), tree_leaves(run()), strict=True):
                if old is not None and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.mark.parametrize("bits", [32, 8])
def test_a_captured_step_counts_by_itself(bits, monkeypatch):
    shapes, lr = [(70, 64), (5,), (33,)], torch.tensor(1e-2)
    with tw.interpret():
        ends = []
        for captures in (False, True):
            params = tensors("cpu", shapes)
            groups = [{"params": params[:1], "betas": (0.6, 0.9)}, {"params": params[1:], "weight_decay": 0.2}]
            rate: Any = lr.clone() if captures else 1e-2
            options = {"max_grad_norm": 0.5, "state_bits": bits, "capturable": captures}
            optimizer = tw.AdamW(groups, lr=rate, **options)
            graph = Graph(monkeypatch)
            run(lambda _, made=optimizer: made, params, 2)
            if captures:
                with graph:
                    optimizer.step()  # which does not run: a capture only records
                for p in optimizer.state:
                    optimizer.state[p]["step"].fill_(2.0)
                for _ in range(3):
                    graph.replay()
                rate.fill_(3e-2)  # a scheduler does that
                graph.replay()
            else:
                for step in range(4):
                    for group in optimizer.param_groups:
                        group["lr"] = 3e-2 if step == 3 else 1e-2
                    optimizer.step()
            ends.append((params, optimizer))
    (expected, other), (result, mine) = ends
    assert_same(result, expected)
    torch.testing.assert_close(mine.grad_norm, other.grad_norm)
    assert [int(state["step"]) for state in mine.state_dict()["state"].values()] == [6, 6, 6]


@pytest.mark.gpu
def test_more_than_2_31_elements(device):
    p = torch.zeros(2**31 + 9, device=device, dtype=torch.bfloat16, requires_grad=True)
    p.grad = torch.zeros_like(p)
    p.grad[-9:] = 1.0
    tw.AdamW([p], lr=0.5, state_bits=8, weight_decay=0.0).step()
    assert (p[-9:] == -0.5).all()
    assert not p[:-9].any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the CPU go to torch there")
def test_a_capture_copies_nothing_and_keeps_the_tables_that_it_reads(plans, monkeypatch):
    monkeypatch.setattr(_adamw, "is_interpreted", lambda _: False)
    sent = []
    monkeypatch.setattr(_adamw, "_launch_update", lambda _, *args, **__: sent.append(args[7:10]))
    params = tensors("cpu", [(30, 40), (7,)])
    optimizer = tw.AdamW(params, capturable=True)
    first, second = ([torch.zeros_like(p) for p in params] for _ in range(2))

    def step(gradients, captures):
        for p, g in zip(params, gradients, strict=True):
            p.grad = g
        with monkeypatch.context() as patch:
            if captures:
                patch.setattr(_adamw, "_to_device", lambda *_: pytest.fail("a copy from the host"))
                patch.setattr(_adamw, "_stream", lambda _: 99)
            for place in (_adamw, module):
                patch.setattr(place, "is_capturing", lambda: captures)
            optimizer.step()

    with pytest.raises(RuntimeError, match=r"at the same addresses: call step\(\)"):
        step(first, captures=True)
    step(first, captures=False)
    step(first, captures=True)
    assert all(a is b for a, b in zip(sent[0], sent[1], strict=True))
    with pytest.raises(RuntimeError, match="at the same addresses"):
        step(second, captures=True)
    read = [weakref.ref(table) for table in sent[1]]
    sent.clear()
    for caches in (_adamw._device_table, _adamw._chunk_table):
        caches.cache_clear()
    step(second, captures=False)
    optimizer.add_param_group({"params": tensors("cpu", [(3,)])})  # which needs a new plan
    step(second, captures=False)
    assert all(table() is not None for table in read)
    for group in optimizer.param_groups:
        group["capturable"] = False
    with pytest.raises(RuntimeError, match="create it with capturable=True"):
        step(second, captures=True)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [32, 8])
def test_a_step_in_a_cuda_graph(bits, device):
    ours, theirs = tensors(device, SHAPES[:3]), tensors(device, SHAPES[:3])
    mine = run(lambda p: tw.AdamW(p, lr=0.01, state_bits=bits, max_grad_norm=1.0, capturable=True), ours, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mine.step()
    graph.replay()
    mine.step()  # outside of the graph, in between
    graph.replay()
    other = tw.AdamW(theirs, lr=0.01, state_bits=bits, max_grad_norm=1.0)
    give_grads(theirs, 0)
    for _ in range(4):
        other.step()
    assert_same(ours, theirs)
    assert mine.state[ours[0]]["step"] == 4
