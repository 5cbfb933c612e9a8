"""What a rank notes so that a later attempt may start from a process that has imported torch already.

A process that imports torch before the script begins is the same as one in
which the script imports it only if the script changed nothing that an import
can see. So the first attempt's ranks note, when the script imports torch, what
had changed since the process began, and after the first step from which file
torch came; and if nothing at all had changed meanwhile, which of `PARTS` were
imported, which are torch's and headway's own and take longest.
Only a rank whose environment names a file (`VARIABLE`) notes anything.
Standard library only.

>>> changes({"env": {"A": "1"}, "cwd": "/"}, {"env": {"A": "2"}, "cwd": "/"})
['A was set']
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

VARIABLE = "HEADWAY_WARM_NOTE"
"""Variable of a rank's environment: the file that it notes to."""

PREFIX = "HEADWAY"
"""Variables that begin so are ours: they are set, and taken away, while a process starts."""

OURS = ("KINETO_LOG_LEVEL", "TORCH_FR_BUFFER_SIZE")
"""Variables that the recording sets before torch is imported."""


PARTS = ("torch._dynamo", "headway.checkpoint.engine")
"""What torch imports when a model is wrapped, and headway when state is saved: about 1.4 s of a core."""


SET_BY_PARTS = ("TORCHINDUCTOR_CACHE_DIR",)
"""Variables that importing them sets."""


def surroundings() -> dict[str, Any]:
    """Return what an import can see of the process: environment, folder, cores, finders, flags of dlopen."""
    return {
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
        "finders": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
        "dlopen": sys.getdlopenflags(),
        "import": f"{__import__.__module__}.{__import__.__qualname__}",
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in words what differs; headway's own variables do not count."""
    old, new = ({k: v for k, v in one["env"].items() if not _is_ours(k)} for one in (before, now))
    found = [f"{name} was {'set' if name in new else 'removed'}" for name in sorted(old.keys() | new.keys())
             if old.get(name) != new.get(name)]  # fmt: skip
    words = {
        "cwd": "the working directory was changed", "cores": "the cores of the process were changed",
        "finders": "finders of modules were added or removed", "dlopen": "the flags of dlopen were changed",
        "import": "__import__ was replaced",
    }  # fmt: skip
    return found + [text for key, text in words.items() if before.get(key) != now.get(key)]


def _is_ours(name: str) -> bool:
    return name.startswith(PREFIX) or name in OURS


def num_threads() -> int:
    """Return the threads of this process, those of libraries too."""
    return len(os.listdir("/proc/self/task"))


def origin(name: str) -> str | None:
    """Return the file of an imported module; None where it was not found by the ordinary way, but put in by hand."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    file = getattr(spec, "origin", None)
    is_ordinary = spec is not None and spec.name == name and isinstance(file, str) and file.startswith("/")
    return file if is_ordinary else None


class WarmNote:
    """The note of this process; every failure leaves it unwritten, and later attempts start cold."""

    def __init__(self, path: str, started: Mapping[str, Any] | None) -> None:
        """`started` is what `surroundings` said when the process began; None = that was not seen."""
        self._file = path
        self._path = list(sys.path)
        now = self._at_torch = surroundings()
        self._reasons = ["the start of the process was not seen"] if started is None else changes(started, now)
        if num_threads() > 1:
            self._reasons.append(f"{num_threads() - 1} more threads ran")
        self._has_imported = False

    def imported(self) -> None:
        """Say that torch has been imported."""
        self._has_imported = True

    def stepped(self) -> None:
        """Write the note."""
        reasons = self._reasons or ([] if self._has_imported else ["torch was not imported whole"])
        torch, now, env = sys.modules["torch"], surroundings(), self._at_torch["env"]
        # What these imports set, they set in the warm process too: that is compared there.
        sets = {
            name: now["env"].get(name) for name in sorted(env.keys() | now["env"].keys())
            if not _is_ours(name) and env.get(name) != now["env"].get(name)
        }  # fmt: skip
        alike = {*sets} <= {*SET_BY_PARTS}
        alike = alike and not changes(self._at_torch, {**now, "env": env}) and sys.path in (self._path, self._path[1:])
        alike = alike and str(torch.get_default_dtype()) == "torch.float32" and str(torch.get_default_device()) == "cpu"
        parts = {name: found for name in PARTS if alike and (found := origin(name)) is not None}
        note = {"reasons": reasons, "path": self._path, "torch": origin("torch"), "parts": parts, "sets": sets}
        import json  # here: this module is loaded at the start of a process, for `surroundings`

        draft = f"{self._file}.draft"
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(note, file)
        os.replace(draft, self._file)
