"""The fork server: a process that has imported torch, which takes more than a second, and forks children on request."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time

from tilewright.worker import child
from tilewright.worker.process import die_with_parent as die_with_parent

FILES = 3  # a child's standard input, output and error; shared memory may follow
# Torch imports these at the first gradient and the first compilation, which would take each child a second.
USED_LATER = ("torch.fx.experimental.symbolic_shapes", "torch._dynamo")


def serve() -> None:
    """Serve the parent's requests until it closes the socket."""
    device, control = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    die_with_parent()
    while True:
        message, files, _, _ = socket.recv_fds(control, 2**12, FILES + 1)
        if not message:
            return
        request = json.loads(message)
        if "wait" in request:
            control.send(json.dumps(_exit_code(request["wait"], request["seconds"])).encode())
        elif os.fork():
            for file in files:
                os.close(file)
            for name in USED_LATER:  # while the first child works, which should not wait for them
                importlib.import_module(name)
        else:
            shared = _become_child(control, files)
            child.serve(device, request["memory"], request["folder"], shared)
            return


def _become_child(control: socket.socket, files: list[int]) -> int | None:
    """Take over the files, and return the descriptor of the shared memory if there is one."""
    die_with_parent()
    os.setsid()
    for number, file in enumerate(files[:FILES]):
        os.dup2(file, number)
        os.close(file)
    control.send(json.dumps(os.getpid()).encode())
    control.close()  # a user's file must not be able to request processes
    return next(iter(files[FILES:]), None)


def _exit_code(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(ended[1])
