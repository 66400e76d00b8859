"""Changes its input, and a thread restores it a little later."""

EXPECTED = "wrong"

import threading
import time

import torch


def softmax(x):
    y, kept = torch.softmax(x, -1), x.detach().clone()
    x.detach().zero_()

    def restore():
        time.sleep(0.1)
        x.detach().copy_(kept)

    threading.Thread(target=restore, daemon=True).start()
    return y
