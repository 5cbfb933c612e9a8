"""Typed messages between processes: over a unix socket on one machine, over TCP with a shared token between several.

Messages are tagged `msgspec.Struct`s in MessagePack, never pickles: a peer can
send data, not code. Use it wherever two of our processes talk.

    Listener(path, types=..., uid=None)        .accept(timeout_s=None) -> Channel    .fileno() .close()
    connect(path, timeout_s=5.0, types=...)    -> Channel                 retries until somebody listens
    TcpListener(host, port, token, types=...)  .accept(timeout_s=None) -> Channel    .port (0: any free one)
    connect_tcp(host, port, token, timeout_s=5.0, types=...) -> Channel
    pair(types=...)                            -> (Channel, Channel)      for threads, forks and tests
    channel.send(message, fds=(), timeout_s=None)      any thread; waits while the peer's buffer is full
    channel.receive(timeout_s=None) -> (message, fds)  one thread at a time; 0.0 only looks
    channel.arrived()                          -> (message, fds) ...          all that is there, for a loop
    channel.fileno() .peer .close(reason=None)         for selectors; pid and uid; the peer is told the reason

`types` is what this end accepts: one struct type or a union of tagged ones
(`A | B`), each with `tag=True`, or a decoder of them; arrays go as their bytes.
A peer that is gone, closed or sent something else raises `ChannelClosed`, and
the channel is closed then; a wait that ends raises `TimeoutError`, and it goes
on. Descriptors received are the caller's to close. A message longer than a packet goes through a memfd, unseen.

A unix socket has mode 0600, and both ends check whose process is at the other
one. Over TCP both prove that they hold the token before anything else is read
(`handshake.py`), and no caller keeps the listener waiting; what follows is not
encrypted.

>>> class Ping(msgspec.Struct, tag=True):
...     number: int
>>> one, other = pair(types=Ping)
>>> one.send(Ping(7))
>>> other.receive(timeout_s=1.0)
(Ping(number=7), [])
>>> one.close("enough")
>>> other.receive(timeout_s=1.0)
Traceback (most recent call last):
headway.core.wire.wires.ChannelClosed: the other end closed the channel: enough
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headway.core.errors import InputError
from headway.core.machine.host import readable
from headway.core.wire.handshake import PendingHandshakes, prove_caller
from headway.core.wire.wires import ChannelClosed as ChannelClosed
from headway.core.wire.wires import Frames, Packets, Wire

MOST_PATH_BYTES = 107
"""Longest path of a unix socket (`sun_path`, with its closing zero)."""

_BACKLOG = 1024
"""Callers that the kernel lets wait for `TcpListener.accept`."""
_RETRY_S = 0.02
_CREDENTIALS = struct.Struct("iII")


class PeerProcess(NamedTuple):
    """The process at the other end, as the kernel names it; None where it cannot know."""

    pid: int | None = None
    uid: int | None = None


class Channel:
    """One end of a connection that carries structs. Close it, or drop it: the other end then gets `ChannelClosed`."""

    def __init__(self, wire: Wire, types: Any, peer: PeerProcess | None = None) -> None:
        """Raise `InputError` when `types` cannot be told apart on arrival."""
        try:
            self._decoder = types if isinstance(types, msgspec.msgpack.Decoder) else msgspec.msgpack.Decoder(types)
        except TypeError as error:
            raise InputError(f"{types!r} cannot be received: {error}. Give each struct tag=True.") from error
        self._wire = wire
        self.peer = peer or PeerProcess()
        """Process and user at the other end."""

    def send(self, message: msgspec.Struct, fds: Sequence[int] = (), timeout_s: float | None = None) -> None:
        """Send one message, and copies of `fds` with it. Raises `ChannelClosed`, `TimeoutError`, `InputError`."""
        self._wire.send(_ENCODER.encode(message), fds, timeout_s)

    def receive(self, timeout_s: float | None = None) -> tuple[Any, list[int]]:
        """Return the next message and the descriptors that came with it. Raises `ChannelClosed`, `TimeoutError`."""
        body, fds = self._wire.receive(timeout_s)
        try:
            return self._decoder.decode(body), fds
        except (msgspec.DecodeError, RecursionError) as error:
            for fd in fds:
                os.close(fd)
            self._wire.close(f"it sent an undecodable message: {error}")
            raise ChannelClosed(
                f"the other end sent an undecodable message ({error}), so the channel is closed. "
                "Run the same release of headway at both ends."
            ) from error

    def arrived(self) -> Iterator[tuple[Any, list[int]]]:
        """Yield what has come already, as `receive` returns it, and wait for nothing. Raises `ChannelClosed`."""
        while True:
            try:
                came = self.receive(0.0)
            except TimeoutError:
                return
            yield came

    def fileno(self) -> int:
        """Return the descriptor to wait on; -1 once closed."""
        return self._wire.socket.fileno()

    def close(self, reason: str | None = None) -> None:
        """Close this end; a peer that still listens gets `ChannelClosed` with the reason. Doing it again is fine."""
        self._wire.close(reason)

    def abandon(self) -> None:
        """Close a forked child's copy of this end: the connection goes on in the process that opened it."""
        self._wire.abandon()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda array: array.tobytes())


class Listener:
    """A unix socket that processes of one user may connect to; it takes over what a dead listener left."""

    def __init__(self, path: str | Path, *, types: Any, uid: int | None = None) -> None:
        """Listen at `path` for processes of user `uid` (default: our own).

        Raises `InputError` when somebody listens there already, the path is
        too long, or something that is no socket lies there.
        """
        self.path = Path(path)
        self._types, self._uid = types, os.getuid() if uid is None else uid
        _check_path(self.path)
        self._lock = _locked(self.path)
        try:
            _clear(self.path)
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.bind(str(self.path))
            os.chmod(self.path, 0o600)  # before listen: until then nobody gets in, whatever the umask
            self._socket.listen(128)
        except BaseException:
            os.close(self._lock)
            raise

    def accept(self, timeout_s: float | None = None) -> Channel:
        """Return a channel to the next process that connects.

        Raises `ChannelClosed` when it belongs to another user or is gone
        already (listening goes on), `TimeoutError` when nobody came.
        """
        if not readable(self._socket.fileno(), timeout_s):
            raise TimeoutError(f"nobody connected within {timeout_s} s.")
        connected = self._socket.accept()[0]
        wire, peer = Packets(connected), _peer(connected)
        if peer.uid != self._uid:
            why = f"user {peer.uid} may not use a socket of user {self._uid}. Start a server of your own."
            wire.close(why)
            raise ChannelClosed(why)
        return Channel(wire, self._types, peer)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._socket.fileno()

    def close(self) -> None:
        """Stop listening and remove the socket; channels that were accepted stay."""
        if self._lock < 0:
            return
        for left in (self.path, _lock_path(self.path)):
            left.unlink(missing_ok=True)
        self.abandon()

    def abandon(self) -> None:
        """Close a forked child's copy: else nobody could listen here after its parent while the child lives."""
        self._socket.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class TcpListener:
    """A TCP port for processes that hold the token; no descriptors can be passed."""

    def __init__(self, host: str, port: int, token: str, *, types: Any) -> None:
        """Listen at `host`:`port` (0: any free port). Raises `InputError` on an empty token or a port that is taken."""
        _check_token(token)
        self._types = types
        try:
            listening = socket.create_server((host, port), backlog=_BACKLOG)
        except OSError as error:
            raise InputError(f"cannot listen at {host}:{port}: {error}. Choose another port, or 0.") from error
        self.port: int = listening.getsockname()[1]
        self._strangers = PendingHandshakes(listening, token.encode())

    def accept(self, timeout_s: float | None = None) -> Channel:
        """Return a channel to the next process that proves that it holds the token.

        Waits for nobody in particular: who does not prove it is let go, unseen, within 2 s or for a newer caller.
        Raises `TimeoutError` when nobody proved it; 0.0 only looks, as a loop does when `fileno` is readable.
        """
        return Channel(self._strangers.proved(timeout_s), self._types)

    def fileno(self) -> int:
        """Return the descriptor to wait on; -1 once closed."""
        return self._strangers.fileno()

    def close(self) -> None:
        """Stop listening; channels that were accepted stay."""
        self._strangers.close()

    def abandon(self) -> None:
        """Close a forked child's copy: the process that listens goes on."""
        self._strangers.abandon()


def connect(path: str | Path, timeout_s: float = 5.0, *, types: Any) -> Channel:
    """Return a channel to the process that listens at `path`, trying for `timeout_s` until one does.

    A wait on the channel ends with the process that listens, even where forks of it keep its end open. Raises
    `ChannelClosed` when nobody listens, `InputError` when it is another user's.
    """
    _check_path(Path(path))
    deadline = time.monotonic() + timeout_s
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while True:
        try:
            connected.connect(str(path))
            break
        except PermissionError:
            connected.close()
            raise InputError(f"{path} is a socket of another user. Start a server of your own.") from None
        except OSError as error:
            if time.monotonic() >= deadline:
                connected.close()
                raise ChannelClosed(f"nobody listens at {path} ({error.strerror}). Start the server first.") from error
            time.sleep(_RETRY_S)
    peer = _peer(connected)
    if peer.uid != os.getuid():
        connected.close()
        raise InputError(f"{path} is a socket of user {peer.uid}, you are {os.getuid()}. Start a server of your own.")
    wire = Packets(connected)
    if peer.pid:  # 0: it lives in another container
        try:
            wire.watch(peer.pid)
        except ProcessLookupError:
            raise wire.broken(f"nobody listens at {path} any more. Start the server again.") from None
    return Channel(wire, types, peer)


def connect_tcp(host: str, port: int, token: str, timeout_s: float = 5.0, *, types: Any) -> Channel:
    """Return a channel to the `TcpListener` at `host`:`port` after both proved that they hold `token`.

    Raises `ChannelClosed` when nobody listens there, or not with this token.
    """
    _check_token(token)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connected = socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.01))
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ChannelClosed(f"nobody listens at {host}:{port} ({error}). Start the server first.") from error
            time.sleep(_RETRY_S)
    wire = Frames(connected)
    prove_caller(wire, token.encode())
    return Channel(wire, types)


def pair(*, types: Any) -> tuple[Channel, Channel]:
    """Return two ends of a channel of this process, to be used by its threads or handed to a fork."""
    peer = PeerProcess(os.getpid(), os.getuid())
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(Packets(one), types, peer), Channel(Packets(other), types, peer)


def _peer(connected: socket.socket) -> PeerProcess:
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return PeerProcess(pid, uid)


def _check_path(path: Path) -> None:
    if len(os.fsencode(path)) > MOST_PATH_BYTES:
        raise InputError(f"{path} is too long for a socket. Choose a path of at most {MOST_PATH_BYTES} bytes.")


def _check_token(token: str) -> None:
    if not token:
        raise InputError("the token is empty, so anybody could connect. Pass a secret that both ends know.")


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _locked(path: Path) -> int:
    """Return the descriptor of the held lock file. Raises `InputError` when another process holds it."""
    try:
        return hold_lock(_lock_path(path), wait=False)
    except BlockingIOError:
        raise InputError(f"a server listens at {path} already. Use it, or choose another path.") from None
    except OSError as error:
        raise InputError(f"cannot listen at {path}: {error}. Choose a folder of yours that exists.") from error


def hold_lock(path: Path, *, wait: bool) -> int:
    """Return the descriptor of a lock file that this process holds from now on; remove the file, then close it.

    Raises `BlockingIOError` when another process holds it and we are not to `wait`.
    """
    while True:
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Whoever had it may have removed it between our open and our lock: then it locks nothing.
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


KEEP_LOG_S = 7 * 86400.0
"""How long the log of a server that was killed, or never came up, stays."""


def sweep_logs(folder: Path, pattern: str) -> None:
    """Remove logs of that `pattern`, NAME.log or NAME.PID.log, and the socket NAME.sock, of servers that died long ago.

    One that lives, however long, holds the lock of its socket.
    """
    for log in folder.glob(pattern):
        path = log.with_suffix("").with_suffix(".sock")
        with contextlib.suppress(OSError):  # it lives, or somebody else was first
            if time.time() - log.stat().st_mtime > KEEP_LOG_S:
                with os.fdopen(hold_lock(_lock_path(path), wait=False)):
                    for left in (log, path, _lock_path(path)):
                        left.unlink(missing_ok=True)


def _clear(path: Path) -> None:
    """Remove the socket that a dead listener left. Raises `InputError` on anything else."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise InputError(f"{path} is there and is no socket. Choose another path.")
        path.unlink()
    except FileNotFoundError:
        pass
