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

What it costs in CPU time to hand a batch to another process: our ring of shared slots, torch's queue, a pipe.

Each way starts from a batch in the producer's memory. The ring copies it into
a slot; the pipe sends its bytes; the queue gets a fresh tensor of it, as it
moves a tensor's memory and the producer needs a new one each time. The
consumer, in a process of its own, reads one byte per page of every batch. CPU
seconds of both processes together, per batch; rounds are interleaved. The
first batch of every round is compared whole, outside the measurement.
"""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import torch
import torch.multiprocessing
from numpy.typing import NDArray
from torch.utils.data import Dataset

from headway.core.errors import DamageError, InputError
from headway.core.machine.ring import Ring, RingReader
from headway.core.wire.channel import Channel, pair
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


SHAPE = (32, 224, 224, 3)
"""Of a batch of uint8: 4.8 MB."""
BATCH_BYTES = 32 * 224 * 224 * 3
BATCHES = 40
"""Batches per way and round."""
SLOTS, PAGE = 4, 4096

Bytes = NDArray[np.uint8]
Check = Callable[[Any], int]


class SlotFilled(msgspec.Struct, tag=True, array_like=True):
    """A slot of the ring holds a batch."""

    slot: int
    generation: int


class Released(msgspec.Struct, tag=True, array_like=True):
    """The consumer released a slot."""


class Transport(Protocol):
    """A way from one process to another; made before the consumer forks."""

    def send(self, batch: Bytes) -> None:
        """Hand over a batch, in the producer."""
        ...

    def receive(self, check: Check) -> int:
        """Return what `check` makes of the bytes of the next batch, in the consumer."""
        ...


class ByRing:
    """A ring, and a channel beside it."""

    def __init__(self) -> None:
        self._ring = Ring(SLOTS, BATCH_BYTES)
        self._reader: RingReader | None = None
        self._num_ahead = 0
        self._ends: tuple[Channel, Channel] = pair(types=SlotFilled | Released)

    def send(self, batch: Bytes) -> None:
        """Wait for a free slot, fill it, say so."""
        if self._num_ahead == SLOTS:
            self._ends[0].receive()  # every release is taken note of, or they would fill the socket
            self._num_ahead -= 1
        slot = self._ring.take()
        if slot is None:
            raise DamageError("a slot was said to be released and is not. Check this host's memory.")
        self._num_ahead += 1
        np.copyto(np.frombuffer(self._ring.buffer(slot), np.uint8), batch.reshape(-1))
        self._ends[0].send(SlotFilled(slot, self._ring.publish(slot, batch.nbytes)))

    def receive(self, check: Check) -> int:
        """Look at a slot in place, release it."""
        if self._reader is None:
            self._reader = RingReader(self._ring.fd)
        filled, _ = self._ends[1].receive()
        found = check(np.frombuffer(self._reader.view(filled.slot, filled.generation), np.uint8))
        self._reader.release(filled.slot, filled.generation)
        self._ends[1].send(Released())
        return found


class ByPipe:
    """multiprocessing.Pipe with raw bytes: the best of the standard ways."""

    def __init__(self) -> None:
        self._receives, self._sends = multiprocessing.get_context("fork").Pipe(duplex=False)

    def send(self, batch: Bytes) -> None:
        """Write the bytes."""
        self._sends.send_bytes(batch.reshape(-1).data)

    def receive(self, check: Check) -> int:
        """Read the bytes."""
        return check(np.frombuffer(self._receives.recv_bytes(), np.uint8))


class ByQueue:
    """torch.multiprocessing.Queue of tensors, as torch's DataLoader uses it."""

    def __init__(self) -> None:
        self._queue = torch.multiprocessing.get_context("fork").Queue(SLOTS)
        self._queue.cancel_join_thread()  # whoever leaves early leaves nothing behind that matters

    def send(self, batch: Bytes) -> None:
        """Put a new tensor."""
        self._queue.put(torch.from_numpy(batch).clone())

    def receive(self, check: Check) -> int:
        """Get the tensor."""
        return check(self._queue.get().numpy().reshape(-1))


TRANSPORTS: dict[str, Callable[[], Transport]] = {"ring": ByRing, "queue": ByQueue, "pipe": ByPipe}
"""Name -> a way from one process to another."""


def transport_costs(rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds per batch of every way and round. Raises `DamageError` when a batch came as another.

    Forks: call it before threads are started.
    """
    made, context = batches(), multiprocessing.get_context("fork")
    ways = {name: make() for name, make in TRANSPORTS.items()}
    (orders_in, orders), (answers, answers_in) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    process = context.Process(target=consume, args=(ways, orders_in, answers_in), daemon=True)
    process.start()
    figures: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for _ in range(rounds):
            for name, way in ways.items():
                orders.send(name)
                figures[name].append(_sent(way, name, made, answers))
        orders.send("")
        process.join(20)
    finally:
        process.kill()
        process.join()
    return figures


def batches() -> list[Bytes]:
    """Return a few different batches, the same in both processes."""
    rng = np.random.default_rng(5)
    return [rng.integers(0, 256, SHAPE, np.uint8) for _ in range(3)]


def touched(raw: Bytes) -> int:
    """Read one byte per page."""
    return int(raw[::PAGE].sum(dtype=np.int64))


def consume(ways: Mapping[str, Transport], orders: Any, answers: Any) -> None:
    """Receive what `orders` announce, until an empty name; answer with checksums and CPU seconds."""
    torch.set_num_threads(1)
    while name := orders.recv():
        way = ways[name]
        whole = way.receive(zlib.crc32)
        before = time.process_time()
        pages = [way.receive(touched) for _ in range(BATCHES)]
        answers.send((whole, pages, time.process_time() - before))


def _sent(way: Transport, name: str, made: Sequence[Bytes], answers: Any) -> float:
    """Send a round's batches; return the CPU seconds per batch of both processes."""
    way.send(made[0])
    sequence = [made[k % len(made)] for k in range(BATCHES)]
    before = time.process_time()
    for batch in sequence:
        way.send(batch)
    whole, pages, theirs = answers.recv()
    spent = time.process_time() - before + theirs
    if whole != zlib.crc32(made[0].data) or pages != [touched(batch.reshape(-1)) for batch in sequence]:
        raise DamageError(f"the batches that came by {name} are not those that were sent. Check this host's memory.")
    return float(spent / BATCHES)
