"""Real faults, played on a rank of a running job: what a drill does to see whether each one is noticed.

Each function of `FAULTS` runs inside the rank that is to fail, after one of its updates. It arms the fault, or is the
fault. A fault is played once in a run: before it strikes, the rank leaves RUN/drill/<n>.json, and later attempts
find that file. What goes unnoticed for `GIVEN_UP_S` is ended from inside, so that a drill always ends.

>>> [name for name, fault in FAULTS.items() if fault.cls == "hang"]
['stop', 'skipped_collective', 'endless_loop', 'hanging_loader']

A drill: which fault strikes which rank when, and how the incidents of the run answer to that.

The run plays one fault per attempt (`headway.fault.torch_drill`); each is to be seen, with its class and,
where it has one, its rank. An incident in an attempt without a fault is a false alarm.

>>> schedule(["kill", "stop"], world=4, seed=1) == schedule(["kill", "stop"], world=4, seed=1)
True
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from headway.core.errors import InputError
from headway.core.rng import stream
from headway.core.tables import pick
from headway.fault.remedies import InjectParameters
from headway.runtime.calls.patches import replace_attribute
from headway.runtime.in_rank.remedy import Applied, Context
from headway.trace.recording.incident import Incident

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

    needs: str = ""
    """What of the job it strikes, where not every job has that."""


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
    if "headway.checkpoint.engine" in sys.modules:
        replace_attribute("headway.checkpoint.engine:Checkpointer.save", full)


def new_code(struck: Struck) -> None:
    """Raise what a mistake in new code raises, on every rank."""
    struck()
    raise AttributeError("'NoneType' object has no attribute 'shape' (raised by the drill, as new code may)")


FAULTS: dict[str, InjectedFault] = {
    "kill": InjectedFault(kill, "infra", True),
    "stop": InjectedFault(stop, "hang", True),
    "skipped_collective": InjectedFault(skipped_collective, "hang", True, needs="a collective of several ranks"),
    "endless_loop": InjectedFault(endless_loop, "hang", True),
    "segfault": InjectedFault(segfault, "infra", True),
    "nan": InjectedFault(nan, "user", True, needs="an optimizer with parameters"),
    "hanging_loader": InjectedFault(hanging_loader, "hang", True, needs="batches that a DataLoader reads"),
    "disk_full": InjectedFault(
        disk_full, "infra", False, everywhere=True, needs="checkpoints by torch.save or headway.Checkpointer"
    ),
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


def marks(folder: Path) -> list[dict[str, object]]:
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
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            output.flush()
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


# A drill: which fault strikes which rank when, and how the incidents of the run answer to that.

FIRST_STEP = 12
"""Earliest step of an attempt that a fault follows: until then steps compile, allocate and connect."""

APART = 6
"""Steps by which each fault comes later than the one before: a job that saves nothing makes progress all the same, and
is not stopped for making none."""


NOTHING_TO_STRIKE = "the job has nothing that it could strike"
"""Why a fault whose step was reached was not played."""


def schedule(faults: Sequence[str], *, world: int, seed: int) -> list[tuple[str, int, int]]:
    """Return (fault, rank, step of its attempt) for each fault, in the order given. Raises `InputError` on a name."""
    for name in faults:
        pick(FAULTS, name, "fault")
    if not faults or len({*faults}) < len(faults):
        raise InputError(f"the faults are {', '.join(faults) or 'none'}; name each one once, such as kill,stop.")
    draws = stream(seed, "drill")
    return [
        (name, int(draws.integers(world)), FIRST_STEP + APART * index + int(draws.integers(APART)))
        for index, name in enumerate(faults)
    ]


def not_struck(name: str) -> str:
    """Return why the fault `name` found nothing in its time, and what it needs."""
    needs = FAULTS[name].needs
    return f"{NOTHING_TO_STRIKE}: it needs {needs}" if needs else NOTHING_TO_STRIKE


def score(
    faults: Sequence[str], marks: Sequence[Mapping[str, Any]], incidents: Sequence[Incident], *, steps: int
) -> tuple[list[dict[str, object]], int]:
    """Return a row for each fault, and the number of false alarms.

    `marks` are what the ranks noted before each fault struck. A fault without one was never reached: the run ended
    after `steps` steps of its last attempt. One whose `injected_ns` is None found nothing to strike, such as a job
    without a loader. Neither was played: `ok` is None, and `not_played` says why.
    """
    rows = []
    for index, name in enumerate(faults):
        mark = marks[index] if index < len(marks) else None
        why = f"the run ended at step {steps} before it" if mark is None else not_struck(name)
        rows.append(_row(name, mark, incidents, why))
    played = {mark["attempt"] for mark in marks}
    return rows, sum(one.attempt not in played for one in incidents)


def _row(name: str, mark: Mapping[str, Any] | None, incidents: Sequence[Incident], why: str) -> dict[str, Any]:
    fault = FAULTS[name]
    at_ns = mark["injected_ns"] if mark is not None else None
    row: dict[str, Any] = {
        "name": name, "rank": mark["rank"] if mark is not None and fault.blames else None, "injected_ns": at_ns,
        "detected_ns": None, "class": None, "ranks": [], "action": None, "recover_s": None,
        "ok": None if at_ns is None else False, "not_played": why if at_ns is None else None,
    }  # fmt: skip
    if mark is None or at_ns is None:
        return row
    found = next((one for one in incidents if one.attempt == mark["attempt"] and one.detected_ns >= at_ns), None)
    if found is None or f"exit code {GIVEN_UP_CODE}" in found.evidence:
        return row
    blamed = found.suspects.ranks
    row |= {
        "detected_ns": found.detected_ns, "class": found.cls, "ranks": blamed, "action": found.action,
        "recover_s": found.downtime_s, "ok": found.cls == fault.cls and (not fault.blames or blamed == [mark["rank"]]),
    }  # fmt: skip
    return row
