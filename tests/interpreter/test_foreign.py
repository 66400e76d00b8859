"""Host code and kernels as other projects write them: tables of pointers, locks, rejected kernels, launch options."""

import pickle
import time

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

import tilewright
from tilewright.errors import KernelAborted, KernelFault


@pytest.fixture(autouse=True)
def interpreter():
    """Override the fixture of the suite: each test opens the context itself."""


@triton.jit
def _stack(table, out, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    source = tl.load(table + row).to(tl.pointer_type(tl.float32))
    offs = tl.arange(0, BLOCK)
    tl.store(out + row * N + offs, tl.load(source + offs, mask=offs < N), mask=offs < N)


def stack(rows: list[torch.Tensor], n: int) -> torch.Tensor:
    out = torch.empty(len(rows), n)
    _stack[(len(rows),)](torch.tensor([row.data_ptr() for row in rows]), out, n, BLOCK=128)
    return out


def test_tables_of_pointers_lead_to_their_tensors():
    whole = torch.randn(5, 100)
    rows = [torch.randn(100), whole[3], torch.nn.Parameter(torch.randn(100)).detach()]
    with tilewright.interpret() as run:
        assert torch.equal(stack(rows, 100), torch.stack(rows))
    assert run.launches[0].arguments["*table[1]"].loaded == 400


def test_an_access_past_a_tensor_of_a_table_is_out_of_bounds():
    rows = [torch.randn(100) for _ in range(2)]
    with pytest.raises(KernelFault, match=r"element 100 of `\*table\[0\]`"), tilewright.interpret():
        stack(rows, 101)


def test_an_address_where_no_tensor_lies_is_refused():
    with pytest.raises(KernelAborted, match="outside of every tensor"), tilewright.interpret():
        _stack[(1,)](torch.tensor([64]), torch.empty(128), 128, BLOCK=128)


@triton.jit
def _locked(data, lock):
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    offs = data + tl.arange(0, 128)
    tl.store(offs, tl.load(offs) + 1.0)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


def test_a_lock_takes_linear_time():
    data, lock = torch.zeros(128), torch.zeros(1, dtype=torch.int32)
    start = time.process_time()
    with tilewright.interpret():
        _locked[(800,)](data, lock)
    assert (data == 800).all()
    assert time.process_time() - start < 5  # quadratic: more than 10 s


@triton.jit
def _in_reverse(flags, N):
    program = tl.program_id(0)
    if program < N - 1:
        while tl.atomic_add(flags + program + 1, 0) == 0:
            pass
    tl.atomic_xchg(flags + program, 1)


def test_a_chain_of_waiting_programs_takes_linear_time():
    flags = torch.zeros(16, dtype=torch.int32)
    with tilewright.interpret() as run:
        _in_reverse[(16,)](flags, 16)
    assert flags.all()
    assert run.launches[0].operations < 100_000  # quadratic: twice as many


@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=[])
@triton.jit
def _fill(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 1)


def test_an_autotuner_says_which_config_it_used():
    with tilewright.interpret():
        _fill[(1,)](torch.zeros(128))
    assert _fill.best_config.kwargs == {"BLOCK": 64}


def _wide_configs():
    return [triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})]


@triton.autotune(_wide_configs(), key=[])
@triton.jit
def _fill_wide(x, BLOCK: tl.constexpr):
    tl.store(x, 2)
    tl.static_assert(BLOCK >= 128)
    tl.store(x + tl.arange(0, BLOCK), 1)


def test_an_autotuner_skips_a_config_that_a_static_assert_forbids():
    x = torch.zeros(128)
    with tilewright.interpret():
        _fill_wide[(1,)](x)
        assert _fill_wide.best_config.kwargs == {"BLOCK": 128}
        assert (x == 1).all()
        y = torch.zeros(64)
        with pytest.raises(triton.compiler.errors.CompileTimeAssertionFailure, match=r"test_foreign\.py"):
            _fill_wide.fn[(1,)](y, BLOCK=64)
    assert not y.any()  # nothing was compiled, so nothing was written


class _OwnTuner(triton.runtime.Autotuner):
    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        times = {config: self._bench(*args, config=config, **kwargs) for config in self.configs}
        config = min(times, key=times.get)
        return self.fn.run(*args, **kwargs, **config.all_kwargs())


def test_an_autotuner_of_a_project_takes_its_first_config():
    tuner = _OwnTuner(_fill.fn, _fill.arg_names, _wide_configs(), [], None, None)
    x = torch.zeros(128)
    with tilewright.interpret():
        tuner[(1,)](x)
    assert x.sum() == 64


class _Reversed:
    """A view with a negative stride, which torch does not have: Triton takes whatever has an address and a dtype."""

    def __init__(self, base):
        self.dtype = base.dtype
        self._address = base.data_ptr() + (base.numel() - 1) * base.element_size()

    def data_ptr(self):
        return self._address


@triton.jit
def _copy_back(x, y, N, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y + offs, tl.load(x - offs, mask=offs < N), mask=offs < N)


def test_any_object_with_an_address_is_a_pointer():
    x, y = torch.randn(100), torch.empty(100)
    with tilewright.interpret() as run:
        _copy_back[(1,)](_Reversed(x), y, 100, BLOCK=128)
    assert torch.equal(y, x.flip(0))
    assert run.launches[0].arguments["x"].loaded == 400
    with pytest.raises(KernelFault, match="element -1 of `x`"), tilewright.interpret():
        _copy_back[(1,)](_Reversed(x), torch.empty(101), 101, BLOCK=128)
    nothing = _Reversed(x)
    nothing._address = 64
    with pytest.raises(KernelAborted, match="`x` is a _Reversed with an address"), tilewright.interpret():
        _copy_back[(1,)](nothing, y, 100, BLOCK=128)


@triton.jit
def _template(x):
    tl.store(x, VALUE)  # noqa: F821  replaced


def test_a_replaced_source_runs():
    x = torch.zeros(1)
    for value in (3, 4):
        kernel = triton.JITFunction(_template.fn)
        kernel._unsafe_update_src(kernel.src.replace("VALUE", str(value)))
        with tilewright.interpret():
            kernel[(1,)](x)
        assert x.item() == value


@triton.jit
def _parity(x, y, BLOCK: tl.constexpr):
    bits = tl.load(x + tl.arange(0, BLOCK)) != 0
    tl.store(y, tl.sum(bits, dtype=tl.int1))


def test_a_sum_of_one_bit_integers_wraps_around():
    y = torch.zeros(1, dtype=torch.int32)
    with tilewright.interpret():
        for ones in (1, 2, 3):
            _parity[(1,)]((torch.arange(8) < ones).int(), y, BLOCK=8)
            assert y.item() == ones % 2


@triton.jit
def _threads(x):
    tl.store(x, cuda.num_threads())
    tl.store(x + 1, cuda.num_warps())


def test_kernels_see_the_warps_of_the_launch():
    x = torch.zeros(2, dtype=torch.int32)
    with tilewright.interpret():
        _threads[(1,)](x, num_warps=8)
        assert x.tolist() == [256, 8]
        _threads[(1,)](x)
        assert x.tolist() == [128, 4]


@triton.jit
def _increment(x):
    return x + 1


@triton.jit
def _apply(x, functions):
    tl.store(x, functions[1](functions[0](tl.load(x))))


def test_tuples_may_hold_functions():
    x = torch.zeros(1)
    with tilewright.interpret():
        _apply[(1,)](x, (_increment, _increment))
    assert x.item() == 2


@triton.jit
def _store_const(x: tl.const):
    tl.store(x, 1.0)


@triton.jit(do_not_specialize=["N"])
def _specialized(x, N: tl.constexpr):
    tl.store(x, N)


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (lambda x: _store_const[(1,)](x), "Cannot store to a constant pointer"),
        (lambda x: _fill.fn[(1,)](x, BLOCK=3), "must be a power of 2"),
        (lambda x: _specialized[(1,)](x, 5), "N marked as constexpr and listed in do_not_specialize"),
    ],
)
def test_a_rejected_kernel_raises_as_the_compiler_does(launch, message):
    with pytest.raises(triton.CompilationError, match=message) as raised, tilewright.interpret():
        launch(torch.zeros(8))
    assert isinstance(raised.value, KernelAborted)
    assert "test_foreign.py" in str(raised.value)
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value)
    assert again.kind == "crashed"


def test_a_rejected_kernel_is_caused_by_the_compilers_exception():
    for _ in range(2):  # the second verdict is a known one
        with pytest.raises(triton.CompilationError) as raised, tilewright.interpret():
            _fill.fn[(1,)](torch.zeros(8), BLOCK=3)
        assert "must be a power of 2" in str(raised.value.__cause__)
        assert isinstance(raised.value.__cause__, ValueError)


def test_a_fault_at_run_time_is_no_compilation_error():
    with pytest.raises(KernelAborted, match="outside of every tensor") as raised, tilewright.interpret():
        _stack[(1,)](torch.tensor([64]), torch.empty(128), 128, BLOCK=128)
    assert not isinstance(raised.value, triton.CompilationError)


def test_invalid_warps_are_rejected():
    with pytest.raises(AssertionError, match="num_warps must be a power of 2") as raised, tilewright.interpret():
        _threads[(1,)](torch.zeros(2, dtype=torch.int32), num_warps=3)
    assert isinstance(raised.value, KernelAborted)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_integers_of_more_than_64_bits_are_refused(value):
    with pytest.raises(OverflowError, match=f"`N` is {value}, which does not fit") as raised, tilewright.interpret():
        _stack[(1,)](torch.tensor([64]), torch.empty(128), value, BLOCK=128)
    assert isinstance(raised.value, KernelAborted)


@triton.jit
def _divmod(a0, a1, b0, b1):
    return a0 // b0, a1 // b1, a0 % b0, a1 % b1


@triton.jit
def _packed(a, b, c, d, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    quotient, remainder = tl.map_elementwise(_divmod, tl.load(a + offs), tl.load(b + offs), pack=2)
    tl.store(c + offs, quotient)
    tl.store(d + offs, remainder)


def test_map_elementwise_takes_several_elements_per_call():
    a, b = torch.randint(1, 1000, (2, 64), dtype=torch.int32)
    c, d = torch.empty_like(a), torch.empty_like(b)
    with tilewright.interpret():
        _packed[(1,)](a, b, c, d, BLOCK=64)
    assert torch.equal(c, a // b)
    assert torch.equal(d, a % b)


@triton.jit
def _types(x, N: tl.constexpr):
    constant: tl.constexpr = N
    tl.static_assert(constant.type == tl.constexpr_type(N))
    variable = N
    tl.static_assert(variable.type == tl.int32)
    tl.store(x, variable)


def test_constants_have_a_type():
    x = torch.zeros(1, dtype=torch.int32)
    with tilewright.interpret():
        _types[(1,)](x, 7)
    assert x.item() == 7
