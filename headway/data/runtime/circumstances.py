"""What all code goes by besides its own data: modes of torch, environment, current folder, context variables.

A worker process has them as they were when it was forked, a thread that was
started has some of its own. Two pictures show whether something was set in
between.

>>> before = circumstances()
>>> with torch.no_grad():
...     circumstances() == before
False
>>> circumstances() == before
True
"""

from __future__ import annotations

import os
import threading
from contextvars import copy_context
from functools import cache
from typing import Any

import torch

from headway.data.runtime.contents import contents
from headway.data.runtime.surroundings import surroundings
from headway.runtime.reach import reached

_DEVICES = ("cpu", "cuda")

OF_TORCH = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI"}
"""Variables of the environment that torch sets for itself when it first compiles or profiles."""


def modes() -> tuple[object, ...]:
    """Return the settings of torch that each thread has for itself; 3 us."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled(), *autocast


@cache
def modes_of_threads() -> tuple[object, ...]:
    """Return the modes that a thread begins with."""
    found: list[tuple[object, ...]] = []
    thread = threading.Thread(target=lambda: found.append(modes()), name="headway-modes")
    thread.start()
    thread.join()
    return found[0]


def circumstances() -> tuple[object, ...]:
    """Return a picture of modes, defaults of torch, environment, folder and context; 0.1 ms."""
    try:
        folder = os.getcwd()
    except OSError:  # it was removed
        folder = ""
    # Headway's own say under which seed an example is made: that changes from one to the next.
    variables = [pair for pair in copy_context().items() if not pair[0].name.startswith("headway")]
    context = [(id(variable), id(value)) for variable, value in variables]
    defaults = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    # Asked one by one, `os.environ` decodes each variable: ten times as long, and another thread may change it.
    environment = dict(getattr(os.environ, "_data", os.environ))
    for name in OF_TORCH:
        environment.pop(os.fsencode(name), None)
    return modes(), defaults, folder, environment, context


def outside(read: Any) -> tuple[object, ...]:
    """Return a picture of all that what is in `read`, a dataset and a collate function, goes by.

    It takes 0.2 to 1 ms, and up to 2 ms more where there is much in memory to look through. Where a look fails, as
    where another thread changes a container meanwhile, the picture is equal to no other.
    """
    return *data_of(read), circumstances()


def data_of(read: Any) -> tuple[object, object]:
    """Return the part of that picture which reading itself may change: what `read` holds, and settings in its reach."""
    try:
        found = tuple(reached(read))
        return surroundings(read, found), contents(value for value, _ in found)
    except Exception:  # whatever an object raises that is looked at: the loop asked for a batch, not for a picture
        return object(), object()
