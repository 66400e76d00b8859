"""Fingerprints of recorded calls: added to fresh records, and compared with what the current code launches."""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from tilewright import record, settings, source

KINDS = ("timing", "counters", "prediction", "hint", "verdict")  # whose calls can be traced offline
Record = dict[str, Any]
Case = tuple[str, str, str]  # sizes and modes as text, dtype, direction
Launches = dict[str, list[str]]  # by call


@dataclass(frozen=True)
class Job:
    """The calls of one kernel whose fingerprints are wanted, each with its cases."""

    op: str
    kernel: str
    gpu: str
    calls: Mapping[str, Sequence[Case]]

    @property
    def cases(self) -> int:
        return sum(map(len, self.calls.values()))


@dataclass(frozen=True)
class Comparison:
    """The fingerprint of a record beside that of the current code."""

    record: Record
    launches: list[str]

    @property
    def is_same(self) -> bool:
        return self.record.get("fingerprint", {}).get("launches") == self.launches

    @property
    def contradicts(self) -> bool:
        """Return whether the record counts as fresh although the current code launches something else."""
        return not self.is_same and record.stale_reason(self.record) is None


def can_be_traced(r: Mapping[str, Any]) -> bool:
    """Return whether a record can be traced offline: a call, on a GPU, of a kernel that still exists."""
    is_here = source.kernel_hash(r["op"], r["kernel"]) is not None
    return r["kind"] in KINDS and is_here and not r.get("file") and "gpu" in r.get("device", {})


def jobs(records: Iterable[Record]) -> list[Job]:
    """Return one job per kernel and GPU, with every call that a record is about."""
    wanted: dict[tuple[str, str, str], dict[str, Sequence[Case]]] = defaultdict(dict)
    for r in records:
        wanted[r["op"], r["kernel"], r["device"]["gpu"]][record.call_key(r)] = [*_cases(r)]
    return [Job(*names, calls) for names, calls in wanted.items()]


def _cases(r: Record) -> Iterator[Case]:
    """Yield the cases of a record. Those of a verdict that differ in values or strides alone are left out."""
    if r["kind"] != "verdict":
        yield record.spelled(r["case"]), r["dtype"], r.get("direction", "forward")
    else:
        yield from ((one["case"], one["dtype"], "both") for one in r["cases"] if "(" not in one["case"])


def trace(job: Job) -> Launches:
    """Return the launches of every call of a job. Those of a verdict are one hash per case."""
    from tilewright import hardware, registry, spec
    from tilewright.workbench.inspect.fingerprint import fingerprint

    op, gpu = registry.load(job.op), hardware.datasheet(job.gpu)
    kernel = registry.named(op)[job.kernel]
    if kernel.origin == "peer":  # neither these nor Numba's kernels are compiled here: their source tells
        return {key: [f"source {source.kernel_hash(job.op, job.kernel)}"] for key in job.calls}
    if kernel.language == "numba":
        return {key: [f"code {source.code_hash(source.op_files()[job.op], only='numba')}"] for key in job.calls}
    found: Launches = {}
    for key, cases in job.calls.items():
        found[key] = []
        for text, dtype, direction in cases:
            case = spec.Case.parse(text, op.check[0]).with_dtype(dtype)
            launches = fingerprint(op, kernel, case, gpu, direction)
            found[key] += launches if key != record.CHECK else [f"{text} {dtype} {record.digest(launches)}"]
    return found


def trace_all(wanted: Sequence[Job], on_done: Callable[[str], None] = lambda _: None) -> list[Launches]:
    """Return the launches of all jobs, in their order, traced and compiled on all cores."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        longest_first = sorted(wanted, key=lambda job: -job.cases)
        running = {id(job): pool.submit(trace, job) for job in longest_first}
        for job in longest_first:
            running[id(job)].result()
            on_done(f"{job.op} {job.kernel}")
    return [running[id(job)].result() for job in wanted]


def compare(
    records: Sequence[Record],
    *,
    sample: int | None = None,
    seed: int = 0,
    on_done: Callable[[str], None] = lambda _: None,
) -> list[Comparison]:
    """Compare records that have a fingerprint, or a random sample of them, with the current code."""
    chosen = [r for r in records if can_be_traced(r)]
    if sample is not None:
        chosen = random.Random(seed).sample(chosen, min(sample, len(chosen)))
    wanted = jobs(chosen)
    traced = {
        (job.op, job.kernel, job.gpu): found for job, found in zip(wanted, trace_all(wanted, on_done), strict=True)
    }
    return [Comparison(r, traced[r["op"], r["kernel"], r["device"]["gpu"]][record.call_key(r)]) for r in chosen]


def update(comparisons: Sequence[Comparison]) -> tuple[int, int]:
    """Write down the fingerprints of the current code, and add them to fresh records that have none.

    Return how many records got a fingerprint and of how many kernels it is written down.
    """
    from tilewright.workbench.inspect.fingerprint import toolchain

    tools = toolchain()
    lacking = [c for c in comparisons if "fingerprint" not in c.record and not record.is_stale(c.record)]
    added = {_identity(c.record): {"fingerprint": {"toolchain": tools, "launches": c.launches}} for c in lacking}
    for path in settings.record_files():
        record.add_fields(path, added, _identity)
    by_gpu: dict[str, list[Comparison]] = defaultdict(list)
    for comparison in comparisons:
        by_gpu[comparison.record["device"]["gpu"]].append(comparison)
    lines = {gpu: [*_current(gpu, found, tools)] for gpu, found in by_gpu.items()}
    for gpu, found in lines.items():
        record.replace_file(settings.results_dir() / gpu / record.FINGERPRINTS, found)
    return len(added), sum(map(len, lines.values()))


def _current(gpu: str, comparisons: Sequence[Comparison], tools: dict[str, str]) -> Iterator[Record]:
    """Yield a record per kernel: the fingerprint of every call, and the library versions of the GPU's newest record."""
    calls: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for c in comparisons:
        calls[c.record["op"], c.record["kernel"]][record.call_key(c.record)] = record.digest(c.launches)
    versions = max((c.record for c in comparisons if "versions" in c.record), key=lambda r: r["date"])["versions"]
    about = {"device": {"gpu": gpu}, "toolchain": tools, "versions": versions}
    for (op, kernel), found in sorted(calls.items()):
        code = source.kernel_hash(op, kernel) or ""
        yield record.stamp("fingerprint", op, kernel, code, **about, calls=dict(sorted(found.items())))


def _identity(r: Mapping[str, Any]) -> str:
    """Return what tells a record from all others."""
    names = ("kind", "op", "kernel", "date", "source", "case", "dtype", "direction", "sized")
    return json.dumps([r.get(name) for name in names], sort_keys=True)
