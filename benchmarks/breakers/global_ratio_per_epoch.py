"""The loop sets a global of the module between epochs: workers that are kept hold the old one.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

strength = 0.0


class Augmented(Rows):
    def row(self, index):
        return ROWS[index] * (1 + strength)


training = Training()
loader = DataLoader(Augmented(), 8, shuffle=True)
for epoch in range(3):
    strength = epoch / 4
    for batch in loader:
        training.step(batch)
training.finish()
