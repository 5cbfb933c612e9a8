"""One cause of lost device time: what, where, how much, how we know, what to do.

Rules (`causes.py`, `straggler.py`) return these; `headway why` prints them.
A cause is a counterfactual, not a bucket: causes may overlap and need not sum
to anything. Times are device-seconds (seconds times devices that lost them).

>>> late = Cause("input.fetch", "loader 0", 12.5, "412 batches waited for storage", "try 4 workers", 1.3, (1.2, 1.4))
>>> late.to_json()["interval"]
[1.2, 1.4]

Lines of the script that the training thread was seen in between the steps, added up over ranks.

>>> row = {"line": "train.py:7", "function": "get_batch", "ns": 5, "count": 1, "feeds_forward": True}
>>> [(line.function, line.ns, line.count) for line in joined([[row], [row], "damaged"])]
[('get_batch', 10, 2)]
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

RECORD_LONGER = "record for longer"
"""How advice on time that headway itself took begins: such a cause is listed, and never leads a verdict."""

RECORD_ANEW = f"{RECORD_LONGER}, or on a quieter host"
"""What to do about a gain that is not resolved."""

NOT_RESOLVED = "not resolved"
"""What is said of a gain that this run is too short or too disturbed to tell."""


def in_library(text: str, library: str) -> str:
    """Return advice on a DataLoader in the terms of the library that constructs it.

    >>> in_library("read in worker processes: DataLoader(num_workers=4)", "transformers")
    'read in worker processes: TrainingArguments(dataloader_num_workers=4)'
    """
    if library != "transformers":  # the script of a Trainer constructs no DataLoader
        return text

    def arguments(call: re.Match[str]) -> str:
        return "TrainingArguments(" + re.sub(r"(\w+)=", r"dataloader_\1=", call[1]) + ")"

    return re.sub(r"DataLoader\(([^)]*)\)", arguments, text, count=1)


@dataclass(frozen=True, slots=True)
class Cause:
    """A ranked finding of `headway why`."""

    cause: str
    """Dotted, stable name: 'input.fetch', 'straggler.worker', 'host.gc', ..."""

    where: str
    """The rank, stage, loader or file it was seen at, in words."""

    lost_device_s: float
    """Device-seconds that would be won if the cause were gone; >= 0."""

    evidence: str
    """One sentence with the numbers that led to the verdict."""

    fix: str
    """One concrete next action."""

    predicted_speedup: float | None = None
    """Step-rate ratio after the fix (>= 1), None when nothing predicted it."""

    interval: tuple[float, float] | None = None
    """Low and high end of `predicted_speedup`, None when unknown."""

    at_most: bool = False
    """Whether `predicted_speedup` is that of a run without the cause: what the fix wins of it is not known."""

    script: str = ""
    """What the user can write in the script instead, a line to copy; '' where the fix says all that is known."""

    remedy: str = ""
    """The remedy by which headway applies the fix; '' where it is for the user to do."""

    allow: str = ""
    """The consent that `remedy` needs, as `headway plan --allow` takes it; '' where it needs none."""

    line: str = ""
    """Where the script does what the cause is about, as `train.py:30`; '' where that is not known."""

    library: str = ""
    """The package that constructs the loader that the cause is about; '' where the script does, or it is about none."""

    def to_json(self) -> dict[str, object]:
        """Return the row of the `causes` list of schema `headway.why/2`."""
        return {
            "cause": self.cause,
            "where": self.where,
            "lost_device_s": self.lost_device_s,
            "evidence": self.evidence,
            "fix": self.fix,
            "predicted_speedup": self.predicted_speedup,
            "interval": None if self.interval is None else list(self.interval),
            "at_most": self.at_most,
            "remedy": self.remedy,
            "allow": self.allow,
            "script": self.edit,
        }

    @property
    def edit(self) -> str:
        """The edit with its line; for a loader that a library constructs, as the arguments of that library.

        >>> line = "DataLoader(..., num_workers=4)  # and batch.to(device)"
        >>> Cause("input.fetch", "", 1.0, "", "", script=line, line="train.py:9", library="transformers").edit
        'TrainingArguments(..., dataloader_num_workers=4)  # and batch.to(device)'
        """
        written = in_library(self.script, self.library)
        is_place = written == self.script and self.script and self.line
        return f"{self.script}  # {self.line}" if is_place else written


def ranked(causes: Iterable[Cause]) -> list[Cause]:
    """Return the causes by device-seconds lost, largest first; equal ones by name and place."""
    return sorted(causes, key=lambda row: (-row.lost_device_s, row.cause, row.where))


# Lines of the script that the training thread was seen in between the steps, added up over ranks.


class SampledLine(msgspec.Struct, frozen=True):
    """A line of the training loop, and what it called, with the time of the samples that found the thread there."""

    line: str
    """Line of the training loop, 'file.py:12'."""
    function: str
    """What that line called; '' for none of Python's."""
    ns: int
    """Time there, estimated from the samples, over all ranks."""
    count: int = 0
    """Samples."""
    feeds_forward: bool = False
    """Whether what the function returned was an argument of the next forward: it made the batch."""
    loader: int = -1
    """Group of the loader whose load it is a line of; -1 = of none."""
    calls_layer: bool = False
    """Of a line in a loop of a forward: whether it calls a layer."""
    library: str = ""
    """Package without torch that the line called in a forward, a loss or a backward; '' of a line in a loop."""
    num_bytes: int = 0
    """Of a line that calls a collective: bytes of its tensors, all calls together."""
    gap: int = 0
    """Of such a line: CLOSED, BEHIND_UPDATE or BEHIND_BACKWARD of the vocabulary."""
    loop: str = ""
    """Line where most of it lay in a Python loop inside of the step; '' where most lay in none."""

    @property
    def words(self) -> str:
        """Name the place: 'get_batch at train.py:7'."""
        return f"{self.function} at {self.line}" if self.function else self.line


def joined(ranks: Iterable[object]) -> tuple[SampledLine, ...]:
    """Add up the lines that each rank wrote down, most time first; what cannot be read is left out."""
    total: dict[tuple[str, str, int, bool, str, int], SampledLine] = {}
    for rows in ranks:
        try:
            lines = msgspec.convert(rows, list[SampledLine])
        except msgspec.ValidationError:
            continue
        for row in lines:
            key = row.line, row.function, row.loader, row.calls_layer, row.library, row.gap
            before = total.get(key, SampledLine(row.line, row.function, 0))
            feeds, count = before.feeds_forward or row.feeds_forward, before.count + row.count
            row = msgspec.structs.replace(row, num_bytes=before.num_bytes + row.num_bytes)
            loop = row.loop or before.loop
            total[key] = msgspec.structs.replace(
                row, ns=before.ns + row.ns, count=count, feeds_forward=feeds, loop=loop
            )
    return tuple(sorted(total.values(), key=lambda row: -row.ns))
