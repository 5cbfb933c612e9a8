"""A function that a remedy replaces: whatever fails in the replacement, its caller gets what the original gives.

    caller -> guard -> replacement -> original

    the replacement fails before it has called the original     the original is called, with the same arguments
    ... after the original has returned                         the caller gets what it returned
    the original raises                                         that goes on as it is

In the first two cases the remedy is taken back at once: `failed` is called before the original is, so that it finds
nothing half done. What ends programs (`KeyboardInterrupt`, `SystemExit`) or loops (`StopIteration`) is no failure, nor
is what a handler of a signal of the script's raises meanwhile, nor an error by which a remedy tells the script what
became of something that the script had asked for (`passing`).

>>> def broken(original):
...     def replacement(value):
...         raise OSError("no room")
...     return replacement
>>> causes = []
>>> guarded(broken, lambda cause, first: causes.append(cause))(abs)(-3), causes
(3, [OSError('no room')])
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Set
from traceback import walk_tb
from typing import Any, Protocol

Restoring = Callable[..., Callable[[], None]]
Passing = tuple[type[Exception], ...]


OURS = frozenset({"headway", "torch", "numpy"})
"""Top-level modules whose failures are a remedy's own, while one of its functions runs."""


def raised_by_script(error: BaseException, ours: Set[str] = OURS) -> bool:
    """Tell whether an exception comes out of code of the script's that ran meanwhile, such as a handler of a signal.

    That is the innermost function of its traceback that is none of the standard library's.
    """
    modules = (frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__))
    owners = [module.partition(".")[0] for module in modules if isinstance(module, str)]
    found = next((owner for owner in reversed(owners) if owner not in sys.stdlib_module_names), None)
    return found is not None and found not in ours


class OfScript:
    """Knows an exception that is the script's own: it was raised in a block of this, where only the script's code runs.

    So is one that its handler of a signal raised in between.

    >>> of_script = OfScript()
    >>> try:
    ...     with of_script:
    ...         raise KeyError("the dataset's")
    ... except KeyError as error:
    ...     (error in of_script, OSError() in of_script)
    (True, False)
    """

    def __init__(self) -> None:
        self._raised = 0  # its identity: an object that refers to it would keep the frames of its traceback

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._raised = id(error)

    def __contains__(self, error: BaseException) -> bool:
        return id(error) == self._raised or raised_by_script(error)


class FailedFn(Protocol):
    """Takes a remedy back."""

    def __call__(self, cause: BaseException, first: bool) -> None:
        """Learn why, and whether this replacement had not worked yet. Raises nothing."""
        ...


class _Call:
    """What became of the original within one call of its replacement."""

    __slots__ = ("has_returned", "raised", "value")

    def __init__(self) -> None:
        self.has_returned = False
        self.value: Any = None
        self.raised: BaseException | None = None


class _Here(threading.local):
    """The call that this thread is in."""

    call: _Call | None = None


def guarded(
    wrapper: Callable[[Any], Any], failed: FailedFn, is_off: Callable[[], bool] = lambda: False,
    restoring: Restoring | None = None, passing: Passing = (),
) -> Callable[[Any], Any]:  # fmt: skip
    """Return a wrapper that does what `wrapper` does, and costs its caller nothing where that fails.

    Once `is_off` says so, the original is called at once. `restoring(*arguments)` is called first, and returns a
    function that takes back what the replacement may have consumed; that is called ahead of the original. Errors of the
    types in `passing` go on to the caller.
    """

    def guard_of(original: Any) -> Any:
        here, worked = _Here(), [False]

        @functools.wraps(original)
        def followed(*args: Any, **named: Any) -> Any:
            """Call the original, and note what came of it."""
            call = here.call
            if call is None:  # later than the replacement, or in another thread
                return original(*args, **named)
            try:
                value = original(*args, **named)
            except BaseException as error:
                call.raised = error
                del call  # an exception whose own traceback leads back to it is freed late
                raise
            call.has_returned, call.value, call.raised = True, value, None
            return value

        replacement = wrapper(followed)
        ours = OURS | {str(getattr(wrapper, "__module__", "headway")).partition(".")[0]}

        @functools.wraps(replacement)
        def guard(*args: Any, **named: Any) -> Any:
            """Call the replacement, and where it fails the original."""
            if is_off():
                return original(*args, **named)
            outer, here.call = here.call, (call := _Call())
            restore: Callable[[], None] | None = None
            try:
                restore = restoring(*args, **named) if restoring is not None else None
                value = replacement(*args, **named)
                worked[0] = True
                return value
            except BaseException as error:
                meant = not isinstance(error, Exception) or isinstance(error, (StopIteration, *passing))
                if meant or error is call.raised or raised_by_script(error, ours):
                    call.raised = None
                    raise
                cause = error
            finally:
                here.call = outer
            # Behind the handler: what the original raises has no context.
            failed(cause, not worked[0])
            del cause
            if call.raised is not None:
                raise call.raised
            if call.has_returned:
                return call.value
            if restore is not None:
                restore()
            return original(*args, **named)

        return guard

    return guard_of
