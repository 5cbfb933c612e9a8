"""Channels carry structs whole, in order, to nobody else; and every bad peer is one clear error."""

import contextlib
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.files.private import runtime_directory
from headway.core.wire import wires
from headway.core.wire.channel import ChannelClosed, Listener, TcpListener, connect, connect_tcp, pair
from headway.core.wire.handshake import MOST_STRANGERS, PendingHandshakes
from tests.refusals import refused


class Text(msgspec.Struct, tag=True, frozen=True):
    text: str


class Bytes(msgspec.Struct, tag=True, frozen=True):
    raw: bytes
    numbers: list[int] = []


TYPES = Text | Bytes


@pytest.fixture
def ends(request, tmp_path):
    """Two connected ends over a unix socket or TCP."""
    made = {"unix": unix_ends, "tcp": tcp_ends}[request.param](tmp_path)
    yield made
    for end in made:
        end.close()


def unix_ends(folder):
    listener = Listener(folder / "s", types=TYPES)
    caller = connect(folder / "s", types=TYPES)
    accepted = listener.accept(1.0)
    listener.close()
    return caller, accepted


def tcp_ends(_):
    listener = TcpListener("127.0.0.1", 0, "secret", types=TYPES)
    made = []
    thread = threading.Thread(target=lambda: made.append(listener.accept(5.0)))
    thread.start()
    caller = connect_tcp("127.0.0.1", listener.port, "secret", types=TYPES)
    thread.join()
    listener.close()
    return caller, made[0]


both = pytest.mark.parametrize("ends", ["unix", "tcp"], indirect=True)


@given(st.lists(st.one_of(st.text().map(Text), st.builds(Bytes, st.binary(), st.lists(st.integers(-9, 9))))))
def test_messages_arrive_whole_and_in_order(messages):
    one, other = pair(types=TYPES)
    for message in messages:
        one.send(message)

    assert [other.receive(1.0) for _ in messages] == [(message, []) for message in messages]


@both
@pytest.mark.parametrize("size", [0, 1, wires.INLINE_BYTES - 20, wires.INLINE_BYTES + 1, 3_000_000])
def test_a_message_of_any_length_is_the_same_call(ends, size):
    caller, accepted = ends
    raw = os.urandom(size)
    thread = threading.Thread(target=caller.send, args=(Bytes(raw),))
    thread.start()

    assert accepted.receive(5.0) == (Bytes(raw), [])
    thread.join()


@both
def test_threads_that_send_at_once_do_not_mix_their_messages(ends):
    caller, accepted = ends
    texts = ["a" * 70_000, "b" * 10, "c" * 200_000]
    threads = [threading.Thread(target=lambda t=text: [caller.send(Text(t)) for _ in range(20)]) for text in texts]
    for thread in threads:
        thread.start()

    got = [accepted.receive(5.0)[0].text for _ in range(60)]
    assert sorted(got) == sorted(texts * 20)


def test_descriptors_travel_beside_a_message_and_a_long_one():
    one, other = pair(types=TYPES)
    memory = os.memfd_create("x")
    os.write(memory, b"inside")
    for message in (Text("short"), Text("l" * 100_000)):
        one.send(message, [memory, memory])
        got, fds = other.receive(1.0)

        assert got == message
        assert [os.pread(fd, 9, 0) for fd in fds] == [b"inside"] * 2
        assert not any(os.get_inheritable(fd) for fd in fds)
        for fd in fds:
            os.close(fd)
    os.close(memory)


@both
def test_a_wait_that_ends_is_a_timeout_and_loses_nothing(ends):
    caller, accepted = ends
    with pytest.raises(TimeoutError):
        accepted.receive(0.0)
    caller.send(Text("later"))

    assert accepted.receive(1.0)[0] == Text("later")


def test_half_a_frame_waits_for_the_rest():
    caller, accepted = tcp_ends(None)
    frame = struct.pack("!I", 1 + len(msgspec.msgpack.encode(Text("whole")))) + b"\0"
    caller._wire.socket.send(frame + msgspec.msgpack.encode(Text("whole"))[:3])
    with pytest.raises(TimeoutError):
        accepted.receive(0.05)
    caller._wire.socket.send(msgspec.msgpack.encode(Text("whole"))[3:])

    assert accepted.receive(1.0)[0] == Text("whole")


@both
def test_a_selector_sees_messages_and_ends(ends):
    caller, accepted = ends
    selector = selectors.DefaultSelector()
    selector.register(accepted, selectors.EVENT_READ)

    assert selector.select(0) == []
    caller.send(Text("x"))
    assert [key.fileobj for key, _ in selector.select(1.0)] == [accepted]


@both
def test_a_peer_that_goes_is_channel_closed_with_its_reason(ends):
    caller, accepted = ends
    accepted.close("the server is full")

    with pytest.raises(ChannelClosed, match="the server is full"):
        caller.receive(1.0)
    with pytest.raises(ChannelClosed):
        caller.send(Text("x"))
    assert caller.fileno() == -1


@both
def test_a_peer_that_only_sends_notices_the_end(ends):
    caller, accepted = ends
    accepted.close("enough of this")

    with pytest.raises(ChannelClosed):
        [caller.send(Text("x" * 10_000)) for _ in range(1000)]


@both
def test_closing_wakes_a_thread_that_waits(ends):
    caller, _ = ends
    failures = []

    def wait():
        try:
            caller.receive(None)
        except ChannelClosed as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    caller.close()
    thread.join(5.0)

    assert len(failures) == 1


@both
@pytest.mark.parametrize(
    "body", [b"", b"\xff\xff", b"[1, 2]", msgspec.msgpack.encode({"type": "Other"}), b"\x91" * 5000]
)
def test_what_is_no_message_is_one_clear_error_at_both_ends(ends, body):
    caller, accepted = ends
    caller._wire.send(body, ())

    with pytest.raises(ChannelClosed, match="same release"):
        accepted.receive(1.0)
    with pytest.raises(ChannelClosed, match="an undecodable message"):
        caller.receive(1.0)
    assert accepted.fileno() == -1


def test_a_frame_of_absurd_length_is_refused_before_memory_is_taken():
    caller, accepted = tcp_ends(None)
    caller._wire.socket.send(b"\xff\xff\xff\xff")

    with pytest.raises(ChannelClosed, match="4294967295 bytes"):
        accepted.receive(1.0)


def test_a_pipe_in_place_of_a_long_message_is_refused():
    one, other = pair(types=TYPES)
    reads, writes = os.pipe()
    one._wire._send((b"\1",), [reads], None)

    with pytest.raises(ChannelClosed, match="no message"):
        other.receive(1.0)
    os.close(reads)
    os.close(writes)


def test_descriptors_between_machines_are_refused():
    caller, _ = tcp_ends(None)
    with pytest.raises(InputError, match="do not travel between machines"):
        caller.send(Text("x"), [0])


def test_the_socket_is_the_users_alone(tmp_path):
    listener = Listener(tmp_path / "s", types=TYPES)

    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    caller = connect(tmp_path / "s", types=TYPES)
    assert (caller.peer, listener.accept(1.0).peer) == ((os.getpid(), os.getuid()),) * 2
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_another_user_is_refused_and_told_so(tmp_path):
    listener = Listener(tmp_path / "s", types=TYPES, uid=os.getuid() + 1)
    caller = connect(tmp_path / "s", types=TYPES)

    with pytest.raises(ChannelClosed, match="may not use a socket of user"):
        listener.accept(1.0)
    with pytest.raises(ChannelClosed, match="Start a server of your own"):
        caller.receive(1.0)
    listener.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_socket_of_another_user_is_refused_by_the_caller():
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to others
    folder.chmod(0o777)
    path = folder / "s"
    code = (
        "import os, sys, msgspec; from headway.core.wire.channel import Listener; os.setuid(65534); "
        f"listener = Listener({str(path)!r}, types=msgspec.Raw); os.chmod({str(path)!r}, 0o666); "
        "print('ready', flush=True); sys.stdin.read()"
    )
    served = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert served.stdout.readline() == b"ready\n"
        with pytest.raises(InputError, match="is a socket of user 65534"):
            connect(path, types=TYPES)
    finally:
        served.communicate(timeout=10)
        shutil.rmtree(folder)


def test_two_listeners_do_not_share_a_path_and_a_dead_ones_is_taken_over(tmp_path):
    path = tmp_path / "s"
    first = Listener(path, types=TYPES)
    with pytest.raises(InputError, match=r"listens at .* already"):
        Listener(path, types=TYPES)
    os.close(first._lock)  # as when its process dies: lock gone, files left
    first._socket.close()

    second = Listener(path, types=TYPES)
    assert connect(path, types=TYPES).peer.pid == os.getpid()
    second.close()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path):
    (tmp_path / "s").write_text("precious")

    with pytest.raises(InputError, match="is no socket"):
        Listener(tmp_path / "s", types=TYPES)
    assert (tmp_path / "s").read_text() == "precious"


def test_nobody_there_is_one_clear_error(tmp_path):
    with pytest.raises(ChannelClosed, match="nobody listens at"):
        connect(tmp_path / "s", 0.05, types=TYPES)
    with pytest.raises(InputError, match="too long for a socket"):
        connect("/" + "x" * 200, types=TYPES)
    with pytest.raises(InputError, match="Choose a folder"):
        Listener(tmp_path / "none" / "s", types=TYPES)


def test_types_that_cannot_be_told_apart_are_refused():
    class Plain(msgspec.Struct):
        x: int

    class Other(msgspec.Struct):
        y: int

    with pytest.raises(InputError, match="tag=True"):
        pair(types=Plain | Other)


@pytest.mark.parametrize("speaks", ["wrong token", "http", "half of it"])
def test_who_does_not_hold_the_token_is_not_read_and_let_go(speaks):
    listener = TcpListener("127.0.0.1", 0, "secret", types=TYPES)
    failures = []

    def call():
        try:
            if speaks == "wrong token":
                connect_tcp("127.0.0.1", listener.port, "guess", types=TYPES)
            else:
                with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
                    stranger.send(b"GET / HTTP/1.1\r\n" * (8 if speaks == "http" else 2))
                    stranger.shutdown(socket.SHUT_WR)
                    while stranger.recv(100):
                        pass
                    failures.append("let go")
        except (ChannelClosed, OSError) as error:  # ENOTCONN where the listener has closed before the shutdown
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    while thread.is_alive():
        with pytest.raises(TimeoutError, match="nobody who holds the token"):
            listener.accept(0.05)

    assert len(failures) == 1
    assert speaks != "wrong token" or "token" in str(failures[0])
    listener.close()


def test_silent_callers_keep_nobody_waiting_and_only_so_many_are_let_in():
    listener = TcpListener("127.0.0.1", 0, "secret", types=TYPES)
    made = []
    with contextlib.ExitStack() as opened:
        silent = []
        for _ in range(MOST_STRANGERS + 50):
            silent.append(opened.enter_context(socket.create_connection(("127.0.0.1", listener.port), timeout=20)))
            with pytest.raises(TimeoutError):
                listener.accept(0.0)
        caller = threading.Thread(
            target=lambda: made.append(connect_tcp("127.0.0.1", listener.port, "secret", types=TYPES))
        )
        caller.start()
        accepted = listener.accept(20.0)
        caller.join()
        accepted.send(Text("hello"))
        heard = made[0].receive(20.0)[0]
        first = len(silent[0].recv(33, socket.MSG_WAITALL))  # the nonce, and then the end
        silent[-1].setblocking(False)
        silent[-1].recv(32)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)
        listener.close()
        silent[-1].settimeout(20)
        last = silent[-1].recv(1)

    assert (heard, first, last) == (Text("hello"), 32, b"")


def test_a_listener_without_the_token_learns_nothing_and_is_refused():
    fake = socket.create_server(("127.0.0.1", 0))
    heard = []

    def listen():
        connected = fake.accept()[0]
        connected.send(b"n" * 32)
        heard.append(connected.recv(64))
        connected.send(b"p" * 32)
        connected.close()

    thread = threading.Thread(target=listen)
    thread.start()
    with pytest.raises(ChannelClosed, match="token"):
        connect_tcp("127.0.0.1", fake.getsockname()[1], "secret", types=TYPES)
    thread.join(5.0)
    fake.close()

    assert b"secret" not in heard[0]


def test_a_fork_lets_go_of_a_listener_while_a_thread_of_its_parent_is_in_accept(monkeypatch):
    inside, go = threading.Event(), threading.Event()
    advance = PendingHandshakes._advance
    monkeypatch.setattr(PendingHandshakes, "_advance", lambda self: (inside.set(), go.wait(60), advance(self))[-1])
    listener = TcpListener("127.0.0.1", 0, "secret", types=TYPES)

    def accept():
        with contextlib.suppress(TimeoutError):
            listener.accept(0.0)

    accepting = threading.Thread(target=accept)
    accepting.start()
    inside.wait(60)
    child = os.fork()
    if child == 0:
        try:
            listener.abandon()
            os._exit(7)
        finally:
            os._exit(1)
    until = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    go.set()
    accepting.join()
    listener.close()
    assert os.waitstatus_to_exitcode(ended[1]) == 7


test_an_empty_token_is_refused = refused((lambda: TcpListener("127.0.0.1", 0, "", types=TYPES), "empty"))


def test_the_runtime_folder_is_ours_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    assert runtime_directory() == tmp_path / "headway"
    assert runtime_directory().stat().st_mode & 0o777 == 0o700
    runtime_directory().chmod(0o755)
    with pytest.raises(InputError, match="nobody else can enter"):
        runtime_directory()


def test_a_real_process_is_served_and_its_death_is_seen(tmp_path):
    listener = Listener(tmp_path / "s", types=TYPES)
    code = (
        "import os, signal, msgspec; from headway.core.wire.channel import connect; "
        "Text = msgspec.defstruct('Text', [('text', str)], tag='Text'); "
        f"channel = connect({str(tmp_path / 's')!r}, types=Text); channel.send(Text('hello')); "
        "print(channel.receive()[0].text, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    channel = listener.accept(20.0)

    assert channel.peer.pid == process.pid
    assert channel.receive(10.0)[0] == Text("hello")
    channel.send(Text("back"))
    assert process.communicate(timeout=20)[0] == "back\n"
    with pytest.raises(ChannelClosed):
        channel.receive(5.0)
    listener.close()


def test_the_death_of_a_process_is_seen_also_while_a_fork_of_it_holds_its_sockets(tmp_path):
    code = (
        "import os, signal, time, msgspec; from headway.core.wire.channel import Listener; "
        "Text = msgspec.defstruct('Text', [('text', str)], tag='Text'); "
        f"listener = Listener({str(tmp_path / 's')!r}, types=Text); channel = listener.accept(20.0); "
        "fork = os.fork(); fork or time.sleep(100); channel.send(Text(str(fork))); time.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    channel = connect(tmp_path / "s", 20.0, types=TYPES)
    fork = int(channel.receive(20.0)[0].text)
    process.kill()
    process.wait()
    try:
        with pytest.raises(ChannelClosed, match="has ended"):
            channel.receive(20.0)
        with pytest.raises(ChannelClosed, match="nobody listens"):
            connect(tmp_path / "s", 0.0, types=TYPES)
    finally:
        os.kill(fork, signal.SIGKILL)


def test_what_interrupts_a_wait_comes_with_no_other_error():
    def interrupt(*_):
        raise KeyboardInterrupt

    one, other = pair(types=TYPES)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt) as caught:
            one.receive()
    finally:
        signal.signal(signal.SIGALRM, before)
        other.close()
        one.close()

    assert caught.value.__context__ is None
