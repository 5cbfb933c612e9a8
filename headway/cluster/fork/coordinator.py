"""Real copies of one training script on devices of unlike speed: who does which batches of an epoch, and who is lost.

    coordinator   one process, without torch: deals batches, hears what was done, says what is averaged
    copy          the script under `headway run`, with the remedy `cluster.fork` in its rank (`apply.py`)

    epoch of 700 batches, speeds 4, 2, 1     copy 0  |0 ........ 399|     |
    in slots of `slot_s` seconds             copy 1  |400 .. 599|         |  average, weights 400, 200, 100
                                             copy 2  |600 . 699|          |

Batches are dealt as positions in the order that the script's own sampler gives, which is the same in all copies: each
batch of an epoch is done by one copy. What a copy was dealt and did not report (it was lost) is dealt again first. A
slot ends when all copies that are left have reported; then they load one average, weighted by the batches of each.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from headway.cluster.fork.slots import deal, slot_seconds
from headway.core.errors import HeadwayError, InputError
from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.core.files.private import private_folder, runtime_directory
from headway.core.machine.host import process_stat
from headway.core.wire.channel import Channel, Listener
from headway.core.wire.loop import ServiceLoop

NAME = "cluster.fork"

WHERE = "HEADWAY_FORK"
"""Variable of a copy's environment: its number, 1 for the first of all, and the coordinator's socket: "2:0:/path"."""

LAST_SHARE = 0.25
"""What would be left of an epoch for a slot shorter than this share of one is done in the slot before."""

LEAVE_S = 10.0
"""How long copies that are told why it is over may take to end."""

Span = tuple[int, int]
"""Positions of batches in the order of an epoch: first, and one past the last."""


class EpochBegins(msgspec.Struct, frozen=True, tag=True):
    """A copy begins to iterate over its training loader."""

    num_batches: int
    digests: dict[str, int]
    """Key of a tensor of the models -> checksum, in the first epoch: copies begin alike."""


class SlotEnds(msgspec.Struct, frozen=True, tag=True):
    """A copy has done what it was dealt, and its state lies in its file of the slot."""

    slot: int
    batches: int
    updates: int
    """Steps of optimizers."""
    seconds: float
    """From the first batch to the end of the last."""
    paid_s: float
    """Seconds of saving, and of loading the average before."""
    schedule: list[int]
    """Steps of each scheduler since the slot began."""
    order: int
    """Of the first batch's examples; 0: it has not drawn any."""
    generators: bytes
    """State of the random number generators."""


class CopyRefuses(msgspec.Struct, frozen=True, tag=True):
    """A copy finds that the script cannot run in copies."""

    reason: str


class SlotBegins(msgspec.Struct, frozen=True, tag=True):
    """What a copy is to load, and what it does next."""

    slot: int
    spans: list[Span]
    copies: list[int]
    """Whose states of the slot before are averaged; none: there is nothing to load."""
    weights: list[float]
    schedule: list[int]
    """Steps of each scheduler in the slot before, all copies together."""
    generators: bytes
    """For all copies where the epoch is over, so that the next one's order is the same."""
    is_over: bool
    """The epoch is; nothing is dealt."""
    is_first: bool
    """This copy writes what the script saves."""
    is_alone: bool
    """No other copy is left: there is nobody to leave a state for."""


Report = EpochBegins | SlotEnds
Message = Report | CopyRefuses


@dataclass(slots=True)
class Copy:
    """One copy of the script, on one device."""

    number: int
    """Of its device."""
    speed: float
    """Steps/s: given at first, then measured."""
    process: subprocess.Popen[bytes]
    channel: Channel | None = None
    report: Report | None = None
    """What it waits with."""
    spans: list[Span] = field(default_factory=list)
    """Dealt in the slot that goes on."""
    steps: int = 0
    busy_s: float = 0.0
    slots: int = 0
    lost: str = ""
    """Why it is no more."""


@dataclass(frozen=True, slots=True)
class ForkOutcome:
    """What came of a script that ran in copies."""

    steps: int
    """Batches trained on, all copies together, of those whose state was kept."""
    seconds: float
    """From the first deal to the last average."""
    steps_on: dict[int, int]
    """Device -> batches."""
    speeds: dict[int, float]
    """Device -> batches/s while it trained."""
    slots: int
    paid_s: float
    """Seconds that the slowest copy of each slot spent on saving, waiting for the average apart, and loading."""
    lost: dict[int, str]
    """Device of a copy that was lost -> why."""


class Fork:
    """A script in copies, from start to end. Close it: copies that are left are ended."""

    def __init__(
        self, script: Sequence[str], speeds: Mapping[int, float], folder: Path, *, slot_s: float = 0.0,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:  # fmt: skip
        """Start a copy of `script` per device of `speeds` [steps/s, > 0]; `slot_s` 0: by what a slot costs."""
        private_folder(folder)
        self._folder, self._slot_s, self._say = folder.resolve(), slot_s, say
        self._copies: dict[int, Copy] = {}
        self._undone: list[Span] = []
        self._num_batches = -1
        """Of the epoch that goes on; -1 between two."""
        self._slot, self._num_slots, self._steps, self._slot_paid_s, self._paid_s = 0, 0, 0, 0.0, 0.0
        self._lasted_s, self._began_s = 0.0, 0.0
        self._failure = ""
        with ExitStack() as opened:
            self._loop = opened.enter_context(ServiceLoop(patience_s=math.inf))
            path = runtime_directory() / f"fork-{os.getpid()}.sock"
            listener = opened.enter_context(closing(Listener(path, types=Message)))
            self._loop.listen(listener, self._hear)
            plan = self._folder / "plan.json"
            write_plan(PlanFile((Remedy(NAME, allow="lossy"),)), plan)
            opened.callback(self._end_all)
            for number, speed in speeds.items():
                self._start(number, speed, script, plan, path)
            self._opened = opened.pop_all()

    def run(self) -> ForkOutcome:
        """Wait until all copies have ended; raises `HeadwayError` where none did well, with the reason."""
        while any(copy.process.poll() is None for copy in self._copies.values()):
            self._loop.turn(1.0)
            if self._failure:
                break
        for copy in self._left():
            if copy.process.poll() is not None:
                self._ended(copy)
        if self._failure:
            raise HeadwayError(self._failure)
        if not self._num_slots:
            raise HeadwayError("the script trained on no batch of a torch DataLoader, which is what copies share.")
        return ForkOutcome(
            self._steps, self._lasted_s, {number: copy.steps for number, copy in self._copies.items()},
            {number: copy.steps / copy.busy_s if copy.busy_s else copy.speed for number, copy in self._copies.items()},
            self._num_slots, self._paid_s, {copy.number: copy.lost for copy in self._copies.values() if copy.lost},
        )  # fmt: skip

    def stop(self) -> None:
        """End `run` soon, with an error; any thread and signal handler may call it."""
        self._fail("it was asked to end, and so were all copies.")
        self._loop.ring()

    def close(self) -> None:
        """End what is left."""
        self._opened.close()

    def __enter__(self) -> Fork:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _start(self, number: int, speed: float, script: Sequence[str], plan: Path, path: Path) -> None:
        """Start one copy, with its output in a file."""
        folder = self._folder / f"copy{number}"
        private_folder(folder)
        environment = dict(os.environ) | {WHERE: f"{number}:{int(not self._copies)}:{path}"}
        if Path("/dev/nvidiactl").exists():
            visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            environment["CUDA_VISIBLE_DEVICES"] = visible[number] if number < len(visible) else str(number)
        options = ["--quiet", "--apply", str(plan), "--grace-s", f"{LEAVE_S / 3:g}", "--out", str(folder / "run")]
        with (folder / "out").open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "headway", "run", *options, "--", *script],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment,
            )  # fmt: skip
        copy = self._copies[number] = Copy(number, speed, process)
        self._loop.watch_process(process.pid, lambda: self._ended(copy))

    def _left(self) -> list[Copy]:
        return [copy for copy in self._copies.values() if not copy.lost]

    def _hear(self, channel: Channel, message: msgspec.Struct) -> msgspec.Struct | None:
        """Note what a copy reports; who is the last of all gets the slot on its way. Replies are sent there."""
        copy = next((copy for copy in self._left() if copy.channel is channel), None)
        if copy is None:  # the process of a rank is a descendant of its launcher
            copy = self._of_process(channel.peer.pid)
            copy.channel = channel
        if isinstance(message, CopyRefuses):
            self._fail(message.reason)
            return None
        assert isinstance(message, EpochBegins | SlotEnds), "the listener decodes nothing else"
        if isinstance(message, EpochBegins) and copy.spans:
            self._fail(f"copy {copy.number} left its loader before the end of an epoch. Copies share whole epochs.")
        copy.report = message
        self._go_on()
        return None

    def _of_process(self, pid: int | None) -> Copy:
        """Return the copy whose launcher is an ancestor of a process; raises `InputError`."""
        by_pid = {copy.process.pid: copy for copy in self._left()}
        while pid and pid > 1:
            if pid in by_pid:
                return by_pid[pid]
            try:
                pid = int(process_stat(pid)[1])
            except (OSError, ValueError):
                break
        raise InputError("no copy of this fork runs in that process. Start copies by: headway cluster fork.")

    def _ended(self, copy: Copy) -> None:
        """Note that a copy is gone; what it had not reported is dealt again, the others go on."""
        code = copy.process.wait() if copy.process.poll() is None else copy.process.returncode
        if copy.lost or self._failure or (code == 0 and self._num_batches < 0):
            copy.report = None
            self._go_on()  # the others may wait for its part in the next epoch
            return
        copy.lost = f"it ended with code {code} in slot {self._slot}: see {self._folder}/copy{copy.number}/out"
        self._say(f"copy {copy.number} is lost, the others do its share: {copy.lost}")
        self._undone = sorted([*copy.spans, *self._undone])
        copy.spans, copy.report = [], None
        if not self._left():
            self._fail(f"no copy is left. Copy {copy.number} was the last: {copy.lost}")
        else:
            self._go_on()

    def _go_on(self) -> None:
        """Once all copies have reported: average, and deal the next slot."""
        copies = [copy for copy in self._left() if copy.process.poll() is None or copy.report is not None]
        if self._failure or not copies or any(copy.report is None for copy in copies):
            return
        begins = [copy.report for copy in copies if isinstance(copy.report, EpochBegins)]
        if begins:
            if len(begins) < len(copies):
                self._fail("some copies begin an epoch while others are in one. Copies run one script, alike.")
                return
            self._begin_epoch(begins)
            self._deal(copies, {}, [], b"")
            return
        reports = {copy.number: copy.report for copy in copies if isinstance(copy.report, SlotEnds)}
        if self._check(reports):
            return
        slot_steps = sum(report.batches for report in reports.values())
        if slot_steps:
            self._slot_paid_s = max(report.paid_s for report in reports.values())
            self._paid_s += self._slot_paid_s
            self._num_slots += 1
        for copy in copies:
            report = reports[copy.number]
            copy.spans, copy.steps, copy.busy_s = [], copy.steps + report.batches, copy.busy_s + report.seconds
            if report.batches:
                measured = report.batches / max(report.seconds, 1e-9)
                copy.speed = measured if not copy.slots else (copy.speed + measured) / 2
                copy.slots += 1
        self._steps += slot_steps
        weights = {number: float(report.batches) for number, report in reports.items() if report.batches}
        schedule = np.array([report.schedule for report in reports.values()]).sum(axis=0).tolist()
        self._deal(copies, weights, schedule, reports[copies[0].number].generators)

    def _check(self, reports: Mapping[int, SlotEnds]) -> bool:
        """Say whether the copies do not fit together, and then end it all with the reason."""
        orders = {report.order for report in reports.values() if report.order}
        if len(orders) > 1:
            self._fail("copies draw unlike orders of examples. Seed the script: torch.manual_seed(0) at its start.")
        elif any(report.batches and not report.updates for report in reports.values()):
            self._fail(
                "a loader brought batches and no optimizer stepped. Evaluate under torch.no_grad() from before the "
                "loop, or accumulate over fewer batches."
            )
        elif len({len(report.schedule) for report in reports.values()}) > 1:
            self._fail("copies have unlike numbers of schedulers. Copies run one script, alike.")
        return bool(self._failure)

    def _begin_epoch(self, begins: Sequence[EpochBegins]) -> None:
        lengths = sorted({begin.num_batches for begin in begins})
        if len(lengths) > 1 or not lengths[0]:
            self._fail(f"copies have epochs of {' and '.join(map(str, lengths))} batches. Copies need one, above 0.")
        elif unlike := sorted(
            {key for begin in begins for key, _ in begin.digests.items() ^ begins[0].digests.items()}
        ):
            has = [unlike[0] in begin.digests for begin in begins]
            self._fail(
                f"copies begin with unlike weights: '{unlike[0]}' "
                + ("differs. Seed the script: torch.manual_seed(0) at its start." if all(has)
                   else "is missing in some. Copies need one model and one script.")
            )  # fmt: skip
        else:
            self._num_batches, self._undone, self._began_s = lengths[0], [(0, lengths[0])], time.monotonic()

    def _deal(
        self, copies: Sequence[Copy], weights: Mapping[int, float], schedule: list[int], generators: bytes
    ) -> None:
        """Send all copies on their way."""
        if self._failure:
            return
        speeds = np.array([copy.speed for copy in copies])
        undone = sum(last - first for first, last in self._undone)
        slot_s = self._slot_s or slot_seconds(self._slot_paid_s, float(speeds.min()))
        steps = max(math.floor(slot_s * float(speeds.sum())), 1)
        if undone <= steps * (1 + LAST_SHARE) or len(copies) == 1:
            steps = undone
        is_over = undone == 0
        self._slot += 1
        for copy, share in zip(copies, deal(steps, speeds).tolist(), strict=True):
            copy.spans, self._undone = cut(self._undone, share)
            copy.report = None
            assert copy.channel is not None, "it has reported"
            message = SlotBegins(
                self._slot, copy.spans, list(weights), list(weights.values()), schedule,
                generators if is_over else b"", is_over, copy is copies[0], len(copies) == 1,
            )  # fmt: skip
            with suppress(HeadwayError, TimeoutError, OSError):  # who is gone is noted when its process ends
                copy.channel.send(message, timeout_s=5.0)
        if is_over:
            self._num_batches = -1
            self._lasted_s += time.monotonic() - self._began_s
        for old in self._folder.glob("states/*.pt"):
            if int(old.name.partition("-")[0]) < self._slot - 1:
                old.unlink(missing_ok=True)

    def _fail(self, reason: str) -> None:
        """End it all, with the reason; only the first counts."""
        self._failure = self._failure or reason

    def _end_all(self) -> None:
        for copy in self._copies.values():
            if copy.process.poll() is None:
                copy.process.terminate()
        until_s = time.monotonic() + LEAVE_S
        for copy in self._copies.values():
            try:
                copy.process.wait(max(until_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                copy.process.kill()
                copy.process.wait()


def cut(spans: Sequence[Span], count: int) -> tuple[list[Span], list[Span]]:
    """Return the first `count` positions of spans, and the rest.

    >>> cut([(0, 4), (9, 12)], 5)
    ([(0, 4), (9, 10)], [(10, 12)])
    """
    spent, following = [], []
    for first, last in spans:
        middle = min(first + count, last)
        count -= middle - first
        spent += [(first, middle)] if middle > first else []
        following += [(middle, last)] if last > middle else []
    return spent, following
