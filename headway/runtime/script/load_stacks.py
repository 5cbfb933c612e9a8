"""Which lines loads and forwards are spent in: of datasets, transforms and collate functions, and of Python loops.

The thread that samples the gaps of the script (`gap_stacks`) looks ten times a second whether the training thread is in
a load of a loader without workers, and takes its stack where it is. Of the frames below the load the innermost line of
the script owns the sample, with what it calls there. In a library's dataset the first function behind it owns it, and
of transforms that call each other the single one.

    loop -> next(loader) -> fetch -> Pictures.__getitem__ -> Compose.__call__ -> Resize.forward -> resize
                                     line of the script                          what is named: Resize.forward

Between the begin of a forward and that of its backward it looks whether a line of the script is in a loop, beyond
those that the update is in, and whether what it calls there is a layer:

    loop over batches -> forward -> for t in range(n): h = cell(x[t], h)      in a loop, calls a layer
                      -> loss    -> for i in range(n): total = total + f(z[i])     in a loop, calls operators

Standard library only: it runs while the script does.

>>> LoadStacks().report(), LoopStacks().report()
([], [])
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType

from headway.runtime.script.gap_stacks import (
    CLOSED,
    MOST_LINES,
    MOST_PLACES,
    OWN,
    TORCH,
    GapStacks,
    Place,
    WaitStacks,
    callee,
    is_ours,
    is_scripts,
    line_of,
    loops_of,
)

LOADS = ("fetch", "measured")
"""Functions of `PROBE` around a load."""

PROBE = os.path.join(OWN, "runtime", "calls", "probe_input.py")

FORWARD = os.path.join(OWN, "runtime", "calls", "probe_model.py")
"""What stands around calls of models."""

LAYER = os.path.join("torch", "nn", "modules", "module.py")

PASSING = ("__call__", "_call_impl", "_wrapped_call_impl", "forward")
"""Functions that only call another one, where their class is one of `CONTAINERS`."""

CONTAINERS = ("Compose", "Module", "Sequential", "StandardTransform", "_LazyModule")

DEEPEST = 64
"""Frames that are looked at, the innermost first."""


@dataclass(slots=True)
class LoadStacks:
    """Where the training thread was seen in its loads."""

    _seen: dict[tuple[int, Place], list[int]] = field(default_factory=dict)

    def count(self, frame: FrameType | None, ns: int, loader: int) -> None:
        """Count `ns` for the line that the stack of `frame` is at, inside a load of the loader of group `loader`."""
        line = line_in_load(frame)
        if line is not None and (len(self._seen) < MOST_PLACES or (loader, line) in self._seen):
            entry = self._seen.setdefault((loader, line), [0, 0])
            entry[0] += ns
            entry[1] += 1

    def report(self) -> list[dict[str, str | int]]:
        """Return the lines that took longest: {"line", "function", "ns", "count", "loader"} each."""
        longest = sorted(self._seen.copy().items(), key=lambda entry: -entry[1][0])
        return [
            {"line": line_of(code, line), "function": name, "ns": ns, "count": count, "loader": loader}
            for (loader, (code, line, name)), (ns, count) in longest[:MOST_LINES]
        ]


@dataclass(slots=True)
class LoopStacks:
    """Where the training thread was seen in loops of the script, in forwards and losses."""

    _seen: dict[tuple[Place | None, bool], list[int]] = field(default_factory=dict)

    def count(self, frame: FrameType | None, ns: int, gap: GapStacks) -> None:
        """Count `ns` for the loop that the stack of `frame` is in, or for none, where it is in a forward or a loss."""
        frames: list[FrameType] = []
        while frame is not None and gap.updates_at(frame) is None:
            if is_ours(frame.f_code) and (not frames or frame.f_code.co_filename != FORWARD):
                return  # a backward, an update, a load; or headway works for itself
            frames.append(frame)
            frame = frame.f_back
        if frame is None or gap.open[0] != CLOSED:
            return
        index = next(
            (index for index, inner in enumerate(frames) if is_scripts(inner.f_code.co_filename) and _depth(inner)), -1
        )
        if index < 0 and _depth(frame) > _depth(frame, gap.updates_at(frame)):
            index = len(frames)
        key = None
        if index >= 0:
            loop = [*frames, frame][index]
            inner_codes = (inner.f_code for inner in frames[:index][::-1])
            called = next(
                (code for code in inner_codes if not (is_ours(code) or code.co_filename.endswith(LAYER))), None
            )
            name = _name(called) if called is not None else callee(loop.f_code, loop.f_lasti)
            key = loop.f_code, loop.f_lineno, name
        calls_layer = any(inner.f_code.co_filename.endswith(LAYER) for inner in frames[:index] if index > 0)
        if len(self._seen) < MOST_PLACES or (key, calls_layer) in self._seen:
            entry = self._seen.setdefault((key, calls_layer), [0, 0])
            entry[0] += ns
            entry[1] += 1

    def report(self) -> list[dict[str, str | int]]:
        """Return the loops that took longest: {"line", "function", "ns", "count", "calls_layer"} each.

        What is in no loop has the line ''.
        """
        longest = sorted(self._seen.copy().items(), key=lambda entry: -entry[1][0])
        return [
            {"line": "" if key is None else line_of(*key[:2]), "function": "" if key is None else key[2],
             "ns": ns, "count": count, "calls_layer": calls_layer}
            for (key, calls_layer), (ns, count) in longest[:MOST_LINES]
        ]  # fmt: skip


@dataclass(slots=True)
class StackLooks:
    """All that ten looks a second at the stack of the training thread tell."""

    loads: LoadStacks = field(default_factory=LoadStacks)
    loops: LoopStacks = field(default_factory=LoopStacks)
    waits: WaitStacks = field(default_factory=WaitStacks)
    _looks: int = 0
    _profiled: int = 0

    @property
    def profiled(self) -> float:
        """Share of the looks at which a profiler of torch's was on."""
        return self._profiled / max(self._looks, 1)

    def of(
        self, trainer: list[int], fetching: list[int], gap: GapStacks, *, on_device: bool
    ) -> Callable[[FrameType | None, int, float], None]:
        """Return what `GapStacks.follow` calls with a stack of the thread `trainer`.

        `fetching` says whether it is in a load, and of which loader. `on_device`, a host that launches ahead waits for
        its device, and its own time in forwards tells nothing.
        """

        def look(frame: FrameType | None, ns: int, late_s: float) -> None:
            thread, loader = fetching
            self._looks += 1
            self._profiled += bool(getattr(sys.modules.get("torch.autograd.profiler"), "_is_profiler_enabled", False))
            if thread and thread == trainer[0]:
                self.loads.count(frame, ns, loader)
            elif on_device:
                self.waits.look(frame, ns, late_s)
            elif gap.open[0] == CLOSED:
                self.loops.count(frame, ns, gap)

        return look

    def tables(self) -> tuple[tuple[str, list[dict[str, str | int]]], ...]:
        """Return the lines under the names that run.json gives them."""
        return ("loads", self.loads.report()), ("loops", self.loops.report()), ("waits", self.waits.report())


def _depth(frame: FrameType, offset: int | None = None) -> int:
    """Return how many loops of its function a frame is in, at its present instruction or at another one."""
    moment = frame.f_lasti if offset is None else offset
    return sum(begin <= moment <= end for begin, end in loops_of(frame.f_code))


def line_in_load(frame: FrameType | None) -> Place | None:
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
    of_script = (index for index, inner in enumerate(frames) if is_scripts(inner.f_code.co_filename))
    index = next(of_script, len(frames) - 1)
    if index < 0:
        return None
    inside = next((inner for inner in frames[:index][::-1] if not _passes(inner.f_code)), None)
    name = _name(inside.f_code) if inside is not None else callee(frames[index].f_code, frames[index].f_lasti)
    if inside is None and not is_scripts(frames[index].f_code.co_filename):
        name = name or _name(frames[index].f_code)
    return frames[index].f_code, frames[index].f_lineno, name


def _passes(code: CodeType) -> bool:
    owner, _, function = code.co_qualname.rpartition(".")
    return function in PASSING and owner in CONTAINERS


def _name(code: CodeType) -> str:
    """Return what a function is called, with its class: 'Resize.forward'."""
    return code.co_name if "<locals>" in code.co_qualname else code.co_qualname
