"""Writes a hundred forged replies to every pipe it has inherited and stops. They are well formed except for the token,
which it cannot know in advance."""

EXPECTED = "tampered"

import contextlib
import json
import os
import signal
import stat
import struct


def softmax(x):
    described = {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}
    header = json.dumps({"message": {"outputs": 1, "verdict": "right"}, "tensors": [described]}).encode()
    reply = struct.pack("<QQ", len(header), x.nbytes) + header + bytes(x.nbytes)
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.write(descriptor, 100 * reply)
    os.kill(os.getpid(), signal.SIGSTOP)
