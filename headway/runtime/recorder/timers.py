"""Always-on timers of the two critical segments of a step, forward and backward, on the host's clock.

Backward is the call of `torch.autograd.backward`; forward is what lies
between a batch (or an update) and the backward that follows, so it is derived
when the run is finalised (`headway.trace.recording.rows`) and costs nothing here. On
a device the host only launches: there `device_timers` records events as well.
`HEADWAY_TIMERS=off` leaves all of this and the progress page out.
"""

from __future__ import annotations

import _thread
import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from headway.runtime.recorder.probes import Probes, now
from headway.runtime.script.batches import number_of
from headway.runtime.script.gradients import BACKWARD as BY_BACKWARD
from headway.runtime.script.gradients import leaf_of
from headway.trace.events.vocabulary import BEHIND_BACKWARD, BEHIND_UPDATE, SPANS
from headway.trace.rings.ring import OP, SINCE_NS

FORWARD, BACKWARD = SPANS["segment.forward"].code, SPANS["segment.backward"].code
CALL = SPANS["forward"].code

LOOK_EVERY = 8
"""A power of two: at every so many updates a loss on the CPU is read, for the progress page and for what is bad."""

OFTEN, LOOK_NS = 512, 50_000_000
"""Behind so many updates it is read so often at most: a look takes 0.1 ms where training has emptied the caches."""


def backward(original: Callable[..., Any], probes: Probes) -> Callable[..., Any]:
    """Wrap `torch.autograd.backward`: its time on the host; a backward inside a backward is sorted out later.

    The record of the update that follows carries it: a record less per step. Earlier micro-batches get their own.
    """
    emit, cells, steps, last = probes.emit, probes.page.cells, probes.steps, probes.last_backward
    gradients, forwarding, trainer, gap = probes.gradients, probes.forwarding, probes.trainer, probes.gap
    from headway.runtime.script.bad_loss import (  # here: every process that starts would pay for what it imports
        LossLooks,
        judge,
    )

    probes.losses = LossLooks()
    probes.tables["losses"] = probes.losses.curve
    begun, optimized, ident = gradients.begun, gradients.optimized, _thread.get_ident
    stepping, gap_open = probes.stepping, gap.open
    watching, uses = gradients.uses.on, gradients.uses
    probes.listeners.append(uses.listener(lambda: probes.models.modules() if probes.models else (),
                                          lambda: probes.tables.setdefault("compute", {})))  # fmt: skip
    gradients.watched[0] = True
    look_from_ns = 0
    probes.tables["timers"] = {"clock": "host"}
    for function in (look_at, number_of, probes.page.seen_loss, probes.losses.seen, judge, probes.failed,
                     gradients.began, gradients.ended, leaf_of, begin, gradients._chosen, probes.advance, probes.wake,
                     gap.note_loop):  # fmt: skip
        out_of_compiler(function)
    for look in (uses.began, gradients.began):  # one wrapper stands around all that reads tensors so, in each module
        out_of_compiler(look, callees=True)

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        """Run backward and record how long that took."""
        nonlocal look_from_ns
        begun[0] += 1
        trainer[0] = ident()
        fresh = 0 if optimized[0] else begin(probes, args[0] if args else kwargs.get("tensors"))
        outer, page = forwarding[0], cells[0]
        if watching[0] and not outer:
            uses.began()
        start = now()
        page[SINCE_NS] = start
        page[OP] = BACKWARD
        try:
            forwarding[0] = True
            result = original(*args, **kwargs)
        finally:
            forwarding[0] = outer
        try:
            page[OP] = 0
            if last[1]:
                emit(BACKWARD, last[0], last[1], 0, -1, last[2])
            last[0], last[1], last[2] = start, now() - start, fresh
            if watching[0] and not outer:
                uses.ended()
            if not optimized[0]:
                gradients.ended()
                gap_open[0] = BEHIND_UPDATE
                if gap.asks[0]:
                    gap.note_loop()
            elif not stepping[0]:  # in a closure, what follows is the update
                gap_open[0] = BEHIND_BACKWARD
            if not steps[0] & (LOOK_EVERY - 1) and start >= look_from_ns:
                look_from_ns = start + LOOK_NS if steps[0] >= OFTEN else 0
                look_at(args[0] if args else kwargs.get("tensors"), probes)
        except Exception as cause:
            probes.failed("segment.backward", cause)
        return result

    return out_of_compiler(hidden(backward))


def begin(probes: Probes, roots: Any) -> int:
    """Return 1 if a backward from `roots` begins a new cycle of gradients; that ends a step if nothing else does."""
    try:
        fresh, ended = probes.gradients.began(roots)
        if ended:
            probes.advance(BY_BACKWARD)
    except Exception as cause:
        probes.failed("fresh gradients", cause)
        return 0
    return fresh


F = TypeVar("F", bound=Callable[..., object])

HIDDEN = " [importlib._bootstrap]"
"""What ends the file name of a code that Python's warnings do not count: that of its own import is so named."""


def hidden(function: F) -> F:
    """Have warnings that count callers (`stacklevel`) pass over the frame of `function`: a caller that is not there.

    Without this a warning of torch's names another line, and a filter by module lets other ones through. Python passes
    over the frames of its import, which it knows by their file names (`warnings._is_internal_frame`).
    """
    code = function.__code__
    if not code.co_filename.endswith(HIDDEN):
        function.__code__ = code.replace(co_filename=code.co_filename + HIDDEN)
    return function


def out_of_compiler(function: Callable[..., Any], *, callees: bool = False) -> Callable[..., Any]:
    """Have torch.compile run the frame of `function` as it is: code that it cannot trace, where it breaks anyway.

    Without this a compiled region that calls `backward()`, which always breaks the graph, would have the compiler try
    the clock and the stores as well. What `function` calls is compiled as ever, but for headway's own `callees`.
    """
    import torch

    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction
        strategy = frames._FrameExecStrategy(action.SKIP, action.SKIP if callees else action.DEFAULT)
        frames.set_code_exec_strategy(function.__code__, strategy)
    elif hasattr(frames, "skip_code"):  # before torch 2.7
        frames.skip_code(function.__code__)
    return function


def look_at(root: Any, probes: Probes) -> None:
    """Keep the loss that a backward began from, where reading it disturbs nobody; note a device without events."""
    torch = sys.modules["torch"]
    if type(root) is not torch.Tensor or torch._C._len_torch_function_stack():
        return
    kind = root.device.type
    if kind == "cpu" and root.numel() == 1 and not torch._C._len_torch_dispatch_stack():
        loss = number_of(root)
        probes.page.seen_loss(loss)
        if probes.losses.seen(loss, probes.steps[0] + 1):
            probes.tables["bad_losses"] = probes.losses.bad
            probes.write_tables_beside()
    elif kind != "cpu" and not probes.device_timers:
        reason = f"{kind} has no events that headway can time by: segments are the host's launching time"
        probes.tables["timers"] = {"clock": "host", "reason": reason}


def flush_last(probes: Probes) -> None:
    """Write the forward and the backward that no update followed."""
    if (forward := probes.last_forward[0]) is not None:
        probes.last_forward[0] = None
        probes.emit(CALL, *forward)
    start, duration, fresh = probes.last_backward
    if duration:
        probes.last_backward[1] = 0
        probes.emit(BACKWARD, start, duration, 0, -1, fresh)
