"""Probes of torch.distributed.pipelining: which stage and microbatch each forward and backward is of.

Wrapped are the three functions of a stage that all of torch's schedules call:
`forward_one_chunk`, `backward_one_chunk` (whole, or the part for the input
only) and `backward_weight_one_chunk`. What a plan has to know before it gives
a schedule another order is written to RUN/tables when the schedule is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from headway.runtime.calls.probe_comm import argument
from headway.runtime.recorder.probes import Probes, now
from headway.trace.events.vocabulary import SPANS

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
