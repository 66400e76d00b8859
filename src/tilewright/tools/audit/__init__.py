"""Kernels run in our interpreter: their faults, and every byte they move."""
