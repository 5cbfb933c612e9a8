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
"""

from __future__ import annotations

import _thread
import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from headway.core.tables import pick
from headway.runtime.in_rank.bootstrap import active
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
