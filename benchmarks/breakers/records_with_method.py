"""A list of 160 records that the script made; their method goes by a variable of the module that the loop sets.

Remedies: data.workers data.threads data.cache
"""

from _training import NUM_ROWS, ROWS, Training, wait
from torch.utils.data import DataLoader

SCALE = 1.0


class Record:
    def __init__(self, place):
        self.place = place

    def load(self):
        wait()
        return ROWS[self.place] * SCALE


class Loaded:
    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        return self.records[index].load()


training, loader = Training(), DataLoader(Loaded([Record(i) for i in range(NUM_ROWS)]), 8, shuffle=True)
for _ in range(4):
    for batch in loader:
        training.step(batch)
        SCALE = 1.0 + training.num_steps // 7
training.finish()
