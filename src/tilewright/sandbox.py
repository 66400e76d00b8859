"""Irrevocable confinement of a process before it runs untrusted code.

Landlock restricts files, seccomp the system calls that Landlock does not cover, rlimits the resources, and root
switches to another user. The layers overlap: what one cannot enforce on an old Linux kernel, another may. Before Linux
7.0, Landlock does not apply to threads that are already running, so a process should confine itself while it has one
thread; otherwise the Landlock layers are not reported as held.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import stat
import struct
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ALL_LAYERS = (
    "no new privileges", "not root", "capabilities dropped", "landlock filesystem", "landlock network",
    "landlock scopes", "seccomp", "seccomp network", "seccomp processes", "rlimit memory", "rlimit processes",
    "rlimit file size", "no core dumps", "first to be killed",
)  # fmt: skip
MAX_THREADS = 4096  # if it may not start processes; Numba's simulator needs a little over 1024
# Landlock access rights
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, MAKE_CHAR, MAKE_BLOCK = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 6, 1 << 11
TRUNCATE, IOCTL_DEV, RESOLVE_UNIX = 1 << 14, 1 << 15, 1 << 16
READ = EXECUTE | READ_FILE | READ_DIR
USE = READ_FILE | READ_DIR | WRITE_FILE | IOCTL_DEV
CHANGE = ~(EXECUTE | MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV)
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # all others apply to directories only
NEW_IN_ABI = {1: (1 << 13) - 1, 2: 1 << 13, 3: TRUNCATE, 5: IOCTL_DEV, 9: RESOLVE_UNIX}
# System files that every program reads. Not all of /sys, since /sys/kernel has debugging interfaces.
SYSTEM = ("/proc", "/sys/devices", "/sys/bus", "/sys/class", "/sys/module", "/sys/fs/cgroup")
DEVICES = ("null", "zero", "full", "random", "urandom", "nvidia*", "dxg")

# System call numbers on x86_64 and on aarch64 (None: does not exist). These calls always fail with EPERM:
REFUSED = {
    # access to other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    # namespaces, mounts, and files opened without a path
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "move_mount": (429, 429), "fsopen": (430, 430), "open_by_handle_at": (304, 265),
    # kernel interfaces with a large attack surface
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # System V and POSIX IPC, which has no path that Landlock could check
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
    # owner, attributes and times of files, which Landlock does not restrict
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
}  # fmt: skip
# Calls that report success without doing anything: chmod, which Landlock does not restrict and which compilers and
# copies call; and leaving the process group, by which the parent kills all that the process started.
FAKED = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "setsid": (112, 157), "setpgid": (109, 154),
}  # fmt: skip
# Calls allowed only on the process itself: the argument with this index has to be 0.
SELF_ONLY = {
    "prlimit64": (302, 261, 0), "sched_setaffinity": (203, 122, 0), "sched_setscheduler": (144, 119, 0),
    "sched_setattr": (314, 274, 0), "setpriority": (141, 140, 1), "ioprio_set": (251, 30, 1),
}  # fmt: skip
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column in the tables, AUDIT_ARCH
DAC_READ_SEARCH = 2  # the one capability kept, to read a Python under /root; Landlock still applies
_libc = ctypes.CDLL(None, use_errno=True)


def confine(
    *, read: list[Path], write: list[Path], memory: int, processes: int, file_bytes: int, network: bool = False
) -> list[str]:
    """Confine this process, its later threads and its children; return the layers that this machine supports.

    Args:
        read: Files and folders to read and to execute programs from.
        write: Folders used by this process alone; root gives them to the user it switches to.
        memory: Bytes; 0 for no limit, which CUDA needs.
        processes: Number of further processes and threads; 0 allows threads only.
        file_bytes: Maximum size of a file.
        network: Allow network access.
    """
    # The order matters: each step needs rights that a later one drops.
    steps = [_prepare, lambda: _landlock(read, write, network), lambda: _leave_root(write), _drop_capabilities]
    steps += [lambda: _limits(memory, processes, file_bytes), lambda: _seccomp(processes, network)]
    held: set[str] = set()
    for step in steps if sys.platform == "linux" else steps[4:5]:
        with contextlib.suppress(OSError):
            held |= step()
    return [layer for layer in ALL_LAYERS if layer in held]


def runtime() -> list[Path]:
    """Return the paths that Python, its packages and their compilers read; from /etc only files without secrets."""
    etc = "ld.so.cache ld.so.conf ld.so.conf.d alternatives localtime nsswitch.conf passwd group ssl/openssl.cnf"
    system = ["/usr", "/bin", "/lib", "/lib64", "/opt", "/nix/store", *(f"/etc/{name}" for name in etc.split())]
    paths = {Path(name) for name in [*system, sys.prefix, sys.base_prefix, *filter(None, sys.path)]}
    return sorted(path for path in paths if os.path.exists(path))  # Path.exists raises if a parent is not readable


def _prctl(*arguments: int) -> bool:
    return _libc.prctl(*(ctypes.c_ulong(value) for value in [*arguments, 0, 0, 0, 0][:5])) == 0


def _syscall(*arguments: int | bytes | None) -> int:
    return _libc.syscall(*(ctypes.c_long(value) if isinstance(value, int) else value for value in arguments))


def _prepare() -> set[str]:
    held = {"no new privileges"} if _prctl(38, 1) else set()
    # Anonymous files (memfd) have no limit; if they exhaust memory, the OOM killer must not pick the parent.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
        held.add("first to be killed")
    return held


def _landlock(read: list[Path], write: list[Path], network: bool) -> set[str]:
    create, add_rule, restrict_self = 444, 445, 446
    abi = _syscall(create, None, 0, 1)  # 1: LANDLOCK_CREATE_RULESET_VERSION
    handled = sum(rights for version, rights in NEW_IN_ABI.items() if version <= abi)
    tcp = 0b11 if abi >= 4 and not network else 0  # bind, connect
    scopes = 0b11 if abi >= 6 else 0  # abstract unix sockets, signals
    attributes = struct.pack("QQQ", handled, tcp, scopes)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    if abi < 1 or (rules := _syscall(create, attributes, len(attributes), 0)) < 0:
        return set()
    allowed = [(path, READ) for path in [*read, *map(Path, SYSTEM)]]
    allowed += [(path.parent, READ_DIR) for path in read if os.path.isfile(path)]  # Python lists it to find modules
    allowed += [(path, CHANGE) for path in [*write, Path("/dev/shm")]]  # POSIX semaphores
    allowed += [(path, USE) for name in DEVICES for path in Path("/dev").glob(name)]
    allowed += [(Path("/proc/self/task"), READ | WRITE_FILE | TRUNCATE)]  # CUDA aborts if it cannot name threads
    for path, rights in allowed:
        with contextlib.suppress(OSError):  # a missing path needs no rule
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights &= handled & (-1 if stat.S_ISDIR(os.fstat(parent).st_mode) else FILE_RIGHTS)
            _syscall(add_rule, rules, 1, struct.pack("=Qi", rights, parent), 0)
            os.close(parent)
    every_thread = 1 << 3 if abi >= 8 else 0
    alone = len(os.listdir("/proc/self/task")) == 1
    holds = _syscall(restrict_self, rules, every_thread) == 0 and (alone or every_thread)
    os.close(rules)
    layers = {"landlock filesystem": holds, "landlock network": holds and tcp, "landlock scopes": holds and scopes}
    return {layer for layer, held in layers.items() if held}


def _leave_root(write: list[Path]) -> set[str]:
    """Switch from root, whom neither rlimits nor file permissions restrict, to a user who owns nothing."""
    if 0 not in os.getresuid():
        return {"not root"}
    for capability in {*range(64)} - {DAC_READ_SEARCH}:
        _prctl(24, capability)  # PR_CAPBSET_DROP
    dies_with_parent = ctypes.c_int(0)
    _libc.prctl(2, ctypes.byref(dies_with_parent))
    for user in (0x70000000 + os.getpid(), 65534):  # an unused id, or nobody if few ids are mapped
        with contextlib.suppress(OSError):
            os.setgroups([])
            for folder in write:
                os.chown(folder, user, user)
            _prctl(8, 1)  # PR_SET_KEEPCAPS, for _drop_capabilities
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            _prctl(1, dies_with_parent.value)  # PR_SET_PDEATHSIG, which the change of user resets
            _prctl(4, 1)  # PR_SET_DUMPABLE, without which the process cannot read its own /proc entries
            return {"not root"}
    return set()


def _drop_capabilities() -> set[str]:
    header, sets = struct.pack("=Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    _libc.capget(header, sets)
    kept = struct.unpack_from("=I", sets, 4)[0] & 1 << DAC_READ_SEARCH  # from the permitted set
    dropped = _libc.capset(header, struct.pack("=6I", kept, kept, kept, 0, 0, 0)) == 0
    _prctl(47, 2, DAC_READ_SEARCH)  # PR_CAP_AMBIENT_RAISE: also for programs it starts
    return {"capabilities dropped"} if dropped else set()


def _limits(memory: int, processes: int, file_bytes: int) -> set[str]:
    statm, tasks = Path("/proc/self/statm"), 0
    size = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0
    for process in Path("/proc").glob("[0-9]*"):  # RLIMIT_NPROC counts the threads of the user
        with contextlib.suppress(OSError):
            if process.stat().st_uid == os.getuid() or process.name == str(os.getpid()):
                tasks += len(os.listdir(process / "task"))
    limits = [
        ("", resource.RLIMIT_NOFILE, 4096),
        ("", resource.RLIMIT_AS, memory and size + memory),  # also limits shared memory, which RLIMIT_DATA does not
        ("rlimit memory", resource.RLIMIT_DATA, memory),
        ("rlimit processes", resource.RLIMIT_NPROC, tasks + (processes or MAX_THREADS)),
        ("rlimit file size", resource.RLIMIT_FSIZE, file_bytes),
        ("no core dumps", resource.RLIMIT_CORE, 1),  # with 0, a core_pattern pipe would still receive it
    ]
    held: set[str] = set()
    for layer, which, most in limits:
        if most:
            hard = resource.getrlimit(which)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(which, (most, most))
                held.add(layer)
    return held if os.getuid() else held - {"rlimit processes"}  # not enforced for root


def _seccomp(processes: int, network: bool) -> set[str]:
    if os.uname().machine not in ARCHITECTURES or sys.maxsize < 2**32:
        return set()
    column, architecture = ARCHITECTURES[os.uname().machine]
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF instructions
    allow, fake, refuse, unknown = 0x7FFF0000, 0x50000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    # Refuse other architectures and x32, which number their calls differently.
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, refuse)]
    program += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (answer, 0, 0, refuse)]

    def answer_with(action: int, calls: Iterable[tuple[int, int | None]]) -> None:
        for number in filter(None, (call[column] for call in calls)):
            program.extend([(equal, 0, 1, number), (answer, 0, 0, action)])

    def refuse_if(holds: bool, call: Sequence[int], argument: int, test: int, value: int) -> None:
        program.extend([(equal, 0, 4, call[column]), (load, 0, 0, 16 + 8 * argument)])
        program.extend([(test, not holds, holds, value), (answer, 0, 0, refuse), (load, 0, 0, 0)])

    answer_with(refuse, REFUSED.values())
    answer_with(fake, FAKED.values())
    answer_with(unknown, [(435, 435)])  # clone3 passes its flags in memory; glibc falls back to clone
    if not network:  # allow only unix sockets without datagrams, which CUDA listens on
        refuse_if(False, (41, 198), 0, equal, 1)
        refuse_if(True, (41, 198), 1, any_bit, 2)
        answer_with(refuse, [(42, 203)])  # connect: Landlock does not restrict unix sockets, such as Docker's
    for *call, argument in SELF_ONLY.values():
        refuse_if(False, call, argument, equal, 0)
    refuse_if(True, (157, 167), 0, equal, 1)  # prctl(PR_SET_PDEATHSIG): it must not outlive its parent
    for type_into_terminal in (0x5412, 0x541C):  # TIOCSTI, TIOCLINUX
        refuse_if(True, (16, 29), 1, equal, type_into_terminal)  # ioctl
    if processes:
        refuse_if(True, (56, 220), 0, any_bit, 0x7E020000)  # clone into new namespaces
    else:
        answer_with(refuse, [(57, None), (58, None)])  # fork, vfork
        refuse_if(False, (56, 220), 0, any_bit, 0x10000)  # clone without CLONE_THREAD
        for call in ((62, 129), (234, 131)):  # kill, tgkill: the process itself only
            refuse_if(False, call, 0, equal, os.getpid())
        answer_with(refuse, [(200, 130), (129, 138), (297, 240), (424, 424)])  # tkill, rt_…sigqueueinfo, pidfd_…
    program.append((answer, 0, 0, allow))

    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    if _syscall((317, 277)[column], 1, 1 | 4, header) != 0:  # SECCOMP_FILTER_FLAG_TSYNC | SPEC_ALLOW
        return set()
    return {"seccomp"} | (set() if network else {"seccomp network"}) | (set() if processes else {"seccomp processes"})
