"""One scale a row in place of one a group."""

EXPECTED = "wrong"
PROBLEM = "../contest/quantise_py"


def custom_kernel(data):
    x, x_q, x_s = data
    x_s[...] = x.abs().amax(-1, keepdim=True) / 448.0
    x_q[...] = x / x_s[:, :1]
    return x_q, x_s
