"""The loop doubles the batch size of its batch sampler in the middle of a pass.

Remedies: data.workers data.threads data.cache
"""

from _training import Rows, Training
from torch.utils.data import DataLoader

training = Training()
loader = DataLoader(Rows(), 4, shuffle=True)
for _ in range(2):
    loader.batch_sampler.batch_size = 4
    for step, batch in enumerate(loader):
        training.step(batch)
        if step == 9:
            loader.batch_sampler.batch_size = 8
training.finish(training.num_steps)
