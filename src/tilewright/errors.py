"""One class per mistake that a user can make. Each message is one line: what happened, then what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path


def first_line(error: BaseException) -> str:
    """Return an error as one line: its type and the first line of its message."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class TilewrightError(Exception):
    """A mistake that the user can fix. The command line prints only the message and exits with 2."""


def as_arguments(error: TilewrightError) -> str:
    """Return the message for callers of tools, whose arguments have the names of the options: `case` for --case."""
    return re.sub(r"--([a-z]+)", r"`\1`", str(error).strip().partition("\n")[0])


LISTED = 60  # names that a message lists


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like a wrong one, as a question, or all known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    others = f" and {len(known) - LISTED} others" if len(known) > LISTED else ""
    return f"known: {', '.join(known[:LISTED])}{others}"


class UnknownOp(TilewrightError):
    def __init__(self, name: str, known: Iterable[str]):
        super().__init__(f"no operation named '{name}'; {nearest(name, known)}")


class ProblemNotFound(TilewrightError):
    def __init__(self, name: str, known: Iterable[str]):
        super().__init__(
            f"no operation named '{name}' and no problem at that path; {nearest(name, known)}, or give the path of a "
            "problem"
        )


class UnknownKernel(TilewrightError):
    def __init__(self, op: str, name: str, known: Iterable[str]):
        super().__init__(f"{op} has no kernel named '{name}'; {nearest(name, known)}")


class DirectoryGiven(TilewrightError):
    def __init__(self, path: object):
        super().__init__(f"'{path}' is a directory; name a .py or .cu file in it, or an operation")


class NotAnOp(TilewrightError):
    def __init__(self, path: object):
        super().__init__(
            f"'{path}' is neither an operation nor a .py or .cu file; `tilewright ops` lists the operations"
        )


class UnknownGPU(TilewrightError):
    def __init__(self, name: str, known: Iterable[str], same_architecture: Iterable[str] = ()):
        gpus = ", ".join(same_architecture)
        what = f"GPUs of this architecture are: {gpus}" if gpus else nearest(name, known)
        super().__init__(f"no datasheet for a GPU named '{name}'; {what}")


class IncompleteDatasheet(TilewrightError):
    def __init__(self, gpu: str, missing: Iterable[str]):
        super().__init__(
            f"the datasheet of {gpu} lacks {', '.join(missing)}, without which no kernel can be judged; choose another "
            f"GPU, or see the minimum time with: tilewright floor OP --gpu {gpu}"
        )


class UnknownDtype(TilewrightError):
    def __init__(self, name: str, known: Iterable[str]):
        super().__init__(f"this operation does not support the dtype '{name}'; {nearest(name, known)}")


class BadCase(TilewrightError):
    def __init__(self, text: str, why: str, example: str):
        super().__init__(f"cannot read the case '{text}': {why}; write it like --case {example}")


class FileMissing(TilewrightError):
    def __init__(self, path: object, wanted: str = "a Python file with a kernel"):
        found = f"'{path}' is a folder" if Path(str(path)).is_dir() else f"no file at '{path}'"
        super().__init__(f"{found}; give the path of {wanted}")


class DuplicateFileName(TilewrightError):
    def __init__(self, name: str):
        super().__init__(
            f"two files are named '{name}', so their verdicts would share a name; rename one or check them one by one"
        )


class NothingChecked(TilewrightError):
    def __init__(self, reason: str):
        super().__init__(f"no kernel could be checked on this machine: {reason}")


class InvalidPageBlock(TilewrightError):
    def __init__(self, page: object, why: str):
        super().__init__(
            f"{page}: {why}; a block starts with <!-- records: softmax forward --> and ends with <!-- end -->"
        )


class FileBroken(TilewrightError):
    def __init__(self, path: object, line: int | None, why: str):
        where = f"{path}, line {line}" if line else str(path)
        super().__init__(f"{where}: {why}; fix the file and run the command again")


class MissingFunction(TilewrightError):
    def __init__(self, path: object, op: str):
        super().__init__(
            f"{path} has no kernel for {op}; define a function named '{op}', "
            f'or decorate one with @tilewright.kernel("{op}")'
        )


class BadProblem(TilewrightError):
    def __init__(self, path: object, why: str):
        self.why = why
        super().__init__(
            f"{path} is not a problem that can be checked: {why}; give a KernelBench file with Model, get_inputs and "
            "get_init_inputs, a gpu-mode folder with task.yml, or a flashinfer-bench definition"
        )


class NoProblems(TilewrightError):
    def __init__(self, path: object):
        super().__init__(
            f"'{path}' holds no problem; give a folder of KernelBench files, gpu-mode folders or flashinfer-bench "
            "definitions"
        )


class FileNeedsPackage(TilewrightError):
    def __init__(self, path: object, package: str | None):
        super().__init__(f"{path} needs the package '{package}', which is not installed here; install it and run again")


class FileNeedsCompiler(TilewrightError):
    def __init__(self, path: object, why: str):
        super().__init__(
            f"{path} compiles an extension with torch.utils.cpp_extension, which fails here ({why}); "
            "run it on a machine with a GPU and the CUDA toolkit"
        )


class ProblemTooLarge(TilewrightError):
    def __init__(self, path: object, case: str, fitting: str):
        what = f"run it with {fitting}" if fitting else "check it on a machine with a GPU"
        super().__init__(f"{path} is too large for a CPU, even with {case}; {what}")


class UnknownFunction(TilewrightError):
    def __init__(self, path: object, name: str, known: Iterable[str]):
        super().__init__(f"{path} has no function named '{name}'; {nearest(name, known)}")


class NoReference(TilewrightError):
    def __init__(self, path: object, functions: Iterable[str], command: str):
        has = ", ".join(functions)
        super().__init__(
            f"{path} defines no `reference` to compare with{f', only {has}' if has else ''}; name one, as in: {command}"
        )


class KernelOfAnOp(TilewrightError):
    def __init__(self, path: object, op: str):
        super().__init__(
            f"{path} holds a kernel of {op}, not an operation; check it with: tilewright check {op} {path}"
        )


class SolutionGiven(TilewrightError):
    def __init__(self, path: object):
        super().__init__(
            f"{path} holds a solution of a KernelBench problem; check it with: "
            f"tilewright check --problem PROBLEM.py {path}"
        )


class NoInputs(TilewrightError):
    def __init__(self, path: object, name: str, signature: object):
        super().__init__(
            f"{path} defines no `inputs` for {name}{signature}; give each argument with --input, e.g. "
            "-i 64x1000:bfloat16 -i 1e-6"
        )


class BadReference(TilewrightError):
    def __init__(self, path: object, name: str, why: str):
        super().__init__(f"{path}: the reference `{name}` {why}; no kernel can be compared with it")


class AmbiguousFunction(TilewrightError):
    def __init__(self, path: object, known: Iterable[str]):
        names = ", ".join(sorted(known))
        what = f"choose one of {names} with --function" if names else "define one that launches the kernels"
        super().__init__(f"{path} does not determine which function to call; {what}")


class BadInput(TilewrightError):
    def __init__(self, text: str, why: str):
        super().__init__(
            f"cannot read the input '{text}': {why}; write a tensor as 64x1000:bfloat16 and other values as in Python, "
            "e.g. 7, 0.5, True, None, gelu or (64,)"
        )


class WrongArguments(TilewrightError):
    def __init__(self, path: object, op: str, why: str, expected: str):
        super().__init__(f"{path}: {op} cannot be called: {why}; its signature must accept {op}({expected})")


class InvalidKernelFile(TilewrightError):
    """A user's file that a worker process cannot use; the message is the worker's."""


class CannotWrite(TilewrightError):
    def __init__(self, path: object, why: str):
        super().__init__(f"cannot write '{path}': {why}; choose a file that you have permission to write")


class CannotRead(TilewrightError):
    def __init__(self, path: object, why: str):
        super().__init__(f"cannot read '{path}': {why}; it must be a file of JSON lines")


class CorruptRecords(TilewrightError):
    def __init__(self, path: object, lines: list[int]):
        numbers = ", ".join(map(str, lines))
        super().__init__(f"{path}: line {numbers} is not a record; fix or delete it (all other lines were used)")


class NoGPU(TilewrightError):
    def __init__(self, what: str, instead: str = "run it on a machine where torch.cuda.is_available()"):
        super().__init__(f"{what} needs a GPU and this machine has none; {instead}")


class MissingPackage(TilewrightError):
    def __init__(self, what: str, package: str):
        super().__init__(f"{what} needs the package '{package}'; install it with: pip install {package}")


class KernelAborted(TilewrightError):
    """An interpreted kernel that could not finish; the message says where and why, `kind` is the verdict."""

    def __init__(self, message: str, kind: str = "crashed"):
        super().__init__(message)
        self.kind = kind


class KernelFault(TilewrightError):
    """An interpreted kernel that finished but made invalid accesses."""

    def __init__(self, findings: list[str]):
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        super().__init__(findings[0] + more)
        self.findings = findings


class TooLarge(TilewrightError):
    def __init__(self, elements: int, limit: int, instead: str = ""):
        what = instead or f"make the tensors {-(-elements // limit)} times smaller"
        super().__init__(f"{elements} elements are too many to interpret (the limit is {limit}); {what}")


class UnsuitableCase(TilewrightError):
    def __init__(self, kernel: str, case: str):
        super().__init__(f"{kernel} does not support the case {case}; try another --case or --dtype")


class OneKernelNeeded(TilewrightError):
    def __init__(self, names: str = "code, file or kernel"):
        super().__init__(f"give exactly one of {names}: source text, the path of a file, or the name of our kernel")


class OnlyForOperations(TilewrightError):
    def __init__(self, tool: str, problem: str):
        super().__init__(
            f"{tool} works on operations, and {problem} is a third-party problem; check works on both, and a kernel "
            "of one of our operations can be analysed with its name as `problem`"
        )


class CallFailed(TilewrightError):
    def __init__(self, tool: str, why: str):
        super().__init__(f"{tool} was stopped: {why}; try a smaller case, or start the server with a larger --seconds")


class GeneratorNotFound(TilewrightError):
    def __init__(self, command: str, why: str):
        super().__init__(
            f"cannot run '{command}': {why}; give --with a program that reads a prompt and writes a kernel"
        )


class RunOfAnotherProblem(TilewrightError):
    def __init__(self, folder: object, known: str, wanted: str):
        super().__init__(f"{folder} holds a run of {known}, not of {wanted}; choose another folder with --out")


class GeneratorFails(TilewrightError):
    def __init__(self, times: int, why: str):
        super().__init__(f"the command gave no kernel {times} times in a row, the last time because {why}; fix --with")


class NothingAudited(TilewrightError):
    def __init__(self, target: str):
        super().__init__(f"{target} launched no Triton kernel; try another --case, --kernel or --function")


class NothingLaunched(TilewrightError):
    def __init__(self, target: str, *, is_file: bool = False):
        others = "--function or --input" if is_file else "--case, --dtype or --kernel"
        super().__init__(f"{target} launched no Triton or CUDA C++ kernel; try another {others}")


class NotCompiled(TilewrightError):
    def __init__(self, op: str, kernel: str, why: str):
        super().__init__(f"{kernel} of {op} is {why}; choose a Triton or CUDA C++ kernel with --kernel, or give a file")


class NoGradient(TilewrightError):
    def __init__(self, op: str):
        super().__init__(f"{op} has no gradient and so no backward pass; leave out --direction")


class ForwardOnlyFile(TilewrightError):
    def __init__(self, name: str):
        super().__init__(f"only the forward pass of {name}, a user's file, can be compiled; leave out --direction")


class NoCudaKernel(TilewrightError):
    def __init__(self, path: object):
        super().__init__(
            f"{path} contains no kernel; declare one with __global__, and instantiate templates explicitly"
        )


class WrongInputs(TilewrightError):
    def __init__(self, name: str, why: str, expected: str):
        super().__init__(
            f"{name}{expected} cannot be called: {why}; give each argument with --input, e.g. -i 64x1000:bfloat16 -i 7"
        )


class LauncherFailed(TilewrightError):
    def __init__(self, name: str, why: str):
        super().__init__(f"{name} fails before it launches a kernel ({why}); its tensors have shapes but no values")


class IncompleteTrace(TilewrightError):
    def __init__(self, name: str, why: str):
        super().__init__(f"{name} cannot be fingerprinted: {why}; measure its records again after a change")


class CompilationFailed(TilewrightError):
    """A kernel that does not compile for a target, with the source line and the compiler's message."""

    def __init__(self, file: object, line: int | None, what: str, arch: str):
        where = f"{file}, line {line}" if line else str(file)
        super().__init__(f"{where}: does not compile for {arch}: {what}")
        self.line, self.what = line, what


class CodeNotAvailable(TilewrightError):
    def __init__(self, kernel: str, form: str, known: Iterable[str]):
        super().__init__(f"{kernel} has no {form}; it has {', '.join(known)}")


class UnknownSetting(TilewrightError):
    def __init__(self, kernel: str, name: str, known: Iterable[str]):
        super().__init__(f"{kernel} has no parameter named '{name}'; {nearest(name, known)}")


class MissingTool(TilewrightError):
    def __init__(self, what: str, tool: str, package: str):
        super().__init__(f"{what} needs the program '{tool}'; install {package}, or add it to PATH")


class CountersFailed(TilewrightError):
    def __init__(self, why: str, output: str = ""):
        super().__init__(f"the hardware counters could not be read: {why}")
        self.output = output  # complete


class CountersForbidden(TilewrightError):
    def __init__(self, code: str):
        super().__init__(
            f"no permission to read the GPU's counters ({code}); run as root, or load the driver with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )


class ProfilerFailed(TilewrightError):
    def __init__(self, source: str, why: str):
        super().__init__(f"{source} could not profile the call: {why}")


class NewerRecords(TilewrightError):
    def __init__(self, path: object, lines: list[int]):
        super().__init__(
            f"{path}, line {lines[0]} was written by a newer version of Tilewright; update Tilewright to read it"
        )


class NoTimings(TilewrightError):
    def __init__(self, path: object):
        super().__init__(f"{path} has no timings; record some with: tilewright bench OP --record {path}")


class NothingToPredict(TilewrightError):
    def __init__(self, gpu: str, op: str | None, kernels: Iterable[str]):
        call = " ".join([op or "OP", *(f"-k {kernel}" for kernel in kernels)])
        super().__init__(
            f"no timing of {call if op else 'any operation'} on {gpu} is recorded; record some with: tilewright bench "
            f"{call} --record results/{gpu}/{op or 'OP'}.jsonl, or predict one: tilewright explain {call} --gpu {gpu}"
        )


class NoCommonTimings(TilewrightError):
    def __init__(self, old: object, old_gpus: Iterable[str], new: object, new_gpus: Iterable[str]):
        super().__init__(
            f"{old} (on {', '.join(sorted(old_gpus))}) and {new} (on {', '.join(sorted(new_gpus))}) have no timing in "
            "common; record the same kernels and cases on the same GPU"
        )


class NoRecords(TilewrightError):
    def __init__(self, folder: object):
        super().__init__(
            f"this machine has no GPU and {folder} has no timings; draw a GPU from its datasheet with --gpu h200"
        )


class NothingToTune(TilewrightError):
    def __init__(self, op: str):
        super().__init__(
            f"the kernels of {op} have no tunable parameters on these cases; `tilewright ops` lists other operations"
        )


class NoCrossover(TilewrightError):
    def __init__(self, op: str):
        super().__init__(f"{op} has no crossover to measure; leave out --crossover, or choose another OP")


class NothingToDraw(TilewrightError):
    def __init__(self, op: str):
        super().__init__(f"{op} has no size that can grow by itself, so --random cannot draw cases; use --case")


class NothingFits(TilewrightError):
    def __init__(self, op: str, seed: int, memory: int):
        self.op = op
        super().__init__(
            f"seed {seed} draws no case of {op} that fits into {memory / 2**30:.1f} GiB of memory; "
            "use another --seed or a larger --random"
        )


class GPUUnusable(TilewrightError):
    def __init__(self, who: str, why: str):
        super().__init__(
            f"{who} left the GPU unusable for this process ({why}); earlier results are saved, "
            "run again without this kernel"
        )


class UnknownWorkload(TilewrightError):
    def __init__(self, name: str, known: Iterable[str]):
        super().__init__(f"no model named '{name}'; {nearest(name, known)}, or give MODULE:FACTORY")


class WorkloadFailed(TilewrightError):
    """A model that cannot be built or trained; the message says why."""


class BuildFolderTaken(TilewrightError):
    def __init__(self, path: object):
        super().__init__(f"{path} exists and is not a build of ours; choose another folder or remove it")
