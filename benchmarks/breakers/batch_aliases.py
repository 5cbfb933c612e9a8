"""Batches: memory that they share with the dataset or with each other, their kind, where they lie, who collates them.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, WIDTH, Rows, Training, chosen, train, wait
from torch.utils.data import DataLoader, Dataset


class Collate:
    num_batches = 0

    def __call__(self, rows):
        self.num_batches += 1
        return torch.stack(rows) * (1 + self.num_batches / 10)


def collate_counter():
    """The collate function is an object that counts its batches."""
    train(DataLoader(Rows(), 8, shuffle=True, collate_fn=Collate()))


OUT = torch.empty(8, WIDTH)


def into_buffer(rows):
    return torch.stack(rows, out=OUT)


def batches_share_memory():
    """The collate function fills one buffer again and again, and the loop keeps earlier batches."""
    training, earlier = Training(), []
    for batch in DataLoader(Rows(), 8, shuffle=True, collate_fn=into_buffer):
        earlier.append(batch)
        training.step(torch.stack(earlier[-3:]).mean(0))
    training.finish()


class Records(Dataset):
    def __init__(self):
        self.records = [{"row": row, "seen": 0} for row in ROWS]

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        wait()
        return self.records[index]


def examples_edited_by_loop():
    """The collate function hands out the dataset's own dictionaries, and the loop writes into them."""
    training = Training()
    for _ in range(3):
        for records in DataLoader(Records(), 8, shuffle=True, collate_fn=list):
            training.step(torch.stack([record["row"] / (1 + record["seen"]) for record in records]))
            for record in records:
                record["seen"] += 1
    training.finish()


class Blocks(Dataset):
    storage = ROWS.clone()

    def __len__(self):
        return 20

    def __getitem__(self, index):
        wait()
        return self.storage[8 * index : 8 * index + 8]


def views_edited_by_loop():
    """Batches are views of the dataset's own storage, and the loop edits them in place."""
    training = Training()
    for _ in range(3):
        for batch in DataLoader(Blocks(), batch_size=None, shuffle=True):
            training.step(batch)
            batch.mul_(0.9)
    training.finish()


class Tagged(torch.Tensor):
    pass


class Tagging(Rows):
    def row(self, index):
        row = ROWS[index].clone().as_subclass(Tagged)
        row.tag = index
        return row


def tensor_subclass():
    """Examples are of a subclass of Tensor with an attribute that the loop reads."""
    training = Training()
    for _ in range(2):
        for rows in DataLoader(Tagging(), 8, shuffle=True, collate_fn=list):
            training.step(torch.stack([row.as_subclass(torch.Tensor) * (1 + row.tag / 100) for row in rows]))
    training.finish()


def pinned_or_not():
    """The loop scales batches by whether they are pinned and whether they lie in shared memory."""
    training = Training()
    for _ in range(2):
        for batch in DataLoader(Rows(), 8, shuffle=True):
            training.step(batch * (1 + batch.is_shared() + 2 * batch.is_pinned()))
    training.finish()


if __name__ == "__main__":
    chosen(globals())
