"""Other libraries as kernels, one a file named after the library. None is needed: an absent one is told and left out.

A file says which PACKAGE it needs and where it comes from (INSTALL), and holds one function an operation, named after
it, that imports the package when called. A function `fits_<op>` says which inputs that kernel takes.
"""
