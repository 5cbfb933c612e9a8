"""Pages of this process's memory that were written: write protection by the kernel, read back with one ioctl.

Use it through `dirty.DirtyTracker`. A range is registered with userfaultfd in
asynchronous write-protect mode: the first store to a protected page costs one
fault inside the kernel (about 1 us, no signal) and lifts the protection;
PAGEMAP_SCAN lists the pages without protection, and can protect them again in
the same walk, atomically page by page. Needs Linux 6.7 and no privilege (the
user-mode-only flag), and sees stores by the kernel too (`readinto`). Pages
are the operating system's; ranges are int64 `[n, 2]`, end exclusive.

A page that is not mapped at the moment counts as written: asked for exactly
one category, the kernel reports an empty entry unless it left a mark there
that the page was protected. So no store is lost when memory is reclaimed.
The older soft-dirty bits are never used: kernels built without them report
every page as clean.

Sources: Linux, Documentation/admin-guide/mm/{pagemap,userfaultfd}.rst; the
constants are those of include/uapi/linux/{fs,userfaultfd}.h.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import tempfile
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

Runs = NDArray[np.int64]
"""[n, 2] Ranges of pages, (first, end), in order and apart from each other."""

PAGE_BYTES = mmap.PAGESIZE
"""Bytes of a page of this system."""

SYSCALLS = {"x86_64": 323, "aarch64": 282, "riscv64": 282, "ppc64le": 364, "s390x": 355}
"""Architecture -> number of the system call userfaultfd."""

RANGES_PER_SCAN = 512
"""Ranges that one ioctl returns at most; a longer answer takes several. Not more: the kernel collects so many at a
time, and after a second helping it says that it got less far than it did, so that part would be walked twice."""

_libc = ctypes.CDLL(None, use_errno=True)

_USER_MODE_ONLY = 1
_UFFD_API = 0xAA
_FEATURES = 1 << 15 | 1 << 13 | 1 << 12  # WP_ASYNC, WP_UNPOPULATED, WP_HUGETLBFS_SHMEM
_REGISTER_WP = 2
_WP_MATCHING, _CHECK_WPASYNC = 1, 2
_IS_WRITTEN = 1 << 1


class _Api(ctypes.Structure):
    _fields_ = (("api", ctypes.c_uint64), ("features", ctypes.c_uint64), ("ioctls", ctypes.c_uint64))


class _Register(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_uint64), ("len", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("ioctls", ctypes.c_uint64),
    )  # fmt: skip


class _Scan(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "size", "flags", "start", "end", "walk_end", "vec", "vec_len", "max_pages",
            "category_inverted", "category_mask", "category_anyof_mask", "return_mask",
        )
    )  # fmt: skip


def _request(direction: int, group: int, number: int, num_bytes: int) -> int:
    """Return the number of an ioctl: what the macros _IOR (2) and _IOWR (3) make."""
    return direction << 30 | num_bytes << 16 | group << 8 | number


_UFFDIO_API = _request(3, 0xAA, 0x3F, ctypes.sizeof(_Api))
_UFFDIO_REGISTER = _request(3, 0xAA, 0x00, ctypes.sizeof(_Register))
_UFFDIO_UNREGISTER = _request(2, 0xAA, 0x01, 16)
_PAGEMAP_SCAN = _request(3, ord("f"), 16, ctypes.sizeof(_Scan))


class WrittenPages:
    """The written pages of `num_bytes` of memory at `address`, both multiples of `PAGE_BYTES`.

    Every page is clean once this is made. It belongs to the process that made
    it; a forked child's stores are not seen. Raises `OSError` where the
    kernel refuses.
    """

    def __init__(self, address: int, num_bytes: int) -> None:
        self._address, self._num_bytes = address, num_bytes
        self._uffd = self._pagemap = -1
        try:
            self._uffd = _userfaultfd()
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            api = _Api(_UFFD_API, _FEATURES, 0)
            _ioctl(self._uffd, _UFFDIO_API, api, "UFFDIO_API with asynchronous write protection")
            _ioctl(self._uffd, _UFFDIO_REGISTER, _Register(address, num_bytes, _REGISTER_WP, 0), "UFFDIO_REGISTER")
            self.runs(clear=True)  # at first all pages count as written
        except BaseException:
            self.close()
            raise

    def runs(self, first: int = 0, end: int | None = None, *, clear: bool) -> Runs:
        """Return the pages of `[first, end)` written since they were last cleared; clear those, if so told.

        With `clear`, a store either shows in this answer, and is then in
        memory, or in the next one.
        """
        stop = self._num_bytes if end is None else end * PAGE_BYTES
        vec = np.empty((RANGES_PER_SCAN, 3), np.uint64)
        scan = _Scan(
            size=ctypes.sizeof(_Scan), flags=_CHECK_WPASYNC | (_WP_MATCHING if clear else 0),
            start=self._address + first * PAGE_BYTES, end=self._address + stop, vec=vec.ctypes.data,
            vec_len=RANGES_PER_SCAN, category_mask=_IS_WRITTEN, return_mask=_IS_WRITTEN,
        )  # fmt: skip
        found = []
        while scan.start < scan.end:
            count = _ioctl(self._pagemap, _PAGEMAP_SCAN, scan, "PAGEMAP_SCAN")
            found.append((vec[:count, :2].astype(np.int64) - self._address) // PAGE_BYTES)
            scan.start = scan.walk_end
        return joined(np.concatenate(found)) if found else np.empty((0, 2), np.int64)

    def close(self) -> None:
        """Lift all protection; calling it again does nothing."""
        if self._uffd >= 0:
            span = (ctypes.c_uint64 * 2)(self._address, self._num_bytes)
            # Unmapped by now, perhaps: then nothing is left to lift.
            _libc.ioctl(self._uffd, ctypes.c_ulong(_UFFDIO_UNREGISTER), span)
        for file in (self._uffd, self._pagemap):
            if file >= 0:
                os.close(file)
        self._uffd = self._pagemap = -1


def joined(runs: Runs) -> Runs:
    """Return runs in order of their first pages, with those joined that touch or overlap.

    >>> joined(np.array([[5, 6], [0, 2], [2, 3], [1, 2]])).tolist()
    [[0, 3], [5, 6]]
    """
    if len(runs) < 2:
        return runs
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    ends = np.maximum.accumulate(runs[:, 1])
    apart = runs[1:, 0] > ends[:-1]
    return np.stack([runs[np.r_[True, apart], 0], ends[np.r_[apart, True]]], axis=1)


def make_read_only(address: int, num_bytes: int) -> None:
    """Let every later store to this range end in a segmentation fault. Raises `OSError`."""
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), mmap.PROT_READ):
        raise _failure("mprotect")


@cache
def self_test() -> dict[str, str]:
    """Return for each kind of memory why tracking does not work there: "" where it does. Asks the kernel once."""
    return {kind: _trial(make) for kind, make in MAPS.items()}


def _trial(make: Callable[[int], mmap.mmap]) -> str:
    """Store, read, clear and store again in a small map; return what went wrong."""
    num_bytes = 8 * PAGE_BYTES
    try:
        memory = make(num_bytes)
        written = WrittenPages(np.frombuffer(memory, np.uint8).ctypes.data, num_bytes)
        try:
            with tempfile.TemporaryFile(buffering=0) as source:
                source.write(b"kernel")
                source.seek(0)
                return _contradiction(memory, written, source.readinto)
        finally:
            written.close()
    except OSError as fault:
        return str(fault)


def _contradiction(memory: mmap.mmap, written: WrittenPages, read_into: Callable[[memoryview], object]) -> str:
    """Return the first answer of `written` that is not as it should be, "" if there is none."""
    clean = written.runs(clear=False).tolist()
    memory[PAGE_BYTES] = 1
    with memoryview(memory) as view, view[3 * PAGE_BYTES : 3 * PAGE_BYTES + 6] as target:
        read_into(target)
    _ = memory[5 * PAGE_BYTES]
    answers = [clean, written.runs(clear=False).tolist(), written.runs(clear=True).tolist()]
    answers.append(written.runs(clear=False).tolist())
    memory[PAGE_BYTES] = 2
    answers.append(written.runs(clear=True).tolist())
    expected = [[], [[1, 2], [3, 4]], [[1, 2], [3, 4]], [], [[1, 2]]]
    return "" if answers == expected else f"the kernel reports the written pages {answers}, not {expected}"


def _file_map(num_bytes: int) -> mmap.mmap:
    with tempfile.TemporaryFile() as file:
        file.truncate(num_bytes)
        return mmap.mmap(file.fileno(), num_bytes)


def _memory_map(num_bytes: int) -> mmap.mmap:
    file = os.memfd_create("headway-self-test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, num_bytes)
        return mmap.mmap(file, num_bytes)
    finally:
        os.close(file)


MAPS: dict[str, Callable[[int], mmap.mmap]] = {
    "anonymous": lambda num_bytes: mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    "tmpfs": _memory_map,
    "file": _file_map,
}
"""Kinds of memory that the self-test tries."""


def _userfaultfd() -> int:
    number = SYSCALLS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"userfaultfd has no known number on {platform.machine()}")
    file = int(_libc.syscall(number, os.O_CLOEXEC | _USER_MODE_ONLY))
    if file < 0:
        raise _failure("userfaultfd")
    return file


def _ioctl(file: int, request: int, argument: ctypes.Structure, what: str) -> int:
    answer = int(_libc.ioctl(file, ctypes.c_ulong(request), ctypes.byref(argument)))
    if answer < 0:
        raise _failure(what)
    return answer


def _failure(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
