"""A replay buffer of more than 128 episodes, fewer than rows; the loop edits the list inside some of them.

Remedies: data.workers data.threads data.cache
"""

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Episode:
    def __init__(self):
        self.rewards = [1.0] * 5


class Replayed(Rows):
    def __init__(self):
        self.episodes = [Episode() for _ in range(140)]

    def row(self, index):
        return ROWS[index] * self.episodes[index % 140].rewards[index % 5]


dataset, training = Replayed(), Training()
for _ in range(3):
    for batch in DataLoader(dataset, 8, shuffle=True):
        training.step(batch)
        for number, episode in enumerate(dataset.episodes) if training.num_steps % 10 == 0 else ():
            if number > 10 and number % 4:
                episode.rewards[:] = [reward * 1.1 for reward in episode.rewards]
training.finish()
