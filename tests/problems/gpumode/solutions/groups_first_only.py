"""The products but the last, which is zeros."""

EXPECTED = "wrong"
PROBLEM = "../groups_py"


def custom_kernel(data):
    tensors, _ = data
    results = [(a.float() @ b.float().T).half() for a, b, _ in tensors]
    results[-1].zero_()
    return results
