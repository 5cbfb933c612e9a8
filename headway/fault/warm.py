"""The launcher's end of the warm process: when it is started, and whether a rank may be forked from it.

Any doubt starts a rank cold, and says why (`reason`): no note of a rank, a
note that says that the script changed something before it imported torch, a
warm process that refused or does not answer, another environment.

>>> Warm(Path("/nonexistent"), "off").reason
'--warm off'
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import site
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.core.files.planfile import read_plan
from headway.core.wire.wires import ChannelClosed, Packets
from headway.fault.remedies import WARM
from headway.fault.zygote import SOCKET, VARYING
from headway.runtime.host.host_memory import host_memory
from headway.runtime.host.warm_note import VARIABLE as NOTE
from headway.runtime.launching.agent import RankSpec, die_with
from headway.runtime.launching.save_and_leave import VARIABLE as LEAVE

MODULE = "headway.fault.zygote"
PR_SET_CHILD_SUBREAPER = 36

FORK_S = 3.0
"""How long a fork may take before the rank is started cold."""

MOST_DEATHS = 2
"""Warm processes that may die before no more is started."""

LEAST_FREE_BYTES = 2 << 30
"""Memory of the host, or of its container, that must be free for a warm process to be started; half of that ends it."""

NO_ROOM = "the host has too little free memory for a warm process"

LOOK_AT_MEMORY = 50
"""Looks between two at the free memory."""

MOST_LOOKS = 100
"""Looks for the ranks' notes, a few a second."""

PACKAGE = str(Path(__file__).resolve().parents[2])
"""The folder that holds the package `headway`."""

_LIBC = ctypes.CDLL(None, use_errno=True)


def _free_bytes() -> int:
    """Return the free memory; where the system does not say, there is none."""
    return host_memory()["memory_available_bytes"] or 0


READY_S = 20.0
"""How long a rank that is to be forked waits for the imports of the warm process, at most."""


class _Cold(Exception):  # noqa: N818 - it is no error: ranks start cold, for this reason
    """Ranks cannot be forked."""


class _NoNote(_Cold):
    """A rank has left no note yet."""


class Warm:
    """The warm process of this host, or the reason why there is none."""

    def __init__(self, folder: Path, mode: str) -> None:
        """Notes are left in `folder`."""
        self._folder = folder
        self.reason: str | None = "--warm off" if mode == "off" else "no rank had made a step"
        """Why the next attempt starts cold; None where it does not."""
        self._is_off = mode == "off"
        self._specs: list[RankSpec] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Packets | None = None
        self._wanted: dict[str, Any] | None = None
        self._looks = self._deaths = 0
        self._has_died = False

    @property
    def wants_notes(self) -> bool:
        """Whether the ranks of the next attempt are to leave notes."""
        return not self._is_off and self._wanted is None

    def noting(self, spec: RankSpec) -> Mapping[str, str]:
        """Return the environment of a rank that leaves a note."""
        return {**spec.env, NOTE: self._note_of(spec.rank)} if self.wants_notes else spec.env

    def _note_of(self, rank: int) -> str:
        return str(self._folder / f"r{rank}.warm")

    def began(self, specs: Sequence[RankSpec]) -> None:
        """Remember how the ranks of the newest attempt were started."""
        self._specs = list(specs)

    def trains(self) -> None:
        """All ranks have made a step: start the warm process, or hear what it says. Called a few times a second."""
        if self._is_off or not self._specs:
            return
        if self._has_died:
            self._has_died = False
            self._start(self._wanted or {})
        elif self._wanted is None:
            try:
                self._start(self._noted())
            except _Cold as cause:  # a note is written after the step: what is missing now may be there soon
                self.reason = str(cause)
                self._looks += 1
                if not isinstance(cause, _NoNote) or self._looks > MOST_LOOKS:
                    self._wanted = {}
        elif self._channel is not None:
            self._looks += 1
            if self._looks % LOOK_AT_MEMORY == 0 and _free_bytes() < LEAST_FREE_BYTES // 2:
                self.close()
                self.reason = NO_ROOM
            elif self.reason is not None:
                self._hear()

    def _noted(self) -> dict[str, Any]:
        """Return what to import. Raises `_Cold` where the notes forbid it."""
        argv = self._specs[0].argv
        if argv[0] != sys.executable or argv[1:2] != ("-u",):
            raise _Cold("the script is not run by the interpreter of headway")
        if _free_bytes() < LEAST_FREE_BYTES:
            raise _Cold(NO_ROOM)
        notes = [self._note(spec.rank) for spec in self._specs]
        first = notes[0]
        if any(note["path"] != first["path"] for note in notes):
            raise _Cold("the ranks differ in sys.path")
        torch = first["torch"]
        if any(note["torch"] != torch for note in notes) or not _is_installed(torch):
            raise _Cold("the ranks import torch from another place")
        self._forget_notes()
        # No other library: what one sees when it is imported, the script may have changed just before.
        alike = all(
            (note["parts"], note["sets"]) == (first["parts"], first["sets"]) for note in notes
        ) and _patches_nothing(self._specs[0].env.get("HEADWAY_PLAN"))
        parts = {name: file for name, file in first["parts"].items() if alike and _is_installed(file)}
        return {"torch": torch, "path": first["path"], "parts": parts, "sets": first["sets"]}

    def _note(self, rank: int) -> dict[str, Any]:
        try:
            note: dict[str, Any] = json.loads(Path(self._note_of(rank)).read_bytes())
        except (OSError, ValueError):
            raise _NoNote(f"rank {rank} left no note of its imports") from None
        if note["reasons"]:
            raise _Cold(f"before rank {rank} imported torch, {note['reasons'][0]}")
        return note

    def _forget_notes(self) -> None:
        for spec in self._specs:
            with contextlib.suppress(OSError):
                os.unlink(self._note_of(spec.rank))

    def _start(self, wanted: dict[str, Any]) -> None:
        """Start the process as a rank is started, but for what differs between ranks."""
        self._wanted = wanted
        spec = self._specs[0]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: value for name, value in spec.env.items() if name not in VARYING}
        environment |= {"HEADWAY_ZYGOTE": MODULE, SOCKET: str(theirs.fileno())}
        parent = os.getpid()
        with theirs:
            theirs.set_inheritable(True)
            self._process = subprocess.Popen(
                spec.argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True, close_fds=False, preexec_fn=lambda: die_with(parent, signal.SIGKILL),
            )  # fmt: skip
        self._channel = Packets(ours)
        self.reason = "the warm process was not ready"
        self._channel.send(json.dumps(wanted).encode(), (), 5.0)

    def _hear(self, wait_s: float = 0.0) -> None:
        """Take in the answer, if it comes within `wait_s`."""
        assert self._channel is not None
        try:
            body, _ = self._channel.receive(wait_s)
        except TimeoutError:
            if wait_s:
                self._died(f"the warm process was not ready after {wait_s:g} s")
            return
        except ChannelClosed:
            self._died("the warm process died")
            return
        refused = json.loads(body)["reason"]
        if not refused:
            self.reason = None
            return
        self.close()
        self.reason = refused
        if self._wanted and self._wanted["parts"]:  # torch alone may do
            self._start({**self._wanted, "parts": {}})

    def spawn(self, spec: RankSpec, stdout_fd: int, stderr_fd: int) -> int | None:
        """Fork a rank; returns its process id, None where it is to be started cold, for `reason`."""
        if self._channel is not None and self.reason is not None:
            # It has begun with what a cold start would begin with now, so that waiting is the shorter way.
            self._hear(READY_S)
        if self._channel is None or self.reason is not None:
            return None
        why = self._unlike(spec)
        if why:
            self.reason = why
            return None
        waits, opens = os.pipe()
        board = [int(spec.env[LEAVE].partition(":")[0])] if LEAVE in spec.env else []
        _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            self._channel.send(json.dumps(dict(spec.env)).encode(), (stdout_fd, stderr_fd, waits, *board), FORK_S)
            pid = int(self._channel.receive(FORK_S)[0])
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises unless it is our child
            os.write(opens, b"g")
            return pid
        except (ChannelClosed, TimeoutError, OSError, ValueError) as cause:
            self._died(f"the warm process did not fork: {cause}")  # what it has forked finds the gate closed, and ends
            return None
        finally:
            _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            os.close(waits)
            os.close(opens)

    def _unlike(self, spec: RankSpec) -> str:
        """Say in what a rank is started otherwise than the warm process was, '' if in nothing."""
        first = self._specs[0]
        if spec.argv != first.argv:
            return "the command line is another one"
        names = [name for name in {*spec.env, *first.env} - {*VARYING} if spec.env.get(name) != first.env.get(name)]
        return f"{min(names)} is another one" if names else ""

    def _died(self, reason: str) -> None:
        """Start the next attempt cold, and another warm process beside it, unless that has failed too often."""
        self.close()
        self._deaths += 1
        self._has_died = self._deaths <= MOST_DEATHS
        self.reason = reason

    def close(self) -> None:
        """End the warm process, and remove the notes."""
        self._forget_notes()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.kill()
            self._process.wait()
            self._process = None
        self.reason = self.reason or "the warm process has ended"


def _patches_nothing(plan: str | None) -> bool:
    """Say whether a plan leaves alone what ranks import: there is none, or it only asks for warm attempts."""
    return plan is None or {remedy.name for remedy in read_plan(plan).remedies} == {WARM}


def _is_installed(file: str | None) -> bool:
    """Say whether a module's file lies where modules are installed: one beside the script may change meanwhile."""
    return file is not None and os.path.abspath(file).startswith(tuple(_places()))


def _places() -> Iterable[str]:
    """Yield the folders of installed modules, the standard library, and headway."""
    paths: Any = sysconfig.get_paths()
    for folder in {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}:
        yield folder + os.sep
    for folder in [*site.getsitepackages(), site.getusersitepackages()]:
        yield folder + os.sep
    yield os.path.join(PACKAGE, "headway") + os.sep
