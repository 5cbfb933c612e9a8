"""Made-up data sets, written where a public script looks for its own."""

import pickle
import random
import struct
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import torch


def sine_waves(folder: Path) -> None:
    """Write 8 sine waves of 50 samples (time_sequence_prediction)."""
    starts = np.random.default_rng(0).integers(-80, 80, (8, 1))
    torch.save(np.sin((np.arange(50) + starts) / 20.0), folder / "traindata.pt")


def characters(folder: Path) -> None:
    """Write 20,000 characters for training and 4,000 for validation (nanoGPT's shakespeare_char)."""
    data = folder / "data" / "shakespeare_char"
    data.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for name, size in (("train", 20_000), ("val", 4_000)):
        rng.integers(0, 65, size, dtype=np.uint16).tofile(data / f"{name}.bin")
    letters = [chr(32 + index) for index in range(65)]
    meta = {"vocab_size": 65, "itos": dict(enumerate(letters)), "stoi": {c: i for i, c in enumerate(letters)}}
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))


def sentences(folder: Path) -> None:
    """Write three small texts (word_language_model)."""
    data = folder / "data" / "tiny"
    data.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for name, lines in (("train", 1000), ("valid", 120), ("test", 60)):
        text = "\n".join(" ".join(f"w{rng.randrange(200)}" for _ in range(12)) for _ in range(lines))
        (data / f"{name}.txt").write_text(text + "\n")


def results(folder: Path) -> None:
    """Make the folder that the vae example writes its images to."""
    (folder / "results").mkdir(exist_ok=True)


def digits(folder: Path, *, train: int = 25_600, test: int = 1000) -> None:
    """Write MNIST's four files, uncompressed, where torchvision looks for them below `folder`; once."""
    raw = folder / "MNIST" / "raw"
    if raw.exists():
        return
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, size in (("train", train), ("t10k", test)):
        labels = rng.integers(0, 10, size, dtype=np.uint8)
        images = (rng.integers(0, 56, (size, 28, 28)) + 20 * labels[:, None, None]).astype(np.uint8)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">iiii", 2051, size, 28, 28) + images.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, size) + labels.tobytes())


def photographs(folder: Path, count: int, size: tuple[int, int]) -> None:
    """Write `count` JPEG files of [width, height] pixels, smooth as photographs are, so that they compress as those."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(count)
    for index in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        coarse.resize(size, Image.Resampling.BICUBIC).save(folder / f"{index:04}.jpg", quality=90)


def series(path: Path, hours: int = 17_420) -> None:
    """Write a table in the form of ETTh1.csv: a row for each hour, its date and seven columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hour = np.arange(hours)[:, None]
    noise = np.random.default_rng(0).normal(0, 0.3, (hours, 7))
    waves = np.sin(2 * np.pi * hour / np.array([24, 24, 12, 168, 24, 168, 24])) * np.arange(1, 8) + noise
    start, lines = datetime(2016, 7, 1, tzinfo=UTC), ["date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT"]
    for index, row in enumerate(waves):
        lines.append(f"{start + timedelta(hours=index):%Y-%m-%d %H:%M:%S},{','.join(f'{value:.6f}' for value in row)}")
    path.write_text("\n".join(lines) + "\n")
