"""The profiler under deep windows: switched by its low-level calls, its library attached no longer than it has to be.

CUPTI slows every launch for as long as it is attached, a quarter of a step of short kernels, also while nothing is
recorded. The profiler's library (kineto) asks two variables of the C environment what to do behind a profile:

    TEARDOWN_CUPTI=1              a thread waits for the next call of the driver, and has CUPTI leave the process there
    DISABLE_CUPTI_LAZY_REINIT     not set: a later profile attaches it again

CUDA graphs do not survive that before CUDA 12.6 (torch/profiler/profiler.py), and were little tried since: where one
was captured CUPTI stays, as it does behind `torch.profiler`. What the script sees in `os.environ` stays as it is.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from headway.runtime.calls.probe_gradient import graphs_captured
from headway.runtime.host import device
from headway.runtime.recorder.probes import now

SWITCHES = ("TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT")
"""Variables that kineto asks; where the script, or its user, has set one of them it stays as it is."""

LEAST_CUDA = (12, 6)
"""Version of CUDA from which on CUPTI may leave and come back."""

LEAVES_NS = 200_000_000
"""Time in which CUPTI has left, with some calls of the driver in it."""


def may_detach() -> bool:
    """Whether CUPTI may leave behind a window. False where there is none, as on other kinds of device."""
    version = str(getattr(sys.modules["torch"].version, "cuda", None) or "0.0").split(".")
    known = tuple(int(part) for part in version[:2] if part.isdecimal()) >= LEAST_CUDA
    return known and not graphs_captured() and not any(name in os.environ for name in SWITCHES)


def tell_kineto(detach: bool | None) -> None:
    """Say whether CUPTI leaves behind the profile that begins or ends; None takes back what was said."""
    said = {None: ("", ""), True: ("1", ""), False: ("0", "1")}[detach]
    for name, value in zip(SWITCHES, said, strict=True):
        if name not in os.environ:
            os.putenv(name, value) if value else os.unsetenv(name)


def await_detached(since_ns: int) -> None:
    """Call the driver until CUPTI, which was told to leave at `since_ns`, has had the time to: it leaves inside a call.

    Another profile, or the end of the process, must not meet it on its way out.
    """
    while now() - since_ns < LEAVES_NS and not device.capturing():
        for one in device.seen():
            one.release(one.record())
        time.sleep(LEAVES_NS / 20e9)


def has_kernels(path: str) -> bool:
    """Whether the profiler's JSON at `path` has a row of category 'kernel'."""
    tail = b""
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            if b'"kernel"' in tail + block:
                return True
            tail = block[-16:]
    return False


def low_level_start(*, host: bool = True, detach: bool = False) -> None:
    """Switch the profiler on: for the devices in use, and for the operations of the `host`."""
    from torch._C._autograd import _enable_profiler, _prepare_profiler
    from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, _ExperimentalConfig

    tell_kineto(detach)
    config = ProfilerConfig(ProfilerState.KINETO, False, False, False, False, False, _ExperimentalConfig())
    known = ProfilerActivity.__members__
    activities = {known[name] for name in device.activities() if name in known}
    if host or not activities:
        activities.add(ProfilerActivity.CPU)
    _prepare_profiler(config, activities)
    _enable_profiler(config, activities)


def low_level_stop(*, detach: bool = False) -> Any:
    """Switch the profiler off; the result has `save(path)`, which writes Kineto's JSON."""
    from torch._C._autograd import _disable_profiler

    tell_kineto(detach)
    return _disable_profiler()


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Keep the profiler's "USDT:" lines, which it prints from C++, off stderr; what else comes is passed on."""
    try:
        sys.stderr.flush()
        kept = os.dup(2)
        memory = os.memfd_create("headway-stderr")  # never a disk, which may be full when the profiler has to stop
    except (OSError, ValueError, AttributeError):
        yield
        return
    with os.fdopen(memory, "w+b") as aside:
        os.dup2(aside.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            aside.seek(0)
            rest = b"".join(line for line in aside if not line.startswith(b"USDT:"))
            if rest:
                with contextlib.suppress(OSError):
                    os.write(2, rest)
