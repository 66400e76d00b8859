"""Kernels in processes of their own: for Numba's simulator, whose switch is read at import, and for users' files.

`parent` asks and `child` performs, over `wire`; `process` starts it, as a fork of the `nursery`; `stage` is one call,
`memory` what it may touch, `operators` and `tampering` what it used and what it replaced. Nothing is imported here:
`process` can start before torch is loaded.
"""
