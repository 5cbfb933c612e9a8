"""Probes of state on its way to storage and back: saves, loads, and the fsync and rename that make a save durable.

Only the outermost save of a thread is recorded. An fsync or rename that
follows the save of the same file on the same thread starts where the save
(or the fsync) ended: the flush and close between them belong to it. Fsyncs
and renames of other files are not recorded (a log that is flushed each step
is code of the script); nor is what a dataset loads.
"""

from __future__ import annotations

import _thread
import functools
import io
import os
from collections.abc import Callable
from typing import Any

from headway.core.machine.interruptions import suppress_own
from headway.runtime.recorder.probes import Probes, now
from headway.trace.events.vocabulary import SPANS

SAVE, LOAD = SPANS["checkpoint.save"].code, SPANS["checkpoint.load"].code
SYNC, RENAME = SPANS["checkpoint.sync"].code, SPANS["checkpoint.rename"].code


def save(
    path_argument: int, keyword: str, *, dcp: bool = False
) -> Callable[[Callable[..., Any], Probes], Callable[..., Any]]:
    """Return a factory for functions that store something at a path or file object; `dcp` for those of DCP."""

    def wrapper(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
        """Wrap a save."""
        emit, inside, saves, page = probes.emit, probes.inside, probes.saves, probes.page

        @functools.wraps(original)
        def saved(*args: Any, **kwargs: Any) -> Any:
            """Save, and record how long that took and how many bytes there are."""
            thread = _thread.get_ident()
            if thread in inside:
                return original(*args, **kwargs)
            start = now()
            try:
                inside.add(thread)
                page.opened(SAVE, start)
                result = original(*args, **kwargs)
            finally:
                inside.discard(thread)
                page.closed()
            end = now()
            try:
                target = args[path_argument] if len(args) > path_argument else kwargs.get(keyword)
                path, descriptor, size = describe(target)
                emit(SAVE, start, end - start, size, saves.count, int(dcp))
                saves.saved(path, descriptor, end_ns=end, steps=probes.steps[0])
            except Exception as cause:
                probes.failed("checkpoint.save", cause)
            return result

        return saved

    return wrapper


dcp_save = save(9, "checkpoint_id", dcp=True)
"""The factory for DCP's saves, which take their path by keyword only."""


def load(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap a load of state."""
    emit, inside, fetching, page = probes.emit, probes.inside, probes.fetching, probes.page

    @functools.wraps(original)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        """Load, and record how long that took."""
        thread = _thread.get_ident()
        if thread in inside or fetching[0]:
            return original(*args, **kwargs)
        start = now()
        try:
            inside.add(thread)
            page.opened(LOAD, start)
            result = original(*args, **kwargs)
        finally:
            inside.discard(thread)
            page.closed()
        try:
            target = args[0] if args else kwargs.get("f", kwargs.get("filename"))
            emit(LOAD, start, now() - start, describe(target)[2])
        except Exception as cause:
            probes.failed("checkpoint.load", cause)
        return result

    return loaded


def fsync(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `os.fsync`: recorded when this process saved the file, or something in the folder."""
    emit, inside, saves, page = probes.emit, probes.inside, probes.saves, probes.page

    def synced(fd: Any, descriptor: int, path: str) -> None:
        """Sync what was saved, and record how long that took."""
        start = now()
        try:
            page.opened(SYNC, start)
            original(fd)
        finally:
            page.closed()
        end = now()
        try:
            begin = saves.since(path=path, descriptor=descriptor, start_ns=start, steps=probes.steps[0])
            emit(SYNC, begin, end - begin, 0)
            if begin != start:
                saves.synced(end)
        except Exception as cause:
            probes.failed("os.fsync", cause)

    # A frame of `fsync` alone is not taken for a timed call by `gap_stacks`, which names the line that syncs a log.
    @functools.wraps(original)
    def fsync(fd: Any) -> None:
        """Sync, and let what was saved be recorded."""
        descriptor, path, is_saved = -1, "", False
        if saves.count and _thread.get_ident() not in inside:
            with suppress_own():  # os.fsync itself says what is wrong with a descriptor
                descriptor = fd if isinstance(fd, int) else fd.fileno()
                path = os.path.realpath(f"/proc/self/fd/{descriptor}")
                is_saved = saves.knows(path, descriptor)
        if is_saved:
            synced(fd, descriptor, path)
        else:
            original(fd)

    return fsync


def rename(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `os.replace` or `os.rename`: recorded when the source was saved by this process."""
    emit, inside, saves = probes.emit, probes.inside, probes.saves

    @functools.wraps(original)
    def renamed(src: Any, dst: Any, **kwargs: Any) -> None:
        """Rename, and record how long that took."""
        start = now()
        original(src, dst, **kwargs)
        if not saves.count:
            return
        end = now()
        try:
            path = os.path.realpath(os.fsdecode(src))
            if _thread.get_ident() not in inside and saves.knows(path):
                begin = saves.since(path=path, start_ns=start, steps=probes.steps[0])
                emit(RENAME, begin, end - begin)
        except Exception as cause:
            probes.failed("os.rename", cause)

    return renamed


def describe(target: Any) -> tuple[str, int, int]:
    """Return (real path or '', descriptor or -1, bytes or 0) of a path or file object that was saved to."""
    if isinstance(target, (str, bytes, os.PathLike)):
        path = os.path.realpath(os.fsdecode(target))
        return path, -1, tree_bytes(path)
    name = getattr(target, "name", None)
    path = os.path.realpath(os.fsdecode(name)) if isinstance(name, (str, bytes, os.PathLike)) else ""
    descriptor = size = -1
    with suppress_own():  # whatever a user's file object raises, it only leaves a fact out
        descriptor = target.fileno()
    if isinstance(target, io.IOBase):
        with suppress_own():
            size = target.tell()
    return path, descriptor, max(size, 0)


def tree_bytes(path: str) -> int:
    """Return the bytes of a file, or of the files directly in a folder; 0 when it cannot be told."""
    try:
        if not os.path.isdir(path):
            return os.path.getsize(path)
        with os.scandir(path) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file())
    except OSError:
        return 0
