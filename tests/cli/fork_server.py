"""Fork a child for every request on stdin, after importing once the modules that take seconds to import."""

import atexit
import json
import os
import sys

sys.path.pop(0)  # this folder is not on the path of a command

import torch._dynamo  # noqa: F401
import triton  # noqa: F401

import tilewright.ops
import tilewright.workbench.audit
import tilewright.workbench.bench
import tilewright.workbench.check
import tilewright.workbench.tune  # noqa: F401
from tilewright.cli import main
from tilewright.worker import process


def become(args: list[str], cwd: str, env: dict[str, str], out: str, err: str) -> None:
    """Run the command as if this process had been started for it."""
    for file, number in ((os.devnull, 0), (out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["tilewright", *args]
    process.ForkServer.is_alive = True  # the one of the parent process serves all commands
    try:
        main()
    except SystemExit as end:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(end.code if isinstance(end.code, int) else bool(end.code))  # tearing down torch takes a second


def serve() -> None:
    process.fork_server("cpu")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become(**json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


serve()
