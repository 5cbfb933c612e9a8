"""One loop for a service: it accepts callers, hears them, answers, and learns at once when a process ends.

Use it where one thread serves several processes. Everything that happens is a
call of a function that was registered for it, in the thread that calls `turn`:

    loop.listen(listener, answer)      answer(channel, message) -> reply or None, for every caller of `listener`
    loop.watch_process(pid, ended)     ended() once the process is gone, whoever its parent is (a pidfd)
    loop.turn(timeout_s)               waits for the first event, at most so long, and handles all that is there
    loop.ring()                        ends a wait early; any thread and signal handler may call it

A caller that says nothing for `patience_s`, or does not read its reply within
`SEND_S`, is let go; the loop waits for nobody else. An `InputError` of `answer`
closes that caller's channel with the reason, and concerns nobody else.

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
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import time
from collections.abc import Callable
from typing import Protocol, Self

import msgspec

from headway.core.errors import InputError
from headway.core.wire.channel import Channel, ChannelClosed
from headway.core.wire.wake import Waker

LOG = logging.getLogger(__name__)

SEND_S = 1.0
"""How long the loop waits for a caller with a full buffer to read."""

PATIENCE_S = 60.0
"""How long a caller may say nothing."""


class AnswerFn(Protocol):
    """What a service does with a message."""

    def __call__(self, channel: Channel, message: msgspec.Struct, /) -> msgspec.Struct | None:
        """Return the reply, or None where there is none; `InputError` ends the conversation with its text."""
        ...


class Listening(Protocol):
    """A `Listener` or `TcpListener`."""

    def accept(self, timeout_s: float | None = None) -> Channel:
        """Return the next caller's channel."""
        ...

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        ...


class ServiceLoop:
    """Callers, processes and a bell, in one selector. Close it: its callers are told."""

    def __init__(self, *, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic) -> None:
        """Let a caller be silent for `patience_s` of `clock`."""
        self._selector = selectors.PollSelector()  # not epoll: a fork of ours would keep what we close in it
        self._patience_s, self._clock = patience_s, clock
        self._wake = Waker()
        self._heard_s: dict[Channel, float] = {}
        self._pidfds: set[int] = set()
        self._selector.register(self._wake, selectors.EVENT_READ, self._wake.clear)

    @property
    def num_callers(self) -> int:
        """Callers that are connected."""
        return len(self._heard_s)

    def listen(self, listener: Listening, answer: AnswerFn) -> None:
        """Accept callers at `listener`, and let `answer` reply to what they send."""
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener, answer))

    def add(self, channel: Channel, answer: AnswerFn) -> None:
        """Hear a caller that is connected already."""
        self._heard_s[channel] = self._clock()
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._hear(channel, answer))

    def watch_process(self, pid: int, ended: Callable[[], object]) -> bool:
        """Call `ended` once process `pid` is gone; False, and it never is called, where there is no such process."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return False
        self._pidfds.add(pidfd)
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._gone(pidfd, ended))
        return True

    def turn(self, timeout_s: float) -> None:
        """Wait for something to happen, at most `timeout_s`, and handle it; silent callers are let go."""
        for key, _ in self._selector.select(max(timeout_s, 0.0)):
            key.data()
        late_s = self._clock() - self._patience_s
        for channel in [channel for channel, heard_s in self._heard_s.items() if heard_s < late_s]:
            self.drop(channel, f"nothing was heard for {self._patience_s:g} s")

    def ring(self) -> None:
        """End the wait of `turn`, now or when it begins."""
        self._wake.ring()

    def drop(self, channel: Channel, reason: str | None = None) -> None:
        """Let a caller go, and tell it why."""
        if self._heard_s.pop(channel, None) is not None:
            self._selector.unregister(channel)
            channel.close(reason)

    def close(self, reason: str = "the server ends") -> None:
        """Let everybody go; what listens is its owner's to close."""
        for channel in list(self._heard_s):
            self.drop(channel, reason)
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds.clear()
        self._selector.close()
        self._wake.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _accept(self, listener: Listening, answer: AnswerFn) -> None:
        try:
            self.add(listener.accept(0.0), answer)
        except (ChannelClosed, TimeoutError, OSError) as error:
            LOG.warning("a caller was refused: %s", error)

    def _hear(self, channel: Channel, answer: AnswerFn) -> None:
        """Reply to all that a caller has sent."""
        try:
            while channel in self._heard_s:
                message, fds = channel.receive(0.0)
                for fd in fds:  # nobody here asks for any
                    os.close(fd)
                self._heard_s[channel] = self._clock()
                reply = answer(channel, message)
                if reply is not None:
                    self._send(channel, reply)
        except TimeoutError:
            pass
        except ChannelClosed:
            self.drop(channel)
        except InputError as error:
            self.drop(channel, str(error))

    def _send(self, channel: Channel, reply: msgspec.Struct) -> None:
        try:
            channel.send(reply, timeout_s=SEND_S)
        except TimeoutError:
            self.drop(channel, "it does not read its replies")

    def _gone(self, pidfd: int, ended: Callable[[], object]) -> None:
        self._selector.unregister(pidfd)
        self._pidfds.discard(pidfd)
        with contextlib.suppress(OSError):
            os.close(pidfd)
        ended()
