"""Whose exception is it: headway's own, or one that a signal's handler raised while headway's code ran?

Python calls the handler of a signal between any two instructions of the main thread. What the handler raises (a
time-out, a library's own class) comes out of the line that ran just then, also where that line is headway's:

    script:   model(batch)
    headway:      forward is over, write a record      <- SIGALRM: the script's handler raises TimeoutError
    script:   except TimeoutError: ...                 <- must get it, as without headway

So an `except Exception` around headway's own work in a script's process asks `pass_on` first. KeyboardInterrupt is not
an `Exception`, and passes by itself.

>>> def handler(number, frame): raise TimeoutError
>>> import signal; before = signal.signal(signal.SIGUSR1, handler)
>>> try:
...     signal.raise_signal(signal.SIGUSR1)
... except TimeoutError as error:
...     is_scripts(error)
True
>>> is_scripts(TimeoutError())
False
>>> handler = signal.signal(signal.SIGUSR1, before)
"""

from __future__ import annotations

import atexit
import inspect
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

_PACKAGE = str(Path(__file__).parents[2])
_LIBRARIES = {"builtins", "headway", "torch", "numpy", "pyarrow", "msgspec"} | sys.stdlib_module_names


def is_scripts(error: BaseException) -> bool:
    """Whether the script would have met `error` without headway, too.

    True of what a signal's handler raised, and of a class of the script's own that came out of a line of headway's:
    another thread raised it here (`PyThreadState_SetAsyncExc`).
    """
    handlers, at, last = _handlers(), error.__traceback__, ""
    while at is not None:
        if at.tb_frame.f_code in handlers or _was_called_by_a_signal(at.tb_frame):
            return True
        last, at = at.tb_frame.f_code.co_filename, at.tb_next
    return last.startswith(_PACKAGE) and type(error).__module__.partition(".")[0] not in _LIBRARIES


def pass_on(error: BaseException) -> None:
    """Raise `error` again if it is the script's; call this first in an `except` around work of headway's own."""
    if is_scripts(error):
        raise error


class suppress_own:  # noqa: N801  # reads as `contextlib.suppress`, which it stands for
    """`contextlib.suppress(Exception)` for headway's own work: an exception of the script's passes."""

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        """End; True where `error` was headway's own."""
        return isinstance(error, Exception) and not is_scripts(error)


@contextmanager
def raised_behind() -> Iterator[None]:
    """Raise behind the block what a handler of a signal raised in a hook, as this process forks or collects garbage.

    Python ignores exceptions of hooks of a fork (those of `logging`, say) and of finalisers, and a signal that arrives
    meanwhile is handled in the first of them. The handlers stay as they are: some are C's, which Python could not put
    back.
    """
    lost, before = list[BaseException](), sys.unraisablehook

    def keep(unraisable: Any) -> None:
        error = unraisable.exc_value
        if error is not None and (not isinstance(error, Exception) or is_scripts(error)):
            lost.append(error)
        else:
            before(unraisable)

    sys.unraisablehook = keep
    try:
        yield
    finally:
        sys.unraisablehook = before
    if lost:
        raise lost[0]


def _handlers() -> set[CodeType]:
    """Return the code of every handler that is set now."""
    found = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        handler = getattr(handler, "func", handler)  # of a functools.partial
        handler = getattr(handler, "__func__", handler)  # of a bound method
        code = getattr(handler, "__code__", getattr(vars(type(handler)).get("__call__"), "__code__", None))
        if isinstance(code, CodeType):
            found.add(code)
    return found


def _was_called_by_a_signal(frame: FrameType) -> bool:
    """Whether a function was given a number and the frame that called it: a handler that was replaced meanwhile."""
    code, given = frame.f_code, list[object]()
    for name in code.co_varnames[: code.co_argcount + bool(code.co_flags & inspect.CO_VARARGS)]:
        value = frame.f_locals.get(name)
        given += value if isinstance(value, tuple) else (value,)
    return any(at is not None and at is frame.f_back and isinstance(number, int) for number, at in pairwise(given))


def end_by_ctrl_c() -> None:
    """End as Python does after Ctrl-C, by the signal: only then does a shell end the loop that this command runs in."""
    atexit._run_exitfuncs()
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
