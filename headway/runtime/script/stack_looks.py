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

Of a line that calls a library which does not compute with torch, there or in a hook of a backward, that is noted:

    forward -> hook of a layer    -> np.percentile(output)      backward -> hook of a gradient -> np.histogram(gradient)
    loss    -> accuracy_score(targets, predictions)

Lines at which the script waits for its device: `loss.item()`, `float(loss)`, `outputs.cpu()`, `synchronize()`.

Nothing stands around these methods: torch.compile knows `item` by identity, and a function around it would break its
graphs. So the thread that samples stacks (`gap_stacks`) looks ten times a second which call of Python the training
thread is in. While `item` waits, the instruction of the innermost frames is that call; its bytecode says so, no file is
read. A look that came late found the interpreter's lock taken at its time: the thread was running Python, and waited
for nothing. It counts for no line, or lines that wait would take the time of all Python before them.

>>> code = compile("float(loss)", "train.py", "eval")
>>> [callee(code, step.offset) for step in dis.get_instructions(code) if step.opname == "CALL"]
['float']

Standard library only: it runs while the script does.

>>> LoadStacks().report(), LoopStacks().report()
([], [])
"""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType

from headway.runtime.script.gap_stacks import (
    MOST_LINES,
    OWN,
    TORCH,
    WRAPPERS,
    GapStacks,
    Place,
    Stack,
    add_sample,
    chosen_by_the_lock,
    is_ours,
    is_scripts,
    line_of,
    loops_around,
    script_line,
)
from headway.trace.events.vocabulary import CLOSED

LOADS = ("fetch", "measured")
"""Functions of `PROBE` around a load."""

PROBE = os.path.join(OWN, "runtime", "calls", "probe_input.py")

FORWARD = os.path.join(OWN, "runtime", "calls", "probe_model.py")
"""What stands around calls of models."""

BACKWARD = os.path.join(OWN, "runtime", "recorder", "timers.py")
"""What stands around a backward."""

FOREIGN = ("numpy", "scipy", "sklearn", "pandas", "matplotlib", "PIL", "cv2", "skimage", "librosa", "networkx")
"""Packages that compute without torch: what they do in a forward or a backward is no part of the model's work."""

LAYER = os.path.join("torch", "nn", "modules", "module.py")

PASSING = ("__call__", "_call_impl", "_wrapped_call_impl", "forward")
"""Functions that only call another one, where their class is one of `CONTAINERS`."""

CONTAINERS = ("Compose", "Module", "Sequential", "StandardTransform", "_LazyModule")


PROMPT = 0.5
"""Share of the looks at a line that came in time, from which on it is named: where the lock is free each ms, 0.3 do."""


@dataclass(slots=True)
class LoadStacks:
    """Where the training thread was seen in its loads."""

    _seen: dict[tuple[int, Place], list[int]] = field(default_factory=dict)
    _prompt: dict[tuple[int, Place], list[int]] = field(default_factory=dict)
    """The same of looks that the interpreter's lock did not choose."""

    def count(self, stack: Stack, ns: int, loader: int, late_s: float) -> None:
        """Count `ns` for the line that a stack is at, inside a load of the loader of group `loader`."""
        line = line_in_load(stack)
        if line is not None and add_sample(self._seen, (loader, line), ns) and not chosen_by_the_lock(late_s):
            add_sample(self._prompt, (loader, line), ns)

    def report(self) -> list[dict[str, str | int]]:
        """Return the lines that took longest: {"line", "function", "ns", "count", "loader"} each.

        A line that most looks came to late has little of the time that they stand for, as `sleep(0)` behind a loop of
        Python: that lies somewhere before it, under the line ''.
        """
        total: dict[tuple[int, str, str], list[int]] = {}
        for (loader, place), (ns, count) in self._seen.copy().items():
            _, prompt = self._prompt.get((loader, place), (0, 0))
            code, line, name = place
            named = (line_of(code, line), name) if PROMPT * count <= prompt else ("", "")
            entry = total.setdefault((loader, *named), [0, 0])
            entry[0] += ns
            entry[1] += count
        longest = sorted(total.items(), key=lambda entry: -entry[1][0])
        return [
            {"line": line, "function": name, "ns": ns, "count": count, "loader": loader}
            for (loader, line, name), (ns, count) in longest[:MOST_LINES]
        ]


@dataclass(slots=True)
class LoopStacks:
    """Where the training thread was seen in loops of the script, in forwards and losses."""

    _seen: dict[tuple[Place | None, int, bool, str], list[int]] = field(default_factory=dict)

    def count(self, stack: Stack, ns: int, gap: GapStacks) -> None:
        """Count `ns` for the loop that a stack is in, or for none, where it is in a forward or a loss.

        What calls a library of `FOREIGN` counts as that, also in a backward.
        """
        size = next((index for index, row in enumerate(stack) if gap.updates_at(row.number, row.code) is not None), -1)
        if size < 0 or gap.open[0] != CLOSED:
            return
        inner, base = stack[:size], stack[size]
        foreign = foreign_line(stack[: size + 1])
        around = (FORWARD, BACKWARD) if foreign else FORWARD
        if any(is_ours(row.code) and not (depth and row.code.co_filename.startswith(around))
               for depth, row in enumerate(inner)):  # fmt: skip
            return  # a backward, an update, a load; or headway works for itself
        if foreign is not None:
            add_sample(self._seen, (foreign[0], -1, False, foreign[1]), ns)
            return
        outer = len(loops_around(base.code, gap.updates_at(base.number, base.code) or 0))
        loops = [
            (index, loops_around(row.code, row.offset))
            for index, row in enumerate(inner)
            if is_scripts(row.code.co_filename)
        ]
        loops.append((size, loops_around(base.code, base.offset)[outer:]))
        index, begins = next((found for found in loops if found[1]), (-1, [0]))
        key, calls_layer = None, False
        if index >= 0:
            loop, called = stack[index], [row.code for row in stack[:index][::-1]]
            calls_layer = any(code.co_filename.endswith(LAYER) for code in called)
            named = (_name(code) for code in called if not (is_ours(code) or code.co_filename.endswith(LAYER)))
            key = loop.code, loop.line, next(named, "") or callee(loop.code, loop.offset)
        add_sample(self._seen, (key, begins[0], calls_layer, ""), ns)

    def report(self) -> list[dict[str, str | int]]:
        """Return the loops that took longest: {"line", "function", "ns", "count", "calls_layer", "library"} each.

        `calls_layer` is true of all lines of a loop in which a layer was called. What is in no loop has the line ''.
        `library` is the package of `FOREIGN` that a line called, '' of a loop.
        """
        rows = self._seen.copy()
        layered = {(key[0], begin) for key, begin, calls_layer, _ in rows if key is not None and calls_layer}
        longest = sorted(rows.items(), key=lambda entry: -entry[1][0])
        return [
            {"line": "" if key is None else line_of(*key[:2]), "function": "" if key is None else key[2],
             "ns": ns, "count": count, "library": library,
             "calls_layer": key is not None and (key[0], begin) in layered}
            for (key, begin, _, library), (ns, count) in longest[:MOST_LINES]
        ]  # fmt: skip


def foreign_line(stack: Stack) -> tuple[Place, str] | None:
    """Return the line of the script that called a package of `FOREIGN`, with what it called, and the package's name."""
    library = ""
    for index, row in enumerate(stack):
        file = row.code.co_filename
        if is_scripts(file):
            named = (below.code.co_name for below in stack[:index][::-1] if below.code.co_name not in WRAPPERS)
            return ((row.code, row.line, next(named, "")), library) if library else None
        library = next((name for name in FOREIGN if f"packages{os.sep}{name}{os.sep}" in file), library)
    return None


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

    def look(self, stack: Stack, ns: int, late_s: float) -> None:
        """Count `ns` for the line of the script whose call waits, if one does in a stack."""
        waits = None
        for depth, row in enumerate(stack[:DEEPEST] if late_s < LATE_S else ()):
            if WAITING.intersection(row.code.co_names):
                name = callee(row.code, row.offset)
                if name in WAITING:
                    rows = [(row.code, row.line) for row in stack[depth:]]
                    waits = script_line(rows), name  # the outermost one: `item` may call `synchronize`
        if waits is not None:
            add_sample(self._seen, waits, ns)

    def report(self) -> list[dict[str, str | int]]:
        """Return the lines that waited longest: {"line", "function", "ns", "count"} each."""
        longest = sorted(self._seen.copy().items(), key=lambda entry: -entry[1][0])
        return [
            {"line": line, "function": name, "ns": ns, "count": count}
            for (line, name), (ns, count) in longest[:MOST_LINES]
        ]


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
    ) -> Callable[[Stack, int, float], None]:
        """Return what `GapStacks.follow` calls with a stack of the thread `trainer`.

        `fetching` says whether it is in a load, and of which loader; `on_device`, the thread may wait for a device.
        """

        def look(stack: Stack, ns: int, late_s: float) -> None:
            thread, loader = fetching
            self._looks += 1
            self._profiled += bool(getattr(sys.modules.get("torch.autograd.profiler"), "_is_profiler_enabled", False))
            if thread and thread == trainer[0]:
                self.loads.count(stack, ns, loader, late_s)
                return
            if on_device:
                self.waits.look(stack, ns, late_s)
            self.loops.count(stack, ns, gap)

        return look

    def tables(self) -> tuple[tuple[str, list[dict[str, str | int]]], ...]:
        """Return the lines under the names that run.json gives them."""
        return ("loads", self.loads.report()), ("python_loops", self.loops.report()), ("waits", self.waits.report())


def lines_in_loops(frame: FrameType | None) -> Iterator[str]:
    """Yield the lines of the script in whose loops a frame is called, the innermost first."""
    while frame is not None:
        if is_scripts(frame.f_code.co_filename) and loops_around(frame.f_code, frame.f_lasti):
            yield line_of(frame.f_code, frame.f_lineno)
        frame = frame.f_back


def line_in_load(stack: Stack) -> Place | None:
    """Return the line of a load that a stack is at, and what that calls; None outside of loads."""
    codes = (row.code for row in stack)
    size = next((n for n, code in enumerate(codes) if code.co_filename.startswith(PROBE) and code.co_name in LOADS), 0)
    if not size or is_ours(stack[0].code):  # no load; or headway works for itself
        return None
    rows = [row for row in stack[:size] if not is_ours(row.code)]
    rows = [row for row in rows if TORCH + "utils" + os.sep + "data" not in row.code.co_filename] or rows
    of_script = (index for index, row in enumerate(rows) if is_scripts(row.code.co_filename))
    index = next(of_script, len(rows) - 1)
    code, offset, line, _ = rows[index]
    name = next((_name(row.code) for row in rows[:index][::-1] if not _passes(row.code)), "") or callee(code, offset)
    return code, line, name or (_name(code) if not is_scripts(code.co_filename) else "")


def _passes(code: CodeType) -> bool:
    owner, _, function = code.co_qualname.rpartition(".")
    return function in PASSING and owner in CONTAINERS


def _name(code: CodeType) -> str:
    """Return what a function is called, with its class: 'Resize.forward'."""
    return code.co_name if "<locals>" in code.co_qualname else code.co_qualname
