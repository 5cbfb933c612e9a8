"""Made-up data sets, written where a public script looks for its own."""

import pickle
import random
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
