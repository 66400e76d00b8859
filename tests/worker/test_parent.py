"""Whatever a file does, the parent survives and reports what happened."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tilewright import settings
from tilewright.worker import process
from tilewright.worker.execute import KernelFailed, OutputSpec, Request
from tilewright.worker.memory import GuardedTensor
from tilewright.worker.parent import Worker

FILE = """
import os, sys, time, torch

def softmax(x):
    print("noise on stdout")
    action = float(x[0, 0])
    if action == 1: os._exit(0)
    if action == 2: time.sleep(60)
    if action == 3: os.abort()
    if action == 4: raise ValueError("first line\\nsecond line")
    if action == 5: return torch.zeros(3 * 2**28)
    if action == 6: return "text"
    if action == 7: os.write(1, b"x" * 1000)
    if action == 8: sys.exit(0)
    if action == 9: return x.new_empty(0, 3)
    return torch.softmax(x, -1)
"""


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "mine.py"
    path.write_text(FILE)
    with Worker(device="cpu", seconds=8, memory=2 * 2**30) as started:
        started.load("softmax", file=path)
        yield started


def call(worker, x, grad=None, shape=None):
    grads = [] if grad is None else [GuardedTensor.copy_of(grad, "contiguous")]
    specs = [OutputSpec(tuple(x.shape) if shape is None else shape, x.dtype)]
    return worker.call(
        Request([GuardedTensor.copy_of(x, "contiguous")], specs, grads=grads, needs_grad=[0] if grads else [])
    )


def request(worker, action: int, **more):
    return call(worker, torch.full((2, 3), float(action)), **more)


@pytest.mark.parametrize(
    ("action", "kind", "reason"),
    [
        (1, "crashed", "code 0"),
        (2, "timeout", "within"),
        (3, "crashed", "SIGABRT"),
        (4, "crashed", "ValueError: first line"),
        (5, "crashed", "allocate memory"),
        (6, "wrong", "returned str, not a tensor"),
        (8, "crashed", "code 0"),
    ],
)
def test_a_crash_is_reported_and_the_next_call_works(worker, action, kind, reason):
    if action == 2:
        worker.seconds = 1
    begin = time.monotonic()
    with pytest.raises(KernelFailed, match=reason) as failure:
        request(worker, action)
    assert failure.value.kind == kind
    assert "\n" not in str(failure.value)
    assert time.monotonic() - begin < 60
    worker.seconds = 8
    reply = request(worker, 0)
    assert torch.equal(reply.outputs[0], torch.softmax(torch.zeros(2, 3), -1))
    assert reply.gradients == []


def test_printing_does_not_disturb_the_reply(worker):
    assert torch.equal(request(worker, 7).outputs[0], torch.softmax(torch.full((2, 3), 7.0), -1))


def test_values_and_gradients_are_returned_bit_for_bit(worker):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(3, 5, dtype=dtype)
        grad = torch.randn(3, 5, dtype=dtype)
        reply = call(worker, x, grad)
        (y,), (dx,) = reply.outputs, reply.gradients
        leaf = x.clone().requires_grad_()
        expected = torch.softmax(leaf, -1)
        assert torch.equal(y, expected)
        assert torch.equal(dx, torch.autograd.grad(expected, leaf, grad)[0])


def test_empty_outputs_are_returned(worker):
    assert request(worker, 9, shape=(0, 3)).outputs[0].shape == (0, 3)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_busy_worker_ends_with_its_parent_however_that_ends(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import pathlib, tempfile, time\n\ndef softmax(x):\n"
        "    pathlib.Path(tempfile.gettempdir(), 'busy').touch()\n    time.sleep(60)\n"
    )
    program = (
        "import sys, torch; from pathlib import Path; from tilewright.worker.parent import Worker\n"
        "from tilewright.worker.memory import GuardedTensor\n"
        "from tilewright.worker.execute import OutputSpec, Request\n"
        "worker = Worker(device='cpu'); worker.load('softmax', file=Path(sys.argv[1]))\n"
        "print(worker._process.pid, worker._process.folder, flush=True)\n"
        "x = GuardedTensor.copy_of(torch.ones(2, 3), 'contiguous')\n"
        "worker.call(Request([x], [OutputSpec((2, 3), torch.float32)]))"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    pid, folder = parent.stdout.readline().split()
    child = Path("/proc", pid)
    assert _becomes_true(Path(folder, "busy").exists)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert _becomes_true(lambda: not child.exists() or "zombie" in (child / "status").read_text())


def _becomes_true(condition) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_processes_are_forks_of_one_that_has_imported_torch(worker):
    request(worker, 0)
    first, fork_server = worker._process.pid, process.fork_server("cpu")
    worker.close()
    request(worker, 0)
    assert worker._process.pid != first
    assert process.fork_server("cpu") is fork_server
    parent = Path("/proc", str(worker._process.pid), "stat").read_text().rpartition(")")[2].split()[1]
    assert int(parent) == fork_server._process.pid


def test_a_process_that_hangs_is_killed_after_the_timeout(worker):
    request(worker, 0)
    child = Path("/proc", str(worker._process.pid))
    worker.seconds = 1
    with pytest.raises(KernelFailed, match="within 1 s"):
        request(worker, 2)
    worker.seconds = 8
    assert not child.exists()


def test_a_file_has_no_pipes_and_sockets_of_other_processes(worker):
    request(worker, 0)
    open_here = {file.name: os.readlink(file) for file in Path("/proc", str(worker._process.pid), "fd").iterdir()}
    assert not [file for file in open_here.values() if file.startswith("socket")]
    assert len([file for file in open_here.values() if file.startswith("pipe")]) == 2


@pytest.mark.slow
def test_a_killed_fork_server_is_replaced(worker):
    request(worker, 0)
    child = Path("/proc", str(worker._process.pid))
    os.kill(process.fork_server("cpu")._process.pid, signal.SIGKILL)
    assert _becomes_true(lambda: not child.exists())
    with pytest.raises(KernelFailed, match="the process"):
        request(worker, 0)
    request(worker, 0)


def test_an_interrupted_fork_server_is_not_used_again(worker, monkeypatch):
    """Its pending reply, an exit code of 0, would be taken for the next process's pid, and this group be killed."""
    request(worker, 0)
    fork_server, send_fds = process.fork_server("cpu"), socket.send_fds

    def interrupted(*given):
        send_fds(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(socket, "send_fds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.close()
    monkeypatch.setattr(socket, "send_fds", send_fds)
    assert not fork_server.is_alive
    assert request(worker, 0).outputs[0].shape == (2, 3)
    assert process.fork_server("cpu") is not fork_server


def test_a_python_without_torch_is_reported_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    monkeypatch.setattr(settings, "worker_environment", lambda _: os.environ | {"PYTHONPATH": str(tmp_path)})
    monkeypatch.setattr(process, "BOOTSTRAP", "import torch")
    with Worker(device="cpu") as started, pytest.raises(KernelFailed, match="code 1: ImportError: no torch here"):
        started.load("softmax")


def test_a_function_of_ours_runs_in_the_sandbox(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import pathlib\npathlib.Path(__file__).with_name('written').write_text('x')\n")
    with Worker(device="cpu", seconds=30) as worker:
        assert worker.run("json:dumps", path, {"obj": [1, 2]}) == "[1, 2]"
        assert "landlock filesystem" in worker.isolation or sys.platform != "linux"
        with pytest.raises(KernelFailed, match="Permission denied") as failure:
            worker.run("runpy:run_path", path, {"path_name": str(path)})
        assert failure.value.kind == "crashed"
    assert not (tmp_path / "written").exists()


def test_a_function_of_ours_that_raises_for_the_user_is_a_usage_error(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("x = 1\n")
    with Worker(device="cpu", seconds=30) as worker, pytest.raises(KernelFailed, match="no operation") as failure:
        worker.run("tilewright.registry:load", path, {"name": "sofmax"})
    assert failure.value.kind == "usage"
