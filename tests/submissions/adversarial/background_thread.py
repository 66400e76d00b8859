"""Returns immediately, and a thread fills the output later."""

EXPECTED = "wrong"

import threading
import time

import torch


def softmax(x):
    y = torch.zeros_like(x)

    def later():
        time.sleep(0.1)
        y.copy_(torch.softmax(x.detach(), -1))

    threading.Thread(target=later, daemon=True).start()
    return y
