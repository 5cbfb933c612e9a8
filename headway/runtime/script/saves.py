"""What a process saved last, so that the sync and the rename of a save are recognised.

>>> saves = ProcessSaves()
>>> saves.saved("/tmp/model.pt.tmp", 5, end_ns=100, steps=7)
>>> saves.since(descriptor=5, start_ns=130, steps=7), saves.since(descriptor=6, start_ns=130, steps=7)
(100, 130)
"""

from __future__ import annotations

import _thread

CHAIN_NS = 5_000_000_000
"""A sync this long after the save of the same file no longer starts at the save's end."""

KEEP_PATHS = 64
"""Saved paths that are remembered for their renames."""


class ProcessSaves:
    """The saves of one process: the last one of each thread, and the paths of the latest ones."""

    def __init__(self) -> None:
        self.count = 0
        """Saves so far."""
        self._paths: dict[str, None] = {}
        self._last: dict[int, tuple[int, str, int, int]] = {}

    def saved(self, path: str, descriptor: int, *, end_ns: int, steps: int) -> None:
        """Note the end of a save to `path` ('' if unknown) through `descriptor` (-1 if closed or unknown)."""
        self.count += 1
        self._last[_thread.get_ident()] = (descriptor, path, end_ns, steps)
        if path:
            self._paths[path] = None
            if len(self._paths) > KEEP_PATHS:
                del self._paths[next(iter(self._paths))]

    def synced(self, end_ns: int) -> None:
        """Move the end of this thread's last save: its rename is counted from here on."""
        descriptor, path, _, steps = self._last[_thread.get_ident()]
        self._last[_thread.get_ident()] = (descriptor, path, end_ns, steps)

    def since(self, *, path: str = "", descriptor: int = -1, start_ns: int, steps: int) -> int:
        """Return where the span that really started at `start_ns` begins: at the end of its save, if one just ended.

        Same thread, same file and no optimizer step in between: what lies between can only be flush and close.
        """
        last_descriptor, last_path, end_ns, last_steps = self._last.get(_thread.get_ident(), (-1, "", 0, -1))
        same = (descriptor >= 0 and descriptor == last_descriptor) or (path != "" and path == last_path)
        return end_ns if same and steps == last_steps and start_ns - end_ns < CHAIN_NS else start_ns

    def knows(self, path: str, descriptor: int = -1) -> bool:
        """Whether a file was saved, or is a folder that something was saved into; `descriptor` where it has no path."""
        last = self._last.get(_thread.get_ident())
        if descriptor >= 0 and last is not None and last[0] == descriptor and last[1] in ("", path):
            return True
        return path in self._paths or any(saved.startswith(f"{path}/") for saved in self._paths if path)
