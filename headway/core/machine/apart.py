"""A forked child that gives up everything through which its parent, or anybody else, could notice what it does.

Fork copies memory, and shares the rest: where an open file is read next, what a pipe or a socket carries, memory that
is mapped as shared, a lock in it. `step_apart` takes these from the child before it runs code that nobody has vouched
for, a user's dataset above all. What the child may still do is read.

    inherited                      in the child
    regular files                  opened anew for reading, at the same position: reading moves only its own
    what else, and 0, 1, 2         /dev/null: sending fails, or leads nowhere
    shared writable memory         read only, the first write ends the child with SIGSEGV; or a copy of it
    files by their names           opening for writing, creating, renaming and removing raises PermissionError:
                                   by Landlock where the kernel has it, and in Python's own calls everywhere
    caches of libraries            a folder of its own, which is thrown away: compilers refuse to work without one
    other programs, own signals    starting one raises PermissionError; the script's signal handlers are gone

Not taken: what a server does that is asked over a new connection; and, on a kernel without Landlock, what an
extension module does past Python to a file that it opens by its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import resource
import signal
import stat
import struct
import sys
from collections.abc import Iterable
from typing import Any

from headway.core.machine.host import mapped_memory

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
"""Flags of `open` that can change a file."""

SHARED = {"end at writes": False, "lose writes": True}
"""What a write to shared memory does -> whether the child has a copy of that memory: end the child, or get lost."""

MOST_COPIED = 1 << 28
"""Bytes of shared memory that a child has copies of; what is beyond ends it when it is written to."""

FORBIDDEN = {
    "os.chmod", "os.chown", "os.exec", "os.fork", "os.forkpty", "os.kill", "os.killpg", "os.link", "os.mkdir",
    "os.posix_spawn", "os.remove", "os.rename", "os.rmdir", "os.removexattr", "os.setxattr", "os.spawn", "os.symlink",
    "os.system", "os.truncate", "os.utime", "subprocess.Popen",
}  # fmt: skip
"""Audit events of acts that others can see."""

CACHES = ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables of the environment that say where libraries keep what they compile or download."""

RUN_CACHES = "caches"
"""Name of the folder of a recorded run in which children that read apart keep caches; it goes when the run ends."""

own_caches: list[str] = []
"""[0 or 1] The folder of caches of this process, where it has stepped apart: children of it have theirs inside."""


def caches_of(run: str) -> str:
    """Return the folder for caches of children of the recorded run in a folder `run`, made; '' where it cannot be."""
    try:
        folder = os.path.realpath(os.path.join(run, RUN_CACHES))
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return ""
    return folder


MOST_WRITTEN = 1 << 28
"""Bytes of a file in the child's folder of caches."""

CREATE_RULESET, ADD_RULE, RESTRICT_SELF, VERSION_ONLY = 444, 445, 446, 1
"""System calls of Landlock, the same on all processors, and the flag that asks for the version."""

BENEATH = 1
"""Kind of a Landlock rule: what is allowed beneath a folder."""

RIGHTS = {1: 0b1_1111_1111_0011, 2: 1 << 13, 3: 1 << 14}
"""Version of Landlock -> the rights that came with it: to execute, write, remove and make; to link; to truncate."""

MAP_FIXED = 0x10
"""Flag of mmap(2): at this address, in the place of what is there."""

PARENT_DEATH_SIGNAL = 1
"""Option of prctl(2) that sets the signal which a process gets when its parent is gone."""

DETACHED = "headway-apart"
"""Name of the processes that a job has detached from its tree: they read its data again while it is recorded."""

SET_NAME = 15
"""Option of prctl(2) that names a thread; a process is named by its first one."""

NO_NEW_PRIVILEGES = 38
"""Option of prctl(2) that Landlock wants set."""


def step_apart(shared: str, keep: Iterable[int] = (), *, forks: bool = False, caches: str = "") -> None:
    """Give up, in a forked child, what is shared with its parent, but for the descriptors in `keep`.

    `shared` says what becomes of shared memory: see `SHARED`. With `forks` the child may fork, and keeps its shared
    memory: it is to run nothing but headway's own code, and foreign code in children of its own that step apart. Its
    libraries may write to `caches`, a folder that the caller throws away.
    Raises `OSError` where the kernel does not let it; then nothing may be run.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGSEGV):
        signal.signal(number, signal.SIG_DFL)
    gc.disable()  # or what the parent left behind may be finalised here too
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    keep = set(keep)
    for descriptor in sorted({int(name) for name in os.listdir("/proc/self/fd")} - keep):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            _replace(descriptor, os.fstat(descriptor).st_mode)
    if not forks:
        _part_with_shared_memory(copies=SHARED[shared])
    if caches:
        _keep_caches_in(caches)
        own_caches[:] = [caches]
    _deny_changes_of_files(caches)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    allowed = MOST_WRITTEN if hard == resource.RLIM_INFINITY else min(hard, MOST_WRITTEN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (allowed if caches else 0, hard))

    allowed_events = ("os.fork", "os.kill") if forks else ()  # such a child ends its own children

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in allowed_events:
            _refuse(event, arguments, caches)

    sys.addaudithook(refuse)


def _keep_caches_in(folder: str) -> None:
    """Have libraries keep their caches in a folder of this process; some have read the environment already."""
    os.environ.update(dict.fromkeys(CACHES, folder))
    if (config := sys.modules.get("numba.core.config")) is not None:
        setattr(config, "CACHE_DIR", folder)  # noqa: B010 - a module of a library that we do not import


IN_FOLDERS = {
    "os.chmod": 1,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.rmdir": 1,
    "os.truncate": 1,
    "os.utime": 1,
}
"""Acts on files -> how many of their first arguments are paths."""


def _beneath(folder: str, arguments: tuple[Any, ...], event: str) -> bool:
    """Say whether all paths of an act lie in a folder."""
    paths = arguments[: IN_FOLDERS.get(event, 1)]
    if not all(isinstance(path, (str, bytes, os.PathLike)) for path in paths):
        return False
    # Not `realpath`, which looks at files: a look at one is noted as read.
    return all(f"{os.path.abspath(os.fsdecode(path))}{os.sep}".startswith(f"{folder}{os.sep}") for path in paths)


def name_process(name: str) -> None:
    """Give this process, and what it forks from now on, a name of at most 15 letters, as `ps` shows it."""
    ctypes.CDLL(None).prctl(SET_NAME, name.encode())


def die_with_parent() -> None:
    """Have the kernel end this child when the thread that forked it ends: one that hangs would stay for good."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _replace(descriptor: int, mode: int) -> None:
    """Put something private in the place of an inherited descriptor."""
    if descriptor > 2 and (stat.S_ISDIR(mode) or (stat.S_ISCHR(mode) and not os.isatty(descriptor))):
        return
    inherits, position = os.get_inheritable(descriptor), 0
    try:
        if descriptor <= 2 or not stat.S_ISREG(mode):
            fresh = os.open(os.devnull, os.O_RDWR)
        else:
            position = os.lseek(descriptor, 0, os.SEEK_CUR)
            fresh = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    except OSError:  # a file that may not be read
        fresh = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(fresh, descriptor, inherits)
    finally:
        os.close(fresh)
    if position:
        os.lseek(descriptor, position, os.SEEK_SET)


def _part_with_shared_memory(*, copies: bool) -> None:
    """Make shared writable mappings of memory or files read only, or put copies in their place; not a device's."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = *libc.mprotect.argtypes, ctypes.c_int, ctypes.c_int, ctypes.c_long
    libc.mmap.restype = ctypes.c_void_p
    left = MOST_COPIED if copies else 0
    for first, last, access, _, path in [*mapped_memory()]:
        if access[1::2] != "ws":
            continue
        if path.startswith("/dev/") and not path.startswith(("/dev/shm", "/dev/zero")):
            continue
        size = last - first
        left -= size
        if left >= 0:
            content = ctypes.string_at(first, size)
            fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
            failed = libc.mmap(first, size, mmap.PROT_READ | mmap.PROT_WRITE, fixed, -1, 0) != first
            if not failed:
                ctypes.memmove(first, content, size)
        else:
            failed = libc.mprotect(first, size, mmap.PROT_READ) != 0
        if failed:
            raise OSError(ctypes.get_errno(), f"the shared memory of {path} at {first:x} cannot be parted with")


def _deny_changes_of_files(caches: str) -> None:
    """Have the kernel refuse every change of the file system but in `caches`, and other programs, where it can."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION_ONLY)
    rights = ctypes.c_uint64(sum(bits for since, bits in RIGHTS.items() if since <= version))
    if version < 1 or libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return
    ruleset = libc.syscall(CREATE_RULESET, ctypes.byref(rights), ctypes.c_size_t(8), 0)
    if ruleset >= 0:
        if caches:
            folder = os.open(caches, os.O_PATH)
            # struct landlock_path_beneath_attr, packed: the rights and the folder.
            rule = ctypes.create_string_buffer(struct.pack("=Qi", rights.value, folder))
            libc.syscall(ADD_RULE, ruleset, BENEATH, rule, 0)
            os.close(folder)
        libc.syscall(RESTRICT_SELF, ruleset, 0)  # rules that allow none of it elsewhere
        os.close(ruleset)


def _refuse(event: str, arguments: tuple[Any, ...], caches: str) -> None:
    """Raise `PermissionError` at an act that somebody else could see: none is beneath the folder `caches`, or ''."""
    refused = ""
    if event == "open":
        path, mode, flags = arguments
        writes = flags & WRITES if isinstance(flags, int) else {*(mode or "")} & {*"wax+"}
        if writes and not isinstance(path, int) and path != os.devnull:
            refused = f"it opens {path!r} for writing"
    elif event in FORBIDDEN:
        refused = f"it calls {event}"
    if refused and not (caches and (event in IN_FOLDERS or event == "open") and _beneath(caches, arguments, event)):
        raise PermissionError(refused)
