"""In how many loops a call stands, over the whole stack: tells a critic's inner loop from the loop around it.

Found from the bytecode: an instruction is in a loop when a jump behind it leads back before it. Standard library only.
The first update of a run asks this for every function on the stack, so the bytes are searched for such jumps only:
disassembling them holds up the training for longer than the update.

>>> import sys
>>> def twice():
...     return [loop_depth(sys._getframe()) for _ in range(1)][0]
>>> twice() - loop_depth(sys._getframe())
1
"""

from __future__ import annotations

import dis
import re
from types import CodeType, FrameType

_LOOPS: dict[CodeType, list[tuple[int, int]]] = {}
"""Code -> (first offset, offset of the jump back) of its loops."""


def loop_depth(frame: FrameType | None) -> int:
    """Return how many loops are under way around the present instruction of `frame` and of those that called it."""
    depth = 0
    while frame is not None:
        depth += sum(begin <= frame.f_lasti <= end for begin, end in loops_of(frame.f_code))
        frame = frame.f_back
    return depth


def loops_of(code: CodeType) -> list[tuple[int, int]]:
    """Return (first offset, offset of the last jump back) of the loops in a function, in order."""
    found = _LOOPS.get(code)
    if found is None:
        back: dict[int, int] = {}
        raw = code.co_code
        operations, arguments = raw[::2], raw[1::2]
        for jump in _BACK.finditer(operations):
            here = jump.end() - 1
            length = int.from_bytes(arguments[jump.start() : here + 1], "big")  # with its prefixes, the high bytes
            back[2 * (here + 1 - length)] = 2 * here  # `continue` jumps back as well: the last one ends the loop
        found = _LOOPS[code] = sorted(back.items())
    return found


_BACK = re.compile(
    b"[%c]*[%b]"
    % (
        dis.EXTENDED_ARG,
        re.escape(bytes(code for name, code in dis.opmap.items() if "JUMP_BACKWARD" in name and code < 256)),
    ),
    re.DOTALL,
)
"""Jumps whose argument is the number of instructions, of two bytes each, that they lead back."""
