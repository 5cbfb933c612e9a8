"""Whether reading an example does what others can see: it prints, logs, warns, changes files, or asks another process.

Such a reading belongs to the training thread, at the moment at which the loop asks for the batch, and each time that
it does. Where a thread reads ahead of the loop, the act is not done: `VisibleError` is raised in its place, and the
reading counts as failed even where the script catches that. What native code writes by itself is not seen.

>>> undos = []
>>> listen(lambda target, wrapper: undos.append(replace_attribute(target, wrapper)))
>>> with noting() as acts:
...     print("read")
read
>>> acts
['prints']
>>> for undo in undos: undo()
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from headway.runtime.calls.patches import replace_attribute
from headway.runtime.in_rank.bootstrap import active

PRINTS, LOGS, CHANGES, STARTS = "prints", "logs", "changes files", "starts a process"
WARNS, ASKS = "shows a warning", "asks another process, whose answer may change"

WRITING = frozenset("wax+")
"""Letters in the mode of a file that can be changed through it."""


def _second(name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return arguments[1] if len(arguments) > 1 else named.get(name)


def _to_a_path(*arguments: Any, **named: Any) -> bool:
    """Whether `torch.save` writes to a file by its name, and not into memory."""
    return isinstance(_second("f", arguments, named), (str, os.PathLike))


def _for_writing(*arguments: Any, **named: Any) -> bool:
    """Whether `open` opens a file that can be changed through it."""
    mode = _second("mode", arguments, named)
    return isinstance(mode, str) and bool(WRITING & set(mode))


STDOUT = "sys:stdout.write"

ACTS: dict[str, tuple[str, Callable[..., bool] | None]] = {
    "builtins:print": (PRINTS, None),
    "logging:Logger.handle": (LOGS, None),
    "builtins:open": (CHANGES, _for_writing),
    "io:open": (CHANGES, _for_writing),
    "os:rename": (CHANGES, None),
    "os:replace": (CHANGES, None),
    "os:fork": (STARTS, None),
    "os:system": (STARTS, None),
    "os:posix_spawn": (STARTS, None),
    "subprocess:Popen.__init__": (STARTS, None),
    STDOUT: (PRINTS, None),
    "os:remove": (CHANGES, None),
    "os:unlink": (CHANGES, None),
    "torch:save": (CHANGES, _to_a_path),
    "warnings:_showwarnmsg": (WARNS, None),  # what filters let through, however it is shown or collected
    **{
        f"socket:socket.{name}": (ASKS, None)
        for name in (
            "connect",
            "connect_ex",
            "recv",
            "recv_into",
            "send",
            "sendall",
            "sendmsg",
            "sendto",
        )
    },
    "multiprocessing.connection:Connection._send": (ASKS, None),
    "multiprocessing.connection:Connection._recv": (ASKS, None),
}
"""Function -> what calling it does, and which of its calls do that (None: all)."""


class VisibleError(BaseException):
    """Raised in place of an act that is not due yet. Never seen by a script."""


class _Noting(threading.local):
    """What this thread notes."""

    acts: list[str] | None = None
    """What its reading has done so far; None while it reads nothing."""
    ahead = False
    """Whether it reads ahead of the loop."""


_NOTING = _Noting()


@contextmanager
def noting(*, ahead: bool = False) -> Iterator[list[str]]:
    """Give a list that fills with what this thread does in the block; with `ahead` nothing of it is done."""
    outer, acts = _NOTING.acts, list[str]()
    try:
        with _noted_in(acts, ahead=ahead or _NOTING.ahead):
            yield acts
    finally:
        if outer is not None:
            outer += acts


def unheard() -> AbstractContextManager[None]:
    """Note nothing that this thread does in the block: it is an act of headway's own, not of the script's reading."""
    return _noted_in(None, ahead=False)


@contextmanager
def _noted_in(acts: list[str] | None, *, ahead: bool) -> Iterator[None]:
    before = _NOTING.acts, _NOTING.ahead
    _NOTING.acts, _NOTING.ahead = acts, ahead
    try:
        yield
    finally:
        _NOTING.acts, _NOTING.ahead = before


def listen(patch: Callable[[str, Callable[[Any], Any]], Any]) -> None:
    """Have the functions of `ACTS` noted from now on; `patch(target, wrapper)` replaces one of them."""
    session = active()
    run = os.environ.get("HEADWAY_RUN") if session is None else session.probes.run
    for target, (what, counts) in ACTS.items():
        if target == STDOUT and getattr(sys.stdout, "write", None) is None:
            continue  # it was closed
        patch(target, functools.partial(_noted, what, counts, os.path.abspath(run or os.devnull) + os.sep))


def listen_here() -> None:
    """Have them noted for good, in a process of headway's own: a child that tries a dataset, a worker."""
    listen(replace_attribute)


def _noted(what: str, counts: Callable[..., bool] | None, run: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that others see the effect of, but for what lies in the folder `run`: that is the recording."""

    def is_recording(arguments: tuple[Any, ...]) -> bool:
        path = arguments[0] if what == CHANGES and arguments else None
        return isinstance(path, (str, os.PathLike)) and os.path.abspath(os.fsdecode(path)).startswith(run)

    @functools.wraps(original)
    def act(*arguments: Any, **named: Any) -> Any:
        acts = _NOTING.acts
        if acts is not None and (counts is None or counts(*arguments, **named)) and not is_recording(arguments):
            if what not in acts:  # print() comes to stdout's `write` as well
                acts.append(what)
            if _NOTING.ahead:
                raise VisibleError(what)
        return original(*arguments, **named)

    act.__module__ = act.__module__ or __name__  # a method of a built-in object has none
    return act
