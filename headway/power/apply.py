"""'power.filler': a process of scheduling class idle beside each rank works while the rank waits, and yields at once.

It reads what the rank is in from the progress page of its ring: a collective, a send or receive, a save or load of a
checkpoint. It is no child of the rank: a script that waits for its children does not meet it. It ends when the rank
ends, and ending it changes nothing for the rank. On a rank that computes on an accelerator it is refused: filling an
accelerator takes work on it, which is not shown here.

    rank     ====== computes ======|--- waits ---|====== computes ======
    filler                           ##########
                                    on_after_s  off_within_s
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from headway.core.machine.child import START_S, is_able, start_idle
from headway.power.remedies import FillerParameters
from headway.runtime.host.device import device_type
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy
from headway.trace.events.vocabulary import KIND, MOVING, SPANS
from headway.trace.rings.ring import OP, PAGE, PAGE_OFFSET, SINCE_NS

NAME = "power.filler"

GAPS = tuple(span.code for span in SPANS.values() if KIND[span.kind] in (*MOVING, KIND["CKPT"]))
"""Codes of the operations in which a rank waits."""

SCRIPT = Path(__file__).with_name("burn.py")
"""What the process runs: the standard library only, so that it starts in milliseconds."""


def fill_gaps(parameters: FillerParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy."""
    on_after_s, off_within_s, level = parameters.on_after_s, parameters.off_within_s, parameters.level
    device = device_type()
    if device != "cpu":
        return RefusedRemedy(
            NAME, f"the rank computes on {device}; fillers are for cores. Set a floor: headway power export"
        )
    if not is_able():
        return RefusedRemedy(NAME, "this system has no scheduling class idle: a filler could take cores from training")
    recorder = context.probes.recorder
    if not recorder.open():
        return RefusedRemedy(NAME, f"nothing is recorded ({recorder.broken}): a filler cannot see when the rank waits")
    numbers = (os.getpid(), on_after_s, off_within_s, level, PAGE_OFFSET, OP, SINCE_NS, PAGE.size)
    arguments = [recorder.path, *map(str, numbers), ",".join(map(str, GAPS))]
    pid = start_idle([sys.executable, "-I", "-S", str(SCRIPT), *arguments])
    if pid is None:
        return RefusedRemedy(NAME, f"its process did not start within {START_S:g} s")

    try:
        descriptor = os.pidfd_open(pid)  # by its number another process could be met once it has ended
    except ProcessLookupError:
        return RefusedRemedy(NAME, "its process ended at once")

    held = [descriptor]

    def stop() -> None:
        """End the filler, if it has not ended by itself; once."""
        while held:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(held[-1], signal.SIGTERM)
            os.close(held.pop())

    context.undos.append(stop)
    return Applied(NAME, {"pid": pid, "on_after_s": on_after_s, "off_within_s": off_within_s, "level": level})
