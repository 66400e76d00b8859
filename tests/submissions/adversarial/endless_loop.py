"""Never comes back."""

EXPECTED = "timeout"


def softmax(x):
    while True:
        pass
