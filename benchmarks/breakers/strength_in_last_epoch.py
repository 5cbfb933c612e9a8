"""The strength of an augmentation follows a schedule in the last epoch only.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Strength:
    value = 1.0


class Augmented(Rows):
    strength = Strength()

    def row(self, index):
        return ROWS[index] * self.strength.value


training = Training()
loader = DataLoader(Augmented(), 8, shuffle=True)
for epoch in range(4):
    for step, batch in enumerate(loader):
        training.step(batch)
        if epoch == 3:
            Strength.value = 1 - step / 40
training.finish()
