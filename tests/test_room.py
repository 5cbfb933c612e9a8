"""What the processes of a host agree on before they take memory for images."""

import os

import pytest
import torch

from headway.checkpoint.saves import image_space as room
from headway.checkpoint.saves.image import Image, Part, plan
from headway.core.errors import HeadwayError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def host(monkeypatch, tmp_path):
    """Have a host of 1000 MiB that never shows what is taken, as one does not that is asked at one moment."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(room, "meminfo", lambda root, name: 1000 * MIB)
    monkeypatch.setattr(room, "host_memory", lambda: {"memory_total_bytes": 2000 * MIB})


def test_ranks_that_plan_together_get_what_there_is_once_and_the_shares_of_dead_ones_vanish():
    gets, out = os.pipe()
    stays, ends = os.pipe()
    children = []
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            try:
                room.take_room(300 * MIB)
                os.write(out, b"y")
            except HeadwayError:
                os.write(out, b"n")
            os.close(ends)
            os.read(stays, 1)  # until the parent lets go
            os._exit(0)
        children.append(pid)
    answers = b"".join(os.read(gets, 1) for _ in children)
    with pytest.raises(HeadwayError, match=r"takes 209.7 MB .* there are 104.9 MB beside the images of 3 other"):
        room.check_room(200 * MIB)
    os.close(ends)
    for pid in children:
        os.waitpid(pid, 0)
    for fd in (gets, out, stays):
        os.close(fd)

    assert sorted(answers) == sorted(b"y" * 3 + b"n" * 5)
    room.check_room(1000 * MIB)


def test_memory_that_is_filled_counts_once_and_against_the_limit_of_its_group(monkeypatch):
    """MemAvailable shows it; what a group may take in all does not."""
    share = room.take_room(900 * MIB)
    share.filled()
    room.check_room(1000 * MIB)
    second = room.take_room(950 * MIB)
    second.filled()

    with pytest.raises(HeadwayError, match=r"there are 157.3 MB"):
        room.check_room(200 * MIB)
    monkeypatch.setattr(room, "_group", lambda: "/sys/fs/cgroup/other")
    room.check_room(1000 * MIB)


def test_an_image_that_cannot_be_made_gives_its_room_back(monkeypatch):
    laid = plan([Part("w", torch.uint8, (400 * MIB,), (0,), (400 * MIB,))])
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(HeadwayError, match="No space left"):
            Image(laid, tail_bytes=0)

    room.check_room(1000 * MIB)


def test_lines_that_were_not_written_whole_and_numbers_that_came_again_do_not_count():
    share = room.take_room(10)
    path = next(room.runtime_directory().glob("images-*.ledger"))
    line = path.read_text()
    path.write_text(f"{line}{os.getpid()} 1 7 {900 * MIB} 1 -\n{line.replace(' 10 ', f' {900 * MIB} ')}{os.getpid()} 1")

    room.check_room(999 * MIB)
    share.give_back()
    room.take_room(5).give_back()
    assert not path.exists()
