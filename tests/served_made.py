"""A dataset for data servers of the tests, a runtime folder of their own, and how such servers are found and ended."""

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from headway.core.errors import HeadwayError
from headway.core.wire.channel import connect
from headway.data.service.messages import FROM_SERVER
from tests.datasets import Sized
from tests.launching import wait_for


class Rows(Sized):
    """Item -> tensors, numbers, texts, nested; reads are noted in a file, so that any process's count."""

    def __init__(self, size=40, note=None, nap_s=0.0):
        self.size, self.note, self.nap_s = size, note, nap_s

    def __getitem__(self, k):
        if self.note is not None:
            with open(self.note, "a") as file:
                file.write(f"{k}\n")
        time.sleep(self.nap_s)
        return {"x": torch.full((2, 3), k), "y": [k / 2, (np.float32(k), f"n{k}")], "id": k}


@pytest.fixture(autouse=True)
def runtime(monkeypatch):
    """A runtime folder of the test's own (short: a socket's path is), whose servers end with it."""
    folder = Path(tempfile.mkdtemp())
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder / "headway"
    for path in (folder / "headway").glob("*.sock"):
        end(path)
    shutil.rmtree(folder)


def server_of(path):
    channel = connect(path, 0.0, types=FROM_SERVER)
    channel.close()
    return channel.peer.pid


def end(path, number=signal.SIGTERM):
    """End the server at `path` and wait until it is gone; returns whether one answered."""
    try:
        pid = server_of(path)
    except HeadwayError:
        return False
    os.kill(pid, number)
    wait_for(lambda: has_ended(pid))
    return True


def has_ended(pid):
    """Whether a process is gone with all its threads, or waits for its parent (init) to take note."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state == "Z" and len(os.listdir(f"/proc/{pid}/task")) == 1
    except OSError:
        return True


def only(folder):
    """The one server that runs."""
    (path,) = folder.glob("*.sock")
    return path


def ids(batches):
    return [item for batch in batches for item in batch["id"].tolist()]
