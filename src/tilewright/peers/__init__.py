"""Kernels of other libraries, one file per library, with its name. A library that is not installed is left out.

A file defines the PACKAGE it needs, how to INSTALL it, the LANGUAGE of its kernels, and one function per operation,
named like it, which imports the package when called. `fits_<op>` returns whether a kernel supports inputs.
"""
