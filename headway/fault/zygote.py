"""The warm process of a host: it has imported torch, and later attempts are forked from it.

It is started as a rank is, `python -u train.py ...` with a rank's environment,
but stops in our sitecustomize, before the script: there it imports, and waits.
A fork of it goes on from that very place, so that the interpreter makes it a
genuine `__main__` (spec, `__file__`, argv, sys.path[0], -m), as it makes a
rank that was started cold:

    launcher    -- modules -->  zygote        imports; refuses where that is not what the ranks did
                <-- ready --
                -- environment, stdout, stderr, board, gate -->
                                  fork, fork   the second is adopted by the launcher, its subreaper for that moment
                <-- pid ---
                -- gate: go -->     rank       leaves sitecustomize; the script begins

Torch alone is imported here, with what it imports itself: the script may have
changed what any other library sees when that is imported. Where the ranks had
changed nothing up to their first step, the parts of torch and of headway that
they imported by then come too (`warm_note.PARTS`). The process refuses where
it could not be the same: another file, threads, an open device, an import that
reads who the rank is, draws random numbers or sets a variable.

>>> difference({"a": "/x/a.py"}, {"a": "/y/a.py"})
'a comes from /y/a.py, in the ranks from /x/a.py'
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from headway.core.wire.wires import ChannelClosed, Packets
from headway.runtime.calls import patches
from headway.runtime.host.warm_note import num_threads, origin
from headway.runtime.in_rank import bootstrap
from headway.runtime.in_rank.hooks import PostImport
from headway.runtime.in_rank.state_account import RESTORE_UP_TO
from headway.runtime.launching.agent import die_with
from headway.runtime.launching.save_and_leave import NAME as BOARD
from headway.runtime.launching.save_and_leave import VARIABLE as LEAVE

SOCKET = "HEADWAY_ZYGOTE_SOCKET"
"""Variable that holds the descriptor of the channel to the launcher."""

VARYING = (
    "RANK", "LOCAL_RANK", "ROLE_RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE",
    "HEADWAY_ATTEMPT", "HEADWAY_LEAVE", "HEADWAY_MAIN_PID", "HEADWAY_RANK", "HEADWAY_LOCAL_RANK", "HEADWAY_WARM_NOTE",
    RESTORE_UP_TO,
)  # fmt: skip
"""Variables that differ between ranks or attempts: no import may depend on them."""

DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel")
"""How the files of accelerators begin."""

PICKS = ("tqdm.utils",)
"""Modules that go through all variables for those with a prefix of their own: TQDM_."""

_MAPPINGS = ("os", "_collections_abc", "collections.abc", "copy")

_OOM = Path("/proc/self/oom_score_adj")

ADOPTED_S = 5.0
"""How long a fork waits to become the launcher's child."""


def difference(wanted: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Say which module is not the one that the ranks have imported, '' where all are."""
    for name, file in wanted.items():
        if found.get(name) != file:
            return f"{name} comes from {found.get(name, 'nowhere')}, in the ranks from {file}"
    return ""


class WatchedEnviron(os._Environ):  # type: ignore[type-arg]  # the class of os.environ, which has no public name
    """`os.environ` that notes whether somebody asks who the rank is."""

    asked: ClassVar[set[str]] = set()
    """Those that somebody asked for."""

    def __getitem__(self, key: str) -> str:
        """Return a variable, and note one that differs between ranks."""
        if key in VARYING:
            self.asked.add(key)
        return str(super().__getitem__(key))

    def __iter__(self) -> Any:
        """Iterate over all names: whoever copies the environment may look at any of them."""
        frame, depth = sys._getframe(1), 0
        while frame.f_back is not None and frame.f_globals.get("__name__") in _MAPPINGS and depth < 8:
            frame, depth = frame.f_back, depth + 1
        if frame.f_globals.get("__name__") not in PICKS:
            self.asked.add(f"all variables ({frame.f_globals.get('__name__')})")
        return super().__iter__()


class Zygote:
    """The warm process, from its first message on."""

    def __init__(self, channel: Packets, launcher: int) -> None:
        self._channel, self._launcher = channel, launcher
        self._oom = _first_to_go()
        self._late: list[str] = []
        """Modules that came with the parts."""
        self._said = [b"", b""]
        """What the imports printed on stdout and stderr."""

    def prepare(self, chain: Callable[[], None]) -> str:
        """Import what the first message names; returns the reason where ranks cannot be forked from here.

        `chain` runs the sitecustomize that would have been found without ours, as every start of a rank does.
        """
        body, _ = self._channel.receive(30.0)
        wanted = json.loads(body)
        environ, ours = type(os.environ), os.environ
        ours.__class__ = WatchedEnviron
        outputs = _captured()
        try:
            chain()
            reason = _path_difference(wanted["path"]) or self._import_torch(wanted["torch"])
            reason = reason or self._import_parts(wanted["parts"], wanted.get("sets", {}))
        finally:
            self._said = outputs()
            ours.__class__ = environ
        if not reason and num_threads() > 1:
            reason = f"an import started threads ({num_threads() - 1}), as OpenBLAS does without OMP_NUM_THREADS=1"
        return reason or _open_device()

    def _import_torch(self, file: str) -> str:
        bootstrap.before_torch()
        try:
            importlib.import_module("torch")
        except Exception as cause:
            return f"torch cannot be imported: {type(cause).__name__}: {cause}"
        if WatchedEnviron.asked:
            return f"an import reads {', '.join(sorted(WatchedEnviron.asked))}"
        found = origin("torch")
        return difference({"torch": file}, {"torch": found} if found else {})

    def _import_parts(self, parts: Mapping[str, str], sets: Mapping[str, str | None]) -> str:
        """Import what the ranks imported between torch and their first step; returns the reason where that is unlike.

        `sets` are the variables that changed in the ranks meanwhile: the imports must have set them, and no others. A
        fork begins without them, as a cold start does.
        """
        if not parts:
            return ""
        states, known, before = _random_states(), set(sys.modules), dict(os.environb)
        for name in parts:
            try:
                importlib.import_module(name)
            except Exception as cause:
                return f"{name} cannot be imported: {type(cause).__name__}: {cause}"
        self._late = [name for name in sys.modules if name not in known]
        if WatchedEnviron.asked:
            return f"an import reads {', '.join(sorted(WatchedEnviron.asked))}"
        now = dict(os.environb)
        names = [name for name in now.keys() | before.keys() if now.get(name) != before.get(name)]
        if {os.fsdecode(name): os.fsdecode(now[name]) if name in now else None for name in names} != sets:
            return "a variable was set after torch was imported"
        if states != _random_states():
            return "an import draws random numbers"
        return difference(parts, {name: file for name in parts if (file := origin(name)) is not None})

    def serve(self) -> bool:
        """Fork a rank for each request until the launcher goes; returns True in a rank."""
        while True:
            body, fds = self._channel.receive(None)
            if self._fork(json.loads(body), fds):
                return True
            for fd in fds:
                os.close(fd)

    def _fork(self, environment: dict[str, str], fds: list[int]) -> bool:
        """Fork a rank by way of a process that ends at once, so that the launcher adopts it; True in the rank."""
        told, tells = os.pipe()
        middle = os.fork()
        if middle == 0:
            rank = os.fork()
            if rank == 0:
                os.close(told)
                os.close(tells)
                self._become(environment, fds)
                return True
            os.write(tells, str(rank).encode())
            os._exit(0)
        os.close(tells)
        os.waitpid(middle, 0)
        pid = os.read(told, 32)
        os.close(told)
        self._channel.send(pid, (), 5.0)
        return False

    def _become(self, environment: dict[str, str], fds: list[int]) -> None:
        """Be a rank that has just been started: its session, streams, environment; nothing of the zygote's."""
        stdout, stderr, gate, *board = fds
        os.setsid()
        if self._oom is not None:
            _OOM.write_text(self._oom)
        until = time.monotonic() + ADOPTED_S
        while os.getppid() != self._launcher:
            if time.monotonic() > until:
                os._exit(1)
            time.sleep(0.0002)
        die_with(self._launcher, signal.SIGTERM)
        if os.read(gate, 1) != b"g":  # the launcher has given this one up, and started the rank otherwise
            os._exit(1)
        for source, target, said in ((stdout, 1, self._said[0]), (stderr, 2, self._said[1])):
            os.dup2(source, target)
            os.write(target, said) if said else None
        for fd in (stdout, stderr, gate):
            if fd > 2:
                os.close(fd)
        self._channel.abandon()
        for name in [name for name in os.environ if name not in environment]:
            del os.environ[name]
        os.environ.update(environment)
        for fd in board:
            os.set_inheritable(fd, True)
            os.environ[LEAVE] = f"{fd}:{environment[LEAVE].partition(':')[2]}"
        os.environ["HEADWAY_MAIN_PID"] = str(os.getpid())
        # As fresh as those of any new process: else all ranks would draw alike. Python's own does it by itself.
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        if "torch" in sys.modules:
            sys.modules["torch"].default_generator.seed()
        _record(self._late)


def _record(late: Sequence[str]) -> None:
    """Begin to record, as at an import of torch; `late` modules get the patched functions that they would have met."""
    targets = [patch.target.partition(":")[::2] for patch in patches.PATCHES.values()]
    plain = [(module, name) for module, name in targets if "." not in name and module in sys.modules]
    before = {(module, name): getattr(sys.modules[module], name, None) for module, name in plain}
    finder = PostImport(set(), before=bootstrap.before_import, after=bootstrap.after_import)
    finder.install()
    session = bootstrap.start(finder, os.environ)
    if "torch" in sys.modules:
        session.after(sys.modules["torch"])
    changed = {
        id(original): getattr(sys.modules[module], name)
        for (module, name), original in before.items()
        if original is not None and getattr(sys.modules[module], name) is not original
    }
    for holder in [sys.modules[name] for name in late if name in sys.modules]:
        for name, value in list(vars(holder).items()):
            if id(value) in changed and not name.startswith("__"):
                setattr(holder, name, changed[id(value)])


def _random_states() -> list[object]:
    """Return the states of Python's and torch's generators; numpy's legacy one is seeded anew in each fork."""
    torch = sys.modules["torch"]
    return [repr(random.getstate()), bytes(torch.get_rng_state().tolist())]


def _captured() -> Any:
    """Send stdout and stderr to memory; returns what puts an end to it, and returns what was written."""
    files = [os.memfd_create("headway-said", os.MFD_CLOEXEC) for _ in range(2)]
    kept = [os.dup(fd) for fd in (1, 2)]
    for file, fd in zip(files, (1, 2), strict=True):
        os.dup2(file, fd)

    def end() -> list[bytes]:
        said = []
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for file, fd, back in zip(files, (1, 2), kept, strict=True):
            os.dup2(back, fd)
            os.close(back)
            said.append(os.pread(file, 1 << 20, 0))
            os.close(file)
        return said

    return end


def _path_difference(path: Sequence[str]) -> str:
    """Compare sys.path with that of a rank when it imported torch: headway's root, the script's folder, the rest."""
    script = os.path.dirname(os.path.realpath(sys.orig_argv[2]))
    own = {"", os.getcwd(), script, os.path.dirname(os.path.abspath(sys.orig_argv[2]))}
    ours = sys.path[1:]  # this process stops before the script's folder is put in front
    if list(path[1:]) == ours or (path[1:2] and path[1] in own and list(path[2:]) == ours):
        return ""
    return "sys.path was changed before torch was imported"


def _open_device() -> str:
    """Return the reason where an import has opened an accelerator: no fork may use it then."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the listing's own
            continue
        if target.startswith(DEVICES):
            return f"an import opened {target}"
    return ""


def _first_to_go() -> str | None:
    """Let the kernel end this process first where memory runs out; returns what a rank has, None = as it was.

    A process may lower that number to what it was before; where it may not, nothing is changed.
    """
    try:
        before = _OOM.read_text()
        _OOM.write_text("1000")
        _OOM.write_text(before)
        _OOM.write_text("1000")
    except OSError:
        return None
    return before


def _close_boards() -> None:
    """Close the boards of attempts that the launcher had when it started this process: a rank has one of its own."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{BOARD} "):
                os.close(int(fd))
        except OSError:
            continue


def serve(root: str, chain: Callable[[], None]) -> None:
    """Import, say how that went, and fork; returns in each rank that was forked, and nowhere else."""
    launcher = os.getppid()
    die_with(launcher)
    _close_boards()
    channel = Packets(socket.socket(fileno=int(os.environ.pop(SOCKET))))
    channel.socket.set_inheritable(False)
    zygote = Zygote(channel, launcher)
    try:
        reason = zygote.prepare(chain)
        channel.send(json.dumps({"reason": reason}).encode(), (), 5.0)
        gc.freeze()  # forks share what their collectors need not go through
        if not reason and zygote.serve():
            sys.path.remove(root)
            return
    except ChannelClosed:
        pass
    _end()


def _end() -> NoReturn:
    os._exit(0)
