"""A child that stepped apart: whatever it does, its parent finds files, memory, sockets and output as they were."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headway.core.machine.child import said


def apart(work, shared="end at writes"):
    """Run `work` apart; returns its answer and how the child ended."""
    return said(lambda: str(work()).encode(), timeout_s=60, apart=shared)


@pytest.mark.parametrize("buffering", [0, -1])
def test_reading_an_inherited_file_moves_only_the_childs_position(tmp_path, buffering):
    (tmp_path / "data").write_bytes(b"abcdefgh")
    with open(tmp_path / "data", "rb", buffering=buffering) as file:
        os.lseek(file.fileno(), 3, os.SEEK_SET)
        answer = apart(lambda: (os.lseek(file.fileno(), 0, os.SEEK_CUR), os.read(file.fileno(), 2)))

        assert answer == (b"(3, b'de')", 0)
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 3


def shared_value():
    value = multiprocessing.Value("i", 7)

    def write():
        value.value += 1

    return write, lambda: value.value


def shared_tensor():
    tensor = torch.full((3,), 7).share_memory_()
    return lambda: tensor.add_(1), lambda: int(tensor[0])


def mapped_file(tmp_path):
    array = np.memmap(tmp_path / "array", np.uint8, "w+", shape=(8,))
    array[:] = 7
    return lambda: array.__setitem__(0, 1), lambda: int(array[0])


@pytest.mark.parametrize("make", [shared_value, shared_tensor, mapped_file])
def test_shared_memory_can_be_read_and_a_write_ends_the_child(make, tmp_path):
    write, read = make(tmp_path) if make is mapped_file else make()

    assert make is shared_value or apart(read) == (b"7", 0)  # reading a Value takes its lock, which writes
    assert apart(write) == (b"", -signal.SIGSEGV)
    assert apart(lambda: (write(), read()), "lose writes")[0] in (b"(None, 8)", b"(tensor([8, 8, 8]), 8)", b"(None, 1)")
    assert read() == 7


def test_nothing_is_sent_over_inherited_sockets_and_pipes():
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    with ours, theirs:
        apart(lambda: os.write(writing, b"hello"))
        assert apart(lambda: ours.send(b"hello")) == (b"", 1)
        os.set_blocking(reading, False)
        theirs.setblocking(False)

        for receive in (lambda: os.read(reading, 8), lambda: theirs.recv(8)):
            with pytest.raises(BlockingIOError):
                receive()
    os.close(reading), os.close(writing)


@pytest.mark.parametrize(
    "act",
    [
        lambda path: Path(path).write_text("more"),
        lambda path: os.open(path, os.O_WRONLY | os.O_TRUNC),
        lambda path: Path(f"{path}.new").touch(),
        os.remove,
        lambda path: os.rename(path, f"{path}.new"),
        lambda path: os.truncate(path, 0),
        lambda path: torch.save([1], path),
        lambda path: subprocess.run(["truncate", "-s0", path], check=True),
    ],
    ids=["written", "truncating", "new", "remove", "rename", "truncate", "saved", "another program"],
)
def test_no_file_is_changed(act, tmp_path):
    path = tmp_path / "counter"
    path.write_text("3")

    assert apart(lambda: act(str(path)))[0] == b""
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("counter", "3")]


def test_what_it_prints_is_not_seen_and_the_scripts_handlers_do_not_run():
    script = (
        "import os, signal, sys; from headway.core.machine.child import said\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.write(2, b'handler'))\n"
        "print(said(lambda: b'%d' % (print('child', flush=True) or os.write(2, b'err')), apart='lose writes'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)

    assert (done.stdout, done.stderr) == ("(b'3', 0)\n", "")
