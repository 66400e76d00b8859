"""Never returns."""

EXPECTED = "timeout"


def softmax(x):
    while True:
        pass
