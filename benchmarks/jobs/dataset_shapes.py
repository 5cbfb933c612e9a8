"""Ten datasets as people write them, each with its real library, and a small model that reads one of them.

Usage: `python dataset_shapes.py SHAPE FOLDER`. The data is made in FOLDER the first time. Each reading takes at
least `READ_S`, as from a disk that is not near.
"""

import gzip
import io
import os
import sqlite3
import struct
import sys
import tarfile
import time
import zipfile
from collections import namedtuple
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

READ_S = float(os.environ.get("SHAPES_READ_S", "0.004"))
"""Seconds of a reading."""

EXAMPLES, SIDE, EPOCHS = int(os.environ.get("SHAPES_EXAMPLES", "320")), 28, int(os.environ.get("SHAPES_EPOCHS", "2"))


def pixels(index: int) -> np.ndarray:
    """Return the image of an example, uint8 [28, 28]: its mean brightness says its label."""
    rng = np.random.default_rng(index)
    return (rng.integers(0, 56, (SIDE, SIDE)) + 20 * (index % 10)).astype(np.uint8)


def image_file(index: int, kind: str = "JPEG") -> bytes:
    """Return the image of an example as the bytes of a file."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels(index)).save(buffer, kind)
    return buffer.getvalue()


@lru_cache
def torchvision_here():
    """Import torchvision, also one that was built for CUDA: its operators are declared, and none is called."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

    torchvision.library_of_operators = library
    return torchvision


class JpegFolder(Dataset):
    """Files of images, opened by PIL."""

    def __init__(self, folder):
        for index in range(EXAMPLES):
            (folder / str(index % 10)).mkdir(exist_ok=True)
            (folder / str(index % 10) / f"{index}.jpg").write_bytes(image_file(index))
        self.paths = sorted(folder.glob("*/*.jpg"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        from PIL import Image

        time.sleep(READ_S)
        path = self.paths[index]
        with Image.open(path) as image:
            return torch.from_numpy(np.array(image.convert("L"))).float().flatten() / 255, int(path.parent.name)


def slow(image):
    """Take as long as a reading takes."""
    time.sleep(READ_S)
    return image


def mnist(folder):
    """MNIST of torchvision, from files of its format."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    images = np.stack([pixels(index) for index in range(EXAMPLES)])
    labels = (np.arange(EXAMPLES) % 10).astype(np.uint8)
    for prefix in ("train", "t10k"):
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, *images.shape) + images.tobytes())
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, EXAMPLES) + labels.tobytes())
        for name in ("images-idx3", "labels-idx1"):
            path = raw / f"{prefix}-{name}-ubyte"
            path.with_suffix(".gz").write_bytes(gzip.compress(path.read_bytes()))
    vision = torchvision_here()
    steps = [slow, vision.transforms.ToTensor(), vision.transforms.Normalize((0.1307,), (0.3081,)), torch.flatten]
    return vision.datasets.MNIST(folder, train=True, transform=vision.transforms.Compose(steps))


def image_folder(folder):
    """ImageFolder of torchvision with a list of transforms."""
    JpegFolder(folder)
    vision = torchvision_here()
    steps = [
        vision.transforms.Grayscale(), vision.transforms.Resize(32), vision.transforms.CenterCrop(SIDE), slow,
        vision.transforms.ToTensor(), torch.flatten,
    ]  # fmt: skip
    return vision.datasets.ImageFolder(folder, transform=vision.transforms.Compose(steps))


Pair = namedtuple("Pair", "image label")


@dataclass
class Record:
    """One row of a table in memory."""

    image: np.ndarray
    label: int


class NamedTuples(Dataset):
    """Records in memory, handed out as named tuples."""

    def __init__(self, folder):
        self.records = [Record(pixels(index), index % 10) for index in range(EXAMPLES)]

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        time.sleep(READ_S)
        record = self.records[index]
        return Pair(torch.from_numpy(record.image).float().flatten() / 255, record.label)


class Zip(Dataset):
    """A zip file, opened by the first reading."""

    def __init__(self, folder):
        self.path, self.archive = folder / "images.zip", None
        with zipfile.ZipFile(self.path, "w") as archive:
            for index in range(EXAMPLES):
                archive.writestr(f"{index}.png", image_file(index, "PNG"))

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        from PIL import Image

        time.sleep(READ_S)
        if self.archive is None:
            self.archive = zipfile.ZipFile(self.path)
        with self.archive.open(f"{index}.png") as file:
            return torch.from_numpy(np.array(Image.open(file))).float().flatten() / 255, index % 10


class Sqlite(Dataset):
    """A table of a database, connected to by the first reading."""

    def __init__(self, folder):
        self.path, self.connection = folder / "images.sqlite", None
        self.path.unlink(missing_ok=True)
        with sqlite3.connect(self.path) as connection:
            connection.execute("create table images (id integer primary key, image blob, label integer)")
            rows = [(index, pixels(index).tobytes(), index % 10) for index in range(EXAMPLES)]
            connection.executemany("insert into images values (?, ?, ?)", rows)
        connection.close()

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        time.sleep(READ_S)
        if self.connection is None:
            self.connection = sqlite3.connect(self.path)
        image, label = self.connection.execute("select image, label from images where id = ?", (index,)).fetchone()
        return torch.frombuffer(bytearray(image), dtype=torch.uint8).float() / 255, label


class Hdf5(Dataset):
    """A file of h5py's, opened by the first reading."""

    def __init__(self, folder):
        import h5py

        self.path, self.file = folder / "images.h5", None
        with h5py.File(self.path, "w") as file:
            file["images"] = np.stack([pixels(index) for index in range(EXAMPLES)])
            file["labels"] = np.arange(EXAMPLES) % 10

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        import h5py

        time.sleep(READ_S)
        if self.file is None:
            self.file = h5py.File(self.path, "r")
        return torch.from_numpy(self.file["images"][index]).float().flatten() / 255, int(self.file["labels"][index])


class Lmdb(Dataset):
    """An environment of lmdb, opened by the first reading."""

    def __init__(self, folder):
        import lmdb

        self.path, self.environment = str(folder / "images.lmdb"), None
        with lmdb.open(self.path, map_size=1 << 24) as environment, environment.begin(write=True) as transaction:
            for index in range(EXAMPLES):
                transaction.put(str(index).encode(), pixels(index).tobytes())

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        import lmdb

        time.sleep(READ_S)
        if self.environment is None:
            self.environment = lmdb.open(self.path, readonly=True, lock=False)
        with self.environment.begin() as transaction:
            image = transaction.get(str(index).encode())
        return torch.frombuffer(bytearray(image), dtype=torch.uint8).float() / 255, index % 10


class Memmap(Dataset):
    """An array in a file that is mapped."""

    def __init__(self, folder):
        np.stack([pixels(index) for index in range(EXAMPLES)]).tofile(folder / "images.bin")
        self.images = np.memmap(folder / "images.bin", np.uint8, "r", shape=(EXAMPLES, SIDE, SIDE))

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        time.sleep(READ_S)
        return torch.from_numpy(np.array(self.images[index])).float().flatten() / 255, index % 10


class Tokens(Dataset):
    """Texts that a tokenizer of Hugging Face encodes."""

    def __init__(self, folder):
        from tokenizers import Tokenizer, models, pre_tokenizers

        vocabulary = {f"w{number}": number for number in range(256)} | {"[UNK]": 256}
        self.tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        self.tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        self.texts = [" ".join(f"w{x}" for x in pixels(index).flatten()) for index in range(EXAMPLES)]

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        time.sleep(READ_S)
        return torch.tensor(self.tokenizer.encode(self.texts[index]).ids).float() / 255, index % 10


class Tar(Dataset):
    """A tar file with an index of its members, opened by the first reading, as webdataset's shards lie."""

    def __init__(self, folder):
        self.path, self.file = folder / "images.tar", None
        with tarfile.open(self.path, "w") as archive:
            for index in range(EXAMPLES):
                data = image_file(index, "PNG")
                member = tarfile.TarInfo(f"{index:06}.png")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        with tarfile.open(self.path) as archive:
            self.members = [(member.offset_data, member.size) for member in archive]

    def __len__(self):
        return len(self.members)

    def __getitem__(self, index):
        from PIL import Image

        time.sleep(READ_S)
        if self.file is None:
            self.file = open(self.path, "rb")  # noqa: SIM115 - for as long as the process lives
        offset, size = self.members[index]
        self.file.seek(offset)
        image = Image.open(io.BytesIO(self.file.read(size)))
        return torch.from_numpy(np.array(image)).float().flatten() / 255, index % 10


SHAPES = {
    "jpeg": JpegFolder, "mnist": mnist, "imagefolder": image_folder, "namedtuple": NamedTuples, "zip": Zip,
    "sqlite": Sqlite, "h5py": Hdf5, "lmdb": Lmdb, "memmap": Memmap, "tokenizers": Tokens, "tar": Tar,
}  # fmt: skip


def main():
    """Train a small model on a shape."""
    shape, folder = sys.argv[1], Path(sys.argv[2]) / sys.argv[1]
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    loader = DataLoader(SHAPES[shape](folder), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(SIDE * SIDE, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(EPOCHS):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.02)  # an accelerator that is at work
            print(f"{loss.item():.17g}")


if __name__ == "__main__":
    main()
