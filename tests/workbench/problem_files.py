"""Write KernelBench problems and solutions, and check one against the other."""

from pathlib import Path

from tilewright.workbench.check import check, problems

MODEL = """
import torch
import torch.nn as nn

{head}

class {name}(nn.Module):
    def forward(self, x):
        {body}

{sizes}

def get_inputs():
    return [torch.randn({shape})]

def get_init_inputs():
    return []
"""


def model(path: Path, body: str, name: str = "Model", sizes: str = "", shape: str = "8, 128", head: str = "") -> Path:
    path.write_text(MODEL.format(name=name, body=body, sizes=sizes, shape=shape, head=head))
    return path


def verdict(problem: Path, path: Path, device: str):
    loaded = problems.load(problem)
    try:
        (found,) = check(loaded.op, [], [path], device=device, depth="quick", problem=loaded)
    finally:
        loaded.close()
    return found
