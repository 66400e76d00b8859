"""Writes each product into its own buffer and returns them in a list."""

EXPECTED = "right"
PROBLEM = "../groups_py"


def custom_kernel(data):
    tensors, _ = data
    for a, b, c in tensors:
        c.copy_(a.float() @ b.float().T)
    return [c for _, _, c in tensors]
