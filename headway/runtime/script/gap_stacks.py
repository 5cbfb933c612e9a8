r"""What the script does between its calls of torch: samples of the training thread's stack, only then.

There are two such gaps: from an update to the next forward, and from a backward to the update. A thread that the script
does not see looks a hundred times a second at most whether the training thread is in one of them (one flag, set and
cleared on the way), and only then takes its stack. The loop is the deepest frame that the stack
shares with that of an update; its line, and the function called there, own the sample. Where a probe owns the time
already (a wait in next(loader), a save), or headway works for itself, the sample goes. While gaps are short, and once
much was seen, it looks ten times a second; each sample counts for the time since the look before, so that the estimates
stay unbiased.

>>> gap = GapStacks()
>>> gap.report()
[]

Lines of the script: who called, and whether what one line makes is used by another. Standard library only.

>>> code = compile("x = load()\ny = x + 1\nmodel(y)\nsave(1)", "train.py", "exec")
>>> feeds(code, 1, 3), feeds(code, 1, 4), line_of(code, 3)
(True, False, 'train.py:3')

In how many loops a call stands, over the whole stack: tells a critic's inner loop from the loop around it.

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
import functools
import itertools
import os
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import NamedTuple, TypeVar

from headway.core.machine.hidden_thread import HiddenThread
from headway.runtime.script.run_delay import open_schedstat, read_delay
from headway.trace.events.vocabulary import BEHIND_BACKWARD, BEHIND_UPDATE, CLOSED

# Lines of the script: who called, and whether what one line makes is used by another. Standard library only.

LIBRARIES = tuple({sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "purelib", "platlib")})
"""Folders of what the script did not bring itself."""

OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
"""Folder of this package."""

SHARED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Folders of packages of another Python that an environment includes."""

DEMO = os.path.join(OWN, "verbs", "train.py")
"""The script of the demo: a script like any other."""

TORCH = os.sep + "torch" + os.sep


def is_ours(code: CodeType) -> bool:
    """Say whether code belongs to this package, and is no script."""
    return code.co_filename.startswith(OWN) and not code.co_filename.startswith(DEMO)


@functools.lru_cache(maxsize=4096)
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
    rows = list[tuple[CodeType, int]]()
    while frame is not None:
        rows.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return script_line(rows)


def script_line(rows: Sequence[tuple[CodeType, int]]) -> str:
    """Return the same of a stack's codes and lines, the innermost first."""
    fallback = ""
    for code, line in rows:
        file = code.co_filename
        if not is_ours(code) and not file.startswith("<frozen"):
            if not _in_library(file):
                return line_of(code, line)
            if not fallback and TORCH not in file:
                fallback = line_of(code, line)
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


PERIOD_S, RELAXED_S = 0.01, 0.1
"""Seconds between two looks; the second where the first ones found little, or enough."""

EARLY, EARLY_S = 200, 0.025
"""First looks at loads, forwards and waits, and seconds between two of them: jobs of seconds have lines, too."""

LOOKS = 64
"""Looks after which it is decided anew how often to look."""

ENOUGH = 2000
"""Samples after which ten looks a second do."""

FEW = 4
"""Samples that count in `LOOKS` looks, below which looks become rare: each takes the interpreter from the training."""

MOST_LINES = 20
"""Lines that are reported."""

MOST_PLACES = 1024
"""Different places that are counted."""

WRAPPERS = ("inner", "wrapper", "wrapped", "decorate_context")
"""Names of functions around another one, as torch's updates have: they say nothing of what the line calls."""

UNTIMED = ("fsync",)
"""Functions of this package around a call of the script whose time no probe owns."""


class StackRow(NamedTuple):
    """A frame of a stack, without what it holds: nothing of the script's lives longer for being looked at."""

    code: CodeType
    offset: int
    """Of the instruction that it is at."""
    line: int
    number: int
    """`id` of the frame."""


MOST_ROWS = 500
"""Frames of a stack that are read: what recurses deeper is not looked through."""

Stack = Sequence[StackRow]
"""The innermost frame first."""


def stack_of(thread: int) -> Stack:
    """Return the stack of a thread; empty where it has ended.

    >>> stack_of(threading.get_ident())[0].code.co_name
    'stack_of'
    """
    frame, rows = sys._current_frames().get(thread), list[StackRow]()
    while frame is not None and len(rows) < MOST_ROWS:
        rows.append(StackRow(frame.f_code, frame.f_lasti, frame.f_lineno, id(frame)))
        frame = frame.f_back
    return rows


GOLDEN = 0.6180339887
"""Multiples of it, without their whole parts, lie evenly and never in step with anything."""

AT_ONCE_S = 0.0003
"""A look that comes so late at most did not wait for the interpreter's lock."""


def chosen_by_the_lock(late_s: float) -> bool:
    """Whether a look that came so late tells where the thread let the interpreter's lock go, not where it was.

        Python code of 4 ms, then an operator      a look that is due in the code comes in the operator

    One that waited for Python's whole switch interval made the thread let go, in the midst of its code.

    >>> chosen_by_the_lock(0.0), chosen_by_the_lock(0.002), chosen_by_the_lock(1.0)
    (False, True, False)
    """
    return AT_ONCE_S < late_s < sys.getswitchinterval()


Key = TypeVar("Key")


def add_sample(counts: dict[Key, list[int]], key: Key, ns: int) -> bool:
    """Count a sample, and `ns`, for what it fell on; False where as many different ones as are counted are there."""
    if key not in counts and len(counts) >= MOST_PLACES:
        return False
    entry = counts.setdefault(key, [0, 0])
    entry[0] += ns
    entry[1] += 1
    return True


Place = tuple[CodeType, int, str]
"""Code of the loop, its line, name of the function called there ('' for none of Python's)."""


@dataclass(slots=True)
class GapStacks:
    """The gap of this process and what was seen in it; the lists are bound by the probes and changed in place."""

    open: list[int] = field(default_factory=lambda: [CLOSED])
    """[1] Whether an update has ended and no forward has begun since, or a backward and no update."""

    asks: list[bool] = field(default_factory=lambda: [False])
    """[1] Whether the next update is to note the frames of its stack."""

    asks_forward: list[bool] = field(default_factory=lambda: [False])
    """[1] Whether the next forward is to note the line of the loop that it is called from."""

    resumed: list[int] = field(default_factory=lambda: [0])
    """[1] When headway's own work on the training thread ended last: no sample counts for the time before.

    That work may hold the interpreter, so that nobody looks while it goes on.
    """

    write: Callable[[], None] | None = None
    """Writes the tables; called on the training thread when much has come."""

    _trainer: list[int] = field(default_factory=lambda: [0])
    _seen: dict[int, dict[Place, list[int]]] = field(default_factory=lambda: {BEHIND_UPDATE: {}, BEHIND_BACKWARD: {}})
    _in_loops: dict[tuple[Place, CodeType, int], list[int]] = field(default_factory=dict)
    """The same of samples in a loop inside of the training loop's step, with its code and line."""
    _loop: dict[int, tuple[CodeType, int]] = field(default_factory=dict)
    _forwards: dict[CodeType, int] = field(default_factory=dict)
    _samples: int = 0
    _write_at: int = 32
    _stop: threading.Event | None = None
    _look: Callable[[Stack, int, float], None] | None = None

    def follow(
        self, trainer: list[int], write: Callable[[], None], look: Callable[[Stack, int, float], None] | None
    ) -> None:
        """Begin to look at the thread whose identifier is in `trainer`.

        `look` is called ten times a second, the first `EARLY` times more often, gap or not, with the stack, ns since
        the call before, and by how many seconds it comes late.
        """
        if self._stop is None:
            self._trainer, self.write, self._stop, self._look = trainer, write, threading.Event(), look
            self.asks[0] = True
            stop = self._stop
            HiddenThread(lambda: self._run(stop), name="headway-gap").start()

    def stop(self) -> None:
        """Look no more."""
        if self._stop is not None:
            self._stop.set()

    def note_loop(self) -> None:
        """Note the frames below an update, or a backward, of the training thread, which calls this."""
        self.asks[0] = False
        frame: FrameType | None = sys._getframe(1)
        found: dict[int, tuple[CodeType, int]] = {}
        while frame is not None:
            found[id(frame)] = frame.f_code, frame.f_lasti  # a frame itself would keep everything in it alive
            frame = frame.f_back
        self._loop = found
        if self._samples >= self._write_at and self.write is not None:
            self._write_at = 2 * self._samples
            self.write()

    def note_forward(self) -> None:
        """Note the line of the loop from which a forward is called, on the training thread."""
        self.asks_forward[0] = False
        loop = self._shared(sys._getframe(1))[0]
        if loop is not None:
            self._forwards[loop.f_code] = loop.f_lineno

    def tables(self) -> tuple[tuple[str, list[dict[str, object]]], ...]:
        """Return the lines of both gaps, as `report` has them, under the names that run.json gives them."""
        return ("script", self.report()), ("gradients", self.report(BEHIND_BACKWARD))

    def report(self, gap: int = BEHIND_UPDATE) -> list[dict[str, object]]:
        """Return the lines that took most time: {"line", "function", "ns", "count", "feeds_forward", "loop"} each.

        `loop` is the line where most of it lay in a loop inside of the step; '' where most lay in none.
        """
        seen = sorted(self._seen[gap].copy().items(), key=lambda entry: -entry[1][0])
        in_loops = dict[Place, list[tuple[int, str]]]()
        for (place, code, line), (ns, _) in self._in_loops.copy().items():
            in_loops.setdefault(place, []).append((ns, line_of(code, line)))
        return [
            {
                "line": line_of(code, line),
                "function": function,
                "ns": ns,
                "count": count,
                "feeds_forward": function != "__del__"  # what ends there makes nothing, whatever its line does
                and code in self._forwards
                and feeds(code, line, self._forwards[code]),
                "loop": max(lines)[1] if lines and 2 * sum(looped_ns for looped_ns, _ in lines) >= ns else "",
            }
            for (code, line, function), (ns, count) in seen[:MOST_LINES]
            for lines in [in_loops.get((code, line, function), [])]
        ]

    def updates_at(self, number: int, code: CodeType) -> int | None:
        """Return the instruction at which a frame of the training loop called the update; None for another frame."""
        updates, offset = self._loop.get(number, (None, -1))
        return offset if updates is code else None

    def _run(self, stop: threading.Event) -> None:
        period, looks, hits, owed_ns, last = PERIOD_S, 0, 0, 0, time.perf_counter_ns()
        looked, count, schedstat = last, 0, open_schedstat()
        waited_ns = read_delay(schedstat)
        for phase in itertools.count():
            apart_s = EARLY_S if self._look is not None and count < EARLY else RELAXED_S
            pace = min(period, apart_s)
            pause_s = pace * (0.75 + phase * GOLDEN % 0.5)  # steps of 10 ms would be seen at one point of them alone
            asleep_ns = time.perf_counter_ns()  # the look before took time of its own
            if stop.wait(pause_s):
                return
            moment = time.perf_counter_ns()
            before_ns, waited_ns = waited_ns, read_delay(schedstat)
            late_s = (moment - asleep_ns - waited_ns + before_ns) / 1e9 - pause_s  # for the lock, not for a core
            if self._look is not None and (pace == apart_s or moment - looked >= 1e9 * apart_s):
                self._look(stack_of(self._trainer[0]), moment - looked, late_s)
                looked, count = moment, count + 1
            owed_ns += min(max(moment - max(last, self.resumed[0]), 0), int(2e9 * pace))
            if self.open[0] and not chosen_by_the_lock(late_s):
                hits += self._sample(min(owed_ns, int(4e9 * pace)))
                owed_ns = 0
            elif not self.open[0]:
                owed_ns = 0
            last = moment
            looks += 1
            if looks == LOOKS:
                period = RELAXED_S if hits < FEW or self._samples >= ENOUGH else PERIOD_S
                looks = hits = 0
            if looks % (LOOKS // 2 if period == PERIOD_S else FEW) == 0:
                self.asks[0] = True  # the loop may have moved into another function

    def _sample(self, ns: int) -> bool:
        """Take the stack of the training thread, which counts for `ns`; returns whether the script's own code ran."""
        gap, frame = self.open[0], sys._current_frames().get(self._trainer[0])
        loop, below = self._shared(frame)
        if loop is None or loop.f_lineno is None or not gap or self.open[0] != gap:
            return False
        inner, outer = None, loops_around(loop.f_code, self.updates_at(id(loop), loop.f_code) or 0)
        while frame is not None and frame is not loop:
            if is_ours(frame.f_code) and frame.f_code.co_name not in UNTIMED:
                return False  # in a handler, a save, a wait that a probe times
            if inner is None and is_scripts(frame.f_code.co_filename) and loops_around(frame.f_code, frame.f_lasti):
                inner = frame.f_code, frame.f_lineno
            frame = frame.f_back
        if inner is None and len(loops_around(loop.f_code, loop.f_lasti)) > len(outer):
            inner = loop.f_code, loop.f_lineno
        called = below.f_code.co_name if below is not None else ""
        place = loop.f_code, loop.f_lineno, "" if called in WRAPPERS else called
        if add_sample(self._seen[gap], place, ns):
            self._samples += 1
            self.asks_forward[0] = True
            if inner is not None:
                add_sample(self._in_loops, (place, *inner), ns)
        return True

    def _shared(self, frame: FrameType | None) -> tuple[FrameType | None, FrameType | None]:
        """Return the deepest frame of a stack that is also one of an update's, and the frame called there.

        The cell of a notebook that trained has ended when a later one runs: that one's frame stands for the loop's.
        """
        frames: list[FrameType] = []
        while frame is not None and self.updates_at(id(frame), frame.f_code) is None:
            frames.append(frame)
            frame = frame.f_back
        if frame is None:
            return None, None
        frames.append(frame)
        cells = [k for k in range(len(frames) - 1) if runs_cells(frames[k + 1]) and not runs_cells(frames[k])]
        place = cells[-1] if cells else len(frames) - 1
        return frames[place], frames[place - 1] if place else None


_LOOPS: dict[CodeType, list[tuple[int, int]]] = {}
"""Code -> (first offset, offset of the jump back) of its loops."""


def loop_depth(frame: FrameType | None) -> int:
    """Return how many loops are under way around the present instruction of `frame` and of those that called it."""
    depth = 0
    while frame is not None:
        depth += sum(begin <= frame.f_lasti <= end for begin, end in loops_of(frame.f_code))
        frame = frame.f_back
    return depth


def loops_around(code: CodeType, offset: int) -> list[int]:
    """Return where the loops of a function begin that an instruction is in, the outermost first."""
    return [begin for begin, end in loops_of(code) if begin <= offset <= end]


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
