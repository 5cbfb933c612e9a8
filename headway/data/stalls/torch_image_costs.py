"""What an image costs in CPU time until it stands in a batch, by each way of loading that is installed.

The work is that of every image model's training input: decode a JPEG, cut out
a random window, resize it to 224 x 224, mirror every second one; batches of
32. Each way does it with the same operators and the same draws per image, in
as many workers, which are started once: what differs is how they are run and
how batches travel. CPU seconds are those of all processes, to a clock tick
(10 ms) per process, so pass a few hundred images.

>>> from headway.data.bytes.source import SyntheticJpeg
>>> image = prepared(SyntheticJpeg(1).read(0), 0)
>>> image.shape, image.dtype
((224, 224, 3), dtype('uint8'))
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from headway.core.errors import InputError
from headway.data.bytes.account import usage
from headway.data.bytes.order import item_seeds
from headway.data.pipeline import torch_ops as ops

BATCH = 32
"""Images per batch."""
SIZE = (224, 224)
"""Height and width of a prepared image."""
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Area (fraction of the image) and shape of the random window, as in the common recipe for ImageNet."""


class EncodedImages(Protocol):
    """Encoded images by index."""

    def __len__(self) -> int:
        """Return the number of images."""
        ...

    def read(self, index: int) -> bytes:
        """Return the bytes of image `index`."""
        ...


Batch = tuple[Any, Any]
"""uint8 or float32 images [B, H, W, C] (float32: [B, C, H, W]) and their indices [B]."""
Epochs = Iterator[Iterable[Batch]]
"""One iterable of batches per epoch, without end; all epochs have the draws of the first."""
Prepare = Callable[[bytes, int], Any]


def draws(index: int) -> list[np.random.Generator]:
    """Return the generators of window and mirror of image `index`: those of a headway pipeline in its first epoch."""
    seed = int(item_seeds(0, 0, np.array([index]), np.array([0]))[0])
    return [np.random.Generator(np.random.Philox(key=seed | stage << 64)) for stage in (2, 3)]


def prepared(data: bytes, index: int) -> NDArray[np.uint8]:
    """Return an encoded image as uint8 [224, 224, 3]."""
    cropping, flipping = draws(index)
    window = ops.resized_crop(ops.decode(data), cropping, size=SIZE, scale=SCALE, ratio=RATIO)
    image: NDArray[np.uint8] = ops.flip(window, flipping)
    return image


def prepared_by_pillow(data: bytes, index: int) -> torch.Tensor:
    """Return the same window as float32 [3, 224, 224], decoded and resized by Pillow: what most scripts do."""
    from PIL import Image

    cropping, flipping = draws(index)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    top, left, high, wide = ops.random_window(image.height, image.width, cropping, scale=SCALE, ratio=RATIO)
    cut = image.resize(SIZE[::-1], Image.Resampling.BILINEAR, box=(left, top, left + wide, top + high))
    if flipping.random() < 0.5:
        cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(ops.to_float(np.asarray(cut)).transpose(2, 0, 1).copy())


class Prepared(Dataset[tuple[Any, int]]):
    """A source as the map-style dataset that a script would write: (prepared image, index)."""

    def __init__(self, source: EncodedImages, prepare: Prepare = prepared) -> None:
        self.source, self.prepare = source, prepare

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.prepare(self.source.read(index), index), index


def by_pipeline(source: EncodedImages, num_workers: int) -> Epochs:
    """headway's Pipeline, in threads."""
    from headway.data.pipeline.pipeline import Pipeline

    pipeline = Pipeline(source).decode().resized_crop(*SIZE, scale=SCALE, ratio=RATIO).flip().batch(BATCH)  # type: ignore[arg-type]  # meta and fingerprint are optional
    loader = pipeline.loader(num_workers=num_workers, workers="threads")
    while True:
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 0})
        yield ((batch["data"].permute(0, 2, 3, 1), batch["ids"]) for batch in loader)


def by_headway(source: EncodedImages, num_workers: int, *, workers: Literal["processes", "threads"]) -> Epochs:
    """headway's DataLoader over the dataset, in threads or processes."""
    from headway.data.loader.loader import DataLoader

    loader = DataLoader(
        Prepared(source), BATCH, num_workers=num_workers, workers=workers, persistent_workers=workers == "processes"
    )
    while True:
        yield loader


def by_torch(source: EncodedImages, num_workers: int, *, prepare: Prepare) -> Epochs:
    """torch's DataLoader over the dataset."""
    dataset = Prepared(source, prepare)
    loader = torch.utils.data.DataLoader(dataset, BATCH, num_workers=num_workers, persistent_workers=True)
    while True:
        yield loader


COMMON = "torch DataLoader, Pillow, float32"
"""What most people run."""

WAYS: dict[str, Callable[[Any, int], Epochs]] = {
    "headway Pipeline, threads": by_pipeline,
    "headway DataLoader, threads": partial(by_headway, workers="threads"),
    "headway DataLoader, processes": partial(by_headway, workers="processes"),
    "torch DataLoader": partial(by_torch, prepare=prepared),
    COMMON: partial(by_torch, prepare=prepared_by_pillow),
}
"""Name -> function of (source, workers) that reads epoch after epoch."""


def read(batches: Iterable[Batch]) -> tuple[int, float]:
    """Read an epoch; return its images, and its CPU seconds over all processes."""
    before = usage()["cpu_s"]
    images = sum(len(data) for data, _ in batches)
    return images, usage()["cpu_s"] - before


def digest(batches: Iterable[Batch]) -> tuple[int, str]:
    """Read an epoch; return its images, and a digest of their pixels by index. Raises `InputError` on a repetition."""
    found: dict[int, str] = {}
    for data, ids in batches:
        for image, index in zip(np.asarray(data), np.asarray(ids).tolist(), strict=True):
            if index in found:
                raise InputError(f"image {index} came twice in one epoch. Look at the loader's sampler.")
            found[index] = hashlib.blake2b(np.ascontiguousarray(image).tobytes(), digest_size=16).hexdigest()
    whole = "".join(found[index] for index in sorted(found))
    return len(found), hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()


@dataclass(slots=True)
class Cost:
    """What one way of loading was measured to cost."""

    name: str
    digest: str = ""
    """Of the pixels of an epoch; equal ways have equal ones."""
    cpu_s_per_image: list[float] = field(default_factory=list)
    """[rounds] CPU seconds of all its processes."""
    missing: str = ""
    """Why it was not measured."""


def costs(source: EncodedImages, num_workers: int, *, rounds: int, say: Callable[[str], object] = str) -> list[Cost]:
    """Measure every way of `WAYS`, interleaved; `say` is told what runs. The first epoch of each is not counted."""
    found = [Cost(name) for name in WAYS]
    running: dict[str, Epochs] = {}
    for cost in found:
        say(f"starting {cost.name}")
        epochs = WAYS[cost.name](source, num_workers)
        try:
            _, cost.digest = digest(next(epochs))
        except ImportError as error:
            cost.missing = f"{error.name or error} is not installed"
            continue
        running[cost.name] = epochs
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for cost in found:
            if cost.name in running:
                images, cpu_s = read(next(running[cost.name]))
                cost.cpu_s_per_image.append(cpu_s / images)
    return found
