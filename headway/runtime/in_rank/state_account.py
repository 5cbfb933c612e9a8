"""What saving and restoring state cost, written into the run's record by the engine that did it.

`headway.Checkpointer` copies the state on the training thread and leaves the
rest to another process; neither is a call that the patches of `torch.save`
would see. So the engine says what it did: `snapshotted`, `waited` and
`restored` held the training thread up and are booked to it, `background` is
what the other process did meanwhile and owns no device. Work between
`inside(name)` and its end is shown to the hang watch and not recorded again by
the patches of saves, syncs and renames.

Without a recorder each call returns at once (well below 1 us). Times are int
ns on the clock of `time.perf_counter_ns`, one for all processes of a host;
`step` is the number of the checkpoint (step-<n>). Call from the training thread.

>>> on()
False
>>> snapshotted(0, 5_000, bytes=4096, step=7)
>>> with inside("checkpoint.snapshot"):
...     pass

Act before the script looks at a file: for remedies that write files behind it.

Plain Python reaches a file by `open` and the functions of `os`, which
`pathlib`, `shutil`, `glob` and torch's own readers call too. Each of them is
wrapped: `before(path)` is called first, with the path as it was given. Other
programs look by themselves, so `before(None)` comes before one is started and
before this one ends or is replaced. What native code opens by itself is not
seen. A look costs half a microsecond more.

>>> related("/runs/a/step-3/.metadata", "/runs/a/step-3"), related("/runs/a", "/runs/a/step-3")
(True, True)
>>> related("/runs/b", "/runs/a/step-3")
False
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from headway.core.tables import pick
from headway.runtime.in_rank.bootstrap import active
from headway.runtime.in_rank.remedy import Context
from headway.runtime.recorder.probes import Probes, now
from headway.trace.events.vocabulary import IN_BACKGROUND, SPANS

SNAPSHOT, WAIT, RESTORE = (SPANS[f"checkpoint.{name}"].code for name in ("snapshot", "wait", "restore"))
BACKGROUND = {name: SPANS[name].code for name in IN_BACKGROUND}

RESTORE_UP_TO = "HEADWAY_RESTORE_UP_TO"
"""Variable of an attempt: number of the newest checkpoint that "latest" may be, where later ones are suspect."""

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def on() -> bool:
    """Whether this process is being recorded: what is not may skip measuring."""
    return active() is not None


def snapshotted(start_ns: int, end_ns: int, *, bytes: int, step: int) -> None:
    """Note that training stood still while the state of checkpoint `step` was copied."""
    session = active()
    if session is not None:
        _emit(session.probes, SNAPSHOT, start_ns, end_ns, bytes, step)


def waited(start_ns: int, end_ns: int, *, step: int) -> None:
    """Note that training waited for the copy of checkpoint `step`, or for an earlier save before that one began."""
    session = active()
    if session is not None:
        _emit(session.probes, WAIT, start_ns, end_ns, 0, step)


def restored(start_ns: int, end_ns: int, *, bytes: int, step: int, verified_bytes: int = 0, held: bool = False) -> None:
    """Note that checkpoint `step` was read back; after a failure the steps beyond it count as done twice.

    It was `held` where all of it came from the memory of an agent.
    """
    session = active()
    if session is not None:
        _emit(session.probes, RESTORE, start_ns, end_ns, bytes, step, verified_bytes, int(held))


def background(name: str, start_ns: int, end_ns: int, *, bytes: int, step: int) -> None:
    """Note what another process did for checkpoint `step`, once it has said so.

    `name` is one of `headway.trace.events.vocabulary.IN_BACKGROUND`, such as "checkpoint.persist"; another raises
    `UnknownNameError`.
    """
    session = active()
    if session is not None:
        code = pick(BACKGROUND, name, "background work on checkpoints")
        _emit(session.probes, code, start_ns, end_ns, bytes, step)


def inside(name: str) -> AbstractContextManager[None]:
    """Return a context in which the training thread is busy with `name`, such as "checkpoint.snapshot".

    What it saves, syncs or renames there is part of that and not recorded again.
    """
    session = active()
    return _NOTHING if session is None else _busy(session.probes, SPANS[name].code)


@contextlib.contextmanager
def _busy(probes: Probes, code: int) -> Iterator[None]:
    thread = _thread.get_ident()
    nested = thread in probes.inside
    probes.inside.add(thread)
    if not nested:
        probes.page.opened(code, now())
    try:
        yield
    finally:
        if not nested:
            probes.inside.discard(thread)
            probes.page.closed()


def _emit(probes: Probes, code: int, start_ns: int, end_ns: int, *numbers: int) -> None:
    """Write one record; a failure costs the record, never the save."""
    try:
        probes.emit(code, start_ns, max(end_ns - start_ns, 0), *numbers)
    except Exception as cause:
        probes.failed("checkpoint records", cause)


# Act before the script looks at a file: for remedies that write files behind it.

Before = Callable[[Any], None]

LOOKS = (
    "builtins:open", "io:open", "os:open", "os:stat", "os:lstat", "os:access", "os:listdir", "os:scandir", "os:rename",
    "os:replace", "os:remove", "os:unlink", "os:rmdir", "os:link", "os:symlink", "os:truncate", "os:mkdir",
)  # fmt: skip
"""Functions that are given a path first, and that see, change or remove what lies there."""

DEPARTURES = (
    "os:system", "os:posix_spawn", "os:posix_spawnp", "os:execv", "os:execve", "os:_exit", "os:abort", "os:kill",
    "subprocess:Popen.__init__",
)  # fmt: skip
"""Functions after which another program may look, or this one can no longer write."""


def before_looks(context: Context, before: Before) -> None:
    """Have `before(path)` called ahead of each look, and `before(None)` ahead of each departure."""
    for target in LOOKS:
        context.patch(target, functools.partial(_looking, before))
    for target in DEPARTURES:
        context.patch(target, functools.partial(_leaving, before))


def _looking(before: Before, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def look(*args: Any, **options: Any) -> Any:
        before(args[0] if args else options.get("path", options.get("file", ".")))
        return original(*args, **options)

    return look


def _leaving(before: Before, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def leave(*args: Any, **options: Any) -> Any:
        before(None)
        return original(*args, **options)

    return leave


def related(path: object, place: str) -> bool:
    """Whether `path`, as a script gives it, is the absolute path `place`, lies in it, or holds it."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False  # a descriptor: it was opened by a path, which was seen
    found = os.path.abspath(os.fsdecode(path))
    return found == place or found.startswith(place + os.sep) or place.startswith(found.rstrip(os.sep) + os.sep)
