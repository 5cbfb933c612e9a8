"""What a traceback comes to in one line: the exception, and where in the script it was raised.

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
"""

from __future__ import annotations

import os
import re

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
