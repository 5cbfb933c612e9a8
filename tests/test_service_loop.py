"""One loop for a service: callers, processes that end, patience."""

import os
import subprocess
import sys

import msgspec
import pytest

from headway.core.errors import InputError
from headway.core.wire.channel import ChannelClosed, Listener, connect, pair
from headway.core.wire.loop import ServiceLoop
from tests.paths import ROOT


class Number(msgspec.Struct, tag=True):
    value: int


def halved(channel, message):
    if message.value % 2:
        raise InputError(f"{message.value} is odd. Send an even number.")
    return Number(message.value // 2) if message.value else None


def test_callers_are_answered_and_one_that_is_refused_hears_why_and_concerns_nobody_else(tmp_path):
    listener = Listener(tmp_path / "s", types=Number)
    with ServiceLoop() as loop:
        loop.listen(listener, halved)
        good, bad = connect(tmp_path / "s", types=Number), connect(tmp_path / "s", types=Number)
        for number in (4, 0, 6):
            good.send(Number(number))
        bad.send(Number(3))
        for _ in range(4):
            loop.turn(0.1)

        assert [good.receive(1.0)[0].value for _ in range(2)] == [2, 3]
        with pytest.raises(ChannelClosed, match=r"3 is odd. Send an even number."):
            bad.receive(1.0)
        assert loop.num_callers == 1
        good.close()
        loop.turn(1.0)
        assert loop.num_callers == 0
    listener.close()


def test_the_owner_hears_once_why_a_caller_is_gone_and_not_of_those_it_dropped_itself():
    left = []
    with ServiceLoop(send_s=0.05) as loop:
        ends = [pair(types=Number) for _ in range(4)]
        for channel, _ in ends:
            loop.add(channel, halved, lambda channel, why: left.append((channel, why)))
        (leaves, one), (wrong, two), (deaf, _), (dropped, _) = ends
        one.close()
        two.send(Number(3))
        loop.drop(dropped)
        loop.turn(1.0)
        while loop.num_callers:
            sent = loop.send(deaf, Number(1))
        assert not sent
        assert not loop.send(deaf, Number(1))

    assert [channel for channel, _ in left] == [leaves, wrong, deaf]
    assert "is gone" in left[0][1]
    assert [why for _, why in left[1:]] == ["3 is odd. Send an even number.", "it does not read its replies"]


def test_descriptors_are_for_the_answer_to_take_and_those_that_it_leaves_are_closed():
    taken = []
    with ServiceLoop() as loop:
        server, client = pair(types=Number)
        loop.add(server, lambda *_: taken.append(loop.fds.pop(0)))
        before = len(os.listdir("/proc/self/fd"))
        client.send(Number(1), [client.fileno(), client.fileno()])
        loop.turn(1.0)

        assert len(os.listdir("/proc/self/fd")) == before + 1
        assert os.path.sameopenfile(taken[0], client.fileno())
        os.close(taken[0])


def test_a_caller_goes_with_its_process_though_a_child_of_that_has_the_socket(tmp_path):
    code = (
        "import os, msgspec; from headway.core.wire.channel import connect;"
        "Number = msgspec.defstruct('Number', [('value', int)], tag='Number');"
        f"channel = connect({str(tmp_path / 's')!r}, types=Number); channel.send(Number(4));"
        "os.fork() or os.read(0, 1); os._exit(0)"
    )
    listener, heard, left = Listener(tmp_path / "s", types=Number), [], []
    with ServiceLoop() as loop:
        answer, gone = (lambda _, message: heard.append(message.value)), (lambda _, why: left.append(why))
        loop.admit(listener, lambda channel: loop.add(channel, answer, gone, with_process=True))
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, cwd=ROOT)
        while not left:
            loop.turn(20.0)
        assert (heard, left, loop.num_callers) == ([4], ["its process has ended"], 0)
    process.communicate(b"")
    listener.close()


def test_a_silent_caller_is_let_go_after_the_patience_and_one_that_speaks_is_not():
    now_s = [0.0]
    with ServiceLoop(patience_s=10.0, clock=lambda: now_s[0]) as loop:
        (speaks, one), (silent, other) = pair(types=Number), pair(types=Number)
        loop.add(speaks, halved)
        loop.add(silent, halved)
        now_s[0] = 8.0
        one.send(Number(0))
        loop.turn(1.0)
        now_s[0] = 12.0
        loop.turn(0.0)

        assert loop.num_callers == 1
        with pytest.raises(ChannelClosed, match="nothing was heard for 10 s"):
            other.receive(1.0)
    with pytest.raises(ChannelClosed, match="the server ends"):
        one.receive(1.0)


def test_the_end_of_a_process_is_seen_once_and_a_bell_ends_the_wait():
    ended = []
    with ServiceLoop() as loop:
        child = subprocess.Popen([sys.executable, "-ISc", "input()"], stdin=subprocess.PIPE)
        assert loop.watch_process(child.pid, lambda: ended.append(child.pid))
        loop.ring()
        loop.turn(60.0)
        assert ended == []
        child.communicate(b"\n")
        loop.turn(60.0)
        loop.turn(0.0)
        assert not loop.watch_process(2**22 + 1, lambda: ended.append(0))

    assert ended == [child.pid]
