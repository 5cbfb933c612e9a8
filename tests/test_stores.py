# ruff: noqa: RUF012 - what a class holds is what is looked for
"""Stores: code whose reading the script could see is named, ordinary code is not."""

from __future__ import annotations

import functools
import heapq
import random
from collections import Counter, defaultdict, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from headway.data.runtime.stores import stored_outside

SEEN: list[int] = []
MET: dict[int, int] = {}
NUM = 0


class Counting:
    def __init__(self):
        self.num = 0

    def __getitem__(self, i):
        if i == 77:
            self.num += 1
        return i


class Alias:
    def __init__(self):
        self.seen = {}

    def __getitem__(self, i):
        d = self.seen
        d[i] = 1
        return i


class SetDefault(Alias):
    def __getitem__(self, i):
        self.seen.setdefault(i, []).append(1)
        return i


class OfType:
    num = 0

    def __getitem__(self, i):
        type(self).num += 1
        return i


class OfClass:
    num = 0

    def __getitem__(self, i):
        OfClass.num = i
        return i


class OfDunderClass:
    seen = []

    def __getitem__(self, i):
        self.__class__.seen.append(i)
        return i


class Global:
    def __getitem__(self, i):
        global NUM
        NUM = i
        return i


class GlobalList:
    def __getitem__(self, i):
        SEEN.append(i)
        return i


class Deleting(Alias):
    def __getitem__(self, i):
        del self.seen[i]
        return i


class AugmentedItem(Alias):
    def __getitem__(self, i):
        self.seen[i] += 1
        return i


class Helped(Alias):
    def __getitem__(self, i):
        return self._read(i)

    def _read(self, i):
        try:
            return i
        finally:
            self.last = i


def note(i):
    MET[i] = 1


class HelpedByFunction:
    def __getitem__(self, i):
        note(i)
        return i


def note_in(seen, i):
    seen[i] = 1


class HandedOver(Alias):
    def __getitem__(self, i):
        note_in(self.seen, i)
        return i


class HandedOverTwice(HandedOver):
    def __getitem__(self, i):
        def put(rows, k):
            note_in(rows, k)

        put(i=i, rows=self.seen) if i == 3 else put(self.seen, k=i)
        return i


class Transforming:
    def __init__(self, *transforms):
        self.transform = Compose(transforms)

    def __getitem__(self, i):
        return self.transform(torch.ones(3))


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, x):
        for t in self.transforms:
            x = t(x)
        return x


class CountingTransform:
    num = 0

    def __call__(self, x):
        self.num = self.num + 1
        return x


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x)
        return x - self.mean


@functools.lru_cache
def slow(i):
    return i


class Caching:
    def __getitem__(self, i):
        return slow(i)


class CachedProperty:
    @functools.cached_property
    def rows(self):
        return [1]

    def __getitem__(self, i):
        return self.rows[i]


class SetAttr:
    def __getitem__(self, i):
        setattr(self, f"x{i}", 1)
        return i


class Heap:
    h = []

    def __getitem__(self, i):
        heapq.heappush(self.h, i)
        return i


class Next:
    def __init__(self):
        self.it = iter(range(10))

    def __getitem__(self, i):
        return next(self.it)


class Consuming(Next):
    def __getitem__(self, i):
        for x in self.it:
            i += x
        return i


class Left:
    q = deque()

    def __getitem__(self, i):
        self.q.appendleft(i)
        return i


class View:
    def __init__(self):
        self.x = np.zeros((4, 4))

    def __getitem__(self, i):
        row = self.x[i]
        row[0] = 1
        return row


class InPlaceView(View):
    def __getitem__(self, i):
        row = self.x[i]
        row /= 255
        return row


class Tensors:
    def __init__(self):
        self.x = torch.ones(4, 4)

    def __getitem__(self, i):
        return self.x[i].mul_(2)


class Viewed(Tensors):
    def __getitem__(self, i):
        row = self.x.view(2, 8)
        if i:
            row = row.t()
        row[0] = 2
        return row


class Returned(Alias):
    def _row(self, i):
        return self.seen.get(i)

    def __getitem__(self, i):
        row = self._row(i)
        row["n"] = 1
        return row


class Out(View):
    def __getitem__(self, i):
        return np.add(self.x, 1, out=self.x)


class Lazy:
    file = None

    def __getitem__(self, i):
        if self.file is None:
            self.file = open("x")  # noqa: SIM115 - as many do
        return i


class LoopItems:
    rows = [{}]

    def __getitem__(self, i):
        for _, row in enumerate(self.rows):
            row["a"] = 1
        return i


class Shuffled:
    def __init__(self):
        self.order = [1, 2]

    def __iter__(self):
        random.Random(1).shuffle(self.order)
        yield from self.order


class Generating:
    def __iter__(self):
        for i in range(3):
            self.at = i
            yield i


class Comprehending(Alias):
    def __getitem__(self, i):
        return [self.seen.update({k: 1}) for k in range(i)]


class Bound:
    rows = []

    def __getitem__(self, i):
        push = self.rows.append
        push(i)
        return i


class Property:
    @property
    def row(self):
        self._n = 1
        return 3

    def __getitem__(self, i):
        return self.row


class Managed:
    num = 0

    @contextmanager
    def counted(self):
        self.num += 1
        yield

    def __getitem__(self, i):
        with self.counted():
            return i


class EditedView(Tensors):
    def __getitem__(self, i):
        return Normalize()(self.x[i])


class InTransform(Tensors):
    def __init__(self):
        super().__init__()
        self.transform = Normalize()

    def __getitem__(self, i):
        return self.transform(self.x[i])


class InCompose(Tensors):
    def __init__(self):
        super().__init__()
        self.transform = Compose([Flip(0.5), Normalize()])

    def __getitem__(self, i):
        return self.transform(self.x[i])


class Queued:
    def __init__(self):
        self.q = SimpleNamespace(get=None)

    def __getitem__(self, i):
        return self.q.get()


class Normalize:
    def __call__(self, x):
        x.sub_(1).div_(2)
        x[0] = 1
        return x


class CollateState:
    def __init__(self):
        self.longest = 0

    def __call__(self, batch):
        self.longest = max(self.longest, len(batch))
        return batch


class Mapped:
    rows = []

    def __getitem__(self, i):
        return list(map(self.rows.append, [i]))


class Globals:
    def __getitem__(self, i):
        globals()["NUM"] = i
        return i


class Default:
    def __getitem__(self, i, cache={}):  # noqa: B006 - that is the case
        cache[i] = 1
        return i


class Dispatching:
    def _read_a(self):
        self.num = 1

    def __getitem__(self, i):
        return getattr(self, f"_read_{i}")()


class OnOnePath(Alias):
    def __getitem__(self, i):
        d = {}
        try:
            d = self.seen
            int("x")
        except ValueError:
            d[1] = i
        return i


class Matching(Alias):
    def __getitem__(self, i):
        match self.seen:
            case {"a": rows}:
                rows.append(i)
        return i


def closure():
    seen, num = [], 0

    def append(batch):
        seen.append(1)
        return batch

    def count(batch):
        nonlocal num
        num += 1
        return batch

    def counted(function):
        @functools.wraps(function)
        def inner(*args):
            SEEN.append(1)
            return function(*args)

        return inner

    return append, count, counted(default_collate)


STORES = {
    "counter": (Counting, "self.num"), "alias": (Alias, "self.seen"), "setdefault": (SetDefault, "self.seen"),
    "type(self)": (OfType, "type(self).num"), "class": (OfClass, "the global OfClass.num"),
    "__class__": (OfDunderClass, "self.__class__.seen"), "global": (Global, "the global NUM"),
    "global list": (GlobalList, "the global SEEN"), "del": (Deleting, "self.seen"),
    "augmented": (AugmentedItem, "self.seen"), "helper": (Helped, "self.last"),
    "function": (HelpedByFunction, "the global MET"), "handed over": (HandedOver, "self.seen"),
    "handed over twice": (HandedOverTwice, "self.seen"),
    "transform": (lambda: Transforming(CountingTransform()), "self.num"),
    "module": (lambda: Transforming(Module()), "self.mean"),
    "function of a list": (lambda: Transforming(str, lambda x: SEEN.append(x)), "the global SEEN"),
    "partial": (lambda: Transforming(functools.partial(note_in, MET)), None),
    "lru_cache": (Caching, "the cache of slow"), "cached_property": (CachedProperty, "the cache of rows"),
    "setattr": (SetAttr, "self"), "heap": (Heap, "self.h"), "next": (Next, "self.it"), "for": (Consuming, "self.it"),
    "deque": (Left, "self.q"), "numpy view": (View, "self.x"), "in place": (InPlaceView, "self.x"),
    "tensor": (Tensors, "self.x"), "view": (Viewed, None), "returned": (Returned, None), "out": (Out, "self.x"),
    "lazy": (Lazy, "self.file"), "items": (LoopItems, "self.rows"), "shuffle": (Shuffled, "self.order"),
    "generator": (Generating, "self.at"), "comprehension": (Comprehending, "self.seen"), "bound": (Bound, "self.rows"),
    "property": (Property, "self._n"), "contextmanager": (Managed, "self.num"), "edited": (EditedView, "self.x"),
    "transform of a view": (InTransform, "self.x"), "composed": (InCompose, "self.x"), "queue": (Queued, "self.q"),
    "collate": (CollateState, "self.longest"),
    "map": (Mapped, "self.rows"), "globals": (Globals, None), "default": (Default, "the argument cache"),
    "getattr": (Dispatching, "self.num"), "on one path": (OnOnePath, "self.seen"), "match": (Matching, None),
    "closure": (lambda: closure()[0], "the enclosing variable seen"),
    "nonlocal": (lambda: closure()[1], "the enclosing variable num"),
    "decorated": (lambda: closure()[2], "the global SEEN"),
}  # fmt: skip


@pytest.mark.parametrize("name", STORES)
def test_what_reading_stores_outside_is_named(name):
    make, expected = STORES[name]
    found = stored_outside([1, 2], make())

    assert found is not None if expected is None else found == expected


class Plain(Dataset):
    def __init__(self, transform=None):
        self.x, self.labels, self.transform = torch.ones(4, 4), [1, 2, 3, 4], transform
        self.epoch = 0
        self.seen = []
        self.seen.append(1)
        self._build()

    def _build(self):
        self.index = {}

    def set_epoch(self, epoch):
        self.epoch = epoch
        SEEN.append(epoch)

    def __setstate__(self, state):
        self.__dict__.update(state)

    def __len__(self):
        self.asked = True
        return 4

    def __getitem__(self, i):
        x = self.x[i].clone()
        x[0] = 1
        x += 1
        label = self.labels[i]
        label += 1
        if self.transform is not None:
            x = self.transform(x)
        return x, label


class Rebound(Plain):
    def __getitem__(self, i):
        row = self.x[i]
        row = row.numpy().copy() if i else row.float() * 2
        row[0] = 3
        return {"row": row, "seed": self.epoch + i}


class Built:
    root, rows = "a", [{"a": 1}]

    def __getitem__(self, i):
        row = dict(self.rows[i])
        row["b"] = 2
        row.update(c=3, **{k: v for k, v in self.rows[i].items() if k != "a"})
        made = sorted(self.rows[i].values())
        made.sort()
        row["d"] = made
        return row


class Texts:
    lines = ["a b", "c"]

    def __getitem__(self, i):
        words = self.lines[i].strip().replace("a", "b").split()
        words.append("</s>")
        words.insert(0, "<s>")
        ids = [ord(w[0]) for w in words if w]
        counts = Counter(words)
        counts["x"] += 1
        counts.update(words)
        return ids, counts


class Sliced:
    tokens, pad = list(range(99)), 0

    def __getitem__(self, i):
        tokens = self.tokens[i : i + 9]
        tokens.append(self.pad)
        tokens.extend([self.pad] * 3)
        return torch.tensor(tokens)


@dataclass
class Example:
    x: torch.Tensor
    words: list = field(default_factory=list)
    weight: float = 1.0

    def __post_init__(self):
        self.length = len(self.words)


class Dataclasses(Plain):
    def __getitem__(self, i):
        example = Example(torch.zeros(3), ["a"])
        example.weight = 2.0
        example.words.append("b")
        return example


class Struggling:
    paths = ["a", "b"]

    def __getitem__(self, i):
        out, tries = [], 0
        while tries < 3:
            try:
                with open(self.paths[i], "rb") as file:
                    file.seek(3)
                    out.append(file.read())
                break
            except (OSError, ValueError) as error:
                tries += 1
                if tries == 3:
                    raise RuntimeError(f"{self.paths[i]!r}") from error
            finally:
                out.append(b"")
        return out


class Streaming:
    def __init__(self):
        self.files = ["a", "b"]

    def __iter__(self):
        buffer = deque()
        for name in self.files:
            for k, _ in enumerate(zip(name, self.files, strict=False)):
                buffer.append(k)
                if len(buffer) > 2:
                    yield buffer.popleft()
        yield from buffer


class Batched(Plain):
    def __getitems__(self, indices):
        out = {}
        for i in indices:
            out.setdefault(i % 2, []).append(self.x[i])
        heap = []
        heapq.heappush(heap, 1)
        order = list(indices)
        random.Random(3).shuffle(order)
        return [self[i] for i in order if i in out or heapq.heappop(heap)]


class Wrapping:
    def __init__(self, base):
        self.base = base

    def __getitem__(self, i):
        x, label = self.base[i]
        x.mul_(2)
        return x, label


class Dicts:
    def __getitem__(self, i):
        return {"image": np.zeros(3), "label": i}


class WrappingDicts(Wrapping):
    def __getitem__(self, i):
        row = self.base[i]
        row["weight"] = 1.0
        row.pop("label")
        return row


class Flip:
    def __init__(self, p):
        self.p = p

    def __call__(self, x):
        if self.p > 0.5:
            x = x.flip(0)
        x[0] = 0
        return x


class FlipDict:
    def __call__(self, sample):
        sample["image"] = sample["image"] / 255
        sample["image"] -= 1
        return sample


class FlippedDicts:
    def __init__(self):
        self.transforms = [FlipDict(), lambda sample: {**sample, "x": 1}]

    def __getitem__(self, i):
        sample = {"image": np.zeros(3)}
        for t in self.transforms:
            sample = t(sample)
        return sample


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(4))
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        x = x - self.mean
        x.clamp_(0, 1)
        return self.layers(x)


class Recursing:
    def __getitem__(self, i):
        found = []

        def visit(k):
            nonlocal i
            i -= 1
            found.append(k)
            if k:
                visit(k - 1)

        visit(3)
        return found, sorted(found, key=lambda k: -k)


class Properties:
    _size = 3

    @property
    def size(self):
        return self._size

    @staticmethod
    def fill(out, value):
        out[0] = value
        return out

    @classmethod
    def made(cls):
        return cls()

    def __getitem__(self, i):
        out = self.fill(np.empty(self.size), i)
        self.fill(out=out, value=self.size)
        start = self.size
        start += i
        return out, start, self.made()


class Tokenizing:
    vocab, text = {"a": 1}, "a b"

    def encode(self, text, longest):
        ids = [self.vocab.get(word, 0) for word in text.split()]
        ids = ids[:longest]
        ids += [0] * (longest - len(ids))
        return ids

    def __getitem__(self, i):
        ids = self.encode(self.text, longest=4)
        ids.append(2)
        return ids


class Sharded:
    files = ["a", "b"]

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        files = list(self.files) if info is None else self.files[info.id :: info.num_workers]
        random.Random(1).shuffle(files)
        for name in files:
            with open(name) as file:
                for line in file:
                    row = {"line": line}
                    row["length"] = len(line)
                    yield row


def pad(batch):
    longest = max(len(row) for row in batch)
    out = torch.zeros(len(batch), longest)
    for i, row in enumerate(batch):
        out[i, : len(row)] = torch.as_tensor(row)
    batch.sort(key=len)
    return out


def collate_dicts(batch):
    columns = defaultdict(list)
    for row in batch:
        for name, value in row.items():
            columns[name].append(value)
    result = {name: torch.stack(values) for name, values in columns.items()}
    result["n"] = len(batch)
    return SimpleNamespace(**result)


class Padding:
    def __init__(self, pad_id):
        self.pad_id = pad_id

    def __call__(self, batch):
        ids, labels = zip(*batch, strict=True)
        made = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=self.pad_id)
        made[made == 3] = self.pad_id
        return made, torch.tensor(labels)


FREE = {
    "plain": Plain, "rebound": Rebound, "built": Built, "texts": Texts, "sliced": Sliced, "dataclasses": Dataclasses,
    "struggling": Struggling, "streaming": Streaming, "batched": Batched, "wrapping": lambda: Wrapping(Plain()),
    "wrapping dicts": lambda: WrappingDicts(Dicts()), "flip": lambda: Plain(Compose([Flip(0.3), Normalize()])),
    "dicts": FlippedDicts, "net": lambda: Plain(Net()), "recursing": Recursing, "properties": Properties,
    "pad": lambda: pad, "collate dicts": lambda: collate_dicts, "padding": lambda: Padding(0),
    "default collate": lambda: default_collate, "subset": lambda: torch.utils.data.Subset(Plain(), [1, 2]),
    "tensors": lambda: torch.utils.data.TensorDataset(torch.ones(3)), "list": lambda: [1, 2, 3],
    "joined": lambda: torch.utils.data.ConcatDataset([Plain(), Rebound()]), "a lambda": lambda: lambda batch: batch[0],
    "partial": lambda: functools.partial(collate_dicts), "tokenizing": Tokenizing, "sharded": Sharded,
}  # fmt: skip


@pytest.mark.parametrize("name", FREE)
def test_ordinary_code_stores_nothing_outside(name):
    assert stored_outside(FREE[name](), default_collate) is None
