"""Which line of a dataset, a transform or a collate function the loads of a loader without workers are spent in.

The thread that samples the gaps of the script (`gap_stacks`) looks ten times a second whether the training thread is in
a load, and takes its stack where it is. Of the frames below the load the innermost line of the script owns the sample,
with what it calls there. In a library's dataset the first function behind it owns it, and of transforms that call each
other the single one.

    loop -> next(loader) -> fetch -> Pictures.__getitem__ -> Compose.__call__ -> Resize.forward -> resize
                                     line of the script                          what is named: Resize.forward

Standard library only: it runs while the script does.

>>> LoadStacks().report()
[]
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType

from headway.runtime.script.gap_stacks import (
    MOST_LINES,
    MOST_PLACES,
    OWN,
    TORCH,
    Place,
    WaitStacks,
    callee,
    is_ours,
    is_scripts,
    line_of,
)

LOADS = ("fetch", "measured")
"""Functions of `PROBE` around a load."""

PROBE = os.path.join(OWN, "runtime", "calls", "probe_input.py")

PASSING = ("__call__", "_call_impl", "_wrapped_call_impl", "forward")
"""Functions that only call another one, where their class is one of `CONTAINERS`."""

CONTAINERS = ("Compose", "Module", "Sequential", "StandardTransform", "_LazyModule")

DEEPEST = 64
"""Frames that are looked at, the innermost first."""


@dataclass(slots=True)
class LoadStacks:
    """Where the training thread was seen in its loads."""

    _seen: dict[tuple[int, Place], list[int]] = field(default_factory=dict)

    def watching(
        self, trainer: list[int], fetching: list[int], waits: WaitStacks | None
    ) -> Callable[[FrameType | None, int, float], None]:
        """Return what to call with a stack of the thread `trainer`: it counts loads, and outside of them `waits`."""

        def look(frame: FrameType | None, ns: int, late_s: float) -> None:
            thread, loader = fetching
            if thread and thread == trainer[0]:
                self.count(frame, ns, loader)
            elif waits is not None:
                waits.look(frame, ns, late_s)

        return look

    def count(self, frame: FrameType | None, ns: int, loader: int) -> None:
        """Count `ns` for the line that the stack of `frame` is at, inside a load of the loader of group `loader`."""
        place = place_of(frame)
        if place is not None and (len(self._seen) < MOST_PLACES or (loader, place) in self._seen):
            entry = self._seen.setdefault((loader, place), [0, 0])
            entry[0] += ns
            entry[1] += 1

    def report(self) -> list[dict[str, str | int]]:
        """Return the lines that took longest: {"line", "function", "ns", "count", "loader"} each."""
        longest = sorted(self._seen.copy().items(), key=lambda entry: -entry[1][0])
        return [
            {"line": line_of(code, line), "function": name, "ns": ns, "count": count, "loader": loader}
            for (loader, (code, line, name)), (ns, count) in longest[:MOST_LINES]
        ]


def place_of(frame: FrameType | None) -> Place | None:
    """Return the line of a load that a stack is at, and what that calls; None outside of loads."""
    frames: list[FrameType] = []
    if frame is None or is_ours(frame.f_code):  # headway works for itself
        return None
    while not (frame.f_code.co_filename == PROBE and frame.f_code.co_name in LOADS):
        if not is_ours(frame.f_code):
            frames.append(frame)
        frame = frame.f_back
        if frame is None or len(frames) > DEEPEST:
            return None
    frames = [inner for inner in frames if TORCH + "utils" + os.sep + "data" not in inner.f_code.co_filename] or frames
    of_script = (at for at, inner in enumerate(frames) if is_scripts(inner.f_code.co_filename))
    at = next(of_script, len(frames) - 1)
    if at < 0:
        return None
    inside = next((inner for inner in frames[:at][::-1] if not _passes(inner.f_code)), None)
    name = _name(inside.f_code) if inside is not None else callee(frames[at].f_code, frames[at].f_lasti)
    if inside is None and not is_scripts(frames[at].f_code.co_filename):
        name = name or _name(frames[at].f_code)
    return frames[at].f_code, frames[at].f_lineno, name


def _passes(code: CodeType) -> bool:
    owner, _, function = code.co_qualname.rpartition(".")
    return function in PASSING and owner in CONTAINERS


def _name(code: CodeType) -> str:
    """Return what a function is called, with its class: 'Resize.forward'."""
    return code.co_name if "<locals>" in code.co_qualname else code.co_qualname
