"""What a forked child reads by system calls that Python does not report: files opened by native code, sockets.

`files_read` hears of the files that Python opens. A decoder in C opens its own, `os.pread` reads one that was opened
long ago, and a client asks a server. The kernel sees all of them: a filter of the child (seccomp) hands its calls to
another process, which notes each one and lets it go on. So after the first examples it is known whether reading goes
by something whose changes nobody would notice later.

    child      open("/data/7.jpg") ... waits          goes on
    kernel                   `--------> listener ------'
    watcher                             reads the path in the child's memory, notes it

The filter cannot be taken back: install it only in a child that ends after its reading. A call costs 0.05 ms, the
watcher one fork. Where the kernel has no such filter, or another one forbids it, what code names is searched for
packages that are known to open files themselves.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import platform
import re
import stat
import struct
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType
from typing import Any

from headway.core.apart import NO_NEW_PRIVILEGES, die_with_parent
from headway.data.runtime.files_read import ELSEWHERE, FilesRead
from headway.data.runtime.outcome import OfDataset
from headway.runtime.reach import closure_of, names_in, reached

NUMBERS = {
    "x86_64": (0xC000003E, {
        "seccomp": 317, "open": 2, "openat": 257, "openat2": 437, "connect": 42, "sendto": 44, "sendmsg": 46,
        "shmat": 30, "io_uring_setup": 425, "read": 0, "readv": 19, "pread64": 17, "preadv": 295,
        "preadv2": 327, "recvfrom": 45, "recvmsg": 47, "mmap": 9,
    }),
    "aarch64": (0xC00000B7, {
        "seccomp": 277, "openat": 56, "openat2": 437, "connect": 203, "sendto": 206, "sendmsg": 211,
        "shmat": 196, "io_uring_setup": 425, "read": 63, "readv": 65, "pread64": 67, "preadv": 69,
        "preadv2": 286, "recvfrom": 207, "recvmsg": 212, "mmap": 222,
    }),
}  # fmt: skip
"""Processor -> the number by which filters know it, and those of its system calls."""

ALWAYS = ("open", "openat", "openat2", "connect", "sendto", "sendmsg", "shmat", "io_uring_setup")
"""Calls that are noted whatever they are about."""

OF_DESCRIPTOR = {"read": 0, "readv": 0, "pread64": 0, "preadv": 0, "preadv2": 0, "recvfrom": 0,
                 "recvmsg": 0, "mmap": 4}  # fmt: skip
"""Calls that are noted where they are about a descriptor that was open before -> the argument that it is.

Not writing: by that the child answers.
"""

MEMORY = ("shmat", "io_uring_setup")
"""Calls by which memory is shared with others."""

INSTALL, NEW_LISTENER, CONTINUE = 1, 1 << 3, 1
"""Operation and flag of seccomp(2); the flag of an answer that lets the call go on."""

ALLOW, NOTIFY = 0x7FFF0000, 0x7FC00000
"""What a filter decides."""

RECEIVE, ANSWER = 0xC0502100, 0xC0182101
"""Requests of ioctl(2) for a listener."""

LOAD, EQUAL, JUMP, RETURN = 0x20, 0x15, 0x05, 0x06
"""Instructions of a filter."""

REQUEST, REPLY = struct.Struct("QIIiIQ6Q"), struct.Struct("QqiI")
"""A call as it is handed over: (id, thread, flags, number, processor, address, arguments); and the answer to it."""

MOST_DESCRIPTORS = 1500
"""A filter has 4096 instructions at most, and takes four for each descriptor."""

HERE = 0xFFFFFF9C
"""The descriptor that stands for the current folder."""

END = b"headway: say what was called"
"""A path by which a child asks for what was noted; there is no such file."""

LONGEST = 4096
"""Bytes that a path may have."""

LOCAL, FAMILIES = 1, {1: "a local socket", 2: "the network", 10: "the network"}
"""Families of socket addresses by which others are asked; netlink, by which the kernel is asked, is none of them."""

SYSTEM = ("/usr/", "/lib", "/etc/", "/bin/", "/run/nscd/", "/var/run/nscd/", "/run/systemd/", "/var/cache/")
"""Where what every process reads lies."""

INSTALLED = re.compile(r"/(site|dist)-packages/|\.(pyc|so|ttf|otf|ttc)$|\.so\.[0-9.]+$")
"""Files of packages, libraries and fonts."""

READERS: dict[str, frozenset[str] | None] = {
    "cv2": frozenset({"imread", "imreadmulti", "VideoCapture"}),
    "torchvision": frozenset({"read_image", "read_file", "decode_image", "read_video", "VideoReader"}),
    "torchaudio": frozenset({"load", "info"}),
    **dict.fromkeys((
        "av", "decord", "duckdb", "ffcv", "h5py", "imageio", "lmdb", "netCDF4", "nibabel", "polars", "pyarrow",
        "pydicom", "rasterio", "rocksdict", "safetensors", "SimpleITK", "soundfile", "tables", "tifffile", "torchcodec",
        "zarr",
    )),
}  # fmt: skip
"""Packages whose native code opens files -> the names by which it is asked to; None: all of them."""

OPENS = "reading its first examples opens {} in native code, or in a thread of its own: a change would not be noticed"
READS = "reading its first examples reads {} through a descriptor that was open before: a change would not be noticed"
ASKS = "reading its first examples asks others over {}, and what they answer may change"


def followed(work: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return what `work` returns; where that begins with None, with what it read unseen instead, if it did.

    For a child that ends after this. Raises what `work` raises.
    """
    files = FilesRead()
    with calls() as found, files.noting() as noted:
        answer = work()
        calls_made = found()
    if answer[0] is not None:
        return answer
    finding = names_readers(work) if calls_made is None else unseen(calls_made, noted)
    return finding, *answer[1:]


def unseen(calls_made: Mapping[str, str], noted: Mapping[str, Any]) -> OfDataset | None:
    """Say which of the calls made (path or address -> reason) is about none of the files that were noted, or None."""
    beside = tuple(f"{path}-" for path in noted)  # the journals of a database
    for path, reason in calls_made.items():
        if reason != OPENS or not (path in noted or path.startswith(beside)):
            return OfDataset(reason.format(path))
    return None


@contextmanager
def calls() -> Iterator[Callable[[], dict[str, str] | None]]:
    """Have the calls of this thread, and of those that it starts, noted for good; give a function that returns them.

    It returns path or address -> reason, or None where the kernel does not let us. It works in the block; after it,
    calls of the kinds that are noted fail.
    """
    watcher = _watcher()
    if watcher is None:
        yield lambda: None
        return
    pid, results = watcher

    def noted_so_far() -> dict[str, str]:
        ctypes.CDLL(None).open(END, 0)
        size = int.from_bytes(os.read(results, 4), "little")
        parts = bytearray()
        while len(parts) < size and (part := os.read(results, size - len(parts))):
            parts += part
        found: dict[str, str] = json.loads(parts)
        return found

    try:
        yield noted_so_far
    finally:
        os.close(results)
        ctypes.CDLL(None).kill(pid, 9)  # not by `os.kill`, which such a child may not call
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _watcher() -> tuple[int, int] | None:
    """Install the filter, and fork what is asked; return its process id and a pipe, None where that cannot be."""
    processor, numbers = NUMBERS.get(platform.machine(), (0, {}))
    before = _descriptors()
    if not numbers or len(before) > MOST_DESCRIPTORS:
        return None
    libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock: the fork must have it
    watching = _Watching(numbers, before)
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        return None
    results, answers = os.pipe()
    code = _filter(processor, numbers, before)
    program = ctypes.create_string_buffer(code, len(code))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(program)))
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    listener = libc.syscall(numbers["seccomp"], INSTALL, NEW_LISTENER, head)
    pid = libc.fork() if listener >= 0 else -1
    if pid == 0:
        try:
            die_with_parent()
            os.close(results)
            watching.serve(listener, memory, answers)
        finally:
            os._exit(1)
    for descriptor in (listener, memory, answers):
        if descriptor >= 0:
            os.close(descriptor)
    if pid > 0:
        return pid, results
    os.close(results)
    return None


def _descriptors() -> dict[int, str]:
    """Return the descriptors that are open, but for the first three -> the file behind each, '' where it is none."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own descriptor is closed by now
            if int(name) > 2:
                is_file = stat.S_ISREG(os.fstat(int(name)).st_mode)
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}") if is_file else ""
    return found


def _filter(processor: int, numbers: Mapping[str, int], descriptors: Mapping[int, str]) -> bytes:
    """Return the program by which the kernel decides which calls are handed over."""

    def instruction(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    def compared(argument: int) -> list[bytes]:
        """Hand over where an argument (the low half of it) is one of the descriptors."""
        found = [instruction(LOAD, 16 + 8 * argument)]
        for descriptor in descriptors:
            found += [instruction(EQUAL, descriptor, 0, 1), instruction(RETURN, NOTIFY)]
        return [*found, instruction(RETURN, ALLOW)]

    lines = [instruction(LOAD, 4), instruction(EQUAL, processor, 1, 0), instruction(RETURN, ALLOW)]
    lines.append(instruction(LOAD, 0))
    for name in ALWAYS:
        if name in numbers:
            lines += [instruction(EQUAL, numbers[name], 0, 1), instruction(RETURN, NOTIFY)]
    tests = [compared(0), compared(4)]
    for place, (name, argument) in enumerate(OF_DESCRIPTOR.items()):
        left = 2 * (len(OF_DESCRIPTOR) - place - 1) + 1  # instructions between this jump and the tests
        ahead = left + (len(tests[0]) if argument else 0)
        lines += [instruction(EQUAL, numbers[name], 0, 1), instruction(JUMP, ahead)]
    return b"".join([*lines, instruction(RETURN, ALLOW), *tests[0], *tests[1]])


class _Watching:
    """The process that is asked about each call. It opens nothing: the filter is on it too, and would ask itself."""

    def __init__(self, numbers: Mapping[str, int], descriptors: Mapping[int, str]) -> None:
        self._names = {number: name for name, number in numbers.items()}
        self._descriptors = descriptors
        own = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[3]), os.environ.get("HEADWAY_RUN"))
        self._ignored = (*ELSEWHERE, *SYSTEM, *(f"{os.path.abspath(place)}/" for place in own if place))
        self._found: dict[str, str] = {}

    def serve(self, listener: int, memory: int, answers: int) -> None:
        """Note calls until this process is ended."""
        while True:
            request = bytearray(REQUEST.size)
            try:
                fcntl.ioctl(listener, RECEIVE, request, True)
            except OSError:  # the call was interrupted before it was handed over
                continue
            number, thread, _, call, _, _, *arguments = REQUEST.unpack(request)
            asked = self._note(self._names.get(call, ""), arguments, thread, memory)
            with suppress(OSError):  # or by now
                fcntl.ioctl(listener, ANSWER, REPLY.pack(number, 0, 0, CONTINUE))
            if asked:
                found = json.dumps(self._found).encode()
                os.write(answers, len(found).to_bytes(4, "little") + found)

    def _note(self, name: str, arguments: list[int], thread: int, memory: int) -> bool:
        """Note a call; return whether it asks for what was noted."""
        low = arguments[0] & 0xFFFFFFFF
        if name.startswith("open"):
            path = _text(memory, arguments[name != "open"])
            if path == END:
                return True
            # What only writes, reads nothing; the structure of `openat2` is not looked into.
            if name == "openat2" or arguments[1 + (name != "open")] & os.O_ACCMODE != os.O_WRONLY:
                self._note_path(os.fsdecode(path), HERE if name == "open" else low, thread)
        elif name in MEMORY:
            self._found["memory"] = ASKS
        elif name in OF_DESCRIPTOR:
            self._note_descriptor(arguments[OF_DESCRIPTOR[name]] & 0xFFFFFFFF)
        elif low in self._descriptors:
            self._note_descriptor(low)
        else:
            self._note_address(_address(name, arguments, memory))
        return False

    def _note_path(self, path: str, folder: int, thread: int) -> None:
        if not path.startswith("/"):
            try:
                place = os.readlink(f"/proc/{thread}/{'cwd' if folder == HERE else f'fd/{folder}'}")
            except OSError:
                place = "?"
            path = f"{place}/{path}"
        path = os.path.normpath(path)
        is_memory = path.startswith("/dev/shm/")
        if is_memory or not (f"{path}/".startswith(self._ignored) or INSTALLED.search(path)):
            self._found.setdefault(path, OPENS)

    def _note_descriptor(self, descriptor: int) -> None:
        path = self._descriptors.get(descriptor, "")
        if path:
            self._found.setdefault(path, READS)
        else:
            self._found.setdefault("a pipe or a connection that was open before", ASKS)

    def _note_address(self, address: bytes) -> None:
        family = int.from_bytes(address[:2], "little") if len(address) >= 2 else 0
        path = os.fsdecode(address[2:].partition(b"\0")[0]) if family == LOCAL else ""
        if family in FAMILIES and not path.startswith(SYSTEM):
            self._found.setdefault(FAMILIES[family], ASKS)


def _text(memory: int, address: int) -> bytes:
    """Return the text at an address of the process that calls; it may end at the last byte of a page."""
    found = b""
    while b"\0" not in found and len(found) < LONGEST:
        here = address + len(found)
        try:
            part = os.pread(memory, 4096 - here % 4096, here)
        except OSError:
            break
        if not part:
            break
        found += part
    return found.partition(b"\0")[0]


def _address(name: str, arguments: list[int], memory: int) -> bytes:
    """Return the address that a call connects or sends to, b'' where it gives none."""
    place, size = {"connect": (1, 2), "sendto": (4, 5)}.get(name, (0, 0))
    where, length = arguments[place], arguments[size]
    try:
        if name == "sendmsg":
            where, length = struct.unpack("QI", os.pread(memory, 12, arguments[1]))
        return os.pread(memory, min(length, 128), where) if where else b""
    except (OSError, struct.error):
        return b""


def names_readers(work: Callable[..., Any]) -> OfDataset | None:
    """Say which package that opens files by itself is named by the code that what `work` is bound to gets at, or None.

    For kernels without such filters: what a dataset opens once, when it is made, counts here too.
    """
    holders: list[Any] = [work]
    for holder in holders:  # those of our own functions inside of it as well, whose code is not looked into
        holders += (
            closure_of(holder) if isinstance(holder, FunctionType) and holder.__module__[:8] == "headway." else []
        )
    for value, _ in reached(*holders):
        package = (getattr(type(value), "__module__", None) or "").partition(".")[0]
        names: set[str] = set()
        if isinstance(value, FunctionType):
            used = names_in(value)
            names = used.globals | used.attributes | {name.partition(".")[0] for name in used.imports}
            modules = {*used.imports, *(getattr(value.__globals__.get(n), "__name__", "") for n in used.globals)}
            modules |= {getattr(value.__globals__.get(n), "__module__", None) or "" for n in used.globals}
            packages = {module.partition(".")[0] for module in modules}
        else:
            packages = {package}
        for found in sorted(packages & READERS.keys()):
            wanted = READERS[found]
            if wanted is None or wanted & names:
                return OfDataset(f"its code names {found}, which opens files itself: a change would not be noticed")
    return None
