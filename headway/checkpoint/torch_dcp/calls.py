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

import itertools
import threading
import time
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

from headway.checkpoint.restores.restore import Verify
from headway.checkpoint.torch_dcp.planner import HeadwayPlanner
from headway.checkpoint.torch_dcp.plugins import HeadwayReader, HeadwayWriter, Place
from headway.checkpoint.torch_dcp.stager import HeadwayStager, Save
from headway.core.errors import FormatError, HeadwayError, InputError
from headway.runtime.in_rank import state_account
from headway.runtime.lane import separate_group

_NUMBERS = itertools.count(1)
"""Saves behind the training, in the order of their calls: what the record calls them by."""


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
    return _saved(state_dict, writer, planner, process_group or own_group())


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
    """Save as `save` does, behind the training: return once the state may be changed.

    What goes wrong afterwards is raised by the future, else by the next call. Group and `stager` are made at the
    first call and kept; the thread is a plain one: nothing is imported anew. Raises `InputError` for a group without
    a CPU backend: its collectives would run on the device, beside those of the training.
    """
    begun_ns = time.perf_counter_ns()
    stager, group = stager or _own_stager(), process_group or own_group()
    if group is not None and "cpu:" not in dist.get_backend_config(group):
        backend = dist.get_backend(group)
        raise InputError(f"a group of {backend} cannot save behind the training. Leave process_group out.")
    writer = HeadwayWriter(checkpoint_id, redundancy=redundancy, overwrite=overwrite)
    with state_account.inside("checkpoint.snapshot"):
        staged = [stager.stage(without_stateful(state_dict))]
    result, number, num_bytes = Save(), next(_NUMBERS), stager.num_bytes

    def write() -> None:
        start_ns = time.perf_counter_ns()
        try:
            done = _saved(_arrived(staged[0]), writer, planner, group)
            staged.clear()  # once it is written nobody holds the copy, and its memory serves the next one
        except BaseException as error:  # whatever it is, it is the caller's
            result.unsaved = staged
            result.set_exception(error)
            return
        end_ns = time.perf_counter_ns()
        state_account.background("checkpoint.persist", start_ns, end_ns, bytes=num_bytes, step=number)
        state_account.background("checkpoint.commit", end_ns, end_ns, bytes=0, step=number)
        result.set_result(done)

    state_account.snapshotted(begun_ns, time.perf_counter_ns(), bytes=num_bytes, step=number)
    stager.watch(result)
    # Not by way of torch's async_save: what it does per tensor before its thread begins would hold training up.
    # Last of all: whoever is told that this has failed may save in another way.
    threading.Thread(target=write, name="headway-checkpoint").start()
    return result


def _arrived(staged: dict[str, Any] | Future[dict[str, Any]]) -> dict[str, Any]:
    """Return a staged state once its copies are there; the future is not kept."""
    return staged.result() if isinstance(staged, Future) else staged


def without_stateful(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state in which the states of objects replace them, as DCP does before it saves."""
    return {key: part.state_dict() if isinstance(part, Stateful) else part for key, part in state_dict.items()}


def _saved(
    state: dict[str, Any], writer: HeadwayWriter, planner: SavePlanner | None, group: dist.ProcessGroup | None
) -> Metadata:
    """Save through DCP; leave nothing half-written behind."""
    with _plain_errors():
        try:
            done: Metadata = state_dict_saver.save(
                state, storage_writer=writer, planner=planner or HeadwayPlanner(), process_group=group
            )
            return done
        finally:
            writer.abandon()


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
    return separate_group("headway-checkpoint", backend="gloo")


@lru_cache(maxsize=1)
def _own_stager() -> HeadwayStager:
    return HeadwayStager()


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
