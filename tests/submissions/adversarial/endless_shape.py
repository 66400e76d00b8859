"""Returns four bytes that claim to be four terabytes: whoever copies them before looking at the shape dies."""

EXPECTED = "wrong"


def softmax(x):
    return x.detach().new_zeros(1).expand(2**40)
