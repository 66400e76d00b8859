"""Run kernels in processes of their own: Numba's simulator, which is switched on at import, and users' files.

`parent` sends requests to `child` as `messages` in `framing`. `process` starts the child as a fork of the `forkserver`.
`execute` runs one call, `timed_run` times many. `memory` guards what a call may touch; `operators` and `tampering`
report the torch operators it uses and the functions it replaces. This module imports nothing, so that `process` can
start before torch is loaded.
"""
