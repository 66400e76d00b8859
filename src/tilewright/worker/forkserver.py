"""The fork server: a process that has imported torch, which takes more than a second, and forks children on request."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time

from tilewright.worker import child

FILES = 3  # a child's standard input, output and error


def serve() -> None:
    """Serve the parent's requests until it closes the socket."""
    device, control = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    _die_with_parent()
    while True:
        message, files, _, _ = socket.recv_fds(control, 2**12, FILES)
        if not message:
            return
        request = json.loads(message)
        if "wait" in request:
            control.send(json.dumps(_exit_code(request["wait"], request["seconds"])).encode())
        elif os.fork():
            for file in files:
                os.close(file)
        else:
            _become_child(control, files)
            child.serve(device, request["memory"], request["folder"])
            return


def _become_child(control: socket.socket, files: list[int]) -> None:
    _die_with_parent()
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    control.send(json.dumps(os.getpid()).encode())
    control.close()  # a user's file must not be able to request processes


def _exit_code(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(ended[1])


def _die_with_parent() -> None:
    """Have Linux kill this process when its parent ends, for whatever reason."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
