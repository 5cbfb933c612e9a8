"""`dcp.save`, `async_save` and `load` with headway's parts and a process group of their own.

    import headway.checkpoint as dcp                  # the calls stay as they are

    future = dcp.async_save(state, checkpoint_id="ckpts/step-40")
    dcp.load(state, checkpoint_id="ckpts/step-40")

`async_save` copies into memory of its own, and its thread talks over a gloo
group of its own: over the caller's its collectives would meet those of the
training thread in unlike orders, and the job would hang. The thread is a
plain one: nothing is imported anew. Errors of ours come as they are.

>>> import tempfile, torch, warnings
>>> warnings.simplefilter("ignore")
>>> place = tempfile.mkdtemp() + "/step-40"
>>> _ = async_save({"w": torch.ones(2)}, checkpoint_id=place).result()
>>> state = {"w": torch.zeros(2)}
>>> load(state, checkpoint_id=place)
>>> state["w"].tolist()
[1.0, 1.0]
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from headway.checkpoint.runtime.planner import HeadwayPlanner
from headway.checkpoint.runtime.plugins import HeadwayReader, HeadwayWriter, Place
from headway.checkpoint.runtime.restore import Verify
from headway.checkpoint.runtime.stager import HeadwayStager, Save
from headway.core.errors import FormatError, HeadwayError


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Place,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    redundancy: str = "none",
    overwrite: bool = True,
) -> Metadata:
    """Save as `dcp.save` does, into headway's files; all ranks (of `process_group`: by default of a gloo group of
    its own) call it. Returns once the checkpoint is committed. Raises the first rank's `HeadwayError` as it is.
    """
    writer = HeadwayWriter(checkpoint_id, redundancy=redundancy, overwrite=overwrite)
    with _plain_errors():
        try:
            done: Metadata = state_dict_saver.save(
                state_dict, storage_writer=writer, planner=planner or HeadwayPlanner(),
                process_group=process_group or own_group(),
            )  # fmt: skip
            return done
        finally:
            writer.abandon()


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Place,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    stager: HeadwayStager | None = None,
    redundancy: str = "none",
    overwrite: bool = True,
) -> Future[Metadata]:
    """Save as `save` does, behind the training: return once the state has been copied.

    What goes wrong afterwards is raised by the future, else by the next call. Group and `stager` are made at the
    first call and kept; the thread is a plain one: nothing is imported anew.
    """
    stager, group = stager or _own_stager(), process_group or own_group()
    writer = HeadwayWriter(checkpoint_id, redundancy=redundancy, overwrite=overwrite)
    state = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()}
    staged = stager.stage(state)
    result = Save()
    running = state_dict_saver.async_save(
        staged, storage_writer=writer, planner=planner or HeadwayPlanner(), process_group=group, async_stager=_Staged()
    )
    assert isinstance(running, Future), "what is staged already is no future"
    del staged, state

    def hand_on(done: Future[Any]) -> None:
        writer.abandon()
        try:
            with _plain_errors():
                result.set_result(done.result())
        except BaseException as error:  # whatever it is, it is the caller's
            result.set_exception(error)

    running.add_done_callback(hand_on)
    stager.watch(result)
    return result


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Place,
    process_group: dist.ProcessGroup | None = None,
    verify: Verify = "read",
) -> None:
    """Load as `dcp.load` does, from headway's checkpoints and stock ones; raises the first rank's error as it is."""
    if not Path(checkpoint_id).is_dir():
        raise FormatError(f"{checkpoint_id} is no folder. Name the folder of a checkpoint.")
    reader = HeadwayReader(checkpoint_id, verify=verify)
    with _plain_errors():
        reader.read_metadata()
        try:
            state_dict_loader.load(state_dict, storage_reader=reader, process_group=process_group or own_group())
        finally:
            reader.close()


def own_group() -> dist.ProcessGroup | None:
    """Return a gloo group over all ranks that nothing else uses; None without a process group.

    Made at the first call, which all ranks make together. Pass it to `dcp.async_save` as `process_group` where that
    is called itself.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return _group_beside(dist.group.WORLD)


@lru_cache(maxsize=1)
def _group_beside(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group of checkpoints that belongs to the job's group."""
    made: dist.ProcessGroup = dist.new_group(backend="gloo", group_desc="headway-checkpoint")
    return made


@lru_cache(maxsize=1)
def _own_stager() -> HeadwayStager:
    return HeadwayStager()


class _Staged(HeadwayStager):
    """Hands on a state that is staged already."""

    def stage(self, state_dict: Any) -> Any:
        """Return the state as it is."""
        return state_dict


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the error that a rank met, of ours or of the file system, rather than DCP's collection of tracebacks."""
    try:
        yield
    except CheckpointException as cause:
        for rank, (error, _) in sorted(cause.failures.items()):
            if isinstance(error, HeadwayError):
                raise type(error)(f"rank {rank}: {error}") from cause
            if isinstance(error, OSError):
                raise error from cause
        raise
