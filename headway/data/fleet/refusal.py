"""What a fleet does once it has given up: it tells everybody who comes to the master's address why.

Without this, readers and workers could not tell a fleet that has ended from
one whose master is about to come back. The process that refuses holds no state
of the fleet, so what ended the masters (a broken checkpoint, say) cannot end it.

>>> ended_with(-9), ended_with(1), ended_with(None)
('signal 9 (SIGKILL)', 'exit code 1', 'a code that the script collected itself')
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket

from headway.core.errors import InputError
from headway.core.wire.channel import Channel, ChannelClosed, Listener, TcpListener
from headway.data.fleet.messages import (
    FleetStatusRequest,
    JoinPass,
    Register,
    RequestRefused,
    ToMaster,
    hang_up,
    listen,
)

LOOK_S = 0.2
"""How often the process looks whether its parent lives, and whether it can listen at last."""
SEND_S = 0.5
"""Longest that a peer may leave its answer unread before its channel is closed."""
START_AGAIN = (
    "Remove the cause, start the fleet again, and go on from the last state: nothing that was taken before it "
    "comes again."
)


def ended_with(code: int | None) -> str:
    """Return how a process ended, in words; `code` is negative for signals, None when it is not known."""
    if code is None:
        return "a code that the script collected itself"
    if code >= 0:
        return f"exit code {code}"
    name = {number.value: f" ({number.name})" for number in signal.Signals}.get(-code, "")
    return f"signal {-code}{name}"


def refuse_all(address: str, token: str, why: str, user: socket.socket) -> None:
    """Answer everybody who asks something of the master at `address` with `why`, until the user's process goes.

    `user` is connected to that process, the parent of this one. While another process listens at `address`
    (the last master may need a moment to end), it tries again every `LOOK_S`.
    """
    parent = os.getppid()
    listener: Listener | TcpListener | None = None
    with selectors.PollSelector() as selector:
        selector.register(user, selectors.EVENT_READ)
        try:
            while os.getppid() == parent:
                if listener is None:
                    with contextlib.suppress(InputError, OSError):
                        listener = listen(address, token, ToMaster)[0]
                        selector.register(listener, selectors.EVENT_READ, listener)
                for key, _ in selector.select(LOOK_S):
                    if key.fileobj is user:
                        return
                    if isinstance(key.data, Channel):
                        _answer(selector, key.data, why)
                    elif listener is not None:
                        with contextlib.suppress(ChannelClosed, TimeoutError):
                            channel = listener.accept(timeout_s=0.0)
                            selector.register(channel, selectors.EVENT_READ, channel)
        finally:
            if listener is not None:
                listener.close()


def _answer(selector: selectors.BaseSelector, channel: Channel, why: str) -> None:
    """Answer what has come. The caller hangs up: were we to do it, over TCP its copy of the answer could be lost."""
    try:
        while True:
            message, _ = channel.receive(timeout_s=0.0)
            if isinstance(message, (JoinPass, FleetStatusRequest, Register)):
                channel.send(RequestRefused(why, fatal=True), timeout_s=SEND_S)
    except TimeoutError:
        return
    except ChannelClosed:
        hang_up(selector, channel)
