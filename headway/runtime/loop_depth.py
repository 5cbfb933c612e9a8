"""In how many loops a call stands, over the whole stack: tells a critic's inner loop from the loop around it.

Found from the bytecode: an instruction is in a loop when a jump behind it leads back before it. Standard library only.

>>> import sys
>>> def twice():
...     return [loop_depth(sys._getframe()) for _ in range(1)][0]
>>> twice() - loop_depth(sys._getframe())
1
"""

from __future__ import annotations

import dis
from types import CodeType, FrameType

_LOOPS: dict[CodeType, list[tuple[int, int]]] = {}
"""Code -> (first offset, offset of the jump back) of its loops."""


def loop_depth(frame: FrameType | None) -> int:
    """Return how many loops are under way around the present instruction of `frame` and of those that called it."""
    depth = 0
    while frame is not None:
        depth += sum(begin <= frame.f_lasti <= end for begin, end in _loops(frame.f_code))
        frame = frame.f_back
    return depth


def _loops(code: CodeType) -> list[tuple[int, int]]:
    found = _LOOPS.get(code)
    if found is None:
        back: dict[int, int] = {}
        for step in dis.get_instructions(code):
            if step.opcode in _JUMPS and isinstance(step.argval, int) and step.argval <= step.offset:
                back[step.argval] = step.offset  # `continue` jumps back as well: the last one ends the loop
        found = _LOOPS[code] = sorted(back.items())
    return found


_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
