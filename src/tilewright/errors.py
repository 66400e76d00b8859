"""One class per failure a user can cause. Each message is one line that says what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def first_line(error: BaseException) -> str:
    """An error as one line: its kind and the first line of what it says."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class TilewrightError(Exception):
    """A mistake the user can mend. The command line prints the message alone and exits with 2."""


def _nearest(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"


class UnknownOp(TilewrightError):
    def __init__(self, name: str, known: Iterable[str]):
        super().__init__(f"no operation named '{name}'; {_nearest(name, known)}")


class UnknownKernel(TilewrightError):
    def __init__(self, op: str, name: str, known: Iterable[str]):
        super().__init__(f"{op} has no kernel named '{name}'; {_nearest(name, known)}")


class ADirectory(TilewrightError):
    def __init__(self, path: object):
        super().__init__(f"'{path}' is a directory; name a .py or .cu file in it, or an operation")


class NotAnOp(TilewrightError):
    def __init__(self, path: object):
        super().__init__(f"'{path}' is neither an operation nor a .py or .cu file; name one of these")


class UnknownGPU(TilewrightError):
    def __init__(self, name: str, known: Iterable[str], of_that_architecture: Iterable[str] = ()):
        gpus = ", ".join(of_that_architecture)
        what = f"GPUs of this architecture are: {gpus}" if gpus else _nearest(name, known)
        super().__init__(f"no datasheet for a GPU named '{name}'; {what}")


class UnknownDtype(TilewrightError):
    def __init__(self, name: str, known: Iterable[str]):
        super().__init__(f"'{name}' is not a dtype of this operation; {_nearest(name, known)}")


class BadCase(TilewrightError):
    def __init__(self, text: str, why: str, example: str):
        super().__init__(f"cannot read the case '{text}': {why}; write it like --case {example}")


class FileMissing(TilewrightError):
    def __init__(self, path: object, wanted: str = "a Python file that holds the kernel"):
        super().__init__(f"no file at '{path}'; give the path of {wanted}")


class SameName(TilewrightError):
    def __init__(self, name: str):
        super().__init__(f"two files are named '{name}', and verdicts go by that name; rename one or check them apart")


class NothingChecked(TilewrightError):
    def __init__(self, reason: str):
        super().__init__(f"nothing could be checked here: {reason}")


class BadBlock(TilewrightError):
    def __init__(self, page: object, why: str):
        super().__init__(
            f"{page}: {why}; a block begins with <!-- records: softmax forward --> and ends with <!-- end -->"
        )


class FileBroken(TilewrightError):
    def __init__(self, path: object, line: int | None, why: str):
        where = f"{path}, line {line}" if line else str(path)
        super().__init__(f"{where}: {why}; mend the file and run the command again")


class NoFunction(TilewrightError):
    def __init__(self, path: object, op: str):
        super().__init__(
            f"{path} holds no kernel for {op}: define a function named '{op}', "
            f'or mark one with @tilewright.kernel("{op}")'
        )


class BadProblem(TilewrightError):
    def __init__(self, path: object, why: str):
        super().__init__(
            f"{path} is no problem that can be checked: {why}; give a KernelBench file with Model, get_inputs and "
            "get_init_inputs, or a gpu-mode folder with task.yml"
        )


class UnknownFunction(TilewrightError):
    def __init__(self, path: object, name: str, known: Iterable[str]):
        super().__init__(f"{path} has no function named '{name}'; {_nearest(name, known)}")


class WhichFunction(TilewrightError):
    def __init__(self, path: object, known: Iterable[str]):
        names = ", ".join(sorted(known))
        what = f"name one of {names} with --function" if names else "define one that launches the kernels"
        super().__init__(f"{path} does not say which function to call: {what}")


class BadInput(TilewrightError):
    def __init__(self, text: str, why: str):
        super().__init__(
            f"cannot read the input '{text}': {why}; write a tensor like 64x1000:bfloat16, a number like 7 or 0.5"
        )


class WrongArguments(TilewrightError):
    def __init__(self, path: object, op: str, why: str, expected: str):
        super().__init__(f"{path}: {op} cannot be called: {why}; it is called as {op}({expected})")


class FileUnusable(TilewrightError):
    """What a worker process found wrong with a user's file, in its words."""


class CannotWrite(TilewrightError):
    def __init__(self, path: object, why: str):
        super().__init__(f"cannot write '{path}': {why}; name a file you may write to")


class CannotRead(TilewrightError):
    def __init__(self, path: object, why: str):
        super().__init__(f"cannot read '{path}': {why}; it should be a file of JSON lines")


class CorruptRecords(TilewrightError):
    def __init__(self, path: object, lines: list[int]):
        numbers = ", ".join(map(str, lines))
        super().__init__(
            f"{path}: line {numbers} is not a record; the other lines were read, mend or delete the bad one"
        )


class NoGPU(TilewrightError):
    def __init__(self, what: str, instead: str = "run it where torch.cuda.is_available()"):
        super().__init__(f"{what} needs a GPU and this machine has none; {instead}")


class MissingPackage(TilewrightError):
    def __init__(self, what: str, package: str):
        super().__init__(f"{what} needs the package '{package}'; install it with: pip install {package}")


class KernelStopped(TilewrightError):
    """An interpreted kernel that cannot come to its end; the message says where and why, `kind` is the verdict."""

    def __init__(self, message: str, kind: str = "crashed"):
        super().__init__(message)
        self.kind = kind


class KernelFault(TilewrightError):
    """An interpreted kernel that came to its end and did something wrong on the way."""

    def __init__(self, findings: list[str]):
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        super().__init__(findings[0] + more)
        self.findings = findings


class TooLarge(TilewrightError):
    def __init__(self, elements: int, limit: int, instead: str = ""):
        what = instead or f"make the tensors {-(-elements // limit)} times smaller"
        super().__init__(f"{elements} elements are too many to interpret, at most {limit} are taken; {what}")


class NothingAudited(TilewrightError):
    def __init__(self, target: str):
        super().__init__(f"{target}: no Triton kernel was launched; try another --case, --kernel or --function")


class NothingLaunched(TilewrightError):
    def __init__(self, target: str, *, is_file: bool = False):
        others = "--function or --input" if is_file else "--case, --dtype or --kernel"
        super().__init__(f"{target}: no Triton or CUDA C++ kernel was launched; try another {others}")


class NotCompiled(TilewrightError):
    def __init__(self, op: str, kernel: str, whose: str):
        super().__init__(f"{kernel} of {op} is {whose}; name a kernel in Triton or CUDA C++ with --kernel, or a file")


class NoGradient(TilewrightError):
    def __init__(self, op: str):
        super().__init__(f"{op} has no gradient, so nothing runs backward; leave out --direction")


class NoCudaKernel(TilewrightError):
    def __init__(self, path: object):
        super().__init__(f"{path} compiles to no kernel; mark one with __global__, and use or instantiate a template")


class WrongInputs(TilewrightError):
    def __init__(self, name: str, why: str, expected: str):
        super().__init__(
            f"{name}{expected} cannot be called: {why}; give each argument with --input, as -i 64x1000:bfloat16 or -i 7"
        )


class LauncherFailed(TilewrightError):
    def __init__(self, name: str, why: str):
        super().__init__(
            f"{name} fails before it launches ({why}); its tensors have sizes and no values, as nothing is run"
        )


class CompilerRefused(TilewrightError):
    """A kernel that does not compile for a target: where, and what the compiler says."""

    def __init__(self, file: object, line: int | None, what: str, arch: str):
        where = f"{file}, line {line}" if line else str(file)
        super().__init__(f"{where}: does not compile for {arch}: {what}")
        self.line, self.what = line, what


class NoSuchCode(TilewrightError):
    def __init__(self, kernel: str, form: str, known: Iterable[str]):
        super().__init__(f"{kernel} has no {form}; it has {', '.join(known)}")


class UnknownSetting(TilewrightError):
    def __init__(self, kernel: str, name: str, known: Iterable[str]):
        super().__init__(f"{kernel} takes no setting named '{name}'; {_nearest(name, known)}")


class MissingTool(TilewrightError):
    def __init__(self, what: str, tool: str, package: str):
        super().__init__(f"{what} needs the program '{tool}'; install {package}, or put it on the PATH")


class CountersFailed(TilewrightError):
    def __init__(self, why: str, said: str = ""):
        super().__init__(f"the hardware's counters could not be read: {why}")
        self.said = said  # all of it


class CountersForbidden(TilewrightError):
    def __init__(self, code: str):
        super().__init__(
            f"this user may not read the GPU's counters ({code}); run as root, or have its driver loaded with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )


class SourceFailed(TilewrightError):
    def __init__(self, source: str, why: str):
        super().__init__(f"{source} could not profile: {why}")


class NewerRecords(TilewrightError):
    def __init__(self, path: object, lines: list[int]):
        super().__init__(
            f"{path}, line {lines[0]} was written by a newer version of Tilewright; update Tilewright to read it"
        )


class NoTimings(TilewrightError):
    def __init__(self, path: object):
        super().__init__(f"{path} holds no timings; write some with: tilewright bench OP --record {path}")


class NothingToPredict(TilewrightError):
    def __init__(self, gpu: str, op: str | None, kernels: Iterable[str]):
        call = " ".join([op or "OP", *(f"-k {kernel}" for kernel in kernels)])
        super().__init__(
            f"no timing of {call if op else 'any operation'} on {gpu} is on record; write some with: tilewright bench "
            f"{call} --record results/{gpu}/{op or 'OP'}.jsonl; tilewright explain {call} --gpu {gpu} predicts a call"
        )


class NothingInCommon(TilewrightError):
    def __init__(self, old: object, old_gpus: Iterable[str], new: object, new_gpus: Iterable[str]):
        super().__init__(
            f"{old} (of {', '.join(sorted(old_gpus))}) and {new} (of {', '.join(sorted(new_gpus))}) have no timing in "
            "common; record the same kernels and cases on the same GPU"
        )


class NothingRecorded(TilewrightError):
    def __init__(self, folder: object):
        super().__init__(
            f"this machine has no GPU and {folder} no timings; name a GPU to draw by its datasheet, as --gpu h200"
        )


class NothingToTune(TilewrightError):
    def __init__(self, op: str):
        super().__init__(f"the kernels of {op} leave nothing open on these cases; `tilewright ops` lists others")


class GPUBroken(TilewrightError):
    def __init__(self, who: str, why: str):
        super().__init__(
            f"{who} left the GPU unusable for this process ({why}); what was measured before is kept, "
            "start again without it"
        )
