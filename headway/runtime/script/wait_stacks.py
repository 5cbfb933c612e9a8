"""Lines at which the script waits for its device: `loss.item()`, `float(loss)`, `outputs.cpu()`, `synchronize()`.

Nothing stands around these methods: torch.compile knows `item` by identity, and a function around it would break its
graphs. So the thread that samples stacks (`gap_stacks`) looks ten times a second which call of Python the training
thread is in. While `item` waits, the instruction of the innermost frames is that call; its bytecode says so, no file is
read. A look that came late found the interpreter's lock taken at its time: the thread was running Python, and waited
for nothing. It counts for no line, or lines that wait would take the time of all Python before them.

>>> code = compile("float(loss)", "train.py", "eval")
>>> [callee(code, step.offset) for step in dis.get_instructions(code) if step.opname == "CALL"]
['float']
"""

from __future__ import annotations

import dis
import functools
from dataclasses import dataclass, field
from types import CodeType, FrameType

from headway.runtime.script.gap_stacks import MOST_LINES, MOST_PLACES, calling_line

WAITING = frozenset({"item", "tolist", "cpu", "numpy", "nonzero", "synchronize", "float", "int", "bool"})
"""Names of calls that return once a device is done with what they read."""

LATE_S = 0.001
"""A look that comes later than this waited for the interpreter's lock."""

DEEPEST = 16
"""Frames that are looked at, the innermost first: those of a library between the call and the script among them."""


@dataclass(slots=True)
class WaitStacks:
    """Where the training thread was seen to wait for its device."""

    _seen: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def look(self, frame: FrameType | None, ns: int, late_s: float) -> None:
        """Count `ns` for the line of the script whose call waits, if one does in the stack of `frame`."""
        depth, waits = 0, None
        while late_s < LATE_S and frame is not None and depth < DEEPEST:
            if WAITING.intersection(frame.f_code.co_names):
                name = callee(frame.f_code, frame.f_lasti)
                if name in WAITING:
                    waits = calling_line(frame), name  # the outermost one: `item` may call `synchronize`
            frame, depth = frame.f_back, depth + 1
        if waits is not None:
            self._count(*waits, ns)

    def report(self) -> list[dict[str, str | int]]:
        """Return the lines that waited longest: {"line", "function", "ns", "count"} each."""
        longest = sorted(self._seen.copy().items(), key=lambda entry: -entry[1][0])
        return [
            {"line": line, "function": name, "ns": ns, "count": count}
            for (line, name), (ns, count) in longest[:MOST_LINES]
        ]

    def _count(self, line: str, name: str, ns: int) -> None:
        if len(self._seen) < MOST_PLACES or (line, name) in self._seen:
            entry = self._seen.setdefault((line, name), [0, 0])
            entry[0] += ns
            entry[1] += 1


@functools.lru_cache(maxsize=256)
def callee(code: CodeType, offset: int) -> str:
    """Return the name of the function or method that the call at `offset` of `code` calls; '' where it is no call.

    The name is loaded by an instruction whose text begins where the call's does and ends first before it:
    `loss.item` in `loss.item()`.
    """
    steps = [step for step in dis.get_instructions(code) if step.offset <= offset]  # behind it may stand its caches
    if not steps or not steps[-1].opname.startswith(("CALL", "PRECALL")):
        return ""
    begin, end = _ends(steps[-1])
    name, longest = "", begin
    for step in steps[:-1]:
        starts, ends = _ends(step)
        if step.opname in _LOADS and starts == begin and longest < ends < end:
            name, longest = str(step.argval), ends
    return name


_LOADS = ("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF")


def _ends(step: dis.Instruction) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return where the text of an instruction begins and ends: line and column each."""
    at = step.positions
    if at is None:
        return (0, 0), (0, 0)
    return (at.lineno or 0, at.col_offset or 0), (at.end_lineno or 0, at.end_col_offset or 0)
