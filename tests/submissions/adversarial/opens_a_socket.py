"""Asks a server on this machine for help, at the port that stands in `port.txt` beside its own file."""

EXPECTED = "crashed"

import socket
from pathlib import Path

import torch


def softmax(x):
    port = int(Path(__file__).with_name("port.txt").read_text())
    socket.create_connection(("127.0.0.1", port), timeout=2).close()
    return torch.softmax(x, -1)
