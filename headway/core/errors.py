"""Every error that headway raises on purpose; what an exception is in one line; headway's own words on stderr.

    HeadwayError
    +-- InputError           the caller's mistake: value, rule, fix          (exit code 2)
    |   +-- UnknownNameError     a name that a table does not list
    |   +-- FormatError          a file that is not what it should be
    |   +-- CycleError           an order that contradicts itself
    +-- DamageError          stored bytes are not what was written           (exit code 3)
    +-- BarMissedError       a comparison or benchmark fell short of its bar (exit code 3)
    +-- BackgroundError      a failure of background work, raised at the next call

A message says the value, the rule and the fix.

>>> raise InputError("world_size is 0; it must be at least 1. Pass --nproc-per-node 1.")
Traceback (most recent call last):
headway.core.errors.InputError: world_size is 0; it must be at least 1. Pass --nproc-per-node 1.

`Closing` gives a class its `with` block, in which an error of the block goes before one of closing.

>>> class Door(Closing):
...     def close(self) -> None:
...         raise BackgroundError("it is stuck.")
>>> with Door():
...     raise KeyError("keys")
Traceback (most recent call last):
    ...
KeyError: 'keys'

What a traceback comes to in one line: the exception, and where in the script it was raised.

>>> text = '''Traceback (most recent call last):
...   File "/jobs/train.py", line 5, in main
...     net(x)
...   File "/usr/lib/python3/dist-packages/torch/nn/modules/module.py", line 1789, in _call_impl
...     return forward_call(*args, **kwargs)
... ValueError: a shape'''
>>> raised(text), raised("Killed")
('ValueError: a shape (train.py, line 5)', '')
>>> raised('  File "/jobs/train.py", line 2\\n    def f(:\\n          ^\\nSyntaxError: invalid syntax')
'SyntaxError: invalid syntax (train.py, line 2)'

Headway's own words on stderr, beside what a script prints: when nobody reads them, the rest goes on as if they had.

>>> import contextlib, io
>>> with contextlib.redirect_stderr(io.StringIO()) as heard: say_beside("headway: done\\n")
>>> heard.getvalue()
'headway: done\\n'
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from types import TracebackType
from typing import ClassVar, Self


class HeadwayError(Exception):
    """Root of the tree."""

    exit_code = 1
    """What the command exits with when this error reaches it."""


class InputError(HeadwayError, ValueError):
    """The caller passed something that cannot work."""

    exit_code = 2


class UnknownNameError(InputError, KeyError):
    """A name that its table does not list; the message offers the nearest one."""

    def __str__(self) -> str:
        """Return the message itself: `KeyError` would quote it."""
        return str(self.args[0]) if self.args else ""


class FormatError(InputError):
    """A file cannot be read as the format it claims; the message says where.

    Numbers of more than 40 digits, which only broken files and hostile ones hold, are cut in it.

    >>> raise FormatError(f"a.npy has {10**50} items")
    Traceback (most recent call last):
    headway.core.errors.FormatError: a.npy has 100000000000... (51 digits) items
    """

    def __init__(self, message: str) -> None:
        super().__init__(re.sub(r"\d{41,}", lambda found: f"{found[0][:12]}... ({len(found[0])} digits)", message))


class CycleError(InputError):
    """Operations wait for each other in a circle; `operations` names one such circle."""

    def __init__(self, message: str, operations: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.operations = operations


class DamageError(HeadwayError):
    """Stored bytes differ from what was written."""

    exit_code = 3


class BarMissedError(HeadwayError):
    """A measured figure fell short of the bar it was held to."""

    exit_code = 3


class BackgroundError(HeadwayError):
    """Work in the background failed earlier; the cause is chained."""


class Closing:
    """Gives a class that has `close` its `with` block: an error of the block goes before one of closing."""

    _gives_way: ClassVar[type[HeadwayError]] = BackgroundError
    """Errors of `close` that are not shown where the block has failed already."""

    def close(self) -> None:
        """Finish; written by who inherits."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; an error of the block goes first."""
        try:
            self.close()
        except self._gives_way:
            if error is None:
                raise


HEADER = "Traceback (most recent call last):"
"""The line above the frames; the first line below them that is not indented names the exception."""

LONGEST_MESSAGE = 120
"""Characters of an exception that are repeated."""

_GROUP = re.compile(r"^ *[+|] ?", re.MULTILINE)
"""What draws the frame of a group of exceptions."""

_STEERING = re.compile(r"[^\S\n ]|[^\s\x20-\x7e\u00a0-\U0010ffff]")
"""What would steer a terminal."""

_FRAME = re.compile(r'^  File "([^"\n]+)", line (\d+)', re.MULTILINE)
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|^<|^" + re.escape(_ROOT + os.sep))
"""Files in which an exception may come up though the script is what called them; headway's own wrappers are some."""


def raised(traceback: str) -> str:
    """Return the last exception of a traceback in one short line, with the script's line; '' where there is none."""
    _, _, last = _GROUP.sub("", _STEERING.sub(" ", traceback)).rpartition(HEADER)
    lines = last.split("\n") if _FRAME.search(last) or HEADER in traceback else []
    said = next((line for line in lines if line[:1].strip()), "").rstrip(". ")
    if not said:
        return ""
    frames = [(file, line) for file, line in _FRAME.findall(last) if not _LIBRARY.search(file)]
    where = f" ({os.path.basename(frames[-1][0])}, line {frames[-1][1]})" if frames else ""
    return (said if len(said) <= LONGEST_MESSAGE else said[: LONGEST_MESSAGE - 3] + "...") + where


def say_beside(text: str) -> None:
    """Write `text` on stderr. Where that is closed, full or a pipe without a reader, this and all later text is lost.

    How a job ended stands all the same: else Python itself would end with another code than the job's.
    """
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        with suppress(OSError, ValueError, AttributeError):  # what is left in its buffer has to go somewhere
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stderr.fileno())
