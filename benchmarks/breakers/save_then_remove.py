"""A checkpoint is removed right after the save because a better one is there, and must stay away.

Remedies: checkpoint.async
"""

import os
import shutil
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from _training import Training

folder = tempfile.mkdtemp()
training, best = Training(), 1e9
for step in range(10):
    loss = training.step(torch.full((4, 8), 1.0 + step % 3))
    dcp.save({"model": training.model.state_dict()}, checkpoint_id=f"{folder}/{step}")
    if loss >= best:
        shutil.rmtree(f"{folder}/{step}")
    best = min(best, loss)
training.finish(sorted(os.listdir(folder)))
