"""The answers of the tools: short, typed, and made of JSON values. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ProblemSummary:
    """A problem in a list."""

    name: str
    computes: str
    kernels: list[str] = field(default_factory=list)


@dataclass
class ProblemList:
    problems: list[ProblemSummary]
    others: str  # which other problems can be named
    arena: list[str] = field(default_factory=list)  # problems that can be submitted to


@dataclass
class ProblemText:
    """Everything needed to write a kernel for a problem."""

    name: str
    kind: str  # operation, kernelbench or gpu-mode
    computes: str
    entry_point: str  # the name that a solution must define
    signature: str
    reference: str  # source code
    inputs: list[str]  # those that the first bench case has
    dtypes: list[str]
    check_cases: list[str]
    bench_cases: list[str]
    has_gradient: bool
    rules: list[str]
    kernels: list[str] = field(default_factory=list)  # ours, to audit, inspect or explain by name


@dataclass
class CaseFailure:
    case: str
    dtype: str
    verdict: str
    reason: str
    wrong_elements: list[str] = field(default_factory=list)  # a map, one string per line


@dataclass
class CheckAnswer:
    """A verdict with its evidence."""

    problem: str
    kernel: str
    verdict: str  # right, wrong, tampered, crashed, timeout, unsupported
    is_right: bool
    reason: str
    cases_right: int
    cases: int
    calls: int
    failures: list[CaseFailure]  # the first few
    labels: list[str]
    isolation: list[str]  # sandbox layers that confined the file
    seed: int
    device: str  # the GPU, or "interpreter"
    next: str


@dataclass
class TensorTraffic:
    launch: str
    argument: str
    role: str
    loaded: int  # bytes
    stored: int
    reads_per_element: float
    masked_share: float


@dataclass
class AuditAnswer:
    """The memory traffic and the faults of one call."""

    title: str
    findings: list[str]  # faults: out of bounds, races, unwritten outputs
    summary: list[str]
    moved_bytes: int
    min_bytes: int
    traffic: list[TensorTraffic]
    next: str


@dataclass
class KernelResources:
    """One launch, compiled for one GPU."""

    kernel: str
    gpu: str
    error: str | None = None  # why it does not compile, or cannot be launched
    grid: list[int] = field(default_factory=list)
    threads: int = 0
    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    blocks_per_sm: int = 0
    occupancy: float = 0.0
    limiter: str = ""
    waves: float | None = None
    bytes_per_load: float | None = None
    bytes_per_store: float | None = None
    note: str = ""


@dataclass
class InspectAnswer:
    title: str
    launches: list[KernelResources]
    next: str


@dataclass
class FailedCheck:
    name: str
    evidence: list[str]
    line: str  # "file:line" in the kernel, if known
    advice: str


@dataclass
class ExplainAnswer:
    """The bottleneck of one call and what to try next."""

    title: str
    gpu: str
    bottleneck: str
    reason: str
    us: float | None
    us_source: str  # measured or predicted
    predicted_low_us: float | None
    predicted_high_us: float | None
    floor_us: float | None  # minimum time on this GPU
    share_of_ceiling: float | None
    failed_checks: list[FailedCheck]
    next: str


@dataclass
class BenchRow:
    kernel: str
    case: str
    dtype: str
    source: str  # measured or predicted
    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    share_of_ceiling: float | None = None
    speedup: float | None = None  # over eager
    reason: str = ""  # why there is no time


@dataclass
class BenchAnswer:
    """Times of a kernel: measured on a GPU, or predicted where there is none."""

    problem: str
    gpu: str
    is_measured: bool
    rows: list[BenchRow]
    next: str


@dataclass
class BoardResult:
    """The state of a submission on one board."""

    board: str
    state: str  # queued, checking, timing, ranked or refused
    reason: str
    us: float | None = None  # geometric mean over the cases
    share_of_ceiling: float | None = None
    speedup: float | None = None  # over eager
    evidence: list[str] = field(default_factory=list)


@dataclass
class SubmissionAnswer:
    submission: int
    problem: str
    is_finished: bool
    results: list[BoardResult]
    address: str  # URL of its page
    next: str


@dataclass
class BoardEntry:
    rank: int | None  # None if not verified here
    is_tied: bool
    author: str
    name: str
    us: float
    low_us: float
    high_us: float
    share_of_ceiling: float | None
    speedup: float | None  # over eager
    submission: int | None
    date: str


@dataclass
class BoardAnswer:
    problem: str
    board: str
    other_boards: list[str]
    entries: list[BoardEntry]
    total: int


@dataclass
class ArchivedKernel:
    id: str  # the number of a submission, or the name of our own kernel
    problem: str
    board: str
    author: str
    name: str
    techniques: list[str]
    us: float
    share_of_ceiling: float | None
    speedup: float | None  # over eager
    derived_from: str | None
    code: str  # the last definitions of a long file


@dataclass
class ArchiveAnswer:
    kernels: list[ArchivedKernel]
    next: str
