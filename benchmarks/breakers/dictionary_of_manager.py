"""Rows are scaled by a dictionary in another process, which the loop writes to as well.

Remedies: data.workers data.threads data.cache
"""

import multiprocessing

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Scaled(Rows):
    def __init__(self, scales):
        self.scales = scales

    def row(self, index):
        return ROWS[index] * self.scales.get(index, 1.0)


def main():
    dataset, training = Scaled(multiprocessing.Manager().dict()), Training()
    for _ in range(3):
        for batch in DataLoader(dataset, 8, shuffle=True):
            loss = training.step(batch)
            if training.num_steps > 20:
                dataset.scales[training.num_steps * 7 % 160] = 1 + loss
    training.finish()


if __name__ == "__main__":
    main()
