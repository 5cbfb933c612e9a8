"""Headway's own words on stderr, beside what a script prints: when nobody reads them, the rest goes on as if they had.

>>> import contextlib, io
>>> with contextlib.redirect_stderr(io.StringIO()) as heard: say_beside("headway: done\\n")
>>> heard.getvalue()
'headway: done\\n'
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


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
