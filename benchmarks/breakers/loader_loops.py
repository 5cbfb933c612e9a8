"""Samplers that look at the training, loops that use iterators in other ways than one pass behind the other, settings.

Remedies: data.workers data.threads data.cache
"""

from _training import NUM_ROWS, Rows, Training, chosen, train
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler


class Curriculum(Sampler):
    def __iter__(self):
        for place in range(NUM_ROWS):
            yield (place * 7 + int(training.loss * 1e6)) % NUM_ROWS

    def __len__(self):
        return NUM_ROWS


def curriculum_in_batch_sampler():
    """A sampler inside a plain BatchSampler looks at the last loss."""
    global training
    training = Training()
    train(lambda: DataLoader(Rows(), batch_sampler=BatchSampler(Curriculum(), 8, False)), 2, training)


class HardFirst:
    def __iter__(self):
        for place in range(20):
            start = (place + int(training.loss * 1e6)) % (NUM_ROWS - 8)
            yield list(range(start, start + 8))

    def __len__(self):
        return 20


def own_batch_sampler():
    """A batch sampler of the script's own looks at the last loss."""
    global training
    training = Training()
    train(lambda: DataLoader(Rows(), batch_sampler=HardFirst()), 2, training)


class Shifted(RandomSampler):
    def __iter__(self):
        for index in super().__iter__():
            yield (index + training.num_steps) % len(self.data_source)


def subclassed_sampler():
    """A subclass of RandomSampler overrides `__iter__` and looks at the number of steps."""
    global training
    training, rows = Training(), Rows()
    train(DataLoader(rows, 8, sampler=Shifted(rows)), 1, training)


def set_epoch_after_iter():
    """`set_epoch` of a DistributedSampler is called after `iter(loader)`, before the first batch."""
    training, rows = Training(), Rows()
    sampler = DistributedSampler(rows, 2, 0)
    loader = DataLoader(rows, 8, sampler=sampler)
    for epoch in range(3):
        batches = iter(loader)
        sampler.set_epoch(epoch)
        for batch in batches:
            training.step(batch)
    training.finish()


def break_and_resume():
    """An iterator is left in mid-epoch, another one begun, and the first taken up again."""
    training = Training(dropout=0.1)
    loader = DataLoader(Rows(), 8, shuffle=True)
    first = iter(loader)
    for _ in range(7):
        training.step(next(first))
    for step, batch in enumerate(loader):
        training.step(batch)
        if step == 3:
            break
    for batch in first:
        training.step(batch)
    training.finish()


def early_break():
    """The loop breaks off and starts the next epoch, with dropout from the same generator.

    Not under data.server: what is granted there is another order, whose first batches hold other rows.
    """
    training = Training(dropout=0.3)
    loader = DataLoader(Rows(), 8, shuffle=True)
    for epoch in range(4):
        for step, batch in enumerate(loader):
            training.step(batch)
            if step == 5 + epoch:
                break
    training.finish()


def cycled_iterator():
    """One iterator is asked with `next`, and made anew at StopIteration, in the middle of the training."""
    global batches  # there until the interpreter ends
    training = Training(dropout=0.1)
    loaders = [DataLoader(Rows(), size, shuffle=True) for size in (8, 24)]
    batches = [iter(loader) for loader in loaders]
    for _ in range(45):
        for place, loader in enumerate(loaders):
            try:
                batch = next(batches[place])
            except StopIteration:
                batches[place] = iter(loader)
                batch = next(batches[place])
            training.step(batch)
    training.finish()


def nested_iterators():
    """The loop over a loader iterates over the same loader inside."""
    training = Training(dropout=0.1)
    loader = DataLoader(Rows(), 16, shuffle=True)
    for outer, batch in enumerate(loader):
        training.step(batch)
        if outer % 4 == 1:
            for inner in loader:
                training.step(inner)
    training.finish()


def zip_with_itself():
    """The same loader is read twice at once, by `zip`."""
    training = Training(dropout=0.1)
    loader = DataLoader(Rows(), 8, shuffle=True)
    for _ in range(2):
        for left, right in zip(loader, loader, strict=True):
            training.step(left + right)
    training.finish()


def settings_read():
    """The script reads the loader's settings and scales the learning rate by them."""
    global loader  # there until the interpreter ends
    training = Training()
    loader = DataLoader(Rows(), 8, shuffle=True)
    for _ in range(2):
        for batch in loader:
            training.step(batch / (1 + loader.num_workers) * (2 if loader.persistent_workers else 1))
    training.finish(loader.num_workers, loader.prefetch_factor)


if __name__ == "__main__":
    chosen(globals())
