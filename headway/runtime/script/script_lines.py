"""Lines of the script: who called, and whether what one line makes is used by another. Standard library only.

>>> code = compile("x = load()\\ny = x + 1\\nmodel(y)\\nsave(1)", "train.py", "exec")
>>> feeds(code, 1, 3), feeds(code, 1, 4), line_of(code, 3)
(True, False, 'train.py:3')
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
from types import CodeType, FrameType

LIBRARIES = tuple({sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "purelib", "platlib")})
"""Folders of what the script did not bring itself."""

OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
"""Folder of this package."""

SHARED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Folders of packages of another Python that an environment includes."""

DEMO = OWN + "demo" + os.sep
"""Folder of the demo's script: a script like any other."""

TORCH = os.sep + "torch" + os.sep


def is_ours(code: CodeType) -> bool:
    """Say whether code belongs to this package, and is no script."""
    return code.co_filename.startswith(OWN) and not code.co_filename.startswith(DEMO)


def is_scripts(file: str) -> bool:
    """Say whether a file of code is the script's own: none of a library, and none of this package."""
    ours = file.startswith(OWN) and not file.startswith(DEMO)
    return not (ours or file.startswith("<frozen") or _in_library(file))


def line_of(code: CodeType, line: int) -> str:
    """Return a line as 'file.py:12', or 'In[3]:12' where it is one of a notebook's cell."""
    return f"{_cell_of(code.co_filename) or os.path.basename(code.co_filename)}:{line}"


def _cell_of(file: str) -> str:
    """Return how IPython names the cell that it keeps under such a file name; '' for other files."""
    try:
        return str(sys.modules["IPython"].get_ipython().compile.format_code_name(file)[1])
    except (KeyError, AttributeError, TypeError):  # no IPython, no shell, another version of it, or no cell
        return ""


def runs_cells(frame: FrameType) -> bool:
    """Say whether a frame is IPython's own, below a cell that it runs."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("IPython", "ipykernel")


def calling_line(frame: FrameType | None) -> str:
    """Return the innermost line of the script in the stack of `frame`.

    Without one (a trainer of a library runs the loop) it is the innermost line outside of torch; '' without that.
    """
    fallback = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_ours(frame.f_code) and not file.startswith("<frozen"):
            if not _in_library(file):
                return line_of(frame.f_code, frame.f_lineno)
            if not fallback and TORCH not in file:
                fallback = line_of(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return fallback


def _in_library(file: str) -> bool:
    return file.startswith(LIBRARIES) or any(name in file for name in SHARED)


def calling_library(frame: FrameType | None) -> str:
    """Return the package that the innermost frame outside of torch belongs to; '' where that is the script's own.

    >>> calling_library(sys._getframe())
    ''
    """
    while frame is not None and (TORCH in frame.f_code.co_filename or frame.f_code.co_filename.startswith("<frozen")):
        frame = frame.f_back
    if frame is None or not (is_ours(frame.f_code) or _in_library(frame.f_code.co_filename)):
        return ""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def feeds(code: CodeType, line: int, user: int) -> bool:
    """Say whether a name that `line` assigns is used on line `user`, also by way of names assigned in between.

    Read off the bytecode: nothing is looked up in a running frame. What cannot be told is False: a line that makes
    and uses a value at once, a value that is handed on in a container or by a call without a result.
    """
    stored, loaded = _names(code)
    names = set(stored.get(line, ()))
    if line == user or not names:
        return False
    # The lines from `line` to `user`, around the end of the loop where `user` comes first.
    between = sorted({*stored, *loaded}, key=lambda at: (at < line, at))
    for at in between[: between.index(user)] if user in between else ():
        if at != line and names & loaded.get(at, set()):
            names |= stored.get(at, set())
    return bool(names & loaded.get(user, set()))


@functools.lru_cache(maxsize=64)
def _names(code: CodeType) -> tuple[dict[int, set[str]], dict[int, set[str]]]:
    """Return the names that each line stores, and those that it loads: 5 ms for the loop of a large trainer."""
    stored: dict[int, set[str]] = {}
    loaded: dict[int, set[str]] = {}
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        line = _line(step, line)
        table = stored if step.opname.startswith("STORE_") else loaded if step.opname.startswith("LOAD_") else None
        if table is not None and isinstance(step.argval, (str, tuple)) and "CONST" not in step.opname:
            table.setdefault(line, set()).update((step.argval,) if isinstance(step.argval, str) else step.argval)
    return stored, loaded


def _line(step: dis.Instruction, before: int) -> int:
    """Return the line of an instruction: by its position, which Python keeps since 3.11, else by the line's begin."""
    positions = getattr(step, "positions", None)
    known = positions.lineno if positions is not None else step.starts_line
    return before if known is None else int(known)
