"""Does this script's loader go on exactly after an interruption? Tried inside a rank, on the script's own data.

At its first iteration each map-style loader gets a twin: headway's loader over
the same dataset, with the same batches, order and collate function. The twin
is read without interruption, then again with one, and going on with other
numbers of workers and ranks; every example and batch is compared by a digest
of its bits. The script ends with SystemExit(0) out of its first optimizer step.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from headway.core.machine.interruptions import pass_on
from headway.data.bytes.torch_examples import encode
from headway.data.bytes.torch_keyed import generators_kept
from headway.data.guard.outcome import OutcomeWriter
from headway.data.guard.picture import picture
from headway.data.loader.loader import DataLoader
from headway.data.remedies import ResumeParameters
from headway.runtime.in_rank.remedy import Applied, Context
from headway.runtime.script.gradients import FORWARD

BATCHES = 12
"""Global batches that are compared, by default."""

MOST_BATCHES = 10_000
"""Batches of a pass whose order is read whole."""

Batch = tuple[tuple[bytes, ...], bytes]
"""(digest of each example in the order of the global batch, digest of the collated batch of rank 0)."""


def resume(parameters: ResumeParameters, context: Context) -> Applied:
    """Check each loader that the script reads."""
    check = ResumeCheck(parameters.batches, OutcomeWriter("check.resume", parameters, context))

    def stepped(index: int) -> int:
        if index == FORWARD:  # an evaluation may come before the training, with loaders of its own
            return 1
        raise SystemExit(0)

    context.patch("torch.utils.data.dataloader:DataLoader.__iter__", check.around_iter)
    context.listen(stepped)
    return Applied("check.resume", {**parameters.to_json(), "loaders": []})


@dataclass(slots=True)
class Digests:
    """A collate function that returns digests of the examples and of what the user's own makes of them."""

    user: Callable[[Any], Any]

    def __call__(self, examples: list[Any]) -> Batch:
        """Return the digests; the user's function may change examples in place, so theirs come first."""
        each = tuple(_digest(example) for example in examples)
        return each, _digest(self.user(examples))


@dataclass(slots=True)
class ResumeCheck:
    """Checks loaders, each once, and reports what it found."""

    batches: int
    report: OutcomeWriter
    seen: WeakSet[Any] = field(default_factory=WeakSet)
    busy: bool = False
    """Whether a twin is being read: it is a loader, too."""

    def around_iter(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `DataLoader.__iter__`: check the loader first."""

        def __iter__(loader: Any) -> Any:  # noqa: N807 - it stands in for the method of that name
            if not self.busy and loader not in self.seen:
                self.seen.add(loader)
                self.busy = True
                try:
                    self.report(self.found(loader))
                finally:
                    self.busy = False
            return original(loader)

        return __iter__

    def found(self, loader: Any) -> dict[str, object]:
        """Return the facts of one loader: its cases, or 'reason_not_applied'."""
        facts: dict[str, Any] = {
            "dataset": type(loader.dataset).__name__,
            "loader": "headway" if isinstance(loader, DataLoader) else "torch",
            "num_workers": loader.num_workers,
        }
        if isinstance(loader.dataset, IterableDataset):
            reason = "an iterable dataset: only its own state_dict() can say where it is"
            return {**facts, "reason_not_applied": f"{facts['dataset']} is {reason}"}
        if loader.batch_size is None:
            return {**facts, "reason_not_applied": "the loader does not make the batches itself (batch_size=None)"}
        try:
            setting = _setting(loader)
            cases = self.cases(setting)
            if all(case["examples"] for case in cases):
                facts["hint"] = None
            else:
                facts["hint"] = self._unsteady_sampler(setting) or _stateful(loader.dataset)
            return {**facts, "cases": cases}
        except Exception as failure:
            pass_on(failure)
            return {**facts, "reason_not_applied": f"reading it raised {type(failure).__name__}: {failure}"}

    def _unsteady_sampler(self, setting: Setting) -> str | None:
        """Say that the order itself comes out otherwise, whatever the examples are; None if it does not."""
        if setting.sampler is None:
            return None
        indices = replace(setting, dataset=range(len(setting.dataset)))
        if all(case["examples"] for case in self.cases(indices)):
            return None
        name = type(setting.sampler).__name__
        return (
            f"Its sampler, {name}, gives another order when it is read again: the order must depend on the sampler's "
            "generator and epoch alone, which are put back"
        )

    def cases(self, setting: Setting) -> list[dict[str, object]]:
        """Return [{case, examples, batches}]: whether these were equal to the uninterrupted reading."""
        world, workers = setting.world_size, setting.loader.num_workers
        expected, _ = self.read(setting, world, workers, None, self.batches)
        found = []
        for case, other_world, other_workers in setting.cases(workers):
            cut = max(1, len(expected) // 3)
            first, state = self.read(setting, world, workers, None, cut)
            rest, _ = self.read(setting, other_world, other_workers, state, len(expected) - cut)
            got = first + rest
            same_world = other_world == world
            found.append({
                "case": case,
                "examples": [examples for examples, _ in got] == [examples for examples, _ in expected],
                # Other ranks collate other examples: their batches have nothing to be equal to.
                "batches": [batch for _, batch in got] == [batch for _, batch in expected] if same_world else None,
            })  # fmt: skip
        same = between_passes_same(setting)
        return found if same is None else [*found, {"case": "between passes", "examples": same, "batches": None}]

    def read(
        self, setting: Setting, world: int, workers: int, state: bytes | None, count: int
    ) -> tuple[list[Batch], bytes]:
        """Return up to `count` global batches of `world` ranks, and the state of the last rank after them."""
        ranks = [setting.twin(rank, world, workers) for rank in range(world)]
        for loader in ranks if state is not None else ():
            loader.load_state_dict(pickle.loads(state))  # type: ignore[arg-type]  # not None here, see the line above
        iterators = [iter(loader) for loader in ranks]
        batches: list[Batch] = []
        ended = 0
        while len(batches) < count and ended < 2:
            parts = [part for part in (next(iterator, None) for iterator in iterators) if part is not None]
            if parts:
                ended = 0
                width = max(len(examples) for examples, _ in parts)
                dealt = tuple(examples[k] for k in range(width) for examples, _ in parts if k < len(examples))
                batches.append((dealt, parts[0][1]))
            else:
                ended += 1  # a second end in a row: the epochs are empty
                iterators = [iter(loader) for loader in ranks]
        return batches, pickle.dumps(ranks[-1].state_dict())


@dataclass(frozen=True, slots=True)
class Setting:
    """How a script's loader makes its batches, as far as a twin needs to know."""

    loader: Any
    dataset: Any
    """What is read: the script's dataset, or its indices."""
    global_batch: int
    world_size: int
    shuffle: bool
    sampler: Any
    """The user's own kind of sampler; None where headway's order takes its place."""

    def twin(self, rank: int, world: int, workers: int) -> DataLoader:
        """Return the loader of `rank`."""
        user = self.loader
        collate = user.collate_fn if self.dataset is user.dataset else list
        return DataLoader(
            self.dataset, self.global_batch // world, None if self.sampler is not None else self.shuffle, self.sampler,
            num_workers=workers, collate_fn=Digests(collate), drop_last=user.drop_last,
            worker_init_fn=user.worker_init_fn, rank=rank, world_size=world,
            multiprocessing_context=user.multiprocessing_context if workers else None,
        )  # fmt: skip

    def cases(self, workers: int) -> list[tuple[str, int, int]]:
        """Return (name, world size, workers) to go on with."""
        found = [("same job", self.world_size, workers)]
        found += [(f"{n} workers", self.world_size, n) for n in (0, 1, 2) if n != workers]
        if self.sampler is None:
            found += [
                (f"{world} rank{'s' * (world > 1)}", world, workers)
                for world in (1, 2, 3, 4)
                if world != self.world_size and self.global_batch % world == 0
            ]
        return found


def between_passes_same(setting: Setting) -> bool | None:
    """Whether the order of the second pass is the same where a state between the passes is gone on from.

    Only indices are read; None where a pass has more batches than are read for this.
    """
    order = replace(setting, dataset=range(len(setting.dataset)))
    loader = order.twin(0, setting.world_size, 0)
    try:
        if len(loader) > MOST_BATCHES:
            return None
    except TypeError:  # a sampler that does not know how many it yields
        return None
    begin = loader.state_dict()
    passes = [[batch for _, batch in loader] for _ in range(2)]
    again = order.twin(0, setting.world_size, 0)
    again.load_state_dict(begin)
    first = [batch for _, batch in again]
    state = again.state_dict()
    later = order.twin(0, setting.world_size, 0)
    later.load_state_dict(pickle.loads(pickle.dumps(state)))
    return [first, [batch for _, batch in later]] == passes


def _setting(loader: Any) -> Setting:
    """Return the loader's setting: a plain, random or distributed sampler gives way to headway's order."""
    sampler, world = loader.sampler, 1
    shuffle = isinstance(sampler, RandomSampler) and not sampler.replacement
    if isinstance(loader, DataLoader) and loader._owns_order:
        world, shuffle, sampler = loader._place()[1], loader._shuffle, None
    elif isinstance(sampler, DistributedSampler):
        world, shuffle, sampler = sampler.num_replicas, sampler.shuffle, None
    elif shuffle or type(sampler) is SequentialSampler:
        sampler = None
    return Setting(loader, loader.dataset, loader.batch_size * world, world, shuffle, sampler)


def _stateful(dataset: Any) -> str:
    """Say why examples may have differed: with their random numbers keyed, only what the dataset keeps can do it."""
    with generators_kept():
        pictures = []
        for item in (0, 1 % len(dataset), 0):  # after the first reading: opening a file lazily changes nothing
            dataset[item]
            pictures.append(picture(dataset))
    same = pictures[0] == pictures[1] == pictures[2]
    changed = "reads what changes" if same else "changes attributes of itself while it is read"
    return f"{type(dataset).__name__} {changed}: an example must depend on its index and on random numbers alone"


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(encode(value), digest_size=16).digest()
