"""A list of 400 record objects; the loop gives a few of them another target in place.

Remedies: data.cache data.workers data.threads
"""

from dataclasses import dataclass

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


@dataclass
class Record:
    row: int
    scale: float


class Records(Rows):
    def __init__(self):
        self.records = [Record(k % 160, 1.0) for k in range(400)]

    def __len__(self):
        return 400

    def row(self, index):
        record = self.records[index]
        return ROWS[record.row] * record.scale


training, data = Training(), Records()
loader = DataLoader(data, 8, shuffle=True)
for _ in range(2):
    for step, batch in enumerate(loader):
        training.step(batch)
        data.records[(step * 6 + 7) % 396 // 6 * 6 + 1].scale = 0.5
training.finish()
