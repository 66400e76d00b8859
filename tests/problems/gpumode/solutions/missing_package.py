"""Imports a package that is not installed."""

EXPECTED = "unusable"
PROBLEM = "../vectoradd_py"

import no_such_package


def custom_kernel(data):
    return no_such_package.add(*data)
