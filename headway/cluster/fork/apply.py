"""'cluster.fork': the script of this rank is one of several copies that share its epochs. Needs `--allow lossy`.

A loader that is iterated for training (with gradients, a model in training mode) brings only the batches that this copy
was dealt; the others are passed over without loading an example. Where the copy has done its share, the iterator does,
before it brings the next batch, what ends a slot:

    next(loader) -> leave the state in a file -> report -> wait for the others -> load the average -> schedulers step
                    on to the steps of all copies -> the first batch of the next share

There every update is complete. Averaged are models, with their running statistics, and the moments of optimizers;
learning rates are not, they follow from the scheduler's steps. `torch.save` to a path writes there in one copy only;
each other one keeps a file of its own, and `torch.load` of that path reads it: nobody waits for another's file.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, IterableDataset

from headway.cluster.fork.coordinator import NAME, WHERE, CopyRefuses, EpochBegins, Report, SlotBegins, SlotEnds
from headway.core.errors import InputError
from headway.core.files.private import private_folder
from headway.core.files.safe_files import whole_file
from headway.core.remedies import NoParameters
from headway.core.wire.channel import Channel, ChannelClosed, connect
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy
from headway.runtime.torch_state import RngStates, consolidate, living

CONNECT_S = 10.0
"""How long the coordinator may take to accept."""

Batches = Iterator[object]
"""What a loader brings, or the indices of their examples."""

Loader = DataLoader[object]

ITERATE = "torch.utils.data.dataloader:DataLoader.__iter__"


def fork(parameters: NoParameters, context: Context) -> Applied | RefusedRemedy:
    """Install the remedy, in a copy that `headway cluster fork` has started."""
    del parameters
    if WHERE not in os.environ:
        return RefusedRemedy(NAME, "copies are started by: headway cluster fork --speeds 4,2,1 -- train.py")
    number, first, path = os.environ[WHERE].split(":", 2)
    copy = _Copy(int(number), Path(context.run).parents[1] / "states", is_first=first == "1")
    copy.channel = connect(path, CONNECT_S, types=SlotBegins)
    context.patch("torch.optim.optimizer:Optimizer.__init__", copy.made)
    context.patch("torch.optim.lr_scheduler:LRScheduler.__init__", copy.made)
    context.patch(ITERATE, copy.iterating)
    context.patch("torch:save", copy.saving)
    context.patch("torch:load", copy.loading)
    atexit.register(copy.forget)
    context.undos.append(register_optimizer_step_post_hook(copy.count).remove)
    return Applied(NAME, copy.facts)


class _Copy:
    """This process as one of several copies."""

    channel: Channel

    def __init__(self, number: int, folder: Path, *, is_first: bool) -> None:
        self.number, self.is_first, self._folder = number, is_first, folder
        self.facts: dict[str, int] = {"copy": number, "slots": 0, "batches": 0}
        self._made: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        """Optimizer or scheduler -> how many were made before."""
        self._orders: weakref.WeakKeyDictionary[object, _DealtOrder] = weakref.WeakKeyDictionary()
        self._saved: dict[str, Path] = {}
        """What the script saved to -> where this copy's own file of it is."""
        self._slot: SlotBegins | None = None
        self._has_begun = False
        self._updates, self._began_s, self._loading_s = 0, 0.0, 0.0
        self._scheduled: list[int] = []
        self._models: list[torch.nn.Module] = []
        self._schedulers: list[LRScheduler] = []
        """Of the epoch that goes on: to find them takes a walk over all objects."""

    def made(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap a constructor: things are told apart by the order in which the script makes them."""

        @functools.wraps(original)
        def __init__(thing: object, *args: object, **kwargs: object) -> None:  # noqa: N807  # the name it has in torch
            """Construct, and note the order."""
            original(thing, *args, **kwargs)
            self._made.setdefault(thing, len(self._made))

        return __init__

    def iterating(self, original: Callable[[Loader], Batches]) -> Callable[[Loader], Batches]:
        """Wrap `DataLoader.__iter__`."""

        @functools.wraps(original)
        def __iter__(loader: Loader) -> Batches:  # noqa: N807  # the name it has in torch
            """Iterate over this copy's batches, where the loader brings those of training."""
            return self._dealt(loader, original) if self._trains() else original(loader)

        return __iter__

    def saving(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap `torch.save`: all copies would write the same file, and none knows when another has."""

        @functools.wraps(original)
        def save(obj: object, f: object, *args: object, **kwargs: object) -> None:
            """Save: to the path that the script names, if this is the copy that does."""
            if not isinstance(f, (str, os.PathLike)):
                original(obj, f, *args, **kwargs)
                return
            path = os.path.abspath(os.fsdecode(f))
            if self.is_first:
                original(obj, f, *args, **kwargs)
                if path in self._saved:
                    self._saved.pop(path).unlink(missing_ok=True)
            elif not Path(path).parent.is_dir():
                original(obj, f, *args, **kwargs)  # it fails as it does by itself
            else:
                private_folder(self._folder)
                file = self._folder / f"saved-{self.number}-{zlib.crc32(os.fsencode(path)):08x}"
                original(obj, file, *args, **kwargs)
                self._saved[path] = file

        return save

    def loading(self, original: Callable[..., object]) -> Callable[..., object]:
        """Wrap `torch.load`: what this copy has saved is read from its own file."""

        @functools.wraps(original)
        def load(f: object, *args: object, **kwargs: object) -> object:
            """Load what the script saved to a path, or what is there."""
            if isinstance(f, (str, os.PathLike)):
                f = self._saved.get(os.path.abspath(os.fsdecode(f)), f)
            return original(f, *args, **kwargs)

        return load

    def forget(self) -> None:
        """Delete this copy's own files."""
        for file in self._saved.values():
            file.unlink(missing_ok=True)

    def count(self, optimizer: object, args: object, kwargs: object) -> None:
        """Count an update."""
        self._updates += 1

    def begin_epoch(self, num_batches: int) -> SlotBegins:
        """Tell the others, and return the first share."""
        digests, self._schedulers = dict[str, int](), self._stepped()
        for index, model in enumerate(() if self._has_begun else self._models):
            for key, tensor in model.state_dict().items():
                if isinstance(tensor, torch.Tensor):
                    flat = tensor.detach().cpu().contiguous().reshape(-1)
                    digests[f"models.{index}.{key}"] = zlib.crc32(flat.view(torch.uint8).numpy().data)
        self._has_begun = True
        return self._begin(self._exchange(EpochBegins(num_batches, digests)))

    def end_slot(self, batches: int, order: int) -> SlotBegins:
        """Report what was done, load what came of it in all copies, and return the next share."""
        slot = self._slot
        assert slot is not None, "an epoch has begun"
        cuda: Any = torch.cuda
        if cuda.is_initialized():
            cuda.synchronize()
        ended_s = time.monotonic()
        state: dict[str, object] | None = None
        if batches and not slot.is_alone:
            state = self._state()
            private_folder(self._folder)
            with whole_file(self._file(slot.slot, self.number)) as draft:
                torch.serialization.save(state, draft)  # not `torch.save`, which is that of one copy
        scheduled = [scheduler.last_epoch for scheduler in map(_counting, self._schedulers)]
        schedule = [now - before for now, before in zip(scheduled, self._scheduled, strict=True)]
        paid_s = time.monotonic() - ended_s + self._loading_s
        generators = RngStates().state_dict()["state"]
        self.facts["slots"] += 1
        self.facts["batches"] += batches
        following = self._exchange(
            SlotEnds(slot.slot, batches, self._updates, ended_s - self._began_s, paid_s, schedule, order, generators)
        )
        arrived_s = time.monotonic()
        if following.copies not in ([], [self.number]):
            self._load(following, state, slot.slot)
        for scheduler, total, counted in zip(self._schedulers, following.schedule, schedule, strict=True):
            for _ in range(total - counted):
                scheduler.step()
        if following.generators:
            RngStates().load_state_dict({"state": following.generators})
        self._loading_s = time.monotonic() - arrived_s
        if following.is_over:
            self._models, self._schedulers = [], []
        return self._begin(following)

    def _begin(self, slot: SlotBegins) -> SlotBegins:
        self._slot, self.is_first, self._updates = slot, slot.is_first, 0
        self._scheduled = [scheduler.last_epoch for scheduler in map(_counting, self._schedulers)]
        self._began_s = time.monotonic()
        return slot

    def _trains(self) -> bool:
        """Whether a loader that is iterated now brings batches for training."""
        if not torch.is_grad_enabled() or not any(isinstance(thing, torch.optim.Optimizer) for thing in self._made):
            return False
        trained, models = {id(parameter) for parameter in self._parameters()}, self._living()
        trains = any(
            model.training and any(id(parameter) in trained for parameter in model.parameters()) for model in models
        )
        self._models = models if trains else self._models
        return trains

    def _dealt(self, loader: Loader, original: Callable[[Loader], Batches]) -> _DealtBatches:
        """Return an iterator over this copy's batches; ends the program where the loader cannot be shared."""
        sampler = loader.batch_sampler
        if isinstance(loader.dataset, IterableDataset) or sampler is None:
            self._stop("a loader without a sampler of batches (an IterableDataset, batch_size=None) cannot be shared.")
        try:
            num_batches = len(cast(Sized, sampler))
        except TypeError:
            self._stop(f"{type(sampler).__name__} has no len(): how many batches an epoch has must be known.")
        order = self._orders.setdefault(loader, _DealtOrder())
        return _DealtBatches(self, loader, original, order, num_batches)

    def _exchange(self, report: Report) -> SlotBegins:
        """Report, and wait for the next share; ends the program where there is none."""
        try:
            self.channel.send(report)
            message, _ = self.channel.receive()
        except ChannelClosed as cause:
            raise SystemExit(f"headway: this copy ends: {cause}") from None
        assert isinstance(message, SlotBegins), "the channel decodes nothing else"
        return message

    def _stop(self, reason: str) -> NoReturn:
        """End the program and all other copies, with the reason."""
        self.channel.send(CopyRefuses(reason))
        raise SystemExit(f"headway: {reason}")

    def _load(self, slot: SlotBegins, state: dict[str, object] | None, before: int) -> None:
        """Load the average of the copies' states of the slot `before`; ends all copies where they do not fit."""
        states = [
            state if number == self.number and state is not None
            else torch.load(self._file(before, number), map_location="cpu", weights_only=True)
            for number in slot.copies
        ]  # fmt: skip
        try:
            mean: Any = consolidate(states, slot.weights)
        except InputError as cause:
            self._stop(str(cause))
        for model, values in zip(self._models, mean["models"], strict=True):
            model.load_state_dict(values)
        for optimizer, values in zip(self._optimizers(), mean["optimizers"], strict=True):
            optimizer.load_state_dict({"state": values, "param_groups": optimizer.state_dict()["param_groups"]})

    def _state(self) -> dict[str, object]:
        return {
            "models": [model.state_dict() for model in self._models],
            "optimizers": [optimizer.state_dict()["state"] for optimizer in self._optimizers()],
        }

    def _file(self, slot: int, number: int) -> Path:
        return self._folder / f"{slot}-{number}.pt"

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        made = sorted(self._made.items(), key=lambda pair: pair[1])
        return [thing for thing, _ in made if isinstance(thing, torch.optim.Optimizer)]

    def _parameters(self) -> list[torch.Tensor]:
        return [p for optimizer in self._optimizers() for group in optimizer.param_groups for p in group["params"]]

    def _living(self) -> list[torch.nn.Module]:
        """Return the models with a state, in an order that is the same in all copies: by their first trained weight."""
        index_of = {id(parameter): index for index, parameter in reversed(list(enumerate(self._parameters())))}
        models = []
        for model in living(torch.nn.Module):
            tensors = [*model.parameters(), *model.buffers()]
            if tensors:
                first = min(index_of.get(id(tensor), len(index_of)) for tensor in tensors)
                size = len(tensors), sum(tensor.numel() for tensor in tensors)
                models.append(((first, type(model).__qualname__, *size), model))
        return [model for _, model in sorted(models, key=lambda pair: pair[0])]

    def _stepped(self) -> list[LRScheduler]:
        """Return the schedulers that the script steps, in the order in which they, or their first parts, were made."""
        alive = living(LRScheduler)
        inner = {id(step) for scheduler in alive for step in _parts(scheduler)}
        stepped = [scheduler for scheduler in alive if id(scheduler) not in inner]
        latest = len(self._made)
        return sorted(stepped, key=lambda outer: min(self._made.get(step, latest) for step in (outer, *_parts(outer))))


class _DealtOrder:
    """The order of an epoch, as a sampler of batches that brings this copy's spans of it."""

    def __init__(self) -> None:
        self.spans: Sequence[tuple[int, int]] = ()
        self.digest = 0
        self._sampler: Iterable[object] = ()
        self._source: Batches | None = None
        self._drawn: list[object] = []
        """[batches drawn] Indices of examples: positions that another copy has lost are behind those drawn by now."""

    def begin(self, sampler: Iterable[object]) -> None:
        """Begin an epoch; the sampler is asked for an iterator where a plain loader would."""
        self._sampler, self._source, self._drawn, self.digest = sampler, None, [], 0

    def __iter__(self) -> Batches:
        return self._bring(self._begun())

    def __len__(self) -> int:
        return sum(last - first for first, last in self.spans)

    def _begun(self) -> Batches:
        """Return the sampler's iterator, asked for where a plain loader would."""
        if self._source is None:
            self._source = iter(self._sampler)
        return self._source

    def exhaust(self) -> None:
        """Ask the sampler until it has no more, as a plain loader does: some draw once more then."""
        for _ in self._begun():
            pass

    def _bring(self, source: Batches) -> Batches:
        for first, last in list(self.spans):
            for position in range(first, last):
                while len(self._drawn) <= position:
                    self._drawn.append(next(source))
                if not self.digest:
                    self.digest = zlib.crc32(repr(self._drawn[0]).encode()) or 1
                yield self._drawn[position]


class _DealtBatches:
    """An iterator over the batches of an epoch that this copy does, slot by slot."""

    def __init__(
        self, copy: _Copy, loader: Loader, original: Callable[[Loader], Batches], order: _DealtOrder, num_batches: int
    ) -> None:
        self._copy, self._loader, self._original, self._order, self._num_batches = (
            copy, loader, original, order, num_batches
        )  # fmt: skip
        order.begin(loader.batch_sampler or ())
        slot = copy.begin_epoch(num_batches)
        self._is_over, self._batches, order.spans = slot.is_over, 0, slot.spans
        self._inner = self._opened()

    def __iter__(self) -> _DealtBatches:
        return self

    def __len__(self) -> int:
        return self._num_batches

    def __next__(self) -> object:
        """Return the next batch of this copy, after the exchange with the others where a slot ends."""
        while not self._is_over:
            try:
                batch = next(self._inner)
            except StopIteration:
                slot = self._copy.end_slot(self._batches, self._order.digest)
                self._is_over, self._batches, self._order.spans = slot.is_over, 0, slot.spans
                if self._is_over:
                    self._order.exhaust()
                else:
                    self._inner = self._again(slot.slot)
            else:
                self._batches += 1
                return batch
        raise StopIteration

    def _opened(self) -> Batches:
        """Return torch's own iterator, over this copy's share."""
        loader, sampler = self._loader, self._loader.batch_sampler
        object.__setattr__(loader, "batch_sampler", self._order)  # torch refuses it by name, after construction
        try:
            return self._original(loader)
        finally:
            object.__setattr__(loader, "batch_sampler", sampler)

    def _again(self, slot: int) -> Batches:
        """Return another one; it draws the seed of its workers from a generator of its own, not from the script's."""
        loader, generator = self._loader, self._loader.generator
        loader.generator = torch.Generator().manual_seed((torch.initial_seed() + slot) % (1 << 63))
        try:
            return self._opened()
        finally:
            loader.generator = generator


def _parts(scheduler: LRScheduler) -> list[LRScheduler]:
    """Return the schedulers that one is made of."""
    return list(getattr(scheduler, "_schedulers", ()))


def _counting(scheduler: LRScheduler) -> LRScheduler:
    """Return the one that counts steps: of a chain, which does not count itself, its first part."""
    return _parts(scheduler)[0] if type(scheduler).__name__ == "ChainedScheduler" else scheduler
