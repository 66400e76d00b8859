"""An object with `__call__` as the entry point."""

EXPECTED = "right"
PROBLEM = "../vectoradd_pair_py"


class Adder:
    def __call__(self, data):
        A, B = data
        return A + B


custom_kernel = Adder()
