"""Whether reading an example draws random numbers: the generators are looked at before and after.

Seen are the global generators, those that the dataset gets at by attributes,
closures and globals, and `headway.data.generator()`. In a process of one
thread what moved was moved by the reading. Beside other threads it may have
been them: a training loop with dropout draws from torch's generator all the
time. There torch tells, thread by thread, which operators draw; of other
generators nobody knows.

>>> watch = GeneratorWatch([1, 2, 3])
>>> watch.around(lambda: 5), watch.around(lambda: len(torch.rand(3)), alone=True).drew
(ReadingResult(value=5, drew=False, moved=[]), True)

Whether reading an example does what others can see: it prints, logs, warns, changes files, or asks another process.

Such a reading belongs to the training thread, at the moment at which the loop asks for the batch, and each time that
it does. Where a thread reads ahead of the loop, the act is not done: `VisibleError` is raised in its place, and the
reading counts as failed even where the script catches that. What native code writes by itself is not seen.

>>> undos = []
>>> listen(lambda target, wrapper: undos.append(replace_attribute(target, wrapper)))
>>> with noting() as acts:
...     print("read")
read
>>> acts
['prints']
>>> for undo in undos: undo()
"""

from __future__ import annotations

import functools
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import resource_sharer
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway.core.machine.apart import CACHES
from headway.core.machine.hidden_thread import running
from headway.data.bytes.torch_keyed import current
from headway.runtime.calls.patches import replace_attribute
from headway.runtime.in_rank.bootstrap import active
from headway.runtime.script.draws import drawn, fingerprints, own_generators

FEEDER = "QueueFeederThread"
"""The thread of a loader worker that sends its batches: it runs no code of the script's."""

OURS = (FEEDER, "headway-")
"""Beginnings of the names of threads that run the script's code only where it is watched."""

QUIET = frozenset({"headway-gap", "headway-flight", "headway-tables", "headway-windows"})
"""Names of hidden threads that run no code of the script's, and draw nothing."""

BY_TORCH = {"torch", "device"}
"""Generators whose draws are operators of torch."""


@dataclass(frozen=True, slots=True)
class ReadingResult:
    """What came of one reading."""

    value: Any
    drew: bool | None
    """Whether it drew random numbers; None where another thread may have been it."""
    moved: list[str]
    """Generators that moved meanwhile, other than headway's own."""


class GeneratorWatch:
    """Looks at the generators around readings of one dataset; threads may share one."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._own = dataset, own_generators(dataset)
        self._num_read, self._crowded = 0, False

    def around(self, read: Callable[[], Any], *, alone: bool = False) -> ReadingResult:
        """Read, and return what came of it. `alone`: no other thread of this process may draw now."""
        block, own = current(), self._own
        asked = 0 if block is None else block.asked
        observer = _Operators() if self._crowded and not alone else None
        before = fingerprints(own)
        with nullcontext() if observer is None else observer:
            value = read()
        moved = drawn(before, fingerprints(own))
        is_new = self._look_again()
        if block is not None and block.asked != asked:
            drew: bool | None = True
        elif moved:
            drew = alone or self._was_it(moved, observer)
        else:
            drew = None if is_new else False
        return ReadingResult(value, drew, moved)

    def _was_it(self, moved: list[str], observer: _Operators | None) -> bool | None:
        """Tell whether this thread moved those generators."""
        here = threading.get_ident()
        # The thread that hands descriptors of shared tensors to other processes runs no code of the script's.
        sharer = getattr(getattr(resource_sharer, "_resource_sharer", None), "_thread", None)
        others = [
            one for one in threading.enumerate() if one.ident != here and one.ident not in running and one is not sharer
        ]
        # Most of our own threads draw nothing; one that reads examples may, and one that calls the script's handlers.
        readers = [name for ident, name in running.copy().items() if ident != here and name not in QUIET]
        if not readers and all(thread.name.startswith(FEEDER) for thread in others):
            return True
        self._crowded = True
        # A thread that the dataset started may draw for it: then it is the reading that draws.
        main = threading.main_thread()
        is_known = all(thread is main or thread.name.startswith(OURS) for thread in others)
        if observer is not None and is_known and {*moved} <= BY_TORCH:
            return observer.drew
        return None

    def _look_again(self) -> bool:
        """Search for generators after readings 1, 2, 4, 8, ..: many are made at first use; return whether any was."""
        self._num_read += 1
        if self._num_read & (self._num_read - 1):
            return False
        known = {id(generator) for generator in self._own}
        self._own = own_generators(self._dataset)
        return any(id(generator) not in known for generator in self._own)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Sees which operators of torch this thread runs, and whether one of them draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor for this
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator."""
        self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


SUMS = frozenset({
    "sum", "nansum", "mean", "std", "var", "std_mean", "var_mean", "prod", "norm", "linalg_vector_norm", "logsumexp",
    "cumsum", "dot", "vdot", "mv", "addmv", "mm", "addmm", "bmm", "baddbmm", "addbmm", "convolution",
    "mkldnn_convolution", "native_layer_norm", "native_group_norm", "native_batch_norm", "_cdist_forward", "histc",
    "index_add", "index_add_", "scatter_add", "scatter_add_", "_embedding_bag", "_fft_r2c", "_fft_c2c", "_fft_c2r",
})  # fmt: skip
"""Operators whose last bits depend on how many threads torch divides them among."""

MANY = 1 << 12
"""Numbers from which on torch may divide a sum among threads, with room for larger examples than those tried."""


class Sums(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Notes a sum over many floating-point numbers: several threads add them up in another order than one.

    >>> with Sums() as sums: _ = torch.zeros(MANY).mean()
    >>> sums.operator
    'mean'
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor for this
        self.operator = ""
        """Name of such an operator that ran in the block; '' where none did."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator."""
        name = func.overloadpacket.__name__
        if name in SUMS and any(_is_long(part) for part in args):
            self.operator = name
        return func(*args, **(kwargs or {}))


def _is_long(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.numel() >= MANY and (value.is_floating_point() or value.is_complex())
    )


# Whether reading an example does what others can see: it prints, logs, warns, changes files, or asks another process.

PRINTS, LOGS, CHANGES, STARTS = "prints", "logs", "changes files", "starts a process"
WARNS, ASKS = "shows a warning", "asks another process, whose answer may change"

WRITING = frozenset("wax+")
"""Letters in the mode of a file that can be changed through it."""


def _second(name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return arguments[1] if len(arguments) > 1 else named.get(name)


def _to_a_path(*arguments: Any, **named: Any) -> bool:
    """Whether `torch.save` writes to a file by its name, and not into memory."""
    return isinstance(_second("f", arguments, named), (str, os.PathLike))


def _for_writing(*arguments: Any, **named: Any) -> bool:
    """Whether `open` opens a file that can be changed through it."""
    mode = _second("mode", arguments, named)
    return isinstance(mode, str) and bool(WRITING & set(mode))


def _leaves_memory(*arguments: Any, **named: Any) -> bool:
    """Whether `print` writes elsewhere than into a text in memory."""
    return not isinstance(named.get("file"), io.StringIO)


STDOUT = "sys:stdout.write"

ACTS: dict[str, tuple[str, Callable[..., bool] | None]] = {
    "builtins:print": (PRINTS, _leaves_memory),
    "logging:Logger.handle": (LOGS, None),
    "builtins:open": (CHANGES, _for_writing),
    "io:open": (CHANGES, _for_writing),
    "os:rename": (CHANGES, None),
    "os:replace": (CHANGES, None),
    "os:fork": (STARTS, None),
    "os:system": (STARTS, None),
    "os:posix_spawn": (STARTS, None),
    "subprocess:Popen.__init__": (STARTS, None),
    STDOUT: (PRINTS, None),
    "os:remove": (CHANGES, None),
    "os:unlink": (CHANGES, None),
    "torch:save": (CHANGES, _to_a_path),
    "warnings:_showwarnmsg": (WARNS, None),  # what filters let through, however it is shown or collected
    **{
        f"socket:socket.{name}": (ASKS, None)
        for name in (
            "connect",
            "connect_ex",
            "recv",
            "recv_into",
            "send",
            "sendall",
            "sendmsg",
            "sendto",
        )
    },
    "multiprocessing.connection:Connection._send": (ASKS, None),
    "multiprocessing.connection:Connection._recv": (ASKS, None),
}
"""Function -> what calling it does, and which of its calls do that (None: all)."""


class VisibleError(BaseException):
    """Raised in place of an act that is not due yet. Never seen by a script."""


class _Noting(threading.local):
    """What this thread notes."""

    acts: list[str] | None = None
    """What its reading has done so far; None while it reads nothing."""
    ahead = False
    """Whether it reads ahead of the loop."""


_NOTING = _Noting()


@contextmanager
def noting(*, ahead: bool = False) -> Iterator[list[str]]:
    """Give a list that fills with what this thread does in the block; with `ahead` nothing of it is done."""
    outer, acts = _NOTING.acts, list[str]()
    try:
        with _noted_in(acts, ahead=ahead or _NOTING.ahead):
            yield acts
    finally:
        if outer is not None:
            outer += acts


def unheard() -> AbstractContextManager[None]:
    """Note nothing that this thread does in the block: it is an act of headway's own, not of the script's reading."""
    return _noted_in(None, ahead=False)


@contextmanager
def _noted_in(acts: list[str] | None, *, ahead: bool) -> Iterator[None]:
    before = _NOTING.acts, _NOTING.ahead
    _NOTING.acts, _NOTING.ahead = acts, ahead
    try:
        yield
    finally:
        _NOTING.acts, _NOTING.ahead = before


def listen(patch: Callable[[str, Callable[[Any], Any]], Any]) -> None:
    """Have the functions of `ACTS` noted from now on; `patch(target, wrapper)` replaces one of them."""
    session = active()
    run = os.environ.get("HEADWAY_RUN") if session is None else session.probes.run
    for target, (what, counts) in ACTS.items():
        if target == STDOUT and getattr(sys.stdout, "write", None) is None:
            continue  # it was closed
        patch(target, functools.partial(_noted, what, counts, os.path.abspath(run or os.devnull) + os.sep))


def listen_here() -> None:
    """Have them noted for good, in a process of headway's own: a child that tries a dataset, a worker."""
    listen(replace_attribute)


COMPILED = "__pycache__"
"""Folder of what Python, and compilers of Python (numba), have made of code."""


def cache_folders() -> tuple[str, ...]:
    """Return where libraries keep what they compile or download, each with a separator behind it.

    >>> cache_folders()[0].endswith("/")
    True
    """
    user = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    named = (os.environ.get(name) for name in CACHES)
    return tuple(os.path.join(os.path.abspath(folder), "") for folder in (user, *named) if folder)


def _noted(what: str, counts: Callable[..., bool] | None, run: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that others see the effect of, but for what lies in the folder `run`: that is the recording."""

    def is_recording(arguments: tuple[Any, ...]) -> bool:
        """Whether a file of the recording changes, or one of a library's cache, which says nothing of examples."""
        path = arguments[0] if what == CHANGES and arguments else None
        name = os.path.abspath(os.fsdecode(path)) if isinstance(path, (str, os.PathLike)) else ""
        return bool(name) and (name.startswith((run, *cache_folders())) or COMPILED in name.split(os.sep))

    @functools.wraps(original)
    def act(*arguments: Any, **named: Any) -> Any:
        acts = _NOTING.acts
        if acts is not None and (counts is None or counts(*arguments, **named)) and not is_recording(arguments):
            if what not in acts:  # print() comes to stdout's `write` as well
                acts.append(what)
            if _NOTING.ahead:
                raise VisibleError(what)
        return original(*arguments, **named)

    act.__module__ = act.__module__ or __name__  # a method of a built-in object has none
    return act
