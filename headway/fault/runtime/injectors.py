"""Real faults, played on a rank of a running job: what a drill does to see whether each one is noticed.

Each function of `FAULTS` runs inside the rank that is to fail, after one of its updates. It arms the fault, or is the
fault. A fault is played once in a run: before it strikes, the rank leaves RUN/drill/<n>.json, and later attempts
find that file. What goes unnoticed for `GIVEN_UP_S` is ended from inside, so that a drill always ends.

>>> [name for name, fault in FAULTS.items() if fault.cls == "hang"]
['stop', 'skipped_collective', 'endless_loop', 'hanging_loader']
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from headway.core.tables import pick
from headway.fault.remedies import InjectParameters
from headway.runtime.calls.patches import replace_attribute
from headway.runtime.in_rank.remedy import Applied, Context

NAME = "fault.inject"
"""As a plan names it; only the plan of a drill does."""

FOLDER = "drill"
"""Of a run folder: what was played."""

GIVEN_UP_S = 20.0
"""Seconds after which a fault that nobody has acted on is given up: the ranks then end themselves."""

GIVEN_UP_CODE = 86
"""What they exit with."""

CALM_STEPS = 20
"""Steps after the last fault; then the drill is over."""

LEAVE_S = 0.5
"""How long a rank waits before it ends the drill: until its peers have what they need of it."""

FULL = "/dev/full"
"""A device of the kernel's without room."""

Struck = Callable[[], None]
"""Notes that the fault strikes now."""


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """One kind of fault."""

    play: Callable[[Struck], None]
    """Arms it, or is it: called in the rank after an update of its first optimizer."""

    cls: str
    """The exit class that it must be given."""

    blames: bool
    """Whether the rank that it strikes can be told from the others."""

    everywhere: bool = False
    """Whether all ranks play it: none in particular has it."""


def kill(struck: Struck) -> None:
    """SIGKILL, as the kernel ends a process for memory."""
    struck()
    os.kill(os.getpid(), signal.SIGKILL)


def stop(struck: Struck) -> None:
    """SIGSTOP: the process exists, and runs nothing."""
    struck()
    os.kill(os.getpid(), signal.SIGSTOP)


def skipped_collective(struck: Struck) -> None:
    """From now on this rank computes without its peers, as a branch on the rank does by mistake."""
    distributed = sys.modules["torch"].distributed
    struck()
    distributed.all_reduce = lambda *_, **__: None
    for module in gc.get_objects():
        if type(module).__name__ == "DistributedDataParallel":
            module.require_backward_grad_sync = False


def endless_loop(struck: Struck) -> None:
    """Compute for ever, holding the interpreter as pure Python code does."""
    struck()
    while True:
        pass


def segfault(struck: Struck) -> None:
    """Read address 0."""
    import ctypes

    struck()
    ctypes.string_at(0)


def nan(struck: Struck) -> None:
    """Make one number of a parameter NaN: the next loss is."""
    torch = sys.modules["torch"]
    for module in gc.get_objects():
        if issubclass(type(module), torch.nn.Module):  # isinstance asks objects for their class, which may warn
            parameter = next((one for one in module.parameters() if one.requires_grad), None)
            if parameter is not None:
                struck()
                parameter.data.view(-1)[0] = float("nan")
                return


def hanging_loader(struck: Struck) -> None:
    """The next batch never comes, as from a mount that does not answer."""

    def never(_original: Any) -> Any:
        def _next_data(_iterator: Any) -> NoReturn:
            struck()
            while True:
                time.sleep(3600.0)

        return _next_data

    for name in ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"):
        replace_attribute(f"torch.utils.data.dataloader:{name}._next_data", never)


def disk_full(struck: Struck) -> None:
    """The next save goes to /dev/full, where each write fails as on a full disk."""

    def elsewhere(original: Any) -> Any:
        def save(state: Any, _file: Any, *arguments: Any, **options: Any) -> None:
            struck()
            original(state, FULL, *arguments, **options)

        return save

    def full(_original: Any) -> Any:
        def save(*_: Any, **__: Any) -> None:
            struck()
            Path(FULL).write_bytes(b"0")

        return save

    replace_attribute("torch:save", elsewhere)
    if "headway.checkpoint.runtime.engine" in sys.modules:
        replace_attribute("headway.checkpoint.runtime.engine:Checkpointer.save", full)


def new_code(struck: Struck) -> None:
    """Raise what a mistake in new code raises, on every rank."""
    struck()
    raise AttributeError("'NoneType' object has no attribute 'shape' (raised by the drill, as new code may)")


FAULTS: dict[str, InjectedFault] = {
    "kill": InjectedFault(kill, "infra", True),
    "stop": InjectedFault(stop, "hang", True),
    "skipped_collective": InjectedFault(skipped_collective, "hang", True),
    "endless_loop": InjectedFault(endless_loop, "hang", True),
    "segfault": InjectedFault(segfault, "infra", True),
    "nan": InjectedFault(nan, "user", True),
    "hanging_loader": InjectedFault(hanging_loader, "hang", True),
    "disk_full": InjectedFault(disk_full, "infra", False, everywhere=True),
    "new_code": InjectedFault(new_code, "user", False, everywhere=True),
}
"""Fault -> how it is played, and what it must be taken for. Adding one is adding a line here."""


@dataclass(frozen=True, slots=True)
class Due:
    """A fault that a drill is to play."""

    name: str
    """Key of `FAULTS`."""

    rank: int
    """The rank that it strikes."""

    step: int
    """After this update of an attempt."""


def marks(folder: Path) -> list[dict[str, Any]]:
    """Return what was played so far, in order: name, rank, attempt, injected_ns; None where it found nothing to hit."""
    found = [path for path in folder.glob("*.json") if path.stem.isdecimal()]
    return [json.loads(path.read_text()) for path in sorted(found, key=lambda path: int(path.stem))]


class Player:
    """Plays what is due in this attempt on this rank."""

    def __init__(self, folder: Path, due: list[Due], rank: int, attempt: int) -> None:
        self._folder, self._rank, self._attempt = folder, rank, attempt
        self._number = len(marks(folder))  # no rank of this attempt has come to its first step yet
        self._due = due[self._number] if self._number < len(due) else None
        self._steps = 0
        self._optimizer: int | None = None

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """Count an update of the first optimizer; play what is due after it."""
        if self._optimizer is None:
            self._optimizer = id(optimizer)
        if id(optimizer) != self._optimizer:
            return
        self._steps += 1
        due = self._due
        if due is None:
            if self._steps == CALM_STEPS:
                _leave()
        elif self._steps == due.step:
            timer = threading.Timer(GIVEN_UP_S, self._give_up)
            timer.daemon = True
            timer.start()
            fault = FAULTS[due.name]
            if fault.everywhere or due.rank == self._rank:
                fault.play(self._strikes)

    def _strikes(self) -> None:
        self._mark(time.perf_counter_ns())

    def _mark(self, at_ns: int | None) -> None:
        """Write the file of this fault; where all ranks play it, that of the first one stays."""
        path = self._folder / f"{self._number}.json"
        name = self._due.name if self._due is not None else ""
        row = {"name": name, "rank": self._rank, "attempt": self._attempt, "injected_ns": at_ns}
        draft = self._folder / f".{self._number}-r{self._rank}"
        draft.write_text(json.dumps(row))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()

    def _give_up(self) -> None:
        """End this rank: the fault found nothing to strike, or nobody has acted on it."""
        self._mark(None)
        sys.stderr.write(f"the drill gives up: nobody acted on its fault within {GIVEN_UP_S:g} s\n")
        sys.stderr.flush()
        os._exit(GIVEN_UP_CODE)


def _leave() -> NoReturn:
    """End this rank well."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    time.sleep(LEAVE_S)
    os._exit(0)


def inject(parameters: InjectParameters, context: Context) -> Applied:
    """Install the remedy of a drill. Raises `InputError` on the name of a fault that there is not."""
    due = [Due(*one) for one in parameters.due]
    for one in due:
        pick(FAULTS, one.name, "fault")
    from torch.optim.optimizer import register_optimizer_step_post_hook

    folder = Path(context.run) / FOLDER
    folder.mkdir(exist_ok=True)
    player = Player(folder, due, context.rank, context.probes.recorder.attempt)
    handle = register_optimizer_step_post_hook(player.stepped)
    context.undos.append(handle.remove)
    return Applied(NAME, {"due": [one.name for one in due]})
