"""The buckets of the ledger, their sub-lines, and the one table that maps recorded names to them.

Every device-nanosecond of a run lands in exactly one sub-line, and a
sub-line's first word is its bucket. Rooms record events; only `BUCKET_OF`
says what they mean.

>>> BUCKET_OF["checkpoint.sync"].sub, BUCKET_OF["host.gc"].precedence > BUCKET_OF["input.next"].precedence
('checkpoint.persist', True)
>>> bucket_of_sub("input.fetch")
'input'
"""

from __future__ import annotations

from dataclasses import dataclass

BUCKETS: tuple[str, ...] = (
    "useful",
    "eval",
    "input",
    "comm",
    "bubble",
    "straggler",
    "checkpoint",
    "startup",
    "restart",
    "rework",
    "host",
    "idle",
    "unknown",
)
"""Every bucket, in the order in which reports print them."""

ONCE_PER_RUN = ("startup", "restart", "rework", "idle", "unknown")
"""Buckets that come once in a run, however long it is; the others come with its steps."""

SUB_LINES: dict[str, str] = {
    "useful.forward": "model and loss: from the first forward to the backward that follows",
    "useful.backward": "inside backward()",
    "useful.optimizer": "from the last backward to the end of the update, without the closure's forward and backward",
    "useful.compute": "the rest of a step in which no backward was seen; on a device: compute kernels",
    "eval.forward": "forward passes of evaluation",
    "eval.input": "evaluation waited for its loader",
    "eval.other": "the rest of evaluation: metrics, generation, copies",
    "eval.rollout": "a policy acted in its environment: forwards without gradients, and the environment's steps",
    "input.fetch": "the awaited batch was blocked on storage, network or sleep",
    "input.cpu_wait": "the awaited batch's worker was runnable but had no core",
    "input.prep": "the awaited batch's worker computed: dataset code and collate",
    "input.transfer": "the batch was ready: hand-off between processes, pinning, copy to the device",
    "input.start": "creation of the iterator, start and stop of its workers",
    "input.open": "the first load of a new worker, beyond what later ones take: opening files and connections",
    "input.unsplit": "waiting for a batch whose load was not recorded",
    "comm.exposed": "gradients under way after the last rank had arrived, not hidden by compute",
    "comm.collective": "other blocking collectives after the last rank had arrived",
    "comm.p2p": "blocking send or receive after the peer had arrived",
    "bubble.p2p": "waiting for the peer of a message, where no stage of a pipeline was recorded",
    "bubble.fill_drain": "a pipeline stage waiting for its peer before the first or after the last of a step",
    "bubble.forward_backward": "a pipeline stage waiting for the gradient of its first backward",
    "bubble.scattered": "a pipeline stage waiting for its peer between other forwards and backwards",
    "bubble.filled": "a pipeline stage waiting while chunks of another job ran in its gap: useful time of that job",
    "straggler.compute": "waiting for a rank whose compute took longer",
    "straggler.input": "waiting for a rank whose input took longer",
    "straggler.eval": "waiting for a rank that evaluated",
    "straggler.checkpoint": "waiting for a rank that saved or loaded state",
    "straggler.host": "waiting for a rank that collected garbage, logged, recorded or ran code of the script",
    "straggler.startup": "waiting for a rank that compiled or had not started",
    "straggler.device": "a collective kernel waiting for the last rank's kernel",
    "checkpoint.save": "inside torch.save or a DCP save",
    "checkpoint.persist": "fsync, flush and close, and the gap between a save and them",
    "checkpoint.commit": "rename of the finished file",
    "checkpoint.snapshot": "headway's save: copying the state while training stands still",
    "checkpoint.wait": "headway's save: waiting for the copy before the update, or for an earlier save",
    "checkpoint.load": "loading or restoring state between or after steps",
    "startup.launch": "launcher start to process start",
    "startup.import": "import of torch",
    "startup.init": "process group creation",
    "startup.compile": "torch.compile at work, in steps too",
    "startup.load": "loading or restoring state before the first step",
    "startup.script": "the rest of the time from process start to the first step",
    "restart.detect": "from the last record before a failure until the launcher saw it",
    "restart.locate": "until it was clear which rank had failed first",
    "restart.decide": "deciding whether and how to go on",
    "restart.down": "from the end of a failed attempt's process to the next one's: stopping the other ranks",
    "restart.launch": "launching a later attempt",
    "restart.import": "import of torch in a later attempt",
    "restart.init": "process group creation in a later attempt",
    "restart.compile": "torch.compile in a later attempt",
    "restart.load": "loading or restoring state before the first step of a later attempt",
    "restart.script": "the rest of a later attempt's start-up",
    "restart.reroute": "a step dropped because a rank was killed, and the change to a schedule without that rank",
    "rework.steps": "compute of steps after the last save of a failed attempt: done again later",
    "rework.partial": "the step that a failed attempt did not finish",
    "host.cpu_wait": "computing, the training thread or a thread of its pool was ready to run and had no core",
    "host.gc": "garbage collection",
    "host.logging": "logging handlers",
    "host.script": "code of the script between a backward or update and the next forward: batches made by hand, "
    "environments, writers",
    "host.recording": "headway's own work on the training thread: deep windows, forks that read data again",
    "host.filling": "a pipeline stage waiting for a fill process that had not returned when its gap was over",
    "host.launch": "device idle inside a step: the host had not launched the next kernel",
    "host.copy": "device busy only with copies back to the host",
    "idle.teardown": "last step to the end of the process, its last collections included",
    "idle.exit": "end of the process to the end of the launcher",
    "idle.absent": "allocated, but no rank ran there in this attempt",
    "idle.device": "device idle outside steps",
    "idle.cells": "between two cells of a notebook: none of its code ran",
    "unknown.dropped": "records were overwritten before they were drained",
    "unknown.cut_short": "after the last record of a process that a signal ended, or whose end nobody saw",
    "unknown.missing": "a rank that left no records",
    "unknown.device": "a device whose events do not tell for how much of this time it was at work",
    "unknown.model": "time inside a trace that none of its rows explains",
}
"""Every sub-line -> what it means."""

UNSPLIT = frozenset({"useful.compute", "eval.other", "input.unsplit", "bubble.p2p", "rework.steps", "unknown.model"})
"""Sub-lines that, where a bucket has no other one, say no more than the bucket."""

SUBS: tuple[str, ...] = tuple(SUB_LINES)
"""Sub-lines by code."""

SUB_CODE: dict[str, int] = {sub: code for code, sub in enumerate(SUBS)}
"""Sub-line -> code."""


def bucket_of_sub(sub: str) -> str:
    """Return the bucket of a sub-line: its first word."""
    return sub.split(".", 1)[0]


BUCKET_CODE_OF_SUB: tuple[int, ...] = tuple(BUCKETS.index(bucket_of_sub(sub)) for sub in SUBS)
"""Code of a sub-line -> index of its bucket in `BUCKETS`."""


@dataclass(frozen=True, slots=True)
class Booking:
    """Where the time of one recorded name goes when it owns the training thread."""

    sub: str
    """The sub-line; names that `waits.py` splits further carry the one used when nothing is known."""

    precedence: int
    """On overlap the larger one owns the nanosecond; of equal ones the inner one, which began last."""


BUCKET_OF: dict[str, Booking] = {
    # A device at work is at work, whatever its host does.
    "device.work": Booking("useful.compute", 95),
    # gc > checkpoint > logging > recording > input > comm > startup > the rest of a step; a child is above its parent.
    "host.gc": Booking("host.gc", 90),
    "step.reroute": Booking("restart.reroute", 88),
    "checkpoint.restore": Booking("checkpoint.load", 86),
    "checkpoint.snapshot": Booking("checkpoint.snapshot", 85),
    "checkpoint.wait": Booking("checkpoint.wait", 84),
    "checkpoint.rename": Booking("checkpoint.commit", 83),
    "checkpoint.sync": Booking("checkpoint.persist", 82),
    "checkpoint.save": Booking("checkpoint.save", 81),
    "checkpoint.load": Booking("checkpoint.load", 80),
    "host.logging": Booking("host.logging", 70),
    "host.recording": Booking("host.recording", 65),
    "input.transfer": Booking("input.transfer", 63),
    "input.load": Booking("input.unsplit", 62),
    "input.next": Booking("input.unsplit", 61),
    "input.iter": Booking("input.start", 60),
    "fill.chunks": Booking("bubble.filled", 55),
    "fill.late": Booking("host.filling", 54),
    "comm.recv": Booking("comm.p2p", 53),
    "comm.send": Booking("comm.p2p", 52),
    "comm.collective": Booking("comm.collective", 51),
    "comm.wait": Booking("comm.exposed", 50),
    "comm.init": Booking("startup.init", 42),
    "host.compile": Booking("startup.compile", 41),
    "host.import": Booking("startup.import", 40),
    "dropped": Booking("unknown.dropped", 20),
    "host.sync": Booking("useful.compute", 12),
    "device.unknown": Booking("unknown.device", 11),
    # These nest in every way: forward and backward in a closure in an update, an update in a hook of backward.
    "segment.backward": Booking("useful.backward", 10),
    "segment.grad": Booking("useful.backward", 10),
    "optimizer.step": Booking("useful.optimizer", 10),
    "optimizer.closure": Booking("useful.forward", 10),
    "forward": Booking("useful.forward", 10),
    "pause": Booking("idle.cells", 2),
    "host.script": Booking("host.script", 1),
}
"""Recorded name -> its booking: the only place that maps. Names left out own no time by themselves."""

STARTUP_OF: dict[str, Booking] = {
    "pause": Booking("idle.cells", 6),
    "host.compile": Booking("startup.compile", 5),
    "checkpoint.restore": Booking("startup.load", 4),
    "checkpoint.load": Booking("startup.load", 3),
    "comm.init": Booking("startup.init", 2),
    "host.import": Booking("startup.import", 1),
}
"""The same before the first step, where collections, logging and the rest belong to start-up."""

REMAINDER_SUB = "useful.compute"
"""What the training thread does inside a step that no recorded name covers; its basis is 'remainder'.

Where backwards were recorded, what precedes one is `useful.forward` (losses, models that are functions), and what lies
between one and the update is `useful.optimizer` (clipping, unscaling).
"""

IN_EVALUATION: dict[str, str] = {
    "input.transfer": "eval.input",
    "input.load": "eval.input",
    "input.next": "eval.input",
    "input.iter": "eval.input",
    "forward": "eval.forward",
    "device.work": "eval.forward",
    "device.unknown": "eval.other",
}
"""Recorded name -> its sub-line inside a row named 'eval'. Useful and unowned time there is `eval.other`; other names
keep their sub-lines."""

BLAME: dict[str, str] = {
    "useful": "straggler.compute",
    "input": "straggler.input",
    "eval": "straggler.eval",
    "checkpoint": "straggler.checkpoint",
    "host": "straggler.host",
    "startup": "straggler.startup",
}
"""Bucket in which the last rank spent more than the others -> sub-line of those who waited for it."""
