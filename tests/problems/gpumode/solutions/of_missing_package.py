"""A task whose reference needs a package that is not installed."""

EXPECTED = "unusable"
PROBLEM = "../missing_package_py"


def custom_kernel(data):
    return data * data.sigmoid()
