"""Checkpoints of a training job: a save holds training up for one memory copy; another process does the rest.

    ckpt = headway.Checkpointer("/ckpts", model=model, opt=opt, loader=loader, sched=sched)
    ckpt.attach(opt)
    ckpt.restore()
    for batch in loader:
        ...
        opt.step(); sched.step()
        ckpt.maybe_save()          # not needed with attach, where nothing but the objects' own steps changes them

How often is the policy's to decide (3.5 % of the time by default). No save
waits for another rank's: ranks meet in the folder, through their agents. What
fails in the background is a warning at the next call, and the next save tries
again; it is raised after three in a row over ten minutes, with on_error="raise",
and by whatever waits for a save.

A step ends with the update, so an attached optimizer begins the save there.
What comes after the update belongs to the step too (a scheduler, a gradient
scaler, an averaged model): such objects are read when the next update begins,
or at `maybe_save`, whichever is first. On a device a write of parameters
outside of attached updates, between the two, never tears a checkpoint: it is
copied as well, waits for the copy, or the save is refused (see `writers`).

>>> import tempfile
>>> model = torch.nn.Linear(2, 2)
>>> with Checkpointer(tempfile.mkdtemp(), model=model) as ckpt:
...     commit = ckpt.save(7, block="durable").result()
>>> commit.step, commit.path.rpartition("/")[2]
(7, 'step-7')
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from headway.checkpoint.policy import CheckpointPolicy, Keep
from headway.checkpoint.restores.restore import RestoreReport, Verify
from headway.checkpoint.restores.restoring import restore
from headway.checkpoint.saves.saver import Options, Saver
from headway.checkpoint.saves.tickets import SaveSchedule, SaveTicket, StepMeter, why_refused
from headway.checkpoint.state.writers import CAPTURES, REPLAYS, Writers, before
from headway.core.errors import BackgroundError, Closing, HeadwayError, InputError
from headway.core.files.private import runtime_directory
from headway.core.tables import pick
from headway.runtime.host.device import capturing, host_has_devices
from headway.runtime.host.rank_env import may_restart
from headway.runtime.in_rank import state_account
from headway.runtime.launching.save_and_leave import Leaving
from headway.runtime.torch_state import RngStates
from headway.storage.manifest import COMMIT, GENERATORS, METADATA
from headway.storage.redundancy.erasure import scheme_of
from headway.storage.stores import url_of

POLICY = "headway_policy"
"""Names under which the process's random number generators and the policy's experience are stored."""

MAX_STEP = 1 << 63
"""Steps are below this: records and messages hold 64 bits."""

DeviceSnapshot = Literal["auto", "device", "host"]
Block = Literal["snapshot", "durable"]
OnError = Literal["warn", "raise"]


class Checkpointer(Closing):
    """Saves and restores objects under one root; one per rank, used by its training thread.

    All ranks make it with the same arguments, and save and restore the same steps.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        objects: Mapping[str, Any] | None = None,
        policy: CheckpointPolicy | None = None,
        redundancy: str = "none",
        verify: Verify = "read",
        inflight: int = 1,
        replicated: dist.ProcessGroup | Literal["auto"] | None = "auto",
        device_snapshot: DeviceSnapshot = "auto",
        keep: Keep = Keep(last=2, every=None),  # noqa: B008 - frozen: one value serves all
        on_error: OnError = "warn",
        **named: Any,
    ) -> None:
        """Touch nothing yet: the first save or restore opens the root.

        root
            Folder of the checkpoints; `root/step-<n>` will hold the one of step n. Or the URL of a bucket's folder,
            reached as the environment says (AWS_...).
        objects, named
            One mapping: name -> anything with `state_dict` and `load_state_dict`.
        policy
            How often to save; by default for at most 3.5 % of the time.
        redundancy
            Parity over the ranks' files: "none", "xor", "+m", "k+m".
        verify
            What a restore compares: nothing ("off"), the blocks that it reads ("read"), first everything ("full").
        inflight
            Saves that may be under way at once; each takes memory for one more copy of the state.
        replicated
            The ranks that hold equal plain tensors: all ("auto"), those of a group, or this one alone (None).
        device_snapshot
            Whether CUDA tensors are copied inside the device first, straight to the host, or as measured ("auto").
        on_error
            What the training loop gets of a save that failed in the background: a RuntimeWarning ("warn"), which after
            three in a row over ten minutes becomes an error, or a `BackgroundError` at the next call ("raise").

        Raises `InputError` where an argument cannot be, or agents have no private folder on this host.
        """
        runtime_directory()  # asked now: at the first save the job has trained for a while
        url = url_of(root)
        _check_choices(redundancy, inflight, keep, policy)
        if url is not None and redundancy != "none":
            raise InputError(
                f"redundancy={redundancy!r} is for folders; {root} keeps copies of its own. Pass redundancy='none'."
            )
        self._root = url or os.path.abspath(root)
        self._objects = _checked({**(objects or {}), **named})
        self._policy = CheckpointPolicy() if policy is None else policy
        for what, value, choices in (
            ("verify", verify, get_args(Verify)),
            ("device_snapshot", device_snapshot, get_args(DeviceSnapshot)),
            ("on_error", on_error, get_args(OnError)),
        ):
            pick(dict.fromkeys(choices, 0), value, what)
        self._policy.inflight = inflight
        self._options = Options(
            redundancy=redundancy, keep=keep, inflight=inflight, device_snapshot=device_snapshot,
            any_world=(GENERATORS, POLICY), on_error=on_error,
        )  # fmt: skip
        self._verify, self._replicated = verify, replicated
        self._own: dict[str, Any] = {POLICY: self._policy, GENERATORS: RngStates()}
        self._pid = os.getpid()
        self._saver: Saver | None = None
        self._schedule: SaveSchedule | None = None
        self._meter = StepMeter()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._hooks: list[Any] = []
        self._step = 0
        self._closed = False
        self._leaving = Leaving()
        self._writers = Writers(self._optimizers)
        self._undos: list[Callable[[], None]] = []
        if host_has_devices():
            self._undos = before(REPLAYS, self._before_replay) + before(CAPTURES, self._before_capture)

    # The training loop.

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Count this optimizer's steps and save when one is due; its updates wait for copies that are under way.

        Attach every optimizer whose state is saved; steps are counted at the one attached first.
        """
        self._check()
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(f"a {type(optimizer).__name__} is no torch optimizer. Attach what is stepped.")
        self._optimizers.append(optimizer)
        self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._before_update()))
        if len(self._optimizers) == 1:
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._after_update()))

    def step(self, n: int | None = None) -> SaveTicket | None:
        """Say that step `n` (by default the next one) is over, and save if one is due: the same as `maybe_save`."""
        return self.maybe_save(n)

    def maybe_save(self, step: int | None = None) -> SaveTicket | None:
        """Save if one is due; return the ticket of a save that this step began.

        Call it at the end of every step. Without an attached optimizer each call counts one step, else the optimizer
        does; `step` sets the number. Raises as `save` does.
        """
        if self._postponed():
            return None
        saver = self._ready()
        if saver.pending is not None:  # the hook has begun it
            ticket = saver.pending
            saver.complete()
            self._leave_if_saved(ticket)
            return ticket
        if self._optimizers and step in (None, self._step):
            saver.tell_failures()
            return saver.begun(self._step)
        self._step = self._step + 1 if step is None else _number(step)
        self._end_step(saver)
        if self._is_due(saver):
            return self._leave_if_saved(self._begin(saver, self._step))
        saver.prepare()
        return None

    def save(self, step: int | None = None, *, block: Block = "snapshot") -> SaveTicket:
        """Save now, as step `step` (default: steps counted so far); return once the state has been copied.

        With block="durable" return once the checkpoint is committed. Raises `InputError` inside forward or backward,
        or while a graph is captured; `BackgroundError` when this one failed and is waited for, or the last three did.
        """
        pick(dict.fromkeys(get_args(Block), 0), block, "block")
        number = self._step if step is None else _number(step)
        if self._postponed():
            raise InputError("a checkpoint cannot be taken while a graph is captured: call it before or after that.")
        saver = self._ready()
        saver.tell_failures()
        ticket = self._begin(saver, number)
        if self._leaving.is_asked:  # what a script saves by itself is as good: the other ranks save it too
            self._leaving.step = number
            self._leave_if_saved(ticket)
        if block == "durable":
            ticket.result()
        return ticket

    def restore(self, step: int | Literal["latest"] = "latest", *, strict: bool = True) -> RestoreReport:
        """Put all objects into the state of a checkpoint: of `step`, or of the newest that is whole.

        All ranks call it. A damaged one is passed over, which the report says (`skipped`). Without any checkpoint
        nothing changes and the report's step is None. Raises `InputError` when names, shapes or types do not fit, or an
        object refuses its state: nothing is changed then, on any rank, unless the message says otherwise.
        `DamageError` when no step, or not the one that was asked for, is whole.
        """
        saver = self._ready()
        saver.wait()
        started_ns = time.perf_counter_ns()
        with state_account.inside("checkpoint.restore"):
            report, had_died = restore(
                self._root, self._objects, self._own, step, saver.agreement, strict=strict, verify=self._verify,
                group=self._replicated if isinstance(self._replicated, dist.ProcessGroup) else None,
                is_successor=saver.link.pid is None,
            )  # fmt: skip
        self._meter.restart()
        if report.step is None:
            return report
        self._step = report.step
        self._leaving.announce()
        self._planned().saved(report.step)
        if had_died:
            self._policy.observe_failure()
        state_account.restored(
            started_ns, time.perf_counter_ns(), bytes=report.read_bytes, step=report.step,
            verified_bytes=report.hashed_bytes, held=report.source == "memory",
        )  # fmt: skip
        return report

    def wait(self) -> None:
        """Wait until all saves so far are over. Raises `BackgroundError` when one failed."""
        self._check()
        if self._saver is not None:
            self._saver.wait()
            self._saver.tell_failures(is_asked=True)

    def close(self) -> None:
        """Wait, let the agent go, detach; doing it again is fine. Raises as `wait` does.

        Where an error is being handled and the job may be started again, the agent stays for a while.
        """
        if self._closed or self._pid != os.getpid():
            return
        try:
            self.wait()
        finally:
            self._closed = True
            for hook in self._hooks:
                hook.remove()
            for undo in self._undos:
                undo()
            if self._saver is not None:
                atexit.unregister(self._leave)
                self._saver.close(stays=sys.exc_info()[0] is not None and may_restart())

    # Steps.

    def _before_update(self) -> None:
        """An update begins: what the last save has left to read is read now, and not overwritten before."""
        if self._pid != os.getpid() or self._postponed():
            return
        self._writers.before_update()
        if self._saver is None or self._saver.pending is None:
            return
        before_s = time.perf_counter()
        ticket = self._saver.pending
        self._saver.complete()
        self._saver.fence()  # also for what `complete` began to copy
        self._meter.stall(time.perf_counter() - before_s)
        self._leave_if_saved(ticket)

    def _before_replay(self) -> None:
        """A graph is about to be replayed, which may hold an update, and calls no hook: it waits for the copy."""
        if self._pid == os.getpid() and self._saver is not None and not capturing():
            self._saver.fence()

    def _before_capture(self) -> None:
        """A graph is about to be captured: no thread of ours may call the device's library meanwhile."""
        if self._pid == os.getpid() and self._saver is not None:
            self._saver.halt()

    def _after_update(self) -> None:
        """An update is over, and a step with it."""
        if self._pid != os.getpid() or self._postponed():
            return
        saver = self._opened()
        self._writers.after_update()
        self._step += 1
        self._end_step(saver)
        if self._is_due(saver):
            late = {name: thing for name, thing in self._objects.items() if changes_after_update(thing)}
            ticket = self._begin(saver, self._step, late)
            if not late:
                self._leave_if_saved(ticket)
        else:
            saver.prepare()

    def _postponed(self) -> bool:
        """Whether a graph is being captured: a copy or a query of ours would become part of it, or spoil it.

        Replays of what is captured now update the parameters without a call of our hooks: from then on later work waits
        for a snapshot at once, and not from the next update on.
        """
        if capturing():
            self._writers.distrust()
            return True
        return False

    def _end_step(self, saver: Saver) -> None:
        """Hear of saves, tell the policy of the step, and the caller of failures."""
        saver.complete()
        saver.listen()
        if saver.durable_s is not None:
            self._meter.durable(saver.durable_s)
            saver.durable_s = None
        timing = self._meter.step(under_way=saver.is_under_way)
        if timing is not None:
            self._policy.observe(timing)
        saver.tell_failures()

    def _is_due(self, saver: Saver) -> bool:
        """Whether to save the step that has ended: by the policy, or because the job is to save and leave."""
        is_last = self._leaving.is_due(self._step, lambda step: saver.agreement.numbers("leave", step))
        return self._planned().is_due(self._step) or is_last

    def _leave_if_saved(self, ticket: SaveTicket) -> SaveTicket:
        """Leave, where this save was begun in order to; everything of it has been read."""
        if self._leaving.is_asked and self._saver is not None and ticket.step == self._leaving.step:
            self._saver.complete(wait=True)
            self._leaving.leave(ticket.step, ticket.result)
        return ticket

    def _begin(self, saver: Saver, step: int, late: Mapping[str, Any] | None = None) -> SaveTicket:
        if why := why_refused():
            saver.failures.append(BackgroundError(why))
            saver.tell_failures()
            return SaveTicket.refused(step, why)
        if saver.is_torn:
            self._writers.distrust()
        self._leaving.announce()
        self._writers.begin()
        saver.settled = self._writers.are_known
        ticket = saver.begin(step, late or {})
        self._meter.stall(ticket.blocked_s, saved=True)
        self._planned().saved(step)
        return ticket

    # Opening, checking.

    def _ready(self) -> Saver:
        """Return the saver, at a place where state may be read or written."""
        self._check()
        refuse_inside_of_a_step()
        return self._opened()

    def _opened(self) -> Saver:
        """Meet the other ranks, once."""
        if self._saver is None:
            if url_of(self._root) is None:
                _check_root(Path(self._root))
            group = self._replicated
            holders = None
            if isinstance(group, dist.ProcessGroup):
                holders = dist.get_process_group_ranks(group)
            elif group is None:
                holders = [dist.get_rank() if dist.is_initialized() else 0]
            elif group != "auto":
                raise InputError(f"replicated is {group!r}; pass 'auto', a process group, or None.")
            self._saver = Saver(self._root, {**self._objects, **self._own}, self._options, holders=holders)
            atexit.register(self._leave)
        return self._saver

    def _planned(self) -> SaveSchedule:
        if self._schedule is None:
            self._schedule = SaveSchedule(self._policy, self._opened().agreement)
        return self._schedule

    def _leave(self) -> None:
        """The interpreter ends without `close`: hand over what is left; the agent finishes it alone.

        After an error of a job that is started again the agent stays for a while: the next attempt restores from it.
        """
        if self._pid == os.getpid() and self._saver is not None:
            with suppress(HeadwayError):
                self._saver.complete(wait=True)
            if getattr(sys, "last_value", None) is None or not may_restart():
                self._saver.link.leave()

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise HeadwayError(
                f"this Checkpointer belongs to process {self._pid}, and this is process {os.getpid()}, a fork of it. "
                "Save in the process that trains, or make another one after the fork."
            )
        if self._closed:
            raise InputError("this Checkpointer is closed. Make a new one.")


def changes_after_update(thing: Any) -> bool:
    """Say whether an object may still change in a step whose weight update is done: a scheduler, a scaler, a mean.

    So do an optimizer's settings, which schedulers change. Modules do not, nor do loaders: their next batch belongs
    to the next step.

    >>> changes_after_update(torch.nn.Linear(1, 1)), changes_after_update(torch.amp.GradScaler("cpu"))
    (False, True)
    """
    if isinstance(thing, torch.optim.swa_utils.AveragedModel):
        return True
    return not isinstance(thing, torch.nn.Module) and not hasattr(thing, "__iter__")


def refuse_inside_of_a_step() -> None:
    """Raise `InputError` when this is called from a module's forward, or from a backward pass."""
    # Neither is told by torch in public: backward has a task number, forward a frame on the stack.
    inside = "backward" if torch._C._current_graph_task_id() != -1 else ""
    forward = torch.nn.Module._call_impl.__code__
    frame = sys._getframe(1)
    while not inside and frame is not None and frame.f_back is not None:
        inside, frame = "forward" if frame.f_code is forward else "", frame.f_back
    if inside:
        raise InputError(
            f"a checkpoint cannot be taken inside of {inside}: the state is half a step old there. "
            "Call it between steps."
        )


def _number(step: Any) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < MAX_STEP:
        raise InputError(f"step is {step!r}; pass the number of steps done, a whole number from 0 to 2**63 - 1.")
    return step


def _checked(objects: dict[str, Any]) -> dict[str, Any]:
    """Return the objects. Raises `InputError` when there are none, or one cannot be saved."""
    if not objects:
        raise InputError("there is nothing to save. Pass objects by name: model=model, opt=optimizer.")
    for name, thing in objects.items():
        if not isinstance(name, str) or not name or "." in name or name in (GENERATORS, POLICY):
            taken = f"{GENERATORS} and {POLICY} are taken"
            raise InputError(f"{name!r} cannot name an object. Use text without dots; {taken}.")
        if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
            such = ", such as headway.data.DataLoader" if isinstance(thing, torch.utils.data.DataLoader) else ""
            raise InputError(
                f"{name!r} is a {type(thing).__name__}, without state_dict and load_state_dict. "
                f"Pass an object with both{such}."
            )
    return objects


def _check_choices(redundancy: Any, inflight: Any, keep: Any, policy: Any) -> None:
    """Raise `InputError` now for what the agent or the first save would stumble over."""
    if not isinstance(redundancy, str):
        raise InputError(f"redundancy is {redundancy!r}; pass text: 'none', 'xor', '+m' or 'k+m'.")
    scheme_of(redundancy, 1)
    if isinstance(inflight, bool) or not isinstance(inflight, int) or inflight < 1:
        raise InputError(f"inflight is {inflight!r}; one save must be allowed to be under way. Pass 1 or more.")
    if not isinstance(keep, Keep):
        raise InputError(f"keep is {keep!r}. Pass a headway.checkpoint.Keep, such as Keep(last=2).")
    if policy is not None and not (hasattr(policy, "observe") and hasattr(policy, "interval")):
        raise InputError(f"policy is {policy!r}. Pass a headway.checkpoint.CheckpointPolicy.")


def _check_root(root: Path) -> None:
    """Raise `InputError` where no folder of checkpoints can be: at a file, and at a checkpoint itself."""
    if root.exists() and not root.is_dir():
        raise InputError(
            f"{root} is a file; checkpoints lie in a folder, which the root names. What torch.save wrote comes into "
            "one by: headway ckpt import"
        )
    if (root / METADATA).exists() or (root / COMMIT).exists():
        step = root.name.removeprefix("step-")
        fix = f"and restore(step={step})" if step.isdecimal() else "with this one renamed to step-0"
        raise InputError(
            f"{root} is a checkpoint itself; the root is the folder that checkpoints lie in. Pass {root.parent}, {fix}."
        )
