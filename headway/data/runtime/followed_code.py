"""Whether looks follow all code of the script's that reading an example runs.

A look finds code by its names: what a dataset's class, its attributes and the globals of its functions lead to. Code
that is found in another way goes by settings that no look compares: a registry of torch's operators or of codecs, a
class known only from pickled bytes, a method that the script gave to `torch.Tensor`, a function by a name in the data.
So a few examples are read while Python tells each call, and each function of the script's that runs has to be one that
a look has met; so has each of its classes that is unpickled.

>>> script = {"__name__": "__main__"}
>>> exec("def doubled(index): return 2 * index", script)
>>> unfollowed([script["doubled"]], lambda: script["doubled"](3)) is None
True
>>> unfollowed([], lambda: script["doubled"](3))
"reading it runs 'doubled', which is found in no way that can be followed"
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache
from types import FrameType, FunctionType
from typing import Any

from headway.data.runtime.outcome import OfDataset
from headway.runtime.reach import codes_in, is_installed, of_library, reached

UNFOLLOWED = "reading it runs {!r}, which is found in no way that can be followed"
UNPICKLED = "reading it unpickles a {}, whose class no look has met"
"""Why a dataset is left alone: what such code goes by may change unseen."""


def unfollowed(holders: Iterable[Any], read: Callable[[], object]) -> str | None:
    """Return why looks at `holders` would miss something that `read`, which reads examples, goes by; None: they do not.

    For children: what Python tells of calls, it tells nobody else any more. Raises what `read` raises.
    """
    found = [value for value, _ in reached(*holders)]
    known = {id(code) for value in found if isinstance(value, FunctionType) for code in codes_in(value.__code__)}
    strange: list[str] = []

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and not strange and id(frame.f_code) not in known and _is_scripts(frame):
            strange.append(UNFOLLOWED.format(frame.f_code.co_qualname))

    with_classes = _unpickled()
    with_classes.clear()
    threading.setprofile(called)
    sys.setprofile(called)
    try:
        read()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    classes = {(value.__module__, value.__qualname__) for value in found if isinstance(value, type)}
    strange += [UNPICKLED.format(name) for module, name in with_classes if (module, name) not in classes]
    return OfDataset(strange[0]) if strange else None


def _is_scripts(frame: FrameType) -> bool:
    """Tell whether a frame runs code of the script's own, or code that nobody owns."""
    module = frame.f_globals.get("__name__")
    return not of_library(module) and not is_installed(module)


@cache
def _unpickled() -> list[tuple[str, str]]:
    """Return the list that fills with the script's classes, by module and name, as they are unpickled from now on."""
    found: list[tuple[str, str]] = []

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "pickle.find_class" and not (of_library(arguments[0]) or is_installed(arguments[0])):
            found.append((arguments[0], arguments[1]))

    sys.addaudithook(heard)
    return found
