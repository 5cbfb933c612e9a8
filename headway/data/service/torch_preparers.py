"""What a data server prepares: the examples of a map-style dataset, or of a pipeline in up to three forms.

A dataset is looked at before it is served, and the generators around each
example that is read. One whose examples are the same each time is cached as it
is; an example that drew is not kept. What draws from
`headway.data.generator()` is drawn anew each time, in many threads. What draws
from the generators that all threads share, changes itself, or holds an open
file is read by one thread at a time; the server's notes say so. Examples travel
as `headway.data.bytes.packing` has them; tensors are marked, and are
tensors again where they arrive.

>>> example = (torch.arange(3, dtype=torch.bfloat16), {"label": 7})
>>> unpack(pack(plain(example)).to_bytes(), marked=restored)
(tensor([0., 1., 2.], dtype=torch.bfloat16), {'label': 7})
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from headway.core.errors import InputError
from headway.data.bytes import account
from headway.data.bytes.packing import TENSOR, Array, Marked, Stacked, collated, pack, unpack
from headway.data.bytes.torch_examples import equal
from headway.data.bytes.torch_keyed import Draws, generators_kept
from headway.data.guard.content_digest import portrait
from headway.data.guard.picture import Picture
from headway.data.guard.purity import impurity
from headway.data.guard.watch import GeneratorWatch, ReadingResult
from headway.data.loader.loader import own_fingerprint
from headway.data.pipeline.chain import DROPPED, Chain, size_of
from headway.data.pipeline.torch_loader import PipelineDataset, as_numbers, labels
from headway.data.service.batches import Ints, Payload, PreparationTime
from headway.data.service.flights import PreparationTask
from headway.data.service.server import Preparer
from headway.runtime.script.draws import drawn, fingerprints

IMAGE = "image"
"""Mark of a stack [B, H, W, C] that is shown as [B, C, H, W]."""

ONE_THREAD = "examples are read by one thread at a time"


def plain(value: Any) -> Any:
    """Return an example with its tensors as marked arrays. Raises `InputError` on one that is not in plain memory."""
    if isinstance(value, torch.Tensor):
        return _marked(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(plain(part) for part in value))
    if type(value) in (list, tuple):
        return type(value)([plain(part) for part in value])
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    return value


def restored(array: Array, mark: str) -> torch.Tensor:
    """Return the tensor that a marked array stands for: over the same memory where that may be written."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy(order="K"))
    if mark == IMAGE:
        return tensor.permute(0, 3, 1, 2)  # torch calls that channels_last
    _, _, dtype = mark.partition(":")
    return tensor.view(getattr(torch, dtype)) if dtype else tensor


def _marked(tensor: torch.Tensor) -> Marked:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        raise InputError(
            f"an example holds a {tensor.layout} tensor on {tensor.device}, which a server cannot share. "
            "Make it dense and move it to the CPU."
        )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    try:
        return Marked(tensor.numpy(), TENSOR)
    except TypeError:  # numpy has no such type: its bits travel
        bits = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
        return Marked(tensor.view(bits).numpy(), f"{TENSOR}:{str(tensor.dtype).removeprefix('torch.')}")


def base_of(dataset: Any) -> tuple[Any, Ints | None]:
    """Return the dataset under the subsets around it, and the items of it that they pick; None: all."""
    inner, indices = dataset, None
    while type(inner) is Subset:
        chosen = np.asarray(inner.indices)
        indices = chosen if indices is None else chosen[indices]
        inner = inner.dataset
    if indices is None:
        return dataset, None
    if indices.dtype.kind not in "iu" or indices.ndim != 1 or np.unique(indices).size != indices.size:
        return dataset, None  # keys, or examples twice: then it is a dataset of its own
    return (inner, indices.astype(np.int64)) if not indices.size or indices.min() >= 0 else (dataset, None)


def identity(dataset: Any) -> str:
    """Return what jobs must agree on to share a server: name, length, and a digest of what is in the dataset."""
    if isinstance(dataset, PipelineDataset):
        stages = [stage for stage in dataset.chain.stages if stage.kind != "cache"]
        parts: Any = [dataset.chain.source, stages, dataset.on_error, dataset.images]
        return f"pipeline {dataset.fingerprint()}[{len(dataset)}] {portrait(parts)}"
    own = own_fingerprint(dataset)
    return f"{type(dataset).__qualname__ if own is None else own}[{len(dataset)}] {portrait(dataset)}"


def preparer_of(dataset: Any) -> Preparer:
    """Return what serves `dataset`, after a look at its first and last example."""
    return PipelinePreparer(dataset) if isinstance(dataset, PipelineDataset) else DatasetPreparer(dataset)


class DatasetPreparer:
    """Serves a map-style dataset: one form, the finished example."""

    def __init__(self, dataset: Any) -> None:
        self.size, self.fingerprint = len(dataset), identity(dataset)
        self._dataset = dataset
        finding, varies = looked_at(_Reading(dataset), dataset)
        self._turns, self._watch = Turns(one_by_one=finding is not None), GeneratorWatch(dataset)
        self.form = "augmented" if varies else "decoded"
        self.forms: tuple[str, ...] = (self.form,)
        self.notes = [f"{ONE_THREAD}: {finding}"] if finding else []

    def prepare(self, work: PreparationTask) -> tuple[Mapping[str, Payload], PreparationTime]:
        """Read one example under its own seed."""
        with self._turns.turn() as alone:
            began = account.clocks()
            with Draws(work.draw, shared=alone):
                reading = self._watch.around(lambda: _Reading(self._dataset)[work.item], alone=alone)
                payload = pack(plain(reading.value)).to_bytes()
            ended = account.clocks()
        _take_turns(self._turns, reading, self.notes)
        spent = began.until(ended)
        # The part that was blocked is put first: what matters is how long it was.
        return {self.form: payload}, PreparationTime(
            fetch_start_ns=began.wall_ns, fetch_end_ns=began.wall_ns + spent.fetch_ns,
            decode_ns=0 if self.form == "augmented" else spent.prep_ns,
            augment_ns=spent.prep_ns if self.form == "augmented" else 0,
            drew=reading.drew if self.form != "augmented" else False,
            changed=work.compare is not None and not _same(payload, work.compare[1]),
        )  # fmt: skip

    def assemble(self, items: Ints, examples: list[Any]) -> Any | None:
        """Collate as torch does."""
        return collated(examples)


class PipelinePreparer:
    """Serves a pipeline in up to three forms: raw bytes, the result of what is deterministic, the finished example."""

    def __init__(self, batches: PipelineDataset) -> None:
        self.size, self.fingerprint = len(batches), identity(batches)
        self._batches = batches
        self._chain = Chain(batches.chain.source, [s for s in batches.chain.stages if s.kind != "cache"])
        random = [place for place, stage in enumerate(self._chain.stages) if stage.random]
        self._first_random = random[0] if random else len(self._chain.stages)
        middle = ("decoded",) if self._first_random else ()
        self.forms = ("encoded", *middle, "augmented") if random else ("encoded", *(middle or ("decoded",)))
        # Sources and operators are safe for threads by contract, but for what an operator of the user's draws.
        shared = self.size > 0 and _draws(lambda: self._chain.run(0, 0))
        self._turns, self._watch = Turns(one_by_one=shared), GeneratorWatch(self._chain)
        self.notes = [f"{ONE_THREAD}: an operator draws from generators that all threads share"] if shared else []

    def prepare(self, work: PreparationTask) -> tuple[Mapping[str, Payload] | None, PreparationTime]:
        """Go on from the form that the cache had; keep the forms that it wants."""
        with self._turns.turn() as alone, Draws(work.draw, shared=alone):
            try:
                return self._made(work, alone)
            except Exception:
                if self._batches.on_error == "raise":
                    raise
                return None, PreparationTime()

    def _made(self, work: PreparationTask, alone: bool) -> tuple[Mapping[str, Payload] | None, PreparationTime]:
        forms: dict[str, Payload] = {}
        fetch_start = fetch_end = time.monotonic_ns()
        read_bytes, cpu = 0, [time.thread_time_ns()] * 3

        def steady() -> Any:
            """Return what is the same each time, or ought to be."""
            nonlocal fetch_end, read_bytes
            if work.payload is None:
                value = self._chain.source.read(work.item)
                fetch_end, read_bytes = time.monotonic_ns(), int(size_of(value))
                cpu[0] = time.thread_time_ns()
                self._note(forms, "encoded", value, work)
            else:
                value = unpack(work.payload, marked=restored)
            if work.start in (None, "encoded"):
                value = self._chain.through(value, work.item, work.draw, 0, self._first_random)
                if value is not DROPPED:
                    self._note(forms, "decoded", value, work)
            return value

        reading = self._watch.around(steady, alone=alone)
        _take_turns(self._turns, reading, self.notes)
        value = reading.value
        cpu[1] = cpu[2] = time.thread_time_ns()
        if value is not DROPPED and self.forms[-1] == "augmented":
            value = self._chain.through(value, work.item, work.draw, self._first_random, len(self._chain.stages))
            if value is not DROPPED:
                self._note(forms, "augmented", value, work)
            cpu[2] = time.thread_time_ns()
        spent = PreparationTime(
            fetch_start_ns=fetch_start, fetch_end_ns=fetch_end, decode_ns=cpu[1] - cpu[0], augment_ns=cpu[2] - cpu[1],
            read_bytes=read_bytes, drew=reading.drew, changed=_differs(forms, work.compare),
        )  # fmt: skip
        return (None if value is DROPPED else forms), spent

    def _note(self, forms: dict[str, Payload], form: str, value: Any, work: PreparationTask) -> None:
        compared = work.compare[0] if work.compare else ""
        if form in work.keep or form in (self.forms[-1], compared):
            forms[form] = pack(value.numpy() if isinstance(value, torch.Tensor) else plain(value)).to_bytes()

    def assemble(self, items: Ints, examples: list[Any]) -> Any | None:
        """Return {"data", "ids", labels...}, as the pipeline's own loader does."""
        tree = {"data": self._data(items, examples), "ids": Marked(np.asarray(items, np.int64), TENSOR)}
        return tree | {name: plain(column) for name, column in labels(self._chain.source, items).items()}

    def _data(self, items: Ints, examples: list[Any]) -> Any:
        """Return arrays as one tensor. Raises `InputError` on arrays that do not fit together."""
        first = examples[0] if examples else None
        if not isinstance(first, np.ndarray) or first.dtype.hasobject:
            return plain(as_numbers(examples))
        for item, row in zip(items, examples, strict=True):
            if not isinstance(row, np.ndarray) or row.shape != first.shape or row.dtype != first.dtype:
                what = f"{row.dtype}{list(row.shape)}" if isinstance(row, np.ndarray) else type(row).__name__
                raise InputError(
                    f"example {item} is {what}, the batch {first.dtype}{list(first.shape)}. "
                    "Resize or crop to one size, or pass a collate_fn."
                )
        return Marked(Stacked(examples), IMAGE if self._batches.images and first.ndim == 3 else TENSOR)


class Turns:
    """Many threads at a time, until it turns out that they share a generator; then one, when the others are done."""

    def __init__(self, *, one_by_one: bool) -> None:
        self.one_by_one = one_by_one
        """Whether those who come from now on read alone."""
        self._inside, self._left = 0, threading.Condition()

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Take a turn; yields whether no other thread has one meanwhile."""
        with self._left:
            while self.one_by_one and self._inside:
                self._left.wait()
            alone = self.one_by_one
            self._inside += 1
        try:
            yield alone
        finally:
            with self._left:
                self._inside -= 1
                self._left.notify_all()


def _take_turns(turns: Turns, reading: ReadingResult, notes: list[str]) -> None:
    """Have threads read one by one from now on, if a generator that they share moved while they read together."""
    if reading.moved and not turns.one_by_one:
        turns.one_by_one = True
        notes.append(f"{ONE_THREAD}: an example draws from generators that all threads share")


def _same(made: Payload, kept: Payload) -> bool:
    """Tell whether two payloads hold equal examples."""
    return bytes(made) == bytes(kept) or equal(unpack(made, marked=restored), unpack(kept, marked=restored))


def _differs(forms: Mapping[str, Payload], compare: tuple[str, Payload] | None) -> bool:
    """Tell whether a form was made that is another one than the cache has."""
    return compare is not None and compare[0] in forms and not _same(forms[compare[0]], compare[1])


class _Reading:
    """A dataset that is read one by one, however it wants to be asked."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, item: int) -> Any:
        if hasattr(self._dataset, "__getitem__"):
            return self._dataset[item]
        return self._dataset.__getitems__([item])[0]

    def __len__(self) -> int:
        return len(self._dataset)


class _Seeded:
    """A dataset whose keyed draws come from one seed."""

    def __init__(self, reading: Any, seed: int) -> None:
        self._reading, self._seed = reading, seed

    def __getitem__(self, item: int) -> Any:
        with Draws(self._seed):
            return self._reading[item]


def looked_at(reading: Any, held: Any) -> tuple[str | None, bool]:
    """Say why several threads may not read at once (None: they may), and whether anything is drawn at random.

    An example that fails says nothing: it is its batch's to tell.
    """
    if not len(reading):
        return None, False
    ends = sorted({0, len(reading) - 1})
    try:
        finding = impurity(_Seeded(reading, 1), ends) or Picture(held).open_handle
    except BaseException as failure:  # sys.exit() of a dataset must not be the server's end
        finding = f"the probe of an example raised {type(failure).__name__}"
    if finding is not None:
        return finding, True
    one, other = ([_Seeded(reading, seed)[item] for item in ends] for seed in (1, 2))
    return None, not equal(one, other)


def _draws(read: Callable[[], object]) -> bool:
    """Whether reading moves a generator that all threads share; an example that fails says nothing."""
    with generators_kept():
        before = fingerprints()
        with contextlib.suppress(BaseException):  # sys.exit() too
            read()
        return bool(drawn(before, fingerprints()))
