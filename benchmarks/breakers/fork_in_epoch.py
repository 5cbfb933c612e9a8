"""The script forks in mid-epoch; the child reads on from the same iterator and exits.

Remedies: data.workers data.threads data.cache
"""

import os

from _training import Rows, Training
from torch.utils.data import DataLoader

training = Training()
for _ in range(2):
    batches = iter(DataLoader(Rows(), 8, shuffle=True))
    for step, batch in enumerate(batches):
        training.step(batch)
        if step == 4:
            child = os.fork()
            if child == 0:
                for rest in batches:
                    training.step(rest)
                os._exit(int(abs(training.loss) * 1e4) % 200)
            training.loss += os.waitpid(child, 0)[1]
            training.step(batch * (1 + os.waitstatus_to_exitcode(int(training.loss))) / 100)
training.finish()
