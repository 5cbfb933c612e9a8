"""The loader is deep-copied and pickled between epochs, as trainers do for evaluation.

Remedies: data.workers data.threads data.cache
"""

import copy
import pickle

from _training import Rows, Training
from torch.utils.data import DataLoader

training = Training()
loader = DataLoader(Rows(), 8, shuffle=True)
for _ in range(3):
    for batch in loader:
        training.step(batch)
    loader = pickle.loads(pickle.dumps(copy.deepcopy(loader)))
training.finish()
