"""The training process's end of its checkpoint agent: starts it, hands saves over, hears how they ended.

An agent that dies is started again and given what it had not finished: the
images still lie in this process's memory, so nothing is lost. The third death
over the same save is an error. Nothing here waits unless asked to.

>>> link = AgentLink(Hello(root="/nonexistent", attempt="a", rank=0, world_size=1))
>>> link.outstanding, link.poll()
([], [])
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.checkpoint.agent.agent import socket_path
from headway.checkpoint.agent.messages import (
    FROM_AGENT,
    Committed,
    Done,
    Failed,
    Finish,
    HeldImage,
    Hello,
    ImageArena,
    ImageRequest,
    Layout,
    Leave,
    Persist,
    Persisted,
    Redundant,
)
from headway.core.errors import HeadwayError, InputError
from headway.core.wire.channel import Channel, PeerProcess, connect, sweep_logs
from headway.core.wire.wires import ChannelClosed, Packets

LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())

MOST_DEATHS = 2
"""Agents that may die over one save before it counts as failed."""

PACKAGE = Path(__file__).resolve().parents[3]
"""The folder that holds the package `headway`: the agent runs the same release."""

AgentReply = Persisted | Committed | Redundant | Failed
"""What an agent reports of a save."""


@dataclass(slots=True)
class _Outstanding:
    """A save that is not over."""

    save: Persist
    layout: Layout
    num_deaths: int = 0


class AgentLink:
    """One agent at a time, of the process that made the link. Sends wait only while the agent's buffer is full."""

    def __init__(self, hello: Hello) -> None:
        """Start nothing yet: the first save does."""
        self.hello = hello
        self._arenas: dict[int, tuple[ImageArena, int]] = {}
        self._layout = Layout(())
        self._saves: list[_Outstanding] = []
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the agent; None while there is none."""
        return self._process.pid if self._process is not None else None

    @property
    def outstanding(self) -> list[Persist]:
        """Saves that are neither committed nor failed, oldest first."""
        return [entry.save for entry in self._saves]

    def arena(self, number: int, file: int, num_bytes: int) -> None:
        """Hand over memory: descriptor `file` must stay open until the link is closed or the number given anew."""
        self._arenas[number] = (ImageArena(number, num_bytes), file)
        if self._channel is not None:
            self._send(self._arenas[number][0], [file])

    def layout(self, layout: Layout) -> None:
        """Say how images are laid out from now on."""
        self._layout = layout
        if self._channel is not None:
            self._send(layout)

    def persist(self, save: Persist) -> None:
        """Hand a save over; the agent is started if there is none."""
        if self._channel is None:
            self._start()
        self._saves.append(_Outstanding(save, self._layout))
        self._send(save)

    def poll(self, timeout_s: float = 0.0) -> list[AgentReply]:
        """Return what the agent has reported since; wait up to `timeout_s` for the first report."""
        found: list[AgentReply] = []
        while self._channel is not None:
            try:
                message, fds = self._channel.receive(0.0 if found else timeout_s)
            except TimeoutError:
                break
            except ChannelClosed as error:
                found += self._revive(str(error))
                continue
            for left in fds:
                os.close(left)
            if isinstance(message, Committed) or (isinstance(message, Failed) and message.what == "save"):
                self._saves = [entry for entry in self._saves if entry.save.step != message.step]
            found.append(message)
        return found

    def leave(self) -> None:
        """Tell the agent that nothing more comes: it finishes what it has, and ends."""
        if self._channel is not None:
            with contextlib.suppress(ChannelClosed, TimeoutError):
                self._channel.send(Leave(), timeout_s=1.0)

    def close(self, timeout_s: float = 10.0) -> None:
        """Leave, wait for the agent's end, let the channel go. An agent that is busy for longer ends by itself."""
        self.leave()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def abandon(self) -> None:
        """Let go of the channel in a forked child: agent and saves are the parent's."""
        if self._channel is not None:
            self._channel.abandon()
            self._channel = None

    def _start(self) -> None:
        """Start an agent: a process without torch, in a session of its own, with one descriptor of ours."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _asked(self.hello.root, self.hello.rank, Leave(), timeout_s=0.0)  # an orphan of an earlier attempt
        log = socket_path(self.hello.root, self.hello.rank).with_suffix(f".{os.getpid()}.log")
        sweep_logs(log.parent, "ckpt-*.log")
        with theirs, open(log, "ab", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)) as said:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "headway.checkpoint.agent.agent", str(theirs.fileno()), str(log)],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said, pass_fds=[theirs.fileno()],
                start_new_session=True, cwd="/", env=environment(os.environ),
            )  # fmt: skip
        self._channel = Channel(Packets(ours), FROM_AGENT, PeerProcess(self._process.pid, os.getuid()))
        self._send(self.hello)
        for arena, file in self._arenas.values():
            self._send(arena, [file])
        self._send(self._layout)

    def _send(self, message: Hello | ImageArena | Layout | Persist, fds: list[int] | None = None) -> None:
        """Send; where the agent has died meanwhile, the next `poll` finds out and makes up for it."""
        assert self._channel is not None
        with contextlib.suppress(ChannelClosed):
            self._channel.send(message, fds or ())

    def _revive(self, why: str) -> list[AgentReply]:
        """Start another agent for one that died, with what it had not finished; return the saves that are given up."""
        assert self._process is not None
        self._channel, pid = None, self._process.pid
        code = self._process.wait()
        if code == 0 and not self._saves:
            return []  # it ended in good order; the next save starts another
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code} ({why})"
        for entry in self._saves:
            entry.num_deaths += 1
        lost = [entry for entry in self._saves if entry.num_deaths > MOST_DEATHS]
        text = f"{MOST_DEATHS + 1} agents in a row died over it, the last one {how}. Look at its log"
        given_up = self._give_up(lost, text)
        if self._saves:
            try:
                self._resume()
            except (OSError, HeadwayError) as error:  # no memory for a process, say
                given_up += self._give_up(self._saves, f"its agent {how}, and no other one could be started: {error}")
        warnings.warn(
            f"the checkpoint agent (process {pid}) {how}; another one takes over {len(self._saves)} unfinished saves.",
            RuntimeWarning,
            stacklevel=2,
        )
        return given_up

    def _resume(self) -> None:
        """Start an agent with the saves that are not over."""
        current = self._layout
        self._start()
        for entry in self._saves:
            self._send(entry.layout)
            self._send(entry.save)
        self._send(current)

    def _give_up(self, lost: list[_Outstanding], text: str) -> list[AgentReply]:
        """Forget saves; return what is to be told of each."""
        self._saves = [entry for entry in self._saves if entry not in lost]
        return [Failed(entry.save.step, "AgentDied", text) for entry in lost]


def environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return an agent's environment: ours, without recording, with this release of headway first on the path."""
    paths = [str(PACKAGE), *filter(None, ours.get("PYTHONPATH", "").split(os.pathsep))]
    return {**ours, "PYTHONPATH": os.pathsep.join(paths), "HEADWAY": "off"}


def ask(root: str, rank: int, step: int) -> tuple[HeldImage, int] | None:
    """Return what the agent of `rank` on this host holds of a step, and its descriptor (ours to close), or None."""
    answer = _asked(root, rank, ImageRequest(step), timeout_s=2.0)
    if answer is None or not isinstance(answer[0], HeldImage) or not answer[1]:
        return None
    return answer[0], answer[1][0]


def finish(root: str, rank: int, *, timeout_s: float = 60.0) -> bool:
    """Have the agent of an earlier attempt finish what is under way; return whether there was one, its trainer dead.

    One that does not finish within `timeout_s` is left alone.
    """
    answer = _asked(root, rank, Finish(), timeout_s=timeout_s)
    return answer is not None and isinstance(answer[0], Done) and answer[0].is_orphan


def _asked(
    root: str, rank: int, question: ImageRequest | Finish | Leave, *, timeout_s: float
) -> tuple[HeldImage | Done, list[int]] | None:
    """Return the answer of the agent of `rank` and its descriptors, None where there is no agent, or no answer."""
    try:
        channel = connect(socket_path(root, rank), 0.0, types=FROM_AGENT)
    except (ChannelClosed, InputError):
        return None
    try:
        channel.send(question, timeout_s=1.0)
        return None if isinstance(question, Leave) else channel.receive(timeout_s)
    except (ChannelClosed, TimeoutError):
        return None
    finally:
        channel.close()
