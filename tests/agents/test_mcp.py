"""The MCP server, by the SDK's own client: in this process, and over standard input and output."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal
from mcp import Client

from agents.sample_kernels import SOFTMAX
from tilewright.agents.pool import Pool
from tilewright.agents.server import build

SMALL = {"case": ["M=3,N=781"], "dtype": ["float32"]}


class Session:
    """A client whose calls wait for their answers."""

    def __init__(self, portal, client, pool=None):
        self.portal, self.client, self.pool = portal, client, pool

    def call(self, tool, **arguments):
        steps = []

        async def note(done, total, message):
            steps.append((done, total, message))

        async def call():
            return await self.client.call_tool(tool, arguments, progress_callback=note)

        answer = self.portal.call(call)
        return answer, steps

    def result(self, tool, **arguments):
        answer, _ = self.call(tool, **arguments)
        assert not answer.is_error, answer.content[0].text
        return answer.structured_content

    def error(self, tool, **arguments):
        answer, _ = self.call(tool, **arguments)
        assert answer.is_error
        text = answer.content[0].text
        assert "\n" not in text
        return text


@pytest.fixture(scope="module")
def session():
    with start_blocking_portal() as portal:
        pool = Pool(2, 120)
        with portal.wrap_async_context_manager(Client(build(pool))) as client:
            yield Session(portal, client, pool)


def test_every_tool_is_described_and_typed(session):
    tools = session.portal.call(session.client.list_tools).tools
    names = {tool.name for tool in tools}
    assert {"list_problems", "read_problem", "check", "audit", "inspect", "explain", "bench"} <= names
    for tool in tools:
        assert tool.description.endswith(".")
        assert tool.output_schema["type"] == "object"
        assert all("description" in field for field in tool.input_schema["properties"].values()), tool.name


def test_list_problems(session):
    found = session.result("list_problems")["problems"]
    (add,) = [one for one in found if one["name"] == "add"]
    assert add["computes"] == "Elementwise sum of two tensors: out = x + y."
    assert "triton" in add["kernels"]


@pytest.mark.slow
def test_read_problem(session):
    found = session.result("read_problem", problem="rms_norm")
    assert found["signature"] == "rms_norm(x, weight, eps, weight_offset)"
    assert "def reference" in found["reference"]
    assert any("bfloat16" in one for one in found["inputs"])


@pytest.mark.slow
def test_our_kernels_and_other_gpus(session):
    call = {"problem": "softmax", "kernel": "triton", "case": "M=4096,N=1024", "dtype": "bfloat16"}
    assert session.result("explain", **call)["title"] == "softmax, triton, M=4096,N=1024 bfloat16"
    (launch,) = session.result("inspect", **call, gpu="a100-80gb")["launches"]
    assert (launch["gpu"], launch["grid"][0] > 0, launch["error"]) == ("a100-80gb", True, None)
    assert launch["registers"] > 0


def test_errors_say_what_to_fix(session, tmp_path):
    assert "did you mean 'softmax'" in session.error("check", problem="sofmax", code="x = 1")
    assert "exactly one of code, file or kernel" in session.error("check", problem="softmax")
    assert "exactly one of" in session.error("check", problem="softmax", code="x = 1", file="a.py")
    assert "write it like `case` M=" in session.error("check", problem="softmax", code="x = 1", case=["M=1"])
    assert "its arguments are: problem, code" in session.error("check", problem="softmax", cases=["M=1"])
    assert "argument 'case'" in session.error("check", problem="softmax", case=3)
    assert "argument 'depth'" in session.error("check", problem="softmax", code="x = 1", depth="deep")
    assert "no file at" in session.error("check", problem="softmax", file=str(tmp_path / "none.py"))
    assert "solution.py, line 1: syntax error" in session.error("audit", problem="softmax", code="def :")
    assert "null bytes" in session.error("inspect", problem="softmax", code="x = 1\0")
    assert "datasheet" in session.error("explain", problem="softmax", kernel="triton", gpu="h999")
    assert "leave out `direction`" in session.error("inspect", problem="argmax", kernel="triton", direction="backward")


@pytest.mark.slow
def test_third_party_problems(session, tmp_path):
    problem = str(Path(__file__).parents[1] / "problems/kernelbench/level1_relu.py")
    found = session.result("read_problem", problem=problem)
    assert (found["kind"], found["entry_point"]) == ("kernelbench", "ModelNew")
    code = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x): return x.clamp(min=0)\n"
    assert session.result("check", problem=problem, code=code)["is_right"]
    assert "works on operations" in session.error("explain", problem=problem, code=code)


@pytest.mark.slow
def test_code_that_hangs_or_crashes_does_not_end_the_server(session, tmp_path):
    crash = "import os\ndef softmax(x): os.abort()\n"
    assert session.result("check", problem="softmax", code=crash, **SMALL)["verdict"] == "crashed"
    assert "SIGABRT" in session.error("audit", problem="softmax", code=crash)
    problem = tmp_path / "problem.py"
    problem.write_text("import os\nos.abort()\n")  # runs in the process of the call, which is not the server
    assert "killed by SIGABRT" in session.error("read_problem", problem=str(problem))
    problem.write_text("while True: pass\n")
    session.pool.seconds, before = 2, session.pool.seconds
    try:
        assert "took longer than 2 s" in session.error("read_problem", problem=str(problem))
    finally:
        session.pool.seconds = before
    assert session.result("list_problems")["problems"]


@pytest.mark.slow
def test_a_file_cannot_write_outside_of_its_folder(session, tmp_path):
    target = tmp_path / "written"
    steal = f"open({str(target)!r}, 'w').write('x')\n{SOFTMAX}"
    for tool in ("audit", "inspect"):
        assert "Permission" in session.error(tool, problem="softmax", code=steal)
    assert not target.exists()


@pytest.mark.slow
def test_stdout_carries_only_messages_and_every_process_ends_with_the_server():
    command = [sys.executable, "-m", "tilewright", "mcp"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    number = 0

    def send(method, **params):
        nonlocal number
        number += 1
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        server.stdin.write(json.dumps(message) + "\n")
        server.stdin.flush()

    def answers(count):
        found = {}
        while len(found) < count:
            message = json.loads(server.stdout.readline())  # raises for anything else
            assert message["jsonrpc"] == "2.0"
            if "id" in message:
                found[message["id"]] = message["result"]
        return found

    send("initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo={"name": "test", "version": "1"})
    assert answers(1)[1]["serverInfo"]["name"] == "tilewright"
    noisy = f"import os\nprint('noise', flush=True)\nos.write(1, b'noise')\n{SOFTMAX}"
    for case in ("M=3,N=781", "M=5,N=100"):  # at once
        send("tools/call", name="audit", arguments={"problem": "softmax", "code": noisy, "case": case})
    found = answers(2)
    assert found[2]["structuredContent"]["title"].startswith("softmax, solution.py, M=3,N=781")
    assert found[3]["structuredContent"]["title"].startswith("softmax, solution.py, M=5,N=100")
    hosts = _children(server.pid)
    assert len(hosts) == 2
    server.kill()
    server.communicate()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{host}").exists() for host in hosts) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{host}").exists() for host in hosts)


def _children(pid):
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_without_the_package_one_line_says_how_to_install_it(monkeypatch, capsys):
    from tilewright.cli import main

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["tilewright", "mcp"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "pip install tilewright[mcp]" in capsys.readouterr().err
