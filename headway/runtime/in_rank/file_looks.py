"""Act before the script looks at a file: for remedies that write files behind it.

Plain Python reaches a file by `open` and the functions of `os`, which
`pathlib`, `shutil`, `glob` and torch's own readers call too. Each of them is
wrapped: `before(path)` is called first, with the path as it was given. Other
programs look by themselves, so `before(None)` comes before one is started and
before this one ends or is replaced. What native code opens by itself is not
seen. A look costs half a microsecond more.

>>> related("/runs/a/step-3/.metadata", "/runs/a/step-3"), related("/runs/a", "/runs/a/step-3")
(True, True)
>>> related("/runs/b", "/runs/a/step-3")
False
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from headway.runtime.in_rank.remedy import Context

Before = Callable[[Any], None]

LOOKS = (
    "builtins:open", "io:open", "os:open", "os:stat", "os:lstat", "os:access", "os:listdir", "os:scandir", "os:rename",
    "os:replace", "os:remove", "os:unlink", "os:rmdir", "os:link", "os:symlink", "os:truncate", "os:mkdir",
)  # fmt: skip
"""Functions that are given a path first, and that see, change or remove what lies there."""

DEPARTURES = (
    "os:system", "os:posix_spawn", "os:posix_spawnp", "os:execv", "os:execve", "os:_exit", "os:abort", "os:kill",
    "subprocess:Popen.__init__",
)  # fmt: skip
"""Functions after which another program may look, or this one can no longer write."""


def before_looks(context: Context, before: Before, *, departures: bool = True) -> None:
    """Have `before(path)` called ahead of each look, and `before(None)` ahead of each departure."""
    for target in LOOKS:
        context.patch(target, functools.partial(_looking, before))
    for target in DEPARTURES if departures else ():
        context.patch(target, functools.partial(_leaving, before))


def _looking(before: Before, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def look(*args: Any, **options: Any) -> Any:
        before(args[0] if args else options.get("path", options.get("file", ".")))
        return original(*args, **options)

    return look


def _leaving(before: Before, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def leave(*args: Any, **options: Any) -> Any:
        before(None)
        return original(*args, **options)

    return leave


def related(path: object, place: str) -> bool:
    """Whether `path`, as a script gives it, is the absolute path `place`, lies in it, or holds it."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False  # a descriptor: it was opened by a path, which was seen
    found = os.path.abspath(os.fsdecode(path))
    return found == place or found.startswith(place + os.sep) or place.startswith(found.rstrip(os.sep) + os.sep)
