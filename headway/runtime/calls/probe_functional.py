"""Probes of functional collectives: what tensor and sequence parallelism, and DTensor, communicate with.

They are launched without blocking and waited for when their result is used, so the wait is recorded, as it is for
asynchronous calls of torch.distributed. What was launched is found again by the memory of its result. The backwards
of these collectives launch inside of torch's operators; there the group is read from the frame that waits. What
torch.compile generates calls the operators themselves and is not seen.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from headway.core.machine.interruptions import pass_on
from headway.runtime.calls.probe_comm import COLLECTIVE, MAX_PENDING, UNKNOWN_WORK, argument, groups_of, tensor_bytes
from headway.runtime.recorder.probes import Probes, now
from headway.trace.events.vocabulary import COLLECTIVES, SPANS

LAUNCHES: dict[str, str] = {
    "all_reduce": "all_reduce", "broadcast": "broadcast", "all_to_all_single": "all_to_all_single",
    "all_gather_single": "all_gather_into_tensor", "all_gather_tensor": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor", "reduce_scatter_tensor": "reduce_scatter_tensor",
    "all_reduce_coalesced": "all_reduce_coalesced",
    "all_gather_single_coalesced": "all_gather_coalesced", "all_gather_into_tensor_coalesced": "all_gather_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
}  # fmt: skip
"""Function of torch.distributed._functional_collectives -> the collective (`vocabulary.COLLECTIVES`) that it is.

Some names are older ones of others: only the outermost is looked at.
"""

Launched = tuple[int, int, int, int]
"""(group, seq, bytes, index of the collective)."""

UNTOLD: Launched = (-1, -1, 0, UNKNOWN_WORK)


class Launches:
    """Functional collectives that were launched and not waited for."""

    def __init__(self, probes: Probes) -> None:
        self._groups = groups_of(probes)
        self._numbers: dict[str, int] = {}
        self._pending: dict[int, Launched] = {}
        self.current: tuple[int, int] | None = None
        """Group and collective of the launch that is going on."""

    def number(self, group: Any, tag: str = "") -> int:
        """Return the number of a group, given in any of the forms that functional collectives take."""
        import torch.distributed as dist
        import torch.distributed._functional_collectives as functional

        if isinstance(group, list):
            return -1  # deprecated: asking torch would warn a second time
        name = str(functional._resolve_group_name(group, tag))
        number = self._numbers.get(name)
        if number is None:
            resolve: Any = dist.distributed_c10d
            found = resolve._resolve_process_group(name)
            number = self._numbers[name] = self._groups.of(found)
        return number

    def add(self, result: Any) -> None:
        """Note what the present launch returned."""
        if self.current is None:
            return
        group, corr = self.current
        seq = self._groups.take(group) if group >= 0 else -1
        self._pending[result.data_ptr()] = (group, seq, tensor_bytes(result), corr)
        if len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]

    def take(self, tensor: Any, name: object) -> Launched:
        """Return what is known of a result that is waited for; `name` is that of its group, where the waiter says."""
        found = self._pending.pop(tensor.data_ptr(), None)
        if found is None and isinstance(name, str):
            group = self.number(name)
            found = (group, self._groups.take(group), tensor_bytes(tensor), UNKNOWN_WORK)
        return UNTOLD if found is None else found


def launches_of(probes: Probes) -> Launches:
    """Return the process's `Launches`, made at first use."""
    groups = groups_of(probes)
    if groups.launches is None:
        groups.launches = Launches(probes)
    found: Launches = groups.launches
    return found


def launch(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap one functional collective: its results are then known when they are waited for."""
    import torch

    launches, is_compiling = launches_of(probes), torch.compiler.is_compiling
    group_of, tag_of = argument(original, "group"), argument(original, "tag")
    corr = COLLECTIVES.index(LAUNCHES[original.__name__])

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        """Launch the collective."""
        if is_compiling() or launches.current is not None:
            return original(*args, **kwargs)
        try:
            launches.current = (launches.number(group_of(args, kwargs), tag_of(args, kwargs) or ""), corr)
        except Exception as cause:
            pass_on(cause)
            launches.current = None  # arguments that make no sense are the original's to refuse
        try:
            return original(*args, **kwargs)
        finally:
            launches.current = None

    return called


def launched(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `_maybe_wrap_tensor`, which every functional collective hands its result to."""
    launches = launches_of(probes)

    @functools.wraps(original)
    def wrap(self: Any) -> Any:
        """Note the result of the launch that is going on, then wrap it."""
        if launches.current is not None:
            try:
                launches.add(self)
            except Exception as cause:
                probes.failed("functional collectives", cause)
        return original(self)

    return wrap


def wait_tensor(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `wait_tensor`: the part of a functional collective that the training thread is blocked for."""
    import torch

    emit, page, launches, is_compiling = probes.emit, probes.page, launches_of(probes), torch.compiler.is_compiling

    @functools.wraps(original)
    def wait(tensor: Any) -> Any:
        """Wait for the tensor, and record how long that took."""
        if is_compiling():
            return original(tensor)
        known = UNTOLD
        try:
            known = launches.take(tensor, sys._getframe(1).f_locals.get("group_name"))
        except Exception as cause:
            probes.failed("functional collectives", cause)
        start = now()
        try:
            page.opened(COLLECTIVE, start, known[0], known[1])
            result = original(tensor)
        finally:
            page.closed()
        try:
            emit(COLLECTIVE, start, now() - start, *known)
        except Exception as cause:
            probes.failed("functional collectives", cause)
        return result

    return wait


# Probes of torch.distributed.pipelining: which stage and microbatch each forward and backward is of.
#
# Wrapped are the three functions of a stage that all of torch's schedules call:
# `forward_one_chunk`, `backward_one_chunk` (whole, or the part for the input
# only) and `backward_weight_one_chunk`. What a plan has to know before it gives
# a schedule another order is written to RUN/tables when the schedule is made.

FORWARD, BACKWARD, INPUT, WEIGHT = (SPANS[f"stage.{part}"].code for part in ("forward", "backward", "input", "weight"))


def forward(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap the forward of one microbatch."""
    return _part(original, probes, "fwd_chunk_id", lambda stage, args, kwargs: FORWARD)


def backward(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap the backward of one microbatch, or its part for the input; in an evaluation it does nothing."""
    is_whole = argument(original, "full_backward")

    def code_of(stage: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if not stage.has_backward:
            return 0
        return BACKWARD if is_whole(args, kwargs) else INPUT

    return _part(original, probes, "bwd_chunk_id", code_of)


def weight(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap the part of a backward for the weights."""
    return _part(original, probes, "bwd_chunk_id", lambda stage, args, kwargs: WEIGHT if stage.has_backward else 0)


def _part(
    original: Callable[..., Any],
    probes: Probes,
    name: str,
    code_of: Callable[[Any, tuple[Any, ...], dict[str, Any]], int],
) -> Callable[..., Any]:
    """Wrap a method of a stage whose argument `name` is the microbatch; `code_of` says as what it is recorded, 0 = no.

    A forward without a backward, which is one of an evaluation, has no record either.
    """
    emit, microbatch_of = probes.emit, argument(original, name)

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        """Compute, and record how long that took."""
        start = now()
        result = original(*args, **kwargs)
        try:
            duration, stage = now() - start, args[0]
            code = code_of(stage, args, kwargs)
            if code and stage.has_backward:
                emit(code, start, duration, int(stage.stage_index), int(microbatch_of(args, kwargs)))
        except Exception as cause:
            probes.failed("stage", cause)
        return result

    return called


PARTS: dict[str, Callable[[Callable[..., Any], Probes], Callable[..., Any]]] = {
    "forward_one_chunk": forward,
    "backward_one_chunk": backward,
    "backward_weight_one_chunk": weight,
}
"""Method of a stage -> its wrapper."""


def schedule_init(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap the constructor of the schedules with one stage per rank: note what was made."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # the name it has in torch
        """Construct, then note."""
        original(self, *args, **kwargs)
        try:
            stage, known = self._stage, probes.tables.get("pipeline")
            probes.tables["pipeline"] = {
                "schedule": type(self).__name__,
                "stage": int(stage.stage_index),
                "num_stages": int(stage.num_stages),
                "num_microbatches": int(self._n_microbatches),
                "schedules": 1 + (known["schedules"] if known else 0),
            }
        except Exception as cause:
            probes.failed("pipeline", cause)

    return __init__


# Probes of tensor parallelism: which matmuls stand beside a collective over their rows, for plans that overlap both.

STYLES = {"ColwiseParallel": "ag", "RowwiseParallel": "rs"}
"""Style -> what its collective does: gather the rows before the linear, or scatter them after it."""


def style_apply(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `_apply` of a style: a linear of sharded rows notes the shape of its matmul at its first forward."""
    import torch

    way = STYLES[original.__qualname__.partition(".")[0]]

    @functools.wraps(original)
    def apply(style: Any, module: Any, mesh: Any) -> Any:
        """Shard the module, and have its first forward noted."""
        made = original(style, module, mesh)
        try:
            layouts = style.input_layouts if way == "ag" else style.output_layouts
            if isinstance(made, torch.nn.Linear) and mesh.ndim == 1 and layouts[0].is_shard() and layouts[0].dim >= 0:
                _note_matmul(made, way, int(mesh.size()), probes)
        except Exception as cause:
            probes.failed("tensor parallelism", cause)
        return made

    return apply


def _note_matmul(linear: Any, way: str, ranks: int, probes: Probes) -> None:
    """Add the linear's matmul to the tables at its first forward; its input then is whole in all its rows."""

    def note(module: Any, args: tuple[Any, ...]) -> None:
        handle.remove()
        try:
            columns, inner = module.weight.to_local().shape
            rows = args[0].shape[:-1].numel()
            table = probes.tables.setdefault("matmuls", {"ranks": ranks, "shapes": {}})
            shape = f"{'' if way == 'ag' else 'rs:'}{rows}x{inner}x{columns}"
            table["shapes"][shape] = table["shapes"].get(shape, 0) + 1
        except Exception as cause:
            probes.failed("tensor parallelism", cause)

    handle = linear.register_forward_pre_hook(note)
