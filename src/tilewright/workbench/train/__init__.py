"""Measure whole training steps: tokens per second, MFU, memory, where the time goes, and what limits the job."""

from tilewright.workbench.train.job import Job, job

__all__ = ["Job", "job"]
