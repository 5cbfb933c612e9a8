"""Whole messages as bytes over a connected socket: packets on one machine, length-prefixed frames between machines.

A wire moves bytes and, on one machine, file descriptors beside them; it knows
nothing of what they mean. `headway.core.wire.channel` puts structs on it. What goes
wrong with the peer is a `ChannelClosed`, and the wire is closed by then; a
wait that ends is a `TimeoutError`, and the wire goes on.

>>> one, other = (Packets(s) for s in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
>>> one.send(b"a message of any length" * 100_000, ())
>>> len(other.receive(1.0)[0])
2300000
"""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

from headway.core.errors import HeadwayError, InputError

INLINE_BYTES = 1 << 16
"""Longest message that travels in its packet; a longer one is read from a memfd that the packet passes."""

MOST_BYTES = 1 << 30
"""Longest message that is accepted: a damaged or hostile length must not make us allocate more."""

MOST_REASON = 4000
"""Characters of a goodbye."""

MOST_FDS = 64
"""Descriptors beside one message."""

_PLAIN, _PASSED, _GOODBYE = b"\0", b"\1", b"\2"
"""First byte of a message: the body follows; it lies in the first descriptor; the peer closes and says why."""

_LENGTH = struct.Struct("!I")
_FDS = struct.Struct("i")


class ChannelClosed(HeadwayError):  # noqa: N818 - it names a state, like StopIteration
    """The other end is gone, or sent an invalid message; the channel is closed."""


class Wire(ABC):
    """One end of a connection that keeps messages whole. Any thread may send; one at a time receives."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        connected.setblocking(False)  # waiting is done by poll, which knows deadlines and harms no other thread
        self._sending = threading.Lock()
        self._open = True
        self._peer_fd = -1

    @abstractmethod
    def send(self, body: bytes, fds: Sequence[int], timeout_s: float | None = None, kind: bytes = _PLAIN) -> None:
        """Send one message; waits while the peer's buffer is full. Raises `ChannelClosed`, `TimeoutError`."""

    @abstractmethod
    def receive(self, timeout_s: float | None) -> tuple[bytes | bytearray, list[int]]:
        """Return one message and its descriptors, which are the caller's to close. Raises as `send` does."""

    def close(self, reason: str | None = None) -> None:
        """Close; tell the peer why if it still listens. A thread that waits on this wire gets `ChannelClosed`."""
        if not self._open:
            return
        self._open = False
        if reason is not None:
            with suppress(ChannelClosed, TimeoutError, OSError):  # it may be gone, and is told nothing then
                self.send(reason[:MOST_REASON].encode(), (), 0.1, _GOODBYE)
        with suppress(OSError):  # the peer was first
            self.socket.shutdown(socket.SHUT_RDWR)
        self.abandon()

    def abandon(self) -> None:
        """Close this process's copy: where a fork or its parent has another, the connection goes on."""
        self._open = False
        self.socket.close()
        peer_fd, self._peer_fd = self._peer_fd, -1
        if peer_fd >= 0:
            os.close(peer_fd)

    def watch(self, pid: int) -> None:
        """Let waits end with process `pid`, whose forks may keep its end open. Raises `ProcessLookupError` if gone."""
        with suppress(PermissionError):  # a sandbox allows no such descriptor: the end of the socket must do
            self._peer_fd = os.pidfd_open(pid)

    def wait(self, events: int, deadline: float | None) -> None:
        """Wait until the socket is ready for `events` (poll's). Raises `TimeoutError` at `deadline` (monotonic)."""
        poll = select.poll()
        try:
            poll.register(self.socket.fileno(), events)
        except ValueError:
            raise ChannelClosed("this end of the channel was closed. Open another.") from None
        if self._peer_fd >= 0:
            poll.register(self._peer_fd, select.POLLIN)
        left_ms = None if deadline is None else max((deadline - time.monotonic()) * 1e3, 0.0)
        ready = [fd for fd, _ in poll.poll(left_ms)]
        if not ready:
            raise TimeoutError("the other end of the channel did not answer in time.")
        if ready == [self._peer_fd]:  # what it said before it ended would make the socket ready, too
            raise self.broken("the process at the other end of the channel has ended. Connect again.")

    def broken(self, why: str) -> ChannelClosed:
        """Close without a word and return the error to raise."""
        self.close()
        return ChannelClosed(why)

    def opened(self, message: bytes | bytearray) -> tuple[bytes, bytes | bytearray]:
        """Split a message into kind and body. Raises `ChannelClosed` on a goodbye or an unknown kind."""
        kind, body = bytes(message[:1]), message[1:]
        if kind == _GOODBYE:
            raise self.broken(f"the other end closed the channel: {body.decode(errors='replace')}")
        if kind not in (_PLAIN, _PASSED):
            raise self.broken("received an invalid message. Use the same release of headway at both ends.")
        return kind, body


class Packets(Wire):
    """A SEQPACKET unix socket: one packet per message, long ones through a memfd, descriptors beside them."""

    def send(self, body: bytes, fds: Sequence[int], timeout_s: float | None = None, kind: bytes = _PLAIN) -> None:
        """Send one packet; the kernel keeps packets of several threads apart."""
        if len(fds) > MOST_FDS:
            raise InputError(f"{len(fds)} descriptors do not fit beside one message. Send at most {MOST_FDS} at once.")
        if len(body) <= INLINE_BYTES:
            self._send((kind, body), fds, timeout_s)
            return
        check_length(len(body))
        memory = os.memfd_create("headway-message", os.MFD_CLOEXEC)
        try:
            left = memoryview(body)
            while left:
                left = left[os.write(memory, left) :]
            self._send((_PASSED,), (memory, *fds), timeout_s)
        finally:
            os.close(memory)

    def receive(self, timeout_s: float | None) -> tuple[bytes | bytearray, list[int]]:
        """Return the next packet's message."""
        message, fds = self._packet(None if timeout_s is None else time.monotonic() + timeout_s)
        try:
            kind, body = self.opened(message)
            if kind == _PASSED:
                memory = fds.pop(0) if fds else -1
                body = self._read(memory)
        except ChannelClosed:
            for fd in fds:
                os.close(fd)
            raise
        return body, fds

    def _send(self, packet: Sequence[bytes], fds: Sequence[int], timeout_s: float | None) -> None:
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(map(_FDS.pack, fds)))] if fds else []
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                self.socket.sendmsg(packet, beside, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                pass  # waits below, where a Ctrl-C has no other error to be shown with
            except OSError as error:
                raise self._gone(error) from error
            self.wait(select.POLLOUT, deadline)

    def _gone(self, error: OSError) -> ChannelClosed:
        """Close and return the error; what the peer said before it went comes first."""
        with suppress(TimeoutError, OSError):
            try:
                self.opened(self._packet(time.monotonic())[0])
            except ChannelClosed as goodbye:
                return goodbye
        return self.broken(f"the other end of the channel is gone ({error.strerror}). Connect again.")

    def _packet(self, deadline: float | None) -> tuple[bytes, list[int]]:
        room = socket.CMSG_SPACE((MOST_FDS + 1) * _FDS.size)
        while True:
            try:
                message, beside, flags, _ = self.socket.recvmsg(INLINE_BYTES + 1, room, socket.MSG_CMSG_CLOEXEC)
                break
            except BlockingIOError:
                pass  # waits below, as above
            except OSError as error:
                raise self.broken(f"the channel broke ({error.strerror}). Connect again.") from error
            self.wait(select.POLLIN, deadline)
        passed = [raw[: len(raw) // _FDS.size * _FDS.size] for _, kind, raw in beside if kind == socket.SCM_RIGHTS]
        fds = [fd for raw in passed for (fd,) in _FDS.iter_unpack(raw)]
        if not message or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            for fd in fds:
                os.close(fd)
            cause = "sent more than fits into one packet" if message else "is gone"
            raise self.broken(f"the other end of the channel {cause}. Connect again.")
        return message, fds

    def _read(self, memory: int) -> bytes:
        """Return what a passed memfd holds, and close it. It is copied: the peer could still shrink it."""
        if memory < 0:
            raise self.broken("the other end announced a long message and passed none. Connect again.")
        try:
            found = os.fstat(memory)
            if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
                raise self.broken(f"the other end passed no message of at most {MOST_BYTES} bytes. Connect again.")
            body = os.pread(memory, found.st_size, 0)
        finally:
            os.close(memory)
        if len(body) != found.st_size:
            raise self.broken("the other end changed a message while it was read. Connect again.")
        return body


class Frames(Wire):
    """A TCP stream: each message behind its length in four bytes."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that vanished is noticed at last
        self._got = bytearray()

    def send(self, body: bytes, fds: Sequence[int], timeout_s: float | None = None, kind: bytes = _PLAIN) -> None:
        """Send one frame. A timeout in the middle of one closes the wire: half a frame cannot be taken back."""
        if fds:
            raise InputError("descriptors do not travel between machines. Send the bytes, or use a unix socket.")
        check_length(len(body))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        parts = [memoryview(_LENGTH.pack(len(body) + 1) + kind), memoryview(body)]
        begun = False
        with self._sending:
            while parts:
                try:
                    sent = self.socket.sendmsg(parts, (), socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    try:
                        self.wait(select.POLLOUT, deadline)
                    except TimeoutError:
                        if begun:
                            raise self.broken("the other end stopped reading inside a message.") from None
                        raise
                    continue
                except OSError as error:
                    raise self.broken(f"the other end of the channel is gone ({error.strerror}).") from error
                begun = True
                parts = _rest(parts, sent)

    def receive(self, timeout_s: float | None) -> tuple[bytes | bytearray, list[int]]:
        """Return the next frame's message; what has come of it stays when the time is over."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._fill(_LENGTH.size, deadline)
        (length,) = _LENGTH.unpack_from(self._got)
        if not 1 <= length <= MOST_BYTES + 1:
            raise self.broken(f"the other end announced a message of {length} bytes. Send at most {MOST_BYTES}.")
        self._fill(_LENGTH.size + length, deadline)
        message = self._got[_LENGTH.size : _LENGTH.size + length]
        del self._got[: _LENGTH.size + length]
        kind, body = self.opened(message)
        if kind == _PASSED:
            raise self.broken("the other end announced a descriptor, which cannot come over TCP. Connect again.")
        return body, []

    def exactly(self, size: int, deadline: float) -> bytes:
        """Return the next `size` raw bytes and not one more: for what comes before the first frame."""
        self._fill(size, deadline, exact=True)
        raw = bytes(self._got[:size])
        del self._got[:size]
        return raw

    def _fill(self, size: int, deadline: float | None, *, exact: bool = False) -> None:
        while len(self._got) < size:
            missing = size - len(self._got)
            try:
                piece = self.socket.recv(missing if exact else min(max(missing, INLINE_BYTES), 1 << 20))
            except BlockingIOError:
                self.wait(select.POLLIN, deadline)
                continue
            except OSError as error:
                raise self.broken(f"the channel broke ({error.strerror}). Connect again.") from error
            if not piece:
                raise self.broken("the other end of the channel is gone. Connect again.")
            self._got += piece


def check_length(num_bytes: int) -> None:
    """Raise `InputError` on a message that the other end would refuse."""
    if num_bytes > MOST_BYTES:
        raise InputError(f"a message of {num_bytes} bytes is too long. Split it into parts of {MOST_BYTES} at most.")


def _rest(parts: list[memoryview], sent: int) -> list[memoryview]:
    """Return what is left of `parts` after `sent` bytes."""
    while parts and sent >= len(parts[0]):
        sent -= len(parts[0])
        parts = parts[1:]
    return [parts[0][sent:], *parts[1:]] if parts else []
