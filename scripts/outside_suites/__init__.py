"""The suites of scripts/outside.py: kernels that other projects publish, as cases for the interpreter."""
