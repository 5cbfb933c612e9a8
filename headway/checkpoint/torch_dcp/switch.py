"""Remedy: the `dcp.save` of an unmodified script copies the state and goes on; a thread writes it, atomically.

Needs `--allow result-equivalent`: no result changes, but a checkpoint is
durable later than the call that made it returns. The next save, a load, a look
at the checkpoint's path by this process or a forked one, another program's
start, the end of the process group and of the process wait for it; what went
wrong is raised at the first of them. At the end of the process nobody is left
to catch it: its traceback is printed, and the launcher ends the job with 1, as
it would have ended had the call itself raised. Taken are plain calls,
`dcp.save(state, checkpoint_id=folder)`, of the training thread; calls with a
writer, planner or group of their own, and saves into a folder that holds
anything else than a checkpoint, are left to torch. Files are headway's: stock
`dcp.load` reads them.

>>> later = Later(lambda: {"planner_data": None})
>>> later.keys()
dict_keys(['planner_data'])
"""

from __future__ import annotations

import atexit
import functools
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from headway.checkpoint.remedies import BehindParameters
from headway.checkpoint.torch_dcp.calls import async_save, own_group, without_stateful
from headway.checkpoint.torch_dcp.plugins import HeadwayWriter, check_target
from headway.checkpoint.torch_dcp.stager import HeadwayStager, unstorable
from headway.core.errors import BackgroundError, InputError
from headway.runtime.in_rank import state_account
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy
from headway.runtime.in_rank.state_account import before_looks, related
from headway.runtime.run_folder.exit_class import FAILED_AT_EXIT
from headway.trace.rings.ring import warn

NAME = "checkpoint.async"

SAVES = ("torch.distributed.checkpoint.state_dict_saver:save", "torch.distributed.checkpoint:save")
WAITS = (
    "torch.distributed.checkpoint.state_dict_loader:load",
    "torch.distributed.checkpoint:load",
    "torch.distributed.distributed_c10d:destroy_process_group",
    "torch.distributed:destroy_process_group",
)
"""What waits for a save that is under way; the interpreter waits for the thread before it ends."""


def behind(parameters: BehindParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy."""
    switch = SaveSwitch(context, parameters)
    switch.warm()
    for target in SAVES:
        context.patch(target, switch.around_save, passing=(BackgroundError,))
    for target in WAITS:
        context.patch(target, switch.around_wait, passing=(BackgroundError,))
    before_looks(context, switch.looked_at)
    atexit.register(switch.finish)
    context.undos.append(switch.release)
    return Applied(NAME, switch.facts)


class Later:
    """What a save returns before it knows: each use of it waits."""

    def __init__(self, result: Callable[[], Any]) -> None:
        self._result = result

    def __getattr__(self, name: str) -> Any:
        """Wait, then answer as the result itself would."""
        return getattr(self._result(), name)

    @property
    def __class__(self) -> Any:
        """The class of the result, which `isinstance` asks for: this one needs no waiting."""
        return Metadata

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        raise TypeError(f"{kind} cannot be the class of a result that is still to come. Leave it as it is.")

    def __eq__(self, other: object) -> bool:
        """Wait, and compare the result itself."""
        return bool(self._result() == (other._result() if type(other) is Later else other))

    __hash__ = None  # type: ignore[assignment] # torch's Metadata is not hashable either

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Wait; a copy of this is a copy of the result itself."""
        return self._result().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        """Wait, and show the result."""
        return repr(self._result())


class _UnderWay:
    """A save that a thread writes."""

    def __init__(self, place: Any) -> None:
        self.place = place
        self.future: Future[Any]
        self.again: Any = None
        """What the script's own way of saving returned, where the thread had failed."""

    def result(self) -> Any:
        """Wait; return what the save returned, or raise what it raised."""
        wait([self.future])
        return self.future.result() if self.again is None else self.again


class SaveSwitch:
    """The saves of one rank's script: at most one is under way."""

    def __init__(self, context: Context, parameters: BehindParameters) -> None:
        self.facts: dict[str, Any] = {**parameters.to_json(), "num_saves": 0, "left_alone": []}
        """What the report says."""
        self._context = context
        self._stager = HeadwayStager()
        self._running: _UnderWay | None = None
        self._plain: Callable[..., Any]
        self._inside = self._is_over = False
        self._place, self._pid = "", os.getpid()
        self._done = mmap.mmap(-1, 1)
        """1 as soon as the save that is under way has ended; forked children see it too."""

    def warm(self) -> None:
        """Load what a copy needs, also a large one, before there are steps that would wait for it."""
        with state_account.inside("checkpoint.snapshot"):
            self._stager.stage({"": torch.zeros(1 << 16)})

    def around_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `dcp.save`."""

        self._plain = original

        @functools.wraps(original)
        def save(*args: Any, **options: Any) -> Any:
            if self._inside or threading.current_thread() is not threading.main_thread():
                return original(*args, **options)
            begun_ns = time.perf_counter_ns()
            self.settle()
            if self._is_over:  # since just now: nothing would wait for another save
                return original(*args, **options)
            reason = _unfit_call(args, options)
            if reason is None:
                place = options["checkpoint_id"]
                # Objects are asked for their states once, whoever saves: they may count.
                state = without_stateful(args[0] if args else options["state_dict"])
                args, options = (state,), {"checkpoint_id": place}
                reason = _unfit(state, place)
                if reason is None:
                    try:
                        return self._save(state, place, begun_ns)
                    except BackgroundError:
                        raise
                    except InputError as cause:
                        reason = str(cause)
                    except Exception as cause:  # nothing has begun: the thread is started last
                        reason = f"{type(cause).__name__}: {cause}"
            self._leave(reason)
            self._inside = True
            try:
                return original(*args, **options)
            finally:
                self._inside = False

        return save

    def around_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what must not meet a save under way."""

        @functools.wraps(original)
        def waits(*args: Any, **options: Any) -> Any:
            if not self._inside and threading.current_thread() is threading.main_thread():
                self.settle()
            return original(*args, **options)

        return waits

    def looked_at(self, path: object) -> None:
        """Wait before the script, or a child that was forked meanwhile, looks at the checkpoint under way.

        `path` is None where another program may look. What went wrong is raised later: this call did not save.
        """
        if self._running is None or self._done[0]:
            return
        if threading.current_thread() is not threading.main_thread() and self._pid == os.getpid():
            return  # the writer itself is one such thread
        if path is not None and not related(path, self._place):
            return
        if self._pid == os.getpid():
            wait([self._running.future])
        else:
            while not self._done[0] and os.getppid() == self._pid:
                time.sleep(0.002)

    def settle(self) -> None:
        """Wait for the save that is under way. Raises `BackgroundError` when it failed."""
        if self._running is None:
            return
        save, error = self._running, self._running.future.exception()
        place, self._running = save.place, None
        if error is not None and not self._save_again(save, error):
            self._context.note(Applied(NAME, {**self.facts, "failed": f"{place}: {error}"}))
            raise BackgroundError(
                f"the checkpoint {place} was not written: {error}. Remove the cause; what stood there still does."
            ) from error

    def _save_again(self, save: _UnderWay, error: BaseException) -> bool:
        """Write the copy that a thread could not write in the script's own way; return whether that worked.

        Only without other ranks, who may not know of the failure.
        """
        unsaved = getattr(save.future, "unsaved", [])
        if not unsaved or (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return False
        staged, self._inside = unsaved[0], True
        try:
            state = staged.result() if isinstance(staged, Future) else staged
            save.again = self._plain(state, checkpoint_id=save.place)
        except (Exception, CheckpointException):  # torch's is none of the former
            return False
        finally:
            self._inside = False
        self._context.fail(NAME, f"failed in use: {save.place} was saved in the script's own way: {error}")
        return True

    def release(self) -> None:
        """Wait for the save that is under way; what went wrong is said as the process ends."""
        self._is_over = True
        if self._running is None:
            atexit.unregister(self.finish)
        else:
            wait([self._running.future])

    def finish(self) -> None:
        """Wait at the end of the process. What failed is noted for the launcher, and printed as a traceback.

        A script that raised by itself keeps the last word: then it is one line.
        """
        try:
            self.settle()
        except BackgroundError as error:
            self._context.note(Applied(NAME, {**self.facts, FAILED_AT_EXIT: str(error)}))
            if getattr(sys, "last_value", None) is None:
                raise
            warn(str(error))

    def _save(self, state: dict[str, Any], place: Any, begun_ns: int) -> Later:
        """Copy the state and begin to write it."""
        ready_ns = time.perf_counter_ns()
        self._inside = True
        self._done[0] = 0
        self._place = os.path.abspath(os.fsdecode(place))
        save = _UnderWay(place)
        later = Later(save.result)
        try:
            save.future = async_save(state, checkpoint_id=place, stager=self._stager)
        finally:
            self._inside = False
        self._running = save
        if self._is_over:  # it was undone meanwhile
            wait([save.future])
        with suppress(Exception):  # the save is under way, whatever becomes of what is noted of it
            save.future.add_done_callback(self._end)
            self.facts["num_saves"] += 1
            state_account.waited(begun_ns, ready_ns, step=self.facts["num_saves"])
            self._context.note(Applied(NAME, self.facts))
        return later

    def _end(self, _: object) -> None:
        self._done[0] = 1

    def _leave(self, reason: str) -> None:
        """Note why a call was left to torch."""
        if reason not in self.facts["left_alone"]:
            self.facts["left_alone"].append(reason)
        if self.facts["num_saves"]:
            self._context.note(Applied(NAME, self.facts))
        else:
            self._context.note(RefusedRemedy(NAME, reason))


def _unfit_call(args: tuple[Any, ...], options: Mapping[str, Any]) -> str | None:
    """Return why a call is left to torch; its form is the same on all ranks."""
    given = {name for name, value in options.items() if value is not None} - {"state_dict", "checkpoint_id"}
    if len(args) > 1 or given:
        return f"it is given {', '.join(sorted(given)) or 'more than a state'}"
    place = options.get("checkpoint_id")
    if place is None or not HeadwayWriter.validate_checkpoint_id(place):
        return f"{place} is no folder"
    return None if isinstance(args[0] if args else options.get("state_dict"), dict) else "its state is no dictionary"


def _unfit(state: dict[str, Any], place: Any) -> str | None:
    """Return why a save would fail, as far as can be told before it begins: then torch's fails in the call itself.

    All ranks agree, since either all or none of them may leave it to torch.
    """
    group, reason = own_group(), unstorable(state)
    if reason is None and (group is None or dist.get_rank() == 0):
        try:
            _check_place(Path(os.path.abspath(place)))
        except (InputError, OSError) as cause:
            reason = str(cause)
    reasons = [reason]
    if group is not None:
        reasons = [None] * dist.get_world_size(group)
        dist.all_gather_object(reasons, reason, group=group)
    return next((reason for reason in reasons if reason is not None), None)


def _check_place(target: Path) -> None:
    """Raise `InputError` or `OSError` unless a checkpoint can be written at `target`: a folder beside it is tried."""
    check_target(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.rmdir(tempfile.mkdtemp(dir=target.parent, prefix=".headway-"))
