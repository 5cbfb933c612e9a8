"""Files, mapped memory and databases that examples are read from, and that the loop or the reading moves on.

Remedies: data.workers data.threads data.cache
"""

import json
import sqlite3
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from _training import ROWS, Rows, Training, chosen, train
from torch.utils.data import DataLoader


class Files(Rows):
    def row(self, index):
        return torch.from_numpy(np.frombuffer((folder / f"{index}.bin").read_bytes(), np.float32).copy())


def few_files_rewritten():
    """One file per example; between epochs the loop writes a few of them anew (pseudo-labels)."""
    global folder
    folder = Path(tempfile.mkdtemp())
    for k, row in enumerate(ROWS):
        (folder / f"{k}.bin").write_bytes(row.numpy().tobytes())
    training = Training()
    loader = DataLoader(Files(), 8, shuffle=True)
    for epoch in range(3):
        for batch in loader:
            training.step(batch)
        for k in (17, 99):
            (folder / f"{k}.bin").write_bytes((ROWS[k] * (epoch + 2)).numpy().tobytes())
    training.finish()


class Mixed(Rows):
    def row(self, index):
        return ROWS[index] * (1 + json.loads(note.read_text()))


def file_rewritten():
    """The loop writes the mixing ratio into a file that every example reads."""
    global note
    note = Path(tempfile.mkdtemp()) / "ratio.json"
    note.write_text("0")
    training = Training()
    for _ in range(2):
        for step, batch in enumerate(DataLoader(Mixed(), 8, shuffle=True)):
            training.step(batch)
            note.write_text(json.dumps(step / 20))
    training.finish()


class Lazy(Rows):
    scale = None

    def row(self, index):
        if self.scale is None:
            self.scale = float(note.read_text())
        return ROWS[index] * self.scale


def lazy_file_rewritten():
    """Two workers of the script's own open a file at their first example; it is rewritten between epochs."""
    global note
    note = Path(tempfile.mkdtemp()) / "scale"
    training = Training()
    loader = DataLoader(Lazy(), 8, shuffle=True, num_workers=2)
    for epoch in range(3):
        note.write_text(str(1 + epoch))
        for batch in loader:
            training.step(batch)
    training.finish()


class Streamed(Rows):
    def row(self, index):
        if index % 3 != 2:
            return ROWS[index].clone()
        return torch.frombuffer(bytearray(file.read(32)), dtype=torch.float32)


def file_read_on():
    """Every third example reads on in one open file, wherever the one before left it."""
    global file
    file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the script runs
    file.write(ROWS.numpy().tobytes())
    file.seek(0)
    train(DataLoader(Streamed(), 8, shuffle=True))


class Filed(Rows):
    def row(self, index):
        file.seek(index * 32)
        return torch.frombuffer(bytearray(file.read(32)), dtype=torch.float32)


def seek_and_read():
    """Examples seek and read in one open file."""
    global file
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - open as long as the script runs
    file.write(ROWS.numpy().tobytes())
    train(lambda: DataLoader(Filed(), 8, shuffle=True), 2)


class OpenedLate(Rows):
    file = None

    def row(self, index):
        if self.file is None:
            self.file = open(path, "rb", buffering=0)  # noqa: SIM115 - open as long as the script runs
        self.file.seek(index * 32)
        time.sleep(0.001)  # as storage that is not here takes
        return torch.frombuffer(bytearray(self.file.read(32)), dtype=torch.float32)


def opened_at_first_example():
    """A file is opened at the first example, as workers want it; threads would share it, and seek for each other."""
    global path
    path = Path(tempfile.mkdtemp()) / "rows"
    path.write_bytes(ROWS.numpy().tobytes())
    loader = DataLoader(OpenedLate(), 8, shuffle=True)
    train(lambda: loader, 3)


class Mapped(Rows):
    def __init__(self, path):
        self.rows = np.memmap(path, "float32", "r+", shape=(160, 8))

    def row(self, index):
        return torch.from_numpy(np.array(self.rows[index]))


def memmap_written():
    """The loop writes into the memory-mapped file that examples are read from."""
    path = tempfile.mktemp()
    ROWS.numpy().tofile(path)
    training, mapped = Training(), Mapped(path)
    for _ in range(2):
        for batch in DataLoader(mapped, 8, shuffle=True):
            training.step(batch)
            mapped.rows[:, training.num_steps % 8] *= 0.5
    training.finish()


class Queried(Rows):
    def row(self, index):
        (scale,) = base.execute("select scale from rows where number = ?", (index,)).fetchone()
        return ROWS[index] * torch.tensor(scale)


def sqlite_rows():
    """Examples come from an sqlite connection, which belongs to one thread, and the loop updates rows."""
    global base
    base = sqlite3.connect(":memory:")
    base.execute("create table rows (number integer primary key, scale real)")
    base.executemany("insert into rows values (?, 1)", [(number,) for number in range(160)])
    training = Training()
    for _ in range(2):
        for step, batch in enumerate(DataLoader(Queried(), 8, shuffle=True)):
            training.step(batch)
            base.execute("update rows set scale = scale * 1.5 where number % 20 = ?", (step,))
    training.finish()


if __name__ == "__main__":
    chosen(globals())
