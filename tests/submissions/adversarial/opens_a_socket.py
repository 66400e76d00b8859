"""Connects to a server on this machine, at the port in `port.txt` in its own folder."""

EXPECTED = "crashed"

import socket
from pathlib import Path

import torch


def softmax(x):
    port = int(Path(__file__).with_name("port.txt").read_text())
    socket.create_connection(("127.0.0.1", port), timeout=2).close()
    return torch.softmax(x, -1)
