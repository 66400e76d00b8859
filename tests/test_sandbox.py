"""Every layer of the sandbox refuses its system calls, alone and together, and a kernel still runs."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tilewright import sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Landlock and seccomp exist on Linux only")

PROLOGUE = """
import ctypes, errno, fcntl, functools, json, mmap, os, resource, signal, socket, subprocess, sys, tempfile, threading
import time
from pathlib import Path
from tilewright import sandbox

world, libc = json.loads(sys.argv[1]), ctypes.CDLL(None, use_errno=True)
root, victim = Path(world["root"]), world["victim"]
secret, read, write = root / "secret.txt", root / "read", root / "write"

def call(*arguments):
    if libc.syscall(*map(ctypes.c_long, arguments)) < 0:
        raise OSError(ctypes.get_errno(), "system call")

def confine(only=None, **limits):
    settings = dict(memory=2**31, processes=0, file_bytes=2**20) | limits
    for step in {"_landlock", "_leave_root", "_limits", "_seccomp"} - {only} if only else set():
        setattr(sandbox, step, lambda *_: set())
    if only not in (None, "_leave_root"):
        sandbox._drop_capabilities = lambda: set()
    beside = [path for path in read.iterdir() if not path.name.startswith(".")] if os.access(read, os.R_OK) else []
    return sandbox.confine(read=[*sandbox.runtime(), *beside], write=[write], **settings)
"""

# Attempts, and the steps that refuse each of them on their own.
FILES, CALLS, USER, LIMITS = "_landlock", "_seccomp", "_leave_root", "_limits"
ATTEMPTS = {
    "read a secret": ("secret.read_text()", [FILES]),
    "read a hidden file beside the user's": ("(read / '.env').read_text()", [FILES]),
    "list a folder": ("os.listdir(root)", [FILES]),
    "follow a symlink out": ("(write / 'link').read_text()", [FILES]),
    "read the environment of the parent": ("Path(f'/proc/{os.getppid()}/environ').read_bytes()", []),
    "open the memory of a neighbour": ("open(f'/proc/{victim}/mem', 'rb')", [FILES]),
    "write what may be read": ("(read / 'neighbour.txt').write_text('changed')", [FILES, USER]),
    "create a file elsewhere": ("(root / 'new.txt').touch()", [FILES, USER]),
    "create a folder elsewhere": ("(root / 'folder').mkdir()", [FILES, USER]),
    "hard-link a file into the folder": ("os.link(secret, write / 'hard')", [FILES]),
    "move a file into the folder": ("os.rename(root / 'other.txt', write / 'stolen')", [FILES, USER]),
    "truncate": ("os.truncate(root / 'truncated.txt', 0)", [FILES, USER]),
    "delete": ("os.remove(root / 'doomed.txt')", [FILES, USER]),
    "change a mode": ("os.chmod(secret, 0o640); assert secret.stat().st_mode & 0o777 == 0o640", [CALLS, USER]),
    "change a time": ("os.utime(secret, (1, 1)); assert secret.stat().st_mtime == 1", [CALLS, USER]),
    "change an owner": ("os.chown(secret, os.getuid(), os.getgid())", [CALLS, USER]),
    "connect by TCP": ("socket.create_connection(('127.0.0.1', world['port']))", [FILES, CALLS]),
    "listen by TCP": ("socket.create_server(('127.0.0.1', 0))", [FILES, CALLS]),
    "send by UDP": ("socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))", [CALLS]),
    "send to a unix socket": ("socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)", [CALLS]),
    "open a netlink socket": ("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", [CALLS]),
    "connect to an abstract unix socket": ("socket.socket(socket.AF_UNIX).connect(world['abstract'])", [FILES, CALLS]),
    "connect to a unix socket": ("socket.socket(socket.AF_UNIX).connect(world['unix'])", [CALLS, USER]),
    "signal the parent": ("os.kill(os.getppid(), 0)", [FILES, CALLS, USER]),
    "signal by pidfd": ("signal.pidfd_send_signal(os.pidfd_open(victim), 0)", [FILES, CALLS, USER]),
    "trace a neighbour": ("assert libc.ptrace(0x4206, victim, 0, 0) == 0", [FILES, CALLS, USER]),
    "limit a neighbour": ("resource.prlimit(victim, resource.RLIMIT_CORE, (0, 0))", [CALLS, USER]),
    "slow a neighbour": ("os.setpriority(os.PRIO_PROCESS, victim, 5)", [CALLS, USER]),
    "pin a neighbour": ("os.sched_setaffinity(victim, {0})", [CALLS, USER]),
    "fork": ("os.fork() or os._exit(0)", [CALLS]),
    "start a program": ("subprocess.run(['true'], check=True)", [CALLS]),
    "outlive the parent": ("assert libc.prctl(1, 0) == 0", [CALLS]),
    "become root": ("os.setresuid(0, 0, 0)", [USER]),
    "map private memory": ("mmap.mmap(-1, 2**32, mmap.MAP_PRIVATE)", [LIMITS]),
    "map shared memory": ("mmap.mmap(-1, 2**32)", [LIMITS]),
    "write a huge file": ("(write / 'huge').write_bytes(bytes(2**21))", [LIMITS]),
    "raise a limit": ("resource.setrlimit(resource.RLIMIT_FSIZE, (2**22, 2**22))", []),
}  # fmt: skip
TRY_ALL = f"""
outcomes = dict()
for name, code in {[(name, code) for name, (code, _) in ATTEMPTS.items()]!r}:
    try:
        exec(code)
        outcomes[name] = "done"
    except (OSError, AssertionError, MemoryError, ValueError) as refusal:
        outcomes[name] = repr(refusal)
print(json.dumps([layers, outcomes]))
"""


@pytest.fixture(scope="module")
def neighbours(tmp_path_factory):
    """Start listening sockets and a sleeping process, which the child must not reach."""
    path = str(tmp_path_factory.mktemp("sockets") / "unix")
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for address in (path, f"\0tilewright-{os.getpid()}"):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen()
        victim = stack.enter_context(subprocess.Popen(["sleep", "300"]))
        stack.callback(victim.kill)
        yield dict(port=tcp.getsockname()[1], unix=path, abstract=address, victim=victim.pid)


@pytest.fixture(scope="module")
def start(neighbours, tmp_path_factory):
    """Return a function that starts a child with files that it may read, may write, and may not access."""

    def start(program: str, **more) -> subprocess.Popen[str]:
        root = tmp_path_factory.mktemp("world")
        for folder in ("read", "write"):
            (root / folder).mkdir()
        for file in ("secret.txt", "other.txt", "truncated.txt", "doomed.txt", "read/neighbour.txt", "read/.env"):
            (root / file).write_text(file)
        (root / "write" / "link").symlink_to(root / "secret.txt")
        code = PROLOGUE + textwrap.dedent(program)
        world = json.dumps({**neighbours, "root": str(root), "mine": MINE})
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code, world],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            **more,
        )
        process.root = root
        return process

    return start


@pytest.fixture(scope="module")
def run(start):
    """Return a function that runs a child and parses its last line of output as JSON."""

    def run(program: str, **more):
        with start(program, **more) as process:
            try:
                out, err = process.communicate(timeout=60)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, err
        return json.loads(out.splitlines()[-1])

    return run


@pytest.fixture(scope="module")
def outcomes(run):
    """Return the outcome of every attempt, by the step applied: none, one, or all."""
    steps = {"none": "layers = []", "all": "layers = confine()"}
    steps |= {step: f"layers = confine({step!r})" for step in (FILES, CALLS, USER, LIMITS)}
    return {step: run(program + TRY_ALL) for step, program in steps.items()}


def require(layers: list[str], *needed: str) -> None:
    if missing := set(needed) - set(layers):
        pytest.skip(f"not available on this machine: {', '.join(sorted(missing))}")


def abi() -> int:
    return sandbox._syscall(444, None, 0, 1)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_all_layers_together_refuse_every_attempt(outcomes, name):
    _, unconfined = outcomes["none"]
    layers, confined = outcomes["all"]
    require(layers, "landlock filesystem", "seccomp", "not root", "rlimit memory")
    if unconfined[name] != "done":
        pytest.skip(f"also fails without a sandbox: {unconfined[name]}")
    assert confined[name] != "done"


@pytest.mark.parametrize(
    ("name", "step"), [(name, step) for name, (_, steps) in ATTEMPTS.items() for step in steps], ids=str
)
def test_a_single_step_refuses_its_attempts(outcomes, name, step):
    _, unconfined = outcomes["none"]
    layers, confined = outcomes[step]
    if step == USER and os.getuid() != 0:
        pytest.skip("only root can switch users")
    if step == FILES:
        require(layers, "landlock filesystem")
        needed = {"truncate": 3, "connect by TCP": 4, "listen by TCP": 4, "signal the parent": 6, "signal by pidfd": 6}
        if abi() < (needed | {"connect to an abstract unix socket": 6}).get(name, 1):
            pytest.skip(f"not supported by Landlock ABI {abi()}")
    require(layers, {CALLS: "seccomp", USER: "not root", LIMITS: "rlimit memory", FILES: "landlock filesystem"}[step])
    if unconfined[name] != "done":
        pytest.skip(f"also fails without a sandbox: {unconfined[name]}")
    assert confined[name] != "done"


def test_the_active_layers_are_returned_in_order(outcomes):
    layers, _ = outcomes["all"]
    assert layers == [layer for layer in sandbox.ALL_LAYERS if layer in layers]
    assert {"no new privileges", "rlimit file size", "no core dumps"} <= set(layers)
    assert "seccomp" not in outcomes[FILES][0]
    assert set(sandbox.ALL_LAYERS) >= {layer for held, _ in outcomes.values() for layer in held}


def test_every_refused_system_call_fails_with_eperm(run):
    if os.uname().machine not in sandbox.ARCHITECTURES:
        pytest.skip("no seccomp filter for this architecture")
    column, _ = sandbox.ARCHITECTURES[os.uname().machine]
    numbers = {name: call[column] for name, call in sandbox.REFUSED.items() if call[column] is not None}
    numbers["x32"] = 0x40000000 | 39
    program = f"""
    layers, got = confine(), dict()
    for name, number in {numbers!r}.items():
        try:
            call(number, -1, -1, -1, -1, -1, -1)
        except OSError as error:
            got[name] = errno.errorcode[error.errno]
    print(json.dumps([layers, got]))
    """
    layers, got = run(program)
    require(layers, "seccomp")
    assert got == dict.fromkeys(numbers, "EPERM")


@pytest.mark.parametrize(("column", "header"), [(0, "x86_64-linux-gnu/asm/unistd_64.h"), (1, "asm-generic/unistd.h")])
def test_system_call_numbers_match_the_kernel_headers(column, header):
    path = Path("/usr/include", header)
    if not path.exists():
        pytest.skip(f"no {path} to compare with")
    kernels = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text()))
    for calls in (sandbox.REFUSED, sandbox.FAKED, sandbox.SELF_ONLY):
        for name, call in calls.items():
            if call[column] is not None and name in kernels:
                assert (name, call[column]) == (name, int(kernels[name]))


@pytest.mark.parametrize("before", ["", "os.chown(write, 12345, 12345); os.setresuid(12345, 12345, 12345)"])
def test_a_fork_bomb_stops_at_the_limit_and_dies_with_its_group(start, before):
    if before and os.getuid() != 0:
        pytest.skip("only root can switch users")
    program = f"""
    {before}
    layers, count = confine(processes=20), 0
    try:
        while count < 1000:
            if os.fork() == 0:
                os.setsid()
                try:
                    while True:
                        os.fork()
                except BlockingIOError:
                    time.sleep(60)
            count += 1
            time.sleep(0.01)
    except BlockingIOError:
        print(json.dumps([layers, count]), flush=True)
    time.sleep(60)
    """
    begin = time.monotonic()
    with start(program) as process:
        line = process.stdout.readline()
        group = _group(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
    layers, count = json.loads(line)
    require(layers, "rlimit processes", "seccomp")
    assert 1 <= count <= 20
    assert 1 < len(group) <= 21
    assert _becomes_true(lambda: not _group(process.pid))
    assert time.monotonic() - begin < 30
    assert subprocess.run(["true"], check=True).returncode == 0


def _group(pid: int) -> list[str]:
    """Return the processes of this session, including those whose call of setsid had no effect."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = entry.read_text().rpartition(")")[2].split()[:4]
            if int(session) == pid and state not in "ZX":
                found.append(entry.parent.name)
    return found


def _becomes_true(condition) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_threads_stop_at_the_limit(run):
    program = """
    sandbox.MAX_THREADS = 30
    layers, ready, started = confine(), threading.Event(), 0
    try:
        while started < 1000:
            threading.Thread(target=ready.wait, daemon=True).start()
            started += 1
    except RuntimeError:
        pass
    ready.set()
    print(json.dumps([layers, started]))
    """
    layers, started = run(program)
    require(layers, "rlimit processes")
    assert 5 < started <= 30


def test_a_crash_dumps_no_core(start):
    program = """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    os.chdir(write)
    confine(file_bytes=2**30)
    os.kill(os.getpid(), signal.SIGABRT)
    """
    with start(program) as process:
        end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert (end.si_code, end.si_status) == (os.CLD_KILLED, signal.SIGABRT)  # else: CLD_DUMPED
    assert [file.name for file in (process.root / "write").iterdir()] == ["link"]


def test_killing_a_child_affects_nothing_else(start):
    program = """
    confine()
    (write / "half.txt").write_text("half")
    print("busy", flush=True)
    while True:
        pass
    """
    with start(program) as process:
        assert process.stdout.readline() == "busy\n"
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert (process.root / "write" / "half.txt").read_text() == "half"
    assert (process.root / "secret.txt").read_text() == "secret.txt"


def test_the_parent_death_signal_is_kept(run):
    program = """
    libc.prctl(1, signal.SIGKILL)
    confine()
    death_signal = ctypes.c_int()
    libc.prctl(2, ctypes.byref(death_signal))
    print(death_signal.value)
    """
    assert run(program) == signal.SIGKILL


def test_an_earlier_thread_is_confined_by_seccomp_and_landlock_is_not_reported(run):
    program = """
    go, outcome = threading.Event(), []
    def late():
        go.wait()
        for attempt in (socket.socket, functools.partial(os.setresuid, 0, 0, 0)):
            try:
                attempt()
                outcome.append("done")
            except PermissionError:
                outcome.append("refused")
    thread = threading.Thread(target=late)
    thread.start()
    layers = confine()
    go.set()
    thread.join()
    print(json.dumps([layers, outcome]))
    """
    layers, outcome = run(program)
    require(layers, "seccomp", "not root")
    assert outcome == ["refused", "refused"]
    assert ("landlock filesystem" in layers) == (abi() >= 8)


def test_child_processes_are_confined_too(run):
    program = """
    layers = confine(processes=50)
    done = subprocess.run([sys.executable, "-c", "print(1 + 1)"], capture_output=True, text=True, check=True)
    peek = subprocess.run(["cat", str(secret)], capture_output=True, text=True)
    print(json.dumps([layers, done.stdout, peek.returncode, peek.stdout]))
    """
    layers, printed, code, secret = run(program)
    assert "seccomp processes" not in layers
    assert printed == "2\n"
    require(layers, "landlock filesystem")
    assert (code, secret) == (1, "")


def test_network_can_be_allowed(run):
    layers, port = run("""
    layers = confine(network=True)
    print(json.dumps([layers, socket.create_connection(("127.0.0.1", world["port"])).getpeername()[1]]))
    """)
    assert port > 0
    assert not {"landlock network", "seccomp network"} & set(layers)


def test_layers_missing_from_an_old_kernel_are_not_reported(run):
    layers = run("""
    sandbox._libc = type("OldKernel", (), dict.fromkeys(("syscall", "prctl", "capset", "capget"), lambda *_: -1))()
    print(json.dumps(confine()))
    """)
    assert not [layer for layer in layers if "landlock" in layer or "seccomp" in layer or "privileges" in layer]
    assert "rlimit file size" in layers


@pytest.mark.parametrize("version", range(1, 8))
def test_every_landlock_abi_enforces_what_it_supports(run, version):
    if abi() < version:
        pytest.skip(f"this machine has Landlock ABI {abi()}")
    program = f"""
    syscall, sandbox._syscall = sandbox._syscall, lambda *a: {version} if a == (444, None, 0, 1) else syscall(*a)
    layers = confine("_landlock")
    try:
        secret.read_text()
    except PermissionError:
        (write / "mine").write_text("mine")
        print(json.dumps(layers))
    """
    held = {1: ["landlock filesystem"], 4: ["landlock network"], 6: ["landlock scopes"]}
    expected = [layer for since, layers in held.items() for layer in layers if since <= version]
    assert [layer for layer in run(program) if "landlock" in layer] == expected


MINE = """
import torch, triton, triton.language as tl
from neighbour import TWO

@triton.jit
def double(x, y, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offs, tl.load(x + offs, offs < N) * TWO, offs < N)

def run(x):
    y = torch.empty_like(x)
    double[(2,)](x, y, x.numel(), BLOCK=64)
    return y
"""


@pytest.mark.slow
def test_kernels_run_in_the_sandbox(run):
    pytest.importorskip("numba")
    program = """
    import numpy as np, torch, triton, triton.language as tl
    from numba import cuda
    import tilewright, tilewright.worker

    (read / "mine.py").write_text(world["mine"])
    (read / "neighbour.py").write_text("import triton.language as tl; TWO = tl.constexpr(2)")
    alone = len(os.listdir("/proc/self/task")) == 1
    begin = time.perf_counter()
    layers = confine(memory=2**33)
    spent = time.perf_counter() - begin

    torch.set_num_threads(4)
    a = torch.randn(300, 300, dtype=torch.float64, requires_grad=True)
    np.testing.assert_allclose((a @ a).detach().numpy(), a.detach().numpy() @ a.detach().numpy())
    (a @ a).sum().backward()  # on one of torch's own threads

    sys.path.insert(0, str(read))
    import mine
    x = torch.arange(100.0)
    with tilewright.interpret():
        assert torch.equal(mine.run(x), 2 * x)

    @cuda.jit
    def add_one(v):
        v[cuda.threadIdx.x] += 1
        cuda.syncthreads()
    v = np.zeros(256)
    add_one[1, 256](v)
    assert (v == 1).all()

    from multiprocessing.pool import ThreadPool  # its locks are semaphores in /dev/shm
    import shutil
    with ThreadPool(4) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    tempfile.tempdir = str(write)
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as file:
        Path(folder, "mark").touch()
        assert Path(folder, "mark").exists()
        torch.save(x, Path(folder, "x.pt"))
        shutil.copy(Path(folder, "x.pt"), file.name)
        assert torch.equal(torch.load(file.name), x)
        Path(folder, "x.pt").rename(write / "kept.pt")

    # The CUDA driver does this when it starts.
    def name_itself():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("named")
        named.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text())
    named = []
    thread = threading.Thread(target=name_itself)
    thread.start()
    thread.join()
    assert named == ["named\\n"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\\0cuda-uvmfd-{os.getpid()}")
        listener.listen()
    os.close(os.memfd_create("cuda"))
    print("to stderr", file=sys.stderr)
    print(json.dumps([layers, alone, spent]))
    """
    layers, alone, spent = run(program, env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "OMP_NUM_THREADS": "1"})
    assert alone
    assert spent < 1
    require(layers, "landlock filesystem", "seccomp", "seccomp processes", "rlimit memory")
