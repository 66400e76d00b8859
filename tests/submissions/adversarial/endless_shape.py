"""Returns an expanded tensor of 4 bytes that claims 4 TB: copying it before checking its shape runs out of memory."""

EXPECTED = "wrong"


def softmax(x):
    return x.detach().new_zeros(1).expand(2**40)
