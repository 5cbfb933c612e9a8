"""Training batches of selected examples: the torch half of Selective-Backprop.

The loop stays the user's. It reads `selector.train_batches(loader, score)` in
place of `loader`, and gets full batches of examples that are worth a backward
pass; `score` is the user's forward pass for per-example losses, made safe by `scoring`:

    def score(batch):
        inputs, targets = batch
        with scoring(model) as bare:
            return cross_entropy(bare(inputs), targets, reduction="none")

    for inputs, targets in selector.train_batches(DataLoader(WithIds(data), 64, shuffle=True), score):
        ...  # an ordinary step

>>> batch = {"x": torch.arange(8).view(4, 2), "name": ["a", "b", "c", "d"]}
>>> taken(batch, [3, 0])["x"].tolist(), taken(batch, [3, 0])["name"]
([[6, 7], [0, 1]], ['d', 'a'])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headway.core.errors import InputError
from headway.data.bytes.torch_keyed import generators_kept
from headway.data.selection import Ints, LossSelector


class WithIds(torch.utils.data.Dataset[Any]):
    """A map-style dataset whose examples come with their index: (example, index). Loaders then give (batch, ids)."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.dataset[index], int(index)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, int]]:
        """Return the examples at `indices`, through the dataset's own `__getitems__` if it has one."""
        many = getattr(self.dataset, "__getitems__", None)
        examples = many(indices) if callable(many) else [self.dataset[index] for index in indices]
        return list(zip(examples, map(int, indices), strict=True))


@contextmanager
def scoring(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield `model` (out of DistributedDataParallel's wrapper) for a forward pass that leaves no trace in training.

    Evaluation mode and no gradients: batch normalisation's statistics stay as
    they are, dropout is off. Afterwards each module is in the mode it was in,
    and the generators of this process are where they were. The bare module takes part in no collective.
    """
    bare: torch.nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    modes = [(module, module.training) for module in bare.modules()]
    with torch.no_grad(), generators_kept():
        bare.eval()
        try:
            yield bare
        finally:
            for module, mode in modes:
                module.training = mode


def train_batches(
    selector: LossSelector,
    loader: Any,
    score: Callable[[Any], Any],
    *,
    ids: Callable[[Any], Any] | None = None,
    batch_size: int | None = None,
) -> Iterator[Any]:
    """Yield an epoch's kept examples in batches of `batch_size` per rank (default: the loader's), each exactly once.

    `loader` gives (batch, ids), as over `WithIds`; with `ids` it gives batches
    and `ids(batch)` their [B] ids. `score(batch)` -> [B] losses sees only the
    examples whose loss is due, and takes part in no collective. With several
    ranks each yields as many batches as the others; what is left at the end of
    the epoch is dealt out evenly, and fewer examples than ranks wait for the next epoch.
    With beta = 0 the loader's batches pass through as they are. Raises `InputError`.
    """
    size = batch_size if batch_size is not None else getattr(loader, "batch_size", None)
    if size is None or size < 1:
        raise InputError(f"batch_size is {size}; the loader has none of its own. Pass batch_size=, 1 or more.")
    if selector.keeps_all:
        for batch in loader:
            yield _with_ids(batch, ids)[0]
        return
    queue = _Queue(selector)
    # A state taken after the last candidates of an epoch goes on with what was left of it, not with the next epoch.
    if not 0 < queue.rounds_of(loader) <= selector.rounds:
        candidates = iter(loader)
        while queue.offer(next((_with_ids(batch, ids) for batch in candidates), None), score):
            while min(queue.counts) >= size:
                yield queue.pop(size)
    queue.deal()
    while min(queue.counts) > 0:
        batch = queue.pop(size)
        selector.rounds *= min(queue.counts) > 0
        yield batch
    selector.rounds = 0


def gathered(block: Ints, group: Any = None) -> list[Ints]:
    """Return the [n, k] int64 blocks of all ranks of `group`; n may differ from rank to rank."""
    device = torch.device("cuda") if "nccl" in str(dist.get_backend(group)) else torch.device("cpu")
    ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(block)], dtype=torch.int64, device=device), group=group)
    counts = [int(size.item()) for size in sizes]
    if not max(counts):
        return [block] * ranks
    padded = np.zeros((max(counts), block.shape[1]), np.int64)
    padded[: len(block)] = block
    mine = torch.from_numpy(padded).to(device)
    blocks = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(blocks, mine, group=group)
    return [part.cpu().numpy()[:count] for part, count in zip(blocks, counts, strict=True)]


class _Queue:
    """Kept examples that wait for a full batch; they live in the selector, so its state has them."""

    def __init__(self, selector: LossSelector) -> None:
        self._selector, self._group = selector, selector.group
        ready = dist.is_available() and dist.is_initialized()
        self._ranks = dist.get_world_size(self._group) if ready else 1
        self._rank = dist.get_rank(self._group) if ready else 0
        waiting = selector.queued
        if len(waiting) not in (0, self._ranks) and any(waiting):
            raise InputError(
                f"{sum(waiting)} kept examples wait on {len(waiting)} ranks, but this job has {self._ranks}. Keep the "
                "number of ranks to the end of the epoch."
            )
        if len(waiting) != self._ranks:
            selector.queued = [0] * self._ranks

    @property
    def counts(self) -> list[int]:
        """Waiting examples of each rank."""
        return self._selector.queued

    def rounds_of(self, loader: Any) -> int:
        """Return how many candidate batches an epoch has on the rank that has most of them; 0 where that is unknown."""
        try:
            rounds = len(loader)
        except TypeError:
            rounds = 0
        if self._ranks == 1:
            return rounds
        return max(int(block[0, 0]) for block in gathered(np.full((1, 1), rounds, np.int64), self._group))

    def offer(self, pair: tuple[Any, Ints] | None, score: Callable[[Any], Any]) -> bool:
        """Score and select one batch, None where this rank has no more; returns whether any rank had one."""
        if pair is None and self._ranks == 1:
            return False
        batch, ids = pair if pair is not None else (None, np.zeros(0, np.int64))
        due = self._selector.due(ids)
        losses: Any = np.zeros(0)
        if due.any():
            losses = score(batch if due.all() else taken(batch, np.flatnonzero(due)))
        kept, parts = self._selector.decide(losses, ids, fresh=due)
        if kept.all():
            self._put(batch, len(ids))
        else:
            self._put(taken(batch, np.flatnonzero(kept)), int(kept.sum()))
        self._selector.queued = [count + more for count, (_, more) in zip(self.counts, parts, strict=True)]
        offered = any(count for count, _ in parts)
        self._selector.rounds += offered
        return offered

    def pop(self, size: int) -> Any:
        """Take this rank's next `size` examples, fewer at the end; every rank does the same."""
        parts, missing = [], size
        while missing and self._selector.queue:
            count, batch = self._selector.queue.pop(0)
            if count > missing:
                rest = taken(batch, slice(missing, count))
                self._selector.queue.insert(0, (count - missing, rest))
                batch, count = taken(batch, slice(missing)), missing
            parts.append(batch)
            missing -= count
        self._selector.queued = [max(0, count - size) for count in self.counts]
        return joined(parts)

    def deal(self) -> None:
        """Even out what waits on all ranks: example k of all goes to rank k modulo the number of ranks."""
        if max(self.counts) - min(self.counts) <= 1:
            return
        everyone: list[Any] = [None] * self._ranks
        dist.all_gather_object(everyone, self._selector.queue, group=self._group)
        total = sum(self.counts)
        whole = joined([batch for queue in everyone for _, batch in queue])
        mine = np.arange(self._rank, total, self._ranks)
        self._selector.queue = []
        if len(mine):
            self._put(taken(whole, mine), len(mine))
        self._selector.queued = [len(range(rank, total, self._ranks)) for rank in range(self._ranks)]

    def _put(self, batch: Any, count: int) -> None:
        if count:
            self._selector.queue.append((count, batch))


def taken(batch: Any, rows: Any) -> Any:
    """Return the examples at [n] `rows` (a slice gives views) of a batch: tensors, arrays, texts, containers of them.

    Raises `InputError` on a part of another type.
    """
    if isinstance(rows, slice) and (isinstance(batch, (torch.Tensor, np.ndarray)) or _is_column(batch)):
        return batch[rows]
    if isinstance(batch, torch.Tensor):
        return batch.index_select(0, torch.as_tensor(rows, dtype=torch.int64, device=batch.device))
    if isinstance(batch, np.ndarray) or _is_column(batch):
        return batch[rows] if isinstance(batch, np.ndarray) else type(batch)(batch[row] for row in rows)
    return _rebuilt([batch], lambda parts: taken(parts[0], rows))


def joined(batches: Sequence[Any]) -> Any:
    """Return the examples of all `batches` as one batch; a single one as it is. Raises `InputError`."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(batches))
    if isinstance(first, np.ndarray):
        return np.concatenate(list(batches))
    if _is_column(first):
        return type(first)(text for batch in batches for text in batch)
    return _rebuilt(batches, joined)


def _is_column(part: Any) -> bool:
    """Tell whether a list or tuple holds a text per example: collate functions leave texts as they are."""
    return isinstance(part, (list, tuple)) and bool(part) and all(isinstance(entry, (str, bytes)) for entry in part)


def _rebuilt(batches: Sequence[Any], function: Callable[[list[Any]], Any]) -> Any:
    """Apply `function` to the corresponding parts of containers, and return one container of the results."""
    first = batches[0]
    if isinstance(first, Mapping):
        return {name: function([batch[name] for batch in batches]) for name in first}
    if isinstance(first, (list, tuple)):
        parts = [function(list(fields)) for fields in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    raise InputError(
        f"a batch holds a {type(first).__name__}, whose examples are not distinguishable. Use tensors, arrays, texts, "
        "and lists, tuples or dicts of them."
    )


def _with_ids(batch: Any, ids: Callable[[Any], Any] | None) -> tuple[Any, Ints]:
    """Return (batch, ids)."""
    if ids is not None:
        numbers = ids(batch)
    elif isinstance(batch, (list, tuple)) and len(batch) == 2:
        batch, numbers = batch
    else:
        raise InputError(
            f"the loader gives a {type(batch).__name__}, not (batch, ids). Wrap the dataset in WithIds, or pass ids=."
        )
    return batch, np.asarray(numbers.detach().cpu().numpy() if hasattr(numbers, "detach") else numbers)
