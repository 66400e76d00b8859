"""Writes a hundred replies of its own to every pipe it has inherited and stops: well formed, but for the token that it
cannot know in advance. A parent that took them would have an answer to whatever it asks."""

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
