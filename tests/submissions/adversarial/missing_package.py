"""Imports a package that is not installed."""

EXPECTED = "unusable"

import no_such_package


def softmax(x):
    return no_such_package.softmax(x)
