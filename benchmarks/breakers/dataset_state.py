"""State of datasets: what reading changes in them, and what the loop changes in them meanwhile.

Remedies: data.workers data.threads data.cache
"""

import numpy as np
import torch
from _training import NUM_ROWS, ROWS, Rows, Training, chosen, train, wait
from torch.utils.data import DataLoader, Dataset, IterableDataset


def plain_rows():
    """Nothing is wrong with this one: remedies apply, and the losses are equal.

    Remedies: data.workers data.threads data.cache data.server
    """
    train(DataLoader(Rows(), 8, shuffle=True), 4, Training(dropout=0.1))


class Counted(Rows):
    reads = 0

    def row(self, index):
        self.reads += 1
        return ROWS[index] * (1 + self.reads // 50 / 10)


def attribute_counter():
    """The dataset counts its reads in an attribute and scales by the count."""
    train(lambda: DataLoader(Counted(), 8, shuffle=True), 2)


class CountedByClass(Rows):
    reads = 0

    def row(self, index):
        type(self).reads += 1
        return ROWS[index] * (1 + self.reads // 64)


def class_attribute_counter():
    """The count of reads is an attribute of the class, not of the object."""
    train(DataLoader(CountedByClass(), 8, shuffle=True))


class MixedByGlobal(Rows):
    def row(self, index):
        return ROWS[index] * (1 + ratio)


def global_ratio():
    """The loop sets a global of the module after every step; examples use it."""
    global ratio
    ratio, training = 0.0, Training()
    for step, batch in enumerate(DataLoader(MixedByGlobal(), 8, shuffle=True)):
        training.step(batch)
        ratio = step / 20
    training.finish()


class Mixed(Rows):
    ratio = 0.0

    def row(self, index):
        return ROWS[index] * (1 + self.ratio)


def ratio_each_step():
    """The loop changes an attribute of the dataset after every step, as a curriculum does."""
    training, rows = Training(), Mixed()
    for step, batch in enumerate(DataLoader(rows, 8, shuffle=True)):
        training.step(batch)
        rows.ratio = step / 20
    training.finish()


class Replay(Rows):
    priorities = torch.ones(NUM_ROWS)

    def row(self, index):
        return ROWS[index] * self.priorities[index]


def priorities_in_place():
    """The loop edits a tensor of priorities in place, and examples are scaled by theirs."""
    training, replay = Training(), Replay()
    for _ in range(2):
        for batch in DataLoader(replay, 8, shuffle=True):
            loss = training.step(batch)
            replay.priorities.mul_(0.99).add_(loss / 1000)
    training.finish()


class Windows(Rows):
    def __init__(self, frames):
        self.frames = frames

    def row(self, index):
        return torch.from_numpy(self.frames[index + 1 : index + 5, :8].mean(axis=0))


def replay_windows():
    """A large replay buffer is read as windows of four frames, and written in place by the loop."""
    frames = np.zeros((1_000_000, 64), np.float32)
    frames[:400] = np.random.default_rng(0).standard_normal((400, 64))
    training, loader = Training(), DataLoader(Windows(frames), 8, shuffle=True)
    for _ in range(4):
        for batch in loader:
            training.step(batch)
            frames[1 + 7 * training.num_steps % 160] += training.loss
    training.finish()


class Listed(Rows):
    def __init__(self):
        self.rows = [row.clone() for row in ROWS for _ in range(10)]

    def row(self, index):
        return self.rows[index * 10 + 3].clone()


def long_list_edited():
    """The loop replaces single entries of a list of 1600 rows; a look at some of them does not see it."""
    training, listed = Training(), Listed()
    for _ in range(2):
        for step, batch in enumerate(DataLoader(listed, 8, shuffle=True)):
            training.step(batch)
            where = (step * 29) % NUM_ROWS * 10 + 3
            listed.rows[where] = listed.rows[where] * 0.5
    training.finish()


class Growing(Dataset):
    def __init__(self):
        self.rows = list(ROWS[:64].clone())

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        wait()
        return self.rows[index]


def dataset_grows():
    """The loop appends to the dataset while it is read; the next epoch is longer."""
    training, growing = Training(), Growing()
    for _ in range(3):
        for batch in DataLoader(growing, 8, shuffle=True):
            training.step(batch)
            growing.rows.append(torch.full((8,), training.loss))
            growing.rows[0] = growing.rows[-1]
    training.finish()


class Labelled(Rows):
    def row(self, index):
        with torch.no_grad():
            return ROWS[index] + training.model(ROWS[index]).mean()


def model_in_dataset():
    """Examples pass through the model that is being trained, as in self-training."""
    global training
    training = Training()
    train(lambda: DataLoader(Labelled(), 8, shuffle=True), 2, training)


class Stream(IterableDataset):
    def __iter__(self):
        for place in range(160):
            wait()
            yield ROWS[(place + training.num_steps) % 160]


def iterable_dataset():
    """An iterable dataset whose stream the loop redirects.

    Remedies: data.workers data.threads data.cache data.server
    """
    global training
    training = Training()
    train(DataLoader(Stream(), 8), 1, training)


def loader_per_epoch():
    """A function makes dataset and loader anew for every epoch.

    Remedies: data.workers data.threads data.cache data.server
    """

    def loader_of(epoch):
        class Epoch(Rows):
            def row(self, index):
                return ROWS[index] * (1 + epoch)

        return DataLoader(Epoch(), 8, shuffle=True)

    training = Training(dropout=0.1)
    for epoch in range(3):
        for batch in loader_of(epoch):
            training.step(batch)
    training.finish()


class Damaged(Rows):
    def row(self, index):
        if index % 50 == 17:
            raise OSError(f"row {index} is damaged")
        return ROWS[index].clone()


def bad_examples_skipped():
    """A few examples raise, and the loop goes on with the next batch."""
    training, damaged = Training(), 0
    for _ in range(2):
        batches = iter(DataLoader(Damaged(), 8, shuffle=True))
        while True:
            try:
                training.step(next(batches))
            except OSError:
                damaged += 1
            except StopIteration:
                break
    training.finish(damaged)


class Talking(Rows):
    def row(self, index):
        if index % 16 == 5:
            print("reading", index, flush=True)
        return ROWS[index].clone()


def prints_while_reading():
    """Examples print, and the order of the lines on stdout is the order of the work."""
    training = Training()
    for batch in DataLoader(Talking(), 8):
        print("step", training.num_steps, repr(training.step(batch)), flush=True)
    training.finish()


if __name__ == "__main__":
    chosen(globals())
