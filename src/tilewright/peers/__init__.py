"""Kernels of other libraries, one file per library, with its name. All are optional: one that is not installed is left
out, with a message.

A file defines the PACKAGE that it needs, how to INSTALL it, the LANGUAGE of its kernels, and one function per operation,
with the operation's name, which imports the package when called. `fits_<op>` returns whether that kernel supports inputs.
"""
