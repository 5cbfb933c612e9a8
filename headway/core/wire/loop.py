"""One loop for a service: it accepts callers, hears them, answers, and learns at once when a process ends.

Use it where one thread serves several processes. Everything that happens is a
call of a function that was registered for it, in the thread that calls `turn`:

    loop.listen(listener, answer)      answer(channel, message) -> reply or None, for every caller of `listener`
    loop.admit(listener, came)         came(channel) for every caller, who is heard from `add` on
    loop.add(channel, answer, gone)    gone(channel, why) once that caller, or whom we called, has left or was let go
    loop.send(channel, message, fds)   says whether it was sent; else the caller is let go, and `gone` told
    loop.watch(source, act)            act() whenever a descriptor, socket or channel can be read
    loop.watch_process(pid, ended)     ended() once the process is gone, whoever its parent is (a pidfd)
    loop.turn(timeout_s)               waits for the first event, at most so long, and handles all that is there
    loop.ring()                        ends a wait early; any thread and signal handler may call it

A caller that says nothing for `patience_s`, or does not read its reply within
`send_s`, is let go; the loop waits for nobody else. An `InputError` of `answer`
closes that caller's channel with the reason, and concerns nobody else. `answer`
takes the descriptors that came with a message out of `loop.fds`.

>>> import msgspec
>>> from headway.core.wire.channel import pair
>>> class Ping(msgspec.Struct, tag=True):
...     number: int
>>> with ServiceLoop() as loop:
...     server, client = pair(types=Ping)
...     loop.add(server, lambda channel, message: Ping(message.number + 1))
...     client.send(Ping(7))
...     loop.turn(1.0)
...     client.receive(1.0)[0], loop.num_callers
(Ping(number=8), 1)

`Waker` is the bell that ends a wait in a selector: any thread may ring, also after the waiting one has left.

>>> from headway.core.machine.host import readable
>>> with Waker() as wake:
...     wake.ring(), wake.ring()
...     readable(wake.fileno(), 0.0), wake.clear(), readable(wake.fileno(), 0.0)
(None, None)
(True, None, False)
>>> wake.ring()
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import msgspec

from headway.core.errors import InputError
from headway.core.wire.channel import Channel, ChannelClosed


class Waker:
    """Register it for reading; `clear` it when it was rung. A signal handler may ring too."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.RLock()  # a number that is closed may be another file's a moment later

    def ring(self) -> None:
        """Wake the thread, now or when it next waits; nothing once closed."""
        with self._lock:
            if self._fd >= 0:
                with contextlib.suppress(BlockingIOError):  # it has been rung so often that it will not be missed
                    os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Forget that it was rung."""
        with self._lock, contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def fileno(self) -> int:
        """Return the descriptor to wait on; -1 once closed."""
        return self._fd

    def close(self) -> None:
        """Give the descriptor back; doing it again is fine."""
        with self._lock:
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                os.close(fd)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


LOG = logging.getLogger(__name__)

SEND_S = 1.0
"""How long the loop waits for a caller with a full buffer to read."""

PATIENCE_S = 60.0
"""How long a caller may say nothing."""

GoneFn = Callable[[Channel, str], object]
"""Called when a caller has left or was let go, and why; its channel is closed."""


class Watched(Protocol):
    """What can be waited for: a socket, a channel, a bell."""

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        ...


class AnswerFn(Protocol):
    """What a service does with a message."""

    def __call__(self, channel: Channel, message: msgspec.Struct, /) -> msgspec.Struct | None:
        """Return the reply, or None where there is none; `InputError` ends the conversation with its text."""
        ...


class Listening(Watched, Protocol):
    """A `Listener` or `TcpListener`."""

    def accept(self, timeout_s: float | None = None) -> Channel:
        """Return the next caller's channel."""
        ...


@dataclass(slots=True)
class _Caller:
    """A channel that is heard."""

    heard_s: float
    answer: AnswerFn
    gone: GoneFn
    pidfd: int = -1
    """Readable once its process has ended; -1 where that is not watched."""


class ServiceLoop:
    """Callers, processes and a bell, in one selector. Close it: its callers are told."""

    def __init__(
        self,
        *,
        patience_s: float = PATIENCE_S,
        send_s: float = SEND_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Let a caller be silent for `patience_s` of `clock`, and leave a message unread for `send_s`."""
        self._selector = selectors.PollSelector()  # not epoll: a fork of ours would keep what we close in it
        self._patience_s, self._send_s, self._clock = patience_s, send_s, clock
        self._wake = Waker()
        self._callers: dict[Channel, _Caller] = {}
        self._pidfds: set[int] = set()
        self.fds: list[int] = []
        """Descriptors that came with the message that is being answered; those that are left here are closed."""
        self.watch(self._wake, self._wake.clear)

    @property
    def num_callers(self) -> int:
        """Callers that are connected."""
        return len(self._callers)

    def listen(self, listener: Listening, answer: AnswerFn, gone: GoneFn = lambda *_: None) -> None:
        """Accept callers at `listener`, and let `answer` reply to what they send."""
        self.admit(listener, lambda channel: self.add(channel, answer, gone))

    def admit(self, listener: Listening, came: Callable[[Channel], object]) -> None:
        """Call `came` with the channel of each caller of `listener`."""
        self.watch(listener, lambda: self._accept(listener, came))

    def add(
        self, channel: Channel, answer: AnswerFn, gone: GoneFn = lambda *_: None, *, with_process: bool = False
    ) -> None:
        """Hear a caller that is connected already, until it is `gone`: it left, or was let go by the loop.

        `with_process`: also when its process has ended, even if a child of that still has the socket.
        """
        caller = self._callers[channel] = _Caller(self._clock(), answer, gone)
        self.watch(channel, lambda: self.hear(channel))
        if with_process:
            caller.pidfd = self._watched(channel.peer.pid or 0, lambda: self._outlived(channel))

    def watch(self, source: Watched | int, act: Callable[[], object]) -> None:
        """Call `act` whenever `source` can be read, until it is dropped."""
        self._selector.register(source, selectors.EVENT_READ, act)

    def watch_process(self, pid: int, ended: Callable[[], object]) -> bool:
        """Call `ended` once process `pid` is gone; False, and it never is called, where there is no such process."""

        def act() -> None:
            self._unwatch(pidfd)
            ended()

        pidfd = self._watched(pid, act)
        return pidfd >= 0

    def turn(self, timeout_s: float) -> None:
        """Wait for something to happen, at most `timeout_s`, and handle it; silent callers are let go."""
        for key, _ in self._selector.select(max(timeout_s, 0.0)):
            key.data()
        late_s = self._clock() - self._patience_s
        for channel in [channel for channel, caller in self._callers.items() if caller.heard_s < late_s]:
            self._let_go(channel, f"nothing was heard for {self._patience_s:g} s")

    def ring(self) -> None:
        """End the wait of `turn`, now or when it begins."""
        self._wake.ring()

    def hear(self, channel: Channel) -> None:
        """Answer all that a caller has sent; `turn` does so, but of what came with a message that was read before."""
        caller = self._callers.get(channel)
        if caller is None:
            return
        try:
            for message, self.fds in channel.arrived():
                try:
                    if channel not in self._callers:
                        return
                    caller.heard_s = self._clock()
                    reply = caller.answer(channel, message)
                    if reply is not None:
                        self.send(channel, reply)
                finally:
                    while self.fds:
                        os.close(self.fds.pop())
        except TimeoutError:
            pass
        except ChannelClosed as error:
            self._lose(channel, str(error))
        except InputError as error:
            self._let_go(channel, str(error))

    def send(self, channel: Channel, message: msgspec.Struct, fds: Sequence[int] = ()) -> bool:
        """Send to a caller, and copies of `fds`; one that is gone, or does not read, is let go: False then."""
        try:
            channel.send(message, fds, timeout_s=self._send_s)
            return True
        except TimeoutError:
            self._let_go(channel, "it does not read its replies")
        except ChannelClosed as error:
            self._lose(channel, str(error))
        return False

    def drop(self, channel: Channel, reason: str | None = None) -> None:
        """Close a channel that is heard or watched, and tell the other end why."""
        caller = self._callers.pop(channel, None)
        with contextlib.suppress(KeyError, ValueError):  # it was dropped before
            self._selector.unregister(channel)
        if caller is not None and caller.pidfd >= 0:
            self._unwatch(caller.pidfd)
        channel.close(reason)

    def close(self, reason: str | None = "the server ends") -> None:
        """Let everybody go; what listens, and what is only watched, is its owner's to close."""
        for channel in list(self._callers):
            self.drop(channel, reason)
        for pidfd in list(self._pidfds):
            self._unwatch(pidfd)
        self._selector.close()
        self._wake.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _accept(self, listener: Listening, came: Callable[[Channel], object]) -> None:
        try:
            channel = listener.accept(0.0)
        except TimeoutError:  # it has not proved yet that it holds the token
            return
        except (ChannelClosed, OSError) as error:
            LOG.warning("a caller was refused: %s", error)
            return
        came(channel)

    def _outlived(self, channel: Channel) -> None:
        """Reply to what a process sent before it ended, and let its channel go."""
        self.hear(channel)
        self._lose(channel, "its process has ended")

    def _let_go(self, channel: Channel, why: str) -> None:
        self._lose(channel, why, reason=why)

    def _lose(self, channel: Channel, why: str, reason: str | None = None) -> None:
        caller = self._callers.get(channel)
        self.drop(channel, reason)
        if caller is not None:
            caller.gone(channel, why)

    def _watched(self, pid: int, act: Callable[[], object]) -> int:
        """Call `act` once process `pid` is gone; returns its descriptor, -1 where there is no such process."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return -1
        self._pidfds.add(pidfd)
        self.watch(pidfd, act)
        return pidfd

    def _unwatch(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        self._pidfds.discard(pidfd)
        os.close(pidfd)
