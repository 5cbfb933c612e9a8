"""Both ends of a TCP connection prove that they hold a token before anything else is read; no loop waits for it.

Each end sends a nonce; a proof is an HMAC over both nonces and the side that
proves, so it is of no use on another connection. `PendingHandshakes` is the listening
end: it runs any number of handshakes beside a loop's own work. It reads only
what has come, so a silent caller costs a descriptor until it is the oldest of
`MOST_STRANGERS`, or `HANDSHAKE_S` are over when the next one comes.

>>> from threading import Thread
>>> strangers = PendingHandshakes(socket.create_server(("127.0.0.1", 0)), b"secret")
>>> silent, caller = (socket.create_connection(strangers.listening.getsockname()) for _ in range(2))
>>> thread = Thread(target=prove_caller, args=(wire := Frames(caller), b"secret"))
>>> thread.start()
>>> strangers.proved(5.0).send(b"welcome", ())
>>> thread.join()
>>> bytes(wire.receive(1.0)[0])
b'welcome'
>>> strangers.close(), silent.close(), wire.close()
(None, None, None)
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import threading
import time
from dataclasses import dataclass

from headway.core.machine.host import readable
from headway.core.wire.wires import ChannelClosed, Frames

HANDSHAKE_S = 2.0
"""Longest that a handshake may take."""
MOST_STRANGERS = 256
"""Handshakes under way at one time; the oldest gives way to a newer one, since an honest caller needs milliseconds."""
_MOST_AT_ONCE = 16
"""Callers let in between two looks at those who are half-way."""
_ONCE = select.EPOLLIN | select.EPOLLONESHOT
"""A fork of this process keeps sockets that we close in the epoll set: they are to be reported once at most."""
_NONCE_BYTES, _PROOF_BYTES = 32, 32


@dataclass(slots=True)
class _Stranger:
    """A caller that has proved nothing yet."""

    wire: Frames
    nonce: bytes
    deadline_s: float


class PendingHandshakes:
    """The handshakes of one listening socket. One thread asks for those who `proved`; any may close."""

    def __init__(self, listening: socket.socket, token: bytes) -> None:
        """Let callers of `listening` in, which is closed with this."""
        self.listening, self._token = listening, token
        listening.setblocking(False)
        self._lock = threading.Lock()
        self._epoll: select.epoll | None = select.epoll()
        self._epoll.register(listening, select.EPOLLIN)
        self._strangers: dict[int, _Stranger] = {}
        """Descriptor -> caller, oldest first."""

    def proved(self, timeout_s: float | None) -> Frames:
        """Return the wire to the next caller that proves that it holds the token; 0.0 only looks.

        Raises `TimeoutError` when there is none within `timeout_s`, `ChannelClosed` once this is closed.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                wire = self._advance()
            if wire is not None:
                return wire
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError(f"nobody who holds the token connected within {timeout_s} s.")
            fd = self.fileno()
            if fd >= 0:
                readable(fd, left_s)

    def fileno(self) -> int:
        """Return the descriptor to wait on: readable when a caller comes or one says more; -1 once closed."""
        epoll = self._epoll
        return -1 if epoll is None else epoll.fileno()

    def close(self) -> None:
        """Stop listening; callers that have proved nothing are let go."""
        with self._lock:
            self.abandon()

    def abandon(self) -> None:
        """Close a forked child's copy, without the lock: a thread of the parent may have held it at the fork."""
        if self._epoll is None:
            return
        epoll, self._epoll = self._epoll, None
        epoll.close()
        self.listening.close()
        for stranger in self._strangers.values():
            stranger.wire.socket.close()  # not shut down: in a forked child the parent goes on with it
        self._strangers.clear()

    def _advance(self) -> Frames | None:
        """Read what has come, let callers in, drop those who are late; return one that proved, if there is one."""
        if self._epoll is None:
            raise ChannelClosed("this listener was closed. Listen again.")
        for _ in range(_MOST_AT_ONCE):
            ready = self._epoll.poll(0, 1)  # one at a time: the others stay ready, and so does the descriptor
            if not ready:
                return None
            fd = ready[0][0]
            stranger = self._strangers.get(fd)
            if fd == self.listening.fileno():
                self._let_in(time.monotonic())
            elif stranger is not None and self._has_proved(fd, stranger):
                return stranger.wire
            elif fd in self._strangers:
                self._epoll.modify(fd, _ONCE)
        return None

    def _let_in(self, now_s: float) -> None:
        """Send each new caller a nonce; the oldest ones give way."""
        for _ in range(_MOST_AT_ONCE):
            late = next(iter(self._strangers.items()), None)
            if late is not None and (len(self._strangers) >= MOST_STRANGERS or late[1].deadline_s < now_s):
                self._drop(late[0])
            try:
                wire = Frames(self.listening.accept()[0])
                nonce = secrets.token_bytes(_NONCE_BYTES)
                wire.socket.send(nonce)
            except BlockingIOError:
                return
            except OSError:  # it is gone again; or there are no descriptors left, and the oldest must give way
                if late is not None:
                    self._drop(late[0])
                return
            fd = wire.socket.fileno()
            self._strangers[fd] = _Stranger(wire, nonce, now_s + HANDSHAKE_S)
            assert self._epoll is not None
            self._epoll.register(fd, _ONCE)

    def _has_proved(self, fd: int, stranger: _Stranger) -> bool:
        """Read on in one handshake; a caller that is wrong, late or gone is dropped."""
        try:
            said = stranger.wire.exactly(_NONCE_BYTES + _PROOF_BYTES, 0.0)
        except TimeoutError:
            return False
        except ChannelClosed:
            self._drop(fd)
            return False
        mine, theirs = _proofs(self._token, stranger.nonce + said[:_NONCE_BYTES])
        if not hmac.compare_digest(said[_NONCE_BYTES:], theirs):
            self._drop(fd)
            return False
        assert self._epoll is not None
        self._epoll.unregister(fd)
        del self._strangers[fd]
        with contextlib.suppress(OSError):  # it is gone: whoever gets the channel finds out
            stranger.wire.socket.send(mine)
        return True

    def _drop(self, fd: int) -> None:
        """Let a caller go."""
        stranger = self._strangers.pop(fd, None)
        if stranger is not None:
            stranger.wire.close()


def prove_caller(wire: Frames, token: bytes) -> None:
    """Do the calling end's part of the handshake. Raises `ChannelClosed`, and the wire is closed, when it fails."""
    deadline_s = time.monotonic() + HANDSHAKE_S
    ours = secrets.token_bytes(_NONCE_BYTES)
    try:
        wire.socket.send(ours)
        theirs = wire.exactly(_NONCE_BYTES, deadline_s)
        of_listener, mine = _proofs(token, theirs + ours)
        wire.socket.send(mine)
        if not hmac.compare_digest(wire.exactly(_PROOF_BYTES, deadline_s), of_listener):
            raise ChannelClosed("the other end does not hold the token. Give both ends the same one.")
    except (TimeoutError, OSError) as error:
        wire.close()
        raise ChannelClosed(f"the other end did not prove that it holds the token ({error}).") from error
    except ChannelClosed as error:
        wire.close()
        raise ChannelClosed(f"{error} It may be that the tokens differ.") from error


def _proofs(token: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    """Return the listener's and the caller's proof; `nonces` are the listener's, then the caller's."""
    return hmac.digest(token, b"listener" + nonces, "sha256"), hmac.digest(token, b"caller" + nonces, "sha256")
